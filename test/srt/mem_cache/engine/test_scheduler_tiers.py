"""The scheduler over all three tiers, for models of every kind.

The fake model reads what transfers brought, to every kind of pool: a wrong byte, window or state is a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_kinds import KINDS, both_loops, kinds
from scheduler_traffic import STEM_TOKENS, random_stems, random_tokens, run_random_traffic
from scheduler_world import SchedulerWorld

from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    StorageKind,
    WritePolicy,
)


def _config(kind: str, overlap: bool, folder: Path, ratio: float) -> HiCacheConfig:
    """A spread over the settings: each value comes with each kind, each loop and each size of the host."""
    number = list(KINDS).index(kind)
    return HiCacheConfig(
        storage=StorageKind.FILE,
        storage_path=folder,
        ratio=ratio,
        async_impl=list(AsyncImpl)[(number + overlap) % 2],
        host_scheme=list(HostScheme)[overlap],
        write_policy=list(WritePolicy)[(number + (ratio < 1)) % 2],
    )


@contextmanager
def _world(kind: str, **settings: Any) -> Iterator[SchedulerWorld]:
    world = SchedulerWorld(**KINDS[kind], **settings)
    try:
        yield world
    finally:
        world.tree.shutdown(10)


@both_loops
@kinds
def test_every_tier_gives_the_same_tokens(
    kind: str, overlap: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    config = _config(kind, overlap, tmp_path, ratio=3.0)
    prompt, other = (random_tokens(rng, 58) for _ in range(2))
    with _world(kind, num_pages=20, overlap=overlap, hicache=config) as world:
        assert world.serve("computed", prompt).computed == 58
        assert world.serve("device", prompt).device == 56
        world.serve("evicts", other)
        assert world.serve("host", prompt).host > 0
        assert world.tree.flush_to_storage(10)
        world.scheduler.flush()
        assert world.serve("storage", prompt).storage == 56
    with _world(kind, num_pages=20, overlap=overlap, hicache=config) as world:
        assert world.serve("after a restart", prompt).storage == 56
        assert world.serve("a part of it", [*prompt[:35], 1, 2]).cached == 32


@both_loops
@kinds
@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_random_traffic_through_small_pools(
    kind: str, overlap: bool, ratio: float, tmp_path: Path, rng: np.random.Generator
) -> None:
    config = _config(kind, overlap, tmp_path, ratio)
    stems = random_stems(rng, 6)
    with _world(kind, num_pages=32, reserve=0.1, overlap=overlap, hicache=config) as world:

        def check(number: int) -> None:
            if number % 5 == 0:  # a worker in the middle of a copy is no broken invariant
                world.settle()

        run_random_traffic(world, rng, stems, num_requests=25, after_request=check)
        world.settle()
        # Six stems of twelve pages: the last are on the device by the end, the first in files and perhaps on the host.
        for number, stem in enumerate(stems):
            world.serve(f"whole stem {number}", [*stem, 0])
            assert world.tree.flush_to_storage(10)
        assert world.serve("the last again", [*stems[-1], 1]).device == STEM_TOKENS
        tiers = world.serve("the first again", [*stems[0], 1])
        assert (tiers.device, tiers.cached) == (0, STEM_TOKENS)
        assert ratio > 1 or tiers.storage > 0, "the host holds sixteen pages"
