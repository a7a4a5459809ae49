"""What the cache costs a decode step: the engine with HiCache against the engine with its own radix cache.

    python test/srt/mem_cache/sgl_jax_engine/decode_step.py --pairs 15

Two engines with the same tiny model on CPU. Pair by pair both answer the same new prompts, one stopped (SIGSTOP) while
the other answers, in an order that changes. Prints the ratio of their times, and of the processor time that all of an
engine's processes took; on a busy machine the first says nothing, and the second little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from engine_runs import CPU_ENGINE, TINY_ON_CPU, EngineRuns, Step, timed
from tiny_models import MODELS

NUM_PROMPTS, PROMPT_LEN = 4, 60
NUM_WARM_UP = 3
# With states the engine's own cache needs other settings, and would not do the same.
WITHOUT_STATES = ("qwen3", "deepseek_v3", "gemma2", "mimo_v2")


@dataclass(frozen=True)
class Cost:
    """What one answer took: seconds, and seconds of processors."""

    wall_s: float
    cpu_s: float


class Side:
    """One engine, stopped unless it answers."""

    def __init__(self, process: subprocess.Popen[bytes], answers: Path) -> None:
        self._process = process
        self._answers = answers
        self._num_heard = 0

    def answer(self) -> Cost:
        """What its next prompts take."""
        before_s = self._cpu_s()
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        while len(lines := self._answers.read_text().splitlines()) == self._num_heard:
            if self._process.poll() is not None:
                raise SystemExit("an engine has ended: see its log")
            time.sleep(0.005)
        os.killpg(self._process.pid, signal.SIGSTOP)
        self._num_heard = len(lines)
        return Cost(json.loads(lines[-1])["seconds"], self._cpu_s() - before_s)

    def _cpu_s(self) -> float:
        """Of the engine's processes so far."""
        driver = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (driver, *driver.children(recursive=True))]
        return sum(each.user + each.system for each in times)


@contextmanager
def side(folder: Path, model: str, steps: list[Step], hicache: bool) -> Iterator[Side]:
    """An engine with one of the two caches."""
    settings = {
        **TINY_ON_CPU,
        "model_path": str(MODELS[model].write(folder / "model")),
        "load_format": "dummy",
        "max_total_tokens": 8192,
        "context_length": 256,
        "max_seq_len": 256,
        "disable_overlap_schedule": False,
    }
    theirs = {k: v for k, v in MODELS[model].settings.items() if hicache or "hicache" not in k}
    runs = EngineRuns(settings | theirs, folder, CPU_ENGINE, tolerance=0.0)
    with runs.started(*steps, hicache=hicache) as (process, answers):
        yield Side(process, answers)


def questions(count: int, num_new: int) -> list[Step]:
    """Prompts of which none is the beginning of another."""
    rng = random.Random(0)
    return [
        timed(
            *([rng.randrange(4, 480) for _ in range(PROMPT_LEN)] for _ in range(NUM_PROMPTS)),
            max_new_tokens=num_new,
        )
        for _ in range(count)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=128, help="of an answer")
    parser.add_argument("--model", choices=WITHOUT_STATES, default="qwen3")
    args = parser.parse_args()
    steps = questions(NUM_WARM_UP + args.pairs, args.steps)
    pairs: list[tuple[Cost, Cost]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            side(folder / "ours", args.model, steps, hicache=True) as ours,
            side(folder / "theirs", args.model, steps, hicache=False) as theirs,
        ):
            for turn in range(len(steps)):
                first, second = (ours, theirs) if turn % 2 else (theirs, ours)
                cost = {first: first.answer(), second: second.answer()}
                if turn >= NUM_WARM_UP:
                    pairs.append((cost[ours], cost[theirs]))
    print(f"{args.model}, {NUM_PROMPTS} requests of {PROMPT_LEN} + {args.steps} tokens")
    print(told("a step", args.steps, [(a.wall_s, b.wall_s) for a, b in pairs]))
    print(told("its processor time", args.steps, [(a.cpu_s, b.cpu_s) for a, b in pairs]))


def told(what: str, num_steps: int, pairs: list[tuple[float, float]]) -> str:
    """A line about seconds for so many steps: with HiCache, and with the engine's own cache."""
    ours_ms, theirs_ms = (
        statistics.median(side) * 1000 / num_steps for side in zip(*pairs, strict=True)
    )
    ratios = [ours / theirs for ours, theirs in pairs]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return (
        f"{what}: {ours_ms:.2f} ms with HiCache and files, {theirs_ms:.2f} ms with the engine's own cache; "
        f"their ratio in {len(pairs)} pairs: median {statistics.median(ratios):.3f}, "
        f"P10 {tenths[0]:.3f}, P90 {tenths[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
