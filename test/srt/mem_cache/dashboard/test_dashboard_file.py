"""docs/grafana/hicache.json asks for what a cache exports, all of it, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax_hicache.engine.device_pools import build_device_pools
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.pool_sizes import pool_sizes
from sgl_jax_hicache.engine.weights import read_config

PATH = Path(__file__).parents[4] / "docs" / "grafana" / "hicache.json"
PREFIX = "sglang:hicache_"
GIVEN_BY_PROMETHEUS = {"instance", "job"}
# Counts observations that made no sense: of interest to whoever works on the cache, not to its operator.
NOT_SHOWN = {"metric_faults_total"}


@dataclass
class Exported:
    """The label names and values that one metric has."""

    labels: dict[str, set[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Every sample of a cache with all components, files and a bound, before its first request."""
    args = EngineArgs(
        model_path="random:tiny-hybrid:0",
        max_total_tokens=512,
        chunked_prefill_size=256,
        max_running_requests=1,
        hicache=HiCacheConfig(
            storage=StorageKind.FILE,
            storage_path=tmp_path_factory.mktemp("pages"),
            storage_max_bytes=1 << 30,
        ),
    )
    model = read_config(args.model_path)
    pools = build_device_pools(
        model,
        pool_sizes(args, model),
        page_size=args.page_size,
        dtype=args.dtype,
        max_running_requests=args.max_running_requests,
        context_len=args.max_total_tokens,
    )
    registry = CollectorRegistry()
    cache = build_unified_radix_cache(
        args.hicache,
        req_to_token_pool=pools.rows,
        token_to_kv_pool_allocator=pools.allocator,
        page_size=args.page_size,
        model_identity=ModelIdentity("tiny", "1"),
        sliding_window_size=model.sliding_window,
        recurrent_state_pool=pools.states,
        registry=registry,
    )
    assert cache.shutdown(deadline_s=30.0)
    return samples_of(registry)


def samples_of(registry: CollectorRegistry) -> dict[str, Exported]:
    found: dict[str, Exported] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            known = found.setdefault(sample.name, Exported())
            for label, value in sample.labels.items():
                known.labels.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    model: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return model


def targets(dashboard: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each metric of an expression, and its matchers as (label, operator, value)."""
    return [
        (name, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers))
        for name, matchers in re.findall(r"([a-z]+:\w+)\{([^}]*)\}", expression)
    ]


def faults(expression: str, legend: str, exported: dict[str, Exported]) -> list[str]:
    """What an expression and its legend ask for and nobody exports."""
    found = []
    labels_at_hand: set[str] = set(GIVEN_BY_PROMETHEUS)
    asked = selectors(expression)
    if len(asked) != len(re.findall(r"\w+:\w+", expression)):
        found.append("a metric without a selector")
    for name, matchers in asked:
        if name not in exported:
            found.append(f"no metric {name}")
            continue
        labels = exported[name].labels
        labels_at_hand |= set(labels)
        for label, operator, value in matchers:
            if label in GIVEN_BY_PROMETHEUS:
                continue
            wanted = set(value.split("|")) if operator in ("=~", "!~") else {value}
            if not wanted <= labels.get(label, set()):
                found.append(f"{name} has no {label} {sorted(wanted)}")
    grouped = set(
        re.findall(r"\w+", " ".join(re.findall(r"(?:by|ignoring) \(([^)]*)\)", expression)))
    )
    found += [f"grouped by {label}" for label in grouped - labels_at_hand]
    found += [
        f"legend {label}" for label in re.findall(r"{{(\w+)}}", legend) if label not in grouped
    ]
    return found


def test_every_query_asks_for_what_a_cache_exports(
    dashboard: dict[str, Any], exported: dict[str, Exported]
) -> None:
    wrong = {
        title: fault
        for title, target in targets(dashboard)
        if (fault := faults(target["expr"], target["legendFormat"], exported))
    }
    assert not wrong


def test_every_metric_of_a_cache_is_shown(
    dashboard: dict[str, Any], exported: dict[str, Exported]
) -> None:
    text = json.dumps(dashboard)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    hidden = {name for name in families if name.startswith(PREFIX) and name not in text}
    assert hidden == {PREFIX + name for name in NOT_SHOWN}


@pytest.mark.parametrize(
    ("expression", "legend", "expected"),
    [
        ('sum(rate(sglang:hicache_no_such_total{instance=~"$instance"}[1m]))', "", "no metric"),
        ("sglang:hicache_prompts_total", "", "without a selector"),
        ('sglang:hicache_prompt_tokens_total{tier="cloud"}', "", "has no tier"),
        ('sum by (colour) (sglang:hicache_prompt_tokens_total{tier="host"})', "", "grouped by"),
        ('sum(sglang:hicache_prompt_tokens_total{tier="host"})', "{{tier}}", "legend tier"),
    ],
)
def test_what_nobody_exports_is_found(
    exported: dict[str, Exported], expression: str, legend: str, expected: str
) -> None:
    (fault,) = faults(expression, legend, exported)
    assert expected in fault


def test_panels_have_names_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    overlapping = [
        (one["title"], other["title"])
        for one, other in combinations(panels, 2)
        if overlap(one["gridPos"], other["gridPos"])
    ]
    assert not overlapping


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_the_data_source_is_chosen_where_it_is_imported(dashboard: dict[str, Any]) -> None:
    """No identifier of somebody's own Grafana is left in the file."""
    sources = re.findall(r'"uid": "([^"]*)"', PATH.read_text(encoding="utf-8"))
    assert set(sources) == {"${datasource}", dashboard["uid"]}
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used == names | {"__range", "__rate_interval"}
