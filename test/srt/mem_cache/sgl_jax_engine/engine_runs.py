"""Starts `engine_driver` and reads what it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[3] / "src"
TIMEOUT_S = 900.0

Step = tuple[str, dict[str, Any]]


def ask(*prompts: list[int], max_new_tokens: int = 6) -> Step:
    """Ask these prompts at once."""
    return "ask", {"prompts": list(prompts), "max_new_tokens": max_new_tokens}


FLUSH: Step = ("flush", {})
STATE: Step = ("state", {})
KILL: Step = ("kill", {})
SHUTDOWN: Step = ("shutdown", {})


@dataclass(frozen=True)
class Answer:
    """One greedy answer; `tiers` as in cached_tokens_details, None without HiCache."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    tiers: dict[str, int] | None


class EngineRuns:
    """Runs of one engine configuration, one after the other, over one storage folder."""

    def __init__(
        self, settings: dict[str, Any], folder: Path, preload: str | None, tolerance: float
    ) -> None:
        self.page_size: int = settings["page_size"]
        self.pool_tokens: int | None = settings.get("max_total_tokens")
        self.preload = preload
        self.tolerance = tolerance
        self._settings = {"skip_tokenizer_init": True, "log_level": "info", **settings}
        self._folder = folder
        self._num_runs = 0

    @property
    def storage(self) -> Path:
        """Where L3 is."""
        return self._folder / "pages"

    def run(
        self, *steps: Step, devices: int = 1, hicache: bool = True, **settings: Any
    ) -> list[Any]:
        """Start the engine, play the steps, and return an `Answer` for each prompt and a dictionary for other steps.

        `devices`: how many a CPU stands for. `hicache` False leaves the engine its own cache.
        """
        self._num_runs += 1
        spec, answers, log = (
            self._folder / f"{name}{self._num_runs}" for name in ("spec", "answers", "log")
        )
        ours = (
            {"hicache_storage": "file", "hicache_storage_path": str(self.storage)}
            if hicache
            else {}
        )
        spec.write_text(
            json.dumps({"settings": {**self._settings, **ours, **settings}, "steps": steps})
        )
        answers.touch()
        with log.open("wb") as output:
            done = subprocess.run(
                [
                    *(sys.executable, str(HERE / "engine_driver.py"), str(spec), str(answers)),
                    *([self.preload] if self.preload else []),
                ],
                env=self._environment(devices),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
            )
        expected = -9 if KILL in steps else 0
        assert done.returncode == expected, log.read_text(errors="replace")[-8000:]
        return [self._answer(json.loads(line)) for line in answers.read_text().splitlines()]

    def _environment(self, devices: int) -> dict[str, str]:
        # The tests' own settings are for their own process, which stays on CPU and leaves a TPU to the engine.
        env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        env["PYTHONPATH"] = str(SRC)
        if self._settings.get("device") == "cpu":
            env["JAX_PLATFORMS"] = env["USE_DEVICE_TYPE"] = "cpu"
            env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        return env

    @staticmethod
    def _answer(line: dict[str, Any]) -> Any:
        if "output_ids" not in line:
            return line
        return Answer(
            tuple(line["output_ids"]), tuple(line["logprobs"]), line["cached_tokens"], line["tiers"]
        )
