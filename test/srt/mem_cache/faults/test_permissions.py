"""Permissions that change under a running storage: pages and folders that cannot be read or written, roots swapped."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from another_user import NOBODY, private_folder, unprivileged
from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError, StorageUnavailableError
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root

KEYS = make_keys(3)
PAGES = [[make_page(i)] for i in range(3)]


@pytest.fixture
def root() -> Iterator[Path]:
    """A storage root with three pages, owned by the user the test acts as."""
    with private_folder() as folder:
        with unprivileged():
            assert LocalFileStorage(folder / "root", SPACE).set(KEYS, PAGES) == [True] * 3
        yield folder / "root"


def test_a_page_without_permission_is_a_counted_miss_and_heals(root: Path) -> None:
    with unprivileged():
        storage = LocalFileStorage(root, SPACE)
        storage.path_of(KEYS[1]).chmod(0)
        with pytest.raises(PermissionError):
            storage.path_of(KEYS[1]).read_bytes()
        first, forbidden, last = storage.get(KEYS)
        assert forbidden is None
        assert first is not None and last is not None
        assert (storage.stats().corrupt_gets, storage.stats().hits) == (1, 2)
        assert storage.set(KEYS[1:2], PAGES[1:2]) == [True]
        np.testing.assert_array_equal(storage.get(KEYS[1:2])[0], PAGES[1][0])


@pytest.mark.parametrize("levels_up", [0, 1, 2, 3])
def test_a_folder_that_cannot_be_written_to_costs_the_page_only(root: Path, levels_up: int) -> None:
    """The shard, the page size, the model, the root: what is there is still read, and writing resumes by itself."""
    with unprivileged():
        storage = LocalFileStorage(root, SPACE)
        folder = storage.path_of(KEYS[1]).parents[levels_up]
        storage.delete(KEYS[1:2])
        if levels_up:
            storage.path_of(KEYS[1]).parent.rmdir()
        folder.chmod(0o500)
        written = storage.set(KEYS[1:2], PAGES[1:2])
        assert written == [levels_up > 1]  # the folders below it are there and writable
        assert storage.get(KEYS[:1])[0] is not None
        assert storage.stats().available is written[0]
        folder.chmod(0o700)
        assert storage.set(KEYS[1:2], PAGES[1:2]) == [True]
        assert storage.stats().available
        storage.check_invariants()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_root_that_others_may_write_to_since_the_start_is_not_used(root: Path, mode: int) -> None:
    """Whoever may write there could have planted pages."""
    with unprivileged():
        storage = LocalFileStorage(root, SPACE)
        root.chmod(mode)
        assert storage.get(KEYS) == [None] * 3
        assert storage.exists(KEYS) == [False] * 3
        assert storage.set(KEYS, PAGES) == [False] * 3
        last_error = storage.stats().last_error
        assert last_error is not None and "can be written to by others" in last_error
        with pytest.raises(StorageUnavailableError, match=r"cannot be listed: .* by others"):
            storage.clear()
        root.chmod(0o700)
        assert storage.exists(KEYS) == [True] * 3
        assert storage.clear() == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_root_that_somebody_put_in_our_roots_place_is_not_used(root: Path) -> None:
    """Scenario: the parent is open to others, who move our root away while we run and leave one of their own."""
    storage = LocalFileStorage(root, SPACE)
    os.chown(root, 0, 0)
    assert storage.exists(KEYS) == [True] * 3
    root.rename(root.with_name("moved"))
    root.mkdir(0o700)
    os.chown(root, NOBODY, NOBODY)
    before = sorted(root.rglob("*"))
    assert storage.set(KEYS, PAGES) == [False] * 3
    assert storage.get(KEYS) == [None] * 3
    assert sorted(root.rglob("*")) == before, "a prompt's pages went to somebody else's folder"
    with pytest.raises(HiCacheConfigError, match=f"belongs to user {NOBODY}"):
        prepare_root(root)


def test_an_unwritable_root_is_refused_at_start(root: Path) -> None:
    with unprivileged():
        root.chmod(0o500)
        with pytest.raises(HiCacheConfigError, match="Permission denied"):
            prepare_root(root)
        root.chmod(0o700)
        assert prepare_root(root) == root
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
