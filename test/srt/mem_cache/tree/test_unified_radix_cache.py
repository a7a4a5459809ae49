"""The cache's contract, op by op, with every page's content checked on every tier."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from tree_world import ManualExecutor, Request, World, prompt, stored_keys

from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, HostScheme, StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.tree_types import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from sgl_jax.srt.mem_cache.hicache.types import TierTokens


def tokens(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def match_len(world: World, token_ids: list[int], extra_key: str | None = None) -> tuple[int, int]:
    match = world.cache.match_prefix(MatchPrefixParams(RadixKey(token_ids, extra_key, 0)))
    return len(match.device_indices), match.host_hit_length


def evict_all(world: World) -> None:
    """Let all backups end, then clear the device."""
    if world.cache.hicache_enabled:
        world.settle()
    world.cache.evict(EvictParams(world.num_tokens))


def fill_shelf(shelf: dict, token_ids: list[int]) -> None:
    """Another process ran this prompt and ended."""
    world = World(storage=StorageKind.FILE, shelf=shelf, device_pages=32)
    world.run(token_ids)
    world.settle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_is_reused_up_to_its_last_page_border_before_the_last_token(
    page_size: int,
) -> None:
    world = World(page_size=page_size, device_pages=64)
    for length in range(1, 4 * page_size + 2):
        token_ids = tokens(length, 1000 * length)
        world.run(token_ids)
        again = world.run(token_ids)
        assert again.device == (length - 1) // page_size * page_size
        assert again.computed == length - again.device
        evict_all(world)
    world.verify_at_rest()


def test_each_tier_serves_what_the_tiers_above_lack() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    token_ids = tokens(33)
    assert world.run(token_ids) == TierTokens(computed=33)
    assert world.run(token_ids) == TierTokens(device=32, computed=1)
    evict_all(world)
    assert match_len(world, token_ids) == (0, 32)
    assert world.run(token_ids) == TierTokens(host=32, computed=1)
    world.verify_at_rest()
    fresh = World(storage=StorageKind.FILE, shelf=shelf)
    assert fresh.run(token_ids) == TierTokens(storage=32, computed=1)
    assert fresh.run(token_ids) == TierTokens(device=32, computed=1)
    fresh.verify_at_rest()


def test_without_hicache_it_is_an_ordinary_prefix_cache() -> None:
    world = World(storage=None)
    assert not world.cache.hicache_enabled
    world.run(tokens(33))
    assert world.run(tokens(33)).device == 32
    evict_all(world)
    assert match_len(world, tokens(33)) == (0, 0)
    assert world.tree.tree.num_nodes == 0
    assert world.allocator.available_size() == world.num_tokens
    assert world.cache.flush_to_storage(1.0) and world.cache.shutdown(1.0)


def test_a_disabled_cache_reuses_nothing_and_frees_everything() -> None:
    world = World(disable=True)
    world.run(tokens(20), chunk=7)
    assert world.run(tokens(20)) == TierTokens(computed=20)
    assert world.allocator.available_size() == world.num_tokens


def test_part_of_a_cached_prompt_is_reused_and_the_node_is_split() -> None:
    world = World()
    world.run(tokens(40))
    assert world.run([*tokens(22), *tokens(10, 900)]).device == 20
    world.verify_at_rest()
    evict_all(world)
    assert world.run([*tokens(30), *tokens(5, 700)]).host == 28
    world.verify_at_rest()


def test_extra_keys_never_share_on_any_tier() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, device_pages=64)
    token_ids = tokens(21)
    for extra_key in (None, "", "a", "b"):
        assert world.run(token_ids, extra_key) == TierTokens(computed=21), extra_key
    evict_all(world)
    for extra_key in (None, "", "a", "b"):
        assert world.run(token_ids, extra_key).host == 20, extra_key
    world.verify_at_rest()
    fresh = World(storage=StorageKind.FILE, shelf=shelf, device_pages=64)
    assert fresh.run(token_ids, "c") == TierTokens(computed=21)
    assert fresh.run(token_ids, "b").storage == 20
    fresh.verify_at_rest()


def test_dp_ranks_never_share() -> None:
    world = World(storage=None)
    slots = world.allocator.alloc(8)
    assert slots is not None
    world.cache.insert(InsertParams(RadixKey(tokens(8), None, 0), slots))
    other = world.cache.match_prefix(MatchPrefixParams(RadixKey(tokens(8), None, 1)))
    assert (
        len(other.device_indices) == 0
        and len(
            world.cache.match_prefix(MatchPrefixParams(RadixKey(tokens(8), None, 0))).device_indices
        )
        == 8
    )


@pytest.mark.parametrize("page_size", [1, 4])
def test_bigram_keys_of_every_length_work_and_need_one_token_more_than_a_page(
    page_size: int,
) -> None:
    shelf: dict = {}
    world = World(
        page_size=page_size, is_eagle=True, storage=StorageKind.FILE, shelf=shelf, device_pages=64
    )
    for length in range(1, 2 * page_size + 4):
        token_ids = tokens(length, 1000 * length)
        world.run(token_ids)
        usable = max(length - 2, 0) // page_size * page_size
        assert world.run(token_ids).device == usable
        world.cache.check_invariants()
    evict_all(world)
    world.settle()
    plain = World(page_size=page_size, storage=StorageKind.FILE, shelf=shelf, device_pages=64)
    assert plain.run(tokens(5, 5000)).storage == 0


@pytest.mark.parametrize("length", range(0, 10))
def test_short_and_empty_keys_never_raise(length: int) -> None:
    for is_eagle in (False, True):
        world = World(is_eagle=is_eagle, storage=StorageKind.FILE)
        key = RadixKey(tokens(length), None, 0)
        world.cache.start_prefetch("r", key)
        world.cache.check_hicache_events()
        assert len(world.cache.match_prefix(MatchPrefixParams(key)).device_indices) == 0
        world.cache.release_prefetch("r")


def test_slots_of_a_revived_node_are_not_freed() -> None:
    """Scenario: a host-only prefix is computed again without load-back; the node takes over the request's slots."""
    world = World()
    world.run(tokens(33))
    world.settle()
    evict_all(world)
    req = Request("again", tokens(33))
    req.last_node = world.cache.root_node
    world.cache.inc_lock_ref(req.last_node)
    assert world.extend(req, 33)
    world.cache.cache_unfinished_req(req)
    world.verify(in_use=4)
    world.finish(req)
    world.verify_at_rest()
    assert match_len(world, tokens(33)) == (32, 0)


