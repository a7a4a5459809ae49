"""How many bytes a model's folder holds, agreed on by all processes that write to it under a bound.

A small JSON file beside the pages, read and changed under an exclusive lock of the file system (flock):

    {"held_bytes": 123, "promised": {"<host>.<pid>.<start>.<storage>": [bytes, when]}}

`promised` is what a writer may still add without asking again; that of a dead writer is taken back. The file is a
summary and nothing more: what it says too much is found at the next count, and if it is missing or damaged, the folder
is counted anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .folders import open_folder
from .temp_file import Writer, is_stale, this_writer

LEDGER_NAME = ".usage"

_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOST_BYTES = 1 << 20
_LOCK_POLL_S = 0.01


@dataclass
class Usage:
    """What the ledger says. `held_bytes` is None if the folder has to be counted."""

    held_bytes: int | None = None
    promised: dict[str, tuple[int, float]] = field(default_factory=dict)

    def promised_to_others(self, me: str) -> int:
        """Bytes that other writers may still add."""
        return sum(num_bytes for name, (num_bytes, _) in self.promised.items() if name != me)

    def forget_dead(self) -> None:
        """Takes back what was promised to writers that are no more."""
        here = this_writer()
        for name, (_, when_s) in list(self.promised.items()):
            writer = _parse(name)
            if writer is None or is_stale(writer, when_s, here):
                del self.promised[name]


class UsageLedger:
    """The ledger of one model's folder. Any thread, any process; the lock is held for the time of a `with`."""

    def __init__(self, root: Path, model_folder: str) -> None:
        self._root = root
        self._names = (model_folder,)
        self._token = secrets.token_hex(4)

    @property
    def me(self) -> str:
        """The name of this storage in this process among the writers."""
        writer = this_writer()
        return f"{writer.host}.{writer.pid}.{writer.start}.{self._token}"

    @contextmanager
    def locked(self, *, create: bool = True, wait_s: float | None = None) -> Iterator[Usage]:
        """What the ledger says, to be changed and written back at the end.

        `create` makes ledger and folders if need be, else FileNotFoundError. `wait_s`: how long another process may
        keep it (None: as long as it likes), then BlockingIOError. Raises OSError.
        """
        with open_folder(self._root, self._names, create=create) as folder_fd:
            flags = _OPEN_FLAGS if create else _OPEN_FLAGS & ~os.O_CREAT
            fd = os.open(LEDGER_NAME, flags, 0o600, dir_fd=folder_fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(f"{LEDGER_NAME} in {self._root / self._names[0]} is no file")
                os.fchmod(fd, 0o600)
                _lock(fd, wait_s)  # given back when the descriptor is closed
                usage = _read(fd)
                yield usage
                _write(fd, usage)
            finally:
                os.close(fd)


def _lock(fd: int, wait_s: float | None) -> None:
    if wait_s is None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise
        time.sleep(_LOCK_POLL_S)


def _parse(name: str) -> Writer | None:
    host, *numbers = name.split(".")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers[:2]):
        return None
    return Writer(host, int(numbers[0]), int(numbers[1]))


def _read(fd: int) -> Usage:
    """An empty usage if the file is new or is not what `_write` wrote."""
    try:
        content = json.loads(os.pread(fd, _MOST_BYTES, 0))
        held_bytes, promised = content["held_bytes"], content["promised"]
        if not isinstance(held_bytes, int) or held_bytes < 0:
            held_bytes = None
        usage = Usage(held_bytes, {n: (int(b), float(s)) for n, (b, s) in promised.items()})
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Usage()
    # Less than nothing promised would be room that is not there.
    return Usage() if any(b < 0 for b, _ in usage.promised.values()) else usage


def _write(fd: int, usage: Usage) -> None:
    content = {"held_bytes": usage.held_bytes, "promised": usage.promised}
    data = json.dumps(content).encode()
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))


def promise(num_bytes: int) -> tuple[int, float]:
    """An entry of `Usage.promised`, made now."""
    return num_bytes, time.time()
