"""Faults of caches of this kind that have no test beside the part they lie in; docs/faults.md says which is which."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tree_world import ManualExecutor, Request, World, expected_kv, prompt, stored_keys

from sgl_jax.srt.mem_cache.hicache.config import StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, RadixKey


def tokens(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def stored_bytes(shelf: dict[object, HiCacheStorage]) -> dict[bytes, bytes]:
    """Every page on the shelf."""
    return {key: page for storage in shelf.values() for key, page in storage._pages.items()}


def test_a_node_split_while_its_pages_are_written_to_storage_keeps_them() -> None:
    """Fault 5: the write reads host pages; a split must leave both halves' pages with it, or eviction refills them."""
    shelf: dict = {}
    executor = ManualExecutor(auto=False)
    world = World(
        storage=StorageKind.FILE, shelf=shelf, executor=executor, device_pages=16, ratio=0.5
    )
    first = world.start(tokens(17), prefetch=False)
    assert world.extend(first, 17)
    world.cache.cache_unfinished_req(first)
    world.finish(first)
    executor.run_all()  # the backup
    world.cache.check_hicache_events()  # and now its storage write is submitted, and held
    assert len(executor.jobs) == 1
    second = world.start([*tokens(8), *tokens(9, 500)], prefetch=False)
    assert len(second.prefix_indices) == 8, "the node is cut in the middle"
    world.finish(second, is_insert=False)
    world.cache.evict(EvictParams(world.num_tokens))
    held = executor.jobs.pop(0)
    for i in range(4):  # the host pool is too small for all of this
        req = world.start(tokens(17, 1000 * (i + 1)), prefetch=False)
        assert world.extend(req, 17)
        world.cache.cache_unfinished_req(req)
        world.finish(req)
        world.cache.evict(EvictParams(world.num_tokens))
        executor.run_all()
        world.cache.check_hicache_events()
        # Storage fails and is left alone from now on: eviction need not wait until pages are stored.
        executor.fail_next = ["injected"] if executor.jobs else []
        executor.run_all()
        world.cache.check_hicache_events()
    executor.jobs.append(held)
    executor.run_all()
    world.cache.check_hicache_events()
    executor.auto = True
    world.verify_at_rest()
    fresh = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32)
    assert fresh.run(tokens(17)).storage == 16  # `run` compares every reused byte
    assert fresh.run([*tokens(8), *tokens(9, 500)]).computed == 9


def test_a_reset_forgets_prefetches_and_gives_their_share_back() -> None:
    """Fault 16: what is under way at a reset must neither come back nor keep later prefetches out."""
    shelf: dict = {}
    other = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32)
    other.run(tokens(41))
    other.settle()
    executor = ManualExecutor(auto=False)
    world = World(
        storage=StorageKind.FILE, shelf=shelf, executor=executor, device_pages=32, ratio=0.5
    )
    key = RadixKey(tokens(41)[:-1], None, 0)
    for round_number in range(5):
        rid = f"r{round_number}"
        world.cache.start_prefetch(rid, key)
        for _ in range(round_number):  # further each time: looked up, reading, read
            if executor.jobs:
                executor.run_one()
            if round_number != 3:
                world.cache.check_hicache_events()
        world.cache.reset()
        world.allocator.clear()
        executor.run_all()
        world.cache.check_hicache_events()
        assert world.tree.tree.num_nodes == 0, "a late page came back"
        assert world.cache.prefetch_ready(rid)
        world.cache.release_prefetch(rid)
    executor.auto = True
    assert world.host_pool.num_free == world.host_pool.num_pages
    assert world.run(tokens(41)).storage == 40
    world.verify_at_rest()


def test_a_retry_under_the_same_name_owes_nothing_to_the_first_attempt() -> None:
    """Fault 17: the first attempt's look-up and pages arrive while the second one is under way."""
    shelf: dict = {}
    other = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32)
    other.run(tokens(41))
    other.settle()
    executor = ManualExecutor(auto=False)
    world = World(storage=StorageKind.FILE, shelf=shelf, executor=executor, device_pages=32)
    stored, unknown = RadixKey(tokens(41)[:-1], None, 0), RadixKey(tokens(40, 900), None, 0)
    for first_steps in range(4):
        world.cache.start_prefetch("r", stored)
        for _ in range(first_steps):
            if executor.jobs:
                executor.run_one()
                world.cache.check_hicache_events()
        world.cache.release_prefetch("r")
        world.cache.start_prefetch("r", unknown)
        assert not world.cache.prefetch_ready("r"), "that of the second attempt is not there yet"
        while executor.jobs:
            executor.run_one()
            world.cache.check_hicache_events()
        assert world.cache.prefetch_ready("r")
        request = Request("r", tokens(41, 900))
        world.admit(request)
        assert request.tiers is not None and request.tiers.storage == 0
        world.finish(request)
        world.verify_at_rest()
        world.cache.reset()
        world.allocator.clear()


