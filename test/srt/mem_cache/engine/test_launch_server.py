"""The server as a process: it answers, survives SIGKILL with what it stored, and ends in order at SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from launched_server import MODEL, SRC, WAIT_S, ServerProcess

PROMPT = [i % 250 for i in range(200)]


def test_what_was_stored_survives_sigkill_and_sigterm_ends_in_order(tmp_path: Path) -> None:
    first = ServerProcess(tmp_path)
    try:
        computed = first.ask(PROMPT)
        assert computed["meta_info"]["cached_tokens_details"]["computed"] == 200
        assert first.client.post("/flush_cache").json() == {"flushed": True}
    finally:
        first.end(kill=True)
    second = ServerProcess(tmp_path)
    try:
        restored = second.ask(PROMPT)
        assert "_created" not in second.client.get("/metrics").text
    finally:
        status = second.end(kill=False)
    assert restored["meta_info"]["cached_tokens_details"]["storage"] == 192
    assert restored["output_ids"] == computed["output_ids"]
    assert status == 0
    _check_log(second.log_path.read_text().splitlines())


def test_ctrl_c_while_the_model_loads_ends_quietly() -> None:
    command = [sys.executable, "-m", "sgl_jax_hicache.launch_server", "--engine", "embedded"]
    process = subprocess.Popen(
        [*command, "--model-path", MODEL, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)},
    )
    assert process.stderr is not None
    with process.stderr as log:
        assert "loading the weights" in log.readline()
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in log.read()
    assert process.wait(WAIT_S) == -signal.SIGINT


def _check_log(lines: list[str]) -> None:
    """Everything is in one format, uvicorn's lines too, and says what a start is busy with."""
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ", line), line
    log = "\n".join(lines)
    for said in (
        r"loading the weights of random:tiny-mha:0: \d+\.\d s",
        r"HiCache is on: L2 host .*; L3 storage: file in .*, [1-9]\d* pages found, ",
        r"HiCache full: L1 device \d+ pages ",
        r"preparing the programs: \d+\.\d s",
        r"ready after \d+\.\d s",
        r"uvicorn\.error: ",
    ):
        assert re.search(said, log), said
