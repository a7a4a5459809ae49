"""Writes from the host to storage: when, by which policy, and what happens when storage fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hybrid_checks import check_at_rest
from hybrid_pools import SWA, Mix
from hybrid_world import HybridWorld, Settings
from tree_steps import evict_all, fill_shelf, tokens
from tree_world import World, stored_keys

from sgl_jax.srt.mem_cache.hicache import controller
from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey


def test_write_through_and_back_writes_nothing_to_storage_until_it_must() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf)
    world.run(tokens(33))
    world.settle()
    assert not stored_keys(shelf)
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 8


def test_flush_stores_more_than_the_host_can_hold_at_once() -> None:
    shelf: dict = {}
    world = World(
        ratio=0.25, storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf
    )
    for i in range(3):
        world.run(tokens(17, 100 * (i + 1)))
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 12
    fresh = World(storage=StorageKind.FILE, shelf=shelf)
    assert [fresh.run(tokens(17, 100 * (i + 1))).storage for i in range(3)] == [16, 16, 16]


def test_a_prompt_longer_than_the_host_pool_is_stored_in_parts() -> None:
    shelf: dict = {}
    world = World(
        ratio=0.25, storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf
    )
    world.run(tokens(49))
    assert world.host_pool.num_pages == 4
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 12
    world.verify_at_rest()


def test_flush_ends_when_storage_takes_nothing() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, policy=WritePolicy.WRITE_THROUGH_AND_BACK, shelf=shelf)
    for storage in shelf.values():
        storage.set = lambda keys, pages: [False] * len(keys)
    world.run(tokens(33))
    assert not world.cache.flush_to_storage(10.0)
    world.verify_at_rest()


def test_storage_that_fails_never_stops_serving_and_is_tried_again() -> None:
    now = [0.0]
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, clock=lambda: now[0])
    (storage,) = shelf.values()
    storage.set, works = (lambda keys, pages: [False] * len(keys)), storage.set
    for i in range(1, 13):
        world.run(tokens(17, 100 * i))
        world.settle()
        world.verify()
    assert not stored_keys(shelf)
    storage.set = works
    world.run(tokens(17, 5000))
    world.settle()
    assert not stored_keys(shelf), "within the pause nothing is tried"
    now[0] = 100.0
    world.run(tokens(17, 6000))
    world.settle()
    assert stored_keys(shelf)
    world.verify_at_rest()


def test_a_storage_that_raises_is_a_counted_failure() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    (storage,) = shelf.values()

    def broken(*args: object) -> list[bool]:
        raise OSError("the disk is gone")

    storage.set = storage.get = storage.exists = broken
    for _ in range(2):
        world.run(tokens(33))
        evict_all(world)
    assert world.run(tokens(33)).host == 32
    world.verify_at_rest()


def test_what_storage_refused_once_is_written_again() -> None:
    now = [0.0]
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, clock=lambda: now[0])
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [*works(keys[:-1], pages[:-1]), False]
    world.run(tokens(17))
    world.settle()
    assert len(stored_keys(shelf)) == 3
    storage.set = works
    for _ in range(3):
        now[0] += 10.0
        world.cache.check_hicache_events()
    assert len(stored_keys(shelf)) == 4
    world.verify_at_rest()


def test_what_storage_refused_is_written_again_when_its_node_was_cut_since() -> None:
    world = HybridWorld(Settings(Mix(window=10)))
    windows = world.component(SWA).host
    world.shelf(SWA).refuse_sets = True
    world.run(tokens(33))
    world.settle()
    for num_shared in (28, 24, 20, 12):
        world.match([*tokens(num_shared), 900])
    assert (windows.num_pages, windows.num_stored()) == (8, 0)
    world.shelf(SWA).heal()
    for _ in range(3):
        world.now_s += 40.0
        world.cache.check_hicache_events()
        world.settle()
    assert windows.num_stored() == 8
    check_at_rest(world)


def test_pages_backed_up_during_a_pause_are_written_after_it() -> None:
    now = [0.0]
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, clock=lambda: now[0])
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [False] * len(keys)
    world.run(tokens(17))
    world.settle()
    storage.set = works
    world.run(tokens(17, 500))
    world.settle()
    assert not stored_keys(shelf)
    for _ in range(3):
        now[0] += 10.0
        world.cache.check_hicache_events()
    assert len(stored_keys(shelf)) == 8
    world.verify_at_rest()


def test_flush_tries_a_storage_that_has_just_failed() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [False] * len(keys)
    world.run(tokens(17))
    world.settle()
    storage.set = works
    assert world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 4


def test_one_page_that_cannot_be_written_does_not_stop_the_others() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf, device_pages=64)
    (storage,) = shelf.values()
    works = storage.set
    storage.set = lambda keys, pages: [False, *works(keys[1:], pages[1:])]
    for i in range(1, 6):
        world.run(tokens(17, 100 * i))
        world.settle()
    assert len(stored_keys(shelf)) == 15


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_page_that_makes_a_storage_raise_does_not_keep_a_flush_from_writing_the_others(
    policy: WritePolicy,
) -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, policy=policy, shelf=shelf, device_pages=32)
    (storage,) = shelf.values()
    works, bad = storage.set, tokens(17)
    (bad_key, *_) = world.tree.keys.hasher(None).chain(None, world.cache._codec.encode(bad[:16]))

    def set_or_raise(keys: Sequence[bytes], pages: Sequence[Any]) -> list[bool]:
        if bad_key in keys:
            raise MemoryError("no room for this page")
        return works(keys, pages)

    storage.set = set_or_raise
    for token_ids in (bad, tokens(33, 500), tokens(33, 900)):
        world.run(token_ids)
    assert not world.cache.flush_to_storage(10.0)
    assert len(stored_keys(shelf)) == 8 + 8
    world.verify_at_rest()


def test_answers_of_a_storage_are_never_taken_for_other_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two calls the first answers for a page too many, the second for one too few."""
    monkeypatch.setattr(controller, "STORAGE_BATCH_PAGES", 2)
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    (storage,) = shelf.values()
    answers = [[True] * 3, [False]]
    storage.set = lambda keys, pages: answers.pop(0)
    world.run(tokens(17))
    world.settle()
    assert world.tree.full.host.num_stored() == 0


