"""The engine's `build_kv_cache`, answered with our cache.

Without `--hicache-storage` the engine's own choice stands, except that its unified tree is ours: the module of that
name is ours in this process.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, cast

from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.async_impl import TransferExecutor, create_executor
from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .model_identity import model_identity
from .server_args import HiCacheServerArgs

logger = logging.getLogger(__name__)


class CacheBuilder:
    """Builds the cache of one scheduler. `model` is the loaded nnx module; `engines_own` is what is replaced."""

    def __init__(self, model: Any, engines_own: Callable[..., Any]) -> None:
        self._model = model
        self._engines_own = engines_own

    def __call__(self, **engine_objects: Any) -> Any:
        """The cache, from the keyword arguments of the engine's `build_kv_cache`."""
        server_args = engine_objects["server_args"]
        if not is_ours(server_args):
            return self._engines_own(**engine_objects)
        return self._build(**engine_objects)

    def _build(self, *, server_args: HiCacheServerArgs, **engine_objects: Any) -> UnifiedRadixCache:
        config = server_args.hicache

        def identify() -> ModelIdentity:
            """A pass over the weights, which takes seconds: only if there is storage to name pages in."""
            identity = model_identity(server_args, engine_objects["model_config"], self._model)
            logger.info(
                "HiCache: pages of %s, version %s", identity.model_id, identity.model_version
            )
            return identity

        rows = engine_objects["req_to_token_pool"]
        recurrent = engine_objects["is_hybrid_recurrent"]
        if recurrent and not rows.enable_recurrent_extra_buffer:
            raise HiCacheConfigError(
                "the recurrent states of this model are kept at page borders: give --page-size above 1, "
                "leave --enable-mixed-chunk out, and without --hicache-storage give --enable-recurrent-extra-buffer"
            )
        if engine_objects["is_hybrid"]:
            # What the engine asks of a sliding-window cache it asks of this class; a virtual subclass has to do it all.
            SWARadixCache.register(UnifiedRadixCache)
        spec_algorithm = engine_objects["spec_algorithm"]
        together: dict[str, Any] = {}
        if config.enabled and server_args.nnodes > 1:
            together = _one_of_several(server_args)
        return build_unified_radix_cache(
            config,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=engine_objects["token_to_kv_pool_allocator"],
            page_size=engine_objects["page_size"],
            model_identity=identify,
            sliding_window_size=engine_objects["sliding_window_size"],
            recurrent_state_pool=rows.recurrent_state_pool if recurrent else None,
            dp_size=server_args.dp_size,
            is_eagle=spec_algorithm is not None and spec_algorithm.is_eagle(),
            registry=CollectorRegistry(),
            **together,
        )


def _one_of_several(server_args: HiCacheServerArgs) -> dict[str, Any]:
    """What makes this process's cache the same as those of the other processes."""
    from .agreeing_executor import AgreeingExecutor
    from .star import join

    host = server_args.dist_init_addr.rpartition(":")[0]
    agreement = join(server_args.node_rank, server_args.nnodes, socket.gethostbyname(host))
    executor = AgreeingExecutor(create_executor(server_args.hicache.async_impl.value), agreement)
    machines = agreement.exchange(socket.gethostname())
    return {
        # Not a subclass, because it has no workers of its own.
        "executor": cast(TransferExecutor, executor),
        "clock": executor.clock,
        "processes_on_host": machines.count(socket.gethostname()),
    }


def is_ours(server_args: Any) -> bool:
    """True if these arguments ask for our cache."""
    if not isinstance(server_args, HiCacheServerArgs):
        return False
    wants_unified_tree = (
        server_args.enable_unified_radix_tree and not server_args.disable_radix_cache
    )
    return bool(server_args.hicache.enabled or wants_unified_tree)
