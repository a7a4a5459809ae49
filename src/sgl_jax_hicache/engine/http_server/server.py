"""Serves an application until a signal, then ends in order.

SIGTERM or SIGINT: no new connections, running requests finish within the deadline, then the caller goes on (it stores
what is to be stored). A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..engine_args import ArgumentError

_WANTED_FILES = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model loads. Raises ArgumentError if it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ArgumentError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror or error}); "
            "choose another port, or --port 0 for any"
        ) from error


def connection_bounds(file_limit: int) -> tuple[int, int]:
    """(most connections, most that are accepted at once) for a process that may have so many files open: half of them,
    an eighth of them. What is beyond the first number is accepted too, for as long as it takes to refuse it.
    """
    return max(1, file_limit // 2), max(1, min(file_limit // 8, 64))


def _file_limit() -> int:
    """Descriptors that this process may have, after it has asked for as many as it can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _WANTED_FILES if soft == resource.RLIM_INFINITY else soft


class Server(uvicorn.Server):
    """A uvicorn server whose signals are the launcher's business."""

    def __init__(
        self,
        app: ASGIApp,
        deadline_s: float,
        log_level: str = "warning",
        protocol: type[asyncio.Protocol] | None = None,
    ) -> None:
        # Imported late: `bind` is wanted before anything that takes long to import.
        from .protocol import BoundedProtocol

        most, at_once = connection_bounds(_file_limit())
        bounded = type("ConnectionsThatFit", (BoundedProtocol,), {"most_that_fit": most})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol or bounded,
                backlog=at_once,  # asyncio accepts as many before it looks at the first of them
                log_config=None,  # its lines go where all others go, in their format
                log_level=log_level,
                access_log=log_level == "debug",
                lifespan="off",
                timeout_graceful_shutdown=max(1, round(deadline_s)),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers as they are."""
        yield

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until `should_exit`; blocks."""
        asyncio.run(self.serve(sockets=[listener]))


def exit_on_signals(on_first: Callable[[], None]) -> None:
    """Call `on_first` at the first SIGTERM or SIGINT; the second one ends the process. Main thread only."""
    seen: list[int] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        seen.append(signum)
        if len(seen) > 1:
            os._exit(128 + signum)
        on_first()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handle)
