"""The format of a page file: a `.npy` that carries its own identity.

    numpy header     constant for a namespace; shape (1,) of the record below
    record fields    `VERSION_2`, 384 bytes: what it is, whose it is, checksums, where it stands in its chain
    payload          page_bytes raw bytes, starting at a multiple of 64

The payload is raw because numpy's format knows neither bfloat16 nor the 8-bit floats; the dtype is
a field. All files of a namespace and version have one size and, but for key, link and checksums,
one header, so reading needs no parser: the header that a file must have is computed from the key
and the payload, and compared. A file can therefore never make the reader allocate, and nothing is
ever unpickled. The numpy header is written here and not by numpy, whose padding differs between
releases. Version 1 lacks the link and the text of the layout; such files are read for ever.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import StorageCorruptionError
from ..page_key import (
    CHAIN_START,
    KEY_BYTES,
    StorageNamespace,
    layout_digest,
    namespace_digest,
)
from ..types import PageKey, PageLink
from .base import PageBytes
from .checksum import CHECKSUMS, DEFAULT_CHECKSUM, Checksum

MAGIC = b"HICACHEP"
MAX_PAGE_BYTES = 2**31 - 1024
"""numpy's structured dtypes hold no more."""

Field = tuple[str, str] | tuple[str, str, tuple[int, ...]]

_COMMON_FIELDS: tuple[Field, ...] = (
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
)
_CRC_FIELD: Field = ("header_crc32", "<u4")


@dataclass(frozen=True)
class RecordVersion:
    """One version of the record before the payload: its fields, and the same as a `struct`."""

    number: int
    fields: tuple[Field, ...]
    record: struct.Struct


VERSION_1 = RecordVersion(
    1, (*_COMMON_FIELDS, _CRC_FIELD), struct.Struct("<8sI12sQ32s32s32sQQ20s88sI")
)
VERSION_2 = RecordVersion(
    2,
    (
        *_COMMON_FIELDS,
        ("parent_key", "|u1", (KEY_BYTES,)),
        ("page_index", "<u8"),
        ("layout_id", "|S88"),
        _CRC_FIELD,
    ),
    struct.Struct("<8sI12sQ32s32s32sQQ20s88s32sQ88sI"),
)
"""`kv_dtype`, `model_id` and `layout_id` are cut to fit: they are for people, the digests are what counts.
`parent_key` and `page_index` say where the page stands in its chain, see `pack_link`. `header_crc32` covers every
byte of the file before it."""

VERSIONS = (VERSION_1, VERSION_2)
"""What can be read. Files of one namespace differ in size between versions, never within one."""

FORMAT_VERSION = VERSION_2.number
"""What is written."""

UNKNOWN_PARENT = bytes(KEY_BYTES)
UNKNOWN_INDEX = 2**64 - 1

_KIND = slice(12, 24)
_NAMESPACE = slice(64, 96)


@functools.lru_cache(maxsize=256)
def npy_header(payload_bytes: int, version: RecordVersion = VERSION_2) -> bytes:
    """The numpy header (format 1.0) of a page file with that much payload, padded to a multiple of
    64.
    """
    descr = [*version.fields, ("payload", "|u1", (payload_bytes,))]
    text = repr({"descr": descr, "fortran_order": False, "shape": (1,)})
    before = len(b"\x93NUMPY\x01\x00") + 2
    padding = -(before + len(text) + 1) % 64
    body = text.encode("latin1") + b" " * padding + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body


def header_crc_holds(header: bytes) -> bool:
    """Whether the last four bytes of a header are the crc32 of those before them."""
    return zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little")


def pack_link(link: PageLink | None) -> tuple[bytes, int]:
    """`parent_key` and `page_index` of a record. The first page of a prompt has the start of all chains as its parent,
    as in its hash; zeroes and all ones stand for a link that the writer did not know.
    """
    if link is None:
        return UNKNOWN_PARENT, UNKNOWN_INDEX
    return CHAIN_START if link.parent is None else link.parent, link.index


def unpack_link(parent_key: bytes, page_index: int) -> PageLink | None:
    """What `pack_link` packed."""
    if page_index == UNKNOWN_INDEX:
        return None
    return PageLink(None if parent_key == CHAIN_START else PageKey(parent_key), page_index)


@dataclass(frozen=True)
class _Template:
    """What all files of one version and namespace have in common."""

    version: RecordVersion
    npy_header: bytes

    @property
    def header_bytes(self) -> int:
        return len(self.npy_header) + self.version.record.size