def test_the_same_prompt_computed_twice_at_once_keeps_one_copy() -> None:
    world = World()
    first, second = world.start(tokens(18)), world.start(tokens(18))
    for req in (first, second):
        assert world.extend(req, 18)
    for req in (first, second):
        world.cache.cache_unfinished_req(req)
    np.testing.assert_array_equal(first.prefix_indices[:16], second.prefix_indices[:16])
    world.finish(first)
    world.finish(second, is_insert=False)
    world.verify_at_rest()
    assert world.cache.total_size() == 16


def test_a_retracted_request_gives_back_all_but_what_the_tree_owns() -> None:
    world = World()
    world.run(tokens(9))
    req = world.start(tokens(30))
    assert world.extend(req, 15)
    world.cache.cache_unfinished_req(req)
    assert world.extend(req, 26)
    world.finish(req, is_insert=False)
    world.verify_at_rest()
    assert match_len(world, tokens(30)) == (12, 0)


def test_locked_prefixes_are_not_evicted_and_sizes_add_up() -> None:
    world = World(storage=None)
    world.run(tokens(9))
    world.run(tokens(9, 100))
    node = world.cache.match_prefix(
        MatchPrefixParams(RadixKey(tokens(8), None, 0))
    ).last_device_node
    result = world.cache.inc_lock_ref(node)
    assert result.delta == -8
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (8, 8)
    assert world.cache.evict(EvictParams(world.num_tokens)).num_tokens == 8
    assert match_len(world, tokens(8)) == (8, 0)
    world.cache.dec_lock_ref(node, result.to_dec_params())
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (8, 0)
    assert world.cache.total_size() == 8


