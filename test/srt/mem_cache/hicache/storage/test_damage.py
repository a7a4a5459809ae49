"""Whatever stands in a page's place and is not the page: a miss, counted, out of the way, and never a hang."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from page_damage import DAMAGES, KEYS, PAGES, flip
from storage_kit import SPACE, FailingOps, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.errors import InvariantError
from sgl_jax.srt.mem_cache.hicache.storage.folders import QUARANTINE, QUARANTINE_MAX_FILES
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalFileStorage:
    storage = LocalFileStorage(tmp_path / "root", SPACE)
    assert storage.set(KEYS, [[page] for page in PAGES]) == [True] * 3
    return storage


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_a_counted_miss_and_heals(storage: LocalFileStorage, name: str) -> None:
    path = storage.path_of(KEYS[1])
    DAMAGES[name](path)
    first, damaged, last = storage.get(KEYS)
    assert damaged is None
    np.testing.assert_array_equal(first, PAGES[0])
    np.testing.assert_array_equal(last, PAGES[2])
    stats = storage.stats()
    assert (stats.gets, stats.hits, stats.corrupt_gets, stats.corrupt) == (3, 2, 1, 1)
    assert not os.path.lexists(path), "it is still in the way"

    assert storage.exists(KEYS) == [True, False, True]
    assert storage.set([KEYS[1]], [[PAGES[1]]]) == [True]
    np.testing.assert_array_equal(storage.get([KEYS[1]])[0], PAGES[1])
    storage.check_invariants()


@pytest.mark.parametrize("name", DAMAGES)
def test_set_heals_what_does_not_look_like_the_page(storage: LocalFileStorage, name: str) -> None:
    """Without a get in between. What has the right kind and size is left to the next get."""
    path = storage.path_of(KEYS[1])
    DAMAGES[name](path)
    looks_right = storage.exists([KEYS[1]]) == [True]
    assert storage.set([KEYS[1]], [[PAGES[1]]]) == [True]
    (found,) = storage.get([KEYS[1]])
    if looks_right:
        assert found is None
    else:
        np.testing.assert_array_equal(found, PAGES[1])


@pytest.mark.parametrize("name", ["empty", "half", "one byte long", "fifo", "dangling symlink"])
def test_a_probe_counts_what_is_no_whole_page_and_moves_it_away(
    storage: LocalFileStorage, name: str
) -> None:
    path = storage.path_of(KEYS[1])
    DAMAGES[name](path)
    assert storage.exists(KEYS) == [True, False, True]
    assert storage.stats().corrupt == 1
    assert not os.path.lexists(path), "it is still in the way"
    assert storage.exists(KEYS) == [True, False, True]
    assert storage.stats().corrupt == 1


@pytest.mark.parametrize("name", DAMAGES)
def test_check_invariants_finds_it(storage: LocalFileStorage, name: str) -> None:
    storage.check_invariants()
    DAMAGES[name](storage.path_of(KEYS[1]))
    if name == "page of another namespace":
        storage.check_invariants()  # a whole page of somebody else may share the folder
        return
    with pytest.raises(InvariantError, match="1 of 3 files"):
        storage.check_invariants()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP])
@pytest.mark.parametrize("call", ["open_for_read", "readv"])
def test_an_unreadable_file_is_moved_away(storage: LocalFileStorage, call: str, error: int) -> None:
    failing = LocalFileStorage(storage.root, SPACE, ops=FailingOps(**{call: error}))
    assert failing.get([KEYS[1]]) == [None]
    assert failing.stats().corrupt_gets == 1
    assert storage.exists(KEYS) == [True, False, True]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open_for_read", "readv"])
def test_a_passing_error_costs_a_miss_but_not_the_page(
    storage: LocalFileStorage, call: str, error: int
) -> None:
    failing = LocalFileStorage(storage.root, SPACE, ops=FailingOps(**{call: error}))
    assert failing.get(KEYS) == [None] * 3
    stats = failing.stats()
    assert (stats.gets, stats.read_errors, stats.corrupt) == (3, 3, 0)
    assert storage.exists(KEYS) == [True] * 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_a_miss(storage: LocalFileStorage) -> None:
    storage.path_of(KEYS[1]).chmod(0)
    assert storage.get([KEYS[1]]) == [None]
    assert storage.set([KEYS[1]], [[PAGES[1]]]) == [True]
    np.testing.assert_array_equal(storage.get([KEYS[1]])[0], PAGES[1])


def test_a_symlink_is_neither_followed_nor_its_target_touched(
    storage: LocalFileStorage, tmp_path: Path
) -> None:
    path, target = storage.path_of(KEYS[1]), tmp_path / "target.npy"
    path.rename(target)
    path.symlink_to(target)
    before = target.read_bytes()
    assert storage.exists([KEYS[1]]) == [False]
    assert storage.get([KEYS[1]]) == [None]
    path.symlink_to(target)
    assert storage.set([KEYS[1]], [[PAGES[1]]]) == [True]
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(target)
    assert storage.delete([KEYS[1]]) == [True]
    assert target.read_bytes() == before


@pytest.mark.parametrize("as_symlink", [True, False])
def test_a_shard_folder_that_is_none_is_not_followed_and_heals(
    storage: LocalFileStorage, tmp_path: Path, as_symlink: bool
) -> None:
    shard = storage.path_of(KEYS[1]).parent
    elsewhere = shard.rename(tmp_path / "elsewhere")
    if as_symlink:
        shard.symlink_to(elsewhere)
    else:
        shard.write_text("not a folder")
    before = sorted(elsewhere.iterdir())
    assert storage.exists([KEYS[1]]) == [False]
    assert storage.get([KEYS[1]]) == [None]
    assert storage.set([KEYS[1]], [[PAGES[1]]]) == [True]
    np.testing.assert_array_equal(storage.get([KEYS[1]])[0], PAGES[1])
    assert sorted(elsewhere.iterdir()) == before


def test_a_symlinked_model_folder_is_never_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    storage = LocalFileStorage(tmp_path / "root", SPACE)
    storage.folder.parent.parent.mkdir()
    storage.folder.parent.symlink_to(elsewhere)
    assert storage.set([KEYS[0]], [[PAGES[0]]]) == [False]
    assert storage.get([KEYS[0]]) == [None]
    assert list(elsewhere.iterdir()) == []
    assert storage.stats().write_errors == 1


def test_the_quarantine_is_bounded(tmp_path: Path) -> None:
    keys = make_keys(QUARANTINE_MAX_FILES + 8)
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(keys, [[make_page(i)] for i in range(len(keys))])
    for key in keys:
        flip(-1)(storage.path_of(key))
    assert storage.get(keys) == [None] * len(keys)
    assert len(list((storage.folder / QUARANTINE).iterdir())) == QUARANTINE_MAX_FILES
    assert storage.stats().corrupt == len(keys)
    assert list(storage.iter_keys()) == []


def test_an_oversized_file_is_removed_and_not_kept(storage: LocalFileStorage) -> None:
    os.truncate(storage.path_of(KEYS[1]), 1 << 30)  # sparse
    assert storage.get([KEYS[1]]) == [None]
    assert not (storage.folder / QUARANTINE).exists() or not list(
        (storage.folder / QUARANTINE).iterdir()
    )


def test_a_page_that_was_written_anew_is_not_thrown_away(tmp_path: Path) -> None:
    """Scenario: a reader finds a bad file; before it moves it, a writer has replaced it by a good one."""
    path = LocalFileStorage(tmp_path, SPACE).path_of(KEYS[0])

    class RewritingOps(FailingOps):
        def readv(self, fd: int, buffers: object) -> int:
            path.unlink()
            assert LocalFileStorage(tmp_path, SPACE).set([KEYS[0]], [[PAGES[0]]]) == [True]
            raise OSError(errno.EIO, "injected")

    writer = LocalFileStorage(tmp_path, SPACE)
    assert writer.set([KEYS[0]], [[PAGES[0]]]) == [True]
    with path.open("rb"):  # keeps the inode, so that the new file cannot get the same number
        reader = LocalFileStorage(tmp_path, SPACE, ops=RewritingOps())
        assert reader.get([KEYS[0]]) == [None]
    np.testing.assert_array_equal(writer.get([KEYS[0]])[0], PAGES[0])
