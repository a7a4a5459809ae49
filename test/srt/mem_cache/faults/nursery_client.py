"""The tests' side of `nursery.py`: start writers, read what they report, kill them, hear how they ended."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nursery import Order
from storage_kit import WAIT_S

_NURSERY = Path(__file__).with_name("nursery.py")
_STORAGE_KIT = Path(__file__).parents[1] / "hicache" / "storage"


class Writer:
    """One writer process. `lines` grows while it lives."""

    def __init__(self, nursery: Nursery, pid: int, fifo: str) -> None:
        self.pid = pid
        self.lines: list[str] = []
        self._nursery = nursery
        self._fifo = fifo
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_lines(self, count: int) -> None:
        """Until it has reported that many lines, or has died."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended or len(self.lines) >= count, WAIT_S)

    def kill(self) -> int:
        """SIGKILL; its status once it is gone and every line of it is there."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Its status, when it has ended."""
        status = self._nursery.ask({"wait": self.pid})
        deadline_s = time.monotonic() + WAIT_S
        while self._reader.is_alive():
            assert time.monotonic() < deadline_s
            # It may have died before it opened its end, for which the reader would wait for ever.
            with suppress(OSError):
                os.close(os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK))
            self._reader.join(0.05)
        return status

    @property
    def stored(self) -> set[int]:
        """Pages that it reported as stored."""
        return {int(line.split()[1]) for line in self.lines if line.startswith("stored")}

    @property
    def faults(self) -> list[str]:
        """What it should never report."""
        return [line for line in self.lines if not line.startswith("stored")]

    def _read(self) -> None:
        with open(self._fifo, encoding="ascii") as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.strip())
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Nursery:
    """The process that forks writers. One thread at a time."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._count = 0

    def start(self, root: Path, seed: int, die_at: int | None = None) -> Writer:
        """A writer on `root`."""
        self._count += 1
        fifo = str(self._folder / f"fifo{self._count}")
        os.mkfifo(fifo, 0o600)
        order = Order(str(root), fifo, seed, die_at)
        return Writer(self, self.ask({"start": dataclasses.asdict(order)}), fifo)

    def ask(self, order: dict[str, object]) -> int:
        """Send one order; the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def open_nursery(folder: Path) -> Iterator[Nursery]:
    """A nursery; it and its writers are gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, str(_NURSERY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_STORAGE_KIT), *sys.path])},
    )
    try:
        yield Nursery(process, folder)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=WAIT_S)
