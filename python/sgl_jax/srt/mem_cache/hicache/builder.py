"""Registration with the engine's kv_cache_builder: configuration and engine objects in, a ready cache out.

The only module that knows which class plays which part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from ..unified_radix_cache import UnifiedRadixCache
from .async_impl import TransferExecutor, create_executor
from .components.full import FullComponent
from .config import HiCacheConfig, HostScheme, WritePolicy
from .contract import ReqToTokenPool, TokenToKVPoolAllocator
from .controller import ComponentIO, HiCacheController
from .device_buffers import DeviceBuffers
from .errors import HiCacheConfigError
from .host_pool.registry import create_host_pool
from .lower_tiers import LowerTiers
from .memory_budget import host_pool_pages
from .metrics import HiCacheMetrics
from .page_key import PageHasher, StorageNamespace
from .pool_buffers import kv_buffer_refs
from .storage.registry import STORAGE_FACTORIES, StorageFactory, open_storage
from .token_key import TokenCodec
from .transfer import PageTransfer
from .types import ComponentKind

UNIFIED_RADIX_CACHE = "unified_radix_cache"
"""The name under which the cache is registered."""

logger = logging.getLogger(__name__)

MAX_BACKUP_BYTES = 512 * 2**20
"""Gathered copies that may wait on the device for their way to the host. Beyond it, backups are put off."""


@dataclass(frozen=True)
class ModelIdentity:
    """Whose KV it is. `model_version` names the weights, not the served name: it changes when they do."""

    model_id: str
    model_version: str


def register(register_kv_cache: Callable[[str, Callable[..., Any]], None]) -> None:
    """Register `build_unified_radix_cache` by its name with an engine's table of caches."""
    register_kv_cache(UNIFIED_RADIX_CACHE, build_unified_radix_cache)


def build_unified_radix_cache(
    config: HiCacheConfig,
    *,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool_allocator: TokenToKVPoolAllocator,
    page_size: int,
    model_identity: ModelIdentity,
    dp_size: int = 1,
    processes_on_host: int = 1,
    is_eagle: bool = False,
    disable: bool = False,
    registry: CollectorRegistry | None = None,
    executor: TransferExecutor | None = None,
    storage_factories: Mapping[str, StorageFactory] = STORAGE_FACTORIES,
    clock: Callable[[], float] = time.monotonic,
) -> UnifiedRadixCache:
    """A cache for a full-attention model (MHA, GQA, MLA).

    With HiCache off (`config.storage` None) or `disable` it needs no host memory and no files. `registry` takes the
    metrics, `executor` overrides `config.async_impl`, `storage_factories` adds kinds of storage. Raises
    HiCacheConfigError if the pool has a buffer the cache does not know, the host pool does not fit, or the storage path
    cannot be used.
    """
    metrics = HiCacheMetrics(registry or CollectorRegistry(), (ComponentKind.FULL,))
    common: dict[str, Any] = {
        "req_to_token_pool": req_to_token_pool,
        "token_to_kv_pool_allocator": token_to_kv_pool_allocator,
        "page_size": page_size,
        "metrics": metrics,
        "is_eagle": is_eagle,
        "disable": disable,
        "clock": clock,
    }
    if not config.enabled or disable:
        full = FullComponent(page_size=page_size, num_ranks=dp_size)
        return UnifiedRadixCache(full=full, **common)
    if config.host_scheme is HostScheme.SLAB and dp_size > 1:
        raise HiCacheConfigError(
            f"--hicache-host-scheme slab with {dp_size} data-parallel ranks: a slab lives beside one device; "
            "use --hicache-host-scheme per_block"
        )
    buffers = DeviceBuffers(kv_buffer_refs(token_to_kv_pool_allocator.get_kvcache()), dp_size)
    io, namespace = _component_io(
        config, buffers, page_size, model_identity, processes_on_host, storage_factories
    )
    controller = HiCacheController(
        {ComponentKind.FULL: io},
        executor or create_executor(config.async_impl.value),
        max_backup_bytes=MAX_BACKUP_BYTES,
        clock=clock,
    )
    token_bytes = TokenCodec(page_size, is_eagle).token_bytes
    full = FullComponent(
        page_size=page_size,
        num_ranks=dp_size,
        host_pool=io.host_pool,
        hasher_for=(lambda extra_key: PageHasher(namespace, extra_key, token_bytes))
        if io.storage is not None
        else None,
    )
    return UnifiedRadixCache(
        full=full,
        lower_tiers=LowerTiers((full,), controller, metrics),
        store_early=config.write_policy is WritePolicy.WRITE_THROUGH,
        prefetch_deadline_s=config.prefetch_deadline_s,
        **common,
    )


def _component_io(
    config: HiCacheConfig,
    buffers: DeviceBuffers,
    page_size: int,
    model_identity: ModelIdentity,
    processes_on_host: int,
    storage_factories: Mapping[str, StorageFactory],
) -> tuple[ComponentIO, StorageNamespace]:
    """The Full component's byte movers, sized and opened; says in the log what the levels hold."""
    layout = buffers.layout(ComponentKind.FULL, page_size)
    device_pages = (buffers.rows_per_rank - 1) * buffers.dp_size
    num_host_pages = host_pool_pages(config, device_pages, layout.page_bytes, processes_on_host)
    transfer = PageTransfer(buffers, layout)
    namespace = StorageNamespace(
        model_id=model_identity.model_id,
        model_version=model_identity.model_version,
        page_size=page_size,
        kv_dtype=layout.buffers[0].dtype,
        layout_id=layout.layout_id,
        page_bytes=layout.page_bytes,
    )
    storage = (
        open_storage(config.storage.value, config.storage_path, namespace, storage_factories)
        if config.storage is not None and config.has_storage
        else None
    )
    host_pool = create_host_pool(
        config.host_scheme.value, num_host_pages, layout, transfer.host_memory()
    )
    logger.info(
        "HiCache is on. L1 device: %d pages of %d tokens, %d bytes each. L2 host: %d pages, %.2f GiB, %s, %s. "
        "L3 storage: %s, %s.",
        device_pages,
        page_size,
        layout.page_bytes,
        num_host_pages,
        num_host_pages * layout.page_bytes / 2**30,
        config.host_scheme.value,
        config.async_impl.value,
        f"files in {config.storage_path}" if storage is not None else "none",
        config.write_policy.value,
    )
    return ComponentIO(transfer, host_pool, storage), namespace
