"""Which waiting requests join the next prefill step, and with how many tokens.

A request is admitted against real room: what is free or evictable once its own prefix is locked, less what the running
requests are expected to grow by. All budgets are checked before a load-back is planned, because a plan can not be taken
back; a load-back that brings less than hoped only means more tokens to compute.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.tree_types import IncLockRefResult

from .device_memory import DeviceMemory
from .forward_batch import ForwardItem
from .item_builder import ItemBuilder
from .req import Req
from .req_to_token_pool import ReqToTokenPool
from .room import Room
from .state_tracking import StateTracking

_GROWTH_HORIZON_TOKENS = 4096


class Admission(enum.Enum):
    """ADMITTED; NO_ROOM: the device lacks slots; NO_BUDGET: the step is full, or all rows are taken."""

    ADMITTED = "admitted"
    NO_ROOM = "no_room"
    NO_BUDGET = "no_budget"


class PrefillAdder:
    """Builds one prefill step of at most `chunk_tokens` tokens. Made afresh for each step.

    No request's part crosses a border at which its recurrent state is to be copied. `holders` are the requests that
    hold slots already; `reserve_ratio` says how much of a request's possible growth is kept free for it. Results:
    `items` and `reqs` (the same order) and `load_plans`, to be finished before dispatch.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        req_to_token_pool: ReqToTokenPool,
        builder: ItemBuilder,
        tracking: StateTracking,
        chunk_tokens: int,
        holders: Iterable[Req],
        reserve_ratio: float,
    ) -> None:
        self._memory = memory
        self._tree = memory.tree
        self._rows = req_to_token_pool
        self._builder = builder
        self._tracking = tracking
        self._reserve_ratio = reserve_ratio
        self.budget_tokens = chunk_tokens
        self._holders = list(holders)
        self.items: list[ForwardItem] = []
        self.reqs: list[Req] = []
        self.load_plans: list[Any] = []
        self.matched_len = 0  # device tokens that the last added request found, before any load

    def add_chunk(self, req: Req) -> Admission:
        """The next chunk of a request that holds its row, prefix and lock already; as if not asked unless ADMITTED."""
        prefix_len = len(req.prefix_indices)
        if self._chunk_len(req, prefix_len) == 0:
            return Admission.NO_BUDGET
        self._memory.free_before_window(req, prefix_len)
        return Admission.ADMITTED if self._extend(req) else Admission.NO_ROOM

    @property
    def full(self) -> bool:
        """True if no further request can join, whatever it is."""
        return self.budget_tokens < self._memory.page_size or self._rows.available_size() == 0

    def add(self, req: Req) -> Admission:
        """A waiting request. Anything but ADMITTED leaves it as if it had not been asked."""
        if self.full:
            return Admission.NO_BUDGET
        req.init_next_round_input(self._tree)
        self.matched_len = len(req.prefix_indices)
        lock = self._tree.inc_lock_ref(req.last_node)
        room = self._memory.room() - sum(map(self._outstanding, self._holders), Room())
        if not room.holds(self._need(req)):
            self._withdraw(req, lock)
            return Admission.NO_ROOM
        lock = self._load_back(req, lock, room.full)
        if not self._place(req):
            # The plan's target pages stay locked until its bytes are on their way.
            self._tree.finish_load_back(self.load_plans)
            self.load_plans = []
            self._withdraw(req, lock)
            return Admission.NO_ROOM
        self._holders.append(req)
        return Admission.ADMITTED

    def _need(self, req: Req) -> Room:
        # Alone, a request only has to fit its prompt: what it may grow by was cut to the pool at its arrival.
        new_tokens = self._expected_tokens(req) if self._holders else 0
        end_len = len(req.fill_ids) + new_tokens
        states = Room(states=self._rows.request_owned_slots)
        return states + self._memory.lasting_growth(
            req, len(req.prefix_indices), end_len, prefills=True
        )

    def _outstanding(self, req: Req) -> Room:
        """Slots that a request which runs already is expected to ask for: the rest of its prompt, and growth."""
        uncomputed = max(0, req.num_tokens - 1 - req.kv_committed_len)
        end_len = req.kv_committed_len + uncomputed + self._expected_tokens(req)
        return self._memory.lasting_growth(
            req, req.kv_committed_len, end_len, prefills=req.prefilling
        )

    def _expected_tokens(self, req: Req) -> int:
        horizon = min(req.remaining_new_tokens, _GROWTH_HORIZON_TOKENS)
        return math.ceil(horizon * self._reserve_ratio)

    def _load_back(self, req: Req, lock: IncLockRefResult, room: int) -> IncLockRefResult:
        """Bring the host part of the prefix; returns the lock that the request holds afterwards."""
        req.swa_uuid_for_lock = lock.swa_uuid_for_lock
        if not self._tree.hicache_enabled or req.host_hit_length == 0:
            return lock
        slots, node, plan = self._tree.init_load_back(
            req.last_host_node, req.host_hit_length, mem_quota=room
        )
        if len(slots) == 0:
            return lock
        self.load_plans.extend(plan)
        new_lock: IncLockRefResult = self._tree.inc_lock_ref(node)
        self._tree.dec_lock_ref(req.last_node, lock.to_dec_params())
        req.swa_uuid_for_lock = new_lock.swa_uuid_for_lock
        req.prefix_indices = np.concatenate([req.prefix_indices, slots])
        req.last_node = req.last_host_node = node
        req.host_hit_length -= len(slots)
        req.last_matched_prefix_len = len(req.prefix_indices)
        req.extend_input_len = len(req.fill_ids) - len(req.prefix_indices)
        return new_lock

    def _place(self, req: Req) -> bool:
        if not self._memory.take_states(req):
            return False
        rows = self._rows.alloc(1)
        if rows is None:
            self._rows.free_states(req)
            return False
        req.req_pool_idx = rows[0]
        req.cache_protected_len = req.last_matched_prefix_len
        self._rows.write((rows[0], slice(0, len(req.prefix_indices))), req.prefix_indices)
        if self._extend(req):
            return True
        self._rows.free(rows[0])
        self._rows.free_states(req)
        return False

    def _extend(self, req: Req) -> bool:
        """Take slots for the next chunk and add it to the step; False with nothing taken if there is no room."""
        prefix_len = len(req.prefix_indices)
        tokens = req.all_token_ids
        seq_len = prefix_len + self._chunk_len(req, prefix_len)
        last_slot = int(req.prefix_indices[-1]) if prefix_len else 0
        slots = self._memory.extend(prefix_len, seq_len, last_slot)
        if slots is None:
            return False
        req.fill_ids = tokens[:seq_len]
        req.prefilling = seq_len < len(tokens)
        self.budget_tokens -= seq_len - prefix_len
        self.reqs.append(req)
        self.items.append(
            self._builder.build(
                req,
                prefix_len,
                slots,
                np.asarray(tokens[prefix_len:seq_len], dtype=np.int32),
                wants_token=not req.prefilling,
            )
        )
        return True

    def _chunk_len(self, req: Req, prefix_len: int) -> int:
        """Tokens of the next chunk: all up to the end or a border, or as many whole pages as the budget holds."""
        left = self._tracking.cut(prefix_len, req.num_tokens) - prefix_len
        if left <= self.budget_tokens:
            return left
        page_size = self._memory.page_size
        return max(0, (prefix_len + self.budget_tokens) // page_size * page_size - prefix_len)

    def _withdraw(self, req: Req, lock: IncLockRefResult) -> None:
        self._tree.dec_lock_ref(req.last_node, lock.to_dec_params())
        req.reset_for_requeue()
