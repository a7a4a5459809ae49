"""Where a storage may live: checked at start, refused in one clear line; and model names as folders."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest
from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.storage.folders import safe_name
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.storage.registry import STORAGE_FACTORIES, open_storage
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root

MODEL_IDS = [
    "", ".", "..", "...", "/", "/abs", "../x", "x/..", "a/b", "a-b", "a_b", "a--b", "a%2Fb", "a%b",
    "%empty", "%2E", ".hidden", "hidden", "a\0b", "a\nb", " ", "ä", "\ud800", "a\\b", "C:", "~", "A", "a",
    "x" * 160, "x" * 161, "x" * 5000, "x" * 4999 + "y", "/" * 100, "ü" * 200,
    "x" * 80 + "%sha256-" + "0" * 64,
]  # fmt: skip


def refusal(root: str | Path) -> str:
    with pytest.raises(HiCacheConfigError) as caught:
        prepare_root(root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_root_is_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = prepare_root(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert root == tmp_path / "a" / "b"
    for path in (root, root.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert list(root.iterdir()) == [], "the probe is gone"
    assert prepare_root(root) == root


def test_a_path_of_very_many_folders_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert "cannot be created" in refusal(file.joinpath(*["x"] * 1500))
    assert file.read_text() == "precious"


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare_root("~/cache") == tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    assert prepare_root("relative") == tmp_path / "relative"
    assert "give an absolute path" in refusal("~no-such-user-here/x")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert f"{str(file)!r} is not a folder" in refusal(file)
    assert "cannot be created" in refusal(file / "below")
    assert file.read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"is a symbolic link: give its target, {tmp_path}" in refusal(tmp_path / "link")
    assert "empty" in refusal("")
    assert "cannot be created" in refusal("nul\0byte")
    assert "cannot be created" in refusal("/proc/no-folder-can-be-made-here/x")


def test_a_root_behind_a_linked_parent_is_fine(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    prepare_root(tmp_path / "link" / "root")
    assert (tmp_path / "disk" / "root").is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_root_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    assert f"mode {mode:04o}" in refusal(root)
    root.chmod(0o755)
    assert prepare_root(root) == root


def test_a_root_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # nothing stops root but the file system itself
        assert "cannot be used" in refusal(f"/proc/{os.getpid()}")
        return
    root = tmp_path / "root"
    root.mkdir(0o500)
    assert "Permission denied" in refusal(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_root_of_another_user_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(0o700)
    os.chown(root, 12345, 12345)
    assert "belongs to user 12345" in refusal(root)


def test_model_names_are_distinct_safe_components() -> None:
    names = {model_id: safe_name(model_id) for model_id in MODEL_IDS}
    for (id_a, a), (id_b, b) in itertools.combinations(names.items(), 2):
        assert a != b, (id_a, id_b)
    for name in names.values():
        assert 0 < len(name.encode()) <= 160
        assert not set(name) & set("/\\\0\n ")
        assert not name.startswith(".")
    assert names["a/b"] == "a%2Fb"
    assert names["a_b"] == "a_b"


@pytest.mark.parametrize("model_id", MODEL_IDS, ids=range(len(MODEL_IDS)))
def test_no_model_name_leaves_the_root(tmp_path: Path, model_id: str) -> None:
    space = StorageNamespace(model_id, "v", 4, "float32", "layout", 16)
    storage = LocalFileStorage(tmp_path / "root", space)
    key = make_keys(1)
    assert storage.set(key, [[make_page(1, 16)]]) == [True]
    assert storage.get(key)[0] is not None
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    (folder,) = (tmp_path / "root").iterdir()
    assert [path.name for path in folder.iterdir()] == ["4"]


def test_storages_are_opened_by_name(tmp_path: Path) -> None:
    storage = open_storage("file", tmp_path / "root", SPACE)
    assert isinstance(storage, LocalFileStorage)
    assert (tmp_path / "root").is_dir()
    with pytest.raises(HiCacheConfigError, match=r"'tape' is not one of \['file'\]"):
        open_storage("tape", tmp_path, SPACE)

    def open_memory(root: str | Path, namespace: StorageNamespace) -> HiCacheStorage:
        return MemoryStorage(namespace)

    more = {**STORAGE_FACTORIES, "memory": open_memory}
    assert isinstance(open_storage("memory", tmp_path, SPACE, more), MemoryStorage)
