"""Copies from the device to the host: nodes that are split, evicted or lost while theirs is under way."""

from __future__ import annotations

from faulty_shelf import Shelves
from tree_steps import evict_all, match_len, tokens
from tree_world import ManualExecutor, World, stored_keys

from sgl_jax.srt.mem_cache.hicache.async_impl import IoJob
from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.storage_backoff import StorageBackoff
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind


def test_what_one_eviction_has_to_copy_is_one_transfer() -> None:
    executor = ManualExecutor()
    world = World(ratio=1.0, executor=executor)
    prompts = [tokens(17, 100 * i) for i in range(1, 4)]
    executor.fail_next += ["no luck"] * 3
    for token_ids in prompts:
        world.run(token_ids)
        world.settle()
    before = executor.device_jobs
    world.cache.evict(EvictParams(world.num_tokens))
    assert executor.device_jobs == before + 1
    world.settle()
    world.verify()
    assert [world.run(token_ids).host for token_ids in prompts] == [16, 16, 16]
    world.verify_at_rest()


def test_a_node_split_while_its_backup_is_under_way_is_stored_whole() -> None:
    executor = ManualExecutor(auto=False)
    shelf: dict = {}
    world = World(
        page_size=1, device_pages=64, storage=StorageKind.FILE, shelf=shelf, executor=executor
    )
    world.run(tokens(40), prefetch=False)
    assert executor.jobs
    world.run([*tokens(39), *tokens(3, 900)], prefetch=False)
    executor.run_all()
    world.settle()
    assert len(stored_keys(shelf)) == 43
    world.verify_at_rest()


def test_a_node_evicted_while_its_backup_is_under_way_is_a_host_hit_later() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(33))
    world.cache.evict(EvictParams(world.num_tokens))
    assert match_len(world, tokens(33)) == (0, 0)
    world.verify()
    executor.run_all()
    world.cache.check_hicache_events()
    assert match_len(world, tokens(33)) == (0, 32)
    world.verify_at_rest()


def test_a_backup_that_fails_leaves_the_node_on_the_device_only() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(33))
    executor.fail_next.append("the copy failed")
    executor.run_all()
    world.cache.check_hicache_events()
    assert match_len(world, tokens(33)) == (32, 0)
    assert world.host_pool.num_free == world.host_pool.num_pages
    world.run(tokens(33))
    executor.run_all()
    world.cache.check_hicache_events()
    evict_all(world)
    assert match_len(world, tokens(33)) == (0, 32)
    world.verify_at_rest()


def test_a_backup_that_fails_after_the_device_was_evicted_loses_the_subtree() -> None:
    executor = ManualExecutor(auto=False)
    world = World(executor=executor)
    world.run(tokens(17))
    world.run(tokens(33))
    world.cache.evict(EvictParams(world.num_tokens))
    executor.fail_next.append("the copy failed")
    executor.run_all()
    world.cache.check_hicache_events()
    assert world.tree.tree.num_nodes == 0
    world.verify_at_rest()


def test_a_full_host_gives_nothing_up_for_what_is_on_the_device() -> None:
    """Neither what it alone has, nor a copy of what leaves the device next. What is new is copied when it leaves."""
    executor = ManualExecutor()
    world = World(device_pages=24, ratio=0.5, executor=executor)
    kept, newer = tokens(12 * 4 + 1), tokens(8 * 4 + 1, 500)
    world.run(kept)
    evict_all(world)
    assert world.host_pool.num_free == 0
    before = executor.device_jobs
    world.run(newer)
    assert executor.device_jobs == before
    assert match_len(world, kept) == (0, 12 * 4)
    evict_all(world)
    world.settle()
    assert match_len(world, newer) == (0, 8 * 4)
    assert match_len(world, kept) == (0, 4 * 4)
    world.verify_at_rest()


