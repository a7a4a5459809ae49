"""Decides what the device does next, and gives every request its tokens.

One iteration (`step`) runs the timetable of the cache:

    poll and settle transfers -> match -> plan loads -> submit loads -> forward -> insert -> submit backups

Without overlap a step's tokens are read before the next step is planned. With overlap the next step goes out first: the
input token of a decode stays on the device, and a request that turns out to have ended has run one step too many,
whose result is dropped. Everything is dispatched from this one thread, so gathers, scatters and forwards reach the
device in the order in which they are called here, and pages that a finished request gave back can be handed out again
while its last step still runs.

Prefill steps take turns with decode steps while there are both. Waiting requests are served first come first served,
except that one whose prefetch from storage is not there yet lets others pass.

All methods are called on the scheduler thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from .admission import Admission, PrefillAdder
from .decode_reserve import DecodeReserve
from .device_memory import DeviceMemory
from .engine_metrics import EngineMetrics
from .fault import SchedulerFault
from .forward_batch import ForwardBatch, ForwardItem, ForwardMode, StepOutput
from .item_builder import ItemBuilder
from .outputs import FinishKind, FinishReason, OutputChunk, TokenLogprob
from .req import GenerateRequest, Req
from .req_to_token_pool import ReqToTokenPool
from .room import Room
from .state_tracking import StateTracking
from .step import InFlightStep, read_logprobs
from .step_times import StepTimes
from .stop import finish_reason
from .swa_allocator import TokenAllocator
from .tree_cache import TreeCache

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What dispatches steps to the device."""

    def warm_up(self) -> None:
        """Compile what steps need."""

    def dispatch(self, batch: ForwardBatch) -> StepOutput:
        """Start a step; returns at once, with futures."""


@dataclass(frozen=True)
class SchedulerConfig:
    """`chunked_prefill_size`: tokens of one prefill step. `decode_reserve_ratio`: see `DecodeReserve`.

    `raise_on_idle_check`: a leak found while idle raises instead of being logged.
    """

    chunked_prefill_size: int
    overlap: bool = True
    decode_reserve_ratio: float = 0.5
    raise_on_idle_check: bool = False


