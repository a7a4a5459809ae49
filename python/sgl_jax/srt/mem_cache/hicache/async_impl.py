"""Running transfers beside the engine: one interface, two implementations.

`threadpool` gives device copies to one worker thread; `future` dispatches them on the engine thread and asks the arrays
whether they are ready. File work runs on workers in both. What a caller sees is the same: it submits, and `poll` hands
out one `Completion` for each job, in submission order within a lane. A failure is a completion with its error's text,
never an exception, and never the end of a worker.

Lanes: device copies, reads and writes. Reads and writes have workers of their own, so that a stalled write holds up no
read. The order within a lane is kept even where a later job is done earlier, so that what the engine sees does not
depend on which worker won.

Threads: one thread (the engine's) calls the public methods. `DeviceJob.start` runs on the worker or the engine thread,
`finish` likewise; `IoJob.run` always on a worker.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax

from .errors import HiCacheConfigError
from .types import TransferId

_READY_POLL_S = 0.0005
_SHUT_DOWN = "HiCacheError: the executor is shut down"
_RENEWED = "HiCacheError: the workers that were to do it were given up"


class IoLane(enum.Enum):
    """Which workers do a piece of file work."""

    READ = "read"
    WRITE = "write"


_DEVICE = "device"


@dataclass(frozen=True)
class DeviceJob:
    """Copies between device and host: `start` begins them and names the arrays to wait for, `finish` comes after."""

    transfer_id: TransferId
    start: Callable[[], list[jax.Array]]
    finish: Callable[[], Any]


@dataclass(frozen=True)
class IoJob:
    """Blocking work for a worker of `lane`."""

    transfer_id: TransferId
    run: Callable[[], Any]
    lane: IoLane


@dataclass(frozen=True)
class Completion:
    """The end of one job: what it returned, or the text of what it raised; `seconds` from submission to the end."""

    transfer_id: TransferId
    value: Any
    error: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the job returned."""
        return self.error is None


@dataclass
class _Ticket:
    """One submitted job, from registration until its completion is handed out."""

    transfer_id: TransferId
    submitted_s: float = field(default_factory=time.monotonic)
    completion: Completion | None = None

    def settle(self, value: Any, error: BaseException | str | None) -> None:
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        seconds = time.monotonic() - self.submitted_s
        self.completion = Completion(self.transfer_id, value, text, seconds)


