"""Faults of caches of models with sliding windows and recurrent states; docs/faults.md has them by their numbers.

`HybridWorld` compares all that a step would read with what computing gives, and poisons every free slot first, so each
request here is also a check of its tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace
from operator import attrgetter

import jax.numpy as jnp
import pytest
from hybrid_checks import check, check_at_rest
from hybrid_pools import FULL, MIXES, STATE, SWA, DevicePools, Mix, encoded
from hybrid_world import HybridWorld, Settings

from sgl_jax.srt.mem_cache.hicache.config import WritePolicy
from sgl_jax.srt.mem_cache.hicache.coverage import Coverage, Part, usable_prefix
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.pool_buffers import component_buffers
from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax.srt.mem_cache.unified_radix_cache import _namespace

PAGE = 4
SLIDES, HAS_STATES, BOTH = MIXES["full-swa"], MIXES["full-recurrent"], MIXES["full-swa-recurrent"]


def tokens(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def hybrid(mix: Mix, **settings: object) -> HybridWorld:
    """A world whose pools have room for all that one test does, if it does not say otherwise."""
    sizes = {"device_pages": 40, "swa_pages": 40, "num_states": 24, **settings}
    return HybridWorld(Settings(mix, **sizes))  # type: ignore[arg-type]


def fail_backups_of(
    world: HybridWorld, prompt: list[int], *, answer: list[int] | None = None
) -> None:
    """Serve a prompt whose pages do not reach the host: whoever takes them off the device must copy them first."""
    world.executor.fail_next = ["injected"] * 100
    world.run(prompt, answer=answer or [])
    world.settle()
    world.executor.fail_next = []
    assert all(
        pool.num_free == pool.num_pages for pool in map(world.host_pool, world.settings.mix.kinds)
    )


@pytest.mark.parametrize("mix", [SLIDES, HAS_STATES, BOTH], ids=["slides", "states", "both"])
def test_making_room_for_a_load_does_not_take_the_pages_that_it_continues(mix: Mix) -> None:
    """Fault 3: Full pages that are there, but without their windows and states; no reader holds them, and nothing else
    can make room for the rest of the prompt."""
    world = hybrid(mix, device_pages=16)
    prompt = tokens(33)
    world.run(prompt)
    world.settle()
    world.evict(full=3 * PAGE, swa=10**6, states=10**6)
    assert world.match(prompt) == (0, 32)
    blocker = world.start(tokens(9 * PAGE, 500))
    while len(blocker.prefix_indices) < 9 * PAGE:
        assert world.extend(blocker, 9 * PAGE)
    assert world.cache.full_evictable_size() == 5 * PAGE
    assert len(world.free_slots()[FULL]) == 2 * PAGE
    req = world.arrive(prompt)
    assert world.admit(req)
    check(world)
    assert len(req.prefix_indices) == (24 if mix.states else 28)
    world.finish(blocker)
    while len(req.prefix_indices) < len(prompt):
        assert world.extend(req, len(prompt))
    world.finish(req)
    check_at_rest(world)


def test_two_requests_load_different_kinds_of_one_node_at_once() -> None:
    """Fault 20: one reader needs the window where the other one needs Full pages only; neither load is over."""
    world = hybrid(SLIDES)
    prompt = tokens(40)
    world.run(prompt)
    world.clear_device()
    deep, near = world.arrive([*prompt, 900]), world.arrive([*prompt[:20], 901])
    assert world.admit(deep)
    check(world)
    assert world.match(prompt[:20]) == (0, 20), "its window is still on the host"
    assert world.admit(near)
    assert len(world.pending_loads) == 2
    check(world)
    for req, length in ((near, 20), (deep, 40)):
        assert len(req.prefix_indices) == length
        assert world.extend(req, 64)
        world.finish(req)
    check_at_rest(world)


@pytest.mark.parametrize(
    ("mix", "pool"),
    [
        ("full", "kvcache"),
        ("full-swa", "kvcache"),
        ("full-swa", "kvcache.full_kv_pool"),
        ("full-swa", "kvcache.swa_kv_pool"),
        ("swa-only", "kvcache.full_kv_pool"),
        ("full-recurrent", "states"),
    ],
)
@pytest.mark.parametrize("in_dict", [False, True])
def test_a_pool_with_a_buffer_that_is_on_no_list_is_refused(
    mix: str, pool: str, in_dict: bool
) -> None:
    """Faults 23 and 24: what a slot owns beside its pages would stay that of its former owner."""
    pools = DevicePools(MIXES[mix], PAGE, 4 * PAGE, 4 * PAGE, 4)
    assert set(component_buffers(pools.kvcache, pools.states)) == set(MIXES[mix].kinds)
    index = jnp.zeros((4, 2))
    owner = attrgetter(pool)(pools)
    owner.compressed = {"keys": (index,)} if in_dict else [index]
    name = "compressed['keys'][0]" if in_dict else "compressed[0]"
    with pytest.raises(HiCacheConfigError, match=f"leave behind: {re.escape(name)};"):
        component_buffers(pools.kvcache, pools.states)


def test_with_two_track_slots_the_tree_takes_the_one_that_was_written_last() -> None:
    """Fault 25: the other one holds the state of an earlier border, or nothing."""
    world = hybrid(HAS_STATES, track_slots=2)
    world.run(tokens(33))
    for length in (33, 25, 17):
        assert world.run([*tokens(length - 1), 900]).device == length - 1
    check_at_rest(world)


@pytest.mark.parametrize("length", [15, 16, 17])
def test_a_state_is_used_after_exactly_the_tokens_it_has_consumed(length: int) -> None:
    """Fault 25: the last token is computed again, so the state after it is one too far."""
    world = hybrid(HAS_STATES)
    world.run(tokens(length))
    for tier in ("device", "host"):
        tiers = world.run(tokens(length))
        assert getattr(tiers, tier) == (16 if length == 17 else 8)
        world.clear_device()
    check_at_rest(world)


def test_a_state_that_is_handed_over_late_belongs_to_its_own_border() -> None:
    """Fault 25: at its border there was no slot for the next snapshot, so the tree gets it with the pages that came
    after it."""
    world = hybrid(HAS_STATES)
    req = world.start(tokens(14))
    free = world.rows.recurrent_free_slots[0]
    held = list(free)
    free.clear()
    assert world.extend(req, 14)
    assert (req.recurrent_last_track_seqlen, world.match(tokens(14))) == (8, (0, 0))
    free.extend(held)
    assert world.extend(req, 14)
    assert world.match(tokens(14)) == (8, 0)
    world.finish(req)
    world.cache.release_prefetch(req.rid)
    for tier in ("device", "host"):
        assert getattr(world.run(tokens(14)), tier) == 8
        world.clear_device()
    check_at_rest(world)


def test_a_state_says_nothing_about_the_borders_inside_its_node() -> None:
    """Fault 25: what ends a prefix there may be that another kind has no room or no page."""
    world = hybrid(HAS_STATES, interval=16)
    world.run(tokens(33))
    path = world.tree.path_of(_namespace(RadixKey(tokens(32), None, 0)), encoded(tokens(32)))
    assert [node.num_tokens for node in path] == [16, 16]
    usable = [world.tree.usable(path, n, with_host=False) for n in (12, 16, 20, 28, 32)]
    assert usable == [0, 16, 16, 16, 32]


@pytest.mark.parametrize("mix", [HAS_STATES, BOTH], ids=["states", "both"])
def test_what_leaves_the_device_stays_in_the_tree_with_its_state(mix: Mix) -> None:
    """Fault 27."""
    world = hybrid(mix)
    world.run(tokens(33))
    world.clear_device()
    assert world.match(tokens(32)) == (0, 32)
    for kind in mix.kinds:
        assert world.component(kind).host.num_pages > 0
    assert world.run(tokens(33)).host == 32


def test_a_state_in_the_middle_of_a_path_is_copied_before_its_slot_is_freed() -> None:
    """Fault 28: without it every prompt that leaves the path there ends its match early."""
    world = hybrid(HAS_STATES, policy=WritePolicy.WRITE_THROUGH_AND_BACK)
    fail_backups_of(world, tokens(33))
    world.evict(states=100)
    world.settle()
    assert world.match(tokens(16)) == (0, 16)
    assert world.run([*tokens(16), 900]).host == 16
    check_at_rest(world)


def test_a_window_in_the_middle_of_a_path_is_copied_before_its_slots_are_freed() -> None:
    """Fault 29."""
    world = hybrid(SLIDES, policy=WritePolicy.WRITE_THROUGH_AND_BACK)
    fail_backups_of(world, tokens(33), answer=[400, 401])
    world.evict(swa=10**6)
    world.settle()
    assert world.match(tokens(16)) == (0, 16)
    assert world.run([*tokens(16), 900]).host == 16
    check_at_rest(world)


@pytest.mark.parametrize("mix", [SLIDES, HAS_STATES, BOTH], ids=["slides", "states", "both"])
def test_pages_without_a_host_copy_leave_the_device_with_their_companions(mix: Mix) -> None:
    """Faults 28 and 29, when the Full pages go and take the rest with them."""
    world = hybrid(mix, policy=WritePolicy.WRITE_THROUGH_AND_BACK)
    fail_backups_of(world, tokens(33))
    world.evict(full=10**6)
    world.settle()
    assert world.match(tokens(33)) == (0, 32)
    assert world.run(tokens(33)).host == 32
    check_at_rest(world)


@pytest.mark.parametrize("shared", [16, 32, 48])
def test_the_window_before_every_checkpoint_is_kept(shared: int) -> None:
    """Of a prompt in one piece, whose end is far away, a later prompt may share any number of tokens."""
    world = hybrid(SLIDES, interval=16)
    world.run(tokens(81))
    world.clear_device()
    assert world.match(tokens(shared)) == (0, shared)
    assert world.run([*tokens(shared), 900]).host == shared
    check_at_rest(world)


def test_both_sides_of_the_border_of_a_freed_window_reach_the_host() -> None:
    """Fault 30: what lies before the window has no SWA pages, and is no reason not to copy what follows it."""
    world = hybrid(SLIDES, interval=64)
    answer = [400 + i for i in range(28)]
    req = world.start(tokens(8))
    assert world.extend(req, 8)
    for token in answer:
        assert world.decode(req, token)
    assert req.swa_evicted_seqlen > 0, "the window has moved on"
    world.finish(req)
    world.clear_device()
    nodes = [node for node in world.tree.tree.nodes() if node.parent is not None]
    assert all(world.component(FULL).host_ready(node) for node in nodes)
    have_window = [world.component(SWA).host_ready(node) for node in nodes]
    assert {*have_window} == {False, True}
    assert world.match([*tokens(8), *answer]) == (0, 36)
    assert world.run([*tokens(8), *answer, 900]).host == 36


def test_a_window_with_a_hole_is_no_window() -> None:
    """Fault 32: three pages, one that is gone, three pages; a window of four."""
    swa = Part(Coverage.of_pages([0, 1, 2, 4, 5, 6]), reach=4)
    assert swa.coverage.largest_legal_border(4, 7) == 3
    full = Part(Coverage.of_pages(range(7)), reach=None)
    assert usable_prefix([full, swa], 7) == 3
    longer = Part(Coverage.of_pages([0, 1, 2, 4, 5, 6, 7]), reach=4)
    assert usable_prefix([full, longer], 8) == 3
    assert usable_prefix([Part(Coverage.of_pages(range(8)), None), longer], 8) == 8


def test_pages_that_no_window_reaches_leave_first_however_often_their_prompt_is_used() -> None:
    """Fault 33."""
    world = hybrid(SLIDES)
    long, short = tokens(40), tokens(12, 500)
    world.run([*long, 900])
    world.run([*short, 901])
    for _ in range(3):
        assert world.match(long) == (40, 0)
    in_reach = world.component(SWA).reach * PAGE
    world.evict(swa=40 - in_reach)
    assert world.match(long) == (40, 0)
    assert world.match(short) == (12, 0)


@pytest.mark.parametrize(("states", "border"), [([0, 1], 1), ([1], 0)])
def test_the_hit_is_a_border_that_all_kinds_agree_on(states: list[int], border: int) -> None:
    """Fault 34: not the least of what each kind has by itself."""
    full = Part(Coverage.of_pages([0, 1, 2]), reach=None)
    window = Part(Coverage.of_pages([0, 2] if border else [2]), reach=1)
    state = Part(Coverage.of_pages(states), reach=1)
    assert usable_prefix([full, window, state], 3) == border


@pytest.mark.parametrize(("kind", "border"), [(SWA, 28), (STATE, 24)], ids=str)
def test_a_companion_lost_while_its_pages_are_read_shortens_the_hit(
    kind: ComponentKind, border: int
) -> None:
    """Fault 35: storage had it when it was asked, and has it no longer when it is read."""
    old = hybrid(SLIDES if kind is SWA else HAS_STATES)
    prompt = tokens(33)
    old.run(prompt)
    old.settle()
    world = HybridWorld(old.settings, shelves=old.shelves)
    world.executor.auto = False
    req = world.arrive(prompt)
    world.executor.run_all()  # the look-up
    world.cache.check_hicache_events()
    assert world.executor.jobs, "the reads wait"
    last_key = world.tree.keys.hasher(None).chain(None, encoded(prompt[:32]))[-1]
    assert world.shelf(kind).delete([world.component(kind).key_of_page(last_key)]) == [True]
    world.executor.auto = True
    world.executor.run_all()
    world.await_prefetch(req)
    assert world.match(prompt[:-1]) == (0, border)
    world.cache.release_prefetch(req.rid)
    assert world.run(prompt).cached == border
    check_at_rest(world)


@pytest.mark.parametrize("mix", [SLIDES, MIXES["swa-only"]], ids=["full-swa", "swa-only"])
@pytest.mark.parametrize("length", [36, 40])
def test_a_prompt_of_whole_pages_comes_back_but_for_its_last_page(mix: Mix, length: int) -> None:
    """Fault 37: prefetch and match ask one function, and the kept tail has the page more that it needs."""
    world = hybrid(mix, interval=64)
    world.run(tokens(length))
    world.settle()
    fresh = HybridWorld(world.settings, shelves=world.shelves)
    assert fresh.run(tokens(length)).storage == length - PAGE
    check_at_rest(fresh)


@pytest.mark.parametrize("chunk", [4, 5, 13])
@pytest.mark.parametrize("length", range(4, 14))
def test_the_end_of_what_is_computed_always_has_its_window(length: int, chunk: int) -> None:
    """Fault 39: a window of one page; its end is not freed, wherever a chunk or the prompt ends."""
    world = hybrid(Mix(window=PAGE))
    req = world.start(tokens(length))
    while len(req.prefix_indices) < length:
        assert world.extend(req, chunk)
        node = req.last_node
        if node.parent is not None:
            assert world.component(SWA).data(node).device_slots is not None
    for token in range(400, 406):
        assert world.decode(req, token)
    world.finish(req)
    end = (length + 6) // PAGE * PAGE
    assert world.match([*tokens(length), *range(400, 406)]) == (end, 0)
    check_at_rest(world)


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_the_host_has_room_for_windows_whatever_its_size(ratio: float) -> None:
    """Fault 40: there is one size for all kinds; it cannot be set so that Full pages have no windows."""
    world = hybrid(SLIDES, interval=64, ratio=ratio)
    world.run(tokens(24))
    world.clear_device()
    assert world.match(tokens(24)) == (0, 24)
    assert world.run(tokens(25)).host == 24


def test_as_many_states_as_full_pages_need_stay_on_the_host() -> None:
    """Fault 41: prompts with three checkpoints each, and the device sized for running requests."""
    world = hybrid(HAS_STATES, device_pages=12, num_states=10, ratio=6.0)
    prompts = [tokens(25, 100 * (i + 1)) for i in range(world.host_pool(FULL).num_pages // 3)]
    for prompt in prompts:
        world.run(prompt)
        world.settle()
    world.clear_device()
    world.settle()
    lengths: list[int] = []
    for prompt in prompts:
        path = world.tree.path_of(_namespace(RadixKey(prompt, None, 0)), encoded(prompt[:24]))
        full = usable_prefix([world.tree.full.part(path, with_host=True)], 6) * PAGE
        assert world.match(prompt[:-1]) == (0, full // 8 * 8)
        lengths.append(full)
    assert sum(lengths) // PAGE > world.host_pool(FULL).num_pages // 2
    assert lengths.count(24) > 3
    assert 0 in lengths, "it is full"


@pytest.mark.parametrize("mix", [HAS_STATES, BOTH], ids=["states", "both"])
@pytest.mark.parametrize(("theirs", "ours", "common"), [(8, 16, 32), (16, 8, 32), (12, 8, 24)])
def test_servers_with_other_checkpoints_share_the_borders_that_both_have(
    mix: Mix, theirs: int, ours: int, common: int
) -> None:
    """Two servers on one directory: a state says after how many tokens it is by its name alone."""
    first = hybrid(mix, interval=theirs)
    first.run(tokens(44))
    first.settle()
    second = HybridWorld(replace(first.settings, interval=ours), shelves=first.shelves)
    assert second.run(tokens(42)).storage == common
    second.settle()
    third = HybridWorld(replace(first.settings, interval=ours), shelves=first.shelves)
    assert third.run(tokens(42)).storage == 41 // ours * ours
    third.sequences |= first.sequences | second.sequences  # who computed what is stored
    check_at_rest(third)
