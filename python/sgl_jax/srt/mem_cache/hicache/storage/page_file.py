"""The format of a page file: a `.npy` that carries its own identity.

    numpy header     constant for a namespace; shape (1,) of the record below
    record fields    `FIELDS`, 256 bytes: what it is, whose it is, checksums
    payload          page_bytes raw bytes, starting at a multiple of 64

The payload is raw because numpy's format knows neither bfloat16 nor the 8-bit floats; the dtype is
a field. All files of a namespace have one size and, but for key and checksums, one header, so
reading needs no parser: the header that a file must have is computed from the key and the payload,
and compared. A file can therefore never make the reader allocate, and nothing is ever unpickled.
The numpy header is written here and not by numpy, whose padding differs between releases.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

from ..errors import StorageCorruptionError
from ..page_key import KEY_BYTES, StorageNamespace, layout_digest, namespace_digest
from ..types import PageKey
from .base import PageBytes
from .checksum import CHECKSUMS, DEFAULT_CHECKSUM, Checksum

MAGIC = b"HICACHEP"
FORMAT_VERSION = 1
MAX_PAGE_BYTES = 2**31 - 1024
"""numpy's structured dtypes hold no more."""

FIELDS: tuple[tuple[str, str] | tuple[str, str, tuple[int, ...]], ...] = (
    ("magic", "|S8"),
    ("format_version", "<u4"),
    ("checksum_kind", "|S12"),
    ("checksum", "<u8"),
    ("page_key", "|u1", (KEY_BYTES,)),
    ("namespace", "|u1", (32,)),
    ("layout", "|u1", (32,)),
    ("page_size", "<u8"),
    ("payload_bytes", "<u8"),
    ("kv_dtype", "|S20"),
    ("model_id", "|S88"),
    ("header_crc32", "<u4"),
)
"""Name and dtype of the record fields before `payload`. `kv_dtype` and `model_id` are cut to fit:
they are for people, the namespace digest is what counts. `header_crc32` covers every byte of the
file before it."""

_RECORD = struct.Struct("<8sI12sQ32s32s32sQQ20s88sI")
RECORD_BYTES = _RECORD.size
"""Length of `FIELDS`."""

_KIND = slice(12, 24)
_NAMESPACE = slice(64, 96)


def npy_header(payload_bytes: int) -> bytes:
    """The numpy header (format 1.0) of a page file with that much payload, padded to a multiple of
    64.
    """
    descr = [*FIELDS, ("payload", "|u1", (payload_bytes,))]
    text = repr({"descr": descr, "fortran_order": False, "shape": (1,)})
    before = len(b"\x93NUMPY\x01\x00") + 2
    padding = -(before + len(text) + 1) % 64
    body = text.encode("latin1") + b" " * padding + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body


def header_crc_holds(header: bytes) -> bool:
    """Whether the last four bytes of a header are the crc32 of those before them."""
    return zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little")


class PageFileFormat:
    """Encodes and verifies the page files of one namespace. Immutable, usable from any thread."""

    def __init__(
        self,
        namespace: StorageNamespace,
        checksum_kind: str = DEFAULT_CHECKSUM,
        checksums: Mapping[str, Checksum] = CHECKSUMS,
    ) -> None:
        """`checksum_kind` is what written files carry; `checksums` those that can be verified.

        Raises ValueError for a page outside 1..`MAX_PAGE_BYTES` bytes or a checksum that is not
        among `checksums`.
        """
        if not 1 <= namespace.page_bytes <= MAX_PAGE_BYTES:
            raise ValueError(f"page_bytes {namespace.page_bytes} outside [1, {MAX_PAGE_BYTES}]")
        if checksum_kind not in checksums:
            raise ValueError(f"checksum {checksum_kind!r} is not one of {sorted(checksums)}")
        self.namespace = namespace
        self._kind = checksum_kind
        self._checksums = checksums
        self._npy_header = npy_header(namespace.page_bytes)
        self._owner = namespace_digest(namespace)
        self._layout = layout_digest(namespace.layout_id)
        self.header_bytes = len(self._npy_header) + RECORD_BYTES
        self.file_bytes = self.header_bytes + namespace.page_bytes

    def encode(self, key: PageKey, payload: Sequence[memoryview]) -> list[memoryview]:
        """The buffers that make up the file, for a vectored write; the payload's own memory, not a
        copy.
        """
        checksum = self._checksums[self._kind](payload)
        return [memoryview(self._header(key, self._kind, checksum)), *payload]

    def verify(self, key: PageKey, header: bytes, payload: PageBytes) -> None:
        """Checks that header and payload, as read, are this key's page.

        Raises StorageCorruptionError, saying what was expected and what was found.
        """
        kind = self._record(header)[_KIND].rstrip(b"\0").decode("latin1")
        compute = self._checksums.get(kind)
        if compute is None:
            raise StorageCorruptionError(
                f"checksum {kind!r} is not one of {sorted(self._checksums)}"
            )
        expected = self._header(key, kind, compute([payload.data]))
        if header != expected:
            raise StorageCorruptionError(self._difference(header, expected))

    def is_own(self, header: bytes) -> bool:
        """Whether a header is whole and names this namespace as its owner; says nothing of the
        payload.
        """
        if len(header) != self.header_bytes or not header_crc_holds(header):
            return False
        return self._record(header)[_NAMESPACE] == self._owner

    def _record(self, header: bytes) -> bytes:
        return header[-RECORD_BYTES:]

    def _header(self, key: PageKey, kind: str, checksum: int) -> bytes:
        space = self.namespace
        record = _RECORD.pack(
            MAGIC,
            FORMAT_VERSION,
            kind.encode("latin1"),
            checksum,
            key,
            self._owner,
            self._layout,
            space.page_size,
            space.page_bytes,
            space.kv_dtype.encode("utf-8", "replace"),
            space.model_id.encode("utf-8", "replace"),
            0,
        )
        header = self._npy_header + record[:-4]
        return header + zlib.crc32(header).to_bytes(4, "little")

    def _difference(self, header: bytes, expected: bytes) -> str:
        """The first field in which two headers differ, in words."""
        if not header.startswith(self._npy_header):
            return "the numpy header is not that of this namespace"
        names = [field[0] for field in FIELDS]
        found = _RECORD.unpack(self._record(header))
        wanted = _RECORD.unpack(self._record(expected))
        for name, is_value, should in zip(names, found, wanted, strict=True):
            if is_value != should:
                return f"{name}: expected {_show(should)}, found {_show(is_value)}"
        return "the header has another length"


def _show(value: bytes | int) -> str:
    if isinstance(value, int):
        return f"{value:#x}"
    return value.hex() if len(value) == KEY_BYTES else repr(value.rstrip(b"\0"))
