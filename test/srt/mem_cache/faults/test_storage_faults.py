"""Faults of file storages that have no test beside the part they lie in; docs/faults.md says which is which."""

from __future__ import annotations

import ast
import os
from collections import Counter
from pathlib import Path

import pytest
from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.sweep import shard_name
from sgl_jax_hicache import overlay

HICACHE = overlay.tree_root() / "sgl_jax/srt/mem_cache/hicache"
IO_MODULES = sorted([*(HICACHE / "storage").rglob("*.py"), HICACHE / "async_impl.py"])


def test_no_folder_gets_more_than_its_share_of_the_pages() -> None:
    """Fault 68: a folder of millions of files stops accepting more."""
    num_pages = 20_000
    shares = Counter(map(shard_name, make_keys(num_pages)))
    assert len(shares) == 256
    assert max(shares.values()) < 2 * num_pages / 256


def test_no_call_lists_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 69: a look-up whose cost grows with all files ever written."""
    storage = LocalFileStorage(tmp_path / "root", SPACE)
    keys, pages = make_keys(4), [[make_page(i)] for i in range(4)]

    def refuse(*_args: object) -> list[str]:
        raise AssertionError("a folder is listed")

    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir"):
            patched.setattr(os, name, refuse)
        assert storage.set(keys[:3], pages[:3]) == [True] * 3
        assert storage.exists(keys) == [True, True, True, False]
        assert [page is not None for page in storage.get(keys)] == [True, True, True, False]
        assert storage.delete(keys) == [True, True, True, False]


def asserts_in(source: str) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def test_what_comes_from_a_disk_is_never_asserted() -> None:
    """Fault 82: an assert makes an expected event, a file that is gone, the end of the server (and not with -O)."""
    assert len(IO_MODULES) > 10
    assert {path.name: asserts_in(path.read_text()) for path in IO_MODULES} == {
        path.name: [] for path in IO_MODULES
    }
    assert asserts_in("def f(x):\n    assert x\n") == [2]


def test_arrays_are_placed_by_the_transfer_modules_alone() -> None:
    """Fault 105: a device_put of a host-local array to a sharding over all processes gathers it everywhere; so placing
    arrays is the business of few modules, which name one device or the sharding that an array has."""
    places = {
        path.relative_to(HICACHE).as_posix()
        for path in HICACHE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("device_put")
    }
    assert places <= {"host_memory.py", "page_programs.py", "transfer.py", "device_buffers.py"}
    assert places
