"""One model with and without a cache, and what is asked of both: every answer is compared with computing it.

Every engine with a cache has its free device slots full of NaN whenever some are taken (`SlotPoison`), and how many
tokens each tier served is compared with what `KeptBorders` works out. A scenario returns how many answers it compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from equivalence_engine import (
    Answer,
    Case,
    ask,
    ask_together,
    assert_equal_answers,
    make_engine,
    random_prompt,
    settle,
    tiers,
)
from hybrid_models import HybridModel
from kept_borders import KeptBorders
from slot_poison import SlotPoison

from sgl_jax_hicache.engine.engine import Engine

NUM_NEW_TOKENS = 6
ANSWER_AT_ONCE = 21  # over a page border at least


class World:
    """One model: its answers without any cache, and engines with one that start again on the same files."""

    def __init__(self, model: HybridModel, folder: Path) -> None:
        self.model = model
        self._spec = model.spec(folder)
        self._without_cache: dict[Case, Engine] = {}

    def close(self) -> None:
        """End the engines without a cache."""
        for engine in self._without_cache.values():
            engine.shutdown()
        self._without_cache.clear()

    def computed(
        self, case: Case, prompt: list[int], num_new_tokens: int = NUM_NEW_TOKENS
    ) -> Answer:
        """What computing everything gives. Of the case only the page size matters, and what fits the pool."""
        plain = Case(page_size=case.page_size, pool_tokens=case.pool_tokens)
        if plain not in self._without_cache:
            self._without_cache[plain] = make_engine(self._spec, plain, None)
        answer = ask(self._without_cache[plain], prompt, num_new_tokens)
        assert tiers(answer) == {"computed": len(prompt)}
        return answer

    def start(self, case: Case, storage_path: Path) -> Cached:
        """An engine with all three levels."""
        return Cached(self, case, storage_path, make_engine(self._spec, case, storage_path))


class Cached:
    """An engine with all three levels, whose answers are compared with computing. `interval`: what it works with."""

    def __init__(self, world: World, case: Case, storage_path: Path, engine: Engine) -> None:
        self.world = world
        self.case = case
        self.engine = engine
        self.poison = SlotPoison(engine)
        self.interval: int = engine._parts.tree.checkpoint_interval
        self._storage_path = storage_path

    def __enter__(self) -> Cached:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def kept(self) -> KeptBorders:
        """Of a sequence that is about to be asked for."""
        return KeptBorders(self.world.model, self.case.page_size, self.interval)

    def expect(self, reference: Answer, prompt: list[int], tier: str, num_tokens: int) -> None:
        """Ask for the reference's answer, of which so many prompt tokens come from that tier and no other."""
        answer = ask(self.engine, prompt, len(reference["output_ids"]))
        served = {tier: num_tokens} if num_tokens else {}
        assert tiers(answer) == {**served, "computed": len(prompt) - num_tokens}
        assert_equal_answers(answer, reference)

    def compute(self, prompt: list[int], num_new_tokens: int = NUM_NEW_TOKENS) -> KeptBorders:
        """Compute a prompt that shares nothing with others; what is kept of it and its answer."""
        self.expect(self.world.computed(self.case, prompt, num_new_tokens), prompt, "device", 0)
        kept = self.kept()
        kept.add_answer(len(prompt), num_new_tokens)
        return kept

    def on_device(self) -> Cached:
        """Leave everything where it is."""
        return self

    def forget_device(self) -> Cached:
        """Compute something that takes every slot, once all copies have reached the host."""
        settle(self.engine)
        ask(self.engine, [255] * self.case.pool_tokens, 1)
        settle(self.engine)
        return self

    def forget_host(self) -> Cached:
        """Leave everything to the files."""
        assert self.engine.flush_cache()
        return self

    def restart(self) -> Cached:
        """An engine in this one's place, which ends."""
        self.stop()
        return self.world.start(self.case, self._storage_path)

    def stop(self) -> None:
        """End the engine; everything is in the files then."""
        assert self.engine.shutdown()


TIERS = (
    ("device", Cached.on_device),
    ("host", Cached.forget_device),
    ("storage", Cached.forget_host),
    ("storage", Cached.restart),
)
"""A tier, and what makes everything come from there."""


def prompts_at_borders(rng: np.random.Generator, page_size: int, pages: range) -> list[list[int]]:
    """k pages less one token, k pages, k pages and a token."""
    lengths = [k * page_size + d for k in pages for d in (-1, 0, 1)]
    return [random_prompt(rng, n) for n in lengths if n > 0]


def reuse_prompts(
    world: World, case: Case, prompts: list[list[int]], folder: Path, num_repeats: int = 1
) -> int:
    """Every prompt computed, then so many times from device, host and files, and from files after a restart."""
    reference = [world.computed(case, prompt) for prompt in prompts]
    below: list[int] = []
    with world.start(case, folder) as cached:
        for prompt, computed in zip(prompts, reference, strict=True):
            kept = cached.compute(prompt)
            below.append(kept.below(len(prompt) - 1))
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
        cached = cached.restart()
        for prompt, computed, hit in zip(prompts, reference, below, strict=True):
            cached.expect(computed, prompt, "storage", hit)
        cached.stop()
    return len(prompts) * (3 + 3 * num_repeats)