def test_eviction_takes_the_end_of_the_oldest_path_and_no_more_than_needed() -> None:
    world = World(storage=None)
    world.run(tokens(17))
    world.run(tokens(17, 100))
    world.run(tokens(17))
    assert world.cache.evict(EvictParams(5)).num_tokens == 8
    assert match_len(world, tokens(17)) == (16, 0)
    assert match_len(world, tokens(17, 100)) == (8, 0)
    world.verify()


def test_what_one_eviction_has_to_copy_is_one_transfer() -> None:
    executor = ManualExecutor()
    world = World(ratio=1.0, executor=executor)
    prompts = [tokens(17, 100 * i) for i in range(1, 4)]
    executor.fail_next += ["no luck"] * 3
    for token_ids in prompts:
        world.run(token_ids)
        world.settle()
    before = executor.device_jobs
    world.cache.evict(EvictParams(world.num_tokens))
    assert executor.device_jobs == before + 1
    world.settle()
    world.verify()
    assert [world.run(token_ids).host for token_ids in prompts] == [16, 16, 16]
    world.verify_at_rest()


def test_children_leave_before_their_parents() -> None:
    world = World(storage=None, device_pages=32)
    system = tokens(8)
    for i in range(4):
        world.run([*system, *tokens(9, 100 * (i + 1))])
    for _ in range(4):
        assert match_len(world, system)[0] == 8
        world.cache.evict(EvictParams(8))
        world.verify()
    world.cache.evict(EvictParams(8))
    assert world.cache.total_size() == 0


def test_a_host_pool_smaller_than_the_device_keeps_backing_up() -> None:
    """Mirrors of device nodes give way first, so that backups and prefetches go on."""
    shelf: dict = {}
    world = World(ratio=0.5, storage=StorageKind.FILE, shelf=shelf)
    prompts = [tokens(17, 100 * i) for i in range(1, 9)]
    for token_ids in prompts:
        world.run(token_ids)
        world.settle()
        world.verify()
    assert len(stored_keys(shelf)) == 8 * 4
    assert world.run(prompts[0]).storage == 16
    world.verify_at_rest()


@pytest.mark.parametrize("scheme", list(HostScheme))
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_what_falls_off_the_host_comes_back_from_storage(
    scheme: HostScheme, policy: WritePolicy
) -> None:
    world = World(ratio=1.0, storage=StorageKind.FILE, scheme=scheme, policy=policy)
    prompts = [tokens(17, 100 * i) for i in range(1, 13)]
    for token_ids in prompts:
        world.run(token_ids)
        world.settle()
    served = [world.run(token_ids) for token_ids in prompts]
    assert all(t.cached == 16 for t in served), served
    assert any(t.storage for t in served)
    world.verify_at_rest()


def test_write_through_and_back_writes_nothing_to_storage_until_it_must() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf)
    world.run(tokens(33))
    world.settle()
    assert not stored_keys(shelf)
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 8


def test_flush_stores_more_than_the_host_can_hold_at_once() -> None:
    shelf: dict = {}
    world = World(
        ratio=0.25, storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf
    )
    for i in range(3):
        world.run(tokens(17, 100 * (i + 1)))
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 12
    fresh = World(storage=StorageKind.FILE, shelf=shelf)
    assert [fresh.run(tokens(17, 100 * (i + 1))).storage for i in range(3)] == [16, 16, 16]


def test_a_prompt_longer_than_the_host_pool_is_stored_in_parts() -> None:
    shelf: dict = {}
    world = World(
        ratio=0.25, storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf
    )
    world.run(tokens(49))
    assert world.host_pool.num_pages == 4
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 12
    world.verify_at_rest()


