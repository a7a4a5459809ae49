"""The engine itself, with HiCache: what comes from a lower tier is what was computed, after a kill too.

Slow: every run starts the engine. On a TPU VM, with a real model:

    pytest -p no:anyio test/srt/mem_cache/sgl_jax_engine/test_in_the_engine.py --sgl-jax-model-path Qwen/Qwen3-8B \
        --sgl-jax-engine-args '{"tp_size": 4, "page_size": 128, "max_total_tokens": 8192}' --sgl-jax-tolerance 0.05
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_runs import FLUSH, KILL, SHUTDOWN, STATE, Answer, EngineRuns, ask

from sgl_jax_hicache import overlay

pytestmark = pytest.mark.skipif(
    not overlay.engine_installed(), reason="the sgl-jax engine is not installed here"
)

VOCAB = 480


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that differ from page to page and from prompt to prompt."""
    return [(7 * i * (seed + 1) + 13 * seed) % VOCAB + 4 for i in range(length)]


def same(reused: Answer, computed: Answer, tolerance: float) -> None:
    """Tokens equal, log probabilities within what another batch shape may change."""
    assert reused.output_ids == computed.output_ids
    differences = [abs(a - b) for a, b in zip(reused.logprobs, computed.logprobs, strict=True)]
    assert max(differences) <= tolerance, differences


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "overlap off": {"disable_overlap_schedule": True},
    "overlap on": {"disable_overlap_schedule": False},
    "tp 2": {"tp_size": 2, "devices": 2, "disable_overlap_schedule": False},
    "polled, slab": {"hicache_async_impl": "future", "hicache_host_scheme": "slab"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_tier_gives_what_was_computed(engine_runs: EngineRuns, name: str) -> None:
    settings = CONFIGURATIONS[name]
    page, pool = engine_runs.page_size, engine_runs.pool_tokens or 8192
    length = 12 * page + page // 2
    reused = 12 * page
    mine = ask(prompt(1, length))
    fill = [ask(prompt(20 + i, length), max_new_tokens=2) for i in range(pool // reused + 1)]
    first = engine_runs.run(mine, mine, *fill, mine, KILL, **settings)
    cold, device, host = first[0], first[1], first[-1]
    storage, flushed, again, state = engine_runs.run(mine, FLUSH, mine, STATE, SHUTDOWN, **settings)
    assert cold.tiers == {"device": 0, "host": 0, "storage": 0, "computed": length}
    for answer, tier in (
        (device, "device"),
        (host, "host"),
        (storage, "storage"),
        (again, "storage"),
    ):
        assert answer.cached_tokens == reused
        assert answer.tiers[tier] == reused, (tier, answer.tiers)
        assert answer.tiers["computed"] == length - reused
        same(answer, cold, engine_runs.tolerance)
        assert answer.logprobs == device.logprobs, f"{tier} differs from device"
    assert flushed == {"flushed": True}
    assert state["hicache_prompt_tokens"]["storage"] == 2 * reused


def conversations(seed: int, page: int) -> list[list[int]]:
    """Prompts that grow, fork and share beginnings."""
    rng = random.Random(seed)
    roots = [[rng.randrange(4, VOCAB) for _ in range(page * length)] for length in (2, 5, 6)]
    prompts: list[list[int]] = []
    for _ in range(16):
        base = rng.choice(prompts or roots) if rng.random() < 0.6 else rng.choice(roots)
        kept = base[: rng.randrange(1, len(base) + 1)]
        prompts.append(kept + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 3 * page))])
    return prompts


