"""Runs a decoder over a paged KV pool and a pool of recurrent states, one dispatched step at a time.

A step is a chain of small compiled programs (embed, each layer, head and sampling) that Python only enqueues. Every
program donates the buffers it changes, and the pools' lists are rebound at once, so between two calls of `dispatch` the
pools always hold live arrays that are the result of the last dispatched step. All layers of a kind share one compiled
program per tile shape, which keeps start-up to seconds.

One thread, the engine's, calls everything here.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .forward_batch import (
    ForwardBatch,
    ForwardItem,
    ForwardMode,
    SamplingParams,
    StepOutput,
    SWASlots,
)
from .layers.basic import linear, rms_norm, rope_tables
from .layers.decoder_layer import decoder_layer
from .layers.paged_attention import TileMeta, block_pages, page_table_width
from .layers.recurrent_layer import (
    LONGEST_CHUNK_TOKENS,
    chunk_tokens,
    recurrent_layer,
    unfinished_writes,
)
from .memory_pool import RecurrentStatePool
from .model_config import LayerKind, ModelConfig
from .sampler import SamplingRows, chosen_logprobs, greedy_tokens, sample_tokens, sampling_rows
from .state_copies import copy_states
from .swa_kv_pool import SWAKVPool, TokenKVPool, layer_buffers
from .weights.params import ModelParams

DEFAULT_TILES = (16, 64, 256)
_BATCH_BUCKETS = (2, 8, 32, 128)


# Compiled once per model config and shape, for all runners of the process.
_attention_layer = jax.jit(decoder_layer, static_argnums=(0, 1, 6), donate_argnums=(3, 4))
_recurrent_layer = jax.jit(recurrent_layer, static_argnums=(0, 1), donate_argnums=(3, 4, 5, 6))
_top_k = jax.jit(jax.lax.top_k, static_argnums=1)


class _HostTile(NamedTuple):
    """The index arrays of one tile on the host; see TileMeta for the shapes."""

    positions: npt.NDArray[np.int32]
    out_slots: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]
    num_blocks: npt.NDArray[np.int32]
    state_slots: npt.NDArray[np.int32]
    request_rows: npt.NDArray[np.int32]


class _SWATile(NamedTuple):
    """What sliding layers see instead of the arrays of the same names, if they have a pool of their own."""

    out_slots: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]


class ModelRunner:
    """Computes ForwardBatches.

    `extend_tile_tokens`: the tile lengths a prefill chunk is cut into (the last tile is padded);
    `max_running_requests`: the largest batch and the largest `req_pool_idx`; `max_context_len`: the longest sequence,
    in tokens; `recurrent_pool`: needed if the model has recurrent layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: ModelParams,
        kv_pool: TokenKVPool,
        *,
        max_running_requests: int,
        extend_tile_tokens: Sequence[int] = DEFAULT_TILES,
        max_context_len: int,
        recurrent_pool: RecurrentStatePool | None = None,
    ) -> None:
        if min(extend_tile_tokens) < 2:
            raise ValueError(f"tiles need 2 tokens or more, got {tuple(extend_tile_tokens)}")
        if config.recurrent is not None:
            if recurrent_pool is None:
                raise ValueError("a model with recurrent layers needs a pool of states")
            if any(tile % LONGEST_CHUNK_TOKENS for tile in extend_tile_tokens):
                raise ValueError(
                    f"recurrent layers need tiles in multiples of {LONGEST_CHUNK_TOKENS} tokens, "
                    f"got {tuple(extend_tile_tokens)}"
                )
        self.config = config
        self.kv_pool = kv_pool
        self.recurrent_pool = recurrent_pool
        self.max_running_requests = max_running_requests
        self._params = params
        self._layer_buffers = layer_buffers(kv_pool, config)
        self._has_swa_pool = isinstance(kv_pool, SWAKVPool)
        self._tiles = tuple(sorted(set(extend_tile_tokens)))
        self._table_width = page_table_width(max_context_len, kv_pool.page_size)
        self._state_slots = 0 if recurrent_pool is None else recurrent_pool.size
        self._block_tokens = block_pages(kv_pool.page_size) * kv_pool.page_size
        self._unseeded = secrets.randbits(32)
        # Indices 0 .. max_running_requests belong to requests, the last entry takes what padding rows sample and write.
        self._scratch_idx = max_running_requests + 1
        self._device = jax.devices()[0]
        self._last_tokens = jnp.zeros(max_running_requests + 2, jnp.int32, device=self._device)
        self._unfinished = {
            layer: unfinished_writes(
                config.recurrent, layer, max_running_requests + 2, chunk_tokens(kv_pool.page_size)
            )
            for layer in config.recurrent_layers
            if config.recurrent is not None
        }

    def dispatch(self, batch: ForwardBatch) -> StepOutput:
        """Enqueues one step and returns its outputs as futures; the pools' buffers are rebound before it returns.

        Recurrent states are copied as the items say, before the step and after it. Raises ValueError for a batch the
        runner was not built for (too many items, a context too long).
        """
        self._check(batch)
        self._copy_states([(i.states.cow_src, i.states.running) for i in batch.items])
        if batch.mode is ForwardMode.DECODE:
            hidden: jax.Array | None = self._decode_hidden(batch)
        else:
            hidden = self._extend_hidden(batch)
        self._copy_states([(i.states.running, i.states.track) for i in batch.items])
        return self._sample(batch, hidden)

    def _copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        wanted = [(source, target) for source, target in pairs if source and target]
        if wanted and self.recurrent_pool is not None:
            copy_states(self.recurrent_pool, wanted, self._padded(len(wanted)))

    def warm_up(self) -> None:
        """Compiles every program that serving needs, by running steps that write to the sentinel page only."""
        page_size, swa = self.kv_pool.page_size, self._has_swa_pool
        for tile in self._tiles:
            self._block_on(self.dispatch(_idle_extend(tile, page_size, SamplingParams(), swa=swa)))
        sampled = SamplingParams(temperature=1.0, seed=0)
        for size in self._batch_sizes():
            num_items = min(size, self.max_running_requests)
            for settings in (SamplingParams(), sampled):
                self._block_on(self.dispatch(_idle_decode(num_items, settings, swa=swa)))
            if self.recurrent_pool is not None:
                copy_states(self.recurrent_pool, (), size)

    def _block_on(self, output: StepOutput) -> None:
        states = [] if self.recurrent_pool is None else self.recurrent_pool.recurrent_buffers
        kv = [kept.buffers[kept.place] for kept in self._layer_buffers.values()]
        for array in (output.next_token_ids, *kv, *states):
            array.block_until_ready()

    def _check(self, batch: ForwardBatch) -> None:
        num_items = len(batch.items)
        if not 1 <= num_items <= self.max_running_requests:
            raise ValueError(f"{num_items} items outside [1, {self.max_running_requests}]")
        for item in batch.items:
            if not 0 <= item.req_pool_idx <= self.max_running_requests:
                raise ValueError(
                    f"req_pool_idx {item.req_pool_idx} outside [0, {self.max_running_requests}]"
                )
            for slot in (item.states.running, item.states.cow_src, item.states.track):
                if not 0 <= slot <= self._state_slots:
                    raise ValueError(
                        f"request {item.rid}: recurrent slot {slot} outside [0, {self._state_slots}]"
                    )
            pages = -(-(item.prefix_len + item.num_tokens) // self.kv_pool.page_size)
            if not pages <= len(item.page_table) <= self._table_width:
                raise ValueError(
                    f"request {item.rid}: page table of {len(item.page_table)} pages, needs "
                    f"{pages} to {self._table_width}"
                )
            if self._has_swa_pool and (
                item.swa is None
                or len(item.swa.page_table) != len(item.page_table)
                or len(item.swa.out_slots) != item.num_tokens
            ):
                raise ValueError(f"request {item.rid}: its SWA slots do not go with its slots")

    def _batch_sizes(self) -> list[int]:
        """The padded batch sizes in use: buckets below the largest batch, and the largest batch itself."""
        smaller = [size for size in _BATCH_BUCKETS if size < self.max_running_requests]
        return [*smaller, max(2, self.max_running_requests)]

    def _padded(self, num_items: int) -> int:
        return next(size for size in self._batch_sizes() if size >= num_items)

    def _decode_hidden(self, batch: ForwardBatch) -> jax.Array:
        """Final hidden states [padded batch, hidden] of one token per item."""
        num_rows = self._padded(len(batch.items))
        tile, swa = self._empty_tile(num_rows, 1), self._empty_swa_tile(num_rows, 1)
        for row, item in enumerate(batch.items):
            tile.request_rows[row] = item.req_pool_idx
            tile.positions[row, 0] = item.prefix_len
            tile.out_slots[row, 0] = item.out_slots[0]
            tile.page_table[row, : len(item.page_table)] = item.page_table
            tile.state_slots[row] = item.states.running
            if swa is not None and item.swa is not None:
                swa.out_slots[row, 0] = item.swa.out_slots[0]
                swa.page_table[row, : len(item.swa.page_table)] = item.swa.page_table
        longest = max(item.prefix_len for item in batch.items) + 1
        tile.num_blocks[...] = self._blocks_for(longest)
        meta = jax.device_put(tile, self._device)
        hidden, tables = _embed_last(
            self.config,
            self._params.embed,
            self._last_tokens,
            meta.request_rows,
            meta.positions,
        )
        return self._run_layers(hidden, TileMeta(*meta, *tables), swa)

    def _extend_hidden(self, batch: ForwardBatch) -> jax.Array | None:
        """Hidden state of each item's last token [padded batch, hidden]; None if no item wants a token."""
        kept: jax.Array | None = None
        for row, item in enumerate(batch.items):
            hidden, last_row = self._extend_item(item)
            if not item.wants_token:
                continue
            if kept is None:
                shape = (self._padded(len(batch.items)), self.config.hidden_size)
                kept = jnp.zeros(shape, jnp.float32, device=self._device)
            kept = _keep_row(kept, hidden, np.int32(row), np.int32(last_row))
        return kept

    def _extend_item(self, item: ForwardItem) -> tuple[jax.Array, int]:
        """Runs one item tile by tile; returns the last tile's hidden states and its last used row."""
        if item.token_ids is None:
            raise ValueError(f"request {item.rid}: an EXTEND item needs token_ids")
        for start, length, size in self._cut(item.num_tokens):
            tile, swa = self._empty_tile(1, size), self._empty_swa_tile(1, size)
            tokens = np.zeros(size, np.int32)
            tokens[:length] = item.token_ids[start : start + length]
            first = item.prefix_len + start
            tile.positions[0, :length] = np.arange(first, first + length)
            tile.out_slots[0, :length] = item.out_slots[start : start + length]
            tile.page_table[0, : len(item.page_table)] = item.page_table
            tile.state_slots[0] = item.states.running
            tile.request_rows[0] = item.req_pool_idx
            if swa is not None and item.swa is not None:
                swa.out_slots[0, :length] = item.swa.out_slots[start : start + length]
                swa.page_table[0, : len(item.swa.page_table)] = item.swa.page_table
            tile.num_blocks[...] = self._blocks_for(first + length)
            meta = jax.device_put(tile, self._device)
            hidden, tables = _embed_tokens(
                self.config,
                self._params.embed,
                jax.device_put(tokens, self._device),
                meta.positions,
            )
            hidden = self._run_layers(hidden, TileMeta(*meta, *tables), swa)
        return hidden, length - 1

    def _cut(self, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """(start, tokens, tile size) of each tile of a chunk: the cheapest cover, large tiles first."""
        start = 0
        while start < num_tokens:
            left = num_tokens - start
            # A padded large tile beats several small ones once it is more than half full.
            size = next((t for t in reversed(self._tiles) if left > t // 2), self._tiles[0])
            length = min(left, size)
            yield start, length, size
            start += length

    def _blocks_for(self, context_len: int) -> int:
        return -(-context_len // self._block_tokens)

    def _empty_tile(self, seqs: int, rows: int) -> _HostTile:
        """A tile of padding: position 0, written to and read from the sentinel page."""
        return _HostTile(
            positions=np.zeros((seqs, rows), np.int32),
            out_slots=np.zeros((seqs, rows), np.int32),
            page_table=np.zeros((seqs, self._table_width), np.int32),
            num_blocks=np.zeros((), np.int32),
            state_slots=np.zeros(seqs, np.int32),
            request_rows=np.full(seqs, self._scratch_idx, np.int32),
        )

    def _empty_swa_tile(self, seqs: int, rows: int) -> _SWATile | None:
        if not self._has_swa_pool:
            return None
        return _SWATile(
            out_slots=np.zeros((seqs, rows), np.int32),
            page_table=np.zeros((seqs, self._table_width), np.int32),
        )

    def _run_layers(self, hidden: jax.Array, meta: TileMeta, swa: _SWATile | None) -> jax.Array:
        states, state_index = self.recurrent_pool, 0
        swa_meta = meta
        if swa is not None:
            swa_meta = meta._replace(**jax.device_put(swa, self._device)._asdict())
        fixed = (self.config, self.kv_pool.page_size)
        layers = zip(self.config.layer_kinds, self._params.layers, strict=True)
        for layer, (kind, params) in enumerate(layers):
            if kind is not LayerKind.RECURRENT:
                kv, index, is_swa = self._layer_buffers[layer]
                window = self.config.sliding_window if kind is LayerKind.SLIDING else None
                kv[index], hidden = _attention_layer(
                    *fixed, params, kv[index], hidden, swa_meta if is_swa else meta, window
                )
            elif states is not None:
                state, conv = states.recurrent_buffers, states.conv_buffers[state_index]
                state[state_index], conv[0], self._unfinished[layer], hidden = _recurrent_layer(
                    *fixed,
                    params,
                    state[state_index],
                    conv[0],
                    self._unfinished[layer],
                    hidden,
                    meta,
                )
                state_index += 1
        return hidden

    def _sample(self, batch: ForwardBatch, hidden: jax.Array | None) -> StepOutput:
        """Head, sampling and the update of last_tokens."""
        num_rows = self._padded(len(batch.items))
        if hidden is None:
            nothing = jnp.zeros(num_rows, jnp.int32)
            return StepOutput(batch, nothing, jnp.zeros(num_rows, jnp.float32))
        targets = np.full(num_rows, self._scratch_idx, np.int32)
        for row, item in enumerate(batch.items):
            if item.wants_token:
                targets[row] = item.req_pool_idx
        params, settings = self._params, [item.sampling for item in batch.items]
        arguments = (
            self.config,
            params.final_norm,
            params.lm_head,
            hidden,
            targets,
            self._last_tokens,
        )
        if all(s.temperature <= 0 for s in settings):
            tokens, chosen, logprobs, self._last_tokens = _greedy_head(*arguments)
        else:
            rows = self._sampling_rows(batch.items, num_rows)
            tokens, chosen, logprobs, self._last_tokens = _sampling_head(*arguments, rows)
        wanted = max(item.top_logprobs_num for item in batch.items)
        top = None
        if wanted > 0:
            values, ids = _top_k(logprobs, min(wanted, self.config.vocab_size))
            top = (ids, values)
        return StepOutput(batch, tokens, chosen, top)

    def _sampling_rows(self, items: Sequence[ForwardItem], num_rows: int) -> SamplingRows:
        settings = [item.sampling for item in items]
        seeds = [self._seed_of(item) for item in items]
        steps = [item.num_sampled for item in items]
        return sampling_rows(settings, seeds, steps, num_rows, self.config.vocab_size)

    def _seed_of(self, item: ForwardItem) -> int:
        """The request's seed, or one that differs between requests and between runs of the engine."""
        if item.sampling.seed is not None:
            return item.sampling.seed
        return self._unseeded ^ zlib.crc32(item.rid.encode())


@partial(jax.jit, static_argnums=0)
def _embed_tokens(
    config: ModelConfig, embed: jax.Array, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Hidden states [rows, hidden] of `tokens`, and the rope tables of `positions` [seqs, rows]."""
    dim = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
    return embed[tokens], rope_tables(positions.reshape(-1), dim, config.rope_theta)


@partial(jax.jit, static_argnums=0)
def _embed_last(
    config: ModelConfig,
    embed: jax.Array,
    last_tokens: jax.Array,
    indices: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """As _embed_tokens, for the tokens that the requests at `indices` sampled last."""
    dim = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
    tables = rope_tables(positions.reshape(-1), dim, config.rope_theta)
    return embed[last_tokens[indices]], tables


@partial(jax.jit, donate_argnums=0)
def _keep_row(kept: jax.Array, hidden: jax.Array, row: jax.Array, source: jax.Array) -> jax.Array:
    return kept.at[row].set(hidden[source])


HeadOutput = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@partial(jax.jit, static_argnums=0, donate_argnums=5)
def _greedy_head(
    config: ModelConfig,
    final_norm: jax.Array,
    lm_head: jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
    last_tokens: jax.Array,
) -> HeadOutput:
    """(tokens, their log probabilities, all log probabilities, last_tokens with tokens put at `targets`)."""
    logits = linear(rms_norm(hidden, final_norm, config.rms_norm_eps), lm_head)
    tokens = greedy_tokens(logits)
    chosen, logprobs = chosen_logprobs(logits, tokens)
    return tokens, chosen, logprobs, last_tokens.at[targets].set(tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=5)
def _sampling_head(
    config: ModelConfig,
    final_norm: jax.Array,
    lm_head: jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
    last_tokens: jax.Array,
    rows: SamplingRows,
) -> HeadOutput:
    """As _greedy_head, but sampled by the settings in `rows`."""
    logits = linear(rms_norm(hidden, final_norm, config.rms_norm_eps), lm_head)
    tokens = sample_tokens(logits, rows)
    chosen, logprobs = chosen_logprobs(logits, tokens)
    return tokens, chosen, logprobs, last_tokens.at[targets].set(tokens)


def _idle_extend(
    tokens: int, page_size: int, settings: SamplingParams, *, swa: bool
) -> ForwardBatch:
    token_ids = np.zeros(tokens, np.int32)
    item = _idle_item(0, token_ids, -(-tokens // page_size), settings, swa=swa)
    return ForwardBatch(ForwardMode.EXTEND, (item,))


def _idle_decode(num_items: int, settings: SamplingParams, *, swa: bool) -> ForwardBatch:
    items = [_idle_item(index, None, 1, settings, swa=swa) for index in range(num_items)]
    return ForwardBatch(ForwardMode.DECODE, tuple(items))


def _idle_item(
    index: int,
    token_ids: npt.NDArray[np.int32] | None,
    num_pages: int,
    settings: SamplingParams,
    *,
    swa: bool,
) -> ForwardItem:
    """An item whose KV goes to the sentinel page."""
    out_slots = np.zeros(1 if token_ids is None else len(token_ids), np.int32)
    page_table = np.zeros(num_pages, np.int32)
    return ForwardItem(
        rid=f"warm-up-{index}",
        req_pool_idx=index,
        token_ids=token_ids,
        prefix_len=0,
        out_slots=out_slots,
        page_table=page_table,
        wants_token=True,
        sampling=settings,
        swa=SWASlots(out_slots, page_table) if swa else None,
    )
