"""Which device buffers each component's slots own, read off the engine's pools.

A slot's bytes travel together or not at all: a buffer that were left behind would keep what the slot's former owner
wrote. So every array that a pool holds must be on a component's list; a pool with one that is not is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .device_buffers import BufferRef
from .errors import HiCacheConfigError
from .types import ComponentKind


class _FirstOfEach:
    """The first array of each inner list of `lists`, as a list of arrays. Pools put whole inner lists in place."""

    def __init__(self, lists: list[list[jax.Array]]) -> None:
        self._lists = lists

    def __getitem__(self, index: int) -> jax.Array:
        return self._lists[index][0]

    def __setitem__(self, index: int, array: jax.Array) -> None:
        self._lists[index][0] = array


def component_buffers(kvcache: Any, state_pool: Any | None) -> dict[ComponentKind, list[BufferRef]]:
    """Every component's buffers: of a plain KV pool, of one with a sliding-window pool beside it (`full_kv_pool`,
    `swa_kv_pool`), and of a pool of recurrent states.

    Raises HiCacheConfigError for a pool of another kind, or one that owns an array that is on no list.
    """
    found: dict[ComponentKind, list[BufferRef]] = {}
    full_pool = getattr(kvcache, "full_kv_pool", kvcache)
    if full_pool is not kvcache:
        _refuse_unlisted(kvcache, [])
    swa_pool = getattr(kvcache, "swa_kv_pool", None)
    if swa_pool is not None and not full_pool.kv_buffer:
        _refuse_unlisted(full_pool, [])
        found[ComponentKind.FULL] = _name_pages(full_pool)
    else:
        found[ComponentKind.FULL] = kv_buffer_refs(full_pool)
    if swa_pool is not None:
        found[ComponentKind.SWA] = kv_buffer_refs(swa_pool)
    if state_pool is not None:
        found[ComponentKind.RECURRENT] = state_buffer_refs(state_pool)
    return found


def kv_buffer_refs(pool: Any) -> list[BufferRef]:
    """The buffers of an MHA, GQA or MLA pool: its list `kv_buffer`, one array per layer, page axis first.

    Raises HiCacheConfigError if the pool has no such list, or owns an array that is not in it.
    """
    name = type(pool).__name__
    buffers = getattr(pool, "kv_buffer", None)
    if not isinstance(buffers, list) or not buffers:
        raise HiCacheConfigError(
            f"the pool {name} has no list kv_buffer; HiCache holds MHA, GQA and MLA pools, with sliding windows and "
            "recurrent states beside them; start without --hicache-storage for this model"
        )
    refs = [BufferRef(f"kv_buffer[{i}]", buffers, i) for i in range(len(buffers))]
    _refuse_unlisted(pool, refs)
    return refs


def state_buffer_refs(pool: Any) -> list[BufferRef]:
    """The buffers of a pool of recurrent states, slot axis first: `recurrent_buffers`, one array per layer, and
    `conv_buffers`, per layer a list of one array.

    Raises HiCacheConfigError if the pool lacks them, or owns an array that is not in them.
    """
    states = getattr(pool, "recurrent_buffers", None)
    convs = getattr(pool, "conv_buffers", None)
    if not isinstance(states, list) or not isinstance(convs, list) or not states:
        raise HiCacheConfigError(
            f"the pool {type(pool).__name__} has no lists recurrent_buffers and conv_buffers; "
            "start without --hicache-storage for this model"
        )
    if any(len(inner) != 1 for inner in convs):
        raise HiCacheConfigError(
            f"the pool {type(pool).__name__} has layers with {[len(inner) for inner in convs]} convolution buffers, "
            "HiCache knows one each; start without --hicache-storage for this model"
        )
    firsts: Any = _FirstOfEach(convs)
    refs = [
        *(BufferRef(f"recurrent_buffers[{i}]", states, i) for i in range(len(states))),
        *(BufferRef(f"conv_buffers[{i}][0]", firsts, i) for i in range(len(convs))),
    ]
    _refuse_unlisted(pool, refs)
    return refs


def _name_pages(pool: Any) -> list[BufferRef]:
    """A model without full-attention layers keeps no Full bytes, but its Full slots are the names of its tokens. One
    zero byte a page stands for them, so that such a page is kept, counted and stored like any other."""
    num_rows = (pool.size + pool.page_size) // pool.page_size
    device = jax.devices()[0]
    return [BufferRef("names", [jnp.zeros((num_rows, 1), jnp.uint8, device=device)], 0)]


def _refuse_unlisted(pool: Any, listed: Sequence[BufferRef]) -> None:
    known = {id(ref.holder[ref.index]) for ref in listed}
    unlisted = [path for path, array in _arrays_of(pool) if id(array) not in known]
    if unlisted:
        raise HiCacheConfigError(
            f"the pool {type(pool).__name__} owns buffers that HiCache would leave behind: {', '.join(unlisted)}; "
            "start without --hicache-storage for this model"
        )


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
