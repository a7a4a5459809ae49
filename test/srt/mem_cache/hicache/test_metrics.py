"""HiCacheMetrics: zeros from the start, each token once, and no exception for a figure that makes no sense."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sgl_jax.srt.mem_cache.hicache.metrics import HiCacheMetrics
from sgl_jax.srt.mem_cache.hicache.storage.stats import StorageStats
from sgl_jax.srt.mem_cache.hicache.types import (
    ComponentKind,
    LookupResult,
    Tier,
    TierTokens,
    TransferId,
    TransferKind,
    TransferResult,
)

FULL = ComponentKind.FULL
READS = ("hit", "miss", "corrupt", "error")
WRITES = ("written", "present", "error")
STATS = StorageStats(
    sets=1,
    already_stored=2,
    write_errors=3,
    gets=22,
    hits=4,
    misses=5,
    corrupt_gets=6,
    corrupt=6,
    read_errors=7,
    pages_held=12,
    evicted=8,
    bytes_held=9,
    max_bytes=10,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> HiCacheMetrics:
    return HiCacheMetrics(registry)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample as `name{label="value"}` -> value, without creation times and the HiCache prefix."""
    text = generate_latest(registry).decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = (line.rsplit(" ", 1) for line in lines)
    return {
        name.removeprefix("sglang:hicache_"): float(value)
        for name, value in pairs
        if "_created" not in name
    }


def changed(registry: CollectorRegistry, before: dict[str, float]) -> dict[str, float]:
    """The samples that differ from `before`, histograms by their count and sum only."""
    after = samples(registry)
    assert before.keys() == after.keys()
    return {k: v for k, v in after.items() if v != before[k] and "_bucket" not in k}


def result(
    kind: TransferKind,
    ok_pages: tuple[bool, ...],
    error: str | None = None,
    component: ComponentKind = FULL,
) -> TransferResult:
    return TransferResult(
        transfer_id=TransferId(1),
        kind=kind,
        component=component,
        host_pages=tuple(range(len(ok_pages))),
        ok_pages=ok_pages,
        error=error,
        num_bytes=100 * sum(ok_pages),
        seconds=0.5,
    )


def test_everything_is_there_at_zero(registry: CollectorRegistry, metrics: HiCacheMetrics) -> None:
    before = samples(registry)
    assert set(before.values()) == {0.0}
    for tier in ("device", "host", "storage", "computed"):
        assert f'prompt_tokens_total{{tier="{tier}"}}' in before
    for kind in ("backup", "load", "store", "fetch"):
        for component in ("full", "swa", "recurrent"):
            labels = f'component="{component}",kind="{kind}"'
            assert f"transfer_bytes_total{{{labels}}}" in before
            assert f"transfer_seconds_count{{{labels}}}" in before
            assert f'transfers_total{{{labels},outcome="failed"}}' in before
            assert f"transfers_in_flight{{{labels}}}" in before
    for component in ("full", "swa", "recurrent"):
        for tier in ("device", "host"):
            assert f'evicted_pages_total{{component="{component}",tier="{tier}"}}' in before
            assert f'dropped_pages_total{{component="{component}",tier="{tier}"}}' in before
        for name in ("device_pages_used", "device_pages_capacity", "page_bytes"):
            assert f'{name}{{component="{component}"}}' in before


