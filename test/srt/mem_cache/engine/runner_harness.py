"""Drives a ModelRunner as a scheduler would: slots, page tables, chunks and decode steps, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_jax_hicache.engine.forward_batch import (
    ForwardBatch,
    ForwardItem,
    ForwardMode,
    SamplingParams,
    StateSlots,
    StepOutput,
    SWASlots,
)
from sgl_jax_hicache.engine.memory_pool import build_recurrent_pool
from sgl_jax_hicache.engine.model_config import ModelConfig
from sgl_jax_hicache.engine.model_runner import ModelRunner
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool, build_kv_pool, layer_buffers
from sgl_jax_hicache.engine.weights import ModelParams


@dataclass
class Request:
    """One request: its pages in order (not neighbours on purpose) and how much of it is computed."""

    idx: int
    pages: np.ndarray[Any, Any]
    length: int = 0
    sampled: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)


class Harness:
    """A runner, its pools, and requests whose pages are handed out in a scrambled order.

    Sliding layers have every token too, in pages in yet another order; `swa_page_of` says which, and may be changed.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: ModelParams,
        *,
        page_size: int = 16,
        size: int = 2048,
        dtype: str = "float32",
        max_running_requests: int = 4,
        tiles: Sequence[int] = (32, 64, 256),
        max_context_len: int = 1024,
    ) -> None:
        self.pool = build_kv_pool(
            config, size=size, swa_size=size, page_size=page_size, dtype=dtype
        )
        self.config = config
        self.page_size = page_size
        self.vocab_size = config.vocab_size
        self.runner = ModelRunner(
            config,
            params,
            self.pool,
            max_running_requests=max_running_requests,
            extend_tile_tokens=tiles,
            max_context_len=max_context_len,
            recurrent_pool=build_recurrent_pool(config, max_running_requests + 4),
        )
        num_pages = size // page_size
        scramble = np.random.default_rng(7)
        self._free = list(scramble.permutation(np.arange(1, num_pages + 1)))
        self.swa_page_of = np.concatenate([[0], 1 + scramble.permutation(num_pages)])

    def new(self, max_tokens: int, idx: int, sampling: SamplingParams | None = None) -> Request:
        """A request with room for `max_tokens`."""
        count = -(-max_tokens // self.page_size)
        pages, self._free = self._free[:count], self._free[count:]
        return Request(idx, np.asarray(pages, np.int32), sampling=sampling or SamplingParams())

    def slots(self, sequence: Request, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Token slots of positions start .. stop-1."""
        positions = np.arange(start, stop)
        pages = sequence.pages[positions // self.page_size]
        return (pages * self.page_size + positions % self.page_size).astype(np.int32)

    def item(self, sequence: Request, token_ids: Sequence[int] | None, **extra: Any) -> ForwardItem:
        """The next step of a request; advances its length."""
        num_tokens = 1 if token_ids is None else len(token_ids)
        prefix, stop = sequence.length, sequence.length + num_tokens
        wants = extra.pop("wants_token", True)
        out_slots, pages = (
            self.slots(sequence, prefix, stop),
            sequence.pages[: -(-stop // self.page_size)],
        )
        states = StateSlots(
            self.state_slot(sequence), extra.pop("cow_src", 0), extra.pop("track", 0)
        )
        item = ForwardItem(
            rid=f"r{sequence.idx}",
            req_pool_idx=sequence.idx,
            token_ids=None if token_ids is None else np.asarray(token_ids, np.int32),
            prefix_len=prefix,
            out_slots=out_slots,
            page_table=pages,
            wants_token=wants,
            sampling=sequence.sampling,
            num_sampled=sequence.sampled,
            states=states,
            swa=self._swa(out_slots, pages),
            **extra,
        )
        sequence.length = stop
        sequence.sampled += int(wants)
        return item

    def _swa(self, out_slots: np.ndarray[Any, Any], pages: np.ndarray[Any, Any]) -> SWASlots | None:
        if not isinstance(self.pool, SWAKVPool):
            return None
        return SWASlots(self._swa_slots(out_slots), self.swa_page_of[pages].astype(np.int32))

    def _swa_slots(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        pages = self.swa_page_of[slots // self.page_size]
        return (pages * self.page_size + slots % self.page_size).astype(np.int32)

    def state_slot(self, sequence: Request) -> int:
        """The request's slot of the recurrent pool: not its index, so that a mix-up shows; 0 without a pool."""
        pool = self.runner.recurrent_pool
        return 0 if pool is None else pool.size - sequence.idx

    def state(self, sequence: Request) -> list[np.ndarray[Any, Any]]:
        """Copies of the recurrent and the convolution state of every recurrent layer."""
        return self.state_at(self.state_slot(sequence))

    def state_at(self, slot: int) -> list[np.ndarray[Any, Any]]:
        """Copies of what a slot of the recurrent pool holds."""
        pool = self.runner.recurrent_pool
        assert pool is not None
        pairs = zip(pool.recurrent_buffers, pool.conv_buffers, strict=True)
        return [np.array(buffer[slot]) for state, conv in pairs for buffer in (state, conv[0])]

    def extend(self, sequence: Request, token_ids: Sequence[int], **extra: Any) -> StepOutput:
        """One prefill step of one request."""
        item = self.item(sequence, token_ids, **extra)
        return self.runner.dispatch(ForwardBatch(ForwardMode.EXTEND, (item,)))

    def decode(self, sequences: Sequence[Request], **extra: Any) -> StepOutput:
        """One decode step of several requests, each from the token it sampled last."""
        items = tuple(self.item(sequence, None, **extra) for sequence in sequences)
        return self.runner.dispatch(ForwardBatch(ForwardMode.DECODE, items))

    def generate(
        self, token_ids: Sequence[int], num_tokens: int, sequence: Request | None = None
    ) -> list[int]:
        """Prefill and decode; the sampled tokens, read only after all steps were dispatched."""
        sequence = sequence or self.new(len(token_ids) + num_tokens, idx=0)
        outputs = [self.extend(sequence, token_ids)]
        outputs += [self.decode([sequence]) for _ in range(num_tokens - 1)]
        return [int(output.next_token_ids[0]) for output in outputs]

    def kv(self, sequence: Request, start: int, stop: int) -> list[np.ndarray[Any, Any]]:
        """Copies of the KV rows of positions start .. stop-1, one array per layer."""
        slots = self.slots(sequence, start, stop)
        rows = []
        for layer in layer_buffers(self.pool, self.config).values():
            buffer = np.array(layer.buffers[layer.place])
            own = self._swa_slots(slots) if layer.is_swa else slots
            rows.append(buffer.reshape(len(buffer) * self.page_size, -1)[own])
        return rows


def all_logprobs(output: StepOutput, row: int) -> np.ndarray[Any, Any]:
    """Log probabilities of the whole vocabulary, from top log probabilities of every token."""
    assert output.top_logprobs is not None
    ids, values = (np.array(part)[row] for part in output.top_logprobs)
    dense = np.empty(len(ids), np.float32)
    dense[ids] = values
    return dense
