"""A storage in memory that outlives the world that closes it, as files outlive a process, and fails when told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import PageBytes, Payload
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey


class FaultyShelf(MemoryStorage):
    """`refuse_sets`: every write fails; `refuses`: those of these keys; `refuse_some`: of a quarter of all keys;
    `raise_for_some`: writes with any of those raise; `raises`: every call raises; `damaged`: pages that are there, but
    whose next read finds them damaged, and removes them."""

    def __init__(self, namespace: StorageNamespace) -> None:
        super().__init__(namespace)
        self.heal()
        self.damaged: set[PageKey] = set()

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """As promised by the base class: what is damaged is a miss, and is taken out of the way."""
        self._fail()
        self.delete([key for key in keys if key in self.damaged])
        self.damaged.difference_update(keys)
        return super().get(keys)

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """As far as it is in order: what is refused is not written."""
        self._fail()
        good = [
            not (self.refuse_sets or self.refuses(key) or (self.refuse_some and _is_odd(key)))
            for key in keys
        ]
        if self.raise_for_some and any(map(_is_odd, keys)):
            raise OSError("one of these cannot be written")
        taken = iter(super().set(list(compress(keys, good)), list(compress(pages, good))))
        return [ok and next(taken) for ok in good]

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
        self.refuse_sets = self.refuse_some = self.raise_for_some = self.raises = False
        self.refuses: Callable[[PageKey], bool] = lambda key: False

    def _fail(self) -> None:
        if self.raises:
            raise OSError("the disk is gone")


def _is_odd(key: PageKey) -> bool:
    return key[0] < 64


@dataclass
class Shelves:
    """One shelf for each namespace, opened like a kind of storage."""

    by_namespace: dict[StorageNamespace, FaultyShelf] = field(default_factory=dict)

    def open(self, root: str | Path, namespace: StorageNamespace) -> FaultyShelf:
        """The shelf of a namespace, made at the first call."""
        return self.by_namespace.setdefault(namespace, FaultyShelf(namespace))