def test_a_full_host_makes_room_for_what_storage_is_to_get_early() -> None:
    shelf: dict = {}
    world = World(device_pages=24, ratio=0.5, storage=StorageKind.FILE, shelf=shelf)
    world.run(tokens(12 * 4 + 1))
    evict_all(world)
    assert world.host_pool.num_free == 0
    world.run(tokens(8 * 4 + 1, 500))
    world.settle()
    assert len(stored_keys(shelf)) == 12 + 8
    world.verify_at_rest()


def test_a_full_host_gives_nothing_up_early_while_storage_takes_nothing() -> None:
    """What would be given up is in no other place; when storage is back, what was left out is stored as it is used."""
    shelves = Shelves()
    now = [0.0]
    world = World(
        device_pages=24,
        ratio=0.5,
        storage=StorageKind.FILE,
        storage_factories={"file": shelves.open},
        clock=lambda: now[0],
    )
    (shelf,) = shelves.by_namespace.values()
    shelf.refuse_sets = True
    kept, newer = tokens(12 * 4 + 1), tokens(8 * 4 + 1, 500)
    world.run(kept)
    evict_all(world)
    world.settle()
    world.run(newer)
    world.settle()
    assert match_len(world, kept) == (0, 12 * 4)
    shelf.heal()
    now[0] += StorageBackoff.LONGEST_S
    for _ in range(2):  # what is to make room is stored first
        world.run(newer)
        world.settle()
    assert len(shelf.pages) == 8 + 12
    world.verify_at_rest()


def test_nothing_is_given_up_for_a_copy_that_has_to_wait() -> None:
    executor = ManualExecutor(auto=False)
    world = World(device_pages=24, ratio=0.5, executor=executor)
    kept = tokens(8 * 4 + 1)
    world.run(kept)
    executor.run_all()
    evict_all(world)
    world.settle()
    page_bytes = world.controller.in_flight.num_bytes(ComponentKind.FULL, 1)
    world.controller._max_backup_bytes = 4 * page_bytes
    world.run(tokens(4 * 4 + 1, 500))
    world.run(tokens(8 * 4 + 1, 900))
    world.cache.evict(EvictParams(world.num_tokens))
    assert match_len(world, kept) == (0, 8 * 4)
    executor.run_all()
    world.settle()
    world.verify_at_rest()


class HoldingExecutor(ManualExecutor):
    """While it `holds`, nothing is read from storage or written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.held: list[IoJob] = []

    def submit_io(self, job: IoJob) -> None:
        if self.holds:
            self.held.append(job)
        else:
            super().submit_io(job)

    def let_go(self) -> None:
        self.holds = False
        while self.held:
            self.submit_io(self.held.pop(0))


def test_pages_on_their_way_to_storage_do_not_hide_those_that_may_go() -> None:
    """However many nodes share a transfer."""
    executor = HoldingExecutor()
    shelf: dict = {}
    world = World(
        device_pages=12, ratio=15.0, storage=StorageKind.FILE, shelf=shelf, executor=executor
    )
    assert world.host_pool.num_pages == 180
    stored = [tokens(5, 1000 + 10 * i) for i in range(40)]
    for token_ids in stored:
        world.run(token_ids, prefetch=False)
        world.settle()
    executor.holds, executor.auto = True, False
    for i in range(14):
        for j in range(10):
            world.run(tokens(5, 10_000 + 100 * i + 10 * j), prefetch=False)
        executor.run_all()
        world.cache.check_hicache_events()
    assert (world.host_pool.num_free, world.host_pool.num_locked, len(executor.held)) == (
        0,
        140,
        14,
    )
    for token_ids in stored:
        assert match_len(world, token_ids) == (0, 4), "used later than what is under way"
    newest = [tokens(5, 90_000 + 10 * i) for i in range(30)]
    for token_ids in newest:
        world.run(token_ids, prefetch=False)
        executor.run_all()
        world.cache.check_hicache_events()
    world.cache.evict(EvictParams(world.num_tokens))
    assert [match_len(world, token_ids) for token_ids in newest] == [(0, 4)] * 30
    executor.let_go()
    world.settle()
    world.verify_at_rest()
