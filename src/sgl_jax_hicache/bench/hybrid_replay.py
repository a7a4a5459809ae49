"""A request trace through the real cache with a hybrid model's proportions: one prompt at a time, chunk by chunk.

A prompt is computed as an engine does it: in chunks that cross no checkpoint of a recurrent state, each of which goes
into the tree; windows that no later token can see are the tree's to evict. Every page and state that the cache reuses
is compared with what computing would give. Everything that a step sets going ends before the next one, on the calling
thread, so that the same trace always gives the same hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.async_impl import (
    Completion,
    DeviceJob,
    IoJob,
    TransferExecutor,
)
from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.metrics import PREFIX
from sgl_jax.srt.mem_cache.hicache.tree_types import MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.device_memory import DeviceMemory

from .hybrid_models import FULL, WORD_BYTES, HybridModel
from .hybrid_pools import (
    FloatArray,
    HybridPools,
    Int32Array,
    build_pools,
    chosen_interval,
    device_sizes,
    layouts_of,
    window_pages,
)
from .hybrid_storage import MemoryFolder, MemoryFolderFactory
from .replay_engine import ReplayError
from .trace import BLOCK_TOKENS, TraceRequest

_DEADLINE_S = 3600.0

_FULL_SALT, _SLIDING_SALT, _STATE_SALT = 1, 2, 3


@dataclass(frozen=True)
class Memory:
    """What a model may take, in blocks of a model of the same depth whose layers are all full: so it is the same number
    of bytes for every kind. `l2_ratio` is `--hicache-ratio`; `l3_blocks` None: no storage, 0: without a bound.
    `interval`: `--hicache-checkpoint-interval`, None: the cache chooses.
    """

    l1_blocks: int
    l2_ratio: float
    l3_blocks: int | None = None
    interval: int | None = None
    page_size: int = 512
    chunk_tokens: int = 8192

    def block_bytes(self, model: HybridModel) -> int:
        """Bytes of a block in the model's small pages, if all its layers were full."""
        return BLOCK_TOKENS // self.page_size * model.words(self.page_size).all_full * WORD_BYTES

    def config(self, model: HybridModel) -> HiCacheConfig:
        """The flags that give these sizes."""
        has_storage = self.l3_blocks is not None
        return HiCacheConfig(
            storage=StorageKind.FILE if has_storage else StorageKind.NONE,
            ratio=self.l2_ratio,
            storage_path=Path("/nowhere"),
            storage_max_bytes=(self.l3_blocks or 0) * self.block_bytes(model),
            prefetch_deadline_s=_DEADLINE_S,
            checkpoint_interval=self.interval if model is not FULL else None,
        )


@dataclass(frozen=True)
class Replayed:
    """What each request found, the checkpoint interval (0: none), and the most bytes that storage held, in blocks."""

    tiers: tuple[TierTokens, ...]
    interval: int
    most_l3_blocks: float

    @property
    def cached(self) -> int:
        """Hit tokens of all requests."""
        return sum(tiers.cached for tiers in self.tiers)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of all prompts by the tier that had them."""
        names = ("device", "host", "storage", "computed")
        return {name: sum(getattr(tiers, name) for tiers in self.tiers) for name in names}


def replay_hybrid(requests: Sequence[TraceRequest], model: HybridModel, memory: Memory) -> Replayed:
    """Serve all requests with a cache of that much memory. Raises ReplayError."""
    engine = HybridEngine(model, memory, max(len(r.hash_ids) for r in requests) * BLOCK_TOKENS)
    try:
        tiers = tuple(engine.serve(request) for request in requests)
        engine.cache.check_invariants()
    finally:
        engine.close()
    most = engine.folder.most_bytes / memory.block_bytes(model)
    return Replayed(tiers, engine.interval, most)


class AtOnce(TransferExecutor):
    """Does every job when it is submitted, on the thread that submits it."""

    def _begin_device(self, ticket: Any, job: DeviceJob) -> None:
        jax.block_until_ready(job.start())  # type: ignore[no-untyped-call]
        ticket.settle(job.finish(), None)

    def submit_io(self, job: IoJob) -> None:
        """Done when this returns. A failure of the replay's own storage is a fault, and raises."""
        self._register(job.transfer_id, job.lane.value).settle(job.run(), None)

    def _completion_of(self, ticket: Any) -> Completion | None:
        completion: Completion | None = ticket.completion
        return completion


