"""A storage in this process's memory: the test double that ships with the package, with the
contract of the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from ..page_key import StorageNamespace
from ..types import PageKey
from .base import HiCacheStorage, PageBytes, Payload
from .payload import check_keys, payload_views
from .stats import StatsCounter, StorageStats


class MemoryStorage(HiCacheStorage):
    """Pages in a dict. Any thread; gone with the process."""

    def __init__(self, namespace: StorageNamespace) -> None:
        self.namespace = namespace
        self._lock = threading.Lock()
        self._pages: dict[PageKey, bytes] = {}
        self._counter = StatsCounter()
        self._closed = False

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """See `HiCacheStorage.get`. Raises ValueError for a wrong key or a closed storage."""
        self._check_open()
        check_keys(keys)
        with self._lock:
            found = [self._pages.get(key) for key in keys]
        hits = sum(page is not None for page in found)
        self._counter.add(gets=len(found), hits=hits, misses=len(found) - hits)
        self._counter.add(hit_bytes=hits * self.namespace.page_bytes)
        return [
            None if page is None else np.frombuffer(bytearray(page), np.uint8) for page in found
        ]

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """See `HiCacheStorage.set`. Raises ValueError for a wrong key, a wrong payload or a closed
        storage.
        """
        self._check_open()
        views = payload_views(keys, pages, self.namespace.page_bytes)
        for key, page in zip(keys, views, strict=True):
            joined = b"".join(page)
            with self._lock:
                is_new = self._pages.setdefault(key, joined) is joined
            self._counter.add(sets=int(is_new), already_stored=int(not is_new))
            self._counter.add(set_bytes=len(joined) if is_new else 0)
        return [True] * len(keys)

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.exists`."""
        self._check_open()
        check_keys(keys)
        with self._lock:
            return [key in self._pages for key in keys]

    def delete(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.delete`."""
        self._check_open()
        check_keys(keys)
        with self._lock:
            removed = [self._pages.pop(key, None) is not None for key in keys]
        self._counter.add(deletes=sum(removed))
        return removed

    def iter_keys(self) -> Iterator[PageKey]:
        """See `HiCacheStorage.iter_keys`."""
        self._check_open()
        with self._lock:
            keys = list(self._pages)
        yield from keys

    def close(self) -> None:
        """See `HiCacheStorage.close`. The pages stay, as files would."""
        self._closed = True

    def stats(self) -> StorageStats:
        """What this instance has done so far."""
        return self._counter.snapshot()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the storage is closed")
