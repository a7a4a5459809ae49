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
from .components.base import TreeComponent
from .components.full import FullComponent
from .components.recurrent import RecurrentStateComponent
from .components.swa import SWAComponent
from .config import HiCacheConfig, HostScheme, StorageKind, WritePolicy
from .contract import ReqToTokenPool, TokenToKVPoolAllocator
from .controller import ComponentIO, HiCacheController
from .device_buffers import DeviceBuffers
from .device_slots import DeviceSlots
from .errors import HiCacheConfigError
from .host_pool.registry import create_host_pool
from .host_split import Checkpoints, choose_interval, companion_pages, unit_bytes
from .lower_tiers import LowerTiers
from .memory_budget import host_pool_pages
from .metrics import HiCacheMetrics
from .page_key import PageHasher
from .path_keys import PathKeys
from .pool_buffers import component_buffers
from .storage.registry import STORAGE_FACTORIES, StorageFactory
from .storage_mount import ModelIdentity as ModelIdentity
from .storage_mount import StorageMount, StorageOpener
from .tiered_tree import TieredTree
from .token_key import TokenCodec
from .transfer import PageTransfer
from .types import ComponentKind, PageLayout

UNIFIED_RADIX_CACHE = "unified_radix_cache"
"""The name under which the cache is registered."""

logger = logging.getLogger(__name__)

MAX_BACKUP_BYTES = 512 * 2**20
"""Gathered copies that may wait on the device for their way to the host. Beyond it, backups are put off."""


@dataclass(frozen=True)
class _Device:
    """The engine's device pools as components: what each one's slots own, and where windows and states are kept."""

    buffers: Mapping[ComponentKind, DeviceBuffers]
    layouts: Mapping[ComponentKind, PageLayout]
    checkpoints: Checkpoints

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, sentinels left out."""
        return sum(self.num_pages(kind) * self.layouts[kind].page_bytes for kind in self.layouts)

    def num_pages(self, kind: ComponentKind) -> int:
        """Pages (states) of a component on all ranks, sentinels left out."""
        buffers = self.buffers[kind]
        return (buffers.rows_per_rank - 1) * buffers.dp_size

    def tell_sizes(self, metrics: HiCacheMetrics) -> None:
        """Set the gauges that never change."""
        for kind, layout in self.layouts.items():
            metrics.device_capacity(kind, self.num_pages(kind), layout.page_bytes)


@dataclass(frozen=True)
class _Below:
    """What stands below the device: the host pools with the ways to them, and who opens and names files."""

    io: Mapping[ComponentKind, ComponentIO]
    opener: StorageOpener
    keys: PathKeys
    mount: StorageMount | None


def register(register_kv_cache: Callable[[str, Callable[..., Any]], None]) -> None:
    """Register `build_unified_radix_cache` by its name with an engine's table of caches."""
    register_kv_cache(UNIFIED_RADIX_CACHE, build_unified_radix_cache)


