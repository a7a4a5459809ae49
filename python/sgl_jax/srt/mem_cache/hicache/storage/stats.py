"""Counts of what a storage did, as plain numbers for metrics and tests."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class StorageStats:
    """A snapshot. Pages asked for add up: gets == hits + misses + corrupt_gets + read_errors."""

    sets: int = 0  # pages written
    set_bytes: int = 0  # payload bytes written
    already_stored: int = 0  # pages that set found in place
    write_errors: int = 0  # pages that could not be written
    gets: int = 0  # pages asked for
    hits: int = 0
    hit_bytes: int = 0  # payload bytes read and verified
    misses: int = 0  # not there
    corrupt_gets: int = 0  # there, and rejected by get
    corrupt: int = 0  # rejected entries, whoever found them
    read_errors: int = 0  # could not be read for a passing reason; nothing was moved
    deletes: int = 0  # pages removed
    delete_errors: int = 0
    stale_temps_removed: int = 0
    pages_found: int = (
        0  # in the folder when it was opened, whatever weights and layout they are of
    )
    pages_held: int = 0  # of this namespace; filled in by `StorageCensus`
    evicted: int = 0  # pages, of any namespace, removed to keep the folder's bound
    evicted_bytes: int = 0
    bytes_held: int = 0  # by the model's folder, as last counted; 0 where there is no bound
    max_bytes: int = 0  # the bound; 0 if there is none
    available: bool = True  # the last write worked
    last_error: str | None = None  # of the last write that failed


class StatsCounter:
    """Collects `StorageStats` from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._available = True
        self._last_error: str | None = None
        self._bytes_held = 0
        self._max_bytes = 0

    def add(self, **deltas: int) -> None:
        """Adds to the named counts of `StorageStats`."""
        with self._lock:
            for name, delta in deltas.items():
                self._counts[name] += delta

    def write_worked(self) -> bool:
        """Notes a working write; True if the storage was unavailable until now."""
        with self._lock:
            recovered = not self._available
            self._available = True
            return recovered

    def write_failed(self, error: str) -> bool:
        """Notes a failed write; True if the storage was available until now."""
        with self._lock:
            was_available = self._available
            self._available, self._last_error = False, error
            self._counts["write_errors"] += 1
            return was_available

    def folder_holds(self, num_bytes: int, max_bytes: int) -> None:
        """Notes the size of the folder and its bound."""
        with self._lock:
            self._bytes_held, self._max_bytes = num_bytes, max_bytes

    def snapshot(self) -> StorageStats:
        """The counts at one instant."""
        with self._lock:
            return StorageStats(
                **self._counts,
                bytes_held=self._bytes_held,
                max_bytes=self._max_bytes,
                available=self._available,
                last_error=self._last_error,
            )
