"""What storage is asked about a prompt, and how it is looked up. Runs on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .page_key import PageHasher
from .storage.base import HiCacheStorage
from .types import ComponentKind, PageKey

STORAGE_BATCH_PAGES = 32
"""Pages per storage call: enough to hide the call, few enough that a batch's bytes stay small."""


@dataclass(frozen=True)
class CompanionQuery:
    """Pages of a component beside Full that storage may have, and how their keys follow from the Full keys."""

    pages: Sequence[int]
    derive_key: Callable[[PageKey], PageKey]


@dataclass(frozen=True)
class StorageQuery:
    """What to look up of a prompt: the Full pages whose `tokens` follow `parent`, from page `first_page` on, and the
    companions of pages that have a Full key. `known_keys`: Full keys of the pages before `first_page`, needed only for
    companions."""

    hasher: PageHasher
    first_page: int
    parent: PageKey | None
    tokens: bytes
    known_keys: Sequence[PageKey] = ()
    companions: Mapping[ComponentKind, CompanionQuery] = field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        """Full pages asked for."""
        return len(self.tokens) // self.hasher.page_token_bytes

    def run(
        self, storages: Mapping[ComponentKind, HiCacheStorage]
    ) -> dict[ComponentKind, dict[int, PageKey]]:
        """Hash and look up: of each component, page number -> key of what is there; Full pages as an unbroken run."""
        new_keys = self.hasher.chain(self.parent, self.tokens)
        num_found = _leading(storages[ComponentKind.FULL], new_keys)
        found = {ComponentKind.FULL: dict(enumerate(new_keys[:num_found], start=self.first_page))}
        full_keys = [*self.known_keys, *new_keys[:num_found]]
        for kind, companion in self.companions.items():
            pages = [page for page in companion.pages if page < len(full_keys)]
            keys = [companion.derive_key(full_keys[page]) for page in pages]
            there = _existing(storages[kind], keys)
            found[kind] = {p: k for p, k, ok in zip(pages, keys, there, strict=True) if ok}
        return found


def _existing(storage: HiCacheStorage, page_keys: Sequence[PageKey]) -> list[bool]:
    """Which of the pages storage has."""
    there: list[bool] = []
    for first in range(0, len(page_keys), STORAGE_BATCH_PAGES):
        there += storage.exists(page_keys[first : first + STORAGE_BATCH_PAGES])
    return there


def _leading(storage: HiCacheStorage, page_keys: Sequence[PageKey]) -> int:
    """How many pages storage has from the first on."""
    for first in range(0, len(page_keys), STORAGE_BATCH_PAGES):
        there = storage.exists(page_keys[first : first + STORAGE_BATCH_PAGES])
        if not all(there):
            return first + there.index(False)
    return len(page_keys)
