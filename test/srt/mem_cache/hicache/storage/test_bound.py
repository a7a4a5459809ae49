"""The bound on a model's folder: kept at every moment, by all who write there, over restarts and whatever others do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from bound_kit import FILE_BYTES, PAGE, open_bounded, pages_below, store
from storage_kit import SPACE, WAIT_S, FailingOps, GatedOps, make_keys

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.registry import (
    STORAGE_FACTORIES,
    FileStorageFactory,
    open_storage,
)
from sgl_jax.srt.mem_cache.hicache.storage.usage_ledger import LEDGER_NAME, UsageLedger
from sgl_jax.srt.mem_cache.hicache.types import PageKey


def age(storage: LocalFileStorage, keys: Sequence[PageKey], age_s: float) -> None:
    for key in keys:
        os.utime(storage.path_of(key), (time.time() - age_s, time.time() - age_s))


def test_the_bound_holds_after_every_page(tmp_path: Path) -> None:
    storage = open_bounded(tmp_path, 10)
    for key in make_keys(40):
        assert storage.set([key], [[PAGE]]) == [True]
        assert pages_below(tmp_path) <= 10
    stats = storage.stats()
    assert stats.sets == 40
    assert stats.evicted == 40 - pages_below(tmp_path)
    assert stats.evicted_bytes == stats.evicted * FILE_BYTES
    assert stats.bytes_held == pages_below(tmp_path) * FILE_BYTES
    assert stats.max_bytes == 10 * FILE_BYTES
    assert pages_below(tmp_path) >= 8


def test_a_batch_may_be_larger_than_the_bound(tmp_path: Path) -> None:
    storage = open_bounded(tmp_path, 10)
    assert store(storage, make_keys(25)) == [True] * 25
    assert 8 <= pages_below(tmp_path) <= 10


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    storage = open_bounded(tmp_path, 10)
    old, used, young = (make_keys(3, first) for first in (0, 1000, 2000))
    for keys in (old, used, young):
        store(storage, keys)
    age(storage, old + used, 1000)
    age(storage, young, 500)
    assert all(page is not None for page in storage.get(used))
    store(storage, make_keys(4, 3000))
    assert storage.exists(old) == [False] * 3
    assert storage.exists(used + young) == [True] * 5 + [False]


def test_a_restart_counts_what_is_there(tmp_path: Path) -> None:
    store(open_bounded(tmp_path, 10), make_keys(10))
    again = open_bounded(tmp_path, 10)
    assert again.stats().bytes_held == 10 * FILE_BYTES
    store(again, make_keys(1, 1000))
    assert pages_below(tmp_path) <= 10


def test_a_lower_bound_is_kept_from_the_start(tmp_path: Path) -> None:
    unbounded = LocalFileStorage(tmp_path, SPACE)
    store(unbounded, make_keys(10))
    assert unbounded.stats().bytes_held == unbounded.stats().max_bytes == 0
    again = open_bounded(tmp_path, 4)
    assert pages_below(tmp_path) <= 4
    assert again.stats().evicted >= 6
    assert again.exists(make_keys(1)) == [True]


def test_all_page_sizes_of_a_model_count_and_other_models_do_not(tmp_path: Path) -> None:
    stranger = LocalFileStorage(tmp_path, replace(SPACE, model_id="another"))
    store(stranger, make_keys(10))
    other = LocalFileStorage(tmp_path, replace(SPACE, page_size=8))
    store(other, make_keys(10))
    age(other, make_keys(10), 1000)
    store(open_bounded(tmp_path, 12), make_keys(10, 1000))
    assert pages_below(other.folder.parent) <= 12
    assert stranger.exists(make_keys(10)) == [True] * 10


@pytest.mark.parametrize("by_storage", [True, False])
def test_pages_that_are_removed_make_room(tmp_path: Path, by_storage: bool) -> None:
    """By the storage, or by somebody else."""
    storage, keys = open_bounded(tmp_path, 4), make_keys(4)
    for _ in range(30):
        assert store(storage, keys) == [True] * 4
        if by_storage:
            assert storage.delete(keys) == [True] * 4
        else:
            for path in tmp_path.rglob("*.npy"):
                path.unlink()
    assert storage.stats().available
    assert storage.stats().write_errors == storage.stats().evicted == 0


def test_storing_the_same_page_again_takes_no_room(tmp_path: Path) -> None:
    storage, keys = open_bounded(tmp_path, 4), make_keys(4)
    for _ in range(20):
        assert store(storage, keys) == [True] * 4
    assert storage.stats().evicted == 0
    assert storage.stats().bytes_held == 4 * FILE_BYTES


def test_a_neighbour_without_a_bound_is_counted_in_the_end(tmp_path: Path) -> None:
    bounded, neighbour = open_bounded(tmp_path, 16), LocalFileStorage(tmp_path, SPACE)
    store(bounded, make_keys(1))
    store(neighbour, make_keys(30, 1000))
    age(neighbour, make_keys(30, 1000), 1000)
    for number in range(4):
        store(bounded, make_keys(1, 5000 + 10 * number))
    assert pages_below(tmp_path) <= 16


def test_two_storages_share_one_bound(tmp_path: Path) -> None:
    one, two = open_bounded(tmp_path, 10), open_bounded(tmp_path, 10)
    for number in range(30):
        for base, storage in ((0, one), (10_000, two)):
            assert store(storage, make_keys(1, base + 10 * number)) == [True]
            assert pages_below(tmp_path) <= 10
    assert one.stats().evicted + two.stats().evicted == 60 - pages_below(tmp_path)
    assert pages_below(tmp_path) >= 8


def test_a_page_that_is_being_written_is_counted(tmp_path: Path) -> None:
    """Scenario: one writer is in the middle of the tenth page, another makes room for its own."""
    ops = GatedOps()
    slow, fast = open_bounded(tmp_path, 10, ops), open_bounded(tmp_path, 10)
    store(fast, make_keys(9))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(store, slow, make_keys(1, 1000))
        assert ops.halfway.wait(WAIT_S)
        for number in range(5):
            assert store(fast, make_keys(1, 2000 + 10 * number)) == [True]
            assert len(list(tmp_path.rglob("*.npy"))) <= 9
        ops.gate.set()
        assert result.result(WAIT_S) == [True]
    assert pages_below(tmp_path) <= 10


WRITER = """
import sys
from pathlib import Path
from sgl_jax_hicache import overlay
overlay.activate()
sys.path.insert(0, {folder!r})
from test_bound import open_bounded, store
from bound_kit import FILE_BYTES, PAGE, open_bounded, pages_below, store
from storage_kit import make_keys
storage = open_bounded(Path({root!r}), 20)
print("ready", flush=True)
sys.stdin.readline()
failed = 0
for number in range({rounds}):
    failed += store(storage, make_keys(5, {base} + 100 * number)).count(False)
    storage.get(make_keys(5, {base} + 100 * (number - 1)))
