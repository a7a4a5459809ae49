"""The embedded engine's own parts around the real cache, for every mix of layers, without a model.

Allocators, request table, admission arithmetic, state tracking and the builder of steps are the engine's. Only the step
itself is not: `HybridWorld.compute` first compares all that the step would read with the oracle (`hybrid_pools`), then
writes what it would compute. Every free slot is poisoned before each load and each admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faulty_shelf import FaultyShelf, Shelves
from hybrid_pools import FULL, STATE, SWA, DevicePools, Mix, chain, chain_start, encoded
from tree_world import ManualExecutor

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import (
    HiCacheConfig,
    HostScheme,
    StorageKind,
    WritePolicy,
)
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, TierTokens
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator
from sgl_jax_hicache.engine.device_memory import DeviceMemory
from sgl_jax_hicache.engine.forward_batch import ForwardItem, SamplingParams
from sgl_jax_hicache.engine.item_builder import ItemBuilder
from sgl_jax_hicache.engine.req import GenerateRequest, Req
from sgl_jax_hicache.engine.req_to_token_pool import HybridReqToTokenPool, ReqToTokenPool
from sgl_jax_hicache.engine.state_tracking import StateTracking
from sgl_jax_hicache.engine.swa_allocator import SWATokenToKVPoolAllocator

CONTEXT_LEN = 256


@dataclass(frozen=True)
class Settings:
    """Pools and flags of one world. `device_pages`, `swa_pages` of `page_size` tokens; `num_states`: slots of the state
    pool; `interval`: tokens between checkpoints."""

    mix: Mix
    page_size: int = 4
    device_pages: int = 24
    swa_pages: int = 24
    num_states: int = 16
    rows: int = 4
    track_slots: int = 1
    interval: int = 8
    ratio: float = 2.0
    storage: StorageKind | None = StorageKind.FILE
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    scheme: HostScheme = HostScheme.PER_BLOCK


class HybridWorld:
    """One process: pools, cache and requests. `shelves` outlive it. Time (`now_s`) moves when the test says so."""

    def __init__(
        self,
        settings: Settings,
        *,
        shelves: Shelves | None = None,
        executor: ManualExecutor | None = None,
    ) -> None:
        mix, page_size = settings.mix, settings.page_size
        self.settings = settings
        self.shelves = shelves if shelves is not None else Shelves()
        self.executor = executor if executor is not None else ManualExecutor()
        self.now_s = 0.0
        full_tokens, swa_tokens = settings.device_pages * page_size, settings.swa_pages * page_size
        self.pools = DevicePools(mix, page_size, full_tokens, swa_tokens, settings.num_states)
        self.allocator: Any = (
            PagedTokenToKVPoolAllocator(full_tokens, page_size, self.pools.kvcache)
            if mix.window is None
            else SWATokenToKVPoolAllocator(full_tokens, swa_tokens, page_size, self.pools.kvcache)
        )
        self.rows: Any = (
            HybridReqToTokenPool(
                settings.rows, CONTEXT_LEN, settings.num_states, settings.track_slots
            )
            if mix.states
            else ReqToTokenPool(settings.rows, CONTEXT_LEN)
        )
        self.cache: UnifiedRadixCache = build_unified_radix_cache(
            HiCacheConfig(
                storage=settings.storage,
                storage_path=Path("unused"),
                ratio=settings.ratio,
                write_policy=settings.policy,
                host_scheme=settings.scheme,
                checkpoint_interval=settings.interval,
            ),
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            model_identity=ModelIdentity("test/model", "v1"),
            sliding_window_size=mix.window,
            recurrent_state_pool=self.pools.states,
            executor=self.executor,
            storage_factories={"file": self.shelves.open},
            clock=lambda: self.now_s,
        )
        self.memory = DeviceMemory(self.cache, self.allocator, self.rows, CONTEXT_LEN)
        self.tracking = StateTracking(
            active=mix.states, interval=self.cache.recurrent_track_interval
        )
        self.builder = ItemBuilder(self.rows, self.allocator, mix.window, self.tracking)
        self.admitted: list[Req] = []
        self.pending_loads: list[Any] = []
        self.sequences: set[tuple[str | None, bytes]] = set()
        self._num_requests = 0

    # -- shorthands --------------------------------------------------------------------------------------------------

    @property
    def tree(self) -> Any:
        """The tiered tree."""
        return self.cache._tree

    @property
    def controller(self) -> Any:
        """The one of the transfers."""
        return self.tree.tiers.controller

    def component(self, kind: ComponentKind) -> Any:
        """A component of the tree."""
        return self.tree.component(kind)

    def host_pool(self, kind: ComponentKind) -> Any:
        """The host pool of a component."""
        return self.controller.host_pool(kind)

    def shelf(self, kind: ComponentKind) -> FaultyShelf:
        """The storage of a component."""
        storage: FaultyShelf = self.controller.mount.storages[kind]
        return storage

    def numbers(self, req: Req, num_tokens: int) -> np.ndarray:
        """The oracle's numbers of a request's first tokens, int64[num_tokens]."""
        return chain(chain_start(req.extra_key), encoded(req.all_token_ids[:num_tokens]))

    # -- a request's life --------------------------------------------------------------------------------------------

    def arrive(
        self, token_ids: Sequence[int], extra_key: str | None = None, *, prefetch: bool = True
    ) -> Req:
        """A request that waits; its pages are asked for."""
        self._num_requests += 1
        rid = f"r{self._num_requests}"
        req = Req(
            GenerateRequest(
                rid, tuple(token_ids), SamplingParams(), lambda chunk: True, 0.0, extra_key
            )
        )
        if prefetch:
            self.cache.start_prefetch(rid, req.prefix_key())
        return req

    def await_prefetch(self, req: Req) -> None:
        """Until the request need not wait for its pages: they are there, or, where others that wait hold the room for
        them, the deadline is over."""
        for _ in range(100):
            self.cache.check_hicache_events()
            if self.cache.prefetch_ready(req.rid):
                return
            if not self.cache.wait_events(1.0):
                self.now_s += 1.0
        raise AssertionError("the prefetch does not end")

    def admit(self, req: Req) -> bool:
        """Match, lock, load back, take a row and state slots; False, with nothing taken, if there are none of these.

        Loaded pages are in place after `finish_loads`.
        """
        if self.rows.available_size() == 0:
            return False
        self.poison_free_slots()
        req.init_next_round_input(self.cache)
        device_len = len(req.prefix_indices)
        self.cache.inc_lock_ref(req.last_node)
        self._load_back(req)
        if not self.memory.take_states(req):
            self.finish_loads()
            self.cache.dec_lock_ref(req.last_node)
            req.reset_for_requeue()
            return False
        (req.req_pool_idx,) = self.rows.alloc(1)
        prefix_len = len(req.prefix_indices)
        req.cache_protected_len = req.last_matched_prefix_len = prefix_len
        self.rows.write((req.req_pool_idx, slice(0, prefix_len)), req.prefix_indices)
        if req.tiers is None:
            req.tiers = self.cache.tier_tokens(req.rid, req.prompt_len, device_len, prefix_len)
        self.admitted.append(req)
        return True

    def _load_back(self, req: Req) -> None:
        if not req.host_hit_length:
            return
        slots, node, pending = self.cache.init_load_back(
            req.last_host_node, req.host_hit_length, mem_quota=0
        )
        self.pending_loads += pending
        if len(slots):
            self.cache.inc_lock_ref(node)
            self.cache.dec_lock_ref(req.last_node)
            req.last_node = node
            req.prefix_indices = np.concatenate([req.prefix_indices, slots])

    def finish_loads(self) -> None:
        """Put loaded pages into the buffers, as an engine does before each step."""
        pending, self.pending_loads = self.pending_loads, []
        self.cache.finish_load_back(pending)

    def extend(self, req: Req, num_tokens: int) -> bool:
        """Compute the next tokens of a prompt, up to a border where the state is tracked; False if there is no room."""
        self.finish_loads()
        prefix_len = len(req.prefix_indices)
        end = min(prefix_len + num_tokens, req.num_tokens)
        seq_len = self.tracking.cut(prefix_len, end)
        if not self._step(req, prefix_len, seq_len):
            return False
        req.fill_ids = req.all_token_ids[:seq_len]
        req.prefilling = seq_len < req.num_tokens
        self.cache.cache_unfinished_req(req)
        return True

    def decode(self, req: Req, token: int) -> bool:
        """Sample one more token and compute it; False if there is no room for it."""
        self.finish_loads()
        req.output_ids.append(token)
        prefix_len = req.kv_committed_len
        if not self._step(req, prefix_len, prefix_len + 1):
            req.output_ids.pop()
            return False
        interval = self.cache.checkpoint_interval
        if interval and (prefix_len + 1) % interval == 0:
            req.fill_ids = req.all_token_ids[: prefix_len + 1]
            req.output_ids.append(
                token
            )  # the next one is sampled by the time that pages are handed over
            self.cache.cache_unfinished_req(req)
            req.output_ids.pop()
        return True

    def finish(self, req: Req, *, is_insert: bool = True) -> None:
        """The request has ended, or is sent back to the queue."""
        self.finish_loads()
        self.cache.cache_finished_req(req, is_insert=is_insert)
        self.rows.free(req.req_pool_idx)
        self.rows.free_states(req)
        self.admitted.remove(req)

    def retract(self, req: Req) -> None:
        """Back to a request that waits."""
        self.finish(req, is_insert=False)
        req.reset_for_retract()

    def run(
        self,
        token_ids: Sequence[int],
        extra_key: str | None = None,
        *,
        chunk: int = CONTEXT_LEN,
        answer: Sequence[int] = (),
        prefetch: bool = True,
    ) -> TierTokens:
        """A whole request; which tier served how much of its prompt."""
        req = self.start(token_ids, extra_key, prefetch=prefetch)
        while len(req.prefix_indices) < len(token_ids):
            assert self.extend(req, chunk), "the test's pools are too small for its request"
        for token in answer:
            assert self.decode(req, token), "the test's pools are too small for its request"
        self.finish(req)
        self.cache.release_prefetch(req.rid)
        assert req.tiers is not None
        return req.tiers

    def start(
        self, token_ids: Sequence[int], extra_key: str | None = None, *, prefetch: bool = True
    ) -> Req:
        """A request that is admitted as soon as its pages are there."""
        req = self.arrive(token_ids, extra_key, prefetch=prefetch)
        self.await_prefetch(req)
        assert self.admit(req), "the test's pools are too small for its request"
        self.finish_loads()
        return req

    def match(self, token_ids: Sequence[int], extra_key: str | None = None) -> tuple[int, int]:
        """How much of a prompt the device has, and how much more the host has."""
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(list(token_ids), extra_key, 0)))
        return len(match.device_indices), match.host_hit_length

    # -- the step ----------------------------------------------------------------------------------------------------

    def _step(self, req: Req, prefix_len: int, seq_len: int) -> bool:
        self.memory.free_before_window(req, prefix_len)
        last = int(self.rows.req_to_token[req.req_pool_idx, prefix_len - 1]) if prefix_len else 0
        slots = self.memory.extend(prefix_len, seq_len, last)
        if slots is None:
            return False
        token_ids = np.array(req.all_token_ids[prefix_len:seq_len], np.int32)
        self.compute(req, self.builder.build(req, prefix_len, slots, token_ids, wants_token=False))
        self.sequences.add((req.extra_key, encoded(req.all_token_ids[:seq_len])))
        return True

    def compute(self, req: Req, item: ForwardItem) -> None:
        """What the model would do: read the prefix (of the window, of the state), write what follows from it."""
        pools, prefix_len = self.pools, item.prefix_len
        numbers = self.numbers(req, prefix_len + item.num_tokens)
        image = pools.image()
        seen = {FULL: (0, item.page_table, item.out_slots)}
        if item.swa is not None and self.settings.mix.window is not None:
            first = max(0, prefix_len - self.settings.mix.window + 1)
            seen[SWA] = (first, item.swa.page_table, item.swa.out_slots)
        for kind, (first, pages, _) in seen.items():
            slots = (pages[:, None] * pools.page_size + np.arange(pools.page_size)).reshape(-1)
            np.testing.assert_array_equal(
                image[kind][slots[first:prefix_len]],
                pools.expected(kind, numbers[first:prefix_len]),
                f"{kind} of {req.rid} before token {prefix_len} is wrong",
            )
        for kind, (_, _, out_slots) in seen.items():
            pools.write(kind, out_slots, numbers[prefix_len:])
        if self.settings.mix.states:
            self._compute_state(req, item, image[STATE], numbers)

    def _compute_state(
        self, req: Req, item: ForwardItem, image: np.ndarray, numbers: np.ndarray
    ) -> None:
        slots, pools = item.states, self.pools
        source = slots.cow_src or slots.running
        if item.prefix_len:
            np.testing.assert_array_equal(
                image[source],
                pools.expected(STATE, numbers[item.prefix_len - 1 : item.prefix_len])[0],
                f"the state of {req.rid} after {item.prefix_len} tokens is wrong",
            )
        if slots.cow_src:
            pools.copy_state(slots.cow_src, slots.running)
        pools.write(STATE, np.array([slots.running]), numbers[-1:])
        if slots.track:
            pools.copy_state(slots.running, slots.track)

    # -- eviction, poison, rest --------------------------------------------------------------------------------------

    def evict(self, *, full: int = 0, swa: int = 0, states: int = 0) -> None:
        """Free that much of each kind, if it is evictable."""
        self.cache.evict(EvictParams(full, swa, 0, states))

    def clear_device(self) -> None:
        """Let all transfers end, then take everything that is not locked off the device."""
        self.settle()
        self.evict(full=10**6)

    def free_slots(self) -> dict[ComponentKind, np.ndarray]:
        """The rows of each kind that nobody has."""
        offsets = np.arange(self.settings.page_size)
        halves = {FULL: self.allocator}
        if self.settings.mix.window is not None:
            halves = {
                FULL: self.allocator.full_attn_allocator,
                SWA: self.allocator.swa_attn_allocator,
            }
        free = {
            kind: (half.free_pages()[:, None] * self.settings.page_size + offsets).reshape(-1)
            for kind, half in halves.items()
        }
        if self.settings.mix.states:
            free[STATE] = np.array(self.rows.recurrent_free_slots[0], np.int32)
        return free

    def poison_free_slots(self) -> None:
        """What is taken next holds nothing of use."""
        self.pools.poison(self.free_slots())

    def settle(self) -> None:
        """Let everything under way end."""
        for _ in range(100):
            if self.cache.hicache_enabled:
                self.controller.drain(10.0)
            self.cache.check_hicache_events()
            if not self.cache.has_pending_work():
                return
        raise AssertionError("transfers do not come to an end")

    def reset(self) -> None:
        """Forget what is cached; the engine takes all slots back. Only without admitted requests."""
        assert not self.admitted
        self.cache.reset()
        self.allocator.clear()
        self.rows.clear()
