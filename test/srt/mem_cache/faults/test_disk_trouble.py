"""Disks that fill up, turn read-only, go away or stop answering under a running server: serving goes on, the state is
shown in /metrics and in the log once, and writing resumes by itself."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from another_user import NOBODY
from engine_fakes import VOCAB_SIZE
from tier_world import WAIT_S, tier_world

from sgl_jax.srt.mem_cache.hicache.config import WritePolicy
from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps

LATER_S = 3600.0
"""Longer than any pause between tries."""


@contextmanager
def mounted_disk(path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "none", str(path)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    with mounted_disk(tmp_path / "disk") as path:
        yield path


def fill(disk: Path) -> None:
    """Not a byte more fits."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            with pytest.raises(OSError, match="No space left"):
                all(filler.write(bytes(size)) for _ in itertools.count())


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def replace_root_by_a_file(disk: Path) -> None:
    shutil.rmtree(disk / "root")
    (disk / "root").write_text("not a folder")


@dataclass(frozen=True)
class Trouble:
    """What happens to the disk, how it ends, and whether what was stored can be read meanwhile."""

    begin: Callable[[Path], None]
    end: Callable[[Path], None]
    readable: bool
    said: str


TROUBLES = {
    "full": Trouble(fill, lambda disk: (disk / "filler").unlink(), True, "No space left"),
    "read-only": Trouble(
        lambda disk: remount(disk, "ro"), lambda disk: remount(disk, "rw"), True, "Read-only"
    ),
    "root is a file": Trouble(
        replace_root_by_a_file, lambda disk: (disk / "root").unlink(), False, "Not a directory"
    ),
    "root of somebody else": Trouble(
        lambda disk: os.chown(disk / "root", NOBODY, NOBODY),
        lambda disk: os.chown(disk / "root", 0, 0),
        False,
        "belongs to another user",
    ),
}


def prompts(seed: int, count: int, length: int = 41) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("policy", WritePolicy, ids=lambda policy: policy.value)
@pytest.mark.parametrize("name", TROUBLES)
def test_a_disk_in_trouble_costs_hits_and_nothing_else(
    disk: Path, seed: int, caplog: pytest.LogCaptureFixture, name: str, policy: WritePolicy
) -> None:
    trouble = TROUBLES[name]
    before, *during, after = prompts(seed, 8)
    caplog.set_level(logging.WARNING)

    def said(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    with tier_world(disk / "root", policy=policy) as world:
        world.ask(before)
        world.forget()
        assert world.ask(before) == {"storage": 40, "computed": 1}
        assert world.metric("storage_available", component="full") == 1
        trouble.begin(disk)
        for prompt in during:
            world.clock.advance(LATER_S)  # every one of them tries to write
            world.ask(prompt)
            world.forget()
        assert world.metric("storage_writes_total", component="full", outcome="error") > 0
        assert world.metric("storage_available", component="full") == 0
        assert said("cannot be written to") == 1, caplog.text
        assert trouble.said in caplog.text
        assert said("can be written to again") == 0
        again = world.ask(before)
        assert again == ({"storage": 40, "computed": 1} if trouble.readable else {"computed": 41})
        assert list(disk.rglob("*.tmp")) == []

        trouble.end(disk)
        world.clock.advance(LATER_S)
        world.ask(after)
        world.forget()
        assert world.metric("storage_available", component="full") == 1
        assert world.ask(after) == {"storage": 40, "computed": 1}
        assert said("can be written to again") == 1
        assert said("cannot be written to") == 1
        world.storage.check_invariants()


@pytest.mark.parametrize("levels_up", [0, 1, 2], ids=["root", "model", "pages"])
def test_a_folder_removed_under_a_running_server_is_made_again(
    tmp_path: Path, seed: int, levels_up: int
) -> None:
    first, second = prompts(seed, 2)
    with tier_world(tmp_path / "root") as world:
        world.ask(first)
        world.forget()
        folder = [tmp_path / "root", world.storage.folder.parent, world.storage.folder][levels_up]
        shutil.rmtree(folder)
        assert world.ask(first) == {"computed": 41}
        world.ask(second)
        world.forget()
        for prompt in (first, second):
            assert world.ask(prompt) == {"storage": 40, "computed": 1}
        assert world.metric("storage_available", component="full") == 1
        assert folder.stat().st_mode & 0o777 == 0o700


class SlowOps(FileOps):
    """A disk that stops answering to one kind of call until the gate opens."""

    def __init__(self, call: str) -> None:
        self._call = call
        self.gate = threading.Event()
        self.gate.set()
        self.stuck = threading.Event()

    def _wait(self, call: str) -> None:
        if call == self._call and not self.gate.is_set():
            self.stuck.set()
            if not self.gate.wait(WAIT_S):
                self.gate.set()  # the next call need not wait to find that out
                raise TimeoutError("the gate never opened")

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self._wait("read")
        return super().readv(fd, buffers)

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self._wait("write")
        return super().writev(fd, buffers)


def test_a_disk_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(
    tmp_path: Path, seed: int
) -> None:
    (prompt,) = prompts(seed, 1)
    ops = SlowOps("read")
    with tier_world(tmp_path / "root", ops=ops, prefetch_deadline_s=5.0) as world:
        world.ask(prompt)
        world.forget()
        ops.gate.clear()
        answered = threading.Event()

        def time_passes() -> None:
            assert ops.stuck.wait(WAIT_S)
            while not answered.is_set():
                world.clock.advance(1.0)

        passing = threading.Thread(target=time_passes)
        passing.start()
        try:
            assert world.ask(prompt) == {"computed": 41}
        finally:
            answered.set()
            passing.join(WAIT_S)
        assert world.metric("prefetch_timeouts_total") == 1
        assert world.engine.get_server_info()["state"]["pending_transfers"]
        ops.gate.set()
        world.settle()  # and `close` finds nothing held by the late read
        world.forget()
        assert world.ask(prompt) == {"storage": 40, "computed": 1}


def test_writes_that_do_not_end_hold_up_neither_answers_nor_hits(tmp_path: Path, seed: int) -> None:
    first, *others = prompts(seed, 6)
    ops = SlowOps("write")
    with tier_world(tmp_path / "root", ops=ops, ratio=4.0) as world:
        world.ask(first)
        world.forget()
        ops.gate.clear()
        for prompt in others:
            world.ask(prompt)
        assert ops.stuck.wait(WAIT_S)
        assert sum(n for tier, n in world.ask(first).items() if tier != "computed") == 40
        assert not world.engine.flush_cache(0.0), "a flush says that it cannot finish"
        ops.gate.set()
        world.settle()
        world.storage.check_invariants()
