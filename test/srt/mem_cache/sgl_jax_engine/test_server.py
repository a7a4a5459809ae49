"""The launcher with the engine behind it: answers, metrics, and an end in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_runs import SRC, TINY_ON_CPU, free_port

from sgl_jax_hicache import overlay

pytestmark = pytest.mark.skipif(
    not overlay.engine_installed(), reason="the sgl-jax engine is not installed here"
)

WAIT_S = 300.0
PROMPT = [(7 * i + 13) % 480 + 4 for i in range(200)]


class Server:
    """`python -m sgl_jax_hicache.launch_server`, which takes the engine that is installed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / f"log{self.port}"
        flags = {**TINY_ON_CPU, "model_path": model, "port": self.port}
        flags |= {"hicache_storage": "file", "hicache_storage_path": folder / "pages"}
        flags |= {"hicache_write_policy": "write_through_and_back"}
        line = [
            *("--skip-tokenizer-init", "--enable-metrics", "--disable-precompile"),
            *(
                part
                for name, value in flags.items()
                if not isinstance(value, bool)
                for part in (
                    "--" + name.replace("_", "-"),
                    *map(str, value if isinstance(value, list) else [value]),
                )
            ),
        ]
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        env |= {"PYTHONPATH": str(SRC), "JAX_PLATFORMS": "cpu", "USE_DEVICE_TYPE": "cpu"}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sgl_jax_hicache.launch_server", *line],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Until it has answered its own first request."""
        end_s = time.monotonic() + WAIT_S
        while "fired up and ready" not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None and time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.2)

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=WAIT_S) as body:
            return str(body.read().decode())

    def ask(self) -> dict[str, Any]:
        """A greedy answer to PROMPT."""
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            told: dict[str, Any] = json.loads(answer.read())
            return told

    def metric(self, name: str, labels: str = "") -> float:
        """One value of /metrics."""
        found = re.search(
            rf"^sglang:hicache_{name}{re.escape(labels)} (\S+)$", self.get("/metrics"), re.MULTILINE
        )
        assert found is not None, name
        return float(found[1])


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Server]:
    server = Server(model, folder)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_it_serves_tells_and_ends_in_order(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as server:
        cold, warm = server.ask(), server.ask()
        assert cold["meta_info"]["cached_tokens_details"]["computed"] == 200
        assert warm["meta_info"]["cached_tokens"] == 192
        assert warm["meta_info"]["cached_tokens_details"]["device"] == 192
        assert warm["output_ids"] == cold["output_ids"]
        assert server.metric("prompt_tokens_total", '{tier="device"}') == 192
        assert server.metric("prompt_tokens_total", '{tier="storage"}') == 0
        info = json.loads(server.get("/get_server_info"))
        assert info["hicache"]["write_policy"] == "write_through_and_back"
        assert info["internal_states"][0]["hicache_prompt_tokens"]["device"] == 192
        assert list((tmp_path / "pages").rglob("*.npy")) == [], "nothing has left the host yet"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0, server.log.read_text()
    assert len(list((tmp_path / "pages").rglob("*.npy"))) == 12
    with serving(tiny_model, tmp_path) as server:
        restored = server.ask()
        assert restored["meta_info"]["cached_tokens_details"]["storage"] == 192
        assert restored["output_ids"] == cold["output_ids"]
        assert server.metric("storage_reads_total", '{component="full",outcome="hit"}') == 12
        os.killpg(server.process.pid, signal.SIGTERM)  # as a supervisor does: to all of them
        assert server.process.wait(WAIT_S) == 0, server.log.read_text()
