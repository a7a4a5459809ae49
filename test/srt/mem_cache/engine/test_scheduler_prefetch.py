"""The scheduler and the prefetches of waiting requests: who waits, who passes, when one is asked for and let go."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_fakes import expected_output
from model_kinds import both_loops
from null_tree import NullTree
from scheduler_traffic import random_tokens
from scheduler_world import SchedulerWorld

from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens


class SlowStorageTree(NullTree):
    """Prefetches become ready when the test says so; everything is recorded."""

    hicache_enabled = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ready: set[str] = set()
        self.started: list[str] = []
        self.released: list[str] = []
        self.admitted: list[str] = []
        self.asked: list[str] = []

    def start_prefetch(self, rid: str, key: RadixKey) -> None:
        self.started.append(rid)

    def prefetch_ready(self, rid: str) -> bool:
        self.asked.append(rid)
        return rid in self.ready

    def release_prefetch(self, rid: str) -> None:
        self.released.append(rid)

    def has_pending_work(self) -> bool:
        return bool(set(self.started) - self.ready - set(self.released))

    def tier_tokens(
        self, rid: str, prompt_len: int, device_len: int, prefix_len: int
    ) -> TierTokens:
        self.admitted.append(rid)
        return super().tier_tokens(rid, prompt_len, device_len, prefix_len)


@both_loops
def test_a_request_that_waits_for_storage_lets_others_pass(overlap: bool) -> None:
    world = SchedulerWorld(overlap=overlap, tree=SlowStorageTree, rows=1)
    world.tree.ready = {"b", "c"}
    clients = {rid: world.submit(rid, [1, 2, 3], 3) for rid in ("a", "b", "c")}
    world.step(20)
    assert clients["a"].chunks == []
    assert clients["b"].tokens == clients["c"].tokens == expected_output([1, 2, 3], 3)
    world.tree.ready.add("a")
    world.run()
    assert clients["a"].tokens == expected_output([1, 2, 3], 3)
    assert world.tree.started == ["a", "b", "c"]
    assert sorted(world.tree.admitted) == ["a", "b", "c"]
    assert set(world.tree.released) == {"a", "b", "c"}


def test_a_prefetch_is_asked_for_only_when_its_request_could_be_admitted() -> None:
    world = SchedulerWorld(tree=SlowStorageTree, rows=1)
    world.tree.ready = {"a"}
    world.submit("a", [1, 2, 3], 20)
    world.submit("b", [4, 5], 1)
    world.step(5)
    assert world.tree.asked == ["a"], "the only row is taken: b's deadline must not run yet"
    world.scheduler.abort("a")
    world.scheduler.abort("b")
    world.run()
    assert set(world.tree.released) == {"a", "b"}


@both_loops
def test_tiers_are_counted_once_however_often_a_request_is_retracted(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, tree=SlowStorageTree, num_pages=12, rows=4, reserve=0.0)
    rids = [str(i) for i in range(6)]
    world.tree.ready = set(rids)
    for rid in rids:
        world.submit(rid, random_tokens(rng, 8), 24)
    world.run()
    assert sum(client.last.stats.num_retractions for client in world.clients.values()) > 0
    assert sorted(world.tree.admitted) == rids
    assert sorted(world.tree.released) == rids
