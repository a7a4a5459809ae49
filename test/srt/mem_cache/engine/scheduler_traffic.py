"""Random requests for a scheduler world: every answer is checked, and how much of a prompt came from where is not.

How much is reused in the middle of it depends on what happens to be computed, copied and evicted by then. What must be
reused is asked afterwards, when the world is idle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from engine_fakes import VOCAB_SIZE, expected_output
from scheduler_world import SchedulerWorld

STEM_TOKENS = 48


def random_tokens(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Tokens of the fake model."""
    return rng.integers(0, VOCAB_SIZE, num_tokens).tolist()


def random_stems(rng: np.random.Generator, num_stems: int) -> list[list[int]]:
    """Beginnings that prompts share, each of STEM_TOKENS tokens."""
    return [random_tokens(rng, STEM_TOKENS) for _ in range(num_stems)]


def run_random_traffic(
    world: SchedulerWorld,
    rng: np.random.Generator,
    stems: list[list[int]],
    *,
    num_requests: int,
    after_request: Callable[[int], None] = lambda number: None,
) -> None:
    """Requests that begin like a stem, to any length, arrive between steps; some are aborted. Runs until all have ended
    and nothing is held; `after_request` is called with each one's number a few steps after it arrived."""
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for number in range(num_requests):
        stem = stems[int(rng.integers(0, len(stems)))]
        prompt = stem[: int(rng.integers(0, STEM_TOKENS + 1))]
        prompt = prompt + random_tokens(rng, int(rng.integers(1, 20)))
        prompts[str(number)] = (prompt, int(rng.integers(1, 25)))
        world.submit(str(number), *prompts[str(number)])
        victim = str(rng.integers(0, number + 1))
        if rng.random() < 0.15 and world.scheduler.abort(victim):
            aborted.add(victim)
        for _ in range(int(rng.integers(0, 8))):
            world.step()
            world.allocator.check_invariants()
        after_request(number)
    world.run(20_000)
    for rid, (prompt, num_new) in prompts.items():
        tokens = world.clients[rid].tokens
        expected = expected_output(prompt, num_new)
        assert tokens == (expected[: len(tokens)] if rid in aborted else expected)
        tiers = world.clients[rid].last.stats.tiers
        assert tiers.cached + tiers.computed in (
            (0, len(prompt)) if rid in aborted else (len(prompt),)
        )