@dataclass(frozen=True)
class Turns:
    """A conversation: tokens of the first prompt, of each answer and of each later question."""

    first: int
    answer: int
    question: int
    num_turns: int = 3


def converse(
    world: World,
    case: Case,
    turns: Turns,
    rng: np.random.Generator,
    folder: Path,
    num_conversations: int = 1,
) -> list[list[int]]:
    """So many conversations for each of `TIERS`, whose later turns resume in the answer before; the hits of one.

    Those of the device come one after the other, for which it has room; the others go through their turns together.
    """
    cached = world.start(case, folder)
    all_hits: list[list[int]] = []
    # No two may share their first page, which may be a single token.
    openings = iter(rng.permutation(np.arange(3, 250)).tolist())
    for tier, forget in TIERS:
        together = 1 if tier == "device" else num_conversations
        for _ in range(num_conversations // together):
            prompts = [
                [next(openings), *random_prompt(rng, turns.first - 1)] for _ in range(together)
            ]
            kept, hit, hits = cached.kept(), 0, []
            for turn in range(turns.num_turns):
                num_tokens = len(prompts[0])
                for i, prompt in enumerate(prompts):
                    answer = world.computed(case, prompt, turns.answer)
                    cached.expect(answer, prompt, tier, hit)
                    question = random_prompt(rng, turns.question)
                    prompts[i] = [*prompt, *answer["output_ids"], *question]
                kept.add_answer(num_tokens, turns.answer)
                if turn + 1 < turns.num_turns:
                    cached = forget(cached)
                    reach = len(prompts[0]) - 1
                    hit = kept.on_device(reach) if tier == "device" else kept.below(reach)
                    hits.append(hit)
        all_hits.append(hits)
    cached.stop()
    return all_hits


@dataclass(frozen=True)
class Fork:
    """A cached prompt with its answer, which another prompt follows for `shared` tokens only."""

    prompt: int
    answer: int
    shared: int


def fork(
    world: World, case: Case, forks: Sequence[Fork], rng: np.random.Generator, folder: Path
) -> list[list[int]]:
    """Every fork from each of `TIERS`; the hits of each. Forks inside an answer are left out on the device, which need
    not keep what lies before an answer's window."""
    cached = world.start(case, folder)
    all_hits: list[list[int]] = []
    for tier, forget in TIERS:
        hits = []
        for one in forks:
            if tier == "device" and one.shared > one.prompt:
                continue
            cached_prompt = random_prompt(rng, one.prompt)
            kept = cached.compute(cached_prompt, one.answer)
            sequence = [
                *cached_prompt,
                *world.computed(case, cached_prompt, one.answer)["output_ids"],
            ]
            stem = sequence[: one.shared]
            other = [stem_end := 250 + sequence[one.shared] % 2, *random_prompt(rng, 39)]
            assert stem_end != sequence[one.shared]
            cached = forget(cached)
            hit = (kept.on_device if tier == "device" else kept.below)(one.shared)
            prompt = [*stem, *other]
            cached.expect(world.computed(case, prompt), prompt, tier, hit)
            hits.append(hit)
        all_hits.append(hits)
    cached.stop()
    return all_hits


def ask_at_once(
    world: World,
    case: Case,
    prompts: list[list[int]],
    rng: np.random.Generator,
    folder: Path,
    rounds: Sequence[int],
) -> dict[str, int]:
    """All prompts together, in as many rounds as each start of the engine is given, then all their next turns.

    Returns the prompt tokens that each tier served.
    """
    reference = [world.computed(case, prompt, ANSWER_AT_ONCE) for prompt in prompts]
    served: dict[str, int] = {}

    def ask_all(cached: Cached, prompts: list[list[int]], reference: list[Answer]) -> None:
        answers = ask_together(cached.engine, prompts, ANSWER_AT_ONCE)
        for answer, computed in zip(answers, reference, strict=True):
            assert_equal_answers(answer, computed)
            for tier, num_tokens in tiers(answer).items():
                served[tier] = served.get(tier, 0) + num_tokens
        settle(cached.engine)

    for num_rounds in rounds:
        with world.start(case, folder) as cached:
            for _ in range(num_rounds):
                ask_all(cached, prompts, reference)
    turns = [
        [*prompt, *answer["output_ids"], *random_prompt(rng, 5)]
        for prompt, answer in zip(prompts, reference, strict=True)
    ]
    with world.start(case, folder) as cached:
        ask_all(cached, turns, [world.computed(case, turn, ANSWER_AT_ONCE) for turn in turns])
    return served
