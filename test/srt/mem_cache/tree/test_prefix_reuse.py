"""What of a prompt is reused: keys, page borders, tenants, ranks, tiers; every page's content is checked."""

from __future__ import annotations

import pytest
from tree_steps import evict_all, fill_shelf, match_len, tokens
from tree_world import World

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.tree_types import InsertParams, MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens


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


def test_tiers_add_up_and_only_this_requests_prefetch_counts_as_storage() -> None:
    shelf: dict = {}
    fill_shelf(shelf, tokens(33))
    world = World(storage=StorageKind.FILE, shelf=shelf)
    world.run(tokens(9))
    mixed = world.run(tokens(33))
    assert mixed == TierTokens(device=8, storage=24, computed=1)
    evict_all(world)
    assert world.run(tokens(33)) == TierTokens(host=32, computed=1)
