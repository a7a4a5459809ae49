"""The engine's offline API, with HiCache."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.entrypoints.engine import Engine as SglJaxEngine
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root

from .installation import install
from .orderly_end import stop_schedulers
from .server_args import HiCacheServerArgs


class Engine(SglJaxEngine):
    """sgl-jax's `Engine`; takes its keyword arguments and ours, `hicache_storage="file"` for instance.

    As with the engine's own, the caller's main module must be importable without side effects (spawn imports it
    again), and import this package before it imports `sgl_jax`. `shutdown`, which also runs at exit, first lets the
    scheduler bring to storage what is not there yet.
    """

    def __init__(self, **settings: Any) -> None:
        """Raises HiCacheConfigError for settings that do not work, EngineMismatchError for another engine."""
        install()
        if "server_args" not in settings:
            server_args = HiCacheServerArgs.from_settings({"log_level": "error", **settings})
        elif isinstance(settings["server_args"], HiCacheServerArgs):
            server_args = settings["server_args"]
        else:
            raise TypeError("server_args must be a HiCacheServerArgs")
        if server_args.hicache.has_storage:
            prepare_root(server_args.hicache.storage_path)
        super().__init__(server_args=server_args)

    def shutdown(self) -> None:
        """End in order. Requests that are not answered yet never will be."""
        stop_schedulers()
        super().shutdown()
