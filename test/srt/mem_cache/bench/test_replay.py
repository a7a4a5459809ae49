"""Replay of a trace: deterministic, its content checked, never below the plain LRU, and honest about broken hits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax_hicache.bench.replay import Levels, plain_lru, replay, standard_levels
from sgl_jax_hicache.bench.replay_engine import ReplayEngine, ReplayError, Served
from sgl_jax_hicache.bench.trace import (
    DEFAULT_TRACE,
    BlockLru,
    TraceError,
    TraceRequest,
    read_trace,
)


def requests(*prompts: list[int]) -> list[TraceRequest]:
    return [TraceRequest(i, tuple(prompt)) for i, prompt in enumerate(prompts)]


def run(prompts: list[TraceRequest], levels: Levels, token_lists: bool = False) -> list[Served]:
    return replay(prompts, levels, token_lists, precompile=False)


def hits(served: list[Served]) -> list[tuple[int, int, int]]:
    return [(s.tiers.device // 512, s.tiers.host // 512, s.tiers.storage // 512) for s in served]


@pytest.fixture(scope="module")
def cut() -> list[TraceRequest]:
    return read_trace(DEFAULT_TRACE)


@pytest.fixture
def engine() -> Iterator[ReplayEngine]:
    engine = ReplayEngine(8, HiCacheConfig())
    yield engine
    engine.close()


def test_the_cut_is_what_it_says(cut: list[TraceRequest]) -> None:
    assert len(cut) == 300
    assert sum(len(r.hash_ids) for r in cut) == 7721
    assert "Apache-2.0" in (DEFAULT_TRACE.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "levels", [Levels(400), Levels(400, 800), Levels(400, 800, "memory"), Levels(400, 800, "file")]
)
def test_the_same_trace_gives_the_same_hits(cut: list[TraceRequest], levels: Levels) -> None:
    first, second = (run(cut[:60], levels) for _ in range(2))
    assert hits(first) == hits(second)
    assert any(any(hit) for hit in hits(first))


def test_lists_and_arrays_of_tokens_are_the_same(cut: list[TraceRequest]) -> None:
    arrays, lists = (run(cut[:30], Levels(400), kind) for kind in (False, True))
    assert hits(arrays) == hits(lists)


def test_l1_alone_hits_as_often_as_a_plain_lru(cut: list[TraceRequest]) -> None:
    for levels in standard_levels(cut):
        if not levels.l2_blocks:
            served = run(cut, levels)
            lru_hits, _ = plain_lru(cut, levels.l1_blocks)
            assert sum(sum(hit) for hit in hits(served)) >= lru_hits


def test_each_tier_serves_what_only_it_has() -> None:
    prompts = requests([1, 2], [1, 2, 3], [11, 12, 13], [21, 22, 23], [31, 32, 33], [1, 2, 3])
    assert hits(run(prompts, Levels(3)))[-1] == (0, 0, 0)
    assert hits(run(prompts, Levels(3, 12)))[-1] == (0, 3, 0)
    assert hits(run(prompts, Levels(3, 6, "memory")))[-1] == (0, 0, 3)
    assert hits(run(prompts, Levels(3, 6, "file")))[1] == (2, 0, 0)


def test_a_hit_with_the_wrong_content_is_found(engine: ReplayEngine) -> None:
    request = requests([1, 2, 3])[0]
    engine.serve(request)
    pool = engine.cache.token_to_kv_pool_allocator.get_kvcache()
    assert engine.serve(request).tiers.computed == 0
    pool.write(np.array([2], np.int32), np.array([0.0], np.float32))
    with pytest.raises(ReplayError, match="content"):
        engine.serve(request)


def test_a_request_that_does_not_fit_is_said(engine: ReplayEngine) -> None:
    with pytest.raises(ReplayError, match="9 blocks does not fit"):
        engine.serve(requests(list(range(9)))[0])


def test_the_plain_lru_forgets_the_longest_unused() -> None:
    lru = BlockLru(3)
    assert lru.serve([1, 2, 3]) == 0
    assert lru.serve([1]) == 1
    assert lru.serve([4]) == 0  # instead of 2
    assert lru.serve([1, 3, 4]) == 3
    assert lru.serve([2]) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no requests"),
        ('{"timestamp": 0, "hash_ids": [1]}\nnot json', ":2: not a request"),
        ('{"timestamp": 0}', ":1: not a request"),
        ('{"timestamp": 0, "hash_ids": []}', ":1: hash_ids"),
        ('{"timestamp": 0, "hash_ids": [-1]}', ":1: hash_ids"),
        ("[1, 2]", ":1: not a request"),
    ],
)
def test_a_broken_trace_is_said_in_words(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=expected):
        read_trace(path)


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5, "hash_ids": [1]}\n{"timestamp": 2, "hash_ids": [2]}\n')
    assert [r.arrival_ms for r in read_trace(path)] == [2, 5]
