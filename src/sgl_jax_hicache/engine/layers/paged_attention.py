"""Attention over a paged KV buffer, and the write of new rows into it.

Keys are visited in blocks of about 256 tokens, taken through the page table, with a running softmax. A token at
position p always sees the blocks 0 .. p // block in the same order and with the same sums, and a block that lies wholly
in its future changes nothing bit for bit; so the result does not depend on the chunk, the batch or the padding that the
token was computed with, nor on whether its prefix was computed or loaded.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 256
_MASKED = -1e30  # finite: -inf minus -inf would be NaN before the first visible key
_NO_POSITION = (1 << 31) - 1
_HIGHEST = jax.lax.Precision.HIGHEST


class TileMeta(NamedTuple):
    """One tile: `seqs` sequences of `rows` new tokens each (a prefill tile is 1 x n, a decode step n x 1).

    positions, out_slots: int32[seqs, rows], a padding row has out slot 0; page_table: int32[seqs, pages];
    num_blocks: int32[], key blocks to visit; state_slots: int32[seqs], slots of the recurrent state pool;
    request_rows: int32[seqs], rows of what the runner keeps for each running request;
    cos, sin: float32[seqs * rows, rope_dim // 2].
    """

    positions: jax.Array
    out_slots: jax.Array
    page_table: jax.Array
    num_blocks: jax.Array
    state_slots: jax.Array
    request_rows: jax.Array
    cos: jax.Array
    sin: jax.Array


class KVRows(Protocol):
    """How a pool's pages turn into keys and values."""

    def __call__(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """pages [seqs, n, *row] -> keys [seqs, tokens, heads, k_dim], values [seqs, tokens, heads, v_dim]."""


def block_pages(page_size: int) -> int:
    """Pages that one block of keys takes."""
    return max(1, BLOCK_TOKENS // page_size)


def page_table_width(max_context_len: int, page_size: int) -> int:
    """Columns of a page table that holds `max_context_len` tokens in whole blocks."""
    per_block = block_pages(page_size)
    num_blocks = -(-max_context_len // (per_block * page_size))
    return num_blocks * per_block


def write_rows(kv: jax.Array, rows: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    """Puts rows[i] at kv[index[0][i], index[1][i], ...], in place when kv is donated.

    A 16-bit scatter would convert the whole buffer on CPU, so narrow rows go in one at a time.
    """
    if kv.dtype == jnp.float32:
        return kv.at[index].set(rows)
    lead = (1,) * len(index)
    tail = [jnp.int32(0)] * (kv.ndim - len(index))

    def write_one(i: jax.Array, buffer: jax.Array) -> jax.Array:
        start = [*(axis[i] for axis in index), *tail]
        return jax.lax.dynamic_update_slice(buffer, rows[i].reshape(*lead, *rows.shape[1:]), start)

    written: jax.Array = jax.lax.fori_loop(0, rows.shape[0], write_one, kv)
    return written


def attend(
    q: jax.Array,
    kv: jax.Array,
    read_pages: KVRows,
    meta: TileMeta,
    *,
    page_size: int,
    v_dim: int,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of q [seqs, rows, kv_heads, group, k_dim] over the pages of `meta`.

    With a window, a token at position p sees p - window + 1 .. p, and pages that no row sees may hold anything.

    Returns float32 [seqs, rows, kv_heads, group, v_dim].
    """
    seqs, rows, heads, group, _ = q.shape
    # One query row per head would take another product kernel, which sums in another order.
    pad = 1 if rows * group == 1 else 0
    flat = q.transpose(0, 2, 1, 3, 4).reshape(seqs, heads, rows * group, -1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, pad), (0, 0)))
    query_pos = jnp.pad(jnp.repeat(meta.positions, group, axis=1), ((0, 0), (0, pad)))
    pages_per_block = block_pages(page_size)
    block = pages_per_block * page_size
    oldest = _oldest_seen(meta, window)

    def visit(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, out = carry
        ids = jax.lax.dynamic_slice_in_dim(meta.page_table, i * pages_per_block, pages_per_block, 1)
        keys, values = read_pages(kv[ids])
        key_pos = i * block + jnp.arange(block, dtype=jnp.int32)
        seen = key_pos[None, None, :] <= query_pos[:, :, None]
        # A slot that nobody wrote may hold anything, NaN included, and 0 * NaN is NaN.
        written = key_pos[None, :] <= jnp.max(meta.positions, axis=1)[:, None]
        if window is not None:
            seen = seen & (key_pos[None, None, :] > query_pos[:, :, None] - window)
            written = written & (key_pos[None, :] >= oldest[:, None])
            # Padding rows stand at position 0, whose page may be anybody's by now; they see nothing.
            seen = seen & written[:, None, :]
        values = jnp.where(written[:, :, None, None], values, 0.0)
        # A column of ones makes the product sum the weights too, in the order of the values.
        values = jnp.concatenate([values, jnp.ones((*values.shape[:3], 1))], axis=-1)
        scores = jnp.einsum("shqd,sthd->shqt", flat, keys, precision=_HIGHEST) * scale
        scores = jnp.where(seen[:, None], scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen[:, None], jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        columns = values.transpose(0, 2, 3, 1)
        mixed = jnp.einsum("shqt,shdt->shqd", weights, columns, precision=_HIGHEST)
        return new_top, out * decay[..., None] + mixed

    shape = flat.shape[:3]
    start = (jnp.full(shape, _MASKED), jnp.zeros((*shape, v_dim + 1)))
    first = 0 if window is None else jnp.min(oldest) // block
    out: jax.Array = jax.lax.fori_loop(first, meta.num_blocks, visit, start)[1]
    total = out[..., v_dim:]
    if window is not None:
        total = jnp.where(total > 0.0, total, 1.0)  # a padding row may see no key
    out = (out[..., :v_dim] / total)[:, :, : rows * group]
    return out.reshape(seqs, heads, rows, group, v_dim).transpose(0, 2, 1, 3, 4)


def _oldest_seen(meta: TileMeta, window: int | None) -> jax.Array:
    """int32[seqs]: the first position that any row of a sequence sees; the last possible one for padding."""
    if window is None:
        return jnp.zeros(meta.positions.shape[0], jnp.int32)
    first = jnp.min(jnp.where(meta.out_slots > 0, meta.positions, _NO_POSITION), axis=1)
    return jnp.maximum(first - (window - 1), 0)
