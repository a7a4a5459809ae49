"""Puts our functions and classes where the launching process looks them up."""

from __future__ import annotations

from . import scheduler_process, seams

_installed = False


def install() -> None:
    """Make engines that this process starts from now on able to run HiCache; others run as before. Idempotent.

    Raises EngineMismatchError, with nothing changed, if the engine is not as expected.
    """
    global _installed
    if _installed:
        return
    seams.check(seams.LAUNCHING_SEAMS)
    from sgl_jax.srt.entrypoints import engine

    from .tokenizer_manager import HiCacheTokenizerManager

    engine.run_scheduler_process = scheduler_process.run_scheduler_process
    engine.run_scheduler_loop_thread_after_create = scheduler_process.run_scheduler_thread
    engine.run_detokenizer_process = scheduler_process.run_detokenizer_process
    engine.TokenizerManager = HiCacheTokenizerManager
    _installed = True
