"""Checksums of a page's payload.

They find damage (bit rot, a torn write, zeroes after a power loss), not forgery. xxh3 runs at the
speed of memory; the crc32 of the standard library is what is left where the small package `xxhash`
is not installed, and costs more than reading a page from the page cache. A file names the one that
it carries, so either kind is readable wherever the package is present.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

Buffer = memoryview | bytes
Checksum = Callable[[Iterable[Buffer]], int]
"""Buffers, one after the other, to a number below 2**64."""


def crc32(buffers: Iterable[Buffer]) -> int:
    """zlib's crc32 over all buffers."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value


def _load_xxh3() -> Checksum | None:
    try:
        new_state: Callable[[], Any] = importlib.import_module("xxhash").xxh3_64
    except (ImportError, AttributeError):
        return None

    def xxh3_64(buffers: Iterable[Buffer]) -> int:
        state = new_state()
        for buffer in buffers:
            state.update(buffer)
        return int(state.intdigest())

    return xxh3_64


def _available() -> Mapping[str, Checksum]:
    """By the name that files carry, the preferred one first."""
    xxh3 = _load_xxh3()
    preferred = {} if xxh3 is None else {"xxh3_64": xxh3}
    return MappingProxyType({**preferred, "crc32": crc32})


CHECKSUMS = _available()
DEFAULT_CHECKSUM = next(iter(CHECKSUMS))
