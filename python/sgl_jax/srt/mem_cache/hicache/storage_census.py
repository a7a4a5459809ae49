"""How many pages of each component L3 holds.

Other servers write to the same place, and anybody may remove pages, so they are counted again and again, in a thread
that works a small part of the time. Between two counts goes what this server wrote and removed itself.
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
PAGES_AT_ONCE = 256
REST = 4.0
"""After so many pages the thread rests for so many times as long as they took: serving must not feel it."""

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
    ) -> None:
        """Starts to count at once."""
        self._storages = dict(storages)
        self._interval_s = interval_s
        self._counts = dict.fromkeys(self._storages, _Count())
        self._closing = threading.Event()
        self.first_count_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-census", daemon=True)
        self._thread.start()

    def stats(self) -> dict[ComponentKind, StorageStats]:
        """What each storage says of itself, with `pages_held`. Cheap."""
        found = {}
        for kind, storage in self._storages.items():
            stats, count = storage.stats(), self._counts[kind]
            held = count.num_pages + _written(stats) - count.written
            found[kind] = replace(stats, pages_held=max(held, 0))
        return found

    def close(self) -> None:
        """End the thread. Idempotent; before the storages are closed."""
        self._closing.set()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        can_list = dict(self._storages)
        while can_list and not self._closing.is_set():
            for kind, storage in list(can_list.items()):
                try:
                    self._count(kind, storage)
                except StorageUnavailableError as error:
                    logger.debug("%s pages in storage are never counted: %s", kind.value, error)
                    del can_list[kind]
            self.first_count_done.set()
            self._closing.wait(self._interval_s)

    def _count(self, kind: ComponentKind, storage: HiCacheStorage) -> None:
        num_pages, written = 0, _written(storage.stats())
        started_s = time.monotonic()
        try:
            for _ in storage.iter_keys():
                num_pages += 1
                if num_pages % PAGES_AT_ONCE == 0:
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
