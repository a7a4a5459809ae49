"""What HiCache did, as Prometheus metrics: who served the prompt tokens, what moved, what was lost.

Every label combination is exported at 0 from the start, so that "never happened" and "not measured" differ. The names
carry the engine's prefix `sglang:`. An observation never raises into the scheduler: a figure that cannot be counted
(negative or not a number) is left out and counted in `sglang:hicache_metric_faults_total`.

Every method may be called from any thread, except where it says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .storage.stats import StorageStats
from .types import (
    ComponentKind,
    LookupResult,
    Tier,
    TierTokens,
    TransferKind,
    TransferResult,
)

PREFIX = "sglang:hicache_"

_Labelled = TypeVar("_Labelled", Counter, Gauge, Histogram)

_EVICTING_TIERS = (Tier.DEVICE, Tier.HOST)
_READ_OUTCOMES = ("hit", "miss", "corrupt", "error")
_WRITE_OUTCOMES = ("written", "present", "error")
_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class HiCacheMetrics:
    """The counters, gauges and histograms of one cache, registered in the registry it is given.

    Two caches in one process take two registries; registering twice in one raises ValueError.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        components: Sequence[ComponentKind] = tuple(ComponentKind),
    ) -> None:
        self._children: dict[tuple[int, tuple[str, ...]], Any] = {}
        self._define_tokens(registry)
        self._define_transfers(registry)
        self._define_pages(registry)
        self._define_storage(registry)
        self._define_prefetch(registry)
        self._faults = Counter(
            PREFIX + "metric_faults",
            "Observations left out because they were no count",
            registry=registry,
        )
        self._export_zeros(components)

    def _define_tokens(self, registry: CollectorRegistry) -> None:
        self._prompts = Counter(
            PREFIX + "prompts", "Prompts admitted, each counted once", registry=registry
        )
        self._prompt_tokens = Counter(
            PREFIX + "prompt_tokens",
            "Prompt tokens by the tier that served them; the tiers add up to all prompt tokens",
            ["tier"],
            registry=registry,
        )

    def _define_transfers(self, registry: CollectorRegistry) -> None:
        labels = ["kind", "component"]
        self._transfers = Counter(
            PREFIX + "transfers",
            "Transfers between tiers that ended: backup (D2H), load (H2D), store, fetch",
            [*labels, "outcome"],
            registry=registry,
        )
        self._transfer_pages = Counter(
            PREFIX + "transfer_pages",
            "Pages of those transfers: arrived, not there (fetch only), or lost to an error",
            [*labels, "outcome"],
            registry=registry,
        )
        self._transfer_bytes = Counter(
            PREFIX + "transfer_bytes", "Bytes moved by those transfers", labels, registry=registry
        )
        self._transfer_seconds = Histogram(
            PREFIX + "transfer_seconds",
            "Time from submission to completion",
            labels,
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._in_flight = Gauge(
            PREFIX + "transfers_in_flight",
            "Transfers not settled yet",
            labels,
            registry=registry,
        )

    def _define_pages(self, registry: CollectorRegistry) -> None:
        labels = ["tier", "component"]
        self._evicted_pages = Counter(
            PREFIX + "evicted_pages", "Pages that left a tier", labels, registry=registry
        )
        self._dropped_pages = Counter(
            PREFIX + "dropped_pages",
            "Pages worth keeping that left a tier although no lower tier held a copy",
            labels,
            registry=registry,
        )
        self._page_bytes = self._gauge(registry, "page_bytes", "Bytes of one page (of one state)")
        self._device_pages_used = self._gauge(
            registry, "device_pages_used", "Device pages that the cache holds"
        )
        self._device_pages_capacity = self._gauge(
            registry, "device_pages_capacity", "Device pages in all"
        )
        self._host_pages_used = self._gauge(registry, "host_pages_used", "Host pages in use")
        self._host_pages_capacity = self._gauge(
            registry, "host_pages_capacity", "Host pages in all"
        )

    def _gauge(self, registry: CollectorRegistry, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["component"], registry=registry)

    def _define_storage(self, registry: CollectorRegistry) -> None:
        labels = ["component", "outcome"]
        self._storage_reads = Counter(
            PREFIX + "storage_reads",
            "Pages read or found damaged: read, gone since the look-up, damaged (moved away), or not readable now",
            labels,
            registry=registry,
        )
        self._storage_writes = Counter(
            PREFIX + "storage_writes",
            "Pages given to storage: written, there already, or not writable now",
            labels,
            registry=registry,
        )
        self._storage_available = Gauge(
            PREFIX + "storage_available",
            "1 if the last write to storage worked, 0 if it failed or there is no storage",
            ["component"],
            registry=registry,
        )
        self._storage_pages_held = self._gauge(
            registry,
            "storage_pages_held",
            "Pages in storage as last counted, with what this server wrote and removed since",
        )
        self._storage_bytes_held = Gauge(
            PREFIX + "storage_bytes_held",
            "Bytes of the model's folder as last counted; 0 without --hicache-storage-max-bytes",
            registry=registry,
        )
        self._storage_max_bytes = Gauge(
            PREFIX + "storage_max_bytes", "The bound on them; 0 if there is none", registry=registry
        )
        self._storage_evicted_pages = Counter(
            PREFIX + "storage_evicted_pages",
            "Pages that this server removed to keep the bound",
            registry=registry,
        )
        self._storage_seen: dict[ComponentKind, StorageStats] = {}

    def _define_prefetch(self, registry: CollectorRegistry) -> None:
        self._prefetch_wait = Histogram(
            PREFIX + "prefetch_wait_seconds",
            "Time a request about to be admitted was held for storage",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._lookup_pages = Counter(
            PREFIX + "storage_lookup_pages",
            "Pages of arriving prompts that device and host lacked: found in storage, or not",
            ["outcome"],
            registry=registry,
        )
        self._lookups = Counter(
            PREFIX + "storage_lookups",
            "Look-ups of arriving prompts in storage that ended: answered, or failed",
            ["outcome"],
            registry=registry,
        )
        self._lookups_in_flight = Gauge(
            PREFIX + "storage_lookups_in_flight", "Look-ups not settled yet", registry=registry
        )
        self._prefetch_timeouts = Counter(
            PREFIX + "prefetch_timeouts", "Prefetches cut off by their deadline", registry=registry
        )

    def _export_zeros(self, components: Sequence[ComponentKind]) -> None:
        for tier in Tier:
            self._child(self._prompt_tokens, tier.value)
        for outcome in ("hit", "miss"):
            self._child(self._lookup_pages, outcome)
        for outcome in ("ok", "failed"):
            self._child(self._lookups, outcome)
        for component in components:
            for tier in _EVICTING_TIERS:
                self._child(self._evicted_pages, tier.value, component.value)
                self._child(self._dropped_pages, tier.value, component.value)
            self._child(self._storage_available, component.value)
            self._child(self._storage_pages_held, component.value)
            for outcome in _READ_OUTCOMES:
                self._child(self._storage_reads, component.value, outcome)
            for outcome in _WRITE_OUTCOMES:
                self._child(self._storage_writes, component.value, outcome)
            self._child(self._page_bytes, component.value)
            self._child(self._device_pages_used, component.value)
            self._child(self._device_pages_capacity, component.value)
            self._child(self._host_pages_used, component.value)
            self._child(self._host_pages_capacity, component.value)
        for kind in TransferKind:
            for component in components:
                labels = (kind.value, component.value)
                self._child(self._in_flight, *labels)
                self._child(self._transfer_bytes, *labels)
                self._child(self._transfer_seconds, *labels)
                for outcome in ("ok", "failed"):
                    self._child(self._transfers, *labels, outcome)
                    self._child(self._transfer_pages, *labels, outcome)
                if kind is TransferKind.FETCH:
                    self._child(self._transfer_pages, *labels, "missing")

    def prompt(self, tiers: TierTokens) -> None:
        """Count one admitted prompt. Call once per request, on admission, not per scheduling round."""
        self._prompts.inc()
        self._add(self._child(self._prompt_tokens, Tier.DEVICE.value), tiers.device)
        self._add(self._child(self._prompt_tokens, Tier.HOST.value), tiers.host)
        self._add(self._child(self._prompt_tokens, Tier.STORAGE.value), tiers.storage)
        self._add(self._child(self._prompt_tokens, Tier.COMPUTED.value), tiers.computed)

    def transfer(self, result: TransferResult) -> None:
        """Count one settled transfer. A page that a fetch did not find is `missing`, any other that did not
        arrive `failed`."""
        labels = (result.kind.value, result.component.value)
        failed = result.error is not None
        was_looked_for = result.kind is TransferKind.FETCH and not failed
        ok_pages = sum(result.ok_pages)
        self._child(self._transfers, *labels, "failed" if failed else "ok").inc()
        self._add(self._child(self._transfer_pages, *labels, "ok"), ok_pages)
        self._add(
            self._child(self._transfer_pages, *labels, "missing" if was_looked_for else "failed"),
            len(result.ok_pages) - ok_pages,
        )
        self._add(self._child(self._transfer_bytes, *labels), result.num_bytes)
        self._observe(self._child(self._transfer_seconds, *labels), result.seconds)

    def in_flight(self, kind: TransferKind, component: ComponentKind, num_transfers: int) -> None:
        """Set how many transfers of a kind and component are not settled yet."""
        self._child(self._in_flight, kind.value, component.value).set(num_transfers)

    def evicted(self, tier: Tier, component: ComponentKind, num_pages: int) -> None:
        """Count pages that left the device or the host."""
        self._add(self._child(self._evicted_pages, tier.value, component.value), num_pages)

    def dropped(self, tier: Tier, component: ComponentKind, num_pages: int) -> None:
        """Count pages that left a tier with no copy below: nothing could take them."""
        self._add(self._child(self._dropped_pages, tier.value, component.value), num_pages)

    def device_capacity(self, component: ComponentKind, num_pages: int, page_bytes: int) -> None:
        """Set how many device pages a component has in all, and the bytes of one page on every tier."""
        self._child(self._device_pages_capacity, component.value).set(num_pages)
        self._child(self._page_bytes, component.value).set(page_bytes)

    def device_pages(self, component: ComponentKind, used: int) -> None:
        """Set how many device pages of a component the cache holds; a request's own pages are not among them."""
        self._child(self._device_pages_used, component.value).set(used)

    def host_pages(self, component: ComponentKind, used: int, capacity: int) -> None:
        """Set the fill of a component's host pool."""
        self._child(self._host_pages_used, component.value).set(used)
        self._child(self._host_pages_capacity, component.value).set(capacity)

    def storage_attached(self, stats: Mapping[ComponentKind, StorageStats]) -> None:
        """Count from these snapshots on; each component's storage may have done things before it was ours."""
        self._storage_seen = dict(stats)
        for component, snapshot in stats.items():
            self._show_storage(component, snapshot)

    def storage_detached(self) -> None:
        """There is no storage any more: it is not available and holds nothing."""
        for component in self._storage_seen:
            self._child(self._storage_available, component.value).set(0)
            self._child(self._storage_pages_held, component.value).set(0)
        self._storage_seen = {}
        self._storage_bytes_held.set(0)
        self._storage_max_bytes.set(0)

    def storage(self, component: ComponentKind, stats: StorageStats) -> None:
        """Bring the storage counters of a component up to a snapshot of its storage. Scheduler thread only."""
        seen = self._storage_seen.get(component)
        if seen == stats:
            return
        seen = seen or StorageStats()
        self._storage_seen[component] = stats
        reads = {
            "hit": stats.hits - seen.hits,
            "miss": stats.misses - seen.misses,
            "corrupt": stats.corrupt - seen.corrupt,
            "error": stats.read_errors - seen.read_errors,
        }
        writes = {
            "written": stats.sets - seen.sets,
            "present": stats.already_stored - seen.already_stored,
            "error": stats.write_errors - seen.write_errors,
        }
        for outcome, num_pages in reads.items():
            self._add(self._child(self._storage_reads, component.value, outcome), num_pages)
        for outcome, num_pages in writes.items():
            self._add(self._child(self._storage_writes, component.value, outcome), num_pages)
        self._add(self._storage_evicted_pages, stats.evicted - seen.evicted)
        self._show_storage(component, stats)

    def _show_storage(self, component: ComponentKind, stats: StorageStats) -> None:
        """What a snapshot says of this moment."""
        self._child(self._storage_available, component.value).set(stats.available)
        self._child(self._storage_pages_held, component.value).set(stats.pages_held)
        if stats.max_bytes:  # the components share one folder
            self._storage_bytes_held.set(stats.bytes_held)
            self._storage_max_bytes.set(stats.max_bytes)

    def lookup(self, num_asked: int, num_found: int) -> None:
        """Count what storage had of the pages it was asked for on behalf of one arriving request."""
        self._add(self._child(self._lookup_pages, "hit"), num_found)
        self._add(self._child(self._lookup_pages, "miss"), num_asked - num_found)

    def lookup_ended(self, result: LookupResult) -> None:
        """Count one settled look-up."""
        self._child(self._lookups, "ok" if result.error is None else "failed").inc()

    def lookups_in_flight(self, num_lookups: int) -> None:
        """Set how many look-ups are not settled yet."""
        self._lookups_in_flight.set(num_lookups)

    def prefetch_wait(self, seconds: float, timed_out: bool) -> None:
        """Count how long a request was held for storage, and whether its deadline cut that off."""
        self._observe(self._prefetch_wait, seconds)
        if timed_out:
            self._prefetch_timeouts.inc()

    def _child(self, metric: _Labelled, *labels: str) -> _Labelled:
        """The metric's child for these labels; prometheus_client takes ten times as long to find it."""
        key = (id(metric), labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        found: _Labelled = child
        return found

    def _add(self, counter: Counter, amount: float) -> None:
        if amount > 0:
            counter.inc(amount)
        elif amount != 0:  # negative or NaN
            self._faults.inc()

    def _observe(self, histogram: Histogram, seconds: float) -> None:
        if seconds >= 0:
            histogram.observe(seconds)
        else:  # negative or NaN
            self._faults.inc()
