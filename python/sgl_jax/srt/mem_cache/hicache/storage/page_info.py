"""Reads any page file on its own, without knowing its namespace: for tools, checks and people.

It goes through `np.load`, so it is independent of the code that wrote the file, and it is not on
the serving path.
"""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import StorageCorruptionError
from ..types import PageKey
from .checksum import CHECKSUMS
from .page_file import FORMAT_VERSION, MAGIC, MAX_PAGE_BYTES, RECORD_BYTES, npy_header

_NPY_PREFIX_BYTES = 10  # magic, version, length of the rest


@dataclass(frozen=True)
class PageFileInfo:
    """What a page file says about itself; every checksum in it held when this was made."""

    page_key: PageKey
    namespace_digest: bytes
    layout_digest: bytes
    model_id: str
    kv_dtype: str
    page_size: int
    payload_bytes: int
    checksum_kind: str
    checksum: int
    file_bytes: int


def describe(path: Path) -> PageFileInfo:
    """Read and check one page file of any namespace. Never follows a symlink, never blocks on a
    FIFO, never unpickles.

    Memory is bounded by the file's own size. Raises StorageCorruptionError if it is not a whole
    page file, OSError if it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StorageCorruptionError(f"{path}: not a regular file")
        try:
            header_bytes = _check_shape(file, status.st_size)
            record = np.load(file, allow_pickle=False)[0]
            file.seek(0)
            header = file.read(header_bytes)
        except (ValueError, EOFError) as error:
            raise StorageCorruptionError(f"{path}: not a page file ({error})") from error
    _check_sums(path, record, header)
    return _info(record, status.st_size)


def _check_shape(file: IO[bytes], file_bytes: int) -> int:
    """Bytes before the payload. Raises ValueError unless the numpy header is that of one record of
    ours that fills the file; only then is numpy's own, more lenient, parser let near it.
    """
    start = file.read(_NPY_PREFIX_BYTES)
    npy_bytes = _NPY_PREFIX_BYTES + int.from_bytes(start[-2:], "little")
    payload_bytes = file_bytes - npy_bytes - RECORD_BYTES
    if not 1 <= payload_bytes <= MAX_PAGE_BYTES:
        raise ValueError(f"{file_bytes} bytes in all leave {payload_bytes} for the payload")
    if start + file.read(npy_bytes - len(start)) != npy_header(payload_bytes):
        raise ValueError(f"the numpy header is not that of a page of {payload_bytes} bytes")
    file.seek(0)
    return file_bytes - payload_bytes


def _check_sums(path: Path, record: Any, header: bytes) -> None:
    kind = _kind(record)
    if bytes(record["magic"]) != MAGIC or record["format_version"] != FORMAT_VERSION:
        raise StorageCorruptionError(f"{path}: not format {FORMAT_VERSION} of a page file")
    if zlib.crc32(header[:-4]) != record["header_crc32"]:
        raise StorageCorruptionError(f"{path}: the header is damaged")
    if kind not in CHECKSUMS:
        raise StorageCorruptionError(f"{path}: checksum {kind!r} is not one of {sorted(CHECKSUMS)}")
    payload: npt.NDArray[np.uint8] = np.ascontiguousarray(record["payload"])
    if CHECKSUMS[kind]([payload.data]) != record["checksum"]:
        raise StorageCorruptionError(f"{path}: the payload is damaged")


def _info(record: Any, file_bytes: int) -> PageFileInfo:
    return PageFileInfo(
        page_key=PageKey(record["page_key"].tobytes()),
        namespace_digest=record["namespace"].tobytes(),
        layout_digest=record["layout"].tobytes(),
        model_id=bytes(record["model_id"]).decode("utf-8", "replace"),
        kv_dtype=bytes(record["kv_dtype"]).decode("utf-8", "replace"),
        page_size=int(record["page_size"]),
        payload_bytes=int(record["payload_bytes"]),
        checksum_kind=_kind(record),
        checksum=int(record["checksum"]),
        file_bytes=file_bytes,
    )


def _kind(record: Any) -> str:
    return bytes(record["checksum_kind"]).decode("latin1")
