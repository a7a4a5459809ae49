"""Models with sliding windows and recurrent states answer the same, to the last log probability, from every tier.

Every engine with a cache has its free device slots full of NaN whenever some are taken (`SlotPoison`), and how many
tokens each tier served is compared with what `KeptBorders` works out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from equivalence_engine import (
    POOL_TOKENS,
    Answer,
    Case,
    ask,
    assert_equal_answers,
    make_engine,
    random_prompt,
    settle,
    tiers,
)
from hybrid_models import (
    FULL_RECURRENT,
    FULL_SWA,
    FULL_SWA_RECURRENT,
    KINDS,
    SWA_ONLY,
    HybridModel,
)
from kept_borders import KeptBorders
from slot_poison import SlotPoison

from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, HostScheme, WritePolicy
from sgl_jax_hicache.engine.engine import Engine

NUM_NEW_TOKENS = 6
NUM_REPEATS = 20
BACK = WritePolicy.WRITE_THROUGH_AND_BACK

# One prompt after the other fills the host; windows and states must not be short of room there.
PLAIN = Case(interval=32, host_ratio=16.0)
CASES = {
    SWA_ONLY: replace(PLAIN, interval=64, chunk=48),
    FULL_SWA: replace(PLAIN, interval=64, overlap=False, policy=BACK, scheme=HostScheme.SLAB),
    FULL_RECURRENT: replace(PLAIN, overlap=False, async_impl=AsyncImpl.FUTURE),
    FULL_SWA_RECURRENT: replace(PLAIN, chunk=48, policy=BACK),
}


class World:
    """One model: its answers without any cache, and engines with one that start again on the same files."""

    def __init__(self, model: HybridModel, folder: Path) -> None:
        self.model = model
        self._spec = model.spec(folder)
        self._reference: dict[int, Engine] = {}

    def close(self) -> None:
        for engine in self._reference.values():
            engine.shutdown()

    def computed(
        self, prompt: list[int], num_new_tokens: int = NUM_NEW_TOKENS, page_size: int = 16
    ) -> Answer:
        """What computing everything gives."""
        if page_size not in self._reference:
            case = Case(page_size=page_size)
            self._reference[page_size] = make_engine(self._spec, case, None)
        answer = ask(self._reference[page_size], prompt, num_new_tokens)
        assert tiers(answer) == {"computed": len(prompt)}
        return answer

    def start(self, case: Case, storage_path: Path) -> Cached:
        return Cached(self, case, storage_path, make_engine(self._spec, case, storage_path))


class Cached:
    """An engine with all three levels, whose answers are compared with computing."""

    def __init__(self, world: World, case: Case, storage_path: Path, engine: Engine) -> None:
        self.world = world
        self.case = case
        self.storage_path = storage_path
        self.engine = engine
        self.poison = SlotPoison(engine)

    def __enter__(self) -> Cached:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def kept(self) -> KeptBorders:
        assert self.case.interval is not None
        return KeptBorders(self.world.model, self.case.page_size, self.case.interval)

    def expect(self, reference: Answer, prompt: list[int], tier: str, num_tokens: int) -> Answer:
        """Ask for the reference's answer, of which so many prompt tokens come from that tier and no other."""
        answer = ask(self.engine, prompt, len(reference["output_ids"]))
        served = {tier: num_tokens} if num_tokens else {}
        assert tiers(answer) == {**served, "computed": len(prompt) - num_tokens}
        assert_equal_answers(answer, reference)
        return answer

    def forget_device(self) -> Cached:
        """Compute something that takes every slot, once all copies have reached the host."""
        settle(self.engine)
        ask(self.engine, [255] * POOL_TOKENS, 1)
        settle(self.engine)
        return self

    def forget_host(self) -> Cached:
        """Leave everything to the files."""
        assert self.engine.flush_cache()
        return self

    def restart(self) -> Cached:
        """An engine in this one's place, which ends."""
        self.stop()
        return self.world.start(self.case, self.storage_path)

    def stop(self) -> None:
        assert self.engine.shutdown()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[HybridModel, World]]:
    """The worlds that tests of this module have entered, by model; see `world_of`."""
    folder = tmp_path_factory.mktemp("models")
    made = _Worlds(folder)
    yield made
    for world in made.values():
        world.close()


class _Worlds(dict[HybridModel, World]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, model: HybridModel) -> World:
        self[model] = World(model, self._folder)
        return self[model]


