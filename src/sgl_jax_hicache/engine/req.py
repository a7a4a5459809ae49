"""One request, from its arrival to its last token.

The fields that the prefix cache reads and writes carry sgl-jax's names and meanings:

    0            cache_protected_len      len(prefix_indices)        len(fill_ids)
    |-- the tree's --|-- the request's, computed --|-- computed in this step --|

Slots below `cache_protected_len` are the tree's and are locked through `last_node`; everything above is the request's
own and is freed or handed to the tree by `cache_finished_req`. Of sliding layers, what lies before
`swa_evicted_seqlen` is freed already.

Slots of the recurrent pool: `recurrent_pool_idx` runs; `recurrent_ping_pong_track_buffer` takes copies at regular
borders, the next at `recurrent_next_track_idx`; the one before that holds the state of the first
`recurrent_last_track_seqlen` tokens, 0 if the tree has taken it. `recurrent_cow_src_index` is the tree's slot with the
state of the reused prefix, until the first step has copied it. Scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.tree_types import (
    Int32Array,
    MatchPrefixParams,
    RadixKey,
)
from sgl_jax.srt.mem_cache.hicache.types import TierTokens

from .forward_batch import SamplingParams
from .outputs import FinishReason, OutputSink, RequestStats, TokenLogprob
from .stop_strings import StopStringMatcher
from .tree_cache import TreeCache


@dataclass(frozen=True)
class GenerateRequest:
    """What a client asks for, checked and tokenised.

    `sampling.max_new_tokens` is already cut to what context and pool allow; `stop_matcher` is given if there are stop
    strings. Times come from the same clock as the scheduler's.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    sink: OutputSink
    arrival_s: float
    extra_key: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    stream: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    stop_matcher: StopStringMatcher | None = None


class Req:
    """The scheduler's record of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.rid = request.rid
        self.sampling = request.sampling
        self.extra_key = request.extra_key
        self.dp_rank = 0
        self.origin_input_ids: list[int] = list(request.input_ids)
        self.output_ids: list[int] = []

        self.finish: FinishReason | None = None
        self.prefetch_done = False
        self.tiers: TierTokens | None = None
        self.num_retractions = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.pending_logprobs: list[TokenLogprob] = []
        self.num_emitted = 0
        self._clear_placement()

    def _clear_placement(self) -> None:
        """The state of a request that holds no row, no slot and no lock."""
        self.req_pool_idx: int = -1
        self.prefilling = False  # part of its prompt is not computed yet
        self.recurrent_pool_idx = 0
        self.recurrent_state_len = 0  # tokens that the running slot has consumed
        self.recurrent_ping_pong_track_buffer: list[int] = []
        self.recurrent_next_track_idx = 0
        self.recurrent_last_track_seqlen = 0
        self.recurrent_cow_src_index: int | None = None
        self.fill_ids: list[int] = []
        self.prefix_indices: Int32Array = np.empty(0, dtype=np.int32)
        self.last_node: Any = None
        self.last_host_node: Any = None
        self.host_hit_length = 0
        self.last_matched_prefix_len = 0
        self.cache_protected_len = 0
        self.extend_input_len = 0
        self.swa_uuid_for_lock: int | None = None
        self.swa_evicted_seqlen = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self._kv_popped = False
        self.num_sampled = len(self.output_ids)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.origin_input_ids)

    @property
    def finished(self) -> bool:
        """True once the reason is known; later results of this request are dropped."""
        return self.finish is not None

    @property
    def remaining_new_tokens(self) -> int:
        """Tokens that may still be sampled, those of steps in flight already taken off."""
        return self.sampling.max_new_tokens - self.num_sampled

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and known output."""
        return self.origin_input_ids + self.output_ids

    def prefix_key(self) -> RadixKey:
        """What may be reused: everything but the last token, so that at least one is left to compute.

        The prefetch from storage and every match ask with this one key.
        """
        return RadixKey(self.all_token_ids[:-1], self.extra_key, self.dp_rank)

    def init_next_round_input(self, tree: TreeCache) -> None:
        """Look the prefix up again; the request must hold nothing. Splits nodes, takes no lock."""
        self.fill_ids = self.all_token_ids
        self.recurrent_cow_src_index = None  # the tree sets it, now or when it loads
        match = tree.match_prefix(
            MatchPrefixParams(key=self.prefix_key(), cow_recurrent=True, req=self)
        )
        self.prefix_indices = match.device_indices
        self.last_node = match.last_device_node
        self.last_host_node = match.last_host_node
        self.host_hit_length = match.host_hit_length
        self.last_matched_prefix_len = len(match.device_indices)
        self.extend_input_len = len(self.fill_ids) - len(self.prefix_indices)

    def pop_committed_kv_cache(self) -> int:
        """Tokens whose KV this request holds; 0 at the second call, so that nothing is freed twice."""
        if self._kv_popped:
            return 0
        self._kv_popped = True
        return self.kv_committed_len

    def reset_for_retract(self) -> None:
        """Back to a request that waits, after everything it held was released. It keeps its output."""
        self.num_retractions += 1
        self._clear_placement()

    def reset_for_requeue(self) -> None:
        """Back to a request that waits, when its admission did not come about."""
        self._clear_placement()

    def stats(self) -> RequestStats:
        """The account so far."""
        arrival_s = self.request.arrival_s

        def since_arrival(moment_s: float | None) -> float | None:
            return None if moment_s is None else moment_s - arrival_s

        return RequestStats(
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.output_ids),
            tiers=self.tiers or TierTokens(),
            queue_s=since_arrival(self.admitted_s),
            ttft_s=since_arrival(self.first_token_s),
            e2e_latency_s=since_arrival(self.finished_s),
            num_retractions=self.num_retractions,
        )
