"""Sizes as people write them."""

from __future__ import annotations

import pytest

from sgl_jax.srt.mem_cache.hicache.byte_size import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10GiB", 10 * 2**30),
        ("10 gib", 10 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5k", 1536),
        ("0.3b", 0),
        (" 2T ", 2 * 2**40),
        ("9007199254740993", 9007199254740993),  # no float holds it
    ],
)
def test_forms_that_are_taken(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "10 Gi B", "10GiBs", "1,000", "inf", "1."]
)
def test_forms_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="10GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (int(3.21 * 2**30), "3.21 GiB"),
        (5000 * 2**40, "5,000.00 TiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_unit(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