class Scheduler:
    """Continuous batching over one runner, one prefix cache and the pools of one model."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        tree: TreeCache,
        req_to_token_pool: ReqToTokenPool,
        allocator: TokenAllocator,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._runner = runner
        self._tree = tree
        self._rows = req_to_token_pool
        self._allocator = allocator
        self._memory = DeviceMemory(tree, allocator, req_to_token_pool, config.chunked_prefill_size)
        self._tracking = _tracking_of(tree, req_to_token_pool)
        self._builder = ItemBuilder(
            req_to_token_pool, allocator, self._memory.window, self._tracking
        )
        self._metrics = metrics
        self._clock = clock
        self._reserve = DecodeReserve(config.decode_reserve_ratio)
        self._by_rid: dict[str, Req] = {}
        self._waiting: deque[Req] = deque()
        # Whoever holds slots, in the order of admission; some with an unfinished prompt.
        self._admitted: list[Req] = []
        self._in_flight: InFlightStep | None = None
        self._last_mode = ForwardMode.DECODE
        self._last_settled_s = 0.0
        self._num_settled = 0
        self.decode_times = StepTimes()

    # -- requests --------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._by_rid)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._waiting)

    def busy(self) -> bool:
        """True while a request or a dispatched step is unfinished."""
        return bool(self._by_rid) or self._in_flight is not None

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request and start its prefetch. Its `rid` must not be that of another unfinished request."""
        if request.rid in self._by_rid:
            raise ValueError(f"rid {request.rid!r} is in use")
        req = Req(request)
        self._by_rid[req.rid] = req
        self._waiting.append(req)
        self._tree.start_prefetch(req.rid, req.prefix_key())
        self._show_counts()

    def reject(self, request: GenerateRequest, message: str) -> None:
        """Tell a client that its request is not taken."""
        req = Req(request)
        req.finish = FinishReason(FinishKind.ABORT, message=message)
        self._emit(req)

    def abort(self, rid: str, message: str = "aborted") -> bool:
        """End a request wherever it stands and free all that it holds. False if there is none of that name."""
        req = self._by_rid.get(rid)
        if req is None:
            return False
        insert = req in self._admitted and not req.prefilling
        self._end(req, FinishReason(FinishKind.ABORT, message=message), insert=insert)
        return True

    def fail_all(self, message: str) -> None:
        """Tell every request that the engine broke; frees nothing, because nothing can be trusted any more."""
        for req in list(self._by_rid.values()):
            req.finish = FinishReason(FinishKind.ERROR, message=message)
            self._emit(req)
        self._by_rid.clear()

    def rids(self) -> list[str]:
        """Names of the unfinished requests."""
        return list(self._by_rid)

    # -- one iteration ---------------------------------------------------------------------------

    def start(self) -> None:
        """Compile everything, before the first request."""
        # The transfers first: steps then meet buffers as transfers leave them.
        self._tree.precompile_hicache_transfers()
        self._runner.warm_up()

    def step(self) -> bool:
        """One iteration of the loop. False if there was nothing to dispatch and nothing to read."""
        started_s, settled_before = self._clock(), self._num_settled
        self._tree.check_hicache_events()
        launched = self._launch(started_s)
        unblocked = launched is None and self._unblock()
        if not self._config.overlap:
            if launched is not None:
                self._settle(launched)
        else:
            previous, self._in_flight = self._in_flight, launched
            if previous is not None:
                self._settle(previous)
        return launched is not None or unblocked or self._num_settled > settled_before

    def _launch(self, started_s: float) -> InFlightStep | None:
        prefill_first = not (self._decodable() and self._last_mode is ForwardMode.EXTEND)
        plans = (self._launch_extend, self._launch_decode)
        for launch in plans if prefill_first else reversed(plans):
            step = launch(started_s)
            if step is not None:
                self._last_mode = step.output.batch.mode
                return step
        return None

    def _unblock(self) -> bool:
        """When the unfinished prompts leave each other no room: the oldest gets that of the youngest."""
        waits = self._in_flight is not None or self._tree.has_pending_work()
        if waits or not self._admitted:
            return False
        if len(self._admitted) > 1:
            self._retract(self._admitted[-1])
        else:
            self._end_without_room(self._admitted[0])
        return True

    def _dispatch(
        self, mode: ForwardMode, items: Iterable[ForwardItem], reqs: Iterable[Req], started_s: float
    ) -> InFlightStep:
        output = self._runner.dispatch(ForwardBatch(mode, tuple(items)))
        for req, item in zip(reqs, output.batch.items, strict=True):
            req.num_sampled += item.wants_token
        return InFlightStep(output, tuple(reqs), started_s)

    # -- prefill ---------------------------------------------------------------------------------

    def _launch_extend(self, started_s: float) -> InFlightStep | None:
        unfinished = [req for req in self._admitted if req.prefilling]
        if not self._waiting and not unfinished:
            return None
        adder = PrefillAdder(
            self._memory,
            self._rows,
            self._builder,
            self._tracking,
            self._config.chunked_prefill_size,
            self._admitted,
            self._reserve.ratio,
        )
        # What one request finds no room for, no younger one may take.
        if all(adder.add_chunk(req) is Admission.ADMITTED for req in unfinished):
            self._admit(adder)
        self._tree.finish_load_back(adder.load_plans)
        if not adder.items:
            return None
        step = self._dispatch(ForwardMode.EXTEND, adder.items, adder.reqs, started_s)
        self._after_extend(step)
        return step

    def _admit(self, adder: PrefillAdder) -> None:
        for req in list(self._waiting):
            if adder.full:
                break  # before asking for a prefetch: its deadline runs once its request could be admitted
            if not self._prefetch_done(req):
                continue
            device_len = self._add(adder, req)
            if device_len is None:
                break
            self._waiting.remove(req)
            if req.tiers is None:
                req.admitted_s = self._clock()
                req.tiers = self._tree.tier_tokens(
                    req.rid, req.prompt_len, device_len, req.cache_protected_len
                )

    def _add(self, adder: PrefillAdder, req: Req) -> int | None:
        """Tokens that the request found on the device, before any load; None if it has to wait."""
        verdict = adder.add(req)
        if verdict is Admission.ADMITTED:
            return adder.matched_len
        if verdict is Admission.NO_ROOM and self._nothing_will_change(adder):
            message = f"{req.prompt_len} prompt tokens do not fit the device pool"
            self._end(req, FinishReason(FinishKind.ERROR, message=message), insert=False)
        return None

    def _nothing_will_change(self, adder: PrefillAdder) -> bool:
        return not (adder.items or self._admitted or self._in_flight is not None) and (
            not self._tree.has_pending_work()
        )

    def _prefetch_done(self, req: Req) -> bool:
        req.prefetch_done = req.prefetch_done or self._tree.prefetch_ready(req.rid)
        return req.prefetch_done

    def _after_extend(self, step: InFlightStep) -> None:
        """Hand the computed pages to the cache: in data order that is after the forward that writes them."""
        for req in step.reqs:
            self._tree.cache_unfinished_req(req)
            if req not in self._admitted:
                self._admitted.append(req)
        self._show_counts()

    # -- decode ----------------------------------------------------------------------------------

    def _decodable(self) -> list[Req]:
        """The requests whose next step is one more token."""
        return [
            req for req in self._admitted if not req.prefilling and req.remaining_new_tokens > 0
        ]

    def _launch_decode(self, started_s: float) -> InFlightStep | None:
        candidates = self._decodable()
        if not candidates:
            return None
        self._tree.flush_write_through_acks()
        for req in candidates:
            self._memory.free_before_window(req, req.kv_committed_len)
        reqs = self._make_room_for_decode()
        if not reqs:
            return None
        slots = self._allocator.alloc_decode(
            [req.kv_committed_len + 1 for req in reqs], [self._last_slot(req) for req in reqs]
        )
        if slots is None:
            raise SchedulerFault("the allocator refuses pages that it said are free")
        self._reserve.on_decode_step()
        items = [
            self._builder.build(
                req, req.kv_committed_len, slots[i : i + 1], token_ids=None, wants_token=True
            )
            for i, req in enumerate(reqs)
        ]
        return self._dispatch(ForwardMode.DECODE, items, reqs, started_s)

    def _make_room_for_decode(self) -> list[Req]:
        """The requests that can take one more token now. Retracts the youngest until the others fit."""
        while True:
            reqs = self._decodable()
            growths = (
                self._memory.growth(req.kv_committed_len, req.kv_committed_len + 1) for req in reqs
            )
            if self._memory.ensure(sum(growths, Room())):
                return reqs
            if self._in_flight is not None:
                # Its tokens may end requests; and what is retracted must know all its tokens.
                step, self._in_flight = self._in_flight, None
                self._settle(step)
            elif len(self._admitted) > 1:
                self._retract(self._admitted[-1])
            elif self._tree.has_pending_work():
                return []  # a transfer holds pages; the next round asks again
            else:
                self._end_without_room(reqs[0])

    def _end_without_room(self, req: Req) -> None:
        message = "the device pools have no room left for this request"
        self._end(req, FinishReason(FinishKind.ERROR, message=message), insert=False)

    def _last_slot(self, req: Req) -> int:
        return int(self._rows.req_to_token[req.req_pool_idx, req.kv_committed_len - 1])

    def _retract(self, req: Req) -> None:
        """Send a request back to the head of the queue. The oldest one is never chosen, so it always gets on."""
        self._release(req, insert=False)
        req.reset_for_retract()
        self._waiting.appendleft(req)
        self._reserve.on_retraction()
        self._metrics.on_retraction()
        logger.info("retracted %s: no page left for its next token", req.rid)

    # -- results ---------------------------------------------------------------------------------

    def _settle(self, step: InFlightStep) -> None:
        """Read a step's tokens (blocks until the device is done) and give them to their requests."""
        sampled = read_logprobs(step.output)
        self._allocator.free_group_begin()
        try:
            for req, item, token in zip(step.reqs, step.output.batch.items, sampled, strict=True):
                if item.wants_token and not req.finished:
                    self._accept(req, token)
                if step.output.batch.mode is ForwardMode.DECODE and not req.finished:
                    self._at_checkpoint(req, item.prefix_len + item.num_tokens)
        finally:
            self._allocator.free_group_end()
        self._num_settled += 1
        now_s = self._clock()
        if step.output.batch.mode is ForwardMode.DECODE:
            seconds = now_s - max(self._last_settled_s, step.started_s)
            self.decode_times.add(seconds)
            self._metrics.on_decode_step(seconds)
        self._last_settled_s = now_s

    def _accept(self, req: Req, token: TokenLogprob) -> None:
        req.output_ids.append(token.token_id)
        if req.request.return_logprob:
            req.pending_logprobs.append(token)
        if req.first_token_s is None:
            req.first_token_s = self._clock()
        self._metrics.on_token()
        reason = _finish_reason(req, token.token_id)
        if reason is None and req.request.stream and not self._emit(req):
            reason = FinishReason(FinishKind.ABORT, message="its client takes no more tokens")
        if reason is not None:
            self._end(req, reason, insert=True)

    def _at_checkpoint(self, req: Req, seq_len: int) -> None:
        """Hand the cache a running answer's pages where it keeps windows and states: the window moves on from there."""
        interval = self._tree.checkpoint_interval
        if interval and seq_len % interval == 0:
            req.fill_ids = req.all_token_ids[:seq_len]
            self._tree.cache_unfinished_req(req)

    def _end(self, req: Req, reason: FinishReason, insert: bool) -> None:
        """The one way out of the scheduler: frees whatever the request holds and tells its client."""
        req.finish = reason
        if req in self._waiting:
            self._waiting.remove(req)
        else:
            self._release(req, insert)
        self._tree.release_prefetch(req.rid)
        del self._by_rid[req.rid]
        req.finished_s = self._clock()
        self._emit(req)
        self._metrics.on_finished(reason.kind, req.stats())
        self._show_counts()

    def _release(self, req: Req, insert: bool) -> None:
        self._tree.cache_finished_req(req, is_insert=insert)
        self._rows.free(req.req_pool_idx)
        self._rows.free_states(req)
        self._admitted.remove(req)

    def _emit(self, req: Req) -> bool:
        """Hand over what is new. A sink that raises is the trouble of its request only: logged, and False."""
        new_ids = tuple(req.output_ids[req.num_emitted :])
        req.num_emitted = len(req.output_ids)
        logprobs, req.pending_logprobs = tuple(req.pending_logprobs), []
        try:
            req.request.sink(OutputChunk(req.rid, new_ids, logprobs, req.finish, req.stats()))
        except Exception:
            logger.exception("the tokens of %s cannot be delivered", req.rid)
            return False
        return True

    def _show_counts(self) -> None:
        self._metrics.set_requests(len(self._waiting), len(self._by_rid) - len(self._waiting))

    # -- idle ------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Without requests, all slots of every pool must be free or the cache's, and all rows free. Logs or raises."""
        found = self._memory.check_conservation() or self._rows.held()
        if found is None:
            return
        if self._config.raise_on_idle_check:
            raise SchedulerFault(found)
        logger.error("idle, and yet: %s", found)

    def state(self) -> dict[str, Any]:
        """Numbers of this moment, JSON-able; sizes in tokens, of recurrent states a number."""
        return {
            "waiting_requests": len(self._waiting),
            "running_requests": len(self._by_rid) - len(self._waiting),
            **self._memory.state(),
            "pending_transfers": self._tree.has_pending_work(),
            "decode_step": self.decode_times.summary(),
        }

    def flush(self) -> None:
        """Forget everything that is cached. Only while neither a request nor a transfer is unfinished."""
        if self.busy() or self._tree.has_pending_work():
            raise SchedulerFault("flush while requests or transfers are unfinished")
        self._tree.reset()
        self._rows.clear()
        self._allocator.clear()


def _finish_reason(req: Req, token_id: int) -> FinishReason | None:
    """As `finish_reason`; a stop condition that raises ends its own request and no other."""
    try:
        return finish_reason(req, token_id)
    except Exception as error:
        logger.exception("the stop conditions of %s cannot be judged", req.rid)
        return FinishReason(FinishKind.ERROR, message=f"its stop conditions failed: {error}")


def _tracking_of(tree: TreeCache, rows: ReqToTokenPool) -> StateTracking:
    tracks = rows.track_slots > 0
    if rows.request_owned_slots and tracks != tree.recurrent_extra_buffer_active():
        raise ValueError(
            f"requests have {rows.track_slots} track slots, but the cache "
            f"{'does not use' if tracks else 'needs'} them"
        )
    interval = tree.recurrent_track_interval if tracks else 0
    return StateTracking(active=rows.request_owned_slots > 0, interval=interval)


__all__ = ["Runner", "Scheduler", "SchedulerConfig", "SchedulerFault"]
