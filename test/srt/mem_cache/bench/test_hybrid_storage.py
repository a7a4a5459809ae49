"""The replay's storage keeps the bound of a folder of files: what goes is the end of what was unused for longest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink
from sgl_jax_hicache.bench.hybrid_storage import (
    MemoryFolder,
    MemoryFolderFactory,
    MemoryFolderStorage,
)


def space(page_bytes: int) -> StorageNamespace:
    return StorageNamespace("m", "0", 4, "float32", "test", page_bytes)


def prompt(name: str, num_pages: int) -> list[PageKey]:
    return [PageKey(hashlib.sha256(f"{name}{i}".encode()).digest()) for i in range(num_pages)]


def links(keys: Sequence[PageKey]) -> list[PageLink]:
    return [PageLink(keys[i - 1] if i else None, i) for i in range(len(keys))]


def page(num_bytes: int) -> list[np.ndarray]:
    return [np.full(num_bytes, 7, np.uint8)]


@pytest.fixture
def folder() -> MemoryFolder:
    return MemoryFolder(max_bytes=3200)  # 32 pages; 2 more go each time


@pytest.fixture
def full(folder: MemoryFolder) -> MemoryFolderStorage:
    return MemoryFolderStorage(folder, space(100))


def store(storage: MemoryFolderStorage, keys: Sequence[PageKey]) -> None:
    pages = [page(storage.namespace.page_bytes)] * len(keys)
    assert all(storage.set_linked(keys, pages, links(keys)))


def test_the_end_of_the_prompt_that_was_unused_for_longest_goes_first(
    folder: MemoryFolder, full: MemoryFolderStorage
) -> None:
    old, used, new = prompt("old", 16), prompt("used", 16), prompt("new", 1)
    store(full, old)
    store(full, used)
    assert full.get(old[15:])[0] is not None  # and with it all before it
    store(full, new)
    assert full.exists(old) == [True] * 16
    assert full.exists(used) == [True] * 13 + [False] * 3
    assert folder.held_bytes == 3000
    assert folder.most_bytes == 3200


def test_a_page_that_gets_another_behind_it_is_used(full: MemoryFolderStorage) -> None:
    grown, other = prompt("grown", 17), prompt("other", 16)
    store(full, grown[:16])
    store(full, other)
    assert full.set_linked(grown[16:], [page(100)], links(grown)[16:]) == [True]
    assert full.exists(grown) == [True] * 17
    assert full.exists(other) == [True] * 13 + [False] * 3


def test_pages_of_all_components_share_the_bound(
    folder: MemoryFolder, full: MemoryFolderStorage
) -> None:
    states = MemoryFolderStorage(folder, space(1000))
    keys = prompt("a", 12)
    store(full, keys)
    assert states.set_linked(
        prompt("state", 2), [page(1000)] * 2, [PageLink(keys[i], i + 1) for i in (5, 11)]
    ) == [True, True]
    assert folder.held_bytes == 3200
    assert states.get(prompt("state", 1))[0] is not None
    store(full, prompt("b", 1))
    # The state at the end is as old as the pages before it, and the deepest of them.
    assert states.exists(prompt("state", 2)) == [True, False]
    assert full.exists(keys) == [True] * 12
    assert folder.held_bytes == 2300


def test_a_bound_comes_with_the_factory() -> None:
    folder = MemoryFolder()
    factory = MemoryFolderFactory(folder)
    store(factory("/nowhere", space(100)), prompt("a", 40))  # type: ignore[arg-type]
    assert folder.held_bytes == 4000
    factory.bounded(3200)("/nowhere", space(100))
    assert folder.max_bytes == 3200
