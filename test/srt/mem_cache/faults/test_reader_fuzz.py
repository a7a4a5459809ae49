"""The page-file reader against files that somebody made up: the page, bit for bit, or a miss; never an error, never
memory that the file's own size does not explain."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from soak_figures import Figures
from storage_kit import PAGE_BYTES, SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.errors import StorageCorruptionError
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import VERSIONS, PageFileFormat
from sgl_jax.srt.mem_cache.hicache.storage.page_info import describe, read_header

KEY, OTHER_KEY = make_keys(2)
PAGE, OTHER_PAGE = make_page(1), make_page(2)
FORMATS = [PageFileFormat(SPACE, version=version) for version in VERSIONS]
FILES = [
    b"".join(file_format.encode(key, [page.data]))
    for file_format in FORMATS
    for key, page in ((KEY, PAGE), (OTHER_KEY, OTHER_PAGE))
]
EXTREMES = [bytes(8), b"\xff" * 8, b"\0\0\0\0\0\0\0\x80", b"\xff" * 7 + b"\x7f", b"\x01" + bytes(7)]
MAX_FILE_BYTES = 1 << 16
MAX_MEMORY_BYTES = 1 << 20

Edit = Callable[[bytearray, float, bytes], None]


def _place(data: bytearray, where: float) -> int:
    return int(where * len(data))


def overwrite(data: bytearray, where: float, piece: bytes) -> None:
    at = _place(data, where)
    data[at : at + len(piece)] = piece


def insert(data: bytearray, where: float, piece: bytes) -> None:
    at = _place(data, where)
    data[at:at] = piece


def remove(data: bytearray, where: float, piece: bytes) -> None:
    at = _place(data, where)
    del data[at : at + len(piece)]


def truncate(data: bytearray, where: float, _piece: bytes) -> None:
    del data[_place(data, where) :]


def flip(data: bytearray, where: float, piece: bytes) -> None:
    if data:
        data[min(_place(data, where), len(data) - 1)] ^= piece[0] if piece and piece[0] else 1


def correct_header_sum(data: bytearray, _where: float, _piece: bytes) -> None:
    """So that the header's checksum does not hide what is behind it."""
    for file_format in FORMATS:
        end = file_format.header_bytes
        if len(data) == file_format.file_bytes:
            data[end - 4 : end] = zlib.crc32(data[: end - 4]).to_bytes(4, "little")


EDITS: list[Edit] = [overwrite, insert, remove, truncate, flip, correct_header_sum]
pieces = st.one_of(st.sampled_from(EXTREMES), st.binary(min_size=1, max_size=40))
edits = st.tuples(st.sampled_from(EDITS), st.floats(0, 1, exclude_max=True), pieces)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A real file, edited; a splice of two; a numpy file that is no page; or anything."""
    kind = draw(st.sampled_from(["edited", "edited", "edited", "splice", "npy", "anything"]))
    if kind == "anything":
        return draw(st.binary(max_size=4000))
    if kind == "npy":
        header = draw(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(2000)
    data = bytearray(draw(st.sampled_from(FILES)))
    if kind == "splice":
        other, cut = draw(st.sampled_from(FILES)), draw(st.floats(0, 1))
        data[int(cut * len(data)) :] = other[int(cut * len(other)) :]
    for edit, where, piece in draw(st.lists(edits, max_size=4)):
        edit(data, where, piece)
    return bytes(data[:MAX_FILE_BYTES])


def read(root: Path, data: bytes) -> None:
    """What every reader makes of one file under the key's name."""
    storage = LocalFileStorage(root, SPACE)
    path = storage.path_of(KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    tracemalloc.start()
    try:
        for reader in (describe, read_header):
            try:
                info = reader(path)
            except StorageCorruptionError:
                continue
            assert info.file_bytes == len(data)
            assert info.payload_bytes == PAGE_BYTES
        there = storage.exists([KEY]) == [True]
        (found,) = storage.get([KEY])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_MEMORY_BYTES
    if found is None:
        assert not os.path.lexists(path), "it is still in the way"
        assert storage.set([KEY], [[PAGE]]) == [True]
        (found,) = storage.get([KEY])
    else:
        assert there
    assert found is not None
    np.testing.assert_array_equal(found, PAGE)
    storage.check_invariants()


def fuzz(root: Path, max_examples: int, seed: int | None) -> None:
    """That many files. Without a seed the same ones each time."""

    @hypothesis.settings(
        max_examples=max_examples, deadline=None, database=None, derandomize=seed is None
    )
    @hypothesis.given(files())
    def every_file(data: bytes) -> None:
        read(root, data)

    (every_file if seed is None else hypothesis.seed(seed)(every_file))()


def test_no_file_is_ever_misread_or_raises(tmp_path: Path) -> None:
    fuzz(tmp_path / "root", 250, None)


@pytest.mark.parametrize("index", range(len(FILES)))
def test_the_real_files_are_what_the_fuzzing_starts_from(tmp_path: Path, index: int) -> None:
    """Of either format; the page of another key is a miss."""
    storage = LocalFileStorage(tmp_path, SPACE)
    path = storage.path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(FILES[index])
    (found,) = storage.get([KEY])
    if index % 2:
        assert found is None
    else:
        np.testing.assert_array_equal(found, PAGE)


@pytest.mark.soak
def test_many_more_files(tmp_path: Path, seed: int, soak_seconds: float, figures: Figures) -> None:
    dice, end_s = random.Random(seed), time.monotonic() + soak_seconds
    while time.monotonic() < end_s:
        fuzz(tmp_path / "root", 1000, dice.getrandbits(32))
        figures.add(operations=1000, damaged_files=1000)
