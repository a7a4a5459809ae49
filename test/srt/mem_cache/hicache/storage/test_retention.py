"""What goes when room is made: unused for longest first, always the end of a chain, never what is in use."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from storage_kit import SPACE, make_keys, make_links, make_page

from sgl_jax.srt.mem_cache.hicache.storage import inventory as inventory_module
from sgl_jax.srt.mem_cache.hicache.storage.chains import (
    SETTLED_AFTER_S,
    LinkReader,
    is_cut_off,
    last_use,
    parent_rows,
    removal_order,
)
from sgl_jax.srt.mem_cache.hicache.storage.inventory import take_inventory
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import PageFileFormat
from sgl_jax.srt.mem_cache.hicache.storage.page_io import USE_NOTED_FOR_S
from sgl_jax.srt.mem_cache.hicache.storage.retention import RemovalPlan, carry_out, plan_removal
from sgl_jax.srt.mem_cache.hicache.storage.temp_file import TempNames
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink

FILE_BYTES = PageFileFormat(SPACE).file_bytes


def store_chain(
    storage: LocalFileStorage, num_pages: int, first_token: int = 0, age_s: float = 0.0
) -> list[PageKey]:
    """The pages of one prompt, last used that long ago."""
    keys = make_keys(num_pages, first_token)
    pages = [[make_page(i)] for i in range(num_pages)]
    assert storage.set_linked(keys, pages, make_links(keys)) == [True] * num_pages
    for key in keys:
        set_age(storage, key, age_s)
    return keys


def set_age(storage: LocalFileStorage, key: PageKey, age_s: float) -> None:
    then_s = time.time() - age_s
    os.utime(storage.path_of(key), (then_s, then_s))


def plan(root: Path, max_pages: int | None = None, max_age_s: float | None = None) -> RemovalPlan:
    return plan_removal(
        take_inventory(root),
        LinkReader(),
        max_bytes=None if max_pages is None else max_pages * FILE_BYTES,
        unused_since_ns=None if max_age_s is None else time.time_ns() - int(max_age_s * 1e9),
    )


@pytest.fixture
def storage(tmp_path: Path) -> LocalFileStorage:
    return LocalFileStorage(tmp_path, SPACE)


def test_the_least_recently_used_chain_goes_first_from_its_end(storage: LocalFileStorage) -> None:
    old = store_chain(storage, 4, 0, age_s=1000)
    young = store_chain(storage, 4, 1000, age_s=500)
    removal = carry_out(plan(storage.root, max_pages=6))
    assert (removal.pages, removal.num_bytes, removal.failed) == (2, 2 * FILE_BYTES, 0)
    assert storage.exists(old) == [True, True, False, False]
    assert storage.exists(young) == [True] * 4


def test_a_page_is_as_young_as_the_youngest_behind_it(storage: LocalFileStorage) -> None:
    """A system prompt that nobody reads from files any more stays while a conversation on it does."""
    keys = store_chain(storage, 5, 0, age_s=10_000)
    set_age(storage, keys[4], 10)
    other = store_chain(storage, 2, 1000, age_s=5000)
    carry_out(plan(storage.root, max_pages=5))
    assert storage.exists(keys) == [True] * 5
    assert storage.exists(other) == [False, False]
    carry_out(plan(storage.root, max_pages=3))
    assert storage.exists(keys) == [True, True, True, False, False]


def test_what_is_behind_a_missing_page_goes_first(storage: LocalFileStorage) -> None:
    """No reader gets behind the hole: what is there goes first, however young, and keeps nothing before it alive."""
    keys = store_chain(storage, 5, 0, age_s=10_000)
    set_age(storage, keys[4], 2 * SETTLED_AFTER_S)
    storage.delete([keys[2]])
    carry_out(plan(storage.root, max_pages=3))
    assert storage.exists(keys) == [True, True, False, True, False]
    carry_out(plan(storage.root, max_pages=1))
    assert storage.exists(keys) == [True, False, False, False, False]


def test_a_page_whose_parent_is_still_to_come_is_not_cut_off(storage: LocalFileStorage) -> None:
    """Scenario: two workers write; the page of a window is there before the Full page that it hangs off."""
    old = store_chain(storage, 2, 0, age_s=1000)
    keys = make_keys(3, 5000)
    storage.set_linked(keys[2:], [[make_page(0)]], make_links(keys)[2:])
    carry_out(plan(storage.root, max_pages=2))
    assert storage.exists(old) == [True, False]
    assert storage.exists(keys[2:]) == [True]


def test_pages_whose_links_lead_in_a_circle_go_first(storage: LocalFileStorage) -> None:
    keys = store_chain(storage, 2, 0, age_s=1000)
    one, two = PageKey(b"1" * 32), PageKey(b"2" * 32)
    pages = [[make_page(0)]] * 2
    storage.set_linked([one, two], pages, [PageLink(two, 9), PageLink(one, 9)])
    for key in (one, two):
        set_age(storage, key, 2 * SETTLED_AFTER_S)
    carry_out(plan(storage.root, max_pages=2))
    assert storage.exists([one, two]) == [False, False]
    assert storage.exists(keys) == [True, True]


def test_age_alone_removes_what_is_too_old(storage: LocalFileStorage) -> None:
    old = store_chain(storage, 3, 0, age_s=1000)
    young = store_chain(storage, 3, 1000, age_s=10)
    removal = carry_out(plan(storage.root, max_age_s=100))
    assert removal.pages == 3
    assert storage.exists(old + young) == [False] * 3 + [True] * 3
    assert carry_out(plan(storage.root, max_age_s=100)).pages == 0


def test_a_plan_says_what_carrying_it_out_does(storage: LocalFileStorage) -> None:
    store_chain(storage, 3, 0, age_s=1000)
    store_chain(storage, 3, 1000, age_s=10)
    for limits in ({}, {"max_pages": 6}, {"max_pages": 1}, {"max_pages": 0}, {"max_age_s": 100.0}):
        made = plan(storage.root, **limits)  # type: ignore[arg-type]
        expected = {"max_pages": {6: 0, 1: 5, 0: 6}, "max_age_s": {100.0: 3}}
        ((name, value),) = limits.items() if limits else (("", None),)
        assert made.pages_to_go == (expected[name][value] if limits else 0)  # type: ignore[index]


def test_a_page_used_after_the_plan_stays_and_keeps_its_chain(storage: LocalFileStorage) -> None:
    """Scenario: `gc` has looked; then a server reads a page; then `gc` removes."""
    keys = store_chain(storage, 4, 0, age_s=1000)
    other = store_chain(storage, 4, 1000, age_s=500)
    made = plan(storage.root, max_pages=4)
    assert storage.get([keys[2]])[0] is not None
    removal = carry_out(made)
    assert storage.exists(keys) == [True, True, True, False]
    assert storage.exists(other) == [True, False, False, False]
    assert removal.pages == 4


def test_a_page_written_behind_an_old_one_after_the_plan_keeps_the_chain(
    storage: LocalFileStorage,
) -> None:
    keys = make_keys(4)
    store_chain(storage, 3, 0, age_s=1000)
    made = plan(storage.root, max_pages=0)
    assert storage.set_linked([keys[3]], [[make_page(3)]], [PageLink(keys[2], 3)]) == [True]
    carry_out(made)
    assert storage.exists(keys) == [True] * 4


def test_a_page_that_cannot_be_removed_does_not_stop_the_others(
    storage: LocalFileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store_chain(storage, 3, 0, age_s=1000)
    other = store_chain(storage, 3, 1000, age_s=500)
    unlink, stuck = os.unlink, f"{keys[1].hex()}.npy"

    def refuse(name: str, *, dir_fd: int) -> None:
        if name == stuck:
            raise PermissionError("injected")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(inventory_module.os, "unlink", refuse)
    removal = carry_out(plan(storage.root, max_pages=3))
    assert (removal.pages, removal.failed) == (3, 1)
    assert storage.exists(keys) == [True, True, False]
    assert storage.exists(other) == [True, False, False]


def test_what_was_set_aside_goes_before_any_page(storage: LocalFileStorage) -> None:
    keys = store_chain(storage, 4, 0)
    storage.path_of(keys[3]).write_bytes(bytes(storage.path_of(keys[3]).stat().st_size))
    assert storage.get([keys[3]]) == [None]
    assert take_inventory(storage.root).quarantined_bytes == FILE_BYTES
    removal = carry_out(plan(storage.root, max_pages=3))
    assert (removal.pages, removal.other_files) == (0, 1)
    assert storage.exists(keys) == [True, True, True, False]


def test_reading_and_storing_again_make_a_page_young(storage: LocalFileStorage) -> None:
    keys = store_chain(storage, 3, 0, age_s=10 * USE_NOTED_FOR_S)
    before = [storage.path_of(key).stat().st_mtime for key in keys]
    assert storage.get([keys[0]])[0] is not None
    assert storage.set([keys[1]], [[make_page(1)]]) == [True]
    assert storage.exists([keys[2]]) == [True]
    after = [storage.path_of(key).stat().st_mtime for key in keys]
    assert [b < a for b, a in zip(before, after, strict=True)] == [True, True, False]


def test_a_page_in_steady_use_is_not_marked_each_time(storage: LocalFileStorage) -> None:
    (key,) = store_chain(storage, 1, 0, age_s=USE_NOTED_FOR_S / 2)
    before = storage.path_of(key).stat().st_mtime
    assert storage.get([key])[0] is not None
    assert storage.path_of(key).stat().st_mtime == before


def test_a_time_in_the_future_is_now(storage: LocalFileStorage) -> None:
    keys = store_chain(storage, 2, 0, age_s=-(10**6))
    found = take_inventory(storage.root)
    assert (found.used_ns <= time.time_ns()).all()
    assert carry_out(plan(storage.root, max_pages=0)).pages == 2
    assert storage.exists(keys) == [False, False]


def test_the_inventory_counts_what_is_ours_and_nothing_else(storage: LocalFileStorage) -> None:
    keys = store_chain(storage, 3, 0)
    other_size = LocalFileStorage(storage.root, replace(SPACE, page_size=8))
    other_size.set(make_keys(1, 500), [[make_page(0)]])
    shard = storage.path_of(keys[0]).parent
    temp = TempNames().new(keys[0].hex())
    (shard / temp).write_bytes(b"half")
    here = temp.split(".")
    (shard / ".".join([here[0], here[1], "1", "999999999999", *here[4:]])).write_bytes(b"left")
    (shard / "notes.txt").write_text("of somebody")
    (shard / f"{'ab' * 32}.npy").symlink_to(storage.path_of(keys[0]))
    (shard / f"{'cd' * 32}.npy").mkdir()
    (storage.folder / "notes").mkdir()
    (storage.root / "elsewhere").symlink_to(storage.root / "org%2Fmodel")
    found = take_inventory(storage.root)
    assert [folder.names for folder in found.folders] == [
        ("org%2Fmodel", "4"),
        ("org%2Fmodel", "8"),
    ]
    assert sorted(found.key(row) for row in range(3)) == sorted(keys)
    assert found.num_bytes.tolist() == [FILE_BYTES] * 4
    assert found.page_bytes == 4 * FILE_BYTES
    assert found.folder_of.tolist() == [0, 0, 0, 1]
    assert [len(found.writing), len(found.stale), len(found.quarantined)] == [1, 1, 0]
    assert len(take_inventory(storage.root, ("nothing",))) == 0


def test_an_empty_inventory_has_empty_columns(tmp_path: Path) -> None:
    found = take_inventory(tmp_path)
    links = LinkReader().read(found)
    assert len(parent_rows(links)) == len(found.used_ns) == 0
    assert carry_out(plan(tmp_path, max_pages=0)).pages == 0


def test_headers_are_read_once(storage: LocalFileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = store_chain(storage, 3, 0)
    reader = LinkReader()
    first = reader.read(take_inventory(storage.root))
    more = store_chain(storage, 2, 1000)
    asked: list[int] = []
    second = reader.read(take_inventory(storage.root), asked.append)
    assert asked == [1, 1, 3]
    assert sorted(first.index.tolist()) == [0, 1, 2]
    assert sorted(second.index.tolist()) == [0, 0, 1, 1, 2]
    assert len(keys) + len(more) == 5


def naive_last_use(parents: list[int], used: list[int]) -> list[int]:
    """Walk up from every page."""
    last = list(used)
    for row in range(len(used)):
        above = parents[row]
        while above >= 0:
            last[above] = max(last[above], used[row])
            above = parents[above]
    return last


def test_random_forests_against_a_walk_from_every_page(rng: np.random.Generator) -> None:
    for num_pages in (1, 2, 10, 300):
        parents, index = [-1], [0]
        for row in range(1, num_pages):
            above = int(rng.integers(-1, row))
            parents.append(above)
            index.append(index[above] + 1 if above >= 0 else int(rng.integers(-1, 3)))
        used = rng.integers(0, 50, num_pages)
        columns = np.array(index, np.int64), np.array(parents, np.int64)
        last = last_use(*columns, used)
        assert last.tolist() == naive_last_use(parents, used.tolist())
        place = np.empty(num_pages, np.int64)
        since_ns = int(rng.integers(0, 50))
        place[removal_order(*columns, last, unused_since_ns=since_ns, now_ns=10**12)] = np.arange(
            num_pages
        )
        cut_off = is_cut_off(*columns)
        for row, above in enumerate(parents):
            assert above < 0 or place[row] < place[above], "a page before one that follows it"
            assert cut_off[row] == (cut_off[above] if above >= 0 else index[row] > 0)
        assert (np.sort(place[last < since_ns]) == np.arange((last < since_ns).sum())).all()
