"""Is the engine built as we expect where we take hold of it?

Every function that is replaced, overridden or called is listed here with the parameters it had, and, where it matters,
with the names it looks up when it runs: only if `Scheduler.get_new_batch_prefill` itself asks its module for
`PrefillAdder` does a replacement there reach it. An engine that differs is refused at start, before a model is loaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import TESTED_COMMIT, TESTED_DATE, EngineMismatchError


@dataclass(frozen=True)
class Seam:
    """One function of the engine: its module, its path there, its parameters in order, names that it must look up."""

    module: str
    path: str
    parameters: tuple[str, ...] | None
    looks_up: tuple[str, ...] = ()

    def fault(self) -> str | None:
        """What is not as expected, or None."""
        where = f"{self.module}.{self.path}"
        try:
            found: Any = importlib.import_module(self.module)
            for name in self.path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            return f"{where} is not there ({error})"
        if self.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters != self.parameters:
                return (
                    f"{where} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)})"
                )
        missing = [name for name in self.looks_up if name not in _names_in(found)]
        if missing:
            return f"{where} does not use {', '.join(missing)}"
        return None


_ENGINE = "sgl_jax.srt.entrypoints.engine"
_SCHEDULER = "sgl_jax.srt.managers.scheduler"
_POLICY = "sgl_jax.srt.managers.schedule_policy"
_TOKENIZER = "sgl_jax.srt.managers.tokenizer_manager"

FLAG_SEAMS: tuple[Seam, ...] = (
    Seam(
        "sgl_jax.srt.server_args",
        "ServerArgs.from_cli",
        ("argv",),
        ("add_cli_args", "from_cli_args"),
    ),
    Seam("sgl_jax.srt.server_args", "ServerArgs.from_cli_args", ("args",), ("fields",)),
    Seam("sgl_jax.srt.server_args", "ServerArgs.__post_init__", ("self",)),
)
"""What reading the flags takes hold of."""

LAUNCHING_SEAMS: tuple[Seam, ...] = (
    Seam(
        _ENGINE,
        "_launch_subprocesses",
        ("server_args", "port_args"),
        ("run_scheduler_process", "run_detokenizer_process", "TokenizerManager"),
    ),
    Seam(
        _ENGINE,
        "_launch_threads",
        ("server_args", "port_args"),
        ("run_scheduler_loop_thread_after_create", "TokenizerManager"),
    ),
    Seam(_ENGINE, "run_scheduler_process", ("server_args", "port_args", "dp_rank", "pipe_writer")),
    Seam(_ENGINE, "run_scheduler_loop_thread_after_create", ("server_args", "port_args")),
    Seam(_ENGINE, "run_detokenizer_process", ("server_args", "port_args")),
    Seam(_ENGINE, "Engine.__init__", ("self", "kwargs"), ("_launch_subprocesses_or_threads",)),
    Seam(_ENGINE, "Engine.shutdown", ("self",)),
    Seam(
        "sgl_jax.srt.entrypoints.http_server",
        "launch",
        ("server_args", "pipe_finish_writer", "launch_callback"),
        ("_launch_subprocesses_or_threads",),
    ),
    Seam("sgl_jax.srt.entrypoints.http_server", "flush_cache", (), ("_global_state",)),
    Seam(
        _TOKENIZER,
        "TokenizerManager.set_internal_state",
        ("self", "obj"),
        ("set_internal_state_communicator",),
    ),
    Seam(_TOKENIZER, "TokenizerManager.generate_request", None),
    Seam("sgl_jax.srt.managers.io_struct", "SetInternalStateReq", ("request_id", "state_data")),
    Seam(_TOKENIZER, "TokenizerManager._wait_one_response", ("self", "obj", "state", "request")),
    Seam(
        _TOKENIZER,
        "TokenizerManager.sigterm_watchdog",
        ("self",),
        ("gracefully_exit", "rid_to_state", "health_check_failed", "kill_process_tree"),
    ),
    Seam(
        _TOKENIZER,
        "TokenizerManager.auto_create_handle_loop",
        ("self",),
        ("sigterm_watchdog",),
    ),
    Seam(
        _TOKENIZER,
        "TokenizerManager._handle_batch_output",
        ("self", "recv_obj"),
        ("cached_tokens",),
    ),
)
"""What the launching process takes hold of."""

SCHEDULER_SEAMS: tuple[Seam, ...] = (
    Seam(
        _SCHEDULER,
        "run_scheduler_process",
        ("server_args", "port_args", "dp_rank", "pipe_writer"),
        ("Scheduler",),
    ),
    Seam(
        _SCHEDULER,
        "run_scheduler_loop_thread_after_create",
        ("server_args", "port_args"),
        ("Scheduler",),
    ),
    Seam(
        _SCHEDULER,
        "build_kv_cache",
        (
            "server_args",
            "model_config",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "page_size",
            "is_hybrid",
            "is_hybrid_recurrent",
            "sliding_window_size",
            "tp_size",
            "spec_algorithm",
            "mesh",
        ),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.init_memory_pool_and_cache",
        ("self",),
        ("build_kv_cache", "tp_worker", "_donation_barrier", "_wait_donation_safe"),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.get_new_batch_prefill",
        ("self",),
        ("PrefillAdder", "check_hicache_events", "add_one_req", "pending_h2d"),
    ),
    Seam(_SCHEDULER, "Scheduler._flush_pending_h2d", ("self",), ("finish_load_back",)),
    Seam(
        _SCHEDULER,
        "Scheduler.update_running_batch",
        ("self", "batch"),
        ("flush_write_through_acks",),
    ),
    Seam(_SCHEDULER, "Scheduler._add_request_to_queue", ("self", "req"), ("waiting_queue",)),
    Seam(
        _SCHEDULER,
        "Scheduler._extend_requests_to_queue",
        ("self", "reqs", "is_retracted"),
        ("waiting_queue",),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._cached_prefix_len",
        ("self", "token_ids", "extra_key", "dp_rank"),
        ("device_indices",),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._get_dp_load_snapshot",
        ("self",),
        ("running_batch", "last_batch", "_estimate_req_tokens"),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._get_dp_io_snapshot",
        ("self",),
        ("running_batch", "last_batch", "_estimate_req_input_output_tokens"),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.abort_request",
        ("self", "recv_req"),
        ("waiting_queue", "grammar_queue"),
    ),
    Seam(_SCHEDULER, "Scheduler.recv_requests", ("self",), ("broadcast_pyobj",)),
    Seam(_SCHEDULER, "Scheduler.broadcast_pyobj", ("self", "recv_reqs"), ("run_publisher",)),
    Seam(_SCHEDULER, "Scheduler.run_publisher", ("self", "recv_reqs"), ("send",)),
    Seam(_SCHEDULER, "Scheduler.process_input_requests", ("self", "recv_reqs")),
    Seam(_SCHEDULER, "Scheduler.event_loop_normal", ("self",), ("recv_requests", "on_idle")),
    Seam(_SCHEDULER, "Scheduler.event_loop_overlap", ("self",), ("recv_requests", "on_idle")),
    Seam(_SCHEDULER, "Scheduler.on_idle", ("self",), ("is_fully_idle", "check_tree_cache")),
    Seam(_SCHEDULER, "Scheduler.check_tree_cache", ("self",), ("sanity_check",)),
    Seam(_SCHEDULER, "Scheduler.flush_cache", ("self",), ("tree_cache", "reset")),
    Seam(_SCHEDULER, "Scheduler.get_internal_state", ("self", "recv_req")),
    Seam(_SCHEDULER, "Scheduler.set_internal_state", ("self", "recv_req"), ("state_data",)),
    Seam(
        _SCHEDULER,
        "Scheduler.stream_output_generation",
        (
            "self",
            "reqs",
            "return_logprob",
            "return_output_logprob_only",
            "skip_reqs",
            "cache_miss_count",
        ),
        ("cached_tokens",),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.process_batch_result_decode",
        ("self", "batch", "result", "launch_done"),
        ("resolve_last_batch_result", "check_finished", "release_kv_cache", "is_retracted"),
    ),
    Seam(_SCHEDULER, "Scheduler.process_batch_result", None, ("process_batch_result_decode",)),
    Seam(
        _POLICY,
        "PrefillAdder.add_one_req",
        ("self", "req"),
        ("can_run_list", "init_load_back", "host_hit_length", "_lock_node"),
    ),
    Seam(_POLICY, "AddReqResult.CONTINUE", None),
    Seam(
        "sgl_jax.srt.managers.schedule_batch", "Req.adjust_max_prefix_ids", ("self",), ("fill_ids",)
    ),
    Seam("sgl_jax.srt.managers.schedule_batch", "Req.pop_committed_kv_cache", ("self",)),
    Seam("sgl_jax.srt.mem_cache.swa_radix_cache", "SWARadixCache.register", ("subclass",)),
)
"""What the scheduler's process takes hold of."""


_FAULTS_TOLD = 3


def check(seams: Sequence[Seam]) -> None:
    """Raise EngineMismatchError, naming what differs, unless all seams are as they were."""
    faults = [fault for seam in seams if (fault := seam.fault()) is not None]
    if faults:
        more = f"; and {len(faults) - _FAULTS_TOLD} more" if len(faults) > _FAULTS_TOLD else ""
        told = "; ".join(faults[:_FAULTS_TOLD]) + more
        raise EngineMismatchError(
            f"the installed sgl-jax engine is not as expected: {told}. HiCache was tested with sgl-jax "
            f"{TESTED_COMMIT} of {TESTED_DATE}: install that, or a release of sgl-jax-hicache for this engine"
        )


def _names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Every name that the function's code reads, nested functions included."""
    code = inspect.unwrap(function).__code__
    names: set[str] = set()
    stack = [code]
    while stack:
        code = stack.pop()
        names.update(code.co_names, code.co_varnames)
        # A name in getattr(x, "name", default) is a string constant.
        names.update(const for const in code.co_consts if isinstance(const, str))
        stack.extend(const for const in code.co_consts if inspect.iscode(const))
    return frozenset(names)
