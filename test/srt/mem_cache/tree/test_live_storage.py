"""Storage that comes and goes while the cache serves: nothing waits for what is gone, nothing is believed to be where
it is not, and what comes back hits. Every reused token's content is checked."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tree_world import ManualExecutor, Request, Shelf, World, prompt, stored_keys

from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, PrefetchPolicy, StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError, StorageAttachError
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens

A, B = Path("a"), Path("b")


def tokens(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


class Shelves:
    """A shelf for each path, which outlives the mounts of it."""

    def __init__(self) -> None:
        self.at: dict[Path, dict[StorageNamespace, Any]] = {A: {}, B: {}}

    def open(self, root: str | Path, namespace: StorageNamespace) -> Shelf:
        if Path(root) not in self.at:
            raise HiCacheConfigError(f"the storage path {str(root)!r} is not a folder")
        found: Shelf = self.at[Path(root)].setdefault(namespace, Shelf(namespace))
        return found

    def num_pages(self, path: Path) -> int:
        return len(stored_keys(self.at[path]))


def make_world(shelves: Shelves, **settings: Any) -> World:
    settings = {"storage": StorageKind.FILE, "path": A, "device_pages": 32, **settings}
    return World(storage_factories={"file": shelves.open}, **settings)


def attach(world: World, path: Path) -> None:
    world.cache.attach_storage(world.cache.open_storage(path.absolute()))


@pytest.fixture
def shelves(monkeypatch: pytest.MonkeyPatch) -> Shelves:
    made = Shelves()
    made.at = {path.absolute(): shelf for path, shelf in made.at.items()}
    return made


def num_pages(shelves: Shelves, path: Path) -> int:
    return shelves.num_pages(path.absolute())


def forget_device_and_host(world: World) -> None:
    world.settle()
    world.cache.reset()
    world.allocator.clear()


def wait_for_writes(world: World, now: list[float]) -> None:
    for _ in range(50):
        world.settle()
        now[0] += 2.0
        world.cache.check_hicache_events()
    world.settle()


def test_what_was_stored_is_found_again_after_detach_and_attach(shelves: Shelves) -> None:
    world = make_world(shelves)
    world.run(tokens(33))
    world.settle()
    detached = world.cache.detach_storage()
    assert detached.drained.done()
    assert world.run(tokens(41)) == TierTokens(device=32, computed=9), "the tiers above serve on"
    forget_device_and_host(world)
    assert world.run(tokens(33)) == TierTokens(computed=33)
    forget_device_and_host(world)
    world.cache.attach_storage(detached.mount)
    assert world.run(tokens(33)) == TierTokens(storage=32, computed=1)
    world.verify_at_rest()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_what_was_computed_while_detached_is_stored_after_attach(
    shelves: Shelves, policy: WritePolicy
) -> None:
    now = [0.0]
    world = make_world(shelves, policy=policy, clock=lambda: now[0])
    world.run(tokens(33))
    world.settle()
    world.cache.detach_storage()
    world.run(tokens(33, 500))
    world.settle()
    attach(world, B)
    wait_for_writes(world, now)
    if policy is WritePolicy.WRITE_THROUGH:
        assert num_pages(shelves, A) == 8
        assert num_pages(shelves, B) == 16, "also what only the other path has"
    assert world.cache.flush_to_storage(10.0)
    assert num_pages(shelves, B) == 16
    forget_device_and_host(world)
    assert world.run(tokens(33, 500)).storage == 32
    world.verify_at_rest()


@pytest.mark.parametrize("policy", [PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.TIMEOUT])
@pytest.mark.parametrize("stage", ["lookup", "fetch", "half"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_that_waits_goes_on_at_once(
    shelves: Shelves, policy: PrefetchPolicy, stage: str, comes_back: bool
) -> None:
    before = make_world(shelves, device_pages=64)
    before.run(tokens(129))
    before.settle()
    executor = ManualExecutor(auto=False)
    world = make_world(
        shelves,
        device_pages=64,
        executor=executor,
        settings={"storage_prefetch_policy": policy},
    )
    cache = world.cache
    cache.start_prefetch("r", RadixKey(tokens(128), None, 0))
    for _ in range({"lookup": 0, "fetch": 1, "half": 2}[stage]):
        executor.run_one()
        cache.check_hicache_events()
    assert not cache.prefetch_ready("r")
    detached = cache.detach_storage()
    assert cache.prefetch_ready("r")
    assert not detached.drained.done()
    if comes_back:
        cache.attach_storage(detached.mount)
    req = Request("r", tokens(129))
    executor.auto = True
    world.admit(req)
    assert req.tiers is not None
    assert req.tiers.storage == (64 if stage == "half" else 0)
    world.finish(req)
    executor.run_all()
    world.settle()
    assert detached.drained.done()
    world.verify_at_rest()


def test_a_late_write_says_nothing_about_another_storage(shelves: Shelves) -> None:
    """Believed to be in B, the pages would be dropped from the host without being there."""
    now = [0.0]
    executor = ManualExecutor(auto=False)
    world = make_world(shelves, executor=executor, clock=lambda: now[0])
    world.run(tokens(33), prefetch=False)
    executor.run_one()  # the backup
    world.cache.check_hicache_events()  # starts the store
    detached = world.cache.detach_storage()
    attach(world, B)
    executor.run_one()
    world.cache.check_hicache_events()
    assert detached.drained.done()
    assert num_pages(shelves, A) == 8
    assert world.tree.full.host.num_stored() == 0
    now[0] += 2.0
    world.cache.check_hicache_events()
    executor.run_all()
    world.settle()
    assert num_pages(shelves, B) == 8
    assert world.tree.full.host.num_stored() == 8
    world.verify_at_rest()


def test_a_refusal_of_a_storage_that_is_gone_does_not_pause_the_one_there_is(
    shelves: Shelves,
) -> None:
    executor = ManualExecutor(auto=False)
    world = make_world(shelves, executor=executor)
    world.run(tokens(33), prefetch=False)
    executor.run_one()
    world.cache.check_hicache_events()
    world.cache.detach_storage()
    attach(world, B)
    executor.fail_next.append("OSError: gone")
    executor.run_one()
    world.cache.check_hicache_events()
    assert world.controller.storage_writable(world.tree.full.kind)
    executor.run_all()
    world.verify_at_rest()


def test_detached_pages_leave_the_host_like_any_that_nobody_else_has(shelves: Shelves) -> None:
    world = make_world(shelves, device_pages=16, ratio=1.0)
    world.run(tokens(33))
    world.settle()
    world.cache.detach_storage()
    for i in range(1, 6):
        world.run(tokens(49, 1000 * i))
        world.settle()
    assert world.run(tokens(33)).computed == 33
    dropped = world.registry.get_sample_value(
        "sglang:hicache_dropped_pages_total", {"tier": "host", "component": "full"}
    )
    assert dropped is not None and dropped > 0
    world.verify_at_rest()


@pytest.mark.parametrize("kind", [None, StorageKind.NONE, StorageKind.FILE])
def test_only_what_is_there_can_be_detached_and_only_where_none_is_attached(
    shelves: Shelves, kind: StorageKind | None
) -> None:
    world = make_world(shelves, storage=kind)
    if kind is None:
        with pytest.raises(StorageAttachError, match="HiCache is off"):
            world.cache.open_storage(A.absolute())
        with pytest.raises(StorageAttachError, match="HiCache is off"):
            world.cache.detach_storage()
        return
    if kind is StorageKind.NONE:
        with pytest.raises(StorageAttachError, match="no storage is attached"):
            world.cache.detach_storage()
        attach(world, A)
    with pytest.raises(StorageAttachError, match="attached already"):
        attach(world, B)
    world.run(tokens(33))
    world.settle()
    assert num_pages(shelves, A) == 8
    world.cache.detach_storage()
    with pytest.raises(StorageAttachError, match="no storage is attached"):
        world.cache.detach_storage()


def test_a_path_that_cannot_be_used_leaves_everything_as_it_was(shelves: Shelves) -> None:
    world = make_world(shelves, storage=StorageKind.NONE)
    with pytest.raises(HiCacheConfigError, match="is not a folder"):
        attach(world, Path("elsewhere"))
    assert world.cache.statistics().storage_path is None
    assert world.run(tokens(33)) == TierTokens(computed=33)
    world.verify_at_rest()


def test_a_new_storage_is_written_although_the_old_one_hangs(shelves: Shelves) -> None:
    may_write, stuck = threading.Event(), threading.Semaphore(0)
    now = [0.0]
    world = make_world(shelves, async_impl=AsyncImpl.THREADPOOL, clock=lambda: now[0])
    (old,) = shelves.at[A.absolute()].values()
    write = old.set

    def hang(keys: Any, pages: Any) -> list[bool]:
        stuck.release()
        assert may_write.wait(60.0)
        result: list[bool] = write(keys, pages)
        return result

    old.set = hang
    try:
        for i in range(3):
            world.run(tokens(17, 1000 * i + 1), prefetch=False)
        while not stuck.acquire(timeout=0.01):
            world.cache.check_hicache_events()
        detached = world.cache.detach_storage()
        attach(world, B)
        while num_pages(shelves, B) < 12:
            now[0] += 2.0
            world.cache.check_hicache_events()
            world.cache.wait_events(0.1)
        assert not detached.drained.done()
    finally:
        may_write.set()
    world.verify_at_rest()
    assert detached.drained.done()
    assert world.cache.shutdown(60.0)


def test_statistics_say_what_is_where(shelves: Shelves) -> None:
    world = make_world(shelves)
    world.run(tokens(33))
    world.settle()
    world.cache.evict(EvictParams(16))
    world.run(tokens(33))
    world.settle()
    found = world.cache.statistics().as_dict()
    assert found["prompt_tokens"] == {"device": 16, "host": 16, "storage": 0, "computed": 34}
    assert found["storage_path"] == str(A.absolute())
    full = found["components"]["full"]
    assert (full["device_pages_used"], full["host_pages_used"]) == (8, 8)
    assert full["host_pages_stored"] == full["storage"]["sets"] == 8
    assert set(found["in_flight"].values()) == {0}
    world.cache.detach_storage()
    found = world.cache.statistics().as_dict()
    assert found["storage_path"] is None
    assert found["components"]["full"]["host_pages_stored"] == 0
    assert found["components"]["full"]["storage"] is None
    off = World(storage=None).cache.statistics().as_dict()
    assert (off["hicache"], off["components"]) == (False, {})


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_random_requests_while_storage_comes_and_goes(
    shelves: Shelves, policy: WritePolicy, seed: int
) -> None:
    dice, now = random.Random(seed), [0.0]
    executor = ManualExecutor(auto=False)
    world = make_world(
        shelves, device_pages=20, ratio=1.5, policy=policy, executor=executor, clock=lambda: now[0]
    )
    attached = True
    mounts: list[Any] = []
    prompts = [prompt(dice, dice.randrange(9, 60)) for _ in range(6)]
    for _ in range(60):
        now[0] += dice.random()
        for _ in range(dice.randrange(4)):
            if executor.jobs:
                executor.run_one(dice.randrange(len(executor.jobs)))
            world.cache.check_hicache_events()
        action = dice.random()
        if action < 0.2:
            if attached:
                mounts.append(world.cache.detach_storage())
            elif mounts and dice.random() < 0.5:
                world.cache.attach_storage(mounts[-1].mount)
            else:
                attach(world, dice.choice([A, B]))
            attached = not attached
        elif action < 0.8:
            base = dice.choice(prompts)
            world.run(base[: dice.randrange(2, len(base))] + prompt(dice, dice.randrange(1, 8)))
        elif action < 0.9:
            world.cache.evict(EvictParams(dice.randrange(40)))
        world.cache.check_invariants()
    world.settle()
    assert all(detached.drained.done() for detached in mounts)
    world.verify_at_rest()