def test_many_at_once_with_a_small_pool(engine_runs: EngineRuns, seed: int) -> None:
    """Batches that share prefixes, and a device pool that can not hold them; every answer is that without a cache."""
    page = engine_runs.page_size
    settings: dict[str, Any] = {"disable_overlap_schedule": False}
    if not engine_runs.on_accelerator and engine_runs.preload is None:
        # On CPU the engine by itself is wrong for several requests in a batch unless a page is a token, and with
        # overlap a step may read the next one's table.
        page = 16
        settings = {"page_size": 1, "disable_overlap_schedule": True}
    prompts = conversations(seed, page)
    # All ranks together have room for sixteen pages, and the longest prompt fits into one.
    longest = max(map(len, prompts)) // page + 2
    settings["max_total_tokens"] = max(16 // engine_runs.dp_size, longest) * page
    waves = [ask(*prompts[i : i + 4]) for i in range(0, len(prompts), 4)]
    expected = engine_runs.run(
        *waves, SHUTDOWN, hicache=False, disable_radix_cache=True, **settings
    )
    answers = engine_runs.run(*waves, *waves[::-1], FLUSH, *waves, SHUTDOWN, **settings)
    flushed = answers.pop(2 * len(prompts))
    assert flushed == {"flushed": True}
    backwards = [a for i in reversed(range(4)) for a in expected[4 * i : 4 * i + 4]]
    for answer, computed in zip(answers, expected + backwards + expected, strict=True):
        same(answer, computed, 10 * engine_runs.tolerance)
    tiers = [answer.tiers for answer in answers]
    served = {tier: sum(t[tier] for t in tiers) for tier in ("device", "host", "storage")}
    assert all(served.values()), served


def test_write_back_stores_at_an_orderly_end(engine_runs: EngineRuns) -> None:
    settings = {"hicache_write_policy": "write_through_and_back"}
    length = 6 * engine_runs.page_size + 1
    mine = ask(prompt(3, length))
    (cold,) = engine_runs.run(mine, SHUTDOWN, **settings)
    (storage,) = engine_runs.run(mine, SHUTDOWN, **settings)
    assert storage.tiers["storage"] == 6 * engine_runs.page_size
    same(storage, cold, engine_runs.tolerance)


def test_without_hicache_the_engine_has_its_own_cache(engine_runs: EngineRuns) -> None:
    length = 4 * engine_runs.page_size + 1
    mine = ask(prompt(4, length))
    cold, warm = engine_runs.run(mine, mine, SHUTDOWN, hicache=False)
    (ours,) = engine_runs.run(mine, SHUTDOWN, hicache=False, enable_unified_radix_tree=True)
    assert warm.tiers is None
    assert warm.cached_tokens == length - 1
    assert ours.tiers is not None, "the engine's unified tree is ours"
    same(warm, cold, engine_runs.tolerance)
    same(ours, cold, engine_runs.tolerance)


def test_two_processes_agree(engine_runs: EngineRuns) -> None:
    """Each process has its shard of every page in a folder of its own; one of them loses files."""
    if engine_runs.on_accelerator:
        pytest.skip("the processes of a pod lie on several machines")
    settings: dict[str, Any] = {
        "processes": 2,
        "tp_size": 2,
        "disable_overlap_schedule": False,
        "mem_fraction_static": 0.2,
    }
    page = engine_runs.page_size
    length = 12 * page + 1
    mine = ask(prompt(5, length))
    cold, _ = engine_runs.run(mine, STATE, KILL, **settings)
    files = [sorted(engine_runs.storage_of(rank).rglob("*.npy")) for rank in (0, 1)]
    assert [len(of_rank) for of_rank in files] == [12, 12]
    assert {file.name for file in files[0]}.isdisjoint(file.name for file in files[1])
    for file in files[1][6:]:  # any six: which pages they are of, their names do not tell
        file.unlink()
    (storage, _) = engine_runs.run(mine, STATE, SHUTDOWN, **settings)
    assert storage.tiers is not None
    assert storage.tiers["storage"] < 12 * page
    assert storage.tiers["storage"] % page == 0
    assert storage.tiers["storage"] + storage.tiers["computed"] == length
    same(storage, cold, engine_runs.tolerance)
    (again, _) = engine_runs.run(mine, STATE, SHUTDOWN, **settings)
    assert again.tiers is not None
    assert again.tiers["storage"] == 12 * page, "what was computed again is stored again"
    same(again, cold, engine_runs.tolerance)
