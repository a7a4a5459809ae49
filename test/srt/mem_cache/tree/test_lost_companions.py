"""Windows, states and pages that are lost, or for which there is no room: the hit ends at the next legal border.

What is reused is compared with the oracle as it is computed on (`HybridWorld.compute`), so fresh pages with another
prefix's state, or with a stale one, would show.
"""

from __future__ import annotations

import numpy as np
import pytest
from companions import after_restart, all_pages, border_with, key_of, path_of
from hybrid_checks import check, check_at_rest
from hybrid_pools import FULL, HYBRIDS, MIXES, STATE, SWA
from hybrid_world import HybridWorld, Settings

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax_hicache.engine.req import Req

ALL_KINDS = MIXES["full-swa-recurrent"]
PAGE_SIZE = 4
REUSABLE = 32
PROMPT = list(range(1, REUSABLE + 2))

hybrids = pytest.mark.parametrize("name", HYBRIDS)


def finish(world: HybridWorld, req: Req) -> None:
    """Compute the rest of the prompt, and end."""
    while len(req.prefix_indices) < len(PROMPT):
        assert world.extend(req, len(PROMPT))
        check(world)
    world.finish(req)
    world.cache.release_prefetch(req.rid)
    check_at_rest(world)


@hybrids
@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize(
    "lost",
    [
        *([(SWA, 7)], [(SWA, 6)], [(SWA, 5)], [(SWA, 7), (SWA, 3)], [(SWA, 0)]),
        *([(STATE, 7)], [(STATE, 7), (STATE, 5)], [(STATE, 7), (SWA, 5)]),
        *([(FULL, 7)], [(FULL, 5)], [(FULL, 5), (STATE, 3)], [(FULL, 0)]),
    ],
    ids=lambda lost: " ".join(f"{kind.value}{page}" for kind, page in lost),
)
def test_what_is_lost_between_look_up_and_read_shortens_the_hit_to_the_next_legal_border(
    name: str, how: str, lost: list[tuple[ComponentKind, int]]
) -> None:
    settings = Settings(HYBRIDS[name])
    world = after_restart(settings, PROMPT)
    lost = [(kind, page) for kind, page in lost if kind in settings.mix.kinds]
    world.executor.auto = False
    req = world.arrive(PROMPT)
    world.executor.run_one()  # the look-up finds everything
    keys = [(kind, key_of(world, PROMPT, kind, page)) for kind, page in lost]
    for kind, key in keys:
        if how == "gone":
            assert world.shelf(kind).delete([key]) == [True]
        else:
            world.shelf(kind).damaged.add(key)
    world.await_prefetch(req)
    assert world.admit(req)
    world.finish_loads()
    border = border_with(world, REUSABLE, all_pages(world, REUSABLE) - set(lost))
    assert req.tiers is not None
    assert req.tiers.cached == len(req.prefix_indices) == border
    finish(world, req)


def _fill(world: HybridWorld, kind: ComponentKind, num_free: int) -> np.ndarray:
    """Leave only so many free pages in a host pool, the rest is somebody's; the pages that were taken."""
    taken = world.host_pool(kind).alloc(world.host_pool(kind).num_free - num_free)
    assert taken is not None
    return taken


@pytest.mark.parametrize(
    ("kind", "num_free", "border"),
    [(FULL, 5, 16), (FULL, 1, 0), (SWA, 2, 8), (SWA, 1, 0), (STATE, 1, 32), (STATE, 0, 0)],
)
def test_a_fetch_takes_what_every_host_pool_has_room_for(
    kind: ComponentKind, num_free: int, border: int
) -> None:
    settings = Settings(ALL_KINDS)
    world = after_restart(settings, PROMPT)
    taken = _fill(world, kind, num_free)
    req = world.start(PROMPT)
    assert req.tiers is not None
    assert req.tiers.storage == len(req.prefix_indices) == border
    world.controller.evict_callback(kind, taken)
    finish(world, req)


@pytest.mark.parametrize("kind", ALL_KINDS.kinds)
def test_what_one_host_pool_has_no_room_for_does_not_come_back_with_what_the_others_have(
    kind: ComponentKind,
) -> None:
    world = HybridWorld(Settings(ALL_KINDS, storage=StorageKind.NONE))
    world.run(PROMPT[:17])
    world.settle()
    first = np.concatenate(
        [
            pages
            for node in path_of(world, PROMPT[:16])
            if (pages := world.component(kind).data(node).host_pages) is not None
        ]
    )
    world.host_pool(kind).lock(first)  # they are being loaded, say: not to be dropped for others
    taken = _fill(world, kind, 0)
    world.run(PROMPT)
    world.clear_device()
    world.controller.release(kind, first)
    world.controller.evict_callback(kind, taken)
    check(world)
    whole = REUSABLE // PAGE_SIZE
    kept = {FULL: whole, SWA: whole, STATE: REUSABLE // world.settings.interval, kind: len(first)}
    if kind is not FULL:  # without their Full pages the others are gone, too
        assert {other: _num_on_host(world, other) for other in kept} == kept
    assert world.match(PROMPT[:REUSABLE]) == (0, 16)
    req = world.start(PROMPT)
    assert req.tiers is not None
    assert req.tiers.host == 16
    finish(world, req)


def _num_on_host(world: HybridWorld, kind: ComponentKind) -> int:
    return int(world.component(kind).host.num_pages)


@pytest.mark.parametrize("storage", [None, StorageKind.NONE], ids=["device only", "with a host"])
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "swa-only"])
def test_a_node_that_lost_a_companion_has_it_again_when_it_is_recomputed(
    name: str, storage: StorageKind | None
) -> None:
    world = HybridWorld(Settings(HYBRIDS[name], storage=storage))
    world.run(PROMPT)
    world.settle()
    world.evict(swa=10**6, states=10**6)
    for component in world.tree.components if storage is not None else ():
        for node in path_of(world, PROMPT[:REUSABLE]):
            if component.kind is not FULL and component.data(node).host_pages is not None:
                world.tree.tiers.drop_host(component, node)
    assert world.match(PROMPT[:REUSABLE]) == (0, 0)
    assert all(world.tree.on_device(node) for node in path_of(world, PROMPT[:REUSABLE]))
    assert world.run(PROMPT).computed == len(PROMPT)
    check_at_rest(world)
    assert world.match(PROMPT[:REUSABLE]) == (REUSABLE, 0)
    if storage is not None:
        world.clear_device()
        assert world.match(PROMPT[:REUSABLE]) == (0, REUSABLE)
    world.run(PROMPT)
    check_at_rest(world)