class PageFileFormat:
    """Encodes and verifies the page files of one namespace. Immutable, usable from any thread."""

    def __init__(
        self,
        namespace: StorageNamespace,
        checksum_kind: str = DEFAULT_CHECKSUM,
        checksums: Mapping[str, Checksum] = CHECKSUMS,
        version: RecordVersion = VERSION_2,
    ) -> None:
        """`checksum_kind` and `version` are what written files carry; `checksums` those that can be verified.

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
        self._version = version
        self._owner = namespace_digest(namespace)
        self._layout = layout_digest(namespace.layout_id)
        templates = [_Template(v, npy_header(namespace.page_bytes, v)) for v in VERSIONS]
        self._templates = {template.header_bytes: template for template in templates}
        self.header_bytes = next(t.header_bytes for t in templates if t.version is version)
        self.file_bytes = self.header_bytes + namespace.page_bytes

    def header_bytes_of(self, file_bytes: int) -> int | None:
        """How much of a file of that size is header; None if no page of this namespace has that size."""
        header_bytes = file_bytes - self.namespace.page_bytes
        return header_bytes if header_bytes in self._templates else None

    def encode(
        self, key: PageKey, payload: Sequence[memoryview], link: PageLink | None = None
    ) -> list[memoryview]:
        """The buffers that make up the file, for a vectored write; the payload's own memory, not a
        copy.
        """
        checksum = self._checksums[self._kind](payload)
        template = self._templates[self.header_bytes]
        header = self._header(template, key, self._kind, checksum, pack_link(link))
        return [memoryview(header), *payload]

    def verify(self, key: PageKey, header: bytes, payload: PageBytes) -> None:
        """Checks that header and payload, as read, are this key's page.

        Raises StorageCorruptionError, saying what was expected and what was found.
        """
        template = self._templates.get(len(header))
        if template is None:
            raise StorageCorruptionError(f"no page file has a header of {len(header)} bytes")
        record = header[-template.version.record.size :]
        kind = record[_KIND].rstrip(b"\0").decode("latin1")
        compute = self._checksums.get(kind)
        if compute is None:
            raise StorageCorruptionError(
                f"checksum {kind!r} is not one of {sorted(self._checksums)}"
            )
        # The link is not known here: it is taken as it stands, under the header's checksum.
        expected = self._header(
            template, key, kind, compute([payload.data]), _link_of(template.version, record)
        )
        if header != expected:
            raise StorageCorruptionError(_difference(template, header, expected))

    def is_own(self, header: bytes) -> bool:
        """Whether a header is whole and names this namespace as its owner; says nothing of the
        payload.
        """
        template = self._templates.get(len(header))
        if template is None or not header_crc_holds(header):
            return False
        return header[-template.version.record.size :][_NAMESPACE] == self._owner

    def _header(
        self,
        template: _Template,
        key: PageKey,
        kind: str,
        checksum: int,
        link: tuple[bytes, int],
    ) -> bytes:
        space, version = self.namespace, template.version
        added = (*link, space.layout_id.encode("utf-8", "replace")) if version is VERSION_2 else ()
        record = version.record.pack(
            MAGIC,
            version.number,
            kind.encode("latin1"),
            checksum,
            key,
            self._owner,
            self._layout,
            space.page_size,
            space.page_bytes,
            space.kv_dtype.encode("utf-8", "replace"),
            space.model_id.encode("utf-8", "replace"),
            *added,
            0,
        )
        header = template.npy_header + record[:-4]
        return header + zlib.crc32(header).to_bytes(4, "little")


def _link_of(version: RecordVersion, record: bytes) -> tuple[bytes, int]:
    """The packed link in a record as read."""
    if version is VERSION_1:
        return pack_link(None)
    parent_key, page_index = version.record.unpack(record)[11:13]
    return parent_key, page_index


def _difference(template: _Template, header: bytes, expected: bytes) -> str:
    """The first field in which two headers differ, in words."""
    if not header.startswith(template.npy_header):
        return "the numpy header is not that of this namespace"
    record = template.version.record
    names = [field[0] for field in template.version.fields]
    found, wanted = (record.unpack(h[-record.size :]) for h in (header, expected))
    for name, is_value, should in zip(names, found, wanted, strict=True):
        if is_value != should:
            return f"{name}: expected {_show(should)}, found {_show(is_value)}"
    return "the header has another length"


def _show(value: bytes | int) -> str:
    if isinstance(value, int):
        return f"{value:#x}"
    return value.hex() if len(value) == KEY_BYTES else repr(value.rstrip(b"\0"))
