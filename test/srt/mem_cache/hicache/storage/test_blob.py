"""BlobStorage: what a place of names and bytes need not know. test_example_backend.py runs the contract suite on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.blob import BlobStorage
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink


class Shelf(BlobStorage):
    """Blobs in a dictionary; whatever is asked of a name in `broken` raises."""

    def __init__(self, namespace: StorageNamespace = SPACE) -> None:
        super().__init__(namespace)
        self.blobs: dict[str, bytes] = {}
        self.broken: set[str] = set()

    def _at(self, name: str) -> str:
        if name in self.broken:
            raise ConnectionError("no route to the shelf")
        return name

    def load(self, name: str) -> bytes | None:
        return self.blobs.get(self._at(name))

    def save(self, name: str, blob: bytes) -> None:
        self.blobs[self._at(name)] = blob

    def has(self, name: str) -> bool:
        return self._at(name) in self.blobs

    def remove(self, name: str) -> bool:
        return self.blobs.pop(self._at(name), None) is not None


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def filled(shelf: Shelf, num_pages: int) -> list[PageKey]:
    keys = make_keys(num_pages)
    assert shelf.set(keys, [[make_page(i)] for i in range(num_pages)]) == [True] * num_pages
    return keys


def test_a_blob_is_the_file_that_a_local_storage_writes(shelf: Shelf, tmp_path: Path) -> None:
    """Name, content and link; so either can be filled from the other."""
    keys, pages = make_keys(2), [[make_page(0)], [make_page(1)]]
    links = [PageLink(None, 0), PageLink(keys[0], 1)]
    files = LocalFileStorage(tmp_path, SPACE)
    assert shelf.set_linked(keys, pages, links) == files.set_linked(keys, pages, links)
    assert shelf.blobs == {
        path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*.npy")
    }


@pytest.mark.parametrize("fault", ["short", "empty", "flipped", "another page", "another model"])
def test_what_does_not_verify_is_a_counted_miss_and_heals(shelf: Shelf, fault: str) -> None:
    keys = filled(shelf, 3)
    name = shelf.name_of(keys[1])
    blob = shelf.blobs[name]
    others = Shelf(replace(SPACE, model_version="another fine-tune"))
    others.set([keys[1]], [[make_page(1)]])
    shelf.blobs[name] = {
        "short": blob[:-1],
        "empty": b"",
        "flipped": blob[:-1] + bytes([blob[-1] ^ 1]),
        "another page": shelf.blobs[shelf.name_of(keys[0])],
        "another model": others.blobs[name],
    }[fault]
    first, bad, last = shelf.get(keys)
    assert bad is None
    np.testing.assert_array_equal(first, make_page(0))
    np.testing.assert_array_equal(last, make_page(2))
    assert name not in shelf.blobs
    assert shelf.stats().corrupt_gets == shelf.stats().corrupt == 1
    assert shelf.set([keys[1]], [[make_page(1)]]) == [True]
    np.testing.assert_array_equal(shelf.get([keys[1]])[0], make_page(1))


def test_a_place_that_raises_costs_its_page_only(shelf: Shelf) -> None:
    keys = filled(shelf, 3)
    shelf.broken = {shelf.name_of(keys[1])}
    assert [page is not None for page in shelf.get(keys)] == [True, False, True]
    assert shelf.exists(keys) == [True, False, True]
    assert shelf.set(keys, [[make_page(i)] for i in range(3)]) == [True, False, True]
    assert not shelf.stats().available
    assert shelf.stats().last_error == "no route to the shelf"
    assert shelf.delete(keys) == [True, False, True]
    shelf.broken = set()
    assert shelf.set(keys, [[make_page(i)] for i in range(3)]) == [True] * 3
    assert shelf.stats().available


def test_the_counts_add_up(shelf: Shelf) -> None:
    keys = filled(shelf, 2)
    shelf.set([keys[0]], [[make_page(0)]])
    missing = make_keys(3)[2]
    shelf.broken = {shelf.name_of(keys[1])}
    shelf.get([keys[0], keys[1], missing])
    shelf.delete([*keys, missing])
    stats = shelf.stats()
    assert (stats.sets, stats.already_stored, stats.write_errors) == (2, 1, 0)
    assert (stats.gets, stats.hits, stats.misses, stats.read_errors) == (3, 1, 1, 1)
    assert stats.set_bytes == 2 * stats.hit_bytes == 2 * SPACE.page_bytes
    assert (stats.deletes, stats.delete_errors) == (1, 1)


def test_links_that_do_not_pair_up_are_refused(shelf: Shelf) -> None:
    with pytest.raises(ValueError, match="1 keys for 0 links"):
        shelf.set_linked(make_keys(1), [[make_page(0)]], [])
