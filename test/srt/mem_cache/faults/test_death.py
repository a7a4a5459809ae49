"""SIGKILL at any moment of writing, two servers on one directory: nothing stored is lost, nothing wrong is read."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from nursery import NUM_CHURNED, NUM_PAGES
from nursery_client import Writer, open_nursery
from soak_figures import Figures
from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.storage.folders import QUARANTINE
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage

SIGKILLED = -9
KEYS = make_keys(NUM_PAGES)
KEPT = set(range(NUM_PAGES - NUM_CHURNED))
LAST_CALL = 80
"""A page takes five calls at which a writer can die, six or seven with fsync; so these are the first dozen pages."""


def verify(root: Path, stored: set[int]) -> LocalFileStorage:
    """Every visible file is whole, every page that was ever stored and never deleted is there, bit for bit."""
    storage = LocalFileStorage(root, SPACE)
    storage.check_invariants()
    for i, found in enumerate(storage.get(KEYS)):
        if found is not None:
            np.testing.assert_array_equal(found, make_page(i))
        assert found is not None or i not in stored & KEPT, f"page {i} was stored and is lost"
    assert storage.stats().corrupt == 0
    assert not (storage.folder / QUARANTINE).exists()
    return storage


def temps(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


def die_at_every_call(
    folder: Path, rng: random.Random, figures: Figures, go_on: Callable[[int], bool]
) -> None:
    """One writer after the other, each killed at a random call of the operating system."""
    root, stored, kills = folder / "root", set[int](), 0
    with open_nursery(folder) as nursery:
        while go_on(kills):
            writer = nursery.start(root, rng.getrandbits(32), rng.randrange(1, LAST_CALL))
            assert writer.wait() == SIGKILLED
            assert writer.faults == []
            stored |= writer.stored
            assert len(temps(root)) <= 1
            left = len(temps(root))
            assert verify(root, stored).stats().stale_temps_removed == left
            assert temps(root) == []
            kills += 1
            figures.add(kills=1, operations=len(writer.lines))
    assert stored


def kill_one_of_two(
    folder: Path, rng: random.Random, figures: Figures, go_on: Callable[[int], bool]
) -> None:
    """Two writers at all times on one directory, and third parties that open and so sweep it; one is killed again and
    again, wherever it is."""
    root, stored, kills = folder / "root", set[int](), 0

    def end(writer: Writer) -> None:
        assert writer.kill() == SIGKILLED
        assert writer.faults == []
        stored.update(writer.stored)
        figures.add(kills=1, operations=len(writer.lines))

    with open_nursery(folder) as nursery:
        writers = [nursery.start(root, rng.getrandbits(32)) for _ in range(2)]
        while go_on(kills):
            place = rng.randrange(2)
            victim = writers[place]
            victim.wait_lines(rng.randrange(1, 40))
            end(victim)
            writers[place] = nursery.start(root, rng.getrandbits(32))
            verify(root, stored)  # sweeps while the other one writes
            kills += 1
        for writer in writers:
            end(writer)
        verify(root, stored)
    assert temps(root) == []
    assert stored >= KEPT or kills < 50


@pytest.fixture
def dice(seed: int) -> random.Random:
    return random.Random(seed)


def test_a_writer_killed_at_any_call_loses_nothing_it_stored(
    tmp_path: Path, dice: random.Random, figures: Figures
) -> None:
    die_at_every_call(tmp_path, dice, figures, lambda kills: kills < 40)


def test_two_servers_on_one_directory_one_of_them_killed_again_and_again(
    tmp_path: Path, dice: random.Random, figures: Figures
) -> None:
    kill_one_of_two(tmp_path, dice, figures, lambda kills: kills < 20)


@pytest.mark.soak
@pytest.mark.parametrize("history", [die_at_every_call, kill_one_of_two])
def test_hundreds_of_kills(
    history: Callable[..., None],
    tmp_path: Path,
    dice: random.Random,
    figures: Figures,
    soak_seconds: float,
) -> None:
    """At least 200 kills each, and more for as long as there is time."""
    end_s = time.monotonic() + soak_seconds
    history(tmp_path, dice, figures, lambda kills: kills < 200 or time.monotonic() < end_s)
