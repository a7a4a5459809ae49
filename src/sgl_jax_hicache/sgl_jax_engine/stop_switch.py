"""How the scheduler is told to end, from a signal handler or another thread.

Ending takes two forms. `when_idle`: what runs and waits is finished first; this is what SIGTERM means, because a
supervisor sends it to the whole process group while the launching process still waits for answers. `at_once`: at the
next round of the loop; the launching process asks for it with SIGUSR1 when nobody waits for an answer any more.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP_AT_ONCE_SIGNAL = signal.SIGUSR1


class StopSwitch:
    """A wish to end, and whether it was met."""

    def __init__(self) -> None:
        self._when_idle = threading.Event()
        self._at_once = threading.Event()
        self.ended = threading.Event()

    def stop_when_idle(self) -> None:
        """End once no request is left."""
        self._when_idle.set()

    def stop_at_once(self) -> None:
        """End now."""
        self._at_once.set()

    @property
    def wanted(self) -> bool:
        """True if an end is wished for; cheap, asked in every round."""
        return self._when_idle.is_set() or self._at_once.is_set()

    def due(self, idle: bool) -> bool:
        """True if this is the moment."""
        return self._at_once.is_set() or (idle and self._when_idle.is_set())

    def listen_to_signals(self) -> None:
        """Take SIGTERM and `STOP_AT_ONCE_SIGNAL`, and leave Ctrl-C to the launching process. Main thread only."""
        signal.signal(signal.SIGTERM, lambda number, frame: self.stop_when_idle())
        signal.signal(STOP_AT_ONCE_SIGNAL, lambda number, frame: self.stop_at_once())
        leave_signals_to_the_parent(signal.SIGINT)


def leave_signals_to_the_parent(*signals: signal.Signals) -> None:
    """Do nothing at these signals; the launching process ends this one when its time has come."""

    def ignore(number: int, frame: FrameType | None) -> None:
        """Not SIG_IGN, which a process started from here would inherit."""

    for number in signals:
        signal.signal(number, ignore)


SWITCHES: list[StopSwitch] = []
"""Those of the schedulers that run as threads of this process."""
