"""What tests of the tree do again and again."""

from __future__ import annotations

from tree_world import World

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, MatchPrefixParams, RadixKey


def tokens(length: int, start: int = 1) -> list[int]:
    """Consecutive tokens."""
    return list(range(start, start + length))


def match_len(world: World, token_ids: list[int], extra_key: str | None = None) -> tuple[int, int]:
    """How many tokens of a prompt the device has, and how many more the host."""
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