def test_a_shared_beginning_that_never_leaves_the_device_is_stored_with_what_follows_it() -> None:
    """Fault 64: with the lazy policy the hot system prompt is not evicted, yet its pages must be on disk first."""
    shelf: dict = {}
    world = World(
        storage=StorageKind.FILE,
        shelf=shelf,
        policy=WritePolicy.WRITE_THROUGH_AND_BACK,
        device_pages=16,
        ratio=1.0,
    )
    system = tokens(16)
    keep = world.start([*system, 400])
    assert world.extend(keep, 17)
    world.cache.cache_unfinished_req(keep)  # holds the system prompt on the device for ever
    tails = [[*system, *tokens(17, 1000 * i)] for i in range(1, 8)]
    for tail in tails:
        world.run(tail)
        world.settle()
    assert stored_keys(shelf), "the host is full; what left it is stored"
    fresh = World(storage=StorageKind.FILE, shelf=shelf, device_pages=16)
    hits = [fresh.run(tail).storage for tail in tails[:3]]
    assert max(hits) > 16, "a stored tail is of no use without the beginning"
    world.finish(keep)
    world.verify_at_rest()


def test_a_node_that_the_host_cannot_take_leaves_the_tree_whole() -> None:
    """Fault 92: the host pool is full of pages in use; an evicted node must not be taken for a host-resident one."""
    world = World(device_pages=16, ratio=0.5)
    pinned = world.host_pool.alloc(world.host_pool.num_free)
    assert pinned is not None
    world.run(tokens(33))
    assert world.tree.tree.num_nodes > 0
    world.cache.evict(EvictParams(world.num_tokens))
    assert world.tree.tree.num_nodes == 0
    assert world.allocator.available_size() == world.num_tokens
    world.host_pool.free(pinned)
    world.verify_at_rest()
    assert world.run(tokens(33)).computed == 33


@pytest.mark.parametrize("chunk", [4, 12, 16])
def test_a_prompt_of_many_chunks_is_backed_up_whole(chunk: int) -> None:
    """Fault 120: every chunk's node gets its host copy, and a request's own chunks count as no reuse."""
    world = World(device_pages=32)
    assert world.run(tokens(75), chunk=chunk).computed == 75
    world.settle()
    world.cache.evict(EvictParams(world.num_tokens))
    assert world.run(tokens(75)).host == 72
    world.verify_at_rest()


def test_arrived_pages_are_in_the_tree_though_their_request_is_far_back_in_the_queue() -> None:
    """Fault 121: ten requests wait; the tenth's pages are used by the round in which they arrive."""
    shelf: dict = {}
    other = World(storage=StorageKind.FILE, shelf=shelf, device_pages=64)
    prompts = [tokens(9, 100 * i) for i in range(1, 11)]
    for token_ids in prompts:
        other.run(token_ids)
    other.settle()
    executor = ManualExecutor(auto=False)
    world = World(storage=StorageKind.FILE, shelf=shelf, executor=executor, device_pages=64)
    for number, token_ids in enumerate(prompts):
        world.cache.start_prefetch(f"r{number}", RadixKey(token_ids[:-1], None, 0))
    executor.run_one(9)  # the tenth's look-up is the fastest
    world.cache.check_hicache_events()
    executor.run_one(9)  # its pages
    world.cache.check_hicache_events()
    assert world.tree.tree.num_nodes == 1
    assert world.cache.prefetch_ready("r9")
    assert not world.cache.prefetch_ready("r0")
    executor.run_all()
    world.cache.check_hicache_events()
    executor.run_all()
    world.cache.check_hicache_events()
    assert world.tree.tree.num_nodes == 10


def test_a_step_with_nothing_under_way_does_nothing() -> None:
    """Fault 122: the look for events costs no lock, no pool walk and no call of the executor's workers when idle."""
    world = World(storage=StorageKind.FILE, device_pages=32)
    world.run(tokens(33))
    world.settle()
    calls: list[str] = []

    class Recording:
        """The executor, noting what is asked of it."""

        def __getattr__(self, name: str) -> object:
            calls.append(name)
            return getattr(world.executor, name)

    world.controller._executor = Recording()
    for _ in range(100):
        world.cache.check_hicache_events()
        assert not world.cache.has_pending_work()
    assert calls == []


def test_random_prompts_keep_their_bytes_through_a_reset_now_and_then() -> None:
    """Fault 16 again, at random: whatever is under way when a reset comes, nothing of before it is ever served."""
    rng = random.Random(16)
    shelf: dict = {}
    executor = ManualExecutor(auto=False)
    world = World(
        storage=StorageKind.FILE, shelf=shelf, executor=executor, device_pages=24, ratio=1.0
    )
    stems = [prompt(rng, 40) for _ in range(3)]
    for _ in range(60):
        token_ids = [*rng.choice(stems)[: rng.randrange(1, 41)], *prompt(rng, 3)]
        req = world.start(token_ids, prefetch=rng.random() < 0.7)
        assert world.extend(req, len(token_ids))
        world.cache.cache_unfinished_req(req)
        np.testing.assert_array_equal(
            world.pool.read(req.prefix_indices), expected_kv(token_ids), "computed KV is wrong"
        )
        world.finish(req)
        for _ in range(rng.randrange(4)):
            if executor.jobs:
                executor.run_one(rng.randrange(len(executor.jobs)))
        if rng.random() < 0.5:
            world.cache.check_hicache_events()
        if rng.random() < 0.15:
            world.cache.reset()
            world.allocator.clear()
    executor.auto = True
    world.verify_at_rest()
