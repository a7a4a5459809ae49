"""Several processes on one storage, some of them killed: what is visible is whole, what is left over is swept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from storage_kit import SPACE, WAIT_S, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import PageFileFormat
from sgl_jax.srt.mem_cache.hicache.storage.sweep import SweepResult, sweep_stale_temps
from sgl_jax.srt.mem_cache.hicache.storage.temp_file import (
    FOREIGN_MAX_AGE_S,
    TempNames,
    Writer,
    is_stale,
    parse_writer,
    this_writer,
)

KEYS = make_keys(32)


@contextmanager
def writer(root: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """A writer process; it is dead when the block ends."""
    bootstrap = (
        "import runpy, sys; from sgl_jax_hicache import overlay; overlay.activate();"
        f"sys.argv = ['writer', {str(root)!r}, {what!r}];"
        f"runpy.run_path({str(Path(__file__).with_name('writer_process.py'))!r}, run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def temps(root: Path) -> list[Path]:
    return sorted(root.rglob("*.tmp"))


def test_two_processes_on_one_key_have_no_errors(tmp_path: Path) -> None:
    with writer(tmp_path, "200") as one, writer(tmp_path, "200") as two:
        outputs = [process.communicate(timeout=60)[0].split() for process in (one, two)]
    assert outputs == [["0", "0"], ["0", "0"]]
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.check_invariants()
    np.testing.assert_array_equal(storage.get(KEYS[:1])[0], make_page(0))
    assert temps(tmp_path) == []


def test_ten_writers_killed_anywhere_in_a_file(tmp_path: Path) -> None:
    """Before the first byte, in the header, in the payload, before the rename. A live writer's half-written file
    outlives every sweep, those of the killed ones do not."""
    file_bytes = PageFileFormat(SPACE).file_bytes
    with writer(tmp_path, "stop:1000") as live:
        assert first_line(live) == "stopped"
        (live_temp,) = temps(tmp_path)
        for num_bytes in (0, 1, 64, 255, 500, 703, 704, 1200, file_bytes - 1, file_bytes):
            with writer(tmp_path, f"stop:{num_bytes}") as doomed:
                assert first_line(doomed) == "stopped"
                assert LocalFileStorage(tmp_path, SPACE).stats().stale_temps_removed == 0
                doomed.kill()
                doomed.wait(WAIT_S)
            assert len(temps(tmp_path)) == 2
            storage = LocalFileStorage(tmp_path, SPACE)
            assert storage.stats().stale_temps_removed == 1
            assert temps(tmp_path) == [live_temp]
            assert storage.exists(KEYS) == [False] * 32
            storage.check_invariants()
        finished, _ = live.communicate("go on\n", timeout=WAIT_S)
    assert finished.strip() == "[True]"
    assert temps(tmp_path) == []
    np.testing.assert_array_equal(storage.get(KEYS[:1])[0], make_page(0))


def test_writers_killed_in_full_flight_leave_only_whole_pages(tmp_path: Path) -> None:
    for num_rounds in (1, 2, 3):
        with writer(tmp_path, "forever") as doomed:
            for number in range(num_rounds):
                assert first_line(doomed) == f"round {number}"
            doomed.kill()
            doomed.wait(WAIT_S)
        storage = LocalFileStorage(tmp_path, SPACE)
        storage.check_invariants()
        assert temps(tmp_path) == []
        for number, found in enumerate(storage.get(KEYS)):
            if found is not None:
                np.testing.assert_array_equal(found, make_page(number))


def test_a_full_disk_in_another_process(tmp_path: Path) -> None:
    """The kernel itself refuses the rest of the file (SIGXFSZ is ignored by Python)."""
    with writer(tmp_path, "limited") as process:
        output = process.communicate(timeout=WAIT_S)[0]
    assert output.split() == ["[False]", "1"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_names_tell_their_writer() -> None:
    names = TempNames()
    one, two = names.new("ab" * 32), names.new("ab" * 32)
    assert one != two
    assert TempNames().new("ab" * 32) not in (one, two)
    assert parse_writer(one) == this_writer()
    assert this_writer().pid == os.getpid()
    for foreign in ("notes.txt", "x.tmp", f"{'ab' * 32}.npy", one + "x", one[1:]):
        assert parse_writer(foreign) is None


def test_who_is_stale() -> None:
    here = this_writer()
    assert not is_stale(here, 0.0, here)
    if here.start:
        reused_pid = Writer(here.host, here.pid, here.start + 1)
        assert is_stale(reused_pid, 4e9, here)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(WAIT_S)
    assert is_stale(Writer(here.host, dead.pid, 1), 4e9, here)


@pytest.mark.parametrize(
    ("age_s", "stale"),
    [(0, False), (FOREIGN_MAX_AGE_S + 60, True), (-FOREIGN_MAX_AGE_S - 60, True)],
)
def test_another_machine_is_judged_by_age(tmp_path: Path, age_s: float, stale: bool) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(KEYS[:1], [[make_page(0)]])
    shard = storage.path_of(KEYS[0]).parent
    name = TempNames().new(KEYS[0].hex()).replace(this_writer().host, "0" * 12)
    path = shard / name
    path.write_bytes(b"half")
    modified_s = path.stat().st_mtime - age_s
    os.utime(path, (modified_s, modified_s))
    assert LocalFileStorage(tmp_path, SPACE).stats().stale_temps_removed == int(stale)
    assert path.exists() is not stale


def test_a_sweep_is_bounded_and_touches_nothing_else(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE)
    storage.set(KEYS, [[make_page(i)] for i in range(32)])
    here = this_writer()
    stale = TempNames().new(KEYS[0].hex()).replace(f".{here.pid}.{here.start}.", ".1.999999999999.")
    shard = storage.path_of(KEYS[0]).parent
    kept = [shard / "notes.tmp", tmp_path / stale, shard.parent / stale]
    for path in [*kept, shard / stale]:
        path.write_bytes(b"half")
    fd = os.open(storage.folder, os.O_RDONLY)
    try:
        assert sweep_stale_temps(fd, max_entries=0).removed == 0
        assert sweep_stale_temps(fd) == SweepResult(removed=1, pages=32)
    finally:
        os.close(fd)
    assert all(path.exists() for path in kept)
    assert storage.exists(KEYS) == [True] * 32
