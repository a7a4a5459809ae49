"""The file format: numpy reads it, every byte of it is guarded, and no dtype loses a bit."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from storage_kit import PAGE_BYTES, SPACE, make_keys, make_links, make_page

from sgl_jax.srt.mem_cache.hicache.errors import StorageCorruptionError
from sgl_jax.srt.mem_cache.hicache.page_key import (
    CHAIN_START,
    layout_digest,
    namespace_digest,
)
from sgl_jax.srt.mem_cache.hicache.storage.checksum import CHECKSUMS, DEFAULT_CHECKSUM, crc32
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import (
    MAX_PAGE_BYTES,
    VERSION_1,
    PageFileFormat,
    npy_header,
)
from sgl_jax.srt.mem_cache.hicache.storage.page_info import describe, read_header
from sgl_jax.srt.mem_cache.hicache.types import PageLink

KEY = make_keys(1)[0]
PAGE = make_page(1)


def encoded(file_format: PageFileFormat | None = None) -> bytes:
    file_format = PageFileFormat(SPACE) if file_format is None else file_format
    return b"".join(file_format.encode(KEY, [PAGE.data]))


def verify(data: bytes, file_format: PageFileFormat | None = None) -> None:
    file_format = PageFileFormat(SPACE) if file_format is None else file_format
    split = file_format.header_bytes
    file_format.verify(KEY, data[:split], np.frombuffer(data, np.uint8)[split:])


def test_numpy_reads_a_page_file(tmp_path: Path) -> None:
    path = tmp_path / "page.npy"
    path.write_bytes(encoded())
    array = np.load(path, allow_pickle=False)
    assert array.shape == (1,)
    record = array[0]
    assert record["magic"] == b"HICACHEP"
    assert record["page_key"].tobytes() == KEY
    assert record["namespace"].tobytes() == namespace_digest(SPACE)
    assert record["kv_dtype"] == b"bfloat16"
    assert record["model_id"] == b"org/model"
    assert record["page_size"] == 4
    assert record["payload_bytes"] == PAGE_BYTES
    np.testing.assert_array_equal(record["payload"], PAGE)


def test_numpy_can_write_the_same_file() -> None:
    """Our header says what numpy's own would say of the same array."""
    array = np.load(io.BytesIO(encoded()), allow_pickle=False)
    written = io.BytesIO()
    np.save(written, array, allow_pickle=False)
    again = np.load(io.BytesIO(written.getvalue()), allow_pickle=False)
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes()


@pytest.mark.parametrize("payload_bytes", [1, 9, 10, 99, 12345, 4 << 20, MAX_PAGE_BYTES])
def test_the_payload_is_aligned(payload_bytes: int) -> None:
    assert len(npy_header(payload_bytes)) % 64 == 0
    small = PageFileFormat(replace(SPACE, page_bytes=payload_bytes))
    assert small.header_bytes % 64 == 0
    assert small.file_bytes == small.header_bytes + payload_bytes


def test_every_flipped_bit_is_found() -> None:
    data = encoded()
    verify(data)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(StorageCorruptionError):
            verify(bytes(damaged))


def test_a_refusal_says_what_was_expected_and_found() -> None:
    file_format = PageFileFormat(SPACE)
    other_key = make_keys(2)[1]
    header = encoded()[: file_format.header_bytes]
    with pytest.raises(
        StorageCorruptionError, match=f"expected {other_key.hex()}, found {KEY.hex()}"
    ):
        file_format.verify(other_key, header, PAGE)
    with pytest.raises(StorageCorruptionError, match="checksum: expected 0x"):
        file_format.verify(KEY, header, np.zeros_like(PAGE))
    dtype = PageFileFormat(replace(SPACE, kv_dtype="float16"))
    with pytest.raises(StorageCorruptionError, match="namespace: expected"):
        dtype.verify(KEY, header, PAGE)
    bigger = PageFileFormat(replace(SPACE, page_bytes=PAGE_BYTES + 1))
    with pytest.raises(StorageCorruptionError, match="numpy header"):
        bigger.verify(KEY, header, make_page(1, PAGE_BYTES + 1))


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, model_id="x"),
        replace(SPACE, model_version="x"),
        replace(SPACE, page_size=8),
        replace(SPACE, kv_dtype="float16"),
        replace(SPACE, layout_id="x"),
    ],
)
def test_a_file_of_another_namespace_is_refused(other: object) -> None:
    assert isinstance(other, type(SPACE))
    foreign = PageFileFormat(other)
    with pytest.raises(StorageCorruptionError):
        verify(encoded(foreign))
    assert foreign.is_own(encoded(foreign)[: foreign.header_bytes])
    assert not PageFileFormat(SPACE).is_own(encoded(foreign)[: foreign.header_bytes])


def test_either_checksum_is_readable_where_both_are_known() -> None:
    for kind in CHECKSUMS:
        verify(encoded(PageFileFormat(SPACE, kind)))


def test_a_checksum_that_cannot_be_computed_here_is_refused() -> None:
    """A process without xxhash rejects such a page and writes it again with crc32, which both sides can read."""
    plain = PageFileFormat(SPACE, "crc32", {"crc32": crc32})
    verify(encoded(plain), plain)
    with pytest.raises(StorageCorruptionError, match="'other' is not one of"):
        verify(encoded(PageFileFormat(SPACE, "other", {"other": crc32})), plain)


