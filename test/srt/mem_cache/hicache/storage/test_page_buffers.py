"""Memory of pages that were read is used again, and never while anybody can still see it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from storage_kit import PAGE_BYTES, SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.storage import page_buffers
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_buffers import ALIGNMENT, PageBuffers

NUM_BYTES = 4096


def address_of(page: np.ndarray) -> int:
    return page.ctypes.data


def test_a_buffer_is_aligned_writable_and_of_the_right_size() -> None:
    buffers = PageBuffers(NUM_BYTES - 1)
    pages = [buffers.take() for _ in range(5)]
    for page in pages:
        assert (page.dtype, page.shape) == (np.uint8, (NUM_BYTES - 1,))
        assert page.flags.writeable
        assert address_of(page) % ALIGNMENT == 0
    assert len({address_of(page) for page in pages}) == 5


def test_memory_is_used_again_when_its_page_is_gone() -> None:
    buffers = PageBuffers(NUM_BYTES)
    page = buffers.take()
    address = address_of(page)
    assert address_of(buffers.take()) != address
    assert buffers.num_idle == 1
    del page
    assert buffers.num_idle == 2
    assert address_of(buffers.take()) == address


HOLDERS: dict[str, Callable[[np.ndarray], object]] = {
    "slice": lambda page: page[7:9],
    "words": lambda page: page[64:128].view(np.uint32).reshape(4, 4),
    "read-only view of a view": lambda page: np.broadcast_to(page[1:][1:], (2, NUM_BYTES - 2)),
    "memoryview": lambda page: memoryview(page)[5:6],
    "frombuffer": lambda page: np.frombuffer(page.data, np.uint16),
    "jax array": lambda page: jax.device_put(page, jax.devices()[0]),
    "numpy of a jax array": lambda page: np.asarray(jax.device_put(page, jax.devices()[0])),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_whatever_was_made_of_a_page_keeps_its_memory(hold: Callable[[np.ndarray], object]) -> None:
    buffers = PageBuffers(NUM_BYTES)
    page = buffers.take()
    page[:] = 7
    held, address = hold(page), address_of(page)
    jax.block_until_ready(held)
    copied = not np.may_share_memory(np.asarray(held), page)
    assert not copied or jax.default_backend() != "cpu", "nothing to see here if it is a copy"
    del page
    gc.collect()
    for _ in range(3):
        other = buffers.take()
        other[:] = 99
        assert copied or address_of(other) != address
    assert (np.asarray(held).view(np.uint8) == 7).all()
    del held, other
    gc.collect()
    assert address in {address_of(page) for page in [buffers.take() for _ in range(3)]}


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_buffers, "MAX_IDLE_BYTES", 3 * NUM_BYTES)
    buffers = PageBuffers(NUM_BYTES)
    pages = [buffers.take() for _ in range(10)]
    assert buffers.num_idle == 0
    pages.clear()
    assert buffers.num_idle == 3
    large = PageBuffers(3 * NUM_BYTES + 1)
    large.take()
    assert large.num_idle == 0


def test_threads_never_share_a_buffer(seed: int) -> None:
    buffers = PageBuffers(NUM_BYTES)

    def worker(number: int) -> int:
        dice, kept, faults = random.Random(seed + number), {}, 0
        for step in range(400):
            page = buffers.take()
            page[:] = mark = (number * 61 + step) % 256
            kept[step] = (page[dice.randrange(NUM_BYTES - 1) :], mark)
            if len(kept) > 8:
                view, wanted = kept.pop(dice.choice(list(kept)))
                faults += not (view == wanted).all()
        return faults + sum(not (view == wanted).all() for view, wanted in kept.values())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker, range(4))) == [0] * 4


def test_pages_that_are_kept_outlive_those_read_after_them(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    keys = make_keys(12)
    storage.set(keys, [[make_page(i)] for i in range(12)])
    kept: dict[int, np.ndarray] = {}
    addresses = set()
    for _ in range(200):
        chosen = rng.choice(12, 4, replace=False)
        for i, page in zip(chosen, storage.get([keys[i] for i in chosen]), strict=True):
            assert page is not None
            assert page.shape == (PAGE_BYTES,)
            addresses.add(address_of(page))
            kept[int(i)] = page
        for i in rng.choice(12, 2, replace=False):
            kept.pop(int(i), None)
        for i, page in kept.items():
            np.testing.assert_array_equal(page, make_page(i))
    assert len(addresses) <= 12 + 5, "memory is not used again"
