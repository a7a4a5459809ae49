"""`verify` and `gc`: what they find and remove, beside servers that read and write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tool_kit import FILE_BYTES, OTHER, PAGE_BYTES, SPACE, Tools, path_of, set_age, store_chain

from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.temp_file import TempNames
from sgl_jax.srt.mem_cache.hicache.storage.usage_ledger import LEDGER_NAME

WAIT_S = 60.0


def exists(root: Path, keys: list[bytes]) -> list[bool]:
    return LocalFileStorage(root, SPACE).exists(keys)  # type: ignore[arg-type]


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return damage


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_symlink(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "payload": (flip(-1), "payload is damaged"),
    "header": (flip(-PAGE_BYTES - 300), "header is damaged"),
    "numpy header": (flip(30), "numpy header"),
    "empty": (lambda path: os.truncate(path, 0), "not a page file"),
    "short": (lambda path: os.truncate(path, FILE_BYTES - 1), "numpy header"),
    "folder": (as_folder, "not a regular file"),
    "symlink": (as_symlink, "cannot be read"),
    "fifo": (as_fifo, "not a regular file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_names_what_is_damaged_and_ends_with_1(tools: Tools, root: Path, name: str) -> None:
    keys = store_chain(root, 5)
    damage, reason = DAMAGES[name]
    damage(path_of(root, keys[2]))
    ran = tools.run("verify")
    assert ran.status == 1
    (found,) = ran.data["damaged"]
    assert found["path"] == str(path_of(root, keys[2]))
    assert reason in found["reason"]
    assert not found["set_aside"]
    assert os.path.lexists(path_of(root, keys[2]))
    assert ran.data["files"] == 5
    text = tools.run("verify", as_json=False).out
    assert "5 files" in text
    assert "1 damaged" in text


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_moves_damage_out_of_the_way_if_asked(tools: Tools, root: Path, name: str) -> None:
    keys = store_chain(root, 5)
    DAMAGES[name][0](path_of(root, keys[2]))
    ran = tools.run("verify", "--quarantine")
    assert ran.status == 1
    assert ran.data["damaged"][0]["set_aside"]
    again = tools.run("verify")
    assert (again.status, again.data["damaged"], again.data["files"]) == (0, [], 4)
    assert exists(root, keys) == [True, True, False, True, True]


def test_verify_of_whole_files_ends_with_0(tools: Tools, root: Path) -> None:
    store_chain(root, 5)
    store_chain(root, 2, space=OTHER)
    ran = tools.run("verify")
    assert (ran.status, ran.data["files"], ran.data["damaged"]) == (0, 7, [])
    assert ran.data["bytes"] == sum(path.stat().st_size for path in root.rglob("*.npy"))
    assert "all are whole" in tools.run("verify", as_json=False).out


@pytest.mark.parametrize("place", ["key", "shard", "page size", "model"])
def test_verify_finds_whole_files_in_a_wrong_place(tools: Tools, root: Path, place: str) -> None:
    keys = store_chain(root, 2)
    store_chain(root, 1, space=replace(SPACE, page_size=8))
    store_chain(root, 1, space=replace(SPACE, model_id="another"))
    path = path_of(root, keys[0])
    shard = path.parent
    target = {
        "key": path_of(root, keys[1]),
        "shard": shard.with_name("00" if shard.name != "00" else "01") / path.name,
        "page size": shard.parent.with_name("8") / shard.name / path.name,
        "model": root / "another" / "4" / shard.name / path.name,
    }[place]
    target.parent.mkdir(exist_ok=True)
    shutil.copy(path, target)
    ran = tools.run("verify")
    assert [found["path"] for found in ran.data["damaged"]] == [str(target)]


def test_verify_leaves_strangers_alone(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 1)
    shard = path_of(root, keys[0]).parent
    (shard / "notes.txt").write_text("of somebody")
    (shard / TempNames().new(keys[0].hex())).write_bytes(b"half")
    (root / "notes.txt").write_text("of somebody")
    assert tools.run("verify", "--quarantine").status == 0
    assert (shard / "notes.txt").exists()


def test_gc_says_what_would_go_and_does_nothing(tools: Tools, root: Path) -> None:
    old = store_chain(root, 4, age_s=10_000)
    young = store_chain(root, 4, 1000, age_s=10)
    ran = tools.run("gc", "--max-bytes", str(5 * FILE_BYTES))
    plan = ran.data["plan"]
    assert ran.status == 0
    assert not ran.data["applied"]
    assert (plan["pages"], plan["freed_bytes"]) == (3, 3 * FILE_BYTES)
    assert (plan["held_bytes"], plan["bytes_after"]) == (8 * FILE_BYTES, 5 * FILE_BYTES)
    assert plan["folders"][0]["model"] == "org/model"
    assert exists(root, old + young) == [True] * 8
    text = tools.run("gc", "--max-bytes", str(5 * FILE_BYTES), as_json=False).out
    assert "3 of 8 pages to go" in text
    assert "Nothing was removed: add --apply." in text


def test_gc_frees_what_it_said_from_the_ends_of_the_oldest(tools: Tools, root: Path) -> None:
    old = store_chain(root, 4, age_s=10_000)
    young = store_chain(root, 4, 1000, age_s=10)
    ran = tools.run("gc", "--max-bytes", str(5 * FILE_BYTES), "--apply")
    assert ran.data["removed"] == {
        "pages": 3,
        "set_aside_files": 0,
        "left_over_files": 0,
        "bytes": 3 * FILE_BYTES,
        "failed": 0,
    }
    assert exists(root, old) == [True, False, False, False]
    assert exists(root, young) == [True] * 4
    assert "Removed 0 pages" in tools.run("gc", "--max-bytes", "1GiB", "--apply", as_json=False).out


def test_gc_by_age_keeps_what_a_younger_page_needs(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 4, age_s=10 * 86_400)
    other = store_chain(root, 2, 1000, age_s=10 * 86_400)
    set_age(root, keys[2:3], 60)
    ran = tools.run("gc", "--max-age", "7d", "--apply")
    assert ran.data["removed"]["pages"] == 3
    assert exists(root, keys + other) == [True, True, True, False, False, False]


def test_gc_of_one_model_leaves_the_others(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 3, age_s=100)
    store_chain(root, 3, age_s=10_000, space=OTHER)
    ran = tools.run("gc", "--model", "org/model", "--max-bytes", "0", "--apply")
    assert ran.data["removed"]["pages"] == 3
    assert exists(root, keys) == [False] * 3
    assert tools.run("ls", "--model", "another").data["models"][0]["pages"] == 3


def test_gc_sweeps_what_dead_writers_left(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 1)
    shard = path_of(root, keys[0]).parent
    living = TempNames().new(keys[0].hex())
    parts = living.split(".")
    left = shard / ".".join([parts[0], parts[1], "1", "999999999999", *parts[4:]])
    left.write_bytes(b"half")
    (shard / living).write_bytes(b"half")
    ran = tools.run("gc", "--max-bytes", "1GiB")
    assert ran.data["plan"]["left_over_files"] == 1
    assert left.exists()
    ran = tools.run("gc", "--max-bytes", "1GiB", "--apply")
    assert ran.data["removed"]["left_over_files"] == 1
    assert not left.exists()
    assert (shard / living).exists()


def test_a_server_with_a_bound_counts_anew_after_gc(tools: Tools, root: Path) -> None:
    """Else it would think the folder full and remove more."""
    server = LocalFileStorage(root, SPACE, max_bytes=8 * FILE_BYTES)
    keys = store_chain(root, 8, age_s=1000)
    server.close()
    server = LocalFileStorage(root, SPACE, max_bytes=8 * FILE_BYTES)
    assert server.stats().bytes_held == 8 * FILE_BYTES
    tools.run("gc", "--max-bytes", str(2 * FILE_BYTES), "--apply")
    ledger = json.loads((root / "org%2Fmodel" / LEDGER_NAME).read_text())
    assert ledger["held_bytes"] is None
    page = [np.zeros(PAGE_BYTES, np.uint8)]
    assert server.set(keys[2:8], [page] * 6) == [True] * 6
    assert server.stats().evicted == 0


def test_what_cannot_be_removed_is_told_and_ends_with_1(
    tools: Tools, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store_chain(root, 2, age_s=100)

    def refuse(name: str, *, dir_fd: int) -> None:
        raise PermissionError("injected")

    monkeypatch.setattr(os, "unlink", refuse)
    ran = tools.run("gc", "--max-bytes", "0", "--apply")
    assert ran.status == 1
    assert ran.data["removed"]["failed"] == 1, "the page before it is not even tried"
    assert exists(root, keys) == [True, True]


SERVER = """
import sys
from pathlib import Path
from sgl_jax_hicache import overlay
overlay.activate()
sys.path.insert(0, {folder!r})
import numpy as np
from tool_kit import SPACE, chain
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
storage = LocalFileStorage(Path({root!r}), SPACE)
print("ready", flush=True)
failed = wrong = hits = 0
for number in range(400):
    keys, pages, links = chain(6, 1000 * (number % 7))
    failed += storage.set_linked(keys, [[page] for page in pages], links).count(False)
    for found, page in zip(storage.get(keys), pages, strict=True):
        hits += found is not None
        wrong += found is not None and not np.array_equal(found, page)
print(failed, wrong, storage.stats().corrupt, hits, flush=True)
"""


def test_gc_and_verify_beside_a_server_that_writes_and_reads(tools: Tools, root: Path) -> None:
    """Another process stores and reads without a pause; it never sees a wrong page, an error or a damaged file."""
    code = SERVER.format(folder=str(Path(__file__).parent), root=str(root))
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == "ready"
        removed = rounds = 0
        while server.poll() is None:
            ran = tools.run("gc", "--max-bytes", str(10 * FILE_BYTES), "--apply")
            assert ran.status == 0
            removed += ran.data["removed"]["pages"]
            assert tools.run("verify").status == 0
            rounds += 1
        *faults, hits = server.stdout.readline().split()
        print(f"{rounds} rounds, {removed} pages removed, {hits} hits")
        assert faults == ["0", "0", "0"]
        assert int(hits) > 0
        assert removed > 0
    finally:
        server.kill()
        server.communicate(timeout=WAIT_S)
