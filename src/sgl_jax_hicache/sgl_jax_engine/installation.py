"""Puts our functions and classes where the launching process looks them up."""

from __future__ import annotations


def install() -> None:
    """Make engines that this process starts from now on able to run HiCache; others run as before. Idempotent.

    Raises EngineMismatchError, with nothing changed, if the engine is not as expected.
    """
    from sgl_jax.srt.entrypoints import engine

    from . import scheduler_process, seams
    from .tokenizer_manager import HiCacheTokenizerManager

    if engine.run_scheduler_process is scheduler_process.run_scheduler_process:
        return
    seams.check(seams.LAUNCHING_SEAMS)
    engine.run_scheduler_process = scheduler_process.run_scheduler_process
    engine.run_scheduler_loop_thread_after_create = scheduler_process.run_scheduler_thread
    engine.run_detokenizer_process = scheduler_process.run_detokenizer_process
    engine.TokenizerManager = HiCacheTokenizerManager