def test_flush_ends_when_storage_takes_nothing() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf)
    for storage in shelf.values():
        storage.set = lambda keys, pages: [False] * len(keys)
    world.run(tokens(33))
    assert not world.cache.flush_to_storage(10.0)
    world.verify_at_rest()


def test_a_node_split_while_its_backup_is_under_way_is_stored_whole() -> None:
    executor = ManualExecutor(auto=False)
    shelf: dict = {}
    world = World(
        page_size=1, device_pages=64, storage=StorageKind.FILE, shelf=shelf, executor=executor
    )
    world.run(tokens(40), prefetch=False)
    assert executor.jobs
    world.run([*tokens(39), *tokens(3, 900)], prefetch=False)
    executor.run_all()
    world.settle()
    assert len(stored_keys(shelf)) == 43
    world.verify_at_rest()


def test_a_node_evicted_while_its_backup_is_under_way_is_a_host_hit_later() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(33))
    world.cache.evict(EvictParams(world.num_tokens))
    assert match_len(world, tokens(33)) == (0, 0)
    world.verify()
    executor.run_all()
    world.cache.check_hicache_events()
    assert match_len(world, tokens(33)) == (0, 32)
    world.verify_at_rest()


def test_a_backup_that_fails_leaves_the_node_on_the_device_only() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(33))
    executor.fail_next.append("the copy failed")
    executor.run_all()
    world.cache.check_hicache_events()
    assert match_len(world, tokens(33)) == (32, 0)
    assert world.host_pool.num_free == world.host_pool.num_pages
    world.run(tokens(33))
    executor.run_all()
    world.cache.check_hicache_events()
    evict_all(world)
    assert match_len(world, tokens(33)) == (0, 32)
    world.verify_at_rest()


def test_a_backup_that_fails_after_the_device_was_evicted_loses_the_subtree() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(17))
    world.run(tokens(33))
    world.cache.evict(EvictParams(world.num_tokens))
    executor.fail_next.append("the copy failed")
    executor.run_all()
    world.cache.check_hicache_events()
    assert world.tree.tree.num_nodes == 0
    world.verify_at_rest()


def test_a_load_that_fails_is_recomputed_and_gives_everything_back() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(33))
    world.settle()
    evict_all(world)
    executor.fail_next.append("the copy failed")
    assert world.run(tokens(33)) == TierTokens(computed=33)
    world.verify_at_rest()


def test_load_back_does_not_lose_the_pages_it_is_loading() -> None:
    """Scenario: the device is full of a prompt that has no host copy; making room for the load backs it up, which needs
    host pages, and the only ones to take are those being loaded."""
    world = World(device_pages=9, ratio=8 / 9)
    world.run(tokens(33))
    evict_all(world)
    (first,) = world.tree.tree.nodes()
    pages = first.data[0].host_pages
    world.host_pool.lock(pages)
    world.run(tokens(33, 500))
    world.host_pool.unlock(pages)
    assert world.host_pool.num_free == 0 and world.cache.evictable_size() == 32
    assert world.run(tokens(33)).host == 32
    world.verify_at_rest()


def test_a_host_hit_larger_than_the_device_is_loaded_as_far_as_it_fits() -> None:
    world = World(device_pages=16)
    world.run(tokens(41))
    evict_all(world)
    blocker = world.start(tokens(29, 500))
    assert world.extend(blocker, 29)
    req = world.start(tokens(41))
    assert req.tiers is not None and req.tiers.host == 32
    world.verify(in_use=32)
    world.finish(req)
    world.finish(blocker)
    world.verify_at_rest()


def test_reset_forgets_device_and_host_but_not_storage() -> None:
    world = World(storage=StorageKind.FILE)
    world.run(tokens(33))
    world.settle()
    world.cache.reset()
    world.allocator.clear()
    assert world.host_pool.num_free == world.host_pool.num_pages
    assert world.run(tokens(33)) == TierTokens(storage=32, computed=1)
    world.verify_at_rest()


