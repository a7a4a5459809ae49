"""The server as a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import httpx

SRC = Path(__file__).resolve().parents[4] / "src"
MODEL = "random:tiny-mha:0"
PAGE_SIZE = 64
MAX_TOTAL_TOKENS = 512
WAIT_S = 120.0


class ServerProcess:
    """One launch, on a free port."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log_path = folder / "log"
        with self.log_path.open("ab") as log:
            self._process = self._launch(folder, flags, log)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), self.log_path.read_text()
        self.client = httpx.Client(
            base_url=line.removeprefix("listening on ").strip(), timeout=WAIT_S, trust_env=False
        )

    @staticmethod
    def _launch(folder: Path, flags: tuple[str, ...], log: IO[bytes]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "sgl_jax_hicache.launch_server"),
                *("--model-path", MODEL, "--port", "0"),
                *("--max-total-tokens", str(MAX_TOTAL_TOKENS)),
                *("--page-size", str(PAGE_SIZE)),  # few pages: little to compile
                *("--max-running-requests", "2"),
                *("--hicache-storage", "file", "--hicache-storage-path", str(folder / "pages")),
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": str(SRC),
                # The second start finds the programs of the first.
                "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
        )

    def ask(self, input_ids: list[int]) -> dict[str, Any]:
        """The answer to a prompt."""
        body = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": 4}}
        answer: dict[str, Any] = self.client.post("/generate", json=body).json()
        return answer

    def end(self, *, kill: bool) -> int:
        """End it and return its status."""
        self.client.close()
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        status = self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status
