"""Reads from storage for waiting requests: what they bring, and what they leave behind."""

from __future__ import annotations

import numpy as np
import pytest
from tree_steps import evict_all, fill_shelf, match_len, tokens
from tree_world import ManualExecutor, Request, World

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey


def test_a_storage_hit_is_cut_to_what_the_host_can_hold() -> None:
    shelf: dict = {}
    fill_shelf(shelf, tokens(101))
    small = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32, ratio=0.25)
    assert small.run(tokens(101)).storage == 32
    small.verify_at_rest()


def test_pages_behind_a_missing_one_are_not_used() -> None:
    shelf: dict = {}
    fill_shelf(shelf, tokens(33))
    (storage,) = shelf.values()
    world = World(storage=StorageKind.FILE, shelf=shelf)
    keys = world.tree.keys.hasher(None).chain(None, np.array(tokens(32), "<i8").tobytes())
    assert all(storage.exists(keys))
    storage.delete([keys[5]])
    assert world.run(tokens(33)).storage == 20
    world.verify_at_rest()


def test_a_page_lost_between_look_up_and_read_shortens_the_hit() -> None:
    executor = ManualExecutor(auto=False)
    shelf: dict = {}
    fill_shelf(shelf, tokens(33))
    (storage,) = shelf.values()
    world = World(storage=StorageKind.FILE, shelf=shelf, executor=executor)
    world.cache.start_prefetch("r", RadixKey(tokens(32), None, 0))
    executor.run_all()
    keys = world.tree.keys.hasher(None).chain(None, np.array(tokens(32), "<i8").tobytes())
    storage.delete([keys[3]])
    world.cache.check_hicache_events()
    executor.run_all()
    world.cache.check_hicache_events()
    assert world.cache.prefetch_ready("r")
    assert match_len(world, tokens(33)) == (0, 12)
    world.cache.release_prefetch("r")
    world.verify_at_rest()


def test_a_prefetch_past_its_deadline_is_not_waited_for_and_leaks_nothing() -> None:
    now = [0.0]
    executor = ManualExecutor(auto=False)
    shelf: dict = {}
    fill_shelf(shelf, tokens(33))
    world = World(storage=StorageKind.FILE, shelf=shelf, executor=executor, clock=lambda: now[0])
    world.cache.start_prefetch("r", RadixKey(tokens(32), None, 0))
    assert not world.cache.prefetch_ready("r")
    now[0] = 4.9
    assert not world.cache.prefetch_ready("r")
    now[0] = 5.0
    assert world.cache.prefetch_ready("r")
    assert match_len(world, tokens(33)) == (0, 0)
    world.cache.release_prefetch("r")
    world.verify_at_rest()


@pytest.mark.parametrize("stage", ["lookup", "fetch", "attached"])
def test_an_aborted_request_leaks_no_prefetch(stage: str) -> None:
    executor = ManualExecutor(auto=False)
    shelf: dict = {}
    fill_shelf(shelf, tokens(33))
    world = World(storage=StorageKind.FILE, shelf=shelf, executor=executor)
    for attempt in range(2):
        world.cache.start_prefetch("r", RadixKey(tokens(32), None, 0))
        if stage != "lookup":
            executor.run_all()
            world.cache.check_hicache_events()
        if stage == "attached":
            executor.run_all()
            world.cache.check_hicache_events()
        world.cache.release_prefetch("r")
        world.cache.release_prefetch("r")
        assert attempt or world.cache.prefetch_ready("r")
    world.verify_at_rest()


def test_queued_requests_do_not_push_out_each_others_pages() -> None:
    shelf: dict = {}
    prompts = [tokens(65, 1000 * i) for i in range(1, 7)]
    for token_ids in prompts:
        fill_shelf(shelf, token_ids)
    world = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32, ratio=1.0)
    for i, token_ids in enumerate(prompts):
        world.cache.start_prefetch(f"q{i}", RadixKey(token_ids[:-1], None, 0))
    for i, token_ids in enumerate(prompts):
        for _ in range(20):
            world.cache.check_hicache_events()
            if world.cache.prefetch_ready(f"q{i}"):
                break
        req = Request(f"q{i}", token_ids)
        world.admit(req)
        assert req.tiers is not None
        assert req.tiers.storage == 64, i
        world.finish(req)
    world.verify_at_rest()


def test_a_prefetch_does_not_make_room_by_dropping_its_own_prefix() -> None:
    shelf: dict = {}
    fill_shelf(shelf, tokens(65))
    world = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32, ratio=0.5)
    world.run(tokens(17))
    for i in range(1, 4):
        world.run(tokens(17, 1000 * i))
    evict_all(world)
    assert match_len(world, tokens(17)) == (0, 16)
    for i in range(1, 4):
        match_len(world, tokens(17, 1000 * i))
    served = world.run(tokens(65))
    assert (served.host, served.storage) == (16, 48)
    world.verify_at_rest()
