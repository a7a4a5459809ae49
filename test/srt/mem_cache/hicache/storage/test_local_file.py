"""LocalFileStorage beyond the contract: visibility, modes, full disks, vanished folders, counts."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from storage_kit import (
    PAGE_BYTES,
    SPACE,
    WAIT_S,
    FailingOps,
    GatedOps,
    ShortOps,
    make_keys,
    make_page,
)

from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import PageFileFormat
from sgl_jax.srt.mem_cache.hicache.storage.stats import StorageStats

KEYS = make_keys(4)
PAGES = [[make_page(i)] for i in range(4)]


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir())


def test_the_path_is_the_documented_one(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(KEYS[:1], PAGES[:1])
    name = KEYS[0].hex()
    assert files_below(tmp_path) == [tmp_path / "org%2Fmodel" / "4" / name[:2] / f"{name}.npy"]
    assert storage.path_of(KEYS[0]) == files_below(tmp_path)[0]


def test_a_page_is_invisible_until_it_is_whole(tmp_path: Path) -> None:
    ops = GatedOps()
    writer, reader = LocalFileStorage(tmp_path, SPACE, ops=ops), LocalFileStorage(tmp_path, SPACE)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(writer.set, KEYS[:1], PAGES[:1])
        assert ops.halfway.wait(WAIT_S)
        try:
            assert len(files_below(tmp_path)) == 1, "the half-written file is there"
            for storage in (writer, reader):
                assert storage.exists(KEYS[:1]) == [False]
                assert storage.get(KEYS[:1]) == [None]
                assert list(storage.iter_keys()) == []
                storage.check_invariants()
        finally:
            ops.gate.set()
        assert result.result(WAIT_S) == [True]
    assert reader.exists(KEYS[:1]) == [True]
    np.testing.assert_array_equal(reader.get(KEYS[:1])[0], PAGES[0][0])
    assert files_below(tmp_path) == [reader.path_of(KEYS[0])]


def test_the_slower_of_two_writers_of_a_key_succeeds_too(tmp_path: Path) -> None:
    ops = GatedOps()
    slow, fast = LocalFileStorage(tmp_path, SPACE, ops=ops), LocalFileStorage(tmp_path, SPACE)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(slow.set, KEYS[:1], PAGES[:1])
        assert ops.halfway.wait(WAIT_S)
        assert fast.set(KEYS[:1], PAGES[:1]) == [True]
        ops.gate.set()
        assert result.result(WAIT_S) == [True]
    np.testing.assert_array_equal(fast.get(KEYS[:1])[0], PAGES[0][0])


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        storage = LocalFileStorage(tmp_path / "root", SPACE)
        assert storage.set(KEYS, PAGES) == [True] * 4
        storage.path_of(KEYS[0]).write_bytes(b"bad")
        assert storage.get(KEYS[:1]) == [None]  # makes the quarantine
    finally:
        os.umask(before)
    for path in (tmp_path / "root").rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700


@pytest.mark.parametrize("call", ["create", "writev", "replace"])
@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]
)
def test_a_disk_that_fails_costs_the_page_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, error: int
) -> None:
    """The temporary file is gone, the state is logged once, and the next good write recovers."""
    ops = FailingOps(good_bytes=300, **{call: error})
    storage = LocalFileStorage(tmp_path, SPACE, ops=ops)
    with caplog.at_level(logging.WARNING):
        assert storage.set(KEYS, PAGES) == [False] * 4
        assert len(caplog.records) == 1
        assert "cannot be written to" in caplog.text
    assert files_below(tmp_path) == []
    assert storage.exists(KEYS) == [False] * 4
    stats = storage.stats()
    assert (stats.write_errors, stats.sets, stats.available) == (4, 0, False)
    assert stats.last_error is not None
    assert f"Errno {error}" in stats.last_error

    ops.errors.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert storage.set(KEYS, PAGES) == [True] * 4
        assert len(caplog.records) == 1
        assert "written to again" in caplog.text
    assert storage.stats().available
    assert storage.stats().sets == 4


def test_one_page_that_fails_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    class ThirdFails(FileOps):
        def replace(self, source: str, target: str, folder_fd: int) -> None:
            if target.startswith(KEYS[2].hex()):
                raise OSError(errno.ENOSPC, "injected")
            super().replace(source, target, folder_fd)

    storage = LocalFileStorage(tmp_path, SPACE, ops=ThirdFails())
    assert storage.set(KEYS, PAGES) == [True, True, False, True]
    assert storage.exists(KEYS) == [True, True, False, True]
    assert LocalFileStorage(tmp_path, SPACE).set(KEYS, PAGES) == [True] * 4


def test_fsync_brackets_the_rename(tmp_path: Path) -> None:
    """The bytes reach the disk before the name does, and the name before the page counts as stored."""
    calls: list[str] = []

    class RecordingOps(FileOps):
        def fsync(self, fd: int) -> None:
            calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
            super().fsync(fd)

        def replace(self, source: str, target: str, folder_fd: int) -> None:
            calls.append("rename")
            super().replace(source, target, folder_fd)

    LocalFileStorage(tmp_path, SPACE, fsync=True, ops=RecordingOps()).set(KEYS[:1], PAGES[:1])
    assert calls == ["file", "rename", "folder"]
    calls.clear()
    LocalFileStorage(tmp_path, SPACE, ops=RecordingOps()).set(KEYS[1:2], PAGES[1:2])
    assert calls == ["rename"]


def test_fsync_failing_means_not_stored(tmp_path: Path) -> None:
    failing = LocalFileStorage(tmp_path, SPACE, fsync=True, ops=FailingOps(fsync=errno.EIO))
    assert failing.set(KEYS[:1], PAGES[:1]) == [False]
    assert files_below(tmp_path) == []
    careless = LocalFileStorage(tmp_path, SPACE, ops=FailingOps(fsync=errno.EIO))
    assert careless.set(KEYS[:1], PAGES[:1]) == [True]


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE, ops=ShortOps())
    assert storage.set(KEYS, PAGES) == [True] * 4
    for found, page in zip(storage.get(KEYS), PAGES, strict=True):
        np.testing.assert_array_equal(found, page[0])


def test_a_page_of_more_arrays_than_one_write_takes(tmp_path: Path) -> None:
    space = replace(SPACE, page_bytes=3000)
    storage, page = LocalFileStorage(tmp_path, space), make_page(9, 3000)
    assert storage.set(KEYS[:1], [[page[i : i + 1] for i in range(3000)]]) == [True]
    np.testing.assert_array_equal(storage.get(KEYS[:1])[0], page)


@pytest.mark.parametrize("levels_up", [0, 1, 2, 3])
def test_a_folder_removed_under_a_running_storage_is_made_again(
    tmp_path: Path, levels_up: int
) -> None:
    """The shard, the page size, the model, the root."""
    storage = LocalFileStorage(tmp_path / "root", SPACE)
    assert storage.set(KEYS, PAGES) == [True] * 4
    shutil.rmtree(storage.path_of(KEYS[0]).parents[levels_up])
    assert storage.exists(KEYS[:1]) == [False]
    assert storage.get(KEYS[:1]) == [None]
    assert storage.delete(KEYS[:1]) == [False]
    assert storage.stats().misses == 1
    assert storage.set(KEYS, PAGES) == [True] * 4
    np.testing.assert_array_equal(storage.get(KEYS[:1])[0], PAGES[0][0])
    assert storage.stats().write_errors == 0


def test_a_folder_removed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    class RemovingOps(FileOps):
        removals = 0

        def create(self, name: str, folder_fd: int) -> int:
            if self.removals == 0:
                self.removals += 1
                shutil.rmtree(tmp_path / "root")
            return super().create(name, folder_fd)

    storage = LocalFileStorage(tmp_path / "root", SPACE, ops=RemovingOps())
    assert storage.set(KEYS, PAGES) == [True] * 4
    assert storage.exists(KEYS) == [True] * 4


def test_a_root_whose_parent_is_gone_is_an_error_and_no_new_tree(tmp_path: Path) -> None:
    """An unmounted disk must not be imitated by folders on the disk below."""
    storage = LocalFileStorage(tmp_path / "mount" / "root", SPACE)
    assert storage.set(KEYS[:1], PAGES[:1]) == [False]
    assert not (tmp_path / "mount").exists()
    assert not storage.stats().available


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(KEYS[:1], PAGES[:1])
    inode = storage.path_of(KEYS[0]).stat().st_ino
    assert storage.set(KEYS[:2], PAGES[:2]) == [True, True]
    assert storage.path_of(KEYS[0]).stat().st_ino == inode
    stats = storage.stats()
    assert (stats.sets, stats.already_stored, stats.set_bytes) == (2, 1, 2 * PAGE_BYTES)


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    LocalFileStorage(tmp_path, SPACE).set(KEYS, PAGES)
    again = LocalFileStorage(tmp_path, SPACE)
    assert list(again.iter_keys()) == sorted(KEYS)
    for found, page in zip(again.get(KEYS), PAGES, strict=True):
        np.testing.assert_array_equal(found, page[0])


def test_namespaces_in_one_folder_do_not_see_each_other(tmp_path: Path) -> None:
    """Same model name and page size, so one folder; same keys would be impossible, other keys are."""
    old, new = (
        LocalFileStorage(tmp_path, SPACE),
        LocalFileStorage(tmp_path, replace(SPACE, model_version="other")),
    )
    assert old.folder == new.folder
    old.set(KEYS[:2], PAGES[:2])
    new.set(KEYS[2:], PAGES[2:])
    (old.folder / "notes.txt").write_text("of somebody")
    (old.path_of(KEYS[0]).parent / "notes.txt").write_text("of somebody")
    assert list(old.iter_keys()) == sorted(KEYS[:2])
    assert list(new.iter_keys()) == sorted(KEYS[2:])
    old.check_invariants()
    assert old.delete(list(old.iter_keys())) == [True, True]
    assert list(new.iter_keys()) == sorted(KEYS[2:])
    assert (old.folder / "notes.txt").exists()


def test_an_empty_storage_has_no_keys_and_no_folders(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path / "root", SPACE)
    assert list(storage.iter_keys()) == []
    storage.check_invariants()
    assert storage.get(KEYS) == [None] * 4
    assert list(tmp_path.iterdir()) == []
    assert storage.stats() == StorageStats(gets=4, misses=4)


def test_iterating_may_be_given_up(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(KEYS, PAGES)
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    keys = storage.iter_keys()
    next(keys)
    keys.close()  # type: ignore[attr-defined]
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_call_leaks_a_descriptor(tmp_path: Path) -> None:
    fds = Path("/proc/self/fd")
    if not fds.exists():
        pytest.skip("no /proc here")
    storage = LocalFileStorage(tmp_path, SPACE, fsync=True)
    before = len(list(fds.iterdir()))
    storage.set(KEYS, PAGES)
    storage.path_of(KEYS[0]).write_bytes(b"")
    storage.get(KEYS)
    storage.exists(KEYS)
    storage.delete(KEYS)
    storage.check_invariants()
    for call in ("open_for_read", "readv", "create", "writev", "replace", "fsync"):
        failing = LocalFileStorage(tmp_path, SPACE, fsync=True, ops=FailingOps(**{call: errno.EIO}))
        failing.set(KEYS, PAGES)
        failing.get(KEYS)
    assert len(list(fds.iterdir())) == before


def test_a_format_of_another_namespace_is_refused(tmp_path: Path) -> None:
    other = PageFileFormat(replace(SPACE, kv_dtype="float16"))
    with pytest.raises(ValueError, match="page format"):
        LocalFileStorage(tmp_path, SPACE, page_format=other)


def test_many_threads_count_exactly(tmp_path: Path) -> None:
    storage, start = LocalFileStorage(tmp_path, SPACE), threading.Barrier(4)

    def worker(number: int) -> None:
        start.wait(WAIT_S)
        keys = make_keys(25, first_token=1000 * (number + 1))
        storage.set(keys, [[make_page(i)] for i in range(25)])
        storage.get(keys)
        storage.get(make_keys(25, first_token=100_000))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(worker, range(4)))
    stats = storage.stats()
    assert (stats.sets, stats.hits, stats.misses, stats.gets) == (100, 100, 100, 200)
    assert stats.set_bytes == stats.hit_bytes == 100 * PAGE_BYTES
    storage.check_invariants()