def prompts_at_borders(rng: np.random.Generator, page_size: int, pages: range) -> list[list[int]]:
    lengths = [k * page_size + d for k in pages for d in (-1, 0, 1)]
    return [random_prompt(rng, n) for n in lengths if n > 0]


def reuse_from_every_tier(
    world: World, case: Case, prompts: list[list[int]], folder: Path, num_repeats: int = 1
) -> int:
    """Every prompt computed, then from device, host, files and files after a restart; returns the answers compared."""
    reference = [world.computed(prompt, page_size=case.page_size) for prompt in prompts]
    below: list[int] = []
    with world.start(case, folder) as cached:
        for prompt, computed in zip(prompts, reference, strict=True):
            kept = cached.kept()
            kept.add_end(len(prompt))
            kept.add_end(len(prompt) + NUM_NEW_TOKENS - 1)
            below.append(kept.below(len(prompt) - 1))
            cached.expect(computed, prompt, "device", 0)
            cached.expect(computed, prompt, "device", kept.on_device(len(prompt) - 1))
        for _ in range(num_repeats):
            for prompt, computed, hit in zip(prompts, reference, below, strict=True):
                cached.forget_device()
                cached.expect(computed, prompt, "host", hit)
                cached.expect(computed, prompt, "device", hit)
            cached.forget_host()
            for prompt, computed, hit in zip(prompts, reference, below, strict=True):
                cached.expect(computed, prompt, "storage", hit)
        kinds = {"full", *(["swa"] * world.model.slides), *(["state"] * world.model.has_states)}
        assert {kind for kind, n in cached.poison.num_poisoned.items() if n} == kinds
    with world.start(case, folder) as cached:
        for prompt, computed, hit in zip(prompts, reference, below, strict=True):
            cached.expect(computed, prompt, "storage", hit)
    return len(prompts) * (3 + 3 * num_repeats)


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_prompts_at_page_borders(
    model: HybridModel, worlds: dict[HybridModel, World], tmp_path: Path, rng: np.random.Generator
) -> None:
    """k pages less one token, k pages, k pages and a token: hits end inside, at and beyond a window of 40."""
    case = CASES[model]
    prompts = prompts_at_borders(rng, case.page_size, range(1, 6))
    reuse_from_every_tier(worlds[model], case, prompts, tmp_path)


@dataclass(frozen=True)
class Turns:
    """A conversation of three turns: tokens of the first prompt, of each answer and of each later question."""

    first: int
    answer: int
    question: int


SHORT_ANSWERS = Turns(45, 21, 13)
LONG_ANSWERS = Turns(21, 75, 9)
# What the next prompt finds of an answer: all its whole pages, or what lies before the last checkpoint.
NEXT_TURNS = {
    (SWA_ONLY, SHORT_ANSWERS): (64, 96),
    (SWA_ONLY, LONG_ANSWERS): (80, 176),
    (FULL_SWA, SHORT_ANSWERS): (64, 96),
    (FULL_SWA, LONG_ANSWERS): (80, 176),
    (FULL_RECURRENT, SHORT_ANSWERS): (48, 96),
    (FULL_RECURRENT, LONG_ANSWERS): (48, 144),
    (FULL_SWA_RECURRENT, SHORT_ANSWERS): (48, 96),
    (FULL_SWA_RECURRENT, LONG_ANSWERS): (48, 144),
}


@pytest.mark.parametrize(("model", "turns"), NEXT_TURNS, ids=str)
def test_the_next_turn_resumes_in_the_last_answer(
    model: HybridModel,
    turns: Turns,
    worlds: dict[HybridModel, World],
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    world, case = worlds[model], replace(CASES[model], interval=48)
    cached = world.start(case, tmp_path)
    for tier, forget in (
        ("device", lambda cached: cached),
        ("host", Cached.forget_device),
        ("storage", Cached.forget_host),
        ("storage", Cached.restart),
    ):
        prompt = random_prompt(rng, turns.first)
        answer = world.computed(prompt, turns.answer)
        cached.expect(answer, prompt, tier, 0)
        for hit in NEXT_TURNS[model, turns]:
            prompt = [*prompt, *answer["output_ids"], *random_prompt(rng, turns.question)]
            answer = world.computed(prompt, turns.answer)
            cached = forget(cached)
            cached.expect(answer, prompt, tier, hit)
    cached.stop()