def test_reset_while_transfers_are_under_way_frees_their_pages_when_they_end() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor, storage=StorageKind.FILE)
    world.run(tokens(33), prefetch=False)
    world.cache.start_prefetch("r", RadixKey(tokens(20, 900), None, 0))
    world.cache.reset()
    world.allocator.clear()
    world.verify()
    world.settle()
    assert world.host_pool.num_free == world.host_pool.num_pages
    world.run(tokens(33), prefetch=False)
    world.verify_at_rest()


def test_a_load_planned_before_a_reset_does_not_touch_the_buffers_after_it() -> None:
    world = World()
    world.run(tokens(33))
    evict_all(world)
    match = world.cache.match_prefix(MatchPrefixParams(RadixKey(tokens(32), None, 0)))
    slots, _, plans = world.cache.init_load_back(match.last_host_node, match.host_hit_length)
    assert len(slots) == 32
    world.cache.reset()
    world.allocator.clear()
    world.run(tokens(40, 700))
    world.cache.finish_load_back(plans)
    world.verify_at_rest()


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


def test_tiers_add_up_and_only_this_requests_prefetch_counts_as_storage() -> None:
    shelf: dict = {}
    fill_shelf(shelf, tokens(33))
    world = World(storage=StorageKind.FILE, shelf=shelf)
    world.run(tokens(9))
    mixed = world.run(tokens(33))
    assert mixed == TierTokens(device=8, storage=24, computed=1)
    evict_all(world)
    assert world.run(tokens(33)) == TierTokens(host=32, computed=1)


def test_storage_that_fails_never_stops_serving_and_is_tried_again() -> None:
    now = [0.0]
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, clock=lambda: now[0])
    (storage,) = shelf.values()
    storage.set, works = (lambda keys, pages: [False] * len(keys)), storage.set
    for i in range(1, 13):
        world.run(tokens(17, 100 * i))
        world.settle()
        world.verify()
    assert not stored_keys(shelf)
    storage.set = works
    world.run(tokens(17, 5000))
    world.settle()
    assert not stored_keys(shelf), "within the pause nothing is tried"
    now[0] = 100.0
    world.run(tokens(17, 6000))
    world.settle()
    assert stored_keys(shelf)
    world.verify_at_rest()


def test_a_storage_that_raises_is_a_counted_failure() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    (storage,) = shelf.values()

    def broken(*args: object) -> list[bool]:
        raise OSError("the disk is gone")

    storage.set = storage.get = storage.exists = broken
    for _ in range(2):
        world.run(tokens(33))
        evict_all(world)
    assert world.run(tokens(33)).host == 32
    world.verify_at_rest()


def test_a_loaded_node_keeps_its_host_copy_until_it_is_in_the_buffers() -> None:
    """Scenario: between init_load_back and finish_load_back host room is needed and the same path is inserted again; a
    new host copy, made from slots that hold nothing yet, would be garbage."""
    world = World(device_pages=32, ratio=0.25)
    world.run(tokens(33))
    evict_all(world)
    match = world.cache.match_prefix(MatchPrefixParams(RadixKey(tokens(32), None, 0)))
    slots, node, plans = world.cache.init_load_back(match.last_host_node, match.host_hit_length)
    world.tree.make_host_room(world.tree.full, 8)
    world.cache.insert(InsertParams(RadixKey(tokens(32), None, 0), slots, 32))
    world.settle()
    assert world.host_pool.num_locked == 8
    world.cache.finish_load_back(plans)
    world.settle()
    world.verify_at_rest()
    evict_all(world)
    assert world.run(tokens(33)).host == 32
    assert node.num_tokens


