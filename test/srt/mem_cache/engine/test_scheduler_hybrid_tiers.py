"""The scheduler over all three tiers, for models with sliding windows and recurrent states.

The fake model reads what transfers brought, to every kind of pool: a wrong byte, window or state is a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import VOCAB_SIZE, expected_output
from scheduler_world import HybridWorld, radix_tree

from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    StorageKind,
    WritePolicy,
)

KINDS: dict[str, dict[str, Any]] = {
    "sliding": {"window": 10, "swa_pages": 20},
    "recurrent": {"states": 6},
    "both": {"window": 7, "swa_pages": 20, "states": 6},
}
kinds = pytest.mark.parametrize("kind", KINDS)
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


def _config(kind: str, overlap: bool, folder: Path, ratio: float) -> HiCacheConfig:
    """A spread over the settings: each value comes with each kind or each loop."""
    number = list(KINDS).index(kind)
    return HiCacheConfig(
        storage=StorageKind.FILE,
        storage_path=folder,
        ratio=ratio,
        async_impl=list(AsyncImpl)[(number + overlap) % 2],
        host_scheme=list(HostScheme)[overlap],
        write_policy=list(WritePolicy)[number % 2],
    )


@contextmanager
def _world(kind: str, **settings: Any) -> Iterator[HybridWorld]:
    world = HybridWorld(page_size=4, interval=8, tree=radix_tree, **KINDS[kind], **settings)
    try:
        yield world
    finally:
        world.tree.shutdown(10)


def _settle(world: HybridWorld) -> None:
    for _ in range(1000):
        world.tree.check_hicache_events()
        if not world.tree.has_pending_work():
            return
        world.tree.wait_events(10)
    raise AssertionError("transfers never ended")


def _serve(world: HybridWorld, rid: str, prompt: list[int]) -> Any:
    """Serve one request alone; its account."""
    client = world.submit(rid, prompt, 2)
    for _ in range(1000):
        if not world.scheduler.step() and world.tree.has_pending_work():
            world.tree.wait_events(10)
        if not world.scheduler.busy():
            break
    _settle(world)
    world.scheduler.check_idle()
    world.tree.check_invariants()
    assert client.tokens == expected_output(prompt, 2)
    tiers = client.last.stats.tiers
    assert tiers.cached + tiers.computed == len(prompt)
    return tiers


@both_loops
@kinds
def test_every_tier_gives_the_same_tokens(
    kind: str, overlap: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    config = _config(kind, overlap, tmp_path, ratio=3.0)
    prompt, other = (rng.integers(0, VOCAB_SIZE, 58).tolist() for _ in range(2))
    with _world(kind, num_pages=20, overlap=overlap, hicache=config) as world:
        assert _serve(world, "computed", prompt).computed == 58
        assert _serve(world, "device", prompt).device == 56
        _serve(world, "evicts", other)
        assert _serve(world, "host", prompt).host > 0
        assert world.tree.flush_to_storage(10)
        world.scheduler.flush()
        assert _serve(world, "storage", prompt).storage == 56
    with _world(kind, num_pages=20, overlap=overlap, hicache=config) as world:
        assert _serve(world, "after a restart", prompt).storage == 56
        assert _serve(world, "a part of it", [*prompt[:35], 1, 2]).cached == 32


@both_loops
@kinds
@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_random_traffic_through_small_pools(
    kind: str, overlap: bool, ratio: float, tmp_path: Path, rng: np.random.Generator
) -> None:
    config = _config(kind, overlap, tmp_path, ratio)
    stems = [rng.integers(0, VOCAB_SIZE, 48).tolist() for _ in range(6)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    with _world(kind, num_pages=32, reserve=0.1, overlap=overlap, hicache=config) as world:
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
            world.allocator.check_invariants()
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
        print(totals)
        assert totals["device"] > 0
        assert totals["host"] + totals["storage"] > 0
