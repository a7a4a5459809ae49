"""Which device buffers a component's slots own, read off the engine's pool.

A slot's bytes travel together or not at all: a buffer that were left behind would keep what the slot's former owner
wrote. So every array that a pool holds must be on the component's list; a pool with one that is not is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from .device_buffers import BufferRef
from .errors import HiCacheConfigError


def kv_buffer_refs(pool: Any) -> list[BufferRef]:
    """The buffers of an MHA, GQA or MLA pool: its list `kv_buffer`, one array per layer, page axis first.

    Raises HiCacheConfigError if the pool has no such list, or owns an array that is not in it.
    """
    name = type(pool).__name__
    buffers = getattr(pool, "kv_buffer", None)
    if not isinstance(buffers, list) or not buffers:
        raise HiCacheConfigError(
            f"the pool {name} has no list kv_buffer; HiCache holds MHA, GQA and MLA pools; "
            "start without --hicache-storage for this model"
        )
    listed = {id(array) for array in buffers}
    unlisted = [path for path, array in _arrays_of(pool) if id(array) not in listed]
    if unlisted:
        raise HiCacheConfigError(
            f"the pool {name} owns buffers that HiCache would leave behind: {', '.join(unlisted)}; "
            "only kv_buffer is known; start without --hicache-storage for this model"
        )
    return [BufferRef(f"kv_buffer[{i}]", buffers, i) for i in range(len(buffers))]


def _arrays_of(pool: Any) -> Iterator[tuple[str, jax.Array]]:
    """Every jax array that the object holds, directly or in lists, tuples and dictionaries, with its path."""
    stack: list[tuple[str, Any]] = list(vars(pool).items())
    while stack:
        path, value = stack.pop()
        if isinstance(value, jax.Array):
            yield path, value
        elif isinstance(value, Mapping):
            stack.extend((f"{path}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            stack.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
