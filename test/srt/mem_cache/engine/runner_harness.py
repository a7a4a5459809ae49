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
    StepOutput,
)
from sgl_jax_hicache.engine.memory_pool import build_kv_pool, build_recurrent_pool
from sgl_jax_hicache.engine.model_config import ModelConfig
from sgl_jax_hicache.engine.model_runner import ModelRunner
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
    """A runner, its pool, and requests whose pages are handed out in a scrambled order."""

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
        self.pool = build_kv_pool(config, size=size, page_size=page_size, dtype=dtype)
        self.page_size = page_size
        self.vocab_size = config.vocab_size
        self.runner = ModelRunner(
            config,
            params,
            self.pool,
            max_running_requests=max_running_requests,
            extend_tile_tokens=tiles,
            max_context_len=max_context_len,
            recurrent_pool=build_recurrent_pool(config, max_running_requests),
        )
        self._free = list(np.random.default_rng(7).permutation(np.arange(1, self.pool.num_pages)))

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
        item = ForwardItem(
            rid=f"r{sequence.idx}",
            req_pool_idx=sequence.idx,
            token_ids=None if token_ids is None else np.asarray(token_ids, np.int32),
            prefix_len=prefix,
            out_slots=self.slots(sequence, prefix, stop),
            page_table=sequence.pages[: -(-stop // self.page_size)],
            wants_token=wants,
            sampling=sequence.sampling,
            num_sampled=sequence.sampled,
            recurrent_slot=self.state_slot(sequence),
            **extra,
        )
        sequence.length = stop
        sequence.sampled += int(wants)
        return item

    def state_slot(self, sequence: Request) -> int:
        """The request's slot of the recurrent pool: not its index, so that a mix-up shows; 0 without a pool."""
        pool = self.runner.recurrent_pool
        return 0 if pool is None else pool.size - sequence.idx

    def state(self, sequence: Request) -> list[np.ndarray[Any, Any]]:
        """Copies of the recurrent and the convolution state of every recurrent layer."""
        pool, slot = self.runner.recurrent_pool, self.state_slot(sequence)
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
        num_slots = self.pool.num_pages * self.page_size
        return [np.array(buffer).reshape(num_slots, -1)[slots] for buffer in self.pool.kv_buffer]


def all_logprobs(output: StepOutput, row: int) -> np.ndarray[Any, Any]:
    """Log probabilities of the whole vocabulary, from top log probabilities of every token."""
    assert output.top_logprobs is not None
    ids, values = (np.array(part)[row] for part in output.top_logprobs)
    dense = np.empty(len(ids), np.float32)
    dense[ids] = values
    return dense
