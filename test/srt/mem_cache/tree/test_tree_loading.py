"""Loads from the host to the device: what they keep, how far they go, and how they fail."""

from __future__ import annotations

import pytest
from tree_steps import evict_all, tokens
from tree_world import ManualExecutor, World

from sgl_jax.srt.mem_cache.hicache.tree_types import InsertParams, MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens


def test_a_load_that_fails_is_recomputed_and_gives_everything_back() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(33))
    world.settle()
    evict_all(world)
    executor.fail_next.append("the copy failed")
    assert world.run(tokens(33)) == TierTokens(computed=33)
    world.verify_at_rest()


def test_a_load_that_is_given_up_keeps_its_host_pages_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scenario: a copy hangs, its request recomputes, and host room is needed while the copy still reads."""
    executor = ManualExecutor()
    world = World(executor=executor, device_pages=32, ratio=0.25)
    world.run(tokens(33))
    evict_all(world)
    executor.auto = False
    monkeypatch.setattr(executor, "wait_any", lambda timeout_s: False)
    req = world.start(tokens(33))
    assert req.tiers == TierTokens(computed=33)
    assert executor.jobs, "the copy has not ended"
    world.tree.make_host_room(world.tree.full, 1)
    assert world.host_pool.num_free == 0
    world.verify()
    executor.run_all()
    world.finish(req)
    world.settle()
    world.tree.make_host_room(world.tree.full, 1)
    assert world.host_pool.num_free > 0
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
