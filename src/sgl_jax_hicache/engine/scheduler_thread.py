"""The thread that owns the scheduler, the prefix cache and the device buffers.

Other threads reach it through the mailbox only. It never spins: with nothing to do it waits for mail, and while only
transfers are unfinished it waits for them, with a look into the mailbox every 5 ms. An idle engine takes a step each
second all the same: it keeps the metrics of what changes without it, such as the pages that storage holds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from .mailbox import Mailbox
from .req import GenerateRequest
from .scheduler import Scheduler
from .tree_cache import TreeCache

logger = logging.getLogger(__name__)

T = TypeVar("T")
_EVENT_WAIT_S = 0.005
_IDLE_WAIT_S = 1.0


class EngineStoppedError(RuntimeError):
    """The engine is shutting down, has shut down, or has failed; it takes no more work."""


def _nothing() -> None:
    """What most flushes do afterwards."""


@dataclass(frozen=True)
class _Flush:
    deadline_s: float
    store: bool
    then: Callable[[], object]
    result: Future[bool]


class SchedulerThread:
    """Runs a scheduler until it is told to stop, or fails."""

    def __init__(self, scheduler: Scheduler, tree: TreeCache) -> None:
        self._scheduler = scheduler
        self._tree = tree
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._flush: _Flush | None = None
        self._stop_at_s: float | None = None
        self._was_busy = False
        self._orderly = False
        self.failure: BaseException | None = None
        self.started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="sglang::scheduler", daemon=True)

    # -- from any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Start, and wait until everything is compiled. Raises what the start-up raised."""
        self._thread.start()
        self.started.result()

    @property
    def alive(self) -> bool:
        """True while requests are served."""
        return self._thread.is_alive() and self.failure is None

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises EngineStoppedError if nobody will ever take it."""
        self._post(lambda: self._submit(request))

    def abort(self, rid: str) -> None:
        """End a request, if it is unfinished; its sink gets a last chunk."""
        try:
            self._post(lambda: self._abort(rid))
        except EngineStoppedError:
            return  # whatever ended the engine has ended the request

    def flush_cache(
        self, timeout_s: float, *, store: bool = True, then: Callable[[], object] = _nothing
    ) -> Future[bool]:
        """Ask for an empty cache: done once neither requests nor transfers are left. False when out of time.

        `store`: storage gets what it lacks before. `then` is called before anything else happens; what it raises is the
        result's.
        """
        result: Future[bool] = Future()
        flush = _Flush(time.monotonic() + timeout_s, store, then, result)
        self._post(lambda: self._begin_flush(flush))
        return result

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two steps."""
        result: Future[T] = Future()
        self._post(lambda: _resolve(result, function))
        return result

    def stop(self, deadline_s: float) -> bool:
        """Finish the requests and store what is to be stored, within `deadline_s`; then end the thread.

        What is unfinished by then is aborted. True if nothing had to be cut short. Blocks; idempotent.
        """
        # If it stopped or failed before, only the thread's end is left to wait for.
        with contextlib.suppress(EngineStoppedError):
            self._post(lambda: self._begin_stop(time.monotonic() + deadline_s))
        if self._thread.ident is not None:
            self._thread.join()
        return self._orderly

    def _post(self, command: Callable[[], None]) -> None:
        if not self._mailbox.post(command):
            raise EngineStoppedError("the engine is not running") from self.failure

    # -- on the scheduler thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._scheduler.start()
            self.started.set_result(None)
            self._loop()
            self._orderly = self._end_orderly()
        except (
            BaseException
        ) as error:  # the last frame of the thread: whoever waits must hear of it
            logger.exception("the scheduler failed")
            self._fail(error)
        finally:
            self._close()

    def _loop(self) -> None:
        while not self._may_stop():
            for command in self._mailbox.take_all():
                command()
            if self._scheduler.step():
                self._was_busy = True
                self._expire_flush()
                continue
            self._on_quiet()
            self._expire_flush()
            self._wait()

    def _on_quiet(self) -> None:
        """No step was possible: the place for checks and for a flush."""
        if self._scheduler.busy():
            return
        if self._was_busy:
            self._was_busy = False
            self._scheduler.check_idle()
        if self._flush is not None and not self._tree.has_pending_work():
            self._do_flush(self._flush)

    def _wait(self) -> None:
        if self._tree.has_pending_work():
            self._tree.wait_events(_EVENT_WAIT_S)
        elif self._scheduler.busy():
            self._mailbox.wait(_EVENT_WAIT_S)
        elif self._stop_at_s is None:
            self._mailbox.wait(_IDLE_WAIT_S)

    def _submit(self, request: GenerateRequest) -> None:
        if self._stop_at_s is not None or self.failure is not None:
            self._scheduler.reject(request, "the engine is shutting down")
        else:
            self._scheduler.submit(request)

    def _abort(self, rid: str) -> None:
        self._scheduler.abort(rid)
        self._was_busy = True

    def _begin_flush(self, flush: _Flush) -> None:
        if self._flush is not None or self._stop_at_s is not None or self.failure is not None:
            flush.result.set_result(False)
        else:
            self._flush = flush

    def _do_flush(self, flush: _Flush) -> None:
        self._flush = None
        stored = not flush.store or self._tree.flush_to_storage(
            max(0.0, flush.deadline_s - time.monotonic())
        )
        if self._tree.has_pending_work():
            flush.result.set_result(False)
            return
        if not stored:
            logger.warning("the cache is emptied, though storage did not take all of it")
        self._scheduler.flush()
        _resolve(flush.result, lambda: bool(flush.then()) or True)

    def _expire_flush(self) -> None:
        if self._flush is not None and time.monotonic() >= self._flush.deadline_s:
            flush, self._flush = self._flush, None
            flush.result.set_result(False)

    def _begin_stop(self, deadline_s: float) -> None:
        # A second call may only bring the end nearer.
        self._stop_at_s = (
            deadline_s if self._stop_at_s is None else min(self._stop_at_s, deadline_s)
        )

    def _may_stop(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self._scheduler.busy() or time.monotonic() >= self._stop_at_s

    def _end_orderly(self) -> bool:
        assert self._stop_at_s is not None
        unfinished = self._scheduler.rids()
        for rid in unfinished:
            self._scheduler.abort(rid, "the engine is shutting down")
        stored = self._tree.flush_to_storage(max(0.0, self._stop_at_s - time.monotonic()))
        ended = self._tree.shutdown(max(0.0, self._stop_at_s - time.monotonic()))
        return stored and ended and not unfinished

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._scheduler.fail_all(f"the engine failed: {error}")
        if not self.started.done():
            self.started.set_exception(error)

    def _close(self) -> None:
        """Answer whoever still waits for an answer."""
        if self._flush is not None:
            self._flush.result.set_result(False)
        for command in self._mailbox.close():
            command()


def _resolve(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except Exception as error:  # belongs to whoever asked
        result.set_exception(error)