def test_a_format_that_no_file_can_hold_is_refused() -> None:
    for page_bytes in (0, MAX_PAGE_BYTES + 1):
        with pytest.raises(ValueError, match="page_bytes"):
            PageFileFormat(replace(SPACE, page_bytes=page_bytes))
    with pytest.raises(ValueError, match="checksum 'md5'"):
        PageFileFormat(SPACE, "md5")


LINKS = [None, PageLink(None, 0), PageLink(make_keys(2)[1], 1), PageLink(KEY, 2**40)]


@pytest.mark.parametrize("link", LINKS)
def test_a_link_is_kept_and_does_not_change_the_page(tmp_path: Path, link: PageLink | None) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    assert storage.set_linked([KEY], [[PAGE]], [link]) == [True]
    np.testing.assert_array_equal(storage.get([KEY])[0], PAGE)
    assert describe(storage.path_of(KEY)).link == link
    assert read_header(str(storage.path_of(KEY))).link == link


def test_a_link_can_be_read_with_numpy_alone(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    keys = make_keys(2)
    storage.set_linked(keys, [[PAGE]] * 2, make_links(keys))
    first, second = (np.load(storage.path_of(key), allow_pickle=False)[0] for key in keys)
    assert first["parent_key"].tobytes() == CHAIN_START
    assert second["parent_key"].tobytes() == keys[0]
    assert (first["page_index"], second["page_index"]) == (0, 1)
    assert first["layout_id"] == SPACE.layout_id.encode()


def test_a_damaged_link_is_found() -> None:
    file_format = PageFileFormat(SPACE)
    whole = b"".join(file_format.encode(KEY, [PAGE.data], PageLink(KEY, 7)))
    verify(whole)
    start = whole.index(KEY, whole.index(KEY) + 1)
    for position in range(start, start + 40):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        with pytest.raises(StorageCorruptionError, match="header_crc32"):
            verify(bytes(damaged))


def test_links_must_pair_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 keys for 2 links"):
        LocalFileStorage(tmp_path, SPACE).set_linked([KEY], [[PAGE]], [None, None])


def test_files_of_the_first_format_are_read_for_ever(tmp_path: Path) -> None:
    """As they were written before there were links: same page, other record."""
    old_format = PageFileFormat(SPACE, version=VERSION_1)
    data = encoded(old_format)
    assert np.load(io.BytesIO(data), allow_pickle=False)[0]["format_version"] == 1
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(make_keys(2), [[PAGE]] * 2)
    path = storage.path_of(KEY)
    path.write_bytes(data)
    assert len(data) != storage.path_of(make_keys(2)[1]).stat().st_size
    assert storage.exists([KEY]) == [True]
    np.testing.assert_array_equal(storage.get([KEY])[0], PAGE)
    assert list(storage.iter_keys()) == sorted(make_keys(2))
    storage.check_invariants()
    info = describe(path)
    assert (info.format_version, info.link, info.layout_id) == (1, None, "")
    inode = path.stat().st_ino
    assert storage.set([KEY], [[PAGE]]) == [True]
    assert path.stat().st_ino == inode, "it was written again"
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert storage.get([KEY]) == [None], position


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.bfloat16,
        np.float32,
        np.float16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.int8,
        np.float64,
        np.bool_,
    ],
)
def test_a_round_trip_keeps_every_bit(
    tmp_path: Path, rng: np.random.Generator, dtype: type
) -> None:
    """Random bits hold NaNs with payloads, negative zeroes and denormals; all must come back as they were."""
    bits = rng.integers(0, 256, 4 * 2 * 8 * np.dtype(dtype).itemsize, dtype=np.uint8)
    array = bits.view(dtype).reshape(4, 2, 8)
    space = replace(SPACE, kv_dtype=np.dtype(dtype).name, page_bytes=array.nbytes)
    storage = LocalFileStorage(tmp_path, space)
    assert storage.set([KEY], [[array]]) == [True]
    (found,) = storage.get([KEY])
    assert found is not None
    back = found.view(dtype).reshape(array.shape)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes() == bits.tobytes()


def test_describe_needs_no_namespace(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set([KEY], [[PAGE]])
    info = describe(storage.path_of(KEY))
    assert info.page_key == KEY
    assert info.namespace_digest == namespace_digest(SPACE)
    assert info.layout_digest == layout_digest(SPACE.layout_id)
    assert (info.model_id, info.kv_dtype, info.page_size) == ("org/model", "bfloat16", 4)
    assert info.payload_bytes == PAGE_BYTES
    assert info.checksum_kind == DEFAULT_CHECKSUM
    assert info.file_bytes == storage.path_of(KEY).stat().st_size


def test_describe_finds_every_flipped_bit(tmp_path: Path) -> None:
    data, path = encoded(), tmp_path / "page.npy"
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(StorageCorruptionError):
            describe(path)


def npy_of(descr: object, shape: tuple[int, ...], tail: bytes = b"") -> bytes:
    body = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body + tail


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage" * 100,
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
        npy_of("<f4", (10**12,)),
        npy_of("|O", (1,), bytes(4096)),
        npy_of([("magic", "|S8")], (1,), bytes(4096)),
        npy_of("<f4", (1000,), bytes(4000)),
        b"\x93NUMPY\x02\x00" + bytes(4096),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70000,
        encoded()[:-1],
        encoded() + b"\0",
        encoded()[:700],
    ],
    ids=lambda data: re.sub(r"\W+", "_", repr(data[:12])),
)
def test_describe_refuses_what_is_no_page_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "page.npy"
    path.write_bytes(data)
    with pytest.raises(StorageCorruptionError):
        describe(path)