def test_a_request_that_outlives_a_reset_gives_back_nothing() -> None:
    world = World()
    world.run(tokens(9))
    old = world.start(tokens(30))
    assert world.extend(old, 30)
    world.cache.reset()
    world.allocator.clear()
    world.run(tokens(40, 700))
    world.finish(old)
    world.cache.dec_lock_ref(old.last_node)
    world.verify_at_rest()
    assert world.cache.protected_size() == 0


def test_host_eviction_goes_on_in_a_tree_full_of_split_nodes() -> None:
    """Splits leave parents older than their children; they must not keep the leaves from being found."""
    world = World(device_pages=40, ratio=8.0)
    stems = [tokens(24, 1000 * i) for i in range(1, 40)]
    for stem in stems:
        world.run([*stem, 7])
    for stem in stems:
        for cut in (20, 16, 12, 8, 4):
            match_len(world, stem[:cut])
    world.settle()
    for i in range(200):
        world.run(tokens(25, 100_000 + 100 * i))
        world.settle()
    newest = world.run(tokens(25, 100_000 + 100 * 180))
    assert newest.cached == 24, "backups stopped"
    world.verify_at_rest()


def test_what_storage_refused_once_is_written_again() -> None:
    now = [0.0]
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, clock=lambda: now[0])
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [*works(keys[:-1], pages[:-1]), False]
    world.run(tokens(17))
    world.settle()
    assert len(stored_keys(shelf)) == 3
    storage.set = works
    for _ in range(3):
        now[0] += 10.0
        world.cache.check_hicache_events()
    assert len(stored_keys(shelf)) == 4
    world.verify_at_rest()


def test_pages_backed_up_during_a_pause_are_written_after_it() -> None:
    now = [0.0]
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, clock=lambda: now[0])
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [False] * len(keys)
    world.run(tokens(17))
    world.settle()
    storage.set = works
    world.run(tokens(17, 500))
    world.settle()
    assert not stored_keys(shelf)
    for _ in range(3):
        now[0] += 10.0
        world.cache.check_hicache_events()
    assert len(stored_keys(shelf)) == 8
    world.verify_at_rest()


def test_flush_tries_a_storage_that_has_just_failed() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [False] * len(keys)
    world.run(tokens(17))
    world.settle()
    storage.set = works
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 4


def test_one_page_that_cannot_be_written_does_not_stop_the_others() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, device_pages=64)
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [False, *works(keys[1:], pages[1:])]
    for i in range(1, 6):
        world.run(tokens(17, 100 * i))
        world.settle()
    assert len(stored_keys(shelf)) == 15


def test_a_hung_read_does_not_keep_a_flush_from_writing() -> None:
    may_read = threading.Event()
    shelf: dict = {}
    fill_shelf(shelf, tokens(17))
    world = World(
        storage=StorageKind.FILE,
        policy=WritePolicy.WRITE_THROUGH_AND_BACK,
        shelf=shelf,
        async_impl=AsyncImpl.THREADPOOL,
    )
    (storage,) = shelf.values()
    reads = storage.exists

    def hang(keys: list) -> list[bool]:
        assert may_read.wait(60.0)
        return reads(keys)

    storage.exists = hang
    world.cache.start_prefetch("r", RadixKey(tokens(16), None, 0))
    world.run(tokens(33, 500), prefetch=False)
    try:
        assert world.cache.flush_to_storage(30.0)
        assert len(stored_keys(shelf)) == 4 + 8
    finally:
        may_read.set()
    world.verify_at_rest()
    assert world.cache.shutdown(30.0)


