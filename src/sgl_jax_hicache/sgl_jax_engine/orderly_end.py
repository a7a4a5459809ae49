"""Ends the schedulers that this process started, so that nothing is lost that could be stored.

The engine ends its processes with SIGKILL. Before it does, they are asked.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from types import FrameType

import psutil

from .stop_switch import STOP_AT_ONCE_SIGNAL, SWITCHES

logger = logging.getLogger(__name__)

DEADLINE_S = 40.0
"""A flush has its own limit (see `scheduler`); this is for a scheduler that no longer listens."""


def stop_schedulers(deadline_s: float = DEADLINE_S) -> bool:
    """Ask every scheduler of this process to end, and wait for it. False if one did not in time. Any thread."""
    end_s = time.monotonic() + deadline_s
    threads_ended = []
    for switch in SWITCHES:
        switch.stop_at_once()
    listening = [process for process in _children() if _listens(process)]
    for process in listening:
        process.send_signal(STOP_AT_ONCE_SIGNAL)
    for switch in SWITCHES:
        threads_ended.append(switch.ended.wait(max(0.0, end_s - time.monotonic())))
    SWITCHES.clear()
    _, alive = psutil.wait_procs(listening, timeout=max(0.0, end_s - time.monotonic()))
    if alive or not all(threads_ended):
        logger.warning("a scheduler did not end within %.0f s", deadline_s)
        return False
    return True


def wait_for_schedulers_at_sigterm(deadline_s: float = DEADLINE_S) -> None:
    """At SIGTERM, wait until the schedulers have ended by themselves, then end with 0. Main thread only."""

    def wait(number: int, frame: FrameType | None) -> None:
        _, alive = psutil.wait_procs([p for p in _children() if _listens(p)], timeout=deadline_s)
        os._exit(1 if alive else 0)

    signal.signal(signal.SIGTERM, wait)


def _children() -> list[psutil.Process]:
    processes = []
    for child in multiprocessing.active_children():
        try:
            processes.append(psutil.Process(child.pid))
        except psutil.NoSuchProcess:
            continue  # it ended between the two lines
    return processes


def _listens(process: psutil.Process) -> bool:
    """True if the process catches our signal; one that does not would die of it."""
    try:
        with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (STOP_AT_ONCE_SIGNAL - 1) & 1)
