"""Starts `engine_driver` and reads what it answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[3] / "src"
TIMEOUT_S = 900.0

CPU_ENGINE = str(HERE / "cpu_engine.py")
"""What makes the engine right on CPU; see there."""

TINY_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "native",
    "dtype": "float32",
    "page_size": 16,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "chunked_prefill_size": 256,
    "context_length": 1024,
    "max_seq_len": 1024,
    "precompile_bs_paddings": [4],
    "precompile_token_paddings": [256],
    "disable_precompile": True,
    "random_seed": 1,
}

Step = tuple[str, dict[str, Any]]


def ask(*prompts: list[int], max_new_tokens: int = 6) -> Step:
    """Ask these prompts at once."""
    return "ask", {"prompts": list(prompts), "max_new_tokens": max_new_tokens}


def ask_until_eos(*prompts: list[int], max_new_tokens: int) -> Step:
    """The same, but an answer ends where the model ends it: then the engine admits more than it has memory for."""
    return "ask", {"prompts": list(prompts), "max_new_tokens": max_new_tokens, "ignore_eos": False}


def abort(*prompts: list[int], max_new_tokens: int) -> Step:
    """Ask these prompts at once, and abort them all when the first token is there."""
    return "abort", {"prompts": list(prompts), "max_new_tokens": max_new_tokens}


def timed(*prompts: list[int], max_new_tokens: int) -> Step:
    """Wait for a line on stdin, ask these prompts at once, and tell how long it took."""
    return "timed", {"prompts": list(prompts), "max_new_tokens": max_new_tokens}


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


@dataclass(frozen=True)
class _Command:
    """One process: what to run, where it answers, and its log."""

    argv: tuple[str, ...]
    answers: Path
    log: Path


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class EngineRuns:
    """Runs of one engine configuration, one after the other, over one storage folder."""

    def __init__(
        self, settings: dict[str, Any], folder: Path, preload: str | None, tolerance: float
    ) -> None:
        self.page_size: int = settings["page_size"]
        self.dp_size: int = settings.get("dp_size", 1)
        self.pool_tokens: int | None = settings.get("max_total_tokens")
        self.preload = preload
        self.tolerance = tolerance
        self._settings = {"skip_tokenizer_init": True, "log_level": "info", **settings}
        self._folder = folder
        self._num_runs = 0

    def run(
        self,
        *steps: Step,
        devices: int = 1,
        processes: int = 1,
        hicache: bool = True,
        **settings: Any,
    ) -> list[Any]:
        """Start the engine, play the steps, and return an `Answer` for each prompt and a dictionary for other steps.

        `devices`: how many a CPU stands for. `processes`: JAX processes, each with a scheduler and a storage folder of
        its own (`storage_of`). `hicache` False leaves the engine its own cache.
        """
        self._num_runs += 1
        if processes > 1:
            settings |= {"nnodes": processes, "dist_init_addr": f"127.0.0.1:{free_port()}"}
        commands = []
        for rank in range(processes):
            ours = {"hicache_storage": "file", "hicache_storage_path": str(self.storage_of(rank))}
            place = {"node_rank": rank, "port": free_port()} if processes > 1 else {}
            given = {**self._settings, **(ours if hicache else {}), **settings, **place}
            commands.append(self._command(rank, given, steps if rank == 0 else ()))
        with ExitStack() as others:
            for command in commands[1:]:
                others.callback(self._end, self._start(command, devices))
            leader = self._start(commands[0], devices)
            try:
                status = leader.wait(TIMEOUT_S)
            finally:
                self._end(leader)
        expected = -9 if KILL in steps else 0
        assert status == expected, commands[0].log.read_text(errors="replace")[-8000:]
        answers = commands[0].answers.read_text().splitlines()
        return [self._answer(json.loads(line)) for line in answers]

    @property
    def on_accelerator(self) -> bool:
        """True if the engine runs on something else than CPU."""
        return bool(self._settings.get("device") != "cpu")

    @contextmanager
    def started(
        self, *steps: Step, hicache: bool, **settings: Any
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """The engine while it plays the steps: its process, which leads a group, and the file of its answers."""
        self._num_runs += 1
        ours = {"hicache_storage": "file", "hicache_storage_path": str(self.storage_of())}
        given = {**self._settings, **(ours if hicache else {}), **settings}
        command = self._command(0, given, steps)
        process = self._start(command, devices=1, stdin=subprocess.PIPE)
        try:
            yield process, command.answers
        finally:
            self._end(process)

    def log(self) -> str:
        """What the first process of the last run has logged."""
        return (self._folder / f"log{self._num_runs}.0").read_text(errors="replace")

    def storage_of(self, rank: int = 0) -> Path:
        """Where a process has its L3."""
        return self._folder / f"pages{rank}"

    def _command(self, rank: int, settings: dict[str, Any], steps: tuple[Step, ...]) -> _Command:
        spec, answers, log = (
            self._folder / f"{name}{self._num_runs}.{rank}" for name in ("spec", "answers", "log")
        )
        spec.write_text(json.dumps({"settings": settings, "steps": steps}))
        answers.touch()
        program = (sys.executable, str(HERE / "engine_driver.py"), str(spec), str(answers))
        return _Command((*program, *([self.preload] if self.preload else [])), answers, log)

    def _start(
        self, command: _Command, devices: int, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with command.log.open("wb") as output:
            return subprocess.Popen(
                command.argv,
                env=self._environment(devices),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """With everything that it started; it may have ended."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        process.wait()

    def _environment(self, devices: int) -> dict[str, str]:
        # The tests' own settings are for their own process, which stays on CPU and leaves a TPU to the engine.
        env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        env["PYTHONPATH"] = str(SRC)
        if not self.on_accelerator:
            env["JAX_PLATFORMS"] = env["USE_DEVICE_TYPE"] = "cpu"
            env["PALLAS_INTERPRET"] = (
                "1"  # the engine's linear attention has kernels for a TPU alone
            )
            env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        return env

    @staticmethod
    def _answer(line: dict[str, Any]) -> Any:
        if "output_ids" not in line:
            return line
        return Answer(
            tuple(line["output_ids"]), tuple(line["logprobs"]), line["cached_tokens"], line["tiers"]
        )
