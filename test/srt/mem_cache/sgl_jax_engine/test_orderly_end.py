"""Schedulers are asked before they are killed; nobody else is disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from sgl_jax_hicache.sgl_jax_engine import orderly_end
from sgl_jax_hicache.sgl_jax_engine.stop_switch import SWITCHES, StopSwitch

SRC = Path(__file__).resolve().parents[4] / "src"

CHILDREN = """
import multiprocessing, os, signal, sys, time
import psutil
from sgl_jax_hicache.sgl_jax_engine.stop_switch import StopSwitch
from sgl_jax_hicache.sgl_jax_engine.orderly_end import stop_schedulers

def scheduler(ready, folder, obeys):
    switch = StopSwitch()
    switch.listen_to_signals()
    ready.set()
    while not (obeys and switch.due(idle=False)):
        time.sleep(0.01)
    open(os.path.join(folder, "flushed"), "w").close()
    os._exit(0)

def bystander(ready):
    ready.set()
    signal.pause()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ready = [context.Event(), context.Event()]
    obeys = sys.argv[2] == "obeys"
    children = [
        context.Process(target=scheduler, args=(ready[0], sys.argv[1], obeys)),
        context.Process(target=bystander, args=(ready[1],)),
    ]
    for child, event in zip(children, ready):
        child.start()
        assert event.wait(60)
    print(stop_schedulers(60.0 if obeys else 0.2), [psutil.pid_exists(child.pid) for child in children])
    for child in children:
        if psutil.pid_exists(child.pid):
            child.kill()
"""


@pytest.mark.parametrize(
    ("obeys", "expected"), [("obeys", "True [False, True]"), ("deaf", "False [True, True]")]
)
def test_processes(tmp_path: Path, obeys: str, expected: str) -> None:
    script = tmp_path / "children.py"
    script.write_text(textwrap.dedent(CHILDREN))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), obeys],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == expected, done.stderr
    assert (tmp_path / "flushed").exists() == (obeys == "obeys")


def test_a_thread_of_this_process() -> None:
    switch = StopSwitch()
    SWITCHES.append(switch)

    def loop() -> None:
        while not switch.due(idle=False):
            waiting.wait(0.001)
        switch.ended.set()

    waiting = threading.Event()
    thread = threading.Thread(target=loop)
    thread.start()
    assert orderly_end.stop_schedulers(60.0)
    thread.join(60.0)
    assert not thread.is_alive()
    assert SWITCHES == []


def test_when_idle_is_not_at_once() -> None:
    switch = StopSwitch()
    assert not switch.wanted
    switch.stop_when_idle()
    assert switch.wanted
    assert not switch.due(idle=False)
    assert switch.due(idle=True)
    switch.stop_at_once()
    assert switch.due(idle=False)