def build_unified_radix_cache(
    config: HiCacheConfig,
    *,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool_allocator: TokenToKVPoolAllocator,
    page_size: int,
    model_identity: ModelIdentity | Callable[[], ModelIdentity],
    sliding_window_size: int | None = None,
    recurrent_state_pool: Any = None,
    dp_size: int = 1,
    processes_on_host: int = 1,
    is_eagle: bool = False,
    disable: bool = False,
    registry: CollectorRegistry | None = None,
    executor: TransferExecutor | None = None,
    storage_factories: Mapping[str, StorageFactory] = STORAGE_FACTORIES,
    clock: Callable[[], float] = time.monotonic,
) -> UnifiedRadixCache:
    """A cache for a model with full attention (MHA, GQA, MLA), sliding windows, recurrent layers, or any of them
    together.

    A KV pool with a `swa_kv_pool` makes a sliding-window component, for which `sliding_window_size` (tokens, the
    current one included) is needed; a `recurrent_state_pool` makes a recurrent one. With HiCache off (`config.storage`
    None) or `disable` it needs no host memory and no files. `model_identity` may be a function, which is called when
    storage is first used. `registry` takes the metrics, `executor` overrides `config.async_impl`, `storage_factories`
    adds kinds of storage. Raises HiCacheConfigError if a pool has a buffer the cache does not know, the host pools do
    not fit, or the storage path cannot be used.
    """
    kvcache = token_to_kv_pool_allocator.get_kvcache()
    has_swa, has_states = hasattr(kvcache, "swa_kv_pool"), recurrent_state_pool is not None
    if has_swa and sliding_window_size is None:
        raise HiCacheConfigError("a pool with a sliding-window part needs sliding_window_size")
    if has_states and is_eagle:
        _refuse_states_beside_bigrams()
    on = config.enabled and not disable
    device = (
        _read_pools(config, kvcache, recurrent_state_pool, page_size, dp_size, sliding_window_size)
        if on or has_swa or has_states
        else None
    )
    kinds = tuple(device.layouts) if device is not None else (ComponentKind.FULL,)
    metrics = HiCacheMetrics(registry or CollectorRegistry(), kinds)
    codec = TokenCodec(page_size, is_eagle)
    below = None
    if on and device is not None:
        _refuse_slab_beside_ranks(config, dp_size)
        identify = model_identity if callable(model_identity) else lambda: model_identity
        opener = StorageOpener(
            device.layouts, identify, _kind_of_storage(config), storage_factories
        )
        below = _open_below(config, device, opener, codec, processes_on_host)
        device.tell_sizes(metrics)
    components = _components(device, below, page_size, dp_size, sliding_window_size)
    tree = TieredTree(
        codec=codec,
        components=components,
        device=DeviceSlots(token_to_kv_pool_allocator, req_to_token_pool, has_swa=has_swa),
        tiers=_tiers(config, below, components, metrics, executor, clock),
        keys=below.keys if below is not None else None,
        store_early=config.write_policy is WritePolicy.WRITE_THROUGH,
    )
    interval = device.checkpoints.interval if device is not None and len(kinds) > 1 else 0
    return UnifiedRadixCache(
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        tree=tree,
        metrics=metrics,
        storage_opener=below.opener if below is not None else None,
        prefetch_rules=config.prefetch_rules,
        sliding_window_size=sliding_window_size if has_swa else None,
        recurrent_track_interval=interval if has_states else 0,
        checkpoint_interval=interval,
        disable=disable,
        clock=clock,
    )


