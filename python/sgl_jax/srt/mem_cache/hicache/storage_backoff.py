"""Spares a storage that fails."""

from __future__ import annotations

from collections.abc import Callable


class StorageBackoff:
    """Stops writing to a storage that fails, and tries again later: after 1 s, then twice as long, at most 30 s."""

    FIRST_S = 1.0
    LONGEST_S = 30.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._paused_until = float("-inf")

    @property
    def open(self) -> bool:
        """True if a write may be tried now."""
        return self._clock() >= self._paused_until

    def record(self, ok: bool) -> None:
        """Note how a write ended."""
        self._pause_s = 0.0 if ok else min(max(self.FIRST_S, self._pause_s * 2), self.LONGEST_S)
        self._paused_until = self._clock() + self._pause_s if not ok else float("-inf")
