"""How many pages L3 holds, component by component: what was there, what this server did, what others did."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from storage_kit import PAGE_BYTES, SPACE, WAIT_S, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache import storage_census
from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.storage.blob import BlobStorage
from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import PageFileFormat
from sgl_jax.srt.mem_cache.hicache.storage_census import PAGES_AT_ONCE, StorageCensus
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, PageKey

FULL, SWA = ComponentKind.FULL, ComponentKind.SWA
SWA_SPACE = replace(SPACE, layout_id=SPACE.layout_id.replace("full", "swa"))
"""Pages of the same size in the same folder."""


def write(storage: HiCacheStorage, num_pages: int, first_token: int = 0) -> list[PageKey]:
    """New pages; their keys."""
    if storage.namespace == SPACE:
        keys = make_keys(num_pages, first_token)
    else:
        tokens = b"".join(i.to_bytes(8, "little") for i in range(4 * num_pages))
        keys = PageHasher(storage.namespace, None).chain(None, tokens)
    assert all(storage.set(keys, [[make_page(1)]] * num_pages))
    return keys


def held(census: StorageCensus) -> dict[ComponentKind, int]:
    return {kind: stats.pages_held for kind, stats in census.stats().items()}


def test_components_of_one_folder_are_told_apart_and_own_writes_count_at_once(
    tmp_path: Path,
) -> None:
    write(LocalFileStorage(tmp_path, SPACE), 5)
    write(LocalFileStorage(tmp_path, SWA_SPACE), 3)
    write(LocalFileStorage(tmp_path, replace(SPACE, model_version="another")), 2)
    storages = {
        kind: LocalFileStorage(tmp_path, s) for kind, s in [(FULL, SPACE), (SWA, SWA_SPACE)]
    }
    census = StorageCensus(storages)
    assert census.first_count_done.wait(WAIT_S)
    assert held(census) == {FULL: 5, SWA: 3}
    more = write(storages[FULL], 4, first_token=1000)
    assert held(census) == {FULL: 9, SWA: 3}
    storages[FULL].delete([*more[:1], *make_keys(1, 5000)])
    write(storages[FULL], 4, first_token=1000)
    assert held(census) == {FULL: 9, SWA: 3}
    storages[SWA].clear()
    assert held(census) == {FULL: 9, SWA: 0}
    census.close()


class Shelf(MemoryStorage):
    """Lists its pages each time that it is told to."""

    def __init__(self) -> None:
        super().__init__(SPACE)
        self.may_list = threading.Semaphore(0)
        self.listing = threading.Semaphore(0)
        self.error: OSError | None = None

    def iter_keys(self) -> Iterator[PageKey]:
        self.listing.release()
        assert self.may_list.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        yield from super().iter_keys()

    def count_once_more(self) -> None:
        """Returns when a count that began after this call has ended."""
        for _ in range(2):
            self.may_list.release()
            assert self.listing.acquire(timeout=WAIT_S)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.may_list.release()


def test_what_others_did_shows_with_the_next_count(shelf: Shelf) -> None:
    census = StorageCensus({FULL: shelf}, interval_s=0.0)
    assert shelf.listing.acquire(timeout=WAIT_S)
    keys = write(shelf, 6)
    shelf.count_once_more()
    assert held(census) == {FULL: 6}
    for key in keys[:2]:
        del shelf._pages[key]
    assert held(census) == {FULL: 6}
    shelf.count_once_more()
    assert held(census) == {FULL: 4}
    shelf.error = OSError("the disk is away")
    shelf.count_once_more()
    write(shelf, 1, first_token=900)
    assert held(census) == {FULL: 5}
    shelf.error = None
    shelf.may_list.release(1000)
    census.close()
    assert not census._thread.is_alive()


class ListsForEver(MemoryStorage):
    """A folder that has no end."""

    def __init__(self) -> None:
        super().__init__(SPACE)
        self.is_listing = threading.Event()

    def iter_keys(self) -> Iterator[PageKey]:
        while True:
            yield from make_keys(PAGES_AT_ONCE)
            self.is_listing.set()


def test_a_long_count_is_cut_short_by_the_end() -> None:
    storage = ListsForEver()
    census = StorageCensus({FULL: storage})
    assert storage.is_listing.wait(WAIT_S)
    census.close()
    census.close()
    assert not census._thread.is_alive()
    assert not census.first_count_done.is_set() or held(census) == {FULL: 0}


def test_it_rests_and_ends_among_the_pages_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(LocalFileStorage(tmp_path, replace(SPACE, model_version="another")), 12)
    monkeypatch.setattr(storage_census, "PAGES_AT_ONCE", 4)
    monkeypatch.setattr(storage_census, "REST", 1e9)
    four_opened = threading.Event()

    class CountedOps(FileOps):
        num_opened = 0

        def open_for_read(self, name: str, folder_fd: int) -> int:
            self.num_opened += 1
            if self.num_opened == 4:
                four_opened.set()
            return super().open_for_read(name, folder_fd)

    ops = CountedOps()
    census = StorageCensus({FULL: LocalFileStorage(tmp_path, SPACE, ops=ops)})
    assert four_opened.wait(WAIT_S)
    census.close()
    assert not census._thread.is_alive()
    assert ops.num_opened == 4


def test_what_went_to_keep_a_bound_is_counted_again_soon(tmp_path: Path) -> None:
    file_bytes = PageFileFormat(SPACE).file_bytes
    storage = LocalFileStorage(tmp_path, SPACE, max_bytes=20 * file_bytes)
    census = StorageCensus({FULL: storage}, evicted_interval_s=0.0)
    assert census.first_count_done.wait(WAIT_S)
    for first_token in range(0, 6000, 1000):
        write(storage, 10, first_token)
    assert storage.stats().evicted >= 40
    is_there = len(list(storage.iter_keys()))
    give_up_s = time.monotonic() + WAIT_S
    while held(census) != {FULL: is_there} and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert held(census) == {FULL: is_there}
    census.close()


class Blobs(BlobStorage):
    """Keeps bytes, and cannot list them."""

    def __init__(self) -> None:
        super().__init__(SPACE)
        self._blobs: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        return self._blobs.get(name)

    def save(self, name: str, blob: bytes) -> None:
        self._blobs[name] = blob

    def has(self, name: str) -> bool:
        return name in self._blobs

    def remove(self, name: str) -> bool:
        return self._blobs.pop(name, None) is not None


def test_a_storage_that_cannot_list_its_pages_holds_what_this_server_wrote() -> None:
    storage = Blobs()
    write(storage, 2)
    census = StorageCensus({FULL: storage}, interval_s=0.0)
    census._thread.join(WAIT_S)
    assert not census._thread.is_alive(), "nothing to do for it"
    write(storage, 3, first_token=400)
    assert held(census) == {FULL: 5}
    assert census.stats()[FULL].set_bytes == 5 * PAGE_BYTES
    census.close()
