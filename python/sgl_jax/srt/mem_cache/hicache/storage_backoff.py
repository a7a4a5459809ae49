"""Spares a storage that fails."""

from __future__ import annotations

from collections.abc import Callable


class StorageBackoff:
    """Stops writing to a storage that fails, and tries again later: after 1 s, then twice as long, at most 30 s.

    One bad page is that page's trouble; a storage that takes none is the storage's.
    """

    FIRST_S = 1.0
    LONGEST_S = 30.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._paused_until = float("-inf")
        self._is_suspect = False

    @property
    def open(self) -> bool:
        """True if a write may be tried now."""
        return self._clock() >= self._paused_until

    def record(self, ok: bool, *, again: bool = False, alone: bool = False) -> None:
        """Note how a write ended; `ok`: at least one page was taken. What was refused before is refused `again`, and
        what is refused `alone` for the first time, says nothing of a storage that took the page before it."""
        if ok:
            self._pause_s, self._paused_until, self._is_suspect = 0.0, float("-inf"), False
            return
        if not self._pause_s and not self._is_suspect and (again or alone):
            self._is_suspect = not again
            return
        self._pause_s = min(max(self.FIRST_S, self._pause_s * 2), self.LONGEST_S)
        self._paused_until = self._clock() + self._pause_s
