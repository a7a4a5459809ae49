"""The scheduler over all three tiers. The fake model reads what transfers brought: a wrong byte is a wrong token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import VOCAB_SIZE, expected_output
from scheduler_world import SchedulerWorld

from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    StorageKind,
    WritePolicy,
)

PAGE_SIZE = 4


@contextmanager
def _world(**settings: Any) -> Iterator[SchedulerWorld]:
    world = SchedulerWorld(page_size=PAGE_SIZE, **settings)
    try:
        yield world
    finally:
        world.tree.shutdown(10)


def _settle(world: SchedulerWorld) -> None:
    for _ in range(1000):
        world.tree.check_hicache_events()
        if not world.tree.has_pending_work():
            return
        world.tree.wait_events(10)
    raise AssertionError("transfers never ended")


def _serve(world: SchedulerWorld, rid: str, prompt: list[int], num_new: int = 2) -> Any:
    """Serve one request alone; its account."""
    client = world.submit(rid, prompt, num_new)
    for _ in range(1000):
        if not world.scheduler.step() and world.tree.has_pending_work():
            world.tree.wait_events(10)
        if not world.scheduler.busy():
            break
    _settle(world)
    world.scheduler.check_idle()
    assert client.tokens == expected_output(prompt, num_new)
    tiers = client.last.stats.tiers
    assert tiers.cached + tiers.computed == len(prompt)
    return tiers


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("async_impl", AsyncImpl)
@pytest.mark.parametrize("scheme", HostScheme)
def test_every_tier_gives_the_same_tokens(
    overlap: bool,
    async_impl: AsyncImpl,
    scheme: HostScheme,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    config = HiCacheConfig(
        storage=StorageKind.FILE,
        storage_path=tmp_path,
        async_impl=async_impl,
        host_scheme=scheme,
    )
    prompt, other = (rng.integers(0, VOCAB_SIZE, 61).tolist() for _ in range(2))
    with _world(num_pages=20, overlap=overlap, hicache=config) as world:
        assert _serve(world, "computed", prompt).computed == 61
        assert _serve(world, "device", prompt).device == 60
        _serve(world, "evicts", other)
        assert _serve(world, "host", prompt).host > 0
        world.scheduler.flush()
        assert _serve(world, "storage", prompt).storage == 60
    with _world(num_pages=20, overlap=overlap, hicache=config) as world:
        assert _serve(world, "after a restart", prompt).storage == 60


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("async_impl", AsyncImpl)
@pytest.mark.parametrize("policy", WritePolicy)
def test_random_traffic_through_small_pools(
    overlap: bool,
    async_impl: AsyncImpl,
    policy: WritePolicy,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    # Half of all combinations with the ratio, every pair among them.
    factors = (overlap, async_impl is AsyncImpl.FUTURE, policy is WritePolicy.WRITE_THROUGH)
    config = HiCacheConfig(
        storage=StorageKind.FILE,
        ratio=0.5 if sum(factors) % 2 else 3.0,
        storage_path=tmp_path,
        async_impl=async_impl,
        write_policy=policy,
    )
    stems = [rng.integers(0, VOCAB_SIZE, 48).tolist() for _ in range(6)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    with _world(num_pages=32, chunk=16, reserve=0.1, overlap=overlap, hicache=config) as world:
        for i in range(50):
            rid = str(i)
            stem = stems[int(rng.integers(0, 6))][: int(rng.integers(0, 49))]
            prompt = [*stem, *rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 12))).tolist()]
            prompts[rid] = (prompt, int(rng.integers(1, 20)))
            world.submit(rid, *prompts[rid])
            if rng.random() < 0.15:
                victim = str(rng.integers(0, i + 1))
                if world.scheduler.abort(victim):
                    aborted.add(victim)
            world.step(int(rng.integers(0, 8)))
            if i % 5 == 0:  # a worker in the middle of a copy is no broken invariant
                _settle(world)
                world.tree.check_invariants()
        world.run(20000)
        _settle(world)
        world.scheduler.check_idle()
        world.tree.check_invariants()
        totals = {"device": 0, "host": 0, "storage": 0}
        for rid, (prompt, num_new) in prompts.items():
            tokens = world.clients[rid].tokens
            expected = expected_output(prompt, num_new)
            assert tokens == (expected[: len(tokens)] if rid in aborted else expected)
            tiers = world.clients[rid].last.stats.tiers
            assert tiers.cached + tiers.computed in (0, len(prompt))
            for tier in totals:
                totals[tier] += getattr(tiers, tier)
        assert totals["device"] > 0
        assert totals["host"] + totals["storage"] > 0
