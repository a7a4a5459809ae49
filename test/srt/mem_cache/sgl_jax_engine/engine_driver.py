"""Runs the engine in a process of its own: engine_driver.py SPEC ANSWERS [PRELOAD].

SPEC is a JSON file: settings of `Engine` and a list of steps. Every answer is appended to ANSWERS as a line of JSON.
Spawned processes import this module again, with the same arguments, so PRELOAD is run in them too.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sgl_jax_hicache import overlay

overlay.activate()

if len(sys.argv) > 3:
    runpy.run_path(sys.argv[3])


class Driver:
    """Plays steps against one engine."""

    def __init__(self, settings: dict[str, Any], answers: Path) -> None:
        from sgl_jax_hicache.sgl_jax_engine import Engine

        self._engine = Engine(**settings)
        self._answers = answers

    def ask(self, prompts: list[list[int]], max_new_tokens: int, ignore_eos: bool = True) -> None:
        """Greedy answers, with log probabilities."""
        answers = self._engine.generate(
            input_ids=prompts,
            sampling_params=_greedy(max_new_tokens, ignore_eos),
            return_logprob=True,
        )
        for answer in answers if isinstance(answers, list) else [answers]:
            meta_info = answer["meta_info"]
            # Every 50 tokens the engine appends the list once more, from its beginning on: the whole of it comes last.
            logprobs = meta_info["output_token_logprobs"][-len(answer["output_ids"]) :]
            self._tell(
                output_ids=answer["output_ids"],
                logprobs=[entry[0] for entry in logprobs],
                cached_tokens=meta_info["cached_tokens"],
                tiers=meta_info.get("cached_tokens_details"),
            )

    def abort(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Ask, and abort whatever runs or waits once the first token is there."""
        reasons: dict[str, Any] = {}
        for chunk in self._engine.generate(
            input_ids=prompts, sampling_params=_greedy(max_new_tokens, True), stream=True
        ):
            if not reasons:
                self._engine.tokenizer_manager.abort_request(abort_all=True)
            reasons[chunk["meta_info"]["id"]] = chunk["meta_info"]["finish_reason"]
        types = [reason["type"] for reason in reasons.values()]
        assert "abort" in types, f"nothing was left to abort: {types}"
        self._tell(aborted=types.count("abort"))

    def timed(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Wait for a line on stdin; then ask, and tell how long it took."""
        sys.stdin.readline()
        start_s = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=_greedy(max_new_tokens, True))
        self._tell(seconds=time.perf_counter() - start_s)

    def flush(self) -> None:
        """Device and host forget everything. With overlap the scheduler is busy for a round after the last answer, and
        refuses meanwhile."""
        flushed = any(self._engine.flush_cache().success for _ in range(1000))
        self._tell(flushed=flushed)

    def state(self) -> None:
        """What the scheduler says of itself."""
        state = self._engine.get_server_info()["internal_states"][0]
        self._tell(**{name: state[name] for name in ("hicache_prompt_tokens", "tree_cache_size")})

    def kill(self) -> None:
        """SIGKILL to this process; its children follow."""
        os.kill(os.getpid(), signal.SIGKILL)

    def shutdown(self) -> None:
        """An orderly end."""
        self._engine.shutdown()

    def _tell(self, **answer: Any) -> None:
        with self._answers.open("a") as file:
            file.write(json.dumps(answer) + "\n")


def _greedy(max_new_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}


def main() -> None:
    """Play the steps; each is [name, arguments]."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    driver = Driver(spec["settings"], Path(sys.argv[2]))
    for name, arguments in spec["steps"]:
        getattr(driver, name)(**arguments)


if __name__ == "__main__":
    main()