def test_what_ended_before_a_shutdown_is_in_the_metrics() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    world.run(tokens(33), prefetch=False)
    world.executor.run_all()  # the backup
    world.cache.check_hicache_events()
    world.executor.run_all()  # the store; nothing polls after it
    assert len(stored_keys(shelf)) == 8

    def num_written() -> float | None:
        labels = {"component": "full", "outcome": "written"}
        return world.registry.get_sample_value("sglang:hicache_storage_writes_total", labels)

    assert num_written() == 0
    assert world.cache.shutdown(1.0)
    assert num_written() == 8


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


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("scheme", list(HostScheme))
def test_random_requests(
    page_size: int, policy: WritePolicy, scheme: HostScheme, seed: int
) -> None:
    """Random requests, evictions, failures, delays, resets and restarts; every page checked after every step."""
    rng = random.Random(seed)
    shelf: dict = {}
    executor = ManualExecutor(auto=False)

    def new_world() -> World:
        return World(
            page_size=page_size,
            device_pages=24 if page_size == 4 else 60,
            ratio=rng.choice([0.3, 1.0, 2.0]),
            storage=StorageKind.FILE,
            policy=policy,
            scheme=scheme,
            executor=executor,
            shelf=shelf,
        )

    world = new_world()
    stems = [prompt(rng, 24) for _ in range(4)]
    running: list[Request] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.35 and len(running) < 2:
            stem = rng.choice(stems)
            token_ids = stem[: rng.randrange(1, 24)] + prompt(rng, rng.randrange(1, 6))
            req = world.start(token_ids, rng.choice([None, "tenant"]), prefetch=rng.random() < 0.7)
            running.append(req)
        elif action < 0.6 and running:
            req = rng.choice(running)
            up_to = rng.randrange(len(req.prefix_indices), len(req.origin_input_ids) + 1)
            if up_to > len(req.prefix_indices) and world.extend(req, up_to):
                world.cache.cache_unfinished_req(req)
        elif action < 0.75 and running:
            req = running.pop(rng.randrange(len(running)))
            if len(req.prefix_indices) < len(req.origin_input_ids):
                world.extend(req, len(req.origin_input_ids))
            world.finish(req, is_insert=rng.random() < 0.8)
        elif action < 0.85:
            world.cache.evict(EvictParams(rng.randrange(1, 30)))
        elif action < 0.97:
            for _ in range(rng.randrange(4)):
                if executor.jobs:
                    executor.fail_next = ["injected"] if rng.random() < 0.1 else []
                    executor.run_one(rng.randrange(len(executor.jobs)))
            executor.fail_next = []
            world.cache.check_hicache_events()
        elif not running:
            if rng.random() < 0.5:
                world.cache.reset()
                world.allocator.clear()
            else:
                world.settle()
                world.verify_at_rest()
                world = new_world()
        world.verify(in_use=sum(owned_tokens(world, req) for req in running))
    for req in running:
        world.finish(req)
    world.verify_at_rest()


@pytest.mark.parametrize("async_impl", list(AsyncImpl))
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_random_requests_with_real_executors(
    async_impl: AsyncImpl, policy: WritePolicy, seed: int
) -> None:
    """Whole requests one after the other while real workers move pages; nothing reused may ever be wrong."""
    rng = random.Random(seed)
    shelf: dict = {}
    stems = [prompt(rng, 40) for _ in range(5)]
    for _ in range(3):
        world = World(
            device_pages=20,
            ratio=rng.choice([0.5, 2.0]),
            storage=StorageKind.FILE,
            policy=policy,
            shelf=shelf,
            async_impl=async_impl,
        )
        for _ in range(40):
            token_ids = rng.choice(stems)[: rng.randrange(1, 40)] + prompt(rng, rng.randrange(1, 8))
            chunk = rng.choice([None, 3, 8])
            served = world.run(token_ids, chunk=chunk, num_output=rng.randrange(4))
            assert served.cached + served.computed == len(token_ids)
        world.verify_at_rest()
        assert world.cache.flush_to_storage(60.0)
        assert world.cache.shutdown(60.0)


def owned_tokens(world: World, req: Request) -> int:
    """Device tokens of whole pages that a running request holds outside the tree."""
    if req.req_pool_idx < 0:
        return 0
    pages = -(-len(req.prefix_indices) // world.page_size)
    return pages * world.page_size - req.cache_protected_len
