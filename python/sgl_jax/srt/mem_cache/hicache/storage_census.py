"""How many pages of each component L3 holds.

Other servers write to the same place, and anybody may remove pages, so they are counted again and again, in a thread
that works a small part of the time. Between two counts goes what this server wrote and removed itself. What had to go
to keep a bound may have been anybody's: it is counted soon after.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .errors import StorageUnavailableError
from .storage.base import HiCacheStorage
from .storage.stats import StorageStats
from .types import ComponentKind

logger = logging.getLogger(__name__)

COUNT_INTERVAL_S = 300.0
EVICTED_INTERVAL_S = 30.0
"""From one count to the next if pages went to keep a bound."""

PAGES_AT_ONCE = 256
REST = 4.0
"""After so many pages, whosever they are, the thread rests so many times as long as they took: serving must not feel
it."""

CLOSE_WAIT_S = 1.0
"""A disk that hangs does not keep a server from ending; the thread is a daemon."""


@dataclass(frozen=True)
class _Count:
    """Pages found, and how many this server had written, less those it had removed, when it began to look."""

    num_pages: int = 0
    written: int = 0


class StorageCensus:
    """Counts the pages of open storages until it is closed. A storage that cannot list its pages holds what this server
    wrote to it.

    `stats` may be called from any thread. A page written during a count can be counted twice until the next one.
    """

    def __init__(
        self,
        storages: Mapping[ComponentKind, HiCacheStorage],
        interval_s: float = COUNT_INTERVAL_S,
        evicted_interval_s: float = EVICTED_INTERVAL_S,
    ) -> None:
        """Starts to count at once."""
        self._storages = dict(storages)
        self._interval_s = interval_s
        self._evicted_interval_s = min(evicted_interval_s, interval_s)
        self._counts = dict.fromkeys(self._storages, _Count())
        self._num_evicted = 0  # when the last count began
        self._evicted_since = threading.Event()
        self._closing = threading.Event()
        self.first_count_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-census", daemon=True)
        self._thread.start()

    def stats(self) -> dict[ComponentKind, StorageStats]:
        """What each storage says of itself, with `pages_held`. Cheap."""
        found = self._snapshots()
        if _evicted(found) != self._num_evicted:
            self._evicted_since.set()
        for kind, stats in found.items():
            count = self._counts[kind]
            held = count.num_pages + _written(stats) - count.written
            found[kind] = replace(stats, pages_held=max(held, 0))
        return found

    def close(self) -> None:
        """End the thread. Idempotent; before the storages are closed."""
        self._closing.set()
        self._evicted_since.set()  # where the thread may wait
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        can_list = dict(self._storages)
        while can_list and not self._closing.is_set():
            self._evicted_since.clear()
            self._num_evicted = _evicted(self._snapshots())
            for kind, storage in list(can_list.items()):
                try:
                    self._count(kind, storage)
                except StorageUnavailableError as error:
                    logger.debug("%s pages in storage are never counted: %s", kind.value, error)
                    del can_list[kind]
            self.first_count_done.set()
            if not self._closing.wait(self._evicted_interval_s):
                self._evicted_since.wait(self._interval_s - self._evicted_interval_s)

    def _snapshots(self) -> dict[ComponentKind, StorageStats]:
        return {kind: storage.stats() for kind, storage in self._storages.items()}

    def _count(self, kind: ComponentKind, storage: HiCacheStorage) -> None:
        num_pages, written = 0, _written(storage.stats())
        started_s = time.monotonic()
        try:
            for num_seen, key in enumerate(storage.scan(), 1):
                num_pages += key is not None
                if num_seen % PAGES_AT_ONCE == 0:
                    if self._closing.wait(REST * (time.monotonic() - started_s)):
                        return
                    started_s = time.monotonic()
        except OSError as error:
            logger.debug("the %s pages in storage are not counted now: %s", kind.value, error)
            return
        except ValueError as error:
            if not self._closing.is_set():
                raise
            logger.debug("storage was closed while its pages were counted: %s", error)
            return
        self._counts[kind] = _Count(num_pages, written)


def _written(stats: StorageStats) -> int:
    return stats.sets - stats.deletes


def _evicted(stats: Mapping[ComponentKind, StorageStats]) -> int:
    return sum(of_one.evicted for of_one in stats.values())
