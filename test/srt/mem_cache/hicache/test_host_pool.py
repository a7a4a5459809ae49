"""The contract of host pools, over both schemes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from page_fakes import Bytes, Rig, make_rig

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError, InvariantError, PageStateError
from sgl_jax.srt.mem_cache.hicache.host_memory import HostMemory
from sgl_jax.srt.mem_cache.hicache.host_pool.base import HostKVPool, Slab
from sgl_jax.srt.mem_cache.hicache.host_pool.host_page import HostPage
from sgl_jax.srt.mem_cache.hicache.host_pool.page_table import HostPages
from sgl_jax.srt.mem_cache.hicache.host_pool.registry import HOST_POOL_SCHEMES, create_host_pool

WAIT_S = 20.0
NUM_PAGES = 9
NUM_ROWS = 12


@dataclass
class World:
    """A pool over a rig with random device rows; row 0 is not used."""

    rig: Rig
    pool: HostKVPool

    def row_bytes(self, row: int) -> Bytes:
        by_name = {f"b{i}": rows[row] for i, rows in enumerate(self.rig.contents)}
        return np.concatenate([by_name[buffer.name] for buffer in self.rig.layout.buffers])

    def back_up(self, rows: list[int]) -> np.ndarray:
        """Copies of device rows as READY host pages."""
        pages = self.pool.alloc(len(rows))
        assert pages is not None
        self.put(pages, rows)
        self.pool.mark_ready(pages)
        return pages

    def put(self, pages: np.ndarray, rows: list[int]) -> None:
        transfer = self.rig.transfer
        self.pool.put(pages, transfer.to_host(transfer.gather(np.array(rows, np.int32))))

    def read(self, pages: np.ndarray) -> list[Bytes]:
        return [np.concatenate(list(payload)) for payload in self.pool.read_bytes(pages)]

    def holds(self, pages: np.ndarray, rows: list[int]) -> None:
        for page, data, row in zip(pages.tolist(), self.read(pages), rows, strict=True):
            np.testing.assert_array_equal(data, self.row_bytes(row), f"page {page}, row {row}")


@pytest.fixture(params=sorted(HOST_POOL_SCHEMES))
def world(request: pytest.FixtureRequest, rng: np.random.Generator) -> World:
    rig = make_rig(rng, NUM_ROWS, [((4, 3), ml_dtypes.bfloat16), ((5,), np.float32)])
    pool = create_host_pool(request.param, NUM_PAGES, rig.layout, rig.transfer.host_memory())
    return World(rig, pool)


def test_pages_come_back_bit_by_bit_in_the_order_asked_for(world: World) -> None:
    pages = world.back_up([3, 1, 11])
    world.holds(pages, [3, 1, 11])
    world.holds(pages[[2, 0]], [11, 3])
    world.pool.check_invariants()


def test_a_load_brings_the_bytes_back_to_the_device(world: World) -> None:
    pages = world.back_up([3, 1])
    transfer = world.rig.transfer
    transfer.scatter(transfer.to_device(world.pool.get(pages)), np.array([7, 8]))
    dumped = transfer.read_rows(np.array([7, 8]))
    np.testing.assert_array_equal(dumped, [world.row_bytes(3), world.row_bytes(1)])


def test_bytes_from_storage_are_pages_like_any_other(world: World) -> None:
    pages = world.pool.alloc(2)
    assert pages is not None
    world.pool.write_bytes(pages, [world.row_bytes(5), world.row_bytes(2)])
    world.pool.mark_ready(pages)
    world.holds(pages, [5, 2])


def test_what_get_returned_survives_free_and_refill(world: World) -> None:
    """Scenario: host pages are evicted and refilled while their load is under way."""
    pages = world.back_up([3, 1])
    fetched = world.pool.get(pages)
    world.pool.free(pages)
    again = world.back_up([6, 9, 4, 2, 7, 8, 5, 10, 11])
    assert set(pages.tolist()) <= set(again.tolist())
    memory = world.rig.transfer.host_memory()
    for page, row in zip(fetched, [3, 1], strict=True):
        data = np.concatenate(memory.host_page_bytes(page))
        np.testing.assert_array_equal(data, world.row_bytes(row))


def test_what_read_bytes_returned_survives_free_and_refill(world: World) -> None:
    """Scenario: a storage write is slow, and its page is given away meanwhile."""
    pages = world.back_up([3])
    (payload,) = world.pool.read_bytes(pages)
    world.pool.free(pages)
    world.back_up([6, 9, 4, 2, 7, 8, 5, 10, 11])
    np.testing.assert_array_equal(np.concatenate(list(payload)), world.row_bytes(3))


def test_a_hit_moves_a_page_to_the_young_end(world: World) -> None:
    pages = world.back_up([1, 2, 3])
    world.pool.get(pages[:1])
    assert world.pool.oldest(2).tolist() == pages[1:].tolist()
    assert world.pool.evict(2).tolist() == pages[1:].tolist()
    world.pool.touch(pages[:1])
    world.holds(pages[:1], [1])


def test_states_are_guarded(world: World) -> None:
    pages = world.pool.alloc(2)
    assert pages is not None
    with pytest.raises(PageStateError, match="without bytes"):
        world.pool.mark_ready(pages)
    with pytest.raises(PageStateError, match="not READY"):
        world.pool.get(pages)
    with pytest.raises(PageStateError, match="not READY"):
        world.pool.read_bytes(pages)
    world.put(pages, [1, 2])
    assert world.pool.is_ready(pages).tolist() == [False, False]
    world.pool.mark_ready(pages)
    assert world.pool.is_ready(pages).tolist() == [True, True]
    with pytest.raises(PageStateError, match="not WRITING"):
        world.put(pages, [3, 4])
    fresh = world.pool.alloc(2)
    assert fresh is not None
    with pytest.raises(ValueError, match="2 host pages but bytes for 1"):
        world.put(fresh, [1])
    world.holds(pages, [1, 2])
    world.pool.check_invariants()


def test_a_refilled_page_is_not_ready_with_its_predecessors_bytes(world: World) -> None:
    world.back_up(list(range(1, 10)))
    world.pool.evict(1)
    page = world.pool.alloc(1)
    assert page is not None
    with pytest.raises(PageStateError, match="without bytes"):
        world.pool.mark_ready(page)


def test_a_failed_backup_gives_its_pages_back(world: World) -> None:
    pages = world.pool.alloc(3)
    assert pages is not None
    world.put(pages[:1], [1])
    world.pool.free(pages)
    assert world.pool.num_free == NUM_PAGES
    world.pool.check_invariants()


def test_locks_hold_pages(world: World) -> None:
    pages = world.back_up([1, 2])
    world.pool.lock(pages[:1])
    assert world.pool.is_locked(pages).tolist() == [True, False]
    with pytest.raises(PageStateError, match="freed while locked"):
        world.pool.free(pages)
    with pytest.raises(PageStateError, match="cleared while locked"):
        world.pool.clear()
    assert world.pool.evict(9).tolist() == pages[1:].tolist()
    world.holds(pages[:1], [1])
    world.pool.unlock(pages[:1])
    with pytest.raises(PageStateError, match="without a lock"):
        world.pool.unlock(pages[:1])


def test_a_locked_page_is_read_on_a_worker(world: World) -> None:
    pages = world.back_up([1, 2])
    world.pool.lock(pages)
    seen: list[Bytes] = []
    worker = threading.Thread(target=lambda: seen.extend(world.read(pages)))
    worker.start()
    filler = world.back_up([3, 4, 5, 6, 7, 8, 9])
    worker.join(WAIT_S)
    assert not worker.is_alive()
    np.testing.assert_array_equal(seen, [world.row_bytes(1), world.row_bytes(2)])
    world.holds(filler, [3, 4, 5, 6, 7, 8, 9])


def test_workers_fill_pages_side_by_side(world: World) -> None:
    rows = [1, 2, 3, 4, 5, 6, 7, 8]
    pages = world.pool.alloc(len(rows))
    assert pages is not None
    world.pool.lock(pages)
    barrier = threading.Barrier(len(rows))

    def fill(page: np.ndarray, row: int) -> None:
        barrier.wait(WAIT_S)
        world.pool.write_bytes(page, [world.row_bytes(row)])

    workers = [
        threading.Thread(target=fill, args=(pages[i : i + 1], row)) for i, row in enumerate(rows)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_S)
    world.pool.mark_ready(pages)
    world.holds(pages, rows)


def test_clear_forgets_everything(world: World) -> None:
    pages = world.back_up([1, 2])
    epochs = world.pool.epochs(pages)
    world.pool.clear()
    assert world.pool.num_free == NUM_PAGES
    assert (world.pool.epochs(pages) > epochs).all()
    assert not world.pool.is_ready(pages).any()
    world.pool.check_invariants()


def test_bytes_are_accounted(world: World) -> None:
    page_bytes = world.rig.layout.page_bytes
    assert world.pool.capacity_bytes == NUM_PAGES * page_bytes
    world.back_up([1, 2])
    assert world.pool.host_bytes in (2 * page_bytes, world.pool.capacity_bytes)
    world.pool.clear()
    assert world.pool.host_bytes in (0, world.pool.capacity_bytes)


def test_random_life_against_a_dict(world: World, rng: np.random.Generator) -> None:
    """Backups, fetches, loads, evictions and frees; every READY page always has the bytes that it was given."""
    held: dict[int, int] = {}  # host page -> row whose bytes it has
    for _ in range(120):
        action = rng.integers(0, 5)
        count = int(rng.integers(1, 5))
        if action <= 1 and count <= world.pool.num_free:
            rows = rng.integers(1, NUM_ROWS, count).tolist()
            if action == 0:
                pages = world.back_up(rows)
            else:
                taken = world.pool.alloc(count)
                assert taken is not None
                pages = taken
                world.pool.write_bytes(pages, [world.row_bytes(row) for row in rows])
                world.pool.mark_ready(pages)
            held.update(zip(pages.tolist(), rows, strict=True))
        elif action == 2:
            for page in world.pool.evict(count).tolist():
                del held[page]
        elif held:
            chosen = rng.permutation(np.array(list(held), np.int32))[:count]
            if action == 3:
                world.pool.free(chosen)
                for page in chosen.tolist():
                    del held[page]
            else:
                world.holds(chosen, [held[page] for page in chosen.tolist()])
        world.pool.check_invariants()
        assert world.pool.num_free == NUM_PAGES - len(held)
        assert world.pool.host_bytes <= world.pool.capacity_bytes, "spare memory counts as well"
    everything = np.array(list(held), np.int32)
    world.holds(everything, list(held.values()))


def test_per_block_memory_follows_use_and_slab_memory_does_not(rng: np.random.Generator) -> None:
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    memory = rig.transfer.host_memory()
    per_block = World(rig, create_host_pool("per_block", NUM_PAGES, rig.layout, memory))
    slab = World(rig, create_host_pool("slab", NUM_PAGES, rig.layout, memory))
    assert (per_block.pool.host_bytes, slab.pool.host_bytes) == (0, NUM_PAGES * 16)
    pages = per_block.back_up([1, 2])
    assert per_block.pool.host_bytes == 2 * 16
    per_block.pool.free(pages)
    assert per_block.pool.host_bytes == 2 * 16, "kept for the next pages"
    per_block.back_up([3, 4, 5])
    assert per_block.pool.host_bytes == 3 * 16
    per_block.pool.clear()
    assert per_block.pool.host_bytes == 0


def test_spare_memory_makes_way_for_pages_that_bring_their_own(rng: np.random.Generator) -> None:
    """Scenario: backups filled the pool, were evicted, and pages from storage fill it again."""
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    memory = rig.transfer.host_memory()
    world = World(rig, create_host_pool("per_block", NUM_PAGES, rig.layout, memory))
    world.back_up([1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.pool.evict(NUM_PAGES)
    assert len(memory.spares) == NUM_PAGES
    pages = world.pool.alloc(7)
    assert pages is not None
    world.pool.write_bytes(pages, [world.row_bytes(row) for row in range(1, 8)])
    assert len(memory.spares) == 2
    assert world.pool.host_bytes == world.pool.capacity_bytes


def test_a_page_that_somebody_still_reads_is_not_written_over(rng: np.random.Generator) -> None:
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    memory = rig.transfer.host_memory()
    world = World(rig, create_host_pool("per_block", NUM_PAGES, rig.layout, memory))
    pages = world.back_up([1, 2])
    fetched = world.pool.get(pages[:1])
    world.pool.free(pages)
    assert len(memory.spares) == 1
    fetched.clear()
    assert len(memory.spares) == 2


def test_a_full_pool_keeps_no_memory_of_a_page_that_was_read_for_long(
    rng: np.random.Generator,
) -> None:
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    memory = rig.transfer.host_memory()
    world = World(rig, create_host_pool("per_block", NUM_PAGES, rig.layout, memory))
    pages = world.back_up([1])
    fetched = world.pool.get(pages)
    world.pool.free(pages)
    world.back_up([1, 2, 3, 4, 5, 6, 7, 8, 9])
    fetched.clear()
    assert len(memory.spares) == 0


def test_what_a_failed_backup_left_is_not_kept(rng: np.random.Generator) -> None:
    """An array that a failed program was to fill would make the next backup fail too."""
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    memory = rig.transfer.host_memory()
    memory.spares.limit(NUM_PAGES)
    rig.transfer.to_host(rig.transfer.gather(np.array([1], np.int32)))  # never put into the pool
    assert len(memory.spares) == 0


def test_the_slab_is_written_in_place(rng: np.random.Generator) -> None:
    rig = make_rig(rng, NUM_ROWS, [((64, 64), np.float32)])
    memory = rig.transfer.host_memory()
    slab = memory.new_slab(64)
    address = slab[0].unsafe_buffer_pointer()
    pages = rig.transfer.to_host(rig.transfer.gather(np.array([1, 2])))
    written = memory.write_slab(slab, np.array([5, 6], np.int32), pages)
    assert slab[0].is_deleted()
    assert written[0].unsafe_buffer_pointer() == address
    assert written[0].sharding.memory_kind == "pinned_host"


class GatedArrays(HostMemory):
    """Host arrays whose slab writes stop half way, after the old slab was donated."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.buffers, 0, rig.transfer.chunk_pages)
        self.armed = False
        self.donated, self.go_on = threading.Event(), threading.Event()

    def write_slab(self, slab: Slab, host_pages: HostPages, pages: Sequence[HostPage]) -> Slab:
        written = super().write_slab(slab, host_pages, pages)
        if self.armed:
            self.donated.set()
            assert self.go_on.wait(WAIT_S)
        return written


