"""What happens to the tree while a request waits in the queue, and to the request's pages that are on their way."""

from __future__ import annotations

import pytest
from companions import after_restart
from hybrid_checks import check, check_at_rest
from hybrid_pools import FULL, MIXES, Mix
from hybrid_world import HybridWorld, Settings

from sgl_jax.srt.mem_cache.hicache.storage_prefetch import FETCH_CHUNK_PAGES
from sgl_jax_hicache.engine.req import Req

PAGE_SIZE = 4


def serve(world: HybridWorld, req: Req) -> int:
    """Admit a request that waits and compute the rest of its prompt; how many tokens were reused."""
    world.await_prefetch(req)
    assert world.admit(req)
    world.finish_loads()
    while len(req.prefix_indices) < req.num_tokens:
        assert world.extend(req, req.num_tokens)
    world.finish(req)
    world.cache.release_prefetch(req.rid)
    check_at_rest(world)
    assert req.tiers is not None
    return req.tiers.cached


def test_fetched_pages_before_and_behind_a_node_that_came_meanwhile_find_their_places() -> None:
    """While its look-up is under way, others compute its first two nodes. The upper one's copy is still on its way when
    both lose their slots: pages before and behind the lower one are read, and it lies in between."""
    prompt = list(range(1, 34))
    settings = Settings(MIXES["full"])
    world = after_restart(settings, prompt)
    executor = world.executor
    executor.auto = False
    req = world.arrive(prompt)
    world.run(prompt[:9], prefetch=False)
    world.run(prompt[:17], prefetch=False)
    assert len(executor.jobs) == 3, "the look-up and two backups"
    executor.run_one(2)
    world.evict(full=10**6)
    world.cache.check_hicache_events()
    assert world.match(prompt[:16]) == (0, 0)
    executor.run_one(0)
    world.cache.check_hicache_events()
    (chunk,) = [
        chunk
        for waiting in world.cache._prefetch._table._by_rid.values()
        for _, chunk in waiting.chunks
    ]
    assert (chunk.component, chunk.pages) == (FULL, (0, 1, 4, 5, 6, 7))
    executor.run_one(len(executor.jobs) - 1)
    world.cache.check_hicache_events()
    check(world)
    executor.auto = True
    executor.run_all()
    assert serve(world, req) == 32


STAGES = [
    "look-up under way",
    "look-up ended",
    "read under way",
    "a later part is there",
    "all read",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_reset_leaks_no_page_of_a_request_that_waits(mix: Mix, stage: str) -> None:
    num_pages = FETCH_CHUNK_PAGES + 4  # read in two parts
    prompt = list(range(1, num_pages * PAGE_SIZE + 2))
    settings = Settings(mix, device_pages=32, swa_pages=32, rows=2)
    world = after_restart(settings, prompt)
    executor = world.executor
    executor.auto = False
    req = world.arrive(prompt)
    if stage != "look-up under way":
        executor.run_one()
    if stage not in ("look-up under way", "look-up ended"):
        world.cache.check_hicache_events()
        assert len(executor.jobs) >= 2
    if stage == "a later part is there":
        executor.run_one(1)
        world.cache.check_hicache_events()
    if stage == "all read":
        executor.run_all()
    world.reset()
    check(world)
    executor.auto = True
    executor.run_all()
    check_at_rest(world)
    for component in world.tree.components:
        pool = world.host_pool(component.kind)
        assert pool.num_free == pool.num_pages
    assert serve(world, req) == 0
    assert world.run(prompt).device > 0
    check_at_rest(world)
