"""The controller over real buffers and both executors: one suite, same behaviour."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_fakes import PAGE_SIZE, Rig, make_rig

from sgl_jax.srt.mem_cache.hicache.async_impl import TransferExecutor, create_executor
from sgl_jax.srt.mem_cache.hicache.controller import ComponentIO, HiCacheController
from sgl_jax.srt.mem_cache.hicache.errors import (
    InvariantError,
    PageStateError,
    StorageUnavailableError,
)
from sgl_jax.srt.mem_cache.hicache.host_pool.base import HostKVPool
from sgl_jax.srt.mem_cache.hicache.host_pool.registry import create_host_pool
from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher, StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.storage_backoff import StorageBackoff
from sgl_jax.srt.mem_cache.hicache.storage_census import StorageCensus
from sgl_jax.srt.mem_cache.hicache.storage_mount import StorageMount
from sgl_jax.srt.mem_cache.hicache.storage_query import StorageQuery
from sgl_jax.srt.mem_cache.hicache.types import (
    ComponentKind,
    LookupResult,
    PageKey,
    TransferKind,
    TransferResult,
)

FULL = ComponentKind.FULL
TIMEOUT_S = 60.0
NUM_HOST_PAGES = 8


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


class GatedStorage(MemoryStorage):
    """Writes and reads wait for their gates."""

    def __init__(self, namespace: StorageNamespace) -> None:
        super().__init__(namespace)
        self.may_set, self.may_get = threading.Event(), threading.Event()
        self.may_set.set()
        self.may_get.set()

    def set(self, keys: Sequence[PageKey], pages: Sequence[Any]) -> list[bool]:
        assert self.may_set.wait(TIMEOUT_S)
        return super().set(keys, pages)

    def get(self, keys: Sequence[PageKey]) -> list[Any]:
        assert self.may_get.wait(TIMEOUT_S)
        return super().get(keys)


@dataclass
class Bench:
    """A controller and everything under it."""

    rig: Rig
    pool: HostKVPool
    storage: GatedStorage
    executor: TransferExecutor
    controller: HiCacheController

    def alloc(self, num_pages: int) -> np.ndarray:
        host_pages = self.pool.alloc(num_pages)
        assert host_pages is not None
        return host_pages

    def settled(self) -> list[Any]:
        """Everything that is under way, ended."""
        assert self.controller.drain(TIMEOUT_S)
        return self.controller.poll()

    def back_up(self, device_pages: np.ndarray) -> np.ndarray:
        host_pages = self.alloc(len(device_pages))
        self.controller.write(FULL, host_pages, device_pages)
        assert [r.ok for r in self.settled()] == [True]
        return host_pages

    def bytes_of(self, host_pages: np.ndarray) -> np.ndarray:
        payloads = self.pool.read_bytes(host_pages)
        return np.stack(
            [np.concatenate([np.ravel(p).view(np.uint8) for p in parts]) for parts in payloads]
        )

    def content(self, device_pages: np.ndarray) -> np.ndarray:
        return np.concatenate([layer[device_pages] for layer in self.rig.contents], axis=1)


@pytest.fixture(params=["threadpool", "future"])
def executor(request: pytest.FixtureRequest) -> Iterator[TransferExecutor]:
    made = create_executor(request.param)
    yield made
    assert made.shutdown(TIMEOUT_S)


@pytest.fixture(params=["per_block", "slab"])
def bench(
    request: pytest.FixtureRequest, executor: TransferExecutor, rng: np.random.Generator
) -> Iterator[Bench]:
    rig = make_rig(rng, 12, [((PAGE_SIZE, 6), np.float32), ((PAGE_SIZE, 2), np.float32)])
    pool = create_host_pool(request.param, NUM_HOST_PAGES, rig.layout, rig.transfer.host_memory())
    namespace = StorageNamespace(
        "m", "v", PAGE_SIZE, "float32", rig.layout.layout_id, rig.layout.page_bytes
    )
    storage = GatedStorage(namespace)
    io = ComponentIO(rig.transfer, pool)
    census = StorageCensus({FULL: storage})
    made = Bench(
        rig,
        pool,
        storage,
        executor,
        HiCacheController(
            {FULL: io},
            executor,
            max_backup_bytes=1 << 20,
            mount=StorageMount(Path("anywhere"), 0, {FULL: storage}, census),
        ),
    )
    yield made
    storage.may_set.set()
    storage.may_get.set()
    assert made.controller.drain(TIMEOUT_S)
    made.controller.poll()
    made.controller.check_invariants()
    census.close()


def keys_of(bench: Bench, num_pages: int) -> list[PageKey]:
    tokens = np.arange(num_pages * PAGE_SIZE, dtype="<i8").tobytes()
    return PageHasher(bench.storage.namespace, None).chain(None, tokens)


def ask(bench: Bench, tokens: bytes) -> StorageQuery:
    hasher = PageHasher(bench.storage.namespace, None)
    return StorageQuery(hasher=hasher, first_page=0, parent=None, tokens=tokens)


def test_a_page_goes_down_and_up_again_bit_for_bit(bench: Bench) -> None:
    sources, targets = pages(3, 1, 7), pages(2, 9, 4)
    host_pages = bench.back_up(sources)
    np.testing.assert_array_equal(bench.bytes_of(host_pages), bench.content(sources))
    load = bench.controller.load(FULL, targets, host_pages)
    assert bench.controller.wait(load, TIMEOUT_S)
    np.testing.assert_array_equal(bench.rig.now()[0], bench.rig.contents[0]), "not yet in place"
    bench.controller.commit_load(FULL, load)
    for now, before in zip(bench.rig.now(), bench.rig.contents, strict=True):
        np.testing.assert_array_equal(now[targets], before[sources])
        untouched = [row for row in range(1, 12) if row not in targets]
        np.testing.assert_array_equal(now[untouched], before[untouched])


def test_collected_writes_are_one_transfer_that_begins_when_it_is_told_to(bench: Bench) -> None:
    controller, first, second = bench.controller, bench.alloc(2), bench.alloc(1)
    controller.collect_write(FULL, first, pages(3, 1))
    controller.collect_write(FULL, second, pages(7))
    assert controller.num_in_flight == 2
    assert bench.pool.is_locked(np.concatenate([first, second])).all()
    assert bench.settled() == [], "nothing has begun"
    controller.start_writes()
    (result,) = bench.settled()
    assert result.host_pages == (*first.tolist(), *second.tolist())
    assert result.ok
    np.testing.assert_array_equal(bench.bytes_of(first), bench.content(pages(3, 1)))
    np.testing.assert_array_equal(bench.bytes_of(second), bench.content(pages(7)))
    controller.start_writes()
    assert bench.settled() == [], "each once"


def test_a_page_given_up_before_its_collected_write_began_is_freed_after_it(bench: Bench) -> None:
    kept, given_up = bench.alloc(1), bench.alloc(1)
    bench.controller.collect_write(FULL, given_up, pages(1))
    bench.controller.collect_write(FULL, kept, pages(2))
    bench.controller.evict_callback(FULL, given_up)
    others = bench.alloc(NUM_HOST_PAGES - 2)
    assert not set(others.tolist()) & set(given_up.tolist()), "nobody else may get it yet"
    bench.controller.start_writes()
    bench.settled()
    np.testing.assert_array_equal(bench.bytes_of(kept), bench.content(pages(2)))
    assert bench.pool.num_free == 1


def test_compiling_leaves_no_host_memory_behind(bench: Bench) -> None:
    empty = bench.pool.host_bytes
    bench.controller.precompile()
    assert bench.pool.host_bytes == empty
    assert bench.pool.num_free == NUM_HOST_PAGES


def test_a_backup_has_the_content_of_the_moment_it_was_submitted(bench: Bench) -> None:
    host_pages = bench.alloc(1)
    bench.controller.write(FULL, host_pages, pages(5))
    overwrite = np.zeros((1, bench.rig.layout.page_bytes), np.uint8)
    bench.controller.load_cpu_copy(FULL, overwrite, pages(5))
    bench.settled()
    np.testing.assert_array_equal(bench.bytes_of(host_pages), bench.content(pages(5)))


def test_a_load_is_committed_only_when_it_is_complete_and_only_once(bench: Bench) -> None:
    load = bench.controller.load(FULL, pages(2), bench.back_up(pages(3)))
    with pytest.raises(InvariantError):
        bench.controller.commit_load(FULL, load)
    assert bench.controller.wait(load, TIMEOUT_S)
    bench.controller.commit_load(FULL, load)
    with pytest.raises(InvariantError):
        bench.controller.commit_load(FULL, load)


def test_pages_in_flight_can_be_neither_freed_nor_evicted(bench: Bench) -> None:
    host_pages = bench.back_up(pages(1, 2))
    bench.storage.may_set.clear()
    bench.controller.store(FULL, host_pages, keys_of(bench, 2))
    with pytest.raises(PageStateError):
        bench.pool.free(host_pages)
    assert len(bench.pool.evict(2)) == 0
    assert bench.controller.poll() == []
    bench.controller.check_invariants()
    bench.storage.may_set.set()
    (result,) = bench.settled()
    assert result.ok and result.kind is TransferKind.STORE
    assert sorted(bench.pool.evict(2)) == sorted(host_pages)


def test_pages_that_are_loaded_are_locked_until_the_load_is_settled(bench: Bench) -> None:
    host_pages = bench.back_up(pages(1, 2))
    load = bench.controller.load(FULL, pages(5, 6), host_pages)
    with pytest.raises(PageStateError):
        bench.pool.free(host_pages)
    assert len(bench.pool.evict(2)) == 0
    bench.controller.check_invariants()
    assert bench.controller.wait(load, TIMEOUT_S)
    assert sorted(bench.pool.evict(2)) == sorted(host_pages)


def test_pages_given_up_in_flight_are_freed_when_their_last_transfer_ends(bench: Bench) -> None:
    host_pages = bench.back_up(pages(1, 2, 3))
    bench.storage.may_set.clear()
    bench.controller.store(FULL, host_pages[:2], keys_of(bench, 2))
    bench.controller.evict_callback(FULL, host_pages)
    assert bench.pool.num_free == NUM_HOST_PAGES - 2, "the page that nothing holds is free at once"
    bench.controller.check_invariants()
    bench.storage.may_set.set()
    bench.settled()
    assert bench.pool.num_free == NUM_HOST_PAGES
    assert all(bench.storage.exists(keys_of(bench, 2)))


def test_store_look_up_and_fetch_bring_the_same_bytes(bench: Bench) -> None:
    stored = bench.back_up(pages(4, 5, 6))
    page_keys = keys_of(bench, 3)
    bench.controller.store(FULL, stored, page_keys)
    bench.settled()
    tokens = np.arange(4 * PAGE_SIZE, dtype="<i8").tobytes()
    lookup = bench.controller.lookup(ask(bench, tokens))
    (found,) = bench.settled()
    assert isinstance(found, LookupResult)
    assert (found.transfer_id, found.num_asked) == (lookup, len(page_keys) + 1)
    assert found.found == {FULL: dict(enumerate(page_keys))}
    fetched = bench.alloc(3)
    bench.controller.fetch(FULL, page_keys, fetched)
    (result,) = bench.settled()
    assert result.ok and bench.pool.is_ready(fetched).all()
    np.testing.assert_array_equal(bench.bytes_of(fetched), bench.content(pages(4, 5, 6)))


def test_a_fetch_keeps_only_the_pages_before_the_first_miss(bench: Bench) -> None:
    page_keys = keys_of(bench, 4)
    bench.controller.store(FULL, bench.back_up(pages(1, 2, 3, 4)), page_keys)
    bench.settled()
    bench.storage.delete([page_keys[2]])
    fetched = bench.alloc(4)
    bench.controller.fetch(FULL, page_keys, fetched)
    (result,) = bench.settled()
    assert result.ok_pages == (True, True, False, False)
    assert bench.pool.is_ready(fetched).tolist() == [True, True, False, False]
    bench.controller.evict_callback(FULL, fetched)
    assert bench.pool.num_free == NUM_HOST_PAGES - 4


def test_a_stalled_write_does_not_hold_up_reads(bench: Bench) -> None:
    page_keys = keys_of(bench, 2)
    bench.controller.store(FULL, bench.back_up(pages(1)), page_keys[:1])
    bench.settled()
    bench.storage.may_set.clear()
    for device_page in (2, 3):
        host_pages = bench.alloc(1)
        backup = bench.controller.write(FULL, host_pages, pages(device_page))
        assert bench.controller.wait(backup, TIMEOUT_S)
        bench.controller.store(FULL, host_pages, page_keys[1:])
    fetch = bench.controller.fetch(FULL, page_keys[:1], bench.alloc(1))
    assert bench.controller.wait(fetch, TIMEOUT_S)
    assert fetch.result is not None and fetch.result.ok


def test_waiting_ends_at_its_limit_and_the_result_comes_later(bench: Bench) -> None:
    bench.storage.may_get.clear()
    fetch = bench.controller.fetch(FULL, keys_of(bench, 1), bench.alloc(1))
    assert not bench.controller.wait(fetch, 0.01)
    assert not fetch.done()
    assert not bench.controller.drain(0.01)
    bench.storage.may_get.set()
    (result,) = bench.settled()
    assert fetch.result == result


def test_a_result_is_handed_out_once_also_after_it_was_waited_for(bench: Bench) -> None:
    backup = bench.controller.write(FULL, bench.alloc(1), pages(1))
    assert bench.controller.wait(backup, TIMEOUT_S)
    assert [r.transfer_id for r in bench.controller.poll()] == [backup.transfer_id]
    assert bench.controller.poll() == []
    assert bench.controller.num_in_flight == 0


def test_failures_are_values_and_leave_nothing_locked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> Any:
        raise RuntimeError("out of memory")

    host_pages = bench.back_up(pages(1))
    with monkeypatch.context() as patch:
        for name in ("gather", "to_host", "to_device"):
            patch.setattr(bench.rig.transfer, name, broken)
        bench.controller.load(FULL, pages(2), host_pages)
        bench.controller.write(FULL, bench.alloc(1), pages(3))
        results = bench.settled()
        patch.undo()
        patch.setattr(bench.rig.transfer, "to_host", broken)
        bench.controller.write(FULL, bench.alloc(1), pages(3))
        patch.setattr(bench.storage, "set", broken)
        patch.setattr(bench.storage, "exists", broken)
        bench.controller.store(FULL, host_pages, keys_of(bench, 1))
        tokens = np.arange(PAGE_SIZE, dtype="<i8").tobytes()
        bench.controller.lookup(ask(bench, tokens))
        results += bench.settled()
    assert len(results) == 5
    assert all("out of memory" in (result.error or "") for result in results)
    assert not any(r.ok for r in results if isinstance(r, TransferResult))
    assert bench.pool.num_locked == 0
    assert not bench.controller.storage_writable(FULL), "a failed write pauses the storage"


def test_backups_waiting_on_the_device_are_bounded(bench: Bench) -> None:
    small = HiCacheController(
        {FULL: ComponentIO(bench.rig.transfer, bench.pool)},
        bench.executor,
        max_backup_bytes=2 * bench.rig.layout.page_bytes,
    )
    assert small.backup_fits(FULL, 3), "one that is larger than the bound goes alone"
    backup = small.write(FULL, bench.alloc(1), pages(1))
    assert small.backup_fits(FULL, 1)
    assert not small.backup_fits(FULL, 2)
    assert small.wait(backup, TIMEOUT_S)
    assert small.backup_fits(FULL, 2)
    small.poll()


def test_without_a_storage_nothing_can_be_stored(bench: Bench) -> None:
    controller = HiCacheController(
        {FULL: ComponentIO(bench.rig.transfer, bench.pool)}, bench.executor, max_backup_bytes=1
    )
    host_pages = bench.back_up(pages(1))
    assert controller.mount is None and not controller.storage_writable(FULL)
    with pytest.raises(StorageUnavailableError):
        controller.store(FULL, host_pages, keys_of(bench, 1))
    assert bench.pool.num_locked == 0


def test_diagnosis_reads_and_writes_rows(bench: Bench) -> None:
    copies = bench.controller.get_cpu_copy(FULL, pages(3, 8))
    np.testing.assert_array_equal(copies, bench.content(pages(3, 8)))
    bench.controller.load_cpu_copy(FULL, copies, pages(1, 2))
    np.testing.assert_array_equal(bench.controller.get_cpu_copy(FULL, pages(1, 2)), copies)


def test_a_failing_storage_is_tried_again_after_longer_and_longer_pauses() -> None:
    now = [0.0]
    backoff = StorageBackoff(lambda: now[0])
    pauses = []
    for _ in range(8):
        assert backoff.open
        backoff.record(ok=False)
        begun = now[0]
        while not backoff.open:
            now[0] += 0.5
        pauses.append(now[0] - begun)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    backoff.record(ok=True)
    backoff.record(ok=False)
    now[0] += 1.0
    assert backoff.open


def test_a_page_that_is_refused_says_nothing_of_a_storage_that_takes_others() -> None:
    backoff = StorageBackoff(lambda: 0.0)
    backoff.record(ok=True)
    for _ in range(5):
        backoff.record(ok=False, again=True)
        assert backoff.open
    backoff.record(ok=False, alone=True)
    assert backoff.open
    backoff.record(ok=True)
    backoff.record(ok=False, alone=True)
    assert backoff.open


@pytest.mark.parametrize("second", [{}, {"alone": True}, {"again": True}])
def test_two_refusals_and_nothing_taken_between_pause_a_storage(second: dict[str, bool]) -> None:
    backoff = StorageBackoff(lambda: 0.0)
    backoff.record(ok=False, alone=True)
    backoff.record(ok=False, **second)
    assert not backoff.open


def test_what_is_refused_again_in_a_pause_makes_it_longer() -> None:
    now = [0.0]
    backoff = StorageBackoff(lambda: now[0])
    backoff.record(ok=False)
    now[0] = 1.0
    backoff.record(ok=False, again=True)
    now[0] = 2.5
    assert not backoff.open
