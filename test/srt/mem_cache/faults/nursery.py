"""Writer processes by the hundred: one process that has everything imported forks a writer per order.

    nursery.py        stdin: {"start": Order} -> its pid;  {"wait": pid} -> its status (negative: the signal)

A writer reports through its FIFO, a line each, what a killed process cannot unsay: `stored I` once page I counts as
stored, `wrong I` for a page with other bytes, `swept` when its temporary file was gone before the rename, `failed I`
when a page could not be written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_jax_hicache import overlay

overlay.activate()

import numpy as np  # noqa: E402
from storage_kit import SPACE, make_keys, make_page  # noqa: E402

from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps  # noqa: E402
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage  # noqa: E402

NUM_PAGES = 48
NUM_CHURNED = 16
"""The last pages are deleted and written again all the time; the others stay once they are stored."""


@dataclass(frozen=True)
class Order:
    """A writer's work. `die_at`: the call of the operating system at which it kills itself; None: it never does."""

    root: str
    fifo: str
    seed: int
    die_at: int | None = None


class MortalOps(FileOps):
    """Kills the process at one call: before it, after it, or, of a write, after a part of the bytes."""

    def __init__(self, rng: random.Random, die_at: int | None, report: Report) -> None:
        self._rng = rng
        self._left = die_at
        self._report = report

    def create(self, name: str, folder_fd: int) -> int:
        self._step()
        fd = super().create(name, folder_fd)
        self._step()
        return fd

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        if self._left == 1:
            whole = b"".join(buffers)
            super().writev(fd, [memoryview(whole)[: self._rng.randrange(1, len(whole))]])
        self._step()
        return super().writev(fd, buffers)

    def replace(self, source: str, target: str, folder_fd: int) -> None:
        self._step()
        try:
            super().replace(source, target, folder_fd)
        except FileNotFoundError:
            self._report("swept")
            raise
        self._step()

    def _step(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Report:
    """Lines to whoever watches; a line is whole or not there."""

    def __init__(self, fifo: str) -> None:
        self._fd = os.open(fifo, os.O_WRONLY)

    def __call__(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())


def work(order: Order) -> None:
    """Set, get and delete pages at random, like a server on a shared directory, without end."""
    rng, report = random.Random(order.seed), Report(order.fifo)
    keys = make_keys(NUM_PAGES)
    pages = [make_page(i) for i in range(NUM_PAGES)]
    storage = LocalFileStorage(
        Path(order.root), SPACE, ops=MortalOps(rng, order.die_at, report), fsync=rng.random() < 0.2
    )
    while True:
        batch = rng.sample(range(NUM_PAGES), rng.randrange(1, 6))
        action = rng.random()
        if action < 0.6:
            stored = storage.set([keys[i] for i in batch], [[pages[i]] for i in batch])
            for i, ok in zip(batch, stored, strict=True):
                report(f"{'stored' if ok else 'failed'} {i}")
        elif action < 0.8:
            for i, found in zip(batch, storage.get([keys[i] for i in batch]), strict=True):
                if found is not None and not np.array_equal(found, pages[i]):
                    report(f"wrong {i}")
        else:
            storage.delete([keys[i] for i in batch if i >= NUM_PAGES - NUM_CHURNED])


def main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        if "wait" in given:
            _, status = os.waitpid(given["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                work(Order(**given["start"]))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
