"""Names of files that are being written, and which of them nobody will finish.

    <page>.<host>.<pid>.<start>.<storage>.<count>.tmp

`host` tells machines and process-id spaces apart, `pid` and `start` name a process for good (ids
are reused), `storage` is random per open storage and `count` per write. So no two writes ever
share a name, and a sweep can tell the temporary file of a dead writer from that of a live one.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

FOREIGN_MAX_AGE_S = 24 * 3600.0
"""Age from which the temporary file of another machine counts as left behind: its processes cannot
be asked.
"""

_NAME = re.compile(
    r"[0-9a-f]{64}\.(?P<host>[0-9a-f]{12})\.(?P<pid>\d{1,10})\.(?P<start>\d{1,20})\.[0-9a-f]{8}\.\d+\.tmp"
)


@dataclass(frozen=True)
class Writer:
    """One process, for good: `start` is its start time in clock ticks since boot, 0 where the
    system does not tell.
    """

    host: str
    pid: int
    start: int


def this_writer() -> Writer:
    """The calling process."""
    return Writer(host=_host_id(), pid=os.getpid(), start=_start_time(os.getpid()) or 0)


def parse_writer(name: str) -> Writer | None:
    """The writer of a temporary file, or None if the name is none of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Writer(match["host"], int(match["pid"]), int(match["start"]))


class TempNames:
    """Makes temporary names for one open storage. Any thread; correct in a forked child too."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(4)
        self._count = itertools.count()
        self._writer = this_writer()

    def new(self, page: str) -> str:
        """A name for the next write of the page called `page` (64 hex digits)."""
        if self._writer.pid != os.getpid():
            self._writer = this_writer()
        writer = self._writer
        parts = (writer.host, writer.pid, writer.start, self._token, next(self._count))
        return f"{page}.{'.'.join(map(str, parts))}.tmp"


def is_stale(writer: Writer, modified_s: float, here: Writer) -> bool:
    """Whether the file of `writer`, last modified at that time of the wall clock, will never be
    finished.

    `here` is the calling process.
    """
    if writer.host != here.host:
        # A time far in the future is a wrong clock's and would stay for ever; no number at all is not young either.
        return not abs(time.time() - modified_s) <= FOREIGN_MAX_AGE_S
    return not _is_alive(writer)


def _is_alive(writer: Writer) -> bool:
    start = _start_time(writer.pid)
    if start is not None:
        return writer.start in (0, start)
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(writer.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_time(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None for a dead one, a zombie, or
    without /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin1")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def _host_id() -> str:
    """Machine, boot and process-id space: within one of these a process id means something."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="latin1"))
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append("no /proc")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
