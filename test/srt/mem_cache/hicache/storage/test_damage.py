"""Whatever stands in a page's place and is not the page: a miss, counted, out of the way, and never a hang."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from storage_kit import SPACE, FailingOps, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.errors import InvariantError
from sgl_jax.srt.mem_cache.hicache.storage.folders import QUARANTINE, QUARANTINE_MAX_FILES
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage

KEYS = make_keys(3)
PAGES = [make_page(i) for i in range(3)]


@pytest.fixture
def storage(tmp_path: Path) -> LocalFileStorage:
    storage = LocalFileStorage(tmp_path / "root", SPACE)
    assert storage.set(KEYS, [[page] for page in PAGES]) == [True] * 3
    return storage


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def truncate(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, num_bytes)


def zero_payload(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1000] + bytes(1000))


def zero_file(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def other_key(path: Path) -> None:
    name = f"{KEYS[0].hex()}.npy"
    shutil.copy(path.parent.parent / name[:2] / name, path)


def other_namespace(path: Path) -> None:
    """Same key, same sizes, another dtype."""
    foreign = LocalFileStorage(path.parents[3], replace(SPACE, kv_dtype="float16"))
    path.unlink()
    assert foreign.set([KEYS[1]], [[PAGES[1]]]) == [True]
    assert path.exists()


def pickle(path: Path) -> None:
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.".ljust(path.stat().st_size, b"."))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_folder(path: Path) -> None:
    folder(path)
    (path / "something").write_text("of somebody")


def symlink_to_a_good_page(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def dangling_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/somewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the path may be longer than a socket address can be
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
        Path("s").rename(path.name)
    finally:
        os.chdir(here)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "numpy magic": flip(0),
    "numpy header": flip(20),
    "record magic": flip(-1256),
    "format version": flip(-1248),
    "checksum kind": flip(-1244),
    "checksum": flip(-1230),
    "key": flip(-1220),
    "namespace": flip(-1190),
    "layout": flip(-1160),
    "page size": flip(-1127),
    "payload bytes": flip(-1118),
    "dtype": flip(-1110),
    "model id": flip(-1090),
    "header crc": flip(-1002),
    "first payload byte": flip(-1000),
    "last payload byte": flip(-1),
    "empty": truncate(0),
    "header only": truncate(700),
    "half": truncate(1000),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte long": extend,
    "zero payload": zero_payload,
    "zeroes": zero_file,
    "page of another key": other_key,
    "page of another namespace": other_namespace,
    "pickle": pickle,
    "folder": folder,
    "full folder": full_folder,
    "symlink to a good page": symlink_to_a_good_page,
    "dangling symlink": dangling_symlink,
    "fifo": fifo,
    "socket": unix_socket,
}


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
