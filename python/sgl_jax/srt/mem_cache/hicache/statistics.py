"""The state of a cache as plain numbers, for a person or a program that asks for it now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .storage_prefetch import StoragePrefetch
from .tiered_tree import TieredTree
from .types import TierTokens, TransferKind


@dataclass(frozen=True)
class ComponentStatistics:
    """One component: pages (of a recurrent one: states) that the cache holds on the device and on the host.

    `host_pages_stored`: of those on the host, how many storage has. `storage`: what its storage did since it was
    attached, the fields of `StorageStats`; None without one.
    """

    page_bytes: int
    device_pages_used: int
    host_pages_used: int
    host_pages_capacity: int
    host_pages_stored: int
    storage: dict[str, Any] | None


@dataclass(frozen=True)
class CacheStatistics:
    """A whole cache. `prompt_tokens`: of all admitted prompts, by tier. `in_flight`: transfers, by kind, and look-ups.

    `storage_path` and `storage_max_bytes` are None without a storage. `components` is empty without a host tier.
    """

    hicache: bool
    page_size: int
    num_nodes: int
    prompt_tokens: TierTokens
    waiting_for_storage: int
    storage_path: str | None
    storage_max_bytes: int | None
    in_flight: Mapping[str, int]
    components: Mapping[str, ComponentStatistics]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def statistics_of(tree: TieredTree, prefetch: StoragePrefetch) -> CacheStatistics:
    """The statistics at this moment. Scheduler thread; O(nodes)."""
    mount = tree.tiers.controller.mount if tree.has_tiers else None
    return CacheStatistics(
        hicache=tree.has_tiers,
        page_size=tree.codec.page_size,
        num_nodes=sum(1 for _ in tree.tree.nodes()),
        prompt_tokens=prefetch.served,
        waiting_for_storage=prefetch.num_waiting,
        storage_path=str(mount.path) if mount is not None else None,
        storage_max_bytes=mount.max_bytes if mount is not None else None,
        in_flight=_in_flight(tree),
        components=_components(tree),
    )


def _in_flight(tree: TieredTree) -> dict[str, int]:
    numbers = dict.fromkeys([*(kind.value for kind in TransferKind), "lookup"], 0)
    if tree.has_tiers:
        under_way = tree.tiers.controller.in_flight
        for (kind, _), count in under_way.counts().items():
            numbers[kind.value] += count
        numbers["lookup"] = under_way.num_lookups
    return numbers


def _components(tree: TieredTree) -> dict[str, ComponentStatistics]:
    if not tree.has_tiers:
        return {}
    stats = tree.tiers.controller.storage_stats()
    found: dict[str, ComponentStatistics] = {}
    for component in tree.components:
        pool = tree.tiers.host_pool(component.kind)
        found[component.kind.value] = ComponentStatistics(
            page_bytes=pool.layout.page_bytes,
            device_pages_used=component.num_device_pages(),
            host_pages_used=pool.num_pages - pool.num_free,
            host_pages_capacity=pool.num_pages,
            host_pages_stored=component.host.num_stored(),
            storage=asdict(stats[component.kind]) if component.kind in stats else None,
        )
    return found
