"""A server in a process of its own, as a user starts it: launched, waited for, and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

LAUNCH = (sys.executable, "-m", "sgl_jax_hicache.launch_server", "--engine", "embedded")

_TAIL_LINES = 30
START_TIMEOUT_S = 900.0
"""A server that cannot start ends, which shows at once; one that compiles on a busy machine only takes its time."""

_POLL_S = 0.1


class ServerFailedError(RuntimeError):
    """The server ended or did not become healthy; the message carries the end of its log."""


class ServerProcess:
    """The launcher with the given flags, as a context manager that leaves nothing behind.

    Its output is appended to `log_path`. It listens on `port`; 0 takes any free one. The process leads a session of its
    own, so that a kill takes all of it.
    """

    def __init__(
        self,
        flags: Sequence[str],
        log_path: Path,
        start_timeout_s: float = START_TIMEOUT_S,
        launch: Sequence[str] = LAUNCH,
        port: int = 0,
    ) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._command = [*launch, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and everything it started: no handler runs, nothing is flushed. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise ServerFailedError(
                    f"the server ended with status {process.returncode}:\n{self._log_tail()}"
                )
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(_POLL_S)
        raise ServerFailedError(
            f"the server was not healthy after {self._start_timeout_s:.0f} s:\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