def test_no_call_adds_a_label_that_was_not_there(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    before = samples(registry)
    metrics.prompt(TierTokens(1, 1, 1, 1))
    for kind in TransferKind:
        for component in ComponentKind:
            metrics.transfer(result(kind, (True, False), None, component))
            metrics.transfer(result(kind, (False,), "disk full", component))
            metrics.in_flight(kind, component, 1)
    for component in ComponentKind:
        metrics.host_pages(component, 1, 2)
        metrics.device_capacity(component, 2, 64)
        metrics.device_pages(component, 1)
        for tier in (Tier.DEVICE, Tier.HOST):
            metrics.evicted(tier, component, 1)
            metrics.dropped(tier, component, 1)
        metrics.storage(component, STATS)
    for error in (None, "disk full"):
        metrics.lookup_ended(LookupResult(TransferId(1), {}, 3, error, 0.5))
    metrics.lookups_in_flight(1)
    metrics.lookup(3, 1)
    metrics.prefetch_wait(0.1, timed_out=True)
    after = samples(registry)
    assert after.keys() == before.keys()
    assert {k for k, v in after.items() if v == 0 and "_bucket" not in k} == {"metric_faults_total"}


def test_a_prompt_counts_each_token_once(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    before = samples(registry)
    metrics.prompt(TierTokens(device=600, host=200, storage=100, computed=100))
    assert changed(registry, before) == {
        "prompts_total": 1,
        'prompt_tokens_total{tier="device"}': 600,
        'prompt_tokens_total{tier="host"}': 200,
        'prompt_tokens_total{tier="storage"}': 100,
        'prompt_tokens_total{tier="computed"}': 100,
    }


def test_after_a_host_hit_only_the_host_tier_moves(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    before = samples(registry)
    metrics.prompt(TierTokens(host=64))
    assert changed(registry, before) == {
        "prompts_total": 1,
        'prompt_tokens_total{tier="host"}': 64,
    }


def test_a_transfer_that_arrived(registry: CollectorRegistry, metrics: HiCacheMetrics) -> None:
    before = samples(registry)
    metrics.transfer(result(TransferKind.BACKUP, (True, True, True)))
    labels = 'component="full",kind="backup"'
    assert changed(registry, before) == {
        f'transfers_total{{{labels},outcome="ok"}}': 1,
        f'transfer_pages_total{{{labels},outcome="ok"}}': 3,
        f"transfer_bytes_total{{{labels}}}": 300,
        f"transfer_seconds_count{{{labels}}}": 1,
        f"transfer_seconds_sum{{{labels}}}": 0.5,
    }


@pytest.mark.parametrize(
    ("kind", "error", "outcome"),
    [
        (TransferKind.FETCH, None, "missing"),
        (TransferKind.FETCH, "disk full", "failed"),
        (TransferKind.STORE, None, "failed"),
    ],
)
def test_a_page_that_did_not_arrive(
    registry: CollectorRegistry,
    metrics: HiCacheMetrics,
    kind: TransferKind,
    error: str | None,
    outcome: str,
) -> None:
    metrics.transfer(result(kind, (True, False, False), error))
    after = samples(registry)
    labels = f'component="full",kind="{kind.value}"'
    assert after[f'transfer_pages_total{{{labels},outcome="ok"}}'] == 1
    assert after[f'transfer_pages_total{{{labels},outcome="{outcome}"}}'] == 2
    assert after[f'transfers_total{{{labels},outcome="failed"}}'] == (error is not None)


def test_gauges_follow_the_last_value(registry: CollectorRegistry, metrics: HiCacheMetrics) -> None:
    metrics.host_pages(FULL, used=7, capacity=10)
    metrics.host_pages(FULL, used=3, capacity=10)
    metrics.device_pages(FULL, 5)
    metrics.in_flight(TransferKind.LOAD, FULL, 2)
    after = samples(registry)
    assert after['host_pages_used{component="full"}'] == 3
    assert after['host_pages_capacity{component="full"}'] == 10
    assert after['device_pages_used{component="full"}'] == 5
    assert after['transfers_in_flight{component="full",kind="load"}'] == 2
    assert after['transfers_in_flight{component="swa",kind="load"}'] == 0


def test_storage_counters_follow_snapshots(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    """A snapshot holds running totals: the same one twice counts once, a later one its growth."""
    metrics.storage(FULL, STATS)
    metrics.storage(FULL, STATS)
    metrics.storage(FULL, replace(STATS, hits=10, available=False))
    after = samples(registry)
    reads = {o: after[f'storage_reads_total{{component="full",outcome="{o}"}}'] for o in READS}
    writes = {o: after[f'storage_writes_total{{component="full",outcome="{o}"}}'] for o in WRITES}
    assert reads == {"hit": 10, "miss": 5, "corrupt": 6, "error": 7}
    assert writes == {"written": 1, "present": 2, "error": 3}
    assert after['storage_available{component="full"}'] == 0
    assert after["storage_evicted_pages_total"] == 8
    assert (after["storage_bytes_held"], after["storage_max_bytes"]) == (9, 10)
    assert after['storage_pages_held{component="full"}'] == 12
    assert after['storage_pages_held{component="swa"}'] == 0
    assert after['storage_reads_total{component="swa",outcome="hit"}'] == 0


def test_storage_counters_go_on_from_where_a_newly_attached_storage_is(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    """Another one starts at 0, and one that comes back has its totals: neither is counted twice, or backwards."""
    metrics.storage_attached({FULL: StorageStats()})
    assert samples(registry)['storage_available{component="full"}'] == 1
    metrics.storage(FULL, STATS)
    metrics.storage_detached()
    after = samples(registry)
    assert after['storage_available{component="full"}'] == 0
    assert after['storage_pages_held{component="full"}'] == 0
    assert (after["storage_bytes_held"], after["storage_max_bytes"]) == (0, 0)
    metrics.storage_attached({FULL: StorageStats(hits=1)})
    metrics.storage(FULL, StorageStats(hits=3))
    metrics.storage_detached()
    metrics.storage_attached({FULL: STATS})
    metrics.storage(FULL, replace(STATS, hits=STATS.hits + 5))
    after = samples(registry)
    hits = after['storage_reads_total{component="full",outcome="hit"}']
    assert hits == STATS.hits + 2 + 5
    assert after["metric_faults_total"] == 0


def test_components_in_one_folder_add_evictions_and_share_its_size(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    metrics.storage(FULL, STATS)
    metrics.storage(ComponentKind.SWA, replace(STATS, evicted=3, bytes_held=7))
    metrics.storage(ComponentKind.RECURRENT, StorageStats())
    after = samples(registry)
    assert after["storage_evicted_pages_total"] == 11
    assert (after["storage_bytes_held"], after["storage_max_bytes"]) == (7, 10)


def test_a_look_up_counts_what_was_asked_and_what_was_there(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    metrics.lookup(10, 7)
    metrics.lookup(5, 0)
    after = samples(registry)
    assert after['storage_lookup_pages_total{outcome="hit"}'] == 7
    assert after['storage_lookup_pages_total{outcome="miss"}'] == 8


def test_a_prefetch_wait_and_its_deadline(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    metrics.prefetch_wait(0.25, timed_out=False)
    metrics.prefetch_wait(5.0, timed_out=True)
    after = samples(registry)
    assert after["prefetch_wait_seconds_count"] == 2
    assert after["prefetch_timeouts_total"] == 1


def test_a_senseless_figure_is_counted_and_never_raises(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    before = samples(registry)
    metrics.prompt(TierTokens(device=-5, computed=5))
    metrics.evicted(Tier.HOST, FULL, -1)
    metrics.prefetch_wait(math.nan, timed_out=False)
    assert changed(registry, before) == {
        "prompts_total": 1,
        'prompt_tokens_total{tier="computed"}': 5,
        "metric_faults_total": 3,
    }


def test_two_caches_in_one_process_do_not_meet(
    registry: CollectorRegistry, metrics: HiCacheMetrics
) -> None:
    other_registry = CollectorRegistry()
    other = HiCacheMetrics(other_registry, components=[FULL])
    other.prompt(TierTokens(device=1))
    assert set(samples(registry).values()) == {0.0}
    assert not any("swa" in name for name in samples(other_registry))


def test_names_follow_prometheus(registry: CollectorRegistry, metrics: HiCacheMetrics) -> None:
    text = generate_latest(registry).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(names) == len(set(names))
    assert all(name.startswith("sglang:hicache_") for name in names)
