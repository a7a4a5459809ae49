"""The device pool is measured against what there is, before it is allocated."""

from __future__ import annotations

import re

import pytest

from sgl_jax_hicache.engine.engine_args import ArgumentError
from sgl_jax_hicache.engine.pool_budget import DeviceRoom, check_device_pool, read_device_room

GIB = 1 << 30
PAGE = 16
BYTES_PER_TOKEN = 1 << 20  # a page is 16 MiB, so 64 pages are one GiB
WEIGHTS = GIB
ROOM = DeviceRoom(3 * GIB, "3.30 GiB free on a thing")  # 2 GiB, 128 pages, beside the weights


def _check(tokens: int, room: DeviceRoom | None = ROOM) -> None:
    check_device_pool(tokens, PAGE, BYTES_PER_TOKEN, WEIGHTS, room)


def test_the_largest_pool_that_fits_is_named_and_fits() -> None:
    with pytest.raises(ArgumentError) as caught:
        _check(100_000_000)
    message = str(caught.value)
    assert message.startswith(
        "--max-total-tokens 100000000 asks for a device pool of 97,656.27 GiB"
    )
    assert "2.00 GiB can be used (3.30 GiB free on a thing" in message
    found = re.search(r"use --max-total-tokens (\d+) or less", message)
    assert found is not None
    largest = int(found[1])
    assert largest == 127 * PAGE, "one page is for padding"
    _check(largest)
    with pytest.raises(ArgumentError):
        _check(largest + PAGE)


def test_no_room_for_a_page_is_told_without_a_number() -> None:
    with pytest.raises(ArgumentError, match="not even one page fits"):
        _check(PAGE, DeviceRoom(WEIGHTS, "here"))


def test_a_device_that_does_not_tell_is_believed() -> None:
    _check(100_000_000, None)


def test_the_reading_of_this_machine() -> None:
    room = read_device_room()
    assert room is not None
    assert room.budget_bytes > 0
    assert "free in" in room.source
