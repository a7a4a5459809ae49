"""A storage in memory that keeps the bound of a folder of files, for replays whose pages are too small for files.

In a file of a few hundred bytes the header weighs as much as the page, and all components' pages would cost the same.
Here only payloads count. What goes when the bound is reached is chosen by the product's own rule (`storage.chains`),
over the pages of all components together, as in a model's folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from sgl_jax.srt.mem_cache.hicache.storage.base import (
    HiCacheStorage,
    PageBytes,
    Payload,
    StorageNamespace,
)
from sgl_jax.srt.mem_cache.hicache.storage.bound import FREED_SHARE
from sgl_jax.srt.mem_cache.hicache.storage.chains import (
    UNKNOWN_INDEX,
    Links,
    id_of,
    last_use,
    parent_rows,
    removal_order,
)
from sgl_jax.srt.mem_cache.hicache.storage.payload import check_keys, payload_views
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink

_USE_NS = 1_000_000
"""Time is counted in uses, each of which stands for a millisecond."""


@dataclass
class _Kept:
    """A page, what it follows, and when it was last used."""

    content: bytes
    link: PageLink | None
    used_ns: int


class MemoryFolder:
    """The pages of all components of one model, at most `max_bytes` of payload; 0: no bound. Any thread."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.most_bytes = 0
        self._lock = threading.Lock()
        self._pages: dict[PageKey, _Kept] = {}
        self._clock_ns = count(step=_USE_NS)

    def read(self, key: PageKey) -> bytes | None:
        """The page, marked as used; None if it is not there."""
        with self._lock:
            kept = self._pages.get(key)
            if kept is None:
                return None
            kept.used_ns = next(self._clock_ns)
            return kept.content

    def write(self, key: PageKey, content: bytes, link: PageLink | None) -> None:
        """Keep the page, and mark it and what it follows as used; others go if there is no room."""
        with self._lock:
            before = self._pages.get(link.parent) if link and link.parent else None
            if before is not None:
                before.used_ns = next(self._clock_ns)
            kept = self._pages.get(key)
            if kept is None:
                if self.max_bytes and self.held_bytes + len(content) > self.max_bytes:
                    self._make_room(len(content))
                kept = self._pages[key] = _Kept(content, link, 0)
                self.held_bytes += len(content)
                self.most_bytes = max(self.most_bytes, self.held_bytes)
            kept.used_ns = next(self._clock_ns)

    def holds(self, keys: Iterable[PageKey]) -> list[bool]:
        """Which of these pages are there."""
        with self._lock:
            return [key in self._pages for key in keys]

    def remove(self, key: PageKey) -> bool:
        """True if the page was there."""
        with self._lock:
            kept = self._pages.pop(key, None)
            self.held_bytes -= 0 if kept is None else len(kept.content)
            return kept is not None

    def _make_room(self, num_bytes: int) -> None:
        target = self.max_bytes - self.max_bytes // FREED_SHARE - num_bytes
        keys, pages = list(self._pages), list(self._pages.values())
        links = Links(
            np.array([id_of(key) for key in keys], np.uint64),
            np.array([id_of(page.link.parent) if page.link else 0 for page in pages], np.uint64),
            np.array([page.link.index if page.link else UNKNOWN_INDEX for page in pages], np.int64),
        )
        parents = parent_rows(links)
        used_ns = np.array([page.used_ns for page in pages], np.int64)
        rows = removal_order(
            links.index,
            parents,
            last_use(links.index, parents, used_ns),
            unused_since_ns=0,
            now_ns=next(self._clock_ns),
        )
        for row in rows.tolist():
            if self.held_bytes <= target:
                return
            self.held_bytes -= len(self._pages.pop(keys[row]).content)


class MemoryFolderStorage(HiCacheStorage):
    """One component's view of a `MemoryFolder`, with the contract of every storage."""

    def __init__(self, folder: MemoryFolder, namespace: StorageNamespace) -> None:
        self.namespace = namespace
        self._folder = folder
        self._closed = False

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """See `HiCacheStorage.get`."""
        self._check(keys)
        found = [self._folder.read(key) for key in keys]
        return [
            None if page is None else np.frombuffer(bytearray(page), np.uint8) for page in found
        ]

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """See `HiCacheStorage.set`."""
        return self.set_linked(keys, pages, [None] * len(keys))

    def set_linked(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[Payload],
        links: Sequence[PageLink | None],
    ) -> list[bool]:
        """See `HiCacheStorage.set_linked`."""
        self._check(keys)
        views = payload_views(keys, pages, self.namespace.page_bytes)
        for key, page, link in zip(keys, views, links, strict=True):
            self._folder.write(key, b"".join(page), link)
        return [True] * len(keys)

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.exists`."""
        self._check(keys)
        return self._folder.holds(keys)

    def delete(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.delete`."""
        self._check(keys)
        return [self._folder.remove(key) for key in keys]

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        self._closed = True

    def _check(self, keys: Sequence[PageKey]) -> None:
        if self._closed:
            raise ValueError("the storage is closed")
        check_keys(keys)


@dataclass(frozen=True)
class MemoryFolderFactory:
    """Opens the components' storages of one folder."""

    folder: MemoryFolder

    def __call__(self, root: str | Path, namespace: StorageNamespace) -> HiCacheStorage:
        """See `StorageFactory`; `root` is not used."""
        return MemoryFolderStorage(self.folder, namespace)

    def bounded(self, max_bytes: int) -> MemoryFolderFactory:
        """The same folder with a bound."""
        self.folder.max_bytes = max_bytes
        return replace(self)
