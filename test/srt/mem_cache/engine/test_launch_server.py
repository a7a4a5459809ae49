"""The server as a process: it answers, survives SIGKILL with what it stored, and ends in order at SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

SRC = Path(__file__).resolve().parents[4] / "src"
BODY = {"input_ids": [i % 250 for i in range(200)], "sampling_params": {"max_new_tokens": 4}}
WAIT_S = 120.0


class ServerProcess:
    """One launch, on a free port."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sgl_jax_hicache.launch_server"),
                *("--model-path", "random:tiny-mha:0", "--port", "0"),
                *("--max-total-tokens", "512", "--page-size", "64"),  # few pages: little to compile
                *("--max-running-requests", "2", "--log-level", "warning"),
                *("--hicache-storage", "file", "--hicache-storage-path", str(folder / "pages")),
            ],
            stdout=subprocess.PIPE,
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
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        self.client = httpx.Client(
            base_url=line.removeprefix("listening on ").strip(), timeout=WAIT_S, trust_env=False
        )

    def ask(self) -> dict[str, Any]:
        """The answer to one fixed prompt."""
        answer: dict[str, Any] = self.client.post("/generate", json=BODY).json()
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


def test_what_was_stored_survives_sigkill_and_sigterm_ends_in_order(tmp_path: Path) -> None:
    first = ServerProcess(tmp_path)
    try:
        computed = first.ask()
        assert computed["meta_info"]["cached_tokens_details"]["computed"] == 200
        assert first.client.post("/flush_cache").json() == {"flushed": True}
    finally:
        first.end(kill=True)
    second = ServerProcess(tmp_path)
    try:
        restored = second.ask()
    finally:
        status = second.end(kill=False)
    assert restored["meta_info"]["cached_tokens_details"]["storage"] == 192
    assert restored["output_ids"] == computed["output_ids"]
    assert status == 0
