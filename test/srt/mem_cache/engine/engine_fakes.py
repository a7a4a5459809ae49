"""Doubles for the engine's tests: a runner whose tokens depend on every token it finds through the page table.

A wrong page, a wrong order, a page overwritten too early: each changes the hash, and so the next token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from sgl_jax_hicache.engine.forward_batch import ForwardBatch, ForwardItem, ForwardMode, StepOutput
from sgl_jax_hicache.engine.layer_kinds import RecurrentDims
from sgl_jax_hicache.engine.memory_pool import RecurrentStatePool
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool, TokenKVPool

VOCAB_SIZE = 256  # every token is a byte, so that text can be made of them
_EMPTY = -1
_HASH_START = 17


def next_token(tokens: Sequence[int]) -> int:
    """The fake model: a token that depends on all the tokens before it and on their order."""
    value = _HASH_START
    for token in tokens:
        value = _hash(value, token)
    return value % VOCAB_SIZE


def _hash(value: int, token: int) -> int:
    return (value * 1_000_003 + token + 1) % ((1 << 61) - 1)


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a run without any cache generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class GatedArray:
    """A result that is not there before its gate opens, as a future on a device."""

    def __init__(self, values: np.ndarray, gate: threading.Event | None) -> None:
        self._values = values
        self._gate = gate

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._gate is not None and not self._gate.wait(20):
            raise TimeoutError("the gate of a step was never opened")
        return np.array(self._values, dtype=dtype)


@dataclass
class FakeRunner:
    """Keeps (token, position) per slot in numpy; computes at dispatch, delivers through `gate_of(step)`."""

    num_slots: int
    page_size: int
    gate_of: Callable[[int], threading.Event | None] = lambda step: None
    on_dispatch: Callable[[ForwardBatch], None] = lambda batch: None
    batches: list[ForwardBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = np.full((self.num_slots, 2), _EMPTY, dtype=np.int64)
        self.last_token: dict[int, int] = {}

    def warm_up(self) -> None:
        """Nothing to compile."""

    def dispatch(self, batch: ForwardBatch) -> StepOutput:
        """One step; tokens are a function of what lies in the pages."""
        self.on_dispatch(batch)
        step = len(self.batches)
        self.batches.append(batch)
        tokens = [self._run(batch.mode, item) for item in batch.items]
        top_k = max(item.top_logprobs_num for item in batch.items)
        gate = self.gate_of(step)
        top = None
        if top_k:
            ids = np.array([[(t + i) % VOCAB_SIZE for i in range(top_k)] for t in tokens])
            top = (GatedArray(ids, gate), GatedArray(-ids.astype(np.float32) / 100, gate))
        return StepOutput(
            batch,
            GatedArray(np.array(tokens, dtype=np.int32), gate),
            GatedArray(-np.array(tokens, dtype=np.float32) / 100, gate),
            top,
        )

    def _run(self, mode: ForwardMode, item: ForwardItem) -> int:
        inputs = item.token_ids
        if mode is ForwardMode.DECODE:
            assert inputs is None
            inputs = [self.last_token[item.req_pool_idx]]
        assert len(inputs) == item.num_tokens
        assert int(item.out_slots.min()) >= self.page_size, "the sentinel page was handed out"
        seq_len = item.prefix_len + item.num_tokens
        self.kv[item.out_slots, 0] = inputs
        self.kv[item.out_slots, 1] = np.arange(item.prefix_len, seq_len)
        slots = item.page_table[:, None] * self.page_size + np.arange(self.page_size)
        found = self.kv[slots.reshape(-1)[:seq_len]]
        assert np.array_equal(found[:, 1], np.arange(seq_len)), f"{item.rid}: pages out of order"
        token = next_token(found[:, 0].tolist())
        if item.wants_token:
            self.last_token[item.req_pool_idx] = token
        return token


class HybridFakeRunner(FakeRunner):
    """The fake model with sliding and recurrent layers: what they find must tell the same as the pages of all tokens.

    `window`: tokens, 0 without sliding layers; their (token, position) pairs are kept by SWA slot. `num_states`: slots
    of the recurrent pool, 0 without; a state is (tokens consumed, the hash that `next_token` would have by then).
    """

    def __init__(self, *args: Any, num_swa_slots: int, window: int, num_states: int, **hooks: Any):
        super().__init__(*args, **hooks)
        self.window = window
        self.swa_kv = np.full((num_swa_slots, 2), _EMPTY, dtype=np.int64)
        self.states: list[tuple[int, int] | None] = [None] * (num_states + 1)
        self.num_cow = self.num_tracked = 0

    def _run(self, mode: ForwardMode, item: ForwardItem) -> int:
        token = super()._run(mode, item)
        if self.window:
            self._slide(item)
        if len(self.states) > 1:
            assert self._recur(item) == token, f"{item.rid}: the state is another prefix's"
        return token

    def _slide(self, item: ForwardItem) -> None:
        assert item.swa is not None
        assert int(item.swa.out_slots.min()) >= self.page_size, "the sentinel page was handed out"
        self.swa_kv[item.swa.out_slots] = self.kv[item.out_slots]
        seen = slice(max(0, item.prefix_len - self.window + 1), item.prefix_len + item.num_tokens)
        offsets = np.arange(self.page_size)
        rows = (item.swa.page_table[:, None] * self.page_size + offsets).reshape(-1)[seen]
        full = (item.page_table[:, None] * self.page_size + offsets).reshape(-1)[seen]
        assert np.array_equal(self.swa_kv[rows], self.kv[full]), f"{item.rid}: another window"

    def _recur(self, item: ForwardItem) -> int:
        slots = item.states
        assert slots.running
        if slots.cow_src:
            assert item.prefix_len
            self.states[slots.running] = self.states[slots.cow_src]
            self.num_cow += 1
        state = self.states[slots.running] if item.prefix_len else (0, _HASH_START)
        assert state is not None
        consumed, value = state
        assert consumed == item.prefix_len, f"{item.rid}: a state of {consumed} tokens"
        for token in self.kv[item.out_slots, 0].tolist():
            value = _hash(value, token)
        self.states[slots.running] = (consumed + item.num_tokens, value)
        if slots.track:
            self.states[slots.track] = self.states[slots.running]
            self.num_tracked += 1
        return value % VOCAB_SIZE


class PooledHybridFakeRunner(HybridFakeRunner):
    """As HybridFakeRunner, over real device pools of one layer each: what transfers bring there is what it reads.

    A token's KV is (token, position) in the first key and value number of its slot. A state is a count in the
    convolution buffer, and the hash in 16-bit parts, with the count again, in the other. A step replaces every buffer
    and deletes the old one, as a donating step does.
    """

    STATE_DIMS = RecurrentDims(1, 1, key_dim=1, value_dim=5, conv_kernel=2)

    def __init__(
        self,
        kv_pool: TokenKVPool,
        state_pool: RecurrentStatePool | None,
        *,
        window: int,
        **hooks: Any,
    ):
        full, swa = kv_pool, None
        if isinstance(kv_pool, SWAKVPool):
            full, swa = kv_pool.full_kv_pool, kv_pool.swa_kv_pool
        self._pairs = [(full.kv_buffer, "kv")]
        if swa is not None:
            self._pairs.append((swa.kv_buffer, "swa_kv"))
        self._state_pool = state_pool
        super().__init__(
            full.size + full.page_size,
            full.page_size,
            num_swa_slots=swa.size + swa.page_size if swa is not None else 0,
            window=window,
            num_states=state_pool.size if state_pool is not None else 0,
            **hooks,
        )

    def dispatch(self, batch: ForwardBatch) -> StepOutput:
        """One step on the pools' buffers."""
        layers = [np.array(buffers[0]) for buffers, _ in self._pairs]
        for (_, name), layer in zip(self._pairs, layers, strict=True):
            setattr(self, name, layer[..., 0, 0].reshape(-1, 2).astype(np.int64))
        self._load_states()
        output = super().dispatch(batch)
        for (buffers, name), layer in zip(self._pairs, layers, strict=True):
            layer[..., 0, 0] = getattr(self, name).reshape(layer.shape[:3])
            _replace(buffers, layer)
        self._store_states()
        return output

    def _load_states(self) -> None:
        if self._state_pool is None:
            return
        values = np.array(self._state_pool.recurrent_buffers[0])[:, 0, 0].astype(np.int64)
        counts = np.array(self._state_pool.conv_buffers[0][0])[:, 0, 0].astype(np.int64)
        self.states = [
            (int(count), sum(int(part) << 16 * i for i, part in enumerate(row[:4])))
            if row[4] == count
            else None
            for row, count in zip(values, counts, strict=True)
        ]

    def _store_states(self) -> None:
        if self._state_pool is None:
            return
        values = np.array(self._state_pool.recurrent_buffers[0])
        counts = np.array(self._state_pool.conv_buffers[0][0])
        for slot, state in enumerate(self.states):
            if state is not None:
                count, value = state
                values[slot, 0, 0] = [*(value >> 16 * i & 0xFFFF for i in range(4)), count]
                counts[slot] = count
        _replace(self._state_pool.recurrent_buffers, values)
        _replace(self._state_pool.conv_buffers[0], counts)


def _replace(buffers: list[jax.Array], values: np.ndarray) -> None:
    old = buffers[0]
    buffers[0] = jax.device_put(values, old.sharding)
    old.delete()