def test_a_hung_read_does_not_keep_a_flush_from_writing() -> None:
    may_read = threading.Event()
    shelf: dict = {}
    fill_shelf(shelf, tokens(17))
    world = World(
        storage=StorageKind.FILE,
        policy=WritePolicy.WRITE_THROUGH_AND_BACK,
        shelf=shelf,
        async_impl=AsyncImpl.THREADPOOL,
    )
    (storage,) = shelf.values()
    reads = storage.exists

    def hang(keys: list) -> list[bool]:
        assert may_read.wait(60.0)
        return reads(keys)

    storage.exists = hang
    world.cache.start_prefetch("r", RadixKey(tokens(16), None, 0))
    world.run(tokens(33, 500), prefetch=False)
    try:
        assert world.cache.flush_to_storage(30.0)
        assert len(stored_keys(shelf)) == 4 + 8
    finally:
        may_read.set()
    world.verify_at_rest()
    assert world.cache.shutdown(30.0)


def test_what_ended_before_a_shutdown_is_in_the_metrics() -> None:
    shelf: dict = {}
    world = World(storage=StorageKind.FILE, shelf=shelf)
    world.run(tokens(33), prefetch=False)
    world.executor.run_all()  # the backup
    world.cache.check_hicache_events()
    world.executor.run_all()  # the store; nothing polls after it
    assert len(stored_keys(shelf)) == 8

    def num_written() -> float | None:
        labels = {"component": "full", "outcome": "written"}
        return world.registry.get_sample_value("sglang:hicache_storage_writes_total", labels)

    assert num_written() == 0
    assert world.cache.shutdown(1.0)
    assert num_written() == 8
