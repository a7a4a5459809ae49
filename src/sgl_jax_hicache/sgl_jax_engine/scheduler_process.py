"""What the engine starts in place of its own scheduler and detokenizer functions.

The engine spawns its processes with a function that is pickled by its name: the child imports this module, which
activates the overlay, and puts our classes in before the engine's function looks them up.
"""

from __future__ import annotations

import signal
from typing import Any

from . import seams
from .stop_switch import leave_signals_to_the_parent


def run_scheduler_process(server_args: Any, port_args: Any, dp_rank: Any, pipe_writer: Any) -> None:
    """The scheduler in a process of its own."""
    from sgl_jax.srt.managers import scheduler

    install_scheduler(server_args)
    scheduler.run_scheduler_process(server_args, port_args, dp_rank, pipe_writer)


def run_scheduler_thread(server_args: Any, port_args: Any) -> Any:
    """The scheduler as a thread of the launching process (`enable_single_process`)."""
    from sgl_jax.srt.managers import scheduler

    install_scheduler(server_args)
    return scheduler.run_scheduler_loop_thread_after_create(server_args, port_args)


def run_detokenizer_process(server_args: Any, port_args: Any) -> None:
    """The detokenizer, which goes on until the launching process has its last answer and ends it."""
    from sgl_jax.srt.managers import detokenizer_manager

    leave_signals_to_the_parent(signal.SIGINT, signal.SIGTERM)
    detokenizer_manager.run_detokenizer_process(server_args, port_args)


def install_scheduler(server_args: Any) -> None:
    """Put our scheduler and admission in, if these arguments ask for our cache; the engine's classes otherwise.

    Raises EngineMismatchError if the engine is not as expected.
    """
    seams.check(seams.SCHEDULER_SEAMS)
    from sgl_jax.srt.managers import scheduler

    from .cache_builder import is_ours
    from .prefill_adder import HiCachePrefillAdder
    from .scheduler import HiCacheScheduler

    ours = is_ours(server_args)
    scheduler.Scheduler = HiCacheScheduler if ours else HiCacheScheduler.__base__
    scheduler.PrefillAdder = HiCachePrefillAdder if ours else HiCachePrefillAdder.__base__
