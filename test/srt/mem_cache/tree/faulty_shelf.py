"""A storage in memory that outlives the world that closes it, as files outlive a process, and fails when told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import PageBytes, Payload
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey


class FaultyShelf(MemoryStorage):
    """`refuse_sets`: every write fails; `raises`: every call raises; `damaged`: pages that are there, but whose next
    read finds them damaged, and removes them."""

    def __init__(self, namespace: StorageNamespace) -> None:
        super().__init__(namespace)
        self.refuse_sets = False
        self.raises = False
        self.damaged: set[PageKey] = set()

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """As promised by the base class: what is damaged is a miss, and is taken out of the way."""
        self._fail()
        self.delete([key for key in keys if key in self.damaged])
        self.damaged.difference_update(keys)
        return super().get(keys)

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """Nothing is written while sets are refused."""
        self._fail()
        return [False] * len(keys) if self.refuse_sets else super().set(keys, pages)

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """A damaged page is there."""
        self._fail()
        return super().exists(keys)

    def close(self) -> None:
        """Stays open for the next world."""

    @property
    def pages(self) -> dict[PageKey, bytes]:
        """Everything that is stored, damaged pages left out."""
        return {key: page for key, page in self._pages.items() if key not in self.damaged}

    def heal(self) -> None:
        """No more failures."""
        self.refuse_sets = self.raises = False

    def _fail(self) -> None:
        if self.raises:
            raise OSError("the disk is gone")


@dataclass
class Shelves:
    """One shelf for each namespace, opened like a kind of storage."""

    by_namespace: dict[StorageNamespace, FaultyShelf] = field(default_factory=dict)

    def open(self, root: str | Path, namespace: StorageNamespace) -> FaultyShelf:
        """The shelf of a namespace, made at the first call."""
        return self.by_namespace.setdefault(namespace, FaultyShelf(namespace))