class _Workers:
    """Daemon threads that run tasks from one queue, whatever the tasks raise."""

    def __init__(self, name: str, count: int, on_done: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[tuple[_Ticket, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._on_done = on_done
        self._closed = threading.Event()
        self._reason = ""
        self._threads = [
            threading.Thread(target=self._loop, name=f"hicache-{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: _Ticket, work: Callable[[], Any]) -> None:
        self._tasks.put((ticket, work))

    def close(self, reason: str) -> None:
        """Ask every worker to leave after the job it is at; what waits in the queue fails for that reason."""
        self._reason = reason
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._refuse(self._tasks.get_nowait())
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline_s: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._closed.is_set():
                self._refuse(task)
                continue
            ticket, work = task
            try:
                ticket.settle(work(), None)
            except BaseException as error:
                # Even a SystemExit must not end a worker that others wait for.
                ticket.settle(None, error)
            del task, ticket, work  # a waiting worker must not keep pages alive
            self._on_done()

    def _refuse(self, task: tuple[_Ticket, Callable[[], Any]] | None) -> None:
        if task is not None:
            task[0].settle(None, self._reason)
            self._on_done()


class TransferExecutor(ABC):
    """See the module. `shutdown` must be called before the interpreter ends."""

    def __init__(self, num_io_workers: int = 2) -> None:
        if num_io_workers < 1:
            raise HiCacheConfigError(f"num_io_workers must be at least 1, got {num_io_workers}")
        self._lanes: dict[str, deque[_Ticket]] = {
            lane: deque() for lane in (_DEVICE, *(io_lane.value for io_lane in IoLane))
        }
        self._changed = threading.Condition()
        self._closed = False
        self._num_io_workers = num_io_workers
        self._io = {lane: self._new_workers(lane) for lane in IoLane}

    @property
    def num_in_flight(self) -> int:
        """Jobs submitted whose completion was not handed out yet."""
        return sum(len(lane) for lane in self._lanes.values())

    def submit_device(self, job: DeviceJob) -> None:
        """Take a job; never raises for what the job does. In `future`, `start` runs before this returns."""
        ticket = self._register(job.transfer_id, _DEVICE)
        if ticket.completion is None:
            self._begin_device(ticket, job)

    def submit_io(self, job: IoJob) -> None:
        """Take a job for a worker; never raises for what the job does."""
        ticket = self._register(job.transfer_id, job.lane.value)
        if ticket.completion is None:
            self._io[job.lane].submit(ticket, job.run)

    def poll(self) -> list[Completion]:
        """Everything that ended since the last poll, each once; never waits.

        Device jobs come in the order of their submission; file jobs as they end, so that one that is stuck holds up no
        other.
        """
        completions: list[Completion] = []
        device = self._lanes[_DEVICE]
        while device and (completion := self._completion_of(device[0])) is not None:
            device.popleft()
            completions.append(completion)
        for lane in IoLane:
            tickets = self._lanes[lane.value]
            for _ in range(len(tickets)):
                ticket = tickets.popleft()
                if (completion := self._completion_of(ticket)) is None:
                    tickets.append(ticket)
                else:
                    completions.append(completion)
        return completions

    def wait_any(self, timeout_s: float) -> bool:
        """Wait until `poll` would return something; False at the timeout, or at once if nothing is in flight."""
        return self._wait_until(self._head_done, time.monotonic() + timeout_s)

    def drain(self, deadline_s: float) -> bool:
        """Wait up to `deadline_s` seconds until every job ended; the completions are still to be polled."""
        return self._wait_until(self._all_done, time.monotonic() + deadline_s)

    def shutdown(self, deadline_s: float) -> bool:
        """Stop: forget all jobs, start no more, and wait up to `deadline_s` seconds for what runs. Idempotent.

        False if a worker is still busy at the deadline; it is a daemon and its result is ignored. A job submitted later
        fails.
        """
        if not self._closed:
            self._closed = True
            for lane in self._lanes.values():
                lane.clear()
            for workers in self._workers():
                workers.close(_SHUT_DOWN)
        end_s = time.monotonic() + deadline_s
        ended = [workers.join(end_s) for workers in self._workers()]
        return all(ended)

    def renew_io(self) -> None:
        """Go on with new workers for file work: those there are may be stuck. What they are at ends when it ends; what
        they have not begun fails."""
        if self._closed:
            return
        for lane, workers in self._io.items():
            workers.close(_RENEWED)
            self._io[lane] = self._new_workers(lane)

    def _new_workers(self, lane: IoLane) -> _Workers:
        return _Workers(lane.value, self._num_io_workers, self._notify)

    def _register(self, transfer_id: TransferId, lane: str) -> _Ticket:
        """A ticket is in its lane before anything runs, so that no completion can come unexpected."""
        ticket = _Ticket(transfer_id)
        if self._closed:
            ticket.settle(None, _SHUT_DOWN)
        self._lanes[lane].append(ticket)
        return ticket

    def _wait_until(self, reached: Callable[[], bool | None], end_s: float) -> bool:
        """Wait for a condition (None: it can not come any more)."""
        with self._changed:
            while (answer := reached()) is False:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, self._wait_slice_s()))
            return bool(answer)

    def _head_done(self) -> bool | None:
        if not self.num_in_flight:
            return None
        device = self._lanes[_DEVICE]
        waited_for = [*islice(device, 1)]
        for lane in IoLane:
            waited_for += self._lanes[lane.value]
        return any(self._completion_of(ticket) is not None for ticket in waited_for)

    def _all_done(self) -> bool:
        return all(
            self._completion_of(ticket) is not None
            for tickets in self._lanes.values()
            for ticket in tickets
        )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _workers(self) -> list[_Workers]:
        return list(self._io.values())

    def _wait_slice_s(self) -> float:
        """The longest sleep that misses nothing: workers notify, so any will do."""
        return 60.0

    @abstractmethod
    def _begin_device(self, ticket: _Ticket, job: DeviceJob) -> None:
        """Start a registered device job; a failure settles its ticket."""

    @abstractmethod
    def _completion_of(self, ticket: _Ticket) -> Completion | None:
        """How a job ended, or None; engine thread."""


class ThreadPoolExecutor(TransferExecutor):
    """Device copies start, end and finish on one worker, in order."""

    def __init__(self, num_io_workers: int = 2) -> None:
        super().__init__(num_io_workers)
        self._device = _Workers(_DEVICE, 1, self._notify)

    def _begin_device(self, ticket: _Ticket, job: DeviceJob) -> None:
        self._device.submit(ticket, lambda: _run_blocking(job))

    def _completion_of(self, ticket: _Ticket) -> Completion | None:
        return ticket.completion

    def _workers(self) -> list[_Workers]:
        return [*super()._workers(), self._device]


class FutureExecutor(TransferExecutor):
    """Device copies start in `submit_device` and finish in `poll`, both on the engine thread, without waiting."""

    def __init__(self, num_io_workers: int = 2) -> None:
        super().__init__(num_io_workers)
        self._dispatched: dict[int, tuple[DeviceJob, list[jax.Array]]] = {}

    def shutdown(self, deadline_s: float) -> bool:
        """As in the base; copies under way end by themselves."""
        self._dispatched.clear()
        return super().shutdown(deadline_s)

    def _begin_device(self, ticket: _Ticket, job: DeviceJob) -> None:
        try:
            self._dispatched[id(ticket)] = (job, job.start())
        except Exception as error:
            ticket.settle(None, error)

    def _completion_of(self, ticket: _Ticket) -> Completion | None:
        if ticket.completion is None and id(ticket) in self._dispatched:
            self._finish_if_ready(ticket)
        return ticket.completion

    def _finish_if_ready(self, ticket: _Ticket) -> None:
        job, arrays = self._dispatched[id(ticket)]
        try:
            if not all(_is_ready(array) for array in arrays):
                return
            # Does not wait any more; raises what a failed copy left behind.
            jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
            value = job.finish()
        except Exception as error:
            ticket.settle(None, error)
        else:
            ticket.settle(value, None)
        del self._dispatched[id(ticket)]

    def _wait_slice_s(self) -> float:
        """Arrays do not notify, so they are asked."""
        return _READY_POLL_S if self._dispatched else super()._wait_slice_s()


def _is_ready(array: jax.Array) -> bool:
    """`array.is_ready()`, which ends the process when the array was deleted: ask for that first (jax 0.10.2)."""
    if array.is_deleted():
        raise RuntimeError("an array that a transfer waits for was deleted or donated")
    return bool(array.is_ready())  # type: ignore[attr-defined]


def _run_blocking(job: DeviceJob) -> Any:
    jax.block_until_ready(job.start())  # type: ignore[no-untyped-call]
    return job.finish()


ASYNC_IMPLS: dict[str, Callable[[int], TransferExecutor]] = {
    "threadpool": ThreadPoolExecutor,
    "future": FutureExecutor,
}


def create_executor(name: str, num_io_workers: int = 2) -> TransferExecutor:
    """Build the executor of that name; HiCacheConfigError names the known ones."""
    constructor = ASYNC_IMPLS.get(name)
    if constructor is None:
        raise HiCacheConfigError(
            f"unknown async implementation {name!r}; known: {', '.join(sorted(ASYNC_IMPLS))}"
        )
    return constructor(num_io_workers)
