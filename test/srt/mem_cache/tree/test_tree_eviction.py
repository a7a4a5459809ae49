"""Eviction from the device and from the host: what goes, in what order, and what stays."""

from __future__ import annotations

import pytest
from tree_steps import match_len, tokens
from tree_world import World, stored_keys

from sgl_jax.srt.mem_cache.hicache.config import HostScheme, StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, MatchPrefixParams, RadixKey


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
