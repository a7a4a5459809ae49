"""Paged attention for the engine on CPU: full, sliding-window and absorbed MLA layers, several ranks.

In the place of the engine's own CPU attention, which mistakes one request's pages for another's once a page is more
than a token, and serves neither window pools nor the MLA pool. Written to be read, not to be fast: every query is
compared with every slot of its rank, and a mask says which of them count. All arithmetic is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.layers.attention.base_attn_backend import AttentionBackend
from sgl_jax.srt.mem_cache.memory_pool import MLATokenToKVPool, SWAKVPool
from sgl_jax.srt.utils.jax_utils import device_array

BY_HEAD = P("data", "tensor", None)
BY_RANK = P("data")
NOT_SEEN = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowSlots:
    """Where a step reads and writes in the window pool, int32, in the order of `cache_loc` and `out_cache_loc`; None
    for a model without that pool."""

    read: jax.Array | None = None
    written: jax.Array | None = None


class CpuAttention(AttentionBackend):
    """Takes the constructor's arguments of the backend that it replaces."""

    def __init__(
        self, num_attn_heads: int, num_kv_heads: int | None, mesh: jax.sharding.Mesh
    ) -> None:
        self.num_heads = num_attn_heads
        self.num_kv_heads = num_kv_heads or num_attn_heads
        self.mesh = mesh
        self.forward_metadata = nnx.data(WindowSlots())

    @staticmethod
    def get_max_running_reqests(max_context_len: int, page_size: int) -> int:
        """No limit of its own."""
        return 4096

    def get_forward_metadata(self, batch: Any) -> WindowSlots:
        """Slots of the window pool for a batch, looked up on the host in the table of each rank."""
        tables = getattr(self, "swa_index_mapping", None)
        if tables is None:
            return WindowSlots()
        by_rank: Sequence[Any] = tables if isinstance(tables, list) else [tables]
        slots = [_translate(where, by_rank) for where in (batch.cache_loc, batch.out_cache_loc)]
        return WindowSlots(*device_array(tuple(slots), sharding=NamedSharding(self.mesh, BY_RANK)))

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: Any,
        forward_batch: Any,
        token_to_kv_pool: Any,
        q_rope: jax.Array | None = None,
        k_rope: jax.Array | None = None,
        attention_sink: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new tokens' rows into the layer's pages, attend, and return the output and the pages."""
        pages = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        pool = getattr(token_to_kv_pool, "full_kv_pool", token_to_kv_pool)
        step = self._step(layer, forward_batch, token_to_kv_pool, pool.page_size)
        if isinstance(pool, MLATokenToKVPool):
            return self._latent(q, k, q_rope, k_rope, pages, pool, step)
        return self._heads(q, k, v, pages, layer, attention_sink, step)

    def _step(self, layer: Any, batch: Any, pool: Any, page_size: int) -> _Step:
        written, read = batch.out_cache_loc, batch.cache_loc
        if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]:
            written, read = self.forward_metadata.written, self.forward_metadata.read
        num_new = (
            batch.extend_seq_lens if batch.forward_mode.is_extend() else batch.seq_lens.clip(0, 1)
        )
        return _Step(
            written,
            read,
            batch.seq_lens,
            num_new,
            page_size=page_size,
            scale=layer.scaling or layer.head_dim**-0.5,
            window=layer.sliding_window_size,
            cap=layer.logit_cap,
        )

    def _heads(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: jax.Array,
        layer: Any,
        sink: Any,
        step: _Step,
    ) -> tuple[jax.Array, jax.Array]:
        """MHA and GQA: pages [pages, page_size, rows, packing, width] with K and V of a head one after the other."""
        dim = layer.head_dim
        q, k, v = (_split_heads(x, dim) for x in (q, k, v))
        sinks = [] if sink is None else [getattr(sink, "value", sink)]

        def of_rank(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pages: jax.Array,
            step: _Step,
            *sinks: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            num_pages, page_size, rows, packing, width = pages.shape
            slots = pages.reshape(num_pages * page_size, rows * packing, width)
            new = jnp.stack([_widen(k, width), _widen(v, width)], axis=2)
            slots = step.write(slots, new.reshape(len(k), -1, width))
            seen = step.gather(slots)
            out = step.attend(_widen(q, width), seen[:, 0::2], seen[:, 1::2], *sinks)
            return out[..., :dim].reshape(len(q), -1).astype(q.dtype), slots.reshape(pages.shape)

        by_page = P("data", None, "tensor", None, None)
        return jax.shard_map(
            of_rank,
            mesh=self.mesh,
            in_specs=(BY_HEAD, BY_HEAD, BY_HEAD, by_page, BY_RANK, *[P("tensor")] * len(sinks)),
            out_specs=(P("data", "tensor"), by_page),
            check_vma=False,
        )(q, k, v, pages, step, *sinks)

    def _latent(
        self,
        q: jax.Array,
        latent: jax.Array,
        q_rope: Any,
        k_rope: Any,
        pages: jax.Array,
        pool: Any,
        step: _Step,
    ) -> tuple[jax.Array, jax.Array]:
        """Absorbed MLA: one row a token for all heads, the latent and then the rotary part, each widened on its own."""
        rank = pool.kv_lora_rank
        latent, k_rope = (
            jax.sharding.reshard(x.reshape(len(x), -1), P("data", None)) for x in (latent, k_rope)
        )

        def of_rank(
            q: jax.Array,
            q_rope: jax.Array,
            latent: jax.Array,
            k_rope: jax.Array,
            pages: jax.Array,
            step: _Step,
        ) -> tuple[jax.Array, jax.Array]:
            slots = pages.reshape(-1, 1, pages.shape[-1])
            new, asked = (
                jnp.concatenate([_widen(a, pool.nope_dim), _widen(b, pool.rope_dim)], axis=-1)
                for a, b in ((latent, k_rope), (q, q_rope))
            )
            slots = step.write(slots, new[:, None])
            seen = step.gather(slots)
            out = step.attend(asked, seen, seen[..., :rank])
            return out.astype(q.dtype), slots.reshape(pages.shape)

        by_page, by_row = P("data", None, None, None), P("data", None)
        return jax.shard_map(
            of_rank,
            mesh=self.mesh,
            in_specs=(BY_HEAD, BY_HEAD, by_row, by_row, by_page, BY_RANK),
            out_specs=(BY_HEAD, by_page),
            check_vma=False,
        )(q, q_rope, latent, k_rope, pages, step)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Step:
    """One rank's step. Arrays int32: `written` a slot for each new token (-1: padding), `read` the slots of the
    requests one after the other, each from a page border on, and of each request the tokens so far and the new ones."""

    written: jax.Array
    read: jax.Array
    num_tokens: jax.Array
    num_new: jax.Array
    page_size: int = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})
    cap: float | None = field(metadata={"static": True})

    def write(self, slots: jax.Array, new: jax.Array) -> jax.Array:
        """`slots` with the new tokens' rows in it."""
        where = jnp.where(self.written < 0, len(slots), self.written)
        return slots.at[where].set(new.astype(slots.dtype), mode="drop")

    def gather(self, slots: jax.Array) -> jax.Array:
        """The rows that the batch may look at."""
        return slots[self.read.clip(0, len(slots) - 1)].astype(jnp.float32)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None = None
    ) -> jax.Array:
        """q[tokens, heads, width], k and v [slots, KV heads, width]: the weighted values, [tokens, heads, width of v].

        `sink`, one logit a head, takes part of the weight and gives nothing.
        """
        num_rows, num_heads, width = q.shape
        num_kv = k.shape[1]
        grouped = q.astype(jnp.float32).reshape(num_rows, num_kv, num_heads // num_kv, width)
        logits = jnp.einsum("tkgd,skd->tkgs", grouped, k) * self.scale
        if self.cap:
            logits = self.cap * jnp.tanh(logits / self.cap)
        logits = jnp.where(self._mask(num_rows)[:, None, None], logits, NOT_SEEN)
        if sink is not None:
            column = sink.astype(jnp.float32).reshape(1, num_kv, -1, 1)
            logits = jnp.concatenate(
                [logits, jnp.broadcast_to(column, (*logits.shape[:3], 1))], axis=-1
            )
        weights = jax.nn.softmax(logits, axis=-1)[..., : len(k)]
        out = jnp.einsum("tkgs,skd->tkgd", weights, v)
        return out.reshape(num_rows, num_heads, -1)

    def _mask(self, num_rows: int) -> jax.Array:
        """bool[tokens, slots]: which slot a token looks at."""
        aligned = -(-self.num_tokens // self.page_size) * self.page_size
        asking, at = _places(num_rows, self.num_new, self.num_tokens - self.num_new)
        owner, position = _places(len(self.read), aligned, jnp.zeros_like(aligned))
        distance = at[:, None] - position[None]
        mask = (asking[:, None] == owner[None]) & (distance >= 0)
        return mask & (distance < self.window) if self.window else mask


def _places(num_rows: int, lens: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows hold `lens[i]` tokens of request i, from its position `first[i]` on: each row's request and position."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    ends = jnp.cumsum(lens)
    request = jnp.searchsorted(ends, rows, side="right")
    known = request.clip(0, len(lens) - 1)
    return request, first[known] + rows - (ends - lens)[known]


def _translate(slots: Any, tables: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The window pool's slots for slots of the full pool, rank by rank; -1 stays."""
    by_rank = np.asarray(slots).reshape(len(tables), -1)
    found = [
        np.where(row < 0, -1, np.asarray(table)[row.clip(0)])
        for row, table in zip(by_rank, tables, strict=True)
    ]
    return np.concatenate(found).astype(np.int32)


def _split_heads(x: jax.Array, dim: int) -> jax.Array:
    if x.ndim == 3:
        return x
    return x.reshape(x.shape[0], math.prod(x.shape[1:]) // dim, dim, out_sharding=BY_HEAD)


def _widen(x: jax.Array, width: int) -> jax.Array:
    """The last axis filled up with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
