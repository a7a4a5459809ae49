"""The contract of executors, over both implementations. Gates instead of sleeps; every wait has a limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.async_impl import (
    ASYNC_IMPLS,
    Completion,
    DeviceJob,
    FutureExecutor,
    IoJob,
    IoLane,
    TransferExecutor,
    create_executor,
)
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.types import TransferId

WAIT_S = 20.0
READ, WRITE = IoLane.READ, IoLane.WRITE


@pytest.fixture(params=sorted(ASYNC_IMPLS))
def executor(request: pytest.FixtureRequest) -> Iterator[TransferExecutor]:
    made = create_executor(request.param)
    yield made
    assert made.shutdown(WAIT_S)


def some_arrays() -> list[jax.Array]:
    return [jax.device_put(np.ones(4, np.float32))]


def device_job(
    number: int,
    start: Callable[[], list[jax.Array]] = some_arrays,
    finish: Callable[[], Any] = lambda: None,
) -> DeviceJob:
    return DeviceJob(TransferId(number), start, finish)


def io_job(number: int, fn: Callable[[], Any], lane: IoLane = READ) -> IoJob:
    return IoJob(TransferId(number), fn, lane)


def fail_with(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def collect(executor: TransferExecutor, count: int) -> list[Completion]:
    completions: list[Completion] = []
    while len(completions) < count:
        assert executor.wait_any(WAIT_S), f"only {completions} of {count}"
        got = executor.poll()
        assert got, "wait_any promised a completion"
        completions += got
    return completions


def gate() -> tuple[threading.Event, Callable[[], bool]]:
    event = threading.Event()
    return event, lambda: event.wait(WAIT_S)


def test_a_device_job_starts_waits_and_finishes(executor: TransferExecutor) -> None:
    steps: list[str] = []

    def start() -> list[jax.Array]:
        steps.append("start")
        return some_arrays()

    def finish() -> int:
        steps.append("finish")
        return 42

    executor.submit_device(device_job(7, start, finish))
    (completion,) = collect(executor, 1)
    assert (completion.transfer_id, completion.value, completion.error) == (7, 42, None)
    assert completion.ok
    assert completion.seconds >= 0
    assert steps == ["start", "finish"]


def test_an_io_job_runs_on_a_worker(executor: TransferExecutor) -> None:
    executor.submit_io(io_job(1, threading.get_ident))
    (completion,) = collect(executor, 1)
    assert completion.value != threading.get_ident()


def test_each_completion_is_handed_out_once(executor: TransferExecutor) -> None:
    executor.submit_io(io_job(1, lambda: "a"))
    executor.submit_device(device_job(2))
    assert executor.num_in_flight == 2
    assert {c.transfer_id for c in collect(executor, 2)} == {1, 2}
    assert executor.poll() == []
    assert executor.num_in_flight == 0


def test_a_stuck_file_job_holds_up_no_other(executor: TransferExecutor) -> None:
    opened, first = gate()
    executor.submit_io(io_job(1, first))
    executor.submit_io(io_job(2, lambda: "read"))
    assert executor.wait_any(WAIT_S)
    assert [c.transfer_id for c in executor.poll()] == [2]
    opened.set()
    assert [c.transfer_id for c in collect(executor, 1)] == [1]


def test_device_jobs_finish_in_order(executor: TransferExecutor) -> None:
    finished: list[int] = []
    for number in range(5):
        executor.submit_device(device_job(number, finish=lambda n=number: finished.append(n)))
    assert [c.transfer_id for c in collect(executor, 5)] == [0, 1, 2, 3, 4]
    assert finished == [0, 1, 2, 3, 4]


def test_stalled_writes_hold_up_neither_reads_nor_copies(executor: TransferExecutor) -> None:
    opened, stall = gate()
    for number in range(8):
        executor.submit_io(io_job(number, stall, WRITE))
    executor.submit_io(io_job(100, lambda: "read"))
    executor.submit_device(device_job(101))
    assert {c.transfer_id for c in collect(executor, 2)} == {100, 101}
    assert executor.num_in_flight == 8
    opened.set()
    assert {c.transfer_id for c in collect(executor, 8)} == set(range(8))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("gone"), SystemExit(3), MemoryError("much")],
    ids=lambda e: type(e).__name__,
)
def test_a_failed_io_job_is_a_value_and_its_workers_live_on(
    executor: TransferExecutor, error: BaseException
) -> None:
    for number in range(6):
        executor.submit_io(io_job(number, fail_with(error)))
    for completion in collect(executor, 6):
        assert completion.error == f"{type(error).__name__}: {error}"
        assert completion.value is None
        assert not completion.ok
    executor.submit_io(io_job(10, lambda: "still here"))
    assert collect(executor, 1)[0].value == "still here"


@pytest.mark.parametrize("place", ["start", "finish"])
def test_a_failed_device_job_is_a_value(executor: TransferExecutor, place: str) -> None:
    broken = fail_with(ValueError("bad page"))
    job = device_job(1, start=broken) if place == "start" else device_job(1, finish=broken)
    executor.submit_device(job)
    executor.submit_device(device_job(2))
    first, second = collect(executor, 2)
    assert first.error == "ValueError: bad page"
    assert second.ok


def test_a_deleted_array_is_a_failed_job(executor: TransferExecutor) -> None:
    """Scenario: somebody donated what a copy was waiting for."""

    def start() -> list[jax.Array]:
        arrays = some_arrays()
        arrays[0].delete()
        return arrays

    executor.submit_device(device_job(1, start))
    (completion,) = collect(executor, 1)
    assert completion.error is not None
    assert "deleted" in completion.error


def test_nothing_in_flight_is_nothing_to_wait_for(executor: TransferExecutor) -> None:
    assert executor.poll() == []
    assert not executor.wait_any(WAIT_S)
    assert executor.drain(0.0)


def test_waits_end_at_their_limit(executor: TransferExecutor) -> None:
    opened, stall = gate()
    executor.submit_io(io_job(1, stall))
    assert not executor.wait_any(0.01)
    assert not executor.drain(0.01)
    opened.set()
    assert executor.drain(WAIT_S)
    assert [c.transfer_id for c in executor.poll()] == [1]


def test_drain_ends_everything_and_leaves_the_completions_to_poll(
    executor: TransferExecutor,
) -> None:
    finished: list[int] = []
    for number in range(4):
        executor.submit_device(device_job(number, finish=lambda n=number: finished.append(n)))
        executor.submit_io(io_job(10 + number, lambda: None, WRITE))
    assert executor.drain(WAIT_S)
    assert finished == [0, 1, 2, 3]
    assert len(executor.poll()) == 8


def test_an_idle_worker_keeps_nothing_alive(executor: TransferExecutor) -> None:
    class Page:
        pass

    page = Page()
    gone = threading.Event()
    weakref.finalize(page, gone.set)
    executor.submit_io(io_job(1, lambda page=page: None))
    executor.submit_device(device_job(2, finish=lambda page=page: None))
    del page
    collect(executor, 2)
    assert gone.wait(WAIT_S)


@pytest.mark.parametrize("name", sorted(ASYNC_IMPLS))
class TestShutdown:
    def test_waits_for_what_runs_and_ignores_its_result(self, name: str) -> None:
        executor = create_executor(name)
        opened, stall = gate()
        started = threading.Event()

        def run() -> None:
            started.set()
            stall()

        executor.submit_io(io_job(1, run))
        assert started.wait(WAIT_S)
        assert not executor.shutdown(0.01)
        opened.set()
        assert executor.shutdown(WAIT_S)
        assert executor.poll() == []
        assert executor.num_in_flight == 0

    def test_starts_nothing_that_was_still_waiting(self, name: str) -> None:
        executor = create_executor(name, num_io_workers=1)
        opened, stall = gate()
        started = threading.Event()
        ran: list[int] = []

        def run() -> None:
            started.set()
            stall()

        executor.submit_io(io_job(1, run))
        executor.submit_io(io_job(2, lambda: ran.append(2)))
        assert started.wait(WAIT_S)
        assert not executor.shutdown(0.01)
        opened.set()
        assert executor.shutdown(WAIT_S)
        assert ran == []

    def test_is_idempotent_and_later_jobs_fail(self, name: str) -> None:
        executor = create_executor(name)
        executor.submit_device(device_job(1))
        assert executor.shutdown(WAIT_S)
        assert executor.shutdown(WAIT_S)
        executor.submit_device(device_job(2))
        executor.submit_io(io_job(3, lambda: None))
        late = executor.poll()
        assert [c.transfer_id for c in late] == [2, 3]
        assert all(c.error is not None and "shut down" in c.error for c in late)

    def test_ends_its_threads_which_are_daemons(self, name: str) -> None:
        before = set(threading.enumerate())
        executor = create_executor(name)
        mine = set(threading.enumerate()) - before
        assert mine
        assert all(thread.daemon and thread.name.startswith("hicache-") for thread in mine)
        assert executor.shutdown(WAIT_S)
        assert not any(thread.is_alive() for thread in mine)


def test_threadpool_copies_on_its_worker_and_future_on_the_caller() -> None:
    threads: dict[str, set[int]] = {}
    for name in ASYNC_IMPLS:
        executor = create_executor(name)
        seen: set[int] = set()

        def start(seen: set[int] = seen) -> list[jax.Array]:
            seen.add(threading.get_ident())
            return some_arrays()

        executor.submit_device(
            device_job(1, start, lambda seen=seen: seen.add(threading.get_ident()))
        )
        collect(executor, 1)
        threads[name] = seen
        assert executor.shutdown(WAIT_S)
    assert threads["future"] == {threading.get_ident()}
    assert len(threads["threadpool"]) == 1
    assert threading.get_ident() not in threads["threadpool"]


class NotYet:
    """Stands in for an array whose copy is under way, until told."""

    def __init__(self) -> None:
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> NotYet:
        assert self.ready, "waited for an array that was not ready"
        return self


def test_future_finishes_only_when_every_array_is_ready() -> None:
    executor = FutureExecutor()
    copies = [NotYet(), NotYet()]
    executor.submit_device(device_job(1, lambda: list(copies), lambda: "done"))  # type: ignore[arg-type]
    assert executor.poll() == []
    copies[0].ready = True
    assert executor.poll() == []
    assert not executor.wait_any(0.01)
    copies[1].ready = True
    assert [c.value for c in collect(executor, 1)] == ["done"]
    assert executor.shutdown(WAIT_S)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(HiCacheConfigError, match="future, threadpool"):
        create_executor("fibers")
    with pytest.raises(HiCacheConfigError, match="at least 1"):
        create_executor("future", num_io_workers=0)


@pytest.mark.parametrize("lane", list(IoLane))
def test_renewed_workers_go_on_beside_stuck_ones(executor: TransferExecutor, lane: IoLane) -> None:
    may_end, wait = gate()
    begun = [threading.Event() for _ in range(2)]
    for number, event in enumerate(begun):

        def stuck(event: threading.Event = event) -> str:
            event.set()
            assert wait()
            return "late"

        executor.submit_io(io_job(number, stuck, lane))
    for event in begun:
        assert event.wait(WAIT_S)
    executor.submit_io(io_job(2, lambda: "never begun", lane))
    executor.renew_io()
    executor.submit_io(io_job(3, lambda: "done", lane))
    found = {c.transfer_id: (c.value, c.error) for c in collect(executor, 2)}
    assert found[TransferId(3)] == ("done", None)
    value, error = found[TransferId(2)]
    assert value is None and error is not None and "given up" in error
    assert executor.num_in_flight == 2
    may_end.set()
    assert {c.value for c in collect(executor, 2)} == {"late"}
