"""The engine's scheduler with what HiCache needs of it and the engine has no hook for.

Arrival asks storage, an end of any kind forgets the prefetch, answers carry the tiers, a flush and an orderly end bring
to storage what is not there yet. All methods run on the scheduler thread.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from sgl_jax.srt.managers import scheduler as engine_scheduler
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.tree_types import MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .cache_builder import CacheBuilder
from .cache_control import STATE_KEY, CacheCommand, CacheControl
from .cached_tokens import CachedTokens
from .prefill_adder import request_name
from .replacing import replaced
from .stop_switch import SWITCHES, StopSwitch

logger = logging.getLogger(__name__)

FLUSH_DEADLINE_S = 30.0
"""How long a flush, and an orderly end, wait for storage."""

WORKERS_DEADLINE_S = 5.0
"""How long an orderly end waits for workers that are busy, after that."""


@dataclass(frozen=True)
class EndOfAll:
    """Among the requests of a round: every process of the engine ends now."""


class HiCacheScheduler(Scheduler):
    """See the module."""

    tree_cache: UnifiedRadixCache

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asked_storage: set[str] = set()
        self._prompt_tokens: Counter[str] = Counter()
        self._switch = StopSwitch()
        self._control: CacheControl | None = None
        super().__init__(*args, **kwargs)
        # From here on the loop will see the switch; before, a signal ends the process as it always did.
        if threading.current_thread() is threading.main_thread() and not (
            self.server_args.enable_single_process
        ):
            self._switch.listen_to_signals()
        else:
            SWITCHES.append(self._switch)

    def init_memory_pool_and_cache(self) -> None:
        """With our cache. A configuration that can not work is one line in the log before the engine's trace."""
        builder = CacheBuilder(
            self.tp_worker.worker.model_runner.model, engine_scheduler.build_kv_cache
        )
        try:
            with replaced(engine_scheduler, "build_kv_cache", builder):
                super().init_memory_pool_and_cache()
        except HiCacheConfigError as error:
            print(f"sgl_jax_hicache: {error}", file=sys.stderr, flush=True)
            raise

    # -- requests ----------------------------------------------------------------------------------------------------

    def _add_request_to_queue(self, req: Any) -> None:
        super()._add_request_to_queue(req)
        self._ask_storage(req)

    def _extend_requests_to_queue(self, reqs: list[Any], is_retracted: bool = False) -> None:
        super()._extend_requests_to_queue(reqs, is_retracted)
        for req in reqs:
            self._ask_storage(req)

    def _ask_storage(self, req: Any) -> None:
        """Once per request: a retracted one has had its prefix, a refused one needs none."""
        if req.is_retracted or req.to_finish is not None or req.finished():
            return
        name = request_name(req)
        if name in self._asked_storage:
            return
        self._asked_storage.add(name)
        key = RadixKey(req.adjust_max_prefix_ids(), req.extra_key, req.dp_rank)
        self.tree_cache.start_prefetch(name, key)

    def _forget(self, name: str) -> None:
        if name in self._asked_storage:
            self._asked_storage.remove(name)
            self.tree_cache.release_prefetch(name)

    def _cached_prefix_len(self, token_ids: list[int], extra_key: str | None, dp_rank: int) -> int:
        """What routes a request to a data-parallel rank: host pages count like device pages, each rank has its own."""
        key = RadixKey(token_ids, extra_key, dp_rank)
        match = self.tree_cache.match_prefix(MatchPrefixParams(key))
        return len(match.device_indices) + match.host_hit_length

    def _get_dp_load_snapshot(self) -> tuple[list[int], list[int]]:
        """Requests that wait for their pages are load too: the engine counts what runs, and would give them and all
        that arrive meanwhile to the first rank."""
        counts, tokens = super()._get_dp_load_snapshot()
        for req in self.waiting_queue:
            counts[req.dp_rank or 0] += 1
            tokens[req.dp_rank or 0] += self._estimate_req_tokens(req)
        return counts, tokens

    def _get_dp_io_snapshot(self) -> tuple[list[int], list[int]]:
        """The same, prompts and answers apart."""
        prompts, answers = super()._get_dp_io_snapshot()
        for req in self.waiting_queue:
            prompt_len, answer_len = self._estimate_req_input_output_tokens(req)
            prompts[req.dp_rank or 0] += prompt_len
            answers[req.dp_rank or 0] += answer_len
        return prompts, answers

    def abort_request(self, recv_req: Any) -> None:
        """Those that waited leave without another call; their prefetch is forgotten here."""
        waited = {request_name(req) for req in self.waiting_queue}
        super().abort_request(recv_req)
        for name in waited.difference(map(request_name, self.waiting_queue)):
            self._forget(name)

    def stream_output_generation(self, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
        """Let the count of reused tokens carry their tiers."""
        for req in reqs:
            tiers = getattr(req, "hicache_tiers", None)
            if tiers is not None and type(req.cached_tokens) is int:
                req.cached_tokens = CachedTokens(req.cached_tokens, asdict(tiers))
            if req.finished():
                self._finished(req)
        super().stream_output_generation(reqs, *args, **kwargs)

    def _finished(self, req: Any) -> None:
        name = request_name(req)
        if name in self._asked_storage and hasattr(req, "hicache_tiers"):
            self._prompt_tokens.update(asdict(req.hicache_tiers))
        self._forget(name)

    def process_batch_result_decode(
        self, batch: Any, result: Any, launch_done: threading.Event | None = None
    ) -> None:
        """With what an answer leaves at checkpoints on its way; the engine's cache hears of an answer at its end only.

        Every forward step that was started has taken its buffers by then, so pages may be gathered.
        """
        super().process_batch_result_decode(batch, result, launch_done)
        interval = self.tree_cache.checkpoint_interval
        if not interval or not (self.spec_algorithm is None or self.spec_algorithm.is_none()):
            return
        for info in batch.reqs_info:
            for req in info.reqs or ():
                # The token that was sampled last has no KV yet, or only in the step that runs now.
                seq_len = len(req.origin_input_ids) + len(req.output_ids) - 1
                if seq_len % interval == 0 and not (req.finished() or req.is_retracted):
                    req.fill_ids = [*req.origin_input_ids, *req.output_ids][:seq_len]
                    self.tree_cache.cache_unfinished_req(req)

    def on_idle(self) -> None:
        """Nobody waits: whatever prefetch is left belongs to a request that ended in a way with no hook."""
        if self._asked_storage and self.is_fully_idle():
            for name in list(self._asked_storage):
                self._forget(name)
        super().on_idle()

    def check_tree_cache(self) -> None:
        """With `--log-level debug` only: the engine walks the whole tree in every idle round, and in a large one a new
        request would wait for that. That no slot is lost is checked in every idle round all the same."""
        if logger.isEnabledFor(logging.DEBUG):
            self.tree_cache.check_invariants()

    # -- flush, state, end -------------------------------------------------------------------------------------------

    def flush_cache(self) -> tuple[bool, str, int]:
        """Storage gets what it lacks before device and host forget it."""
        if self.is_fully_idle() and not self.tree_cache.flush_to_storage(FLUSH_DEADLINE_S):
            logger.warning("HiCache: not everything reached storage before the flush")
        flushed: tuple[bool, str, int] = super().flush_cache()
        return flushed

    def set_internal_state(self, recv_req: Any) -> Any:
        """A command for the cache, or what the engine knows."""
        command = recv_req.state_data.get(STATE_KEY)
        if not isinstance(command, CacheCommand):
            return super().set_internal_state(recv_req)
        control = self._control
        if control is None:
            control = self._control = CacheControl(
                self.tree_cache, self.nnodes, self._flush_without_storing
            )
        output = super().set_internal_state(replace(recv_req, state_data={}))
        # As it is: the launching process, which waits for it, reads this.
        output.cache_answer = control.answer(command)
        return output

    def _flush_without_storing(self) -> str | None:
        flushed, reason, _ = super().flush_cache()
        return None if flushed else reason

    def get_internal_state(self, recv_req: Any) -> Any:
        """With the prompt tokens of ended requests by tier."""
        output = super().get_internal_state(recv_req)
        output.internal_state["hicache_prompt_tokens"] = dict(self._prompt_tokens)
        return output

    def recv_requests(self) -> Any:
        """The top of every round, where an end is safe: no gather or scatter is half done."""
        if self.nnodes == 1 and self._end_is_due():
            self._end()
        return super().recv_requests()

    def run_publisher(self, recv_reqs: list[Any]) -> Any:
        """With several processes rank 0 decides, and tells the others with the requests of the round."""
        if self._end_is_due():
            recv_reqs.append(EndOfAll())
        return super().run_publisher(recv_reqs)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Without what the engine does not know."""
        theirs = [req for req in recv_reqs if not isinstance(req, EndOfAll)]
        super().process_input_requests(theirs)
        if len(theirs) < len(recv_reqs):
            self._end()

    def _end_is_due(self) -> bool:
        return self._switch.wanted and self._switch.due(self.is_fully_idle())

    def _end(self) -> None:
        """Bring to storage what is not there, stop the workers and end the process, or the thread that is this."""
        stored = self.tree_cache.flush_to_storage(FLUSH_DEADLINE_S)
        ended = self.tree_cache.shutdown(WORKERS_DEADLINE_S)
        logger.info(
            "HiCache: the end is %s", "in order" if stored and ended else "not in order: see above"
        )
        self._switch.ended.set()
        if self.server_args.enable_single_process:
            raise SystemExit(0)  # of this thread
        logging.shutdown()
        # The forward thread waits for work for ever, and the interpreter would wait for it.
        os._exit(0)
