"""The base of storages whose place knows names and bytes only: an object store, a database, another machine's memory.

A subclass moves blobs. All else is here: a page becomes one blob, which is a whole page file (`page_file`) under the
name that it has in a local storage, so the two can be copied into each other. What comes back is verified like a file.
A place that raises costs this page and none of its neighbours.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from ..errors import StorageCorruptionError
from ..page_key import StorageNamespace
from ..types import PageKey, PageLink
from .base import HiCacheStorage, PageBytes, Payload
from .folders import safe_name
from .page_file import PageFileFormat
from .payload import check_keys, payload_views
from .stats import StatsCounter, StorageStats
from .sweep import page_name, shard_name

logger = logging.getLogger(__name__)


class BlobStorage(HiCacheStorage):
    """Names, encodes, verifies and counts; `load`, `save`, `has` and `remove` are the subclass's. They are called from
    several threads at once, and may raise whatever they like.
    """

    def __init__(self, namespace: StorageNamespace) -> None:
        """Raises ValueError for a namespace whose pages no page file can hold."""
        self.namespace = namespace
        self._format = PageFileFormat(namespace)
        self._folder = f"{safe_name(namespace.model_id)}/{namespace.page_size}"
        self._counter = StatsCounter()
        self._closed = False

    # -- the subclass's ---------------------------------------------------------------------------

    @abstractmethod
    def load(self, name: str) -> bytes | None:
        """The blob of that name; None if there is none."""

    @abstractmethod
    def save(self, name: str, blob: bytes) -> None:
        """Keep a blob, in the place of one of that name; visible to `load` and `has` only when it is whole."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a blob of that name."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove a blob; True if there was one."""

    # -- HiCacheStorage ---------------------------------------------------------------------------

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """See `HiCacheStorage.get`. Raises ValueError for a wrong key or a closed storage."""
        self._check(keys)
        return [self._get_page(key) for key in keys]

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """See `HiCacheStorage.set`. Raises ValueError for a wrong key, a wrong payload or a closed storage."""
        return self.set_linked(keys, pages, [None] * len(keys))

    def set_linked(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[Payload],
        links: Sequence[PageLink | None],
    ) -> list[bool]:
        """See `HiCacheStorage.set_linked`: the links go into the blobs. Raises ValueError as `set`, and for links that
        do not pair up.
        """
        self._check(keys)
        views = payload_views(keys, pages, self.namespace.page_bytes)
        if len(links) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(links)} links")
        return [self._set_page(*page) for page in zip(keys, views, links, strict=True)]

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.exists`."""
        self._check(keys)
        return [self._has_page(key) for key in keys]

    def delete(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.delete`."""
        self._check(keys)
        return [self._delete_page(key) for key in keys]

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        self._closed = True

    def stats(self) -> StorageStats:
        """What this instance has done so far."""
        return self._counter.snapshot()

    # -- one page ---------------------------------------------------------------------------------

    def name_of(self, key: PageKey) -> str:
        """The blob's name: the path that the page has below the root of a local storage."""
        return f"{self._folder}/{shard_name(key)}/{page_name(key)}"

    def _get_page(self, key: PageKey) -> PageBytes | None:
        name = self.name_of(key)
        try:
            blob = self.load(name)
        except Exception as error:
            logger.debug("%s cannot be read: %s", name, error)
            self._counter.add(gets=1, read_errors=1)
            return None
        if blob is None:
            self._counter.add(gets=1, misses=1)
            return None
        try:
            page = self._verified(key, blob)
        except StorageCorruptionError as error:
            logger.warning("%s is rejected: %s", name, error)
            self._counter.add(gets=1, corrupt_gets=1, corrupt=1)
            self._delete_page(key)  # in the way of the next write
            return None
        self._counter.add(gets=1, hits=1, hit_bytes=page.nbytes)
        return page

    def _verified(self, key: PageKey, blob: bytes) -> PageBytes:
        header_bytes = self._format.header_bytes_of(len(blob))
        if header_bytes is None:
            raise StorageCorruptionError(f"{len(blob)} bytes, expected {self._format.file_bytes}")
        page = np.frombuffer(bytearray(blob[header_bytes:]), np.uint8)
        self._format.verify(key, bytes(blob[:header_bytes]), page)
        return page

    def _set_page(self, key: PageKey, payload: Sequence[memoryview], link: PageLink | None) -> bool:
        name = self.name_of(key)
        try:
            if self.has(name):
                self._counter.add(already_stored=1)
                return True
            self.save(name, b"".join(self._format.encode(key, payload, link)))
        except Exception as error:
            if self._counter.write_failed(str(error)):
                logger.warning("%s cannot be written to: %s", type(self).__name__, error)
            return False
        self._counter.add(sets=1, set_bytes=self.namespace.page_bytes)
        if self._counter.write_worked():
            logger.warning("%s can be written to again", type(self).__name__)
        return True

    def _has_page(self, key: PageKey) -> bool:
        try:
            return self.has(self.name_of(key))
        except Exception as error:
            logger.debug("%s cannot be looked up: %s", self.name_of(key), error)
            return False

    def _delete_page(self, key: PageKey) -> bool:
        try:
            removed = self.remove(self.name_of(key))
        except Exception as error:
            logger.debug("%s cannot be removed: %s", self.name_of(key), error)
            self._counter.add(delete_errors=1)
            return False
        self._counter.add(deletes=int(removed))
        return removed

    def _check(self, keys: Sequence[PageKey]) -> None:
        if self._closed:
            raise ValueError("the storage is closed")
        check_keys(keys)