@dataclass
class Prompt:
    """A running request, with the names that the cache reads and writes (`contract.CacheableRequest`). Tokens are int64
    arrays, which the cache takes like sequences."""

    origin_input_ids: Any
    req_pool_idx: int = 0
    output_ids: Sequence[int] = ()
    extra_key: str | None = None
    dp_rank: int = 0
    fill_ids: Any = ()
    prefix_indices: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    cache_protected_len: int = 0
    last_matched_prefix_len: int = 0
    last_node: Any = None
    swa_evicted_seqlen: int = 0
    recurrent_pool_idx: int = 0
    recurrent_ping_pong_track_buffer: list[int] = field(default_factory=list)
    recurrent_next_track_idx: int = 0
    recurrent_last_track_seqlen: int = 0
    recurrent_cow_src_index: int | None = None

    def pop_committed_kv_cache(self) -> int:
        """All that was computed."""
        return len(self.fill_ids)


class HybridEngine:
    """The engine side of a hybrid replay: pools of `memory`'s bytes, and the cache over them."""

    def __init__(self, model: HybridModel, memory: Memory, longest_prompt: int) -> None:
        page_size = memory.page_size
        if BLOCK_TOKENS % page_size or memory.chunk_tokens % page_size:
            raise ReplayError(
                f"pages of {page_size} tokens do not divide a block of {BLOCK_TOKENS} and a chunk of "
                f"{memory.chunk_tokens}"
            )
        self._model, self._memory = model, memory
        self.folder = MemoryFolder()
        self._registry = CollectorRegistry()
        self.sizes = device_sizes(
            model, page_size, memory.chunk_tokens, memory.l1_blocks * memory.block_bytes(model)
        )
        self._pools = build_pools(model, self.sizes, page_size, longest_prompt)
        try:
            self.cache = build_unified_radix_cache(
                memory.config(model),
                req_to_token_pool=self._pools.rows,
                token_to_kv_pool_allocator=self._pools.allocator,
                page_size=page_size,
                model_identity=ModelIdentity("replay", "0"),
                sliding_window_size=model.window,
                recurrent_state_pool=self._pools.states,
                registry=self._registry,
                executor=AtOnce(num_io_workers=1),
                storage_factories={"file": MemoryFolderFactory(self.folder)},
            )
        except HiCacheConfigError as error:
            raise ReplayError(f"{model.name}: {error}") from error
        tree: Any = self.cache
        self._device = DeviceMemory(
            tree, self._pools.allocator, self._pools.rows, memory.chunk_tokens
        )
        self._num_served = 0

    @property
    def interval(self) -> int:
        """Tokens between checkpoints; 0 for a model that needs none."""
        if self._model is FULL:
            return 0
        return self._memory.interval or chosen_interval(self._model, self._memory.page_size)

    @property
    def pools(self) -> HybridPools:
        """The device memory."""
        return self._pools

    @property
    def host_bytes(self) -> int:
        """What the host pools of all components may take."""
        total = 0
        for kind, layout in layouts_of(self._model, self._memory.page_size).items():
            total += (
                int(self.metric("host_pages_capacity", component=kind.value)) * layout.page_bytes
            )
        return total

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the cache; LookupError if there is none of that name and labels."""
        value = self._registry.get_sample_value(PREFIX + name, labels)
        if value is None:
            raise LookupError(f"no metric {name} with {labels}")
        return value

    def serve(self, request: TraceRequest) -> TierTokens:
        """One prompt, from its arrival until everything that it set going has ended. Raises ReplayError."""
        content = _Content(request, self._memory.page_size)
        req = Prompt(np.repeat(np.array(request.hash_ids, np.int64), BLOCK_TOKENS))
        rid, num_tokens = str(self._num_served), len(req.origin_input_ids)
        self._num_served += 1
        key = RadixKey(req.origin_input_ids[:-1])  # a token is always left to compute
        self.cache.start_prefetch(rid, key)
        while not self.cache.prefetch_ready(rid):
            self.cache.check_hicache_events()
        device_len = self._admit(req, key)
        tiers = self.cache.tier_tokens(rid, num_tokens, device_len, len(req.prefix_indices))
        self.cache.release_prefetch(rid)
        self._verify(req, content)
        self._start(req)
        while len(req.prefix_indices) < num_tokens:
            self._compute_chunk(req, content)
            self._settle()
        self.cache.cache_finished_req(req, is_insert=False)
        self._pools.rows.free(req.req_pool_idx)
        self._pools.rows.free_states(req)
        self._settle()
        return tiers

    def close(self) -> None:
        """Stop the cache's workers. Raises ReplayError if they hang."""
        if not self.cache.shutdown(60.0):
            raise ReplayError("the cache did not stop")

    def _settle(self) -> None:
        while self.cache.has_pending_work():
            self.cache.check_hicache_events()

    def _admit(self, req: Prompt, key: RadixKey) -> int:
        """Match and load; the prefix is locked. Returns how many tokens were on the device."""
        cache = self.cache
        match = cache.match_prefix(MatchPrefixParams(key, cow_recurrent=True, req=req))
        cache.inc_lock_ref(match.last_device_node)
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        if match.host_hit_length:
            loaded, node, plans = cache.init_load_back(match.last_host_node, match.host_hit_length)
            if len(loaded):
                cache.finish_load_back(plans)
                cache.inc_lock_ref(node)
                cache.dec_lock_ref(req.last_node)
                req.prefix_indices = np.concatenate([req.prefix_indices, loaded])
                req.last_node = node
        return len(match.device_indices)

    def _start(self, req: Prompt) -> None:
        """Row and states of a request that begins behind its prefix."""
        rows = self._pools.rows
        if not self._device.take_states(req):  # type: ignore[arg-type]
            raise ReplayError("there are no state slots for one request")
        taken = rows.alloc(1)
        assert taken is not None  # one request at a time
        req.req_pool_idx = taken[0]
        req.cache_protected_len = req.last_matched_prefix_len = len(req.prefix_indices)
        rows.write((req.req_pool_idx, slice(0, len(req.prefix_indices))), req.prefix_indices)

    def _compute_chunk(self, req: Prompt, content: _Content) -> None:
        """Compute up to the next chunk's end or checkpoint, and put that into the tree."""
        begin, page_size = len(req.prefix_indices), self._memory.page_size
        end = min(len(req.origin_input_ids), begin + self._memory.chunk_tokens)
        track_interval = self.cache.recurrent_track_interval
        if track_interval:
            end = min(end, (begin // track_interval + 1) * track_interval)
        slots = self._device.extend(begin, end, int(req.prefix_indices[-1]) if begin else 0)
        if slots is None:
            raise ReplayError(
                f"{self._model.name}: a prompt of {len(req.origin_input_ids)} tokens does not fit the device; give "
                "more --l1-blocks"
            )
        pages = range(begin // page_size, end // page_size)
        self._pools.full.write(_pages(slots, page_size), content.full(pages))
        if self._pools.sliding is not None:
            self._pools.sliding.write(self._sliding_pages(slots), content.sliding(pages))
        if self._pools.states is not None and end % track_interval == 0:
            slot = req.recurrent_ping_pong_track_buffer[req.recurrent_next_track_idx]
            self._pools.states.write(slot, content.state(end))
            req.recurrent_last_track_seqlen = end
        self._pools.rows.write((req.req_pool_idx, slice(begin, end)), slots)
        req.fill_ids = req.origin_input_ids[:end]
        self.cache.cache_unfinished_req(req)

    def _verify(self, req: Prompt, content: _Content) -> None:
        """Every part of the reused prefix that the engine would read."""
        slots, page_size = req.prefix_indices, self._memory.page_size
        num_pages = len(slots) // page_size
        if not num_pages:
            return
        ok = self._pools.full.holds(_pages(slots, page_size), content.full(range(num_pages)))
        if self._pools.sliding is not None:
            seen = range(max(num_pages - window_pages(self._model, page_size), 0), num_pages)
            pages = self._sliding_pages(slots[seen.start * page_size :])
            ok = ok and bool(pages.all())
            ok = ok and self._pools.sliding.holds(pages, content.sliding(seen))
        if self._pools.states is not None:
            source = req.recurrent_cow_src_index
            ok = ok and source is not None
            ok = ok and self._pools.states.holds(source or 0, content.state(len(slots)))
        if not ok:
            raise ReplayError(
                f"{self._model.name}: a page or state that the cache reused has another content"
            )

    def _sliding_pages(self, full_slots: Int32Array) -> Int32Array:
        mapped = self.cache.token_to_kv_pool_allocator.full_to_swa_index_mapping  # type: ignore[attr-defined]
        return _pages(mapped[full_slots], self._memory.page_size)


@dataclass(frozen=True)
class _Content:
    """What computing a prompt puts into its pages and states. A block's id names all tokens up to its end."""

    request: TraceRequest
    page_size: int

    def full(self, pages: range) -> FloatArray:
        """Marks of Full pages."""
        return self._marks(pages, _FULL_SALT)

    def sliding(self, pages: range) -> FloatArray:
        """Marks of the sliding layers' pages."""
        return self._marks(pages, _SLIDING_SALT)

    def state(self, num_tokens: int) -> float:
        """Mark of the state that has consumed so many tokens."""
        last = num_tokens // self.page_size - 1
        return float(self._marks(range(last, last + 1), _STATE_SALT)[0])

    def _marks(self, pages: range, salt: int) -> FloatArray:
        per_block = BLOCK_TOKENS // self.page_size
        page = np.arange(pages.start, pages.stop)
        ids = np.array(self.request.hash_ids, np.int64)[page // per_block]
        named = (ids * per_block + page % per_block) * 3 + salt
        # Whole numbers below 2**23, so that a few thousand more are whole numbers in float32 too.
        return (named * 40503 % (1 << 23) + 1).astype(np.float32)


def _pages(slots: Int32Array, page_size: int) -> Int32Array:
    return (slots[::page_size] // np.int32(page_size)).astype(np.int32)
