"""A reset forgets device and host, whatever is under way."""

from __future__ import annotations

from tree_steps import evict_all, tokens
from tree_world import ManualExecutor, World

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.tree_types import MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens


def test_reset_forgets_device_and_host_but_not_storage() -> None:
    world = World(storage=StorageKind.FILE)
    world.run(tokens(33))
    world.settle()
    world.cache.reset()
    world.allocator.clear()
    assert world.host_pool.num_free == world.host_pool.num_pages
    assert world.run(tokens(33)) == TierTokens(storage=32, computed=1)
    world.verify_at_rest()


def test_the_gauges_of_device_and_host_follow_a_reset() -> None:
    world = World()

    def used(tier: str) -> float | None:
        name = f"sglang:hicache_{tier}_pages_used"
        return world.registry.get_sample_value(name, {"component": "full"})

    world.run(tokens(33))
    world.settle()
    assert (used("device"), used("host")) == (8, 8)
    world.cache.reset()
    world.allocator.clear()
    world.cache.check_hicache_events()
    assert (used("device"), used("host")) == (0, 0)


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
