"""HiCache inside the sgl-jax engine, which stays as it is on disk.

The engine has three kinds of processes, and this package is in each of them:

    launching process   `server` or `engine` start it, `server_args` reads the flags, `tokenizer_manager` answers,
                        `control_routes` are what HTTP has beside the engine's own
    scheduler           `scheduler_process` puts `scheduler` and `prefill_adder` in, `cache_builder` builds the cache,
                        `cache_control` does what is asked of it meanwhile
    detokenizer         passes `cached_tokens` on

`installation` names what is replaced, `seams` checks first that it looks as it did in the engine this was tested with.
Modules that import the engine are imported where they are needed: the detokenizer needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_jax_hicache import overlay

overlay.activate()

if TYPE_CHECKING:
    from .engine import Engine as Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """`Engine`, imported when it is asked for."""
    if name == "Engine":
        from .engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
