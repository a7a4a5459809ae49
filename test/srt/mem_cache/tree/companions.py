"""Where a prompt's windows and states are, for tests that take them away one by one."""

from __future__ import annotations

from brute_force import longest_legal_border
from hybrid_pools import STATE, encoded
from hybrid_world import HybridWorld, Settings

from sgl_jax.srt.mem_cache.hicache.tree_node import KeyNamespace, TreeNode
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, PageKey

Pages = set[tuple[ComponentKind, int]]
"""Kinds and numbers of a prompt's pages (for states: of the page that the state is the end of)."""


def after_restart(settings: Settings, prompt: list[int]) -> HybridWorld:
    """A new process, where an earlier one computed the prompt, stored it and ended."""
    before = HybridWorld(settings)
    before.run(prompt)
    before.settle()
    world = HybridWorld(settings, shelves=before.shelves)
    world.sequences = before.sequences
    return world


def all_pages(world: HybridWorld, num_tokens: int) -> Pages:
    """Everything that is kept of a prompt of so many tokens if nothing is lost, windows at every page."""
    size, interval = world.settings.page_size, world.settings.interval
    pages: Pages = set()
    for page in range(num_tokens // size):
        for kind in world.settings.mix.kinds:
            if kind is not STATE or (page + 1) * size % interval == 0:
                pages.add((kind, page))
    return pages


def border_with(world: HybridWorld, num_tokens: int, pages: Pages) -> int:
    """How many of the prompt's tokens can be reused when these pages are there; by the definition."""
    return longest_legal_border(
        world.settings.mix,
        world.settings.page_size,
        num_tokens,
        lambda kind, page: (kind, page) in pages,
    )


def key_of(world: HybridWorld, token_ids: list[int], kind: ComponentKind, page: int) -> PageKey:
    """The storage key of a prompt's page."""
    end = (page + 1) * world.settings.page_size
    keys = world.tree.keys.hasher(None).chain(None, encoded(token_ids[:end]))
    key: PageKey = world.component(kind).key_of_page(keys[page])
    return key


def path_of(world: HybridWorld, token_ids: list[int]) -> list[TreeNode]:
    """The tree's nodes along a prompt's whole pages."""
    path: list[TreeNode] = world.tree.path_of(KeyNamespace(None, 0), encoded(token_ids))
    return path
