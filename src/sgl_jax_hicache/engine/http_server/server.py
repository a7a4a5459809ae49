"""Serves an application until a signal, then ends in order.

SIGTERM or SIGINT: no new connections, running requests finish within the deadline, then the caller goes on (it stores
what is to be stored). A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..engine_args import ArgumentError


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

        super().__init__(
            uvicorn.Config(
                app,
                http=protocol or BoundedProtocol,
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
