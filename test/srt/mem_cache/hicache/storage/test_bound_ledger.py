"""The ledger of a bound: what each writer was promised, and what neighbours, dead ones too, do to it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from bound_kit import FILE_BYTES, PAGE, open_bounded, pages_below, store
from storage_kit import SPACE, WAIT_S, make_keys

from sgl_jax.srt.mem_cache.hicache.storage import bound
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.usage_ledger import LEDGER_NAME, UsageLedger, promise


def test_no_page_goes_for_room_that_is_promised_away(tmp_path: Path) -> None:
    """Scenario: a neighbour with a bound 512 times as large was promised as much as this bound is."""
    neighbour = LocalFileStorage(tmp_path, SPACE, max_bytes=512 * 8 * FILE_BYTES)
    assert store(neighbour, make_keys(6)) == [True] * 6
    storage = open_bounded(tmp_path, 8)
    assert store(storage, make_keys(3, 1000)) == [False] * 3
    assert pages_below(tmp_path) == 6
    assert store(neighbour, make_keys(4, 2000)) == [True] * 4
    assert store(storage, make_keys(1, 3000)) == [False]
    assert 0 < pages_below(tmp_path) <= 8, "the lowest bound is kept all the same"
    neighbour.close()
    assert store(storage, make_keys(3, 4000)) == [True] * 3
    assert pages_below(tmp_path) <= 8


@pytest.mark.parametrize("when", ["NaN", "4102444800.0", "1e300", "-1e300", "0"])
def test_a_promise_of_another_machine_with_a_senseless_time_is_taken_back(
    tmp_path: Path, when: str
) -> None:
    ledger = UsageLedger(tmp_path, "org%2Fmodel")
    with ledger.locked():
        pass
    name = f"{'0' * 12}.7.1.{'ab' * 4}"
    text = f'{{"held_bytes": 0, "promised": {{"{name}": [{4 * FILE_BYTES}, {when}]}}}}'
    (tmp_path / "org%2Fmodel" / LEDGER_NAME).write_text(text)
    storage = open_bounded(tmp_path, 4)
    assert store(storage, make_keys(4)) == [True] * 4


def test_nothing_that_can_go_is_an_error_and_no_overflow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario: another writer was promised all that is left, and lives."""
    ledger = UsageLedger(tmp_path, "org%2Fmodel")
    storage = open_bounded(tmp_path, 4)
    with ledger.locked() as usage:
        usage.promised[ledger.me] = promise(4 * FILE_BYTES)
    with caplog.at_level(logging.WARNING):
        assert store(storage, make_keys(3)) == [False] * 3
    assert "nothing of it can go" in caplog.text
    assert len(caplog.records) == 2, "once for the bound, once for the storage"
    assert storage.stats().write_errors == 3
    assert pages_below(tmp_path) == 0
    with ledger.locked() as usage:
        del usage.promised[ledger.me]
    assert store(storage, make_keys(3)) == [True] * 3


def test_the_promise_to_a_dead_writer_is_taken_back(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(WAIT_S)
    ledger = UsageLedger(tmp_path, "org%2Fmodel")
    with ledger.locked() as usage:
        host = ledger.me.split(".")[0]
        usage.promised[f"{host}.{dead.pid}.1.{'ab' * 4}"] = promise(4 * FILE_BYTES)
        usage.promised["what is this"] = promise(4 * FILE_BYTES)
    storage = open_bounded(tmp_path, 4)
    assert store(storage, make_keys(4)) == [True] * 4
    assert storage.stats().evicted == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b"\0" * 99,
        b'{"held_bytes": -1, "promised": {}}',
        b'{"held_bytes": 0, "promised": {"%b": [-1e9, 0]}}',
        b'{"held_bytes": 0, "promised": {"%b": [1e999, 0]}}',
        b'{"held_bytes": 0, "promised": {"%b": [NaN, 0]}}',
    ],
    ids=lambda content: content[-36:].decode(),
)
def test_a_damaged_ledger_is_counted_anew(tmp_path: Path, content: bytes) -> None:
    storage = open_bounded(tmp_path, 6)
    store(storage, make_keys(6))
    somebody_alive = UsageLedger(tmp_path, "org%2Fmodel").me.encode()
    damaged = content.replace(b"%b", somebody_alive)
    (tmp_path / "org%2Fmodel" / LEDGER_NAME).write_bytes(damaged)
    for number in range(6):
        assert store(storage, make_keys(1, 1000 + 10 * number)) == [True]
        assert pages_below(tmp_path) <= 6


def test_a_neighbour_that_hangs_with_the_ledger_keeps_nobody_from_starting_or_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bound, "START_WAIT_S", 0.1)
    monkeypatch.setattr(bound, "CLOSE_WAIT_S", 0.1)
    assert store(open_bounded(tmp_path, 4), make_keys(4)) == [True] * 4

    def start_and_end() -> None:
        storage = open_bounded(tmp_path, 2)
        np.testing.assert_array_equal(storage.get(make_keys(1))[0], PAGE)
        storage.close()

    thread = threading.Thread(target=start_and_end, daemon=True)
    with UsageLedger(tmp_path, "org%2Fmodel").locked():
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert "cannot be counted" in caplog.text
        late = open_bounded(tmp_path, 2)
    assert pages_below(tmp_path) == 4
    assert store(late, make_keys(1, 1000)) == [True]
    assert pages_below(tmp_path) <= 2


@pytest.mark.parametrize("kind", ["folder", "symlink", "fifo"])
def test_a_ledger_that_is_no_file_stops_writing_and_not_reading(tmp_path: Path, kind: str) -> None:
    """Writing without it could fill the disk."""
    storage, keys = open_bounded(tmp_path, 6), make_keys(2)
    store(storage, keys)
    ledger, target = tmp_path / "org%2Fmodel" / LEDGER_NAME, tmp_path / "target"
    ledger.unlink()
    target.write_text("of somebody")
    {
        "folder": ledger.mkdir,
        "symlink": lambda: ledger.symlink_to(target),
        "fifo": lambda: os.mkfifo(ledger),
    }[kind]()
    assert False in store(storage, make_keys(8, 1000))
    assert target.read_text() == "of somebody"
    np.testing.assert_array_equal(storage.get(keys[:1])[0], PAGE)
    assert pages_below(tmp_path) <= 6


@pytest.mark.parametrize("umask", [0, 0o777])
def test_the_ledger_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store(open_bounded(tmp_path, 6), make_keys(1))
    finally:
        os.umask(before)
    assert (tmp_path / "org%2Fmodel" / LEDGER_NAME).stat().st_mode & 0o777 == 0o600


def test_closing_gives_the_promise_back(tmp_path: Path) -> None:
    storage = LocalFileStorage(tmp_path, SPACE, max_bytes=2000 * FILE_BYTES)
    store(storage, make_keys(2))
    path = tmp_path / "org%2Fmodel" / LEDGER_NAME
    (entry,) = json.loads(path.read_text())["promised"].values()
    assert entry[0] == 2000 * FILE_BYTES // 512
    storage.close()
    assert json.loads(path.read_text()) == {"held_bytes": 2 * FILE_BYTES, "promised": {}}
