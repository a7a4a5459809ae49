"""Checksums of a page's payload.

They find damage (bit rot, a torn write, zeroes after a power loss), not forgery. xxh3 runs at the
speed of memory; the crc32 of the standard library is what is left where the small package `xxhash`
is not installed, and costs more than reading a page from the page cache. A file names the one that
it carries, so either kind is readable wherever the package is present.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

try:
    import xxhash
except ImportError:
    HAS_XXHASH = False
else:
    HAS_XXHASH = True

Buffer = memoryview | bytes
Checksum = Callable[[Iterable[Buffer]], int]
"""Buffers, one after the other, to a number below 2**64."""


def crc32(buffers: Iterable[Buffer]) -> int:
    """zlib's crc32 over all buffers."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value


def xxh3_64(buffers: Iterable[Buffer]) -> int:
    """The 64-bit xxh3 over all buffers. Only where `xxhash` is installed."""
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


_KINDS: dict[str, Checksum] = {"crc32": crc32}
if HAS_XXHASH:
    _KINDS["xxh3_64"] = xxh3_64

CHECKSUMS: Mapping[str, Checksum] = MappingProxyType(_KINDS)
"""What this process can compute, by the name that files carry."""

DEFAULT_CHECKSUM = "xxh3_64" if HAS_XXHASH else "crc32"
