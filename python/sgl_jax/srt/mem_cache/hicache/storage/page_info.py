"""Reads any page file on its own, without knowing its namespace: for tools, checks and people.

The payload goes through `np.load`, so it is read independently of the code that wrote the file. Not on the serving
path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import StorageCorruptionError
from ..types import PageKey, PageLink
from .checksum import CHECKSUMS
from .page_file import (
    MAGIC,
    MAX_PAGE_BYTES,
    VERSION_1,
    VERSIONS,
    RecordVersion,
    header_crc_holds,
    npy_header,
    unpack_link,
)

_NPY_PREFIX_BYTES = 10  # magic, version, length of the rest
_MOST_HEADER_BYTES = 4096
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class PageFileInfo:
    """What a page file says about itself; the header's checksum held when this was made.

    `link` is where the page stands in its chain, None where the writer did not know or the format is the first.
    `layout_id` is cut to fit the file, and empty in the first format.
    """

    format_version: int
    page_key: PageKey
    namespace_digest: bytes
    layout_digest: bytes
    model_id: str
    kv_dtype: str
    layout_id: str
    page_size: int
    payload_bytes: int
    checksum_kind: str
    checksum: int
    link: PageLink | None
    file_bytes: int


def describe(path: Path) -> PageFileInfo:
    """Read and check one page file of any namespace, header and payload. Never follows a symlink, never blocks on a
    FIFO, never unpickles.

    Memory is bounded by the file's own size. Raises StorageCorruptionError if it is not a whole
    page file, OSError if it cannot be opened.
    """
    return describe_entry(str(path))


def describe_entry(name: str, folder_fd: int | None = None) -> PageFileInfo:
    """As `describe`, for an entry of an open folder."""
    with _open_regular(name, folder_fd) as (fd, file_bytes):
        info = _parse(name, os.pread(fd, _MOST_HEADER_BYTES, 0), file_bytes)
        _check_payload(name, fd, info)
    return info


def read_header(name: str, folder_fd: int | None = None) -> PageFileInfo:
    """As `describe_entry`, without a look at the payload: a few kilobytes are read."""
    with _open_regular(name, folder_fd) as (fd, file_bytes):
        return _parse(name, os.pread(fd, _MOST_HEADER_BYTES, 0), file_bytes)


@contextmanager
def _open_regular(name: str, folder_fd: int | None) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a regular file."""
    fd = os.open(name, _OPEN_FLAGS, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StorageCorruptionError(f"{name}: not a regular file")
        yield fd, status.st_size
    finally:
        os.close(fd)


def _parse(name: str, start: bytes, file_bytes: int) -> PageFileInfo:
    """What the header says, from the file's first bytes. Raises StorageCorruptionError unless it is exactly the header
    of one record of ours that fills the file.
    """
    npy_bytes = _NPY_PREFIX_BYTES + int.from_bytes(start[8:_NPY_PREFIX_BYTES], "little")
    version = _version(name, start[npy_bytes : npy_bytes + 12])
    header = start[: npy_bytes + version.record.size]
    payload_bytes = file_bytes - len(header)
    if len(header) != npy_bytes + version.record.size or not 1 <= payload_bytes <= MAX_PAGE_BYTES:
        raise StorageCorruptionError(f"{name}: {file_bytes} bytes in all are no page file")
    if header[:npy_bytes] != npy_header(payload_bytes, version):
        raise StorageCorruptionError(
            f"{name}: the numpy header is not that of a page of {payload_bytes} bytes"
        )
    if not header_crc_holds(header):
        raise StorageCorruptionError(f"{name}: the header is damaged")
    info = _info(version, header[npy_bytes:], file_bytes)
    if info.payload_bytes != payload_bytes:
        raise StorageCorruptionError(
            f"{name}: {payload_bytes} bytes of payload, said to be {info.payload_bytes}"
        )
    return info


def _version(name: str, start: bytes) -> RecordVersion:
    number = int.from_bytes(start[8:], "little")
    for version in VERSIONS:
        if start[:8] == MAGIC and number == version.number:
            return version
    known = ", ".join(str(version.number) for version in VERSIONS)
    raise StorageCorruptionError(f"{name}: not a page file of format {known}")


def _info(version: RecordVersion, record: bytes, file_bytes: int) -> PageFileInfo:
    (_, number, kind, checksum, key, namespace, layout, page_size, payload_bytes, dtype, model) = (
        fields := version.record.unpack(record)
    )[:11]
    parent_key, page_index, layout_id = (
        (b"", 0, b"") if version is VERSION_1 else (fields[11], fields[12], fields[13])
    )
    return PageFileInfo(
        format_version=number,
        page_key=PageKey(key),
        namespace_digest=namespace,
        layout_digest=layout,
        model_id=_text(model),
        kv_dtype=_text(dtype),
        layout_id=_text(layout_id),
        page_size=page_size,
        payload_bytes=payload_bytes,
        checksum_kind=kind.rstrip(b"\0").decode("latin1"),
        checksum=checksum,
        link=None if version is VERSION_1 else unpack_link(parent_key, page_index),
        file_bytes=file_bytes,
    )


def _check_payload(name: str, fd: int, info: PageFileInfo) -> None:
    if info.checksum_kind not in CHECKSUMS:
        raise StorageCorruptionError(
            f"{name}: checksum {info.checksum_kind!r} is not one of {sorted(CHECKSUMS)}"
        )
    try:
        with os.fdopen(os.dup(fd), "rb") as file:
            record = np.load(file, allow_pickle=False)[0]
    except (ValueError, EOFError) as error:
        raise StorageCorruptionError(f"{name}: not a page file ({error})") from error
    payload: npt.NDArray[np.uint8] = np.ascontiguousarray(record["payload"])
    if CHECKSUMS[info.checksum_kind]([payload.data]) != info.checksum:
        raise StorageCorruptionError(f"{name}: the payload is damaged")


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "replace")
