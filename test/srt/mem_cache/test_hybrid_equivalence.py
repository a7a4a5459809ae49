"""Models with sliding windows and recurrent states answer the same, to the last log probability, from every tier.

`equivalence_world` says how; here is what is asked, with the numbers of reused tokens that a person would expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from equivalence_engine import Case, random_prompt
from equivalence_world import (
    TIERS,
    Fork,
    Turns,
    World,
    ask_at_once,
    converse,
    fork,
    prompts_at_borders,
    reuse_prompts,
)
from hybrid_models import (
    FULL_RECURRENT,
    FULL_SWA,
    FULL_SWA_RECURRENT,
    KINDS,
    SWA_ONLY,
    HybridModel,
    with_window,
)

from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, HostScheme, WritePolicy

THROUGH, BACK = WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_AND_BACK

# One prompt after the other fills the host: windows and states must not be short of room there.
PLAIN = Case(interval=32, host_ratio=16.0)
CASES = {
    SWA_ONLY: replace(PLAIN, interval=64, chunk=48),
    FULL_SWA: replace(
        PLAIN, interval=64, chunk=16, overlap=False, policy=BACK, scheme=HostScheme.SLAB
    ),
    FULL_RECURRENT: replace(PLAIN, overlap=False, async_impl=AsyncImpl.FUTURE),
    FULL_SWA_RECURRENT: replace(PLAIN, chunk=48, policy=BACK),
}


MATRIX = [
    replace(PLAIN, policy=policy, overlap=overlap, chunk=chunk)
    for policy, overlap in ((THROUGH, True), (BACK, False))
    for chunk in (16, 48)
]
"""Each policy, with chunks of one page and of three; an engine takes whole pages only."""

LONG_ANSWERS = Turns(21, 75, 9)


def turned(case: Case) -> Case:
    """The other policy and the other schedule."""
    policy = BACK if case.policy is THROUGH else THROUGH
    return replace(case, policy=policy, overlap=not case.overlap)


class Worlds(dict[HybridModel, World]):
    """One world for each model, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, model: HybridModel) -> World:
        self[model] = World(model, self._folder)
        return self[model]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory.mktemp("models"))
    yield made
    for world in made.values():
        world.close()


# A window of 40 is no multiple of the page and longer than it, one of 16 is a page, one of 8 is shorter.
MODELS = (*KINDS, with_window(FULL_SWA, 16), with_window(SWA_ONLY, 8))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_prompts_at_page_borders(
    model: HybridModel, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Hits that end inside, at and beyond a window."""
    case = CASES.get(model, PLAIN)
    reuse_prompts(worlds[model], case, prompts_at_borders(rng, 16, range(1, 6)), tmp_path)


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_twenty_of_twenty(
    model: HybridModel, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    prompts = [random_prompt(rng, 80)]
    reuse_prompts(worlds[model], turned(CASES[model]), prompts, tmp_path, num_repeats=20)


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_the_next_turn_resumes_in_the_last_answer(
    model: HybridModel, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    """At its last whole page if windows are all that matters, else at the last checkpoint, in short answers and in
    answers longer than a window."""
    case = replace(turned(CASES[model]), interval=48)
    short = converse(worlds[model], case, Turns(45, 21, 13), rng, tmp_path)
    long = converse(worlds[model], case, LONG_ANSWERS, rng, tmp_path)
    assert short == len(TIERS) * [[48, 96] if model.has_states else [64, 96]]
    assert long == len(TIERS) * [[48, 144] if model.has_states else [80, 176]]


@pytest.mark.matrix
@pytest.mark.parametrize("case", [*MATRIX, replace(MATRIX[0], page_size=1)], ids=str)
@pytest.mark.parametrize("model", KINDS, ids=str)
def test_twenty_next_turns_of_twenty(
    model: HybridModel, case: Case, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    # All conversations of a tier are there at once.
    case = replace(case, interval=48, host_ratio=64.0)
    converse(worlds[model], case, LONG_ANSWERS, rng, tmp_path, num_conversations=20)


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_a_prompt_that_leaves_a_cached_one_resumes_where_it_leaves(
    model: HybridModel, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    """At the last page border, or the last checkpoint, that both share; also inside an answer."""
    case = replace(CASES[model], interval=32)
    forks = (Fork(200, 6, 160), Fork(200, 6, 150), Fork(40, 100, 100))
    on_device, *below = fork(worlds[model], case, forks, rng, tmp_path)
    second = 128 if model.has_states else 144
    assert on_device == [160, second]
    assert below == 3 * [[160, second, 96]]


def prompts_at_once(rng: np.random.Generator) -> list[list[int]]:
    """Two stems that go on in ways of different lengths; together too long for the device."""
    stems = [random_prompt(rng, 70) for _ in range(2)]
    return [[*stems[k % 2], *random_prompt(rng, 7 * k + 1)] for k in range(8)]


@pytest.mark.parametrize("model", [FULL_SWA, FULL_SWA_RECURRENT], ids=str)
def test_prompts_at_once_through_small_pools(
    model: HybridModel, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Chunks as long as the others leave room for, shared beginnings, evictions and loads under way."""
    case = replace(CASES[model], interval=32)
    prompts = prompts_at_once(rng)
    served = ask_at_once(worlds[model], case, prompts, rng, tmp_path, rounds=(3, 1))
    assert all(served[tier] > 0 for tier in ("device", "host", "storage", "computed"))


@pytest.mark.matrix
@pytest.mark.parametrize("case", MATRIX, ids=str)
@pytest.mark.parametrize("model", KINDS, ids=str)
def test_prompts_at_once_in_twenty_rounds_of_twenty(
    model: HybridModel, case: Case, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    prompts, case = prompts_at_once(rng), replace(case, interval=32)
    served = ask_at_once(worlds[model], case, prompts, rng, tmp_path, rounds=(5, 5, 5, 5))
    assert all(served[tier] > 0 for tier in ("device", "host", "storage", "computed"))


@pytest.mark.matrix
@pytest.mark.parametrize("case", MATRIX[1::2], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_prompts_at_page_borders_twenty_times(
    model: HybridModel, case: Case, worlds: Worlds, tmp_path: Path, rng: np.random.Generator
) -> None:
    prompts = prompts_at_borders(rng, case.page_size, range(2, 5))
    reuse_prompts(worlds[model], replace(case, interval=32), prompts, tmp_path, num_repeats=20)
