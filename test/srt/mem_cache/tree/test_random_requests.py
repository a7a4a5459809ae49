"""Random requests over every tier, page size, policy and executor; every page's content is checked."""

from __future__ import annotations

import random

import pytest
from tree_world import ManualExecutor, Request, World, prompt

from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, HostScheme, StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams


def owned_tokens(world: World, req: Request) -> int:
    """Device tokens of whole pages that a running request holds outside the tree."""
    if req.req_pool_idx < 0:
        return 0
    pages = -(-len(req.prefix_indices) // world.page_size)
    return pages * world.page_size - req.cache_protected_len


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("scheme", list(HostScheme))
def test_random_requests(
    page_size: int, policy: WritePolicy, scheme: HostScheme, seed: int
) -> None:
    """Random requests, evictions, failures, delays, resets and restarts; every page checked after every step."""
    rng = random.Random(seed)
    shelf: dict = {}
    executor = ManualExecutor(auto=False)

    def new_world() -> World:
        return World(
            page_size=page_size,
            device_pages=24 if page_size == 4 else 60,
            ratio=rng.choice([0.3, 1.0, 2.0]),
            storage=StorageKind.FILE,
            policy=policy,
            scheme=scheme,
            executor=executor,
            shelf=shelf,
        )

    world = new_world()
    stems = [prompt(rng, 24) for _ in range(4)]
    running: list[Request] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.35 and len(running) < 2:
            stem = rng.choice(stems)
            token_ids = stem[: rng.randrange(1, 24)] + prompt(rng, rng.randrange(1, 6))
            req = world.start(token_ids, rng.choice([None, "tenant"]), prefetch=rng.random() < 0.7)
            running.append(req)
        elif action < 0.6 and running:
            req = rng.choice(running)
            up_to = rng.randrange(len(req.prefix_indices), len(req.origin_input_ids) + 1)
            if up_to > len(req.prefix_indices) and world.extend(req, up_to):
                world.cache.cache_unfinished_req(req)
        elif action < 0.75 and running:
            req = running.pop(rng.randrange(len(running)))
            if len(req.prefix_indices) < len(req.origin_input_ids):
                world.extend(req, len(req.origin_input_ids))
            world.finish(req, is_insert=rng.random() < 0.8)
        elif action < 0.85:
            world.cache.evict(EvictParams(rng.randrange(1, 30)))
        elif action < 0.97:
            for _ in range(rng.randrange(4)):
                if executor.jobs:
                    executor.fail_next = ["injected"] if rng.random() < 0.1 else []
                    executor.run_one(rng.randrange(len(executor.jobs)))
            executor.fail_next = []
            world.cache.check_hicache_events()
        elif not running:
            if rng.random() < 0.5:
                world.cache.reset()
                world.allocator.clear()
            else:
                world.settle()
                world.verify_at_rest()
                world = new_world()
        world.verify(in_use=sum(owned_tokens(world, req) for req in running))
    for req in running:
        world.finish(req)
    world.verify_at_rest()


@pytest.mark.parametrize("async_impl", list(AsyncImpl))
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_random_requests_with_real_executors(
    async_impl: AsyncImpl, policy: WritePolicy, seed: int
) -> None:
    """Whole requests one after the other while real workers move pages; nothing reused may ever be wrong."""
    rng = random.Random(seed)
    shelf: dict = {}
    stems = [prompt(rng, 40) for _ in range(5)]
    for _ in range(3):
        world = World(
            device_pages=20,
            ratio=rng.choice([0.5, 2.0]),
            storage=StorageKind.FILE,
            policy=policy,
            shelf=shelf,
            async_impl=async_impl,
        )
        for _ in range(40):
            token_ids = rng.choice(stems)[: rng.randrange(1, 40)] + prompt(rng, rng.randrange(1, 8))
            chunk = rng.choice([None, 3, 8])
            served = world.run(token_ids, chunk=chunk, num_output=rng.randrange(4))
            assert served.cached + served.computed == len(token_ids)
        world.verify_at_rest()
        assert world.cache.flush_to_storage(60.0)
        assert world.cache.shutdown(60.0)