def test_nobody_reads_a_slab_that_is_being_replaced(rng: np.random.Generator) -> None:
    """Scenario: a load reads a page while a backup on a worker has just donated the slab."""
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    arrays = GatedArrays(rig)
    world = World(rig, create_host_pool("slab", NUM_PAGES, rig.layout, arrays))
    ready = world.back_up([1])
    fresh = world.pool.alloc(1)
    assert fresh is not None
    arrays.armed = True
    writer = threading.Thread(target=lambda: world.put(fresh, [2]))
    writer.start()
    assert arrays.donated.wait(WAIT_S)
    seen: list[Bytes] = []
    failed: list[BaseException] = []

    def read() -> None:
        try:
            seen.extend(world.read(ready))
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.2)  # without the lock it fails by now, with it it waits
    arrays.go_on.set()
    for thread in (writer, reader):
        thread.join(WAIT_S)
    assert not failed
    np.testing.assert_array_equal(seen, [world.row_bytes(1)])


def test_damage_is_found(rng: np.random.Generator) -> None:
    rig = make_rig(rng, NUM_ROWS, [((4,), np.float32)])
    pool = create_host_pool("per_block", NUM_PAGES, rig.layout, rig.transfer.host_memory())
    (page,) = World(rig, pool).back_up([1])
    pool._slots[page] = None
    with pytest.raises(InvariantError, match="P4: 0 slots"):
        pool.check_invariants()
    pool._filled[page] = False
    with pytest.raises(InvariantError, match="P4: pages"):
        pool.check_invariants()


def test_an_unknown_scheme_names_the_known_ones(rng: np.random.Generator) -> None:
    rig = make_rig(rng, 4, [((4,), np.float32)])
    with pytest.raises(HiCacheConfigError, match="per_block, slab"):
        create_host_pool("paged", 4, rig.layout, rig.transfer.host_memory())