def _read_pools(
    config: HiCacheConfig,
    kvcache: Any,
    state_pool: Any,
    page_size: int,
    dp_size: int,
    window: int | None,
) -> _Device:
    buffers = {
        kind: DeviceBuffers(refs, dp_size)
        for kind, refs in component_buffers(kvcache, state_pool).items()
    }
    layouts = {kind: held.layout(kind, page_size) for kind, held in buffers.items()}
    window_pages = -(-(window - 1) // page_size) if window and ComponentKind.SWA in layouts else 0
    interval = config.checkpoint_interval or choose_interval(layouts, page_size, window_pages)
    if interval % page_size:
        raise HiCacheConfigError(
            f"--hicache-checkpoint-interval {interval}: windows and states are kept at page borders; give a "
            f"multiple of the page size, such as {-(-interval // page_size) * page_size}"
        )
    return _Device(buffers, layouts, Checkpoints(page_size, window_pages, interval))


def _refuse_states_beside_bigrams() -> None:
    raise HiCacheConfigError(
        "recurrent states are not kept for EAGLE's bigram keys: a state lies between two keys; "
        "start without --hicache-storage for this model"
    )


def _refuse_slab_beside_ranks(config: HiCacheConfig, dp_size: int) -> None:
    if config.host_scheme is HostScheme.SLAB and dp_size > 1:
        raise HiCacheConfigError(
            f"--hicache-host-scheme slab with {dp_size} data-parallel ranks: a slab lives beside one device; "
            "use --hicache-host-scheme per_block"
        )


def _kind_of_storage(config: HiCacheConfig) -> str:
    """What is opened at start, or, without files then, may be attached later."""
    kind = config.storage if config.storage is not None and config.has_storage else StorageKind.FILE
    return kind.value


def _open_below(
    config: HiCacheConfig,
    device: _Device,
    opener: StorageOpener,
    codec: TokenCodec,
    processes_on_host: int,
) -> _Below:
    """The lower levels, sized and opened; says in the log what they hold."""
    unit = unit_bytes(device.layouts, device.checkpoints)
    # What the device holds, in Full pages that each have their share of windows and states.
    device_units = max(device.num_bytes // unit, 1)
    full_pages = host_pool_pages(config, device_units, unit, processes_on_host)
    host_pages = companion_pages(device.layouts, device.checkpoints, full_pages)
    mount = (
        opener.open(config.storage_path, config.storage_max_bytes) if config.has_storage else None
    )
    io: dict[ComponentKind, ComponentIO] = {}
    for kind, layout in device.layouts.items():
        transfer = PageTransfer(device.buffers[kind], layout)
        host_pool = create_host_pool(
            config.host_scheme.value, host_pages[kind], layout, transfer.host_memory()
        )
        io[kind] = ComponentIO(transfer, host_pool)
    _tell(config, device, host_pages, codec.page_size, mount)
    keys = PathKeys(
        lambda extra_key: PageHasher(
            opener.namespaces[ComponentKind.FULL], extra_key, codec.token_bytes
        )
    )
    return _Below(io, opener, keys, mount)


def _tell(
    config: HiCacheConfig,
    device: _Device,
    host_pages: Mapping[ComponentKind, int],
    page_size: int,
    mount: StorageMount | None,
) -> None:
    """One line a level and component in the log."""
    files = "none"
    if mount is not None:
        num_found = mount.storages[ComponentKind.FULL].stats().pages_found
        files = f"{_kind_of_storage(config)} in {mount.path}, {num_found} pages found"
    logger.info(
        "HiCache is on: L2 host %s, %s; L3 storage: %s, %s.",
        config.host_scheme.value,
        config.async_impl.value,
        files,
        config.write_policy.value,
    )
    for kind, layout in device.layouts.items():
        what = "states" if kind is ComponentKind.RECURRENT else f"pages of {page_size} tokens"
        logger.info(
            "HiCache %s: L1 device %d %s of %d bytes, %.3f GiB; L2 host %d, %.3f GiB.",
            kind.value,
            device.num_pages(kind),
            what,
            layout.page_bytes,
            device.num_pages(kind) * layout.page_bytes / 2**30,
            host_pages[kind],
            host_pages[kind] * layout.page_bytes / 2**30,
        )
    if len(device.layouts) > 1:
        logger.info(
            "HiCache keeps windows and states every %d tokens.", device.checkpoints.interval
        )


def _tiers(
    config: HiCacheConfig,
    below: _Below | None,
    components: tuple[TreeComponent, ...],
    metrics: HiCacheMetrics,
    executor: TransferExecutor | None,
    clock: Callable[[], float],
) -> LowerTiers | None:
    if below is None:
        return None
    controller = HiCacheController(
        below.io,
        executor or create_executor(config.async_impl.value),
        max_backup_bytes=MAX_BACKUP_BYTES,
        mount=below.mount,
        clock=clock,
    )
    return LowerTiers(components, controller, metrics)


def _components(
    device: _Device | None,
    below: _Below | None,
    page_size: int,
    dp_size: int,
    window: int | None,
) -> tuple[TreeComponent, ...]:
    """One component for each kind of pool, Full first."""

    def common(kind: ComponentKind) -> dict[str, Any]:
        return {
            "page_size": page_size,
            "num_ranks": dp_size,
            "host_pool": below.io[kind].host_pool if below is not None else None,
            "keys": below.keys if below is not None else None,
        }

    components: list[TreeComponent] = [FullComponent(**common(ComponentKind.FULL))]
    if device is None:
        return tuple(components)
    beside: dict[ComponentKind, tuple[Callable[..., TreeComponent], dict[str, Any]]] = {
        ComponentKind.SWA: (SWAComponent, {"window": window}),
        ComponentKind.RECURRENT: (RecurrentStateComponent, {}),
    }
    for kind, (make, settings) in beside.items():
        if kind in device.layouts:
            derive = below.opener.derive_key(kind) if below is not None else None
            components.append(
                make(
                    index=len(components),
                    interval=device.checkpoints.interval,
                    derive_key=derive,
                    **common(kind),
                    **settings,
                )
            )
    return tuple(components)
