"""What a running request keeps on the device: the whole path of Full slots, the window, the one state; also when nodes
are split under it, or while their copies are under way."""

from __future__ import annotations

import pytest
from companions import path_of
from hybrid_checks import check, check_at_rest
from hybrid_pools import FULL, HYBRIDS, STATE, SWA
from hybrid_world import HybridWorld, Settings

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind

PROMPT = list(range(1, 58))
WINDOW_TOKENS = 12  # the whole pages of the window of 10 tokens before a border
# Leaves PROMPT in the middle of a node, whose last 12 tokens are the window before token 32.
BRANCH = [*PROMPT[:28], 900, 901, 902, 903, 904]

hybrids = pytest.mark.parametrize("name", HYBRIDS)

Sizes = dict[ComponentKind, tuple[int, int]]


def new_world(name: str) -> HybridWorld:
    """Checkpoints every 16 tokens: nodes are then longer than a page."""
    return HybridWorld(Settings(HYBRIDS[name], interval=16, storage=StorageKind.NONE))


def longest_hit(name: str) -> int:
    """Tokens of PROMPT that can be reused: to its last page, or where there are states to the last of them."""
    return 48 if HYBRIDS[name].states else 56


def sizes(world: HybridWorld) -> Sizes:
    """(protected, evictable) of each kind, in tokens and states."""
    cache = world.cache
    found = {
        FULL: (cache.full_protected_size(), cache.full_evictable_size()),
        SWA: (cache.swa_protected_size(), cache.swa_evictable_size()),
        STATE: (cache.recurrent_protected_size(), cache.recurrent_evictable_size()),
    }
    return {kind: found[kind] for kind in world.settings.mix.kinds}


def held(world: HybridWorld) -> dict[ComponentKind, int]:
    """What the tree has on the device, of each kind."""
    return {kind: protected + evictable for kind, (protected, evictable) in sizes(world).items()}


@hybrids
def test_a_reader_locks_the_path_the_window_and_one_state(name: str) -> None:
    world = new_world(name)
    world.run(PROMPT)
    world.settle()
    before = held(world)
    assert all(protected == 0 for protected, _ in sizes(world).values())
    req = world.start(PROMPT[:33])
    assert len(req.prefix_indices) == 32
    locked = {FULL: 32, SWA: WINDOW_TOKENS, STATE: 1}
    assert sizes(world) == {kind: (locked[kind], before[kind] - locked[kind]) for kind in before}
    world.settle()
    world.evict(full=10**6, swa=10**6, states=10**6)
    check(world)
    assert sizes(world) == {kind: (locked[kind], 0) for kind in before}
    world.finish(req, is_insert=False)
    assert sizes(world) == {kind: (0, locked[kind]) for kind in before}
    check_at_rest(world)


@hybrids
def test_two_readers_of_one_prefix_lock_it_until_both_have_ended(name: str) -> None:
    world = new_world(name)
    world.run(PROMPT)
    first, second = world.start(PROMPT[:33]), world.start(PROMPT[:17])
    locked = {FULL: 32, SWA: 2 * WINDOW_TOKENS, STATE: 2}
    assert {kind: protected for kind, (protected, _) in sizes(world).items()} == {
        kind: locked[kind] for kind in world.settings.mix.kinds
    }
    check(world)
    world.finish(first, is_insert=False)
    locked = {FULL: 16, SWA: WINDOW_TOKENS, STATE: 1}
    assert {kind: protected for kind, (protected, _) in sizes(world).items()} == {
        kind: locked[kind] for kind in world.settings.mix.kinds
    }
    world.finish(second, is_insert=False)
    assert all(protected == 0 for protected, _ in sizes(world).values())
    check_at_rest(world)


@hybrids
def test_a_split_under_a_lock_divides_the_lock(name: str) -> None:
    world = new_world(name)
    world.run(PROMPT)
    req = world.start(PROMPT[:33])
    protected = {kind: locked for kind, (locked, _) in sizes(world).items()}
    num_nodes = world.tree.tree.num_nodes
    world.match(BRANCH)
    assert world.tree.tree.num_nodes == num_nodes + 1
    assert {kind: locked for kind, (locked, _) in sizes(world).items()} == protected
    check(world)
    world.run(BRANCH)
    check(world)
    world.finish(req, is_insert=False)
    assert all(locked == 0 for locked, _ in sizes(world).values())
    check_at_rest(world)


@hybrids
def test_a_split_while_a_backup_is_under_way_leaves_both_halves_on_the_host(name: str) -> None:
    world = new_world(name)
    world.executor.auto = False
    world.run(PROMPT)
    assert world.controller.num_in_flight > 0
    num_nodes = world.tree.tree.num_nodes
    world.match(BRANCH)
    assert world.tree.tree.num_nodes == num_nodes + 1
    check(world)
    world.evict(full=10**6)  # before the copies are complete
    assert world.match(PROMPT[:56]) == (0, 0), "nothing is complete yet"
    check(world)
    world.settle()
    assert world.match(PROMPT[:56]) == (0, longest_hit(name))
    assert world.run(PROMPT).host == longest_hit(name)
    check_at_rest(world)


@hybrids
def test_a_split_while_a_load_is_under_way_gives_each_half_its_slots(name: str) -> None:
    world = new_world(name)
    world.run(PROMPT)
    world.clear_device()
    req = world.arrive(PROMPT)
    assert world.admit(req)
    assert world.pending_loads, "loaded, but not in the buffers yet"
    num_nodes = world.tree.tree.num_nodes
    world.match(BRANCH)
    assert world.tree.tree.num_nodes == num_nodes + 1
    check(world)
    assert len(path_of(world, PROMPT[: longest_hit(name)])) == len(req.last_node.path())
    world.finish_loads()
    check(world)
    while len(req.prefix_indices) < len(PROMPT):
        assert world.extend(req, len(PROMPT))
    check(world)
    world.finish(req)
    check_at_rest(world)
