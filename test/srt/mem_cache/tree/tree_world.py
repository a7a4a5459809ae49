"""A tiny engine around the real cache: real JAX buffers, real pools, and an oracle for every page's content.

The KV of a token is a number computed from all tokens before it, so a page under a wrong prefix, a stale page and a
half-copied page all show. `World.run` plays one request the way an engine does and checks every reused slot before it
"computes" the rest. `World.verify` checks every page on every tier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.async_impl import (
    Completion,
    DeviceJob,
    IoJob,
    create_executor,
)
from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    StorageKind,
    WritePolicy,
)
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, TierTokens, TransferId
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator
from sgl_jax_hicache.engine.req_to_token_pool import ReqToTokenPool

NUM_LAYERS = 2
WIDTH = 3
CONTEXT_LEN = 256
POISON = -7.0


class FakePool:
    """Two layers of float32 rows, laid out as an engine's pool."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        shape = (num_tokens // page_size + 1, page_size, WIDTH)
        fill = jax.jit(lambda: jnp.full(shape, POISON, jnp.float32))
        self.kv_buffer = [fill() for _ in range(NUM_LAYERS)]

    def write(self, slots: np.ndarray, values: np.ndarray) -> None:
        """values: float32[n, NUM_LAYERS, WIDTH]; the buffers are donated, as a forward step does."""
        padded = np.zeros(
            CONTEXT_LEN, np.int32
        )  # one shape, one compilation; padding goes to the sentinel page
        padded[: len(slots)] = slots
        rows = np.zeros((CONTEXT_LEN, NUM_LAYERS, WIDTH), np.float32)
        rows[: len(slots)] = values
        for layer in range(NUM_LAYERS):
            self.kv_buffer[layer] = _store(
                self.kv_buffer[layer],
                jnp.array(padded // self.page_size),
                jnp.array(padded % self.page_size),
                jnp.array(rows[:, layer]),
            )

    def read(self, slots: np.ndarray) -> np.ndarray:
        """float32[n, NUM_LAYERS, WIDTH] of the slots, through no view of the buffers (it would stop their donation)."""
        layers = [
            np.array(jax.device_put(b, b.sharding.with_memory_kind("unpinned_host"))).reshape(
                -1, WIDTH
            )
            for b in self.kv_buffer
        ]
        return np.stack([layer[slots] for layer in layers], axis=1)


@partial(jax.jit, donate_argnums=0)
def _store(buffer: jax.Array, pages: jax.Array, offsets: jax.Array, rows: jax.Array) -> jax.Array:
    return buffer.at[pages, offsets].set(rows)


def stored_keys(shelf: dict[StorageNamespace, HiCacheStorage]) -> set[bytes]:
    """The keys of every page on the shelf."""
    return {key for storage in shelf.values() for key in storage._pages}


def expected_kv(token_ids: Sequence[int], extra_key: str | None = None) -> np.ndarray:
    """float32[n, NUM_LAYERS, WIDTH]: exact integers that depend on all tokens before and on the extra_key."""
    state = sum(map(ord, extra_key or "")) + 17 * (extra_key is not None)
    rows = np.empty((len(token_ids), NUM_LAYERS, WIDTH), np.float32)
    for i, token in enumerate(token_ids):
        state = (state * 48271 + int(token) + 1) % 8388593
        for layer in range(NUM_LAYERS):
            rows[i, layer] = [(state * (layer * WIDTH + w + 1)) % 8388593 for w in range(WIDTH)]
    return rows


@dataclass
class Request:
    """A request with the fields the cache reads and writes."""

    rid: str
    origin_input_ids: list[int]
    extra_key: str | None = None
    dp_rank: int = 0
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    req_pool_idx: int = -1
    last_node: Any = None
    prefix_indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    cache_protected_len: int = 0
    last_matched_prefix_len: int = 0
    kv_committed_len: int = 0
    tiers: TierTokens | None = None

    def pop_committed_kv_cache(self) -> int:
        committed, self.kv_committed_len = self.kv_committed_len, 0
        return committed


class ManualExecutor:
    """A transfer executor whose jobs run when the test says so: deterministic, can delay, reorder and fail them."""

    def __init__(self, auto: bool = True) -> None:
        self.auto = auto
        self.jobs: list[tuple[TransferId, Callable[[], Any]]] = []
        self.done: list[Completion] = []
        self.fail_next: list[str] = []
        self.device_jobs = 0

    @property
    def num_in_flight(self) -> int:
        return len(self.jobs) + len(self.done)

    def submit_device(self, job: DeviceJob) -> None:
        self.device_jobs += 1

        def run() -> Any:
            jax.block_until_ready(job.start())
            return job.finish()

        self._submit(job.transfer_id, run)

    def submit_io(self, job: IoJob) -> None:
        self._submit(job.transfer_id, job.run)

    def _submit(self, transfer_id: TransferId, run: Callable[[], Any]) -> None:
        self.jobs.append((transfer_id, run))
        if self.auto:
            self.run_one(len(self.jobs) - 1)

    def run_one(self, index: int = 0) -> None:
        """Run job `index`; it fails if `fail_next` holds a reason."""
        transfer_id, run = self.jobs.pop(index)
        if self.fail_next:
            self.done.append(Completion(transfer_id, None, self.fail_next.pop(0), 0.0))
            return
        try:
            self.done.append(Completion(transfer_id, run(), None, 0.0))
        except Exception as error:
            self.done.append(Completion(transfer_id, None, f"{type(error).__name__}: {error}", 0.0))

    def run_all(self) -> None:
        while self.jobs:
            self.run_one()

    def poll(self) -> list[Completion]:
        done, self.done = self.done, []
        return done

    def wait_any(self, timeout_s: float) -> bool:
        """Waiting is what lets jobs run."""
        if not self.done and self.jobs:
            self.run_one()
        return bool(self.done)

    def renew_io(self) -> None:
        """Nothing here can be stuck for ever."""

    def drain(self, deadline_s: float) -> bool:
        self.run_all()
        return True

    def shutdown(self, deadline_s: float) -> bool:
        self.jobs.clear()
        return True


class Shelf(MemoryStorage):
    """A storage that outlives the world that closes it, as files outlive a process."""

    def close(self) -> None:
        pass


class World:
    """The cache and the engine's objects around it."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        device_pages: int = 16,
        ratio: float = 2.0,
        storage: StorageKind | None = StorageKind.NONE,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        scheme: HostScheme = HostScheme.PER_BLOCK,
        executor: Any = None,
        async_impl: AsyncImpl | None = None,
        shelf: dict[StorageNamespace, HiCacheStorage] | None = None,
        is_eagle: bool = False,
        disable: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
        path: Path = Path("unused"),
        storage_factories: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.page_size = page_size
        self.is_eagle = is_eagle
        self.shelf = shelf if shelf is not None else {}
        if async_impl is not None:
            executor = create_executor(async_impl.value)
        self.executor = executor if executor is not None else ManualExecutor()
        self.registry = CollectorRegistry()
        self.pool = FakePool(device_pages * page_size, page_size)
        self.allocator = PagedTokenToKVPoolAllocator(device_pages * page_size, page_size, self.pool)
        self.table = ReqToTokenPool(8, CONTEXT_LEN)
        self.num_tokens = device_pages * page_size
        self.cache: UnifiedRadixCache = build_unified_radix_cache(
            HiCacheConfig(
                storage=storage,
                ratio=ratio,
                write_policy=policy,
                host_scheme=scheme,
                storage_path=path,
                **(settings or {}),
            ),
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            model_identity=ModelIdentity("test/model", "v1"),
            is_eagle=is_eagle,
            disable=disable,
            executor=self.executor,
            registry=self.registry,
            storage_factories=storage_factories or {"file": self._open_shelf},
            clock=clock,
        )
        self.counter = 0

    def _open_shelf(self, root: str | Path, namespace: StorageNamespace) -> HiCacheStorage:
        return self.shelf.setdefault(namespace, Shelf(namespace))

    @property
    def tree(self) -> Any:
        return self.cache._tree

    @property
    def controller(self) -> Any:
        return self.tree.tiers.controller

    @property
    def host_pool(self) -> Any:
        return self.controller.host_pool(ComponentKind.FULL)

    # -- a request's life --------------------------------------------------------------------------------------------

    def start(
        self, token_ids: Sequence[int], extra_key: str | None = None, *, prefetch: bool = True
    ) -> Request:
        """Arrival, matching, load-back and locking: everything up to the first forward step."""
        self.counter += 1
        req = Request(f"r{self.counter}", list(token_ids), extra_key)
        key = RadixKey(list(token_ids)[:-1], extra_key, 0)
        if prefetch:
            self.cache.start_prefetch(req.rid, key)
            for _ in range(100):
                self.cache.check_hicache_events()
                if self.cache.prefetch_ready(req.rid):
                    break
                self.cache.wait_events(1.0)
        self.admit(req)
        return req

    def admit(self, req: Request) -> None:
        key = RadixKey(req.origin_input_ids[:-1], req.extra_key, 0)
        match = self.cache.match_prefix(MatchPrefixParams(key, req=req))
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        device_len = len(match.device_indices)
        self.cache.inc_lock_ref(req.last_node)
        if match.host_hit_length:
            slots, node, plans = self.cache.init_load_back(
                match.last_host_node, match.host_hit_length, mem_quota=0
            )
            self.cache.finish_load_back(plans)
            if len(slots):
                self.cache.inc_lock_ref(node)
                self.cache.dec_lock_ref(req.last_node)
                req.last_node = node
                req.prefix_indices = np.concatenate([req.prefix_indices, slots])
        prefix_len = len(req.prefix_indices)
        req.cache_protected_len = req.last_matched_prefix_len = prefix_len
        req.tiers = self.cache.tier_tokens(
            req.rid, len(req.origin_input_ids), device_len, prefix_len
        )
        self.cache.release_prefetch(req.rid)
        want = expected_kv(req.origin_input_ids, req.extra_key)[:prefix_len]
        np.testing.assert_array_equal(
            self.pool.read(req.prefix_indices), want, "reused KV is wrong"
        )

    def extend(self, req: Request, up_to: int) -> bool:
        """Compute the prompt up to `up_to` tokens; False if there is no room."""
        done = len(req.prefix_indices)
        owned = -(-done // self.page_size) * self.page_size
        need = -(-up_to // self.page_size) * self.page_size - owned
        if req.req_pool_idx < 0:
            rows = self.table.alloc(1)
            assert rows is not None
            req.req_pool_idx = rows[0]
            self.table.write((req.req_pool_idx, slice(0, done)), req.prefix_indices)
        fresh = self.alloc(need)
        if fresh is None:
            return False
        if owned > done:
            last = int(req.prefix_indices[-1])
            rest = np.arange(last + 1, last + 1 + owned - done, dtype=np.int32)
            fresh = np.concatenate([rest, fresh])
        slots = fresh[: up_to - done]
        tokens = [*req.origin_input_ids, *req.output_ids]
        self.pool.write(slots, expected_kv(tokens[:up_to], req.extra_key)[done:])
        self.table.write((req.req_pool_idx, slice(done, up_to)), slots)
        req.fill_ids = tokens[:up_to]
        req.kv_committed_len = up_to
        req.prefix_indices = np.concatenate([req.prefix_indices, slots])
        return True

    def alloc(self, num_tokens: int) -> np.ndarray | None:
        if num_tokens <= 0:
            return np.empty(0, np.int32)
        short = num_tokens - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(short))
        return self.allocator.alloc(num_tokens)

    def finish(self, req: Request, is_insert: bool = True) -> None:
        if req.req_pool_idx < 0:
            self.cache.dec_lock_ref(req.last_node)
            return
        self.cache.cache_finished_req(req, is_insert=is_insert)
        self.table.free(req.req_pool_idx)

    def run(
        self,
        token_ids: Sequence[int],
        extra_key: str | None = None,
        *,
        chunk: int | None = None,
        num_output: int = 0,
        prefetch: bool = True,
    ) -> TierTokens:
        """A whole request; returns which tier served its prompt."""
        req = self.start(token_ids, extra_key, prefetch=prefetch)
        end = len(token_ids)
        done = len(req.prefix_indices)
        while done < end:
            done = min(done + (chunk or end), end)
            assert self.extend(req, done), "the test's pool is too small for its request"
            self.cache.cache_unfinished_req(req)
        for i in range(num_output):
            req.output_ids.append(1000 + i)
            assert self.extend(req, len(token_ids) + len(req.output_ids))
        self.finish(req)
        assert req.tiers is not None
        return req.tiers

    # -- checks ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything under way end."""
        for _ in range(50):
            self.controller.drain(10.0)
            self.cache.check_hicache_events()
            if not self.cache.has_pending_work():
                return
        raise AssertionError("transfers do not come to an end")

    def verify(self, in_use: int = 0) -> None:
        """Invariants, conservation of device slots, and the content of every page of the tree on every tier."""
        self.cache.check_invariants()
        free, evictable = self.allocator.available_size(), self.cache.evictable_size()
        total = free + evictable + self.cache.protected_size() + in_use
        assert total == self.num_tokens, (free, evictable, self.cache.protected_size(), in_use)
        slots: list[np.ndarray] = []
        want: list[np.ndarray] = []
        for node in self.tree.tree.nodes():
            content = self.content_of(node)
            data = node.data[0]
            if data.device_slots is not None:
                slots.append(data.device_slots)
                want.append(content)
            if data.host_pages is not None and self.host_pool.is_ready(data.host_pages).all():
                self.verify_host(data.host_pages, content)
        if slots:
            np.testing.assert_array_equal(
                self.pool.read(np.concatenate(slots)), np.concatenate(want)
            )

    def content_of(self, node: Any) -> np.ndarray:
        """Expected KV of a node's tokens."""
        tokens: list[int] = []
        width = 2 if self.is_eagle else 1
        for above in node.path():
            tokens += np.frombuffer(above.key, "<i8")[::width].tolist()
        return expected_kv(tokens, node.namespace.extra_key)[-node.num_tokens :]

    def verify_host(self, host_pages: np.ndarray, content: np.ndarray) -> None:
        for payload, page in zip(
            self.host_pool.read_bytes(host_pages),
            content.reshape(-1, self.page_size, NUM_LAYERS, WIDTH),
            strict=True,
        ):
            got = np.concatenate([np.asarray(part).reshape(-1).view(np.uint8) for part in payload])
            layered = np.ascontiguousarray(np.moveaxis(page, 1, 0))
            np.testing.assert_array_equal(got, layered.reshape(-1).view(np.uint8))

    def verify_at_rest(self) -> None:
        """Nothing under way, no locks, every host page owned by a node or free."""
        self.settle()
        self.verify()
        assert self.cache.protected_size() == 0
        assert self.controller.num_in_flight == 0
        assert self.host_pool.num_locked == 0
        owned = self.tree.full.host.num_pages
        assert self.host_pool.num_free + owned == self.host_pool.num_pages


def prompt(rng: random.Random, length: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(1, 500) for _ in range(length)]