print(failed, storage.stats().evicted, flush=True)
sys.stdin.readline()
"""


def start_writer(root: Path, base: int, rounds: int = 20) -> subprocess.Popen[str]:
    code = WRITER.format(
        folder=str(Path(__file__).parent), root=str(root), base=base, rounds=rounds
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_servers_on_one_directory_keep_it_together(tmp_path: Path) -> None:
    """Seen by a third at every moment; both are killed in the end."""
    writers = [start_writer(tmp_path, base) for base in (0, 100_000)]
    try:
        assert [line_of(writer) for writer in writers] == ["ready", "ready"]
        most, done = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            ledger = UsageLedger(tmp_path, "org%2Fmodel")
            while not done.is_set():
                with ledger.locked():  # else pages come and go while they are counted
                    most = max(most, pages_below(tmp_path))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for writer in writers:
            go_on(writer)
        results = [line_of(writer).split() for writer in writers]
        done.set()
        watcher.join(WAIT_S)
        assert [failed for failed, _ in results] == ["0", "0"]
        assert all(int(evicted) for _, evicted in results)
        assert 10 <= most <= 20
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate(timeout=WAIT_S)
    storage = open_bounded(tmp_path, 20)
    ledger = json.loads((tmp_path / "org%2Fmodel" / LEDGER_NAME).read_text())
    assert ledger["promised"] == {}
    assert ledger["held_bytes"] == pages_below(tmp_path) * FILE_BYTES == storage.stats().bytes_held
    storage.check_invariants()


def test_threads_of_one_storage_keep_it_too(tmp_path: Path) -> None:
    storage, start = open_bounded(tmp_path, 12), threading.Barrier(4)

    def work(number: int) -> int:
        start.wait(WAIT_S)
        keys = make_keys(60, 10_000 * number)
        return sum(storage.set([key], [[PAGE]]).count(False) for key in keys)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4
    assert pages_below(tmp_path) <= 12
    # A page may be counted twice, when a count sees it in the moment before its writer reports it; never too little.
    assert pages_below(tmp_path) <= storage.stats().bytes_held // FILE_BYTES <= 12
    assert storage.stats().evicted == 240 - pages_below(tmp_path)


def test_a_failed_write_gives_its_room_back(tmp_path: Path) -> None:
    ops = FailingOps(replace=errno.EIO)
    storage = open_bounded(tmp_path, 4, ops)
    for number in range(20):
        assert store(storage, make_keys(1, 10 * number)) == [False]
    ops.errors.clear()
    assert store(storage, make_keys(4, 5000)) == [True] * 4
    assert pages_below(tmp_path) == 4
    assert storage.stats().evicted == 0


def test_on_a_full_disk_old_pages_give_way_once(tmp_path: Path) -> None:
    """The disk has less room than the bound allows: a sixteenth of the bound goes, and the page is tried again."""

    class SmallDisk(FileOps):
        most = 6

        def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
            if pages_below(tmp_path) >= self.most:
                raise OSError(errno.ENOSPC, "injected")
            return super().writev(fd, buffers)

    disk = SmallDisk()
    storage = open_bounded(tmp_path, 32, disk)
    old = make_keys(6)
    store(storage, old)
    age(storage, old, 1000)
    new = make_keys(3, 1000)
    assert store(storage, new) == [True] * 3
    assert storage.exists(new) == [True] * 3
    assert storage.stats().available
    assert 0 < storage.stats().evicted <= 6
    disk.most = 0
    assert store(storage, make_keys(1, 2000)) == [False]
    assert not storage.stats().available
    unbounded = LocalFileStorage(tmp_path, SPACE, ops=disk)
    before = pages_below(tmp_path)
    assert store(unbounded, make_keys(1, 3000)) == [False]
    assert pages_below(tmp_path) == before, "without a bound nothing is removed"


def test_pages_that_free_nothing_do_not_all_give_way(tmp_path: Path) -> None:
    """Scenario: a backup made of hard links, or a snapshot, keeps the bytes of what is removed."""

    class FullDisk(FileOps):
        is_full = False

        def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "injected")
            return super().writev(fd, buffers)

    disk = FullDisk()
    storage = open_bounded(tmp_path, 64, disk)
    store(storage, make_keys(48))
    disk.is_full = True
    assert store(storage, make_keys(32, 1000)) == [False] * 32
    gone = storage.stats().evicted
    assert 0 < gone <= 5, "a sixteenth of the bound, once"
    disk.is_full = False
    assert store(storage, make_keys(1, 2000)) == [True]
    disk.is_full = True
    assert store(storage, make_keys(8, 3000)) == [False] * 8
    assert gone < storage.stats().evicted <= 2 * gone, "it is tried again after a write worked"


def test_an_empty_root_stays_empty(tmp_path: Path) -> None:
    storage = open_bounded(tmp_path / "root", 4)
    assert storage.get(make_keys(1)) == [None]
    storage.close()
    assert not (tmp_path / "root").exists()


def test_a_bound_below_one_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HiCacheConfigError, match=f"one page file has {FILE_BYTES} bytes"):
        LocalFileStorage(tmp_path, SPACE, max_bytes=FILE_BYTES - 1)
    storage = LocalFileStorage(tmp_path, SPACE, max_bytes=FILE_BYTES)
    assert store(storage, make_keys(3)) == [True] * 3
    assert pages_below(tmp_path) == 1


def test_the_flag_reaches_the_storage_and_a_kind_without_a_bound_is_refused(tmp_path: Path) -> None:
    storage = open_storage("file", tmp_path, SPACE, max_bytes=10 * FILE_BYTES)
    assert storage.stats().max_bytes == 10 * FILE_BYTES
    assert FileStorageFactory().bounded(5).max_bytes == 5  # type: ignore[attr-defined]
    plain = {**STORAGE_FACTORIES, "plain": lambda root, space: LocalFileStorage(Path(root), space)}
    assert open_storage("plain", tmp_path, SPACE, plain).stats().max_bytes == 0
    with pytest.raises(HiCacheConfigError, match="'plain' keeps no bound"):
        open_storage("plain", tmp_path, SPACE, plain, max_bytes=1)
