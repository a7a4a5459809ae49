"""The record that every benchmark gives: its JSON form, ratio and P90, and that every benchmark keeps to it."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from sgl_jax_hicache.bench import record as record_module
from sgl_jax_hicache.bench.__main__ import BENCHMARKS
from sgl_jax_hicache.bench.record import (
    Record,
    measured,
    provenance,
    read_json,
    side_by_side,
    stamped,
    write_json,
)

FIELDS = {"name", "value", "unit", "limit", "ratio", "samples", "params"}

# Sizes at which a benchmark proves that it runs, not what it finds. Those left out have tests of their own.
TINY = {
    "transfer": ["--pages", "8x16KB-f32", "--repeats", "2"],
    "tree": ["--prompts", "20", "--tokens", "256"],
    "hashing": ["--tokens", "256", "--page-sizes", "16", "64", "--repeats", "2"],
    "storage": ["--page-bytes", "4096", "--repeats", "2"],
    "scaling": [
        *("--leaves", "8", "16", "--slots", "64", "128", "--pages", "32"),
        *("--files", "20", "40", "--repeats", "2"),
    ],
    "prefetch": ["--requests", "4", "--read-rates", "0.5"],
    "memory": ["--cycles", "40", "--page-bytes", "2097152", "--host-pages", "32"],
    "replay": ["--requests", "4", "--l1-blocks", "400"],
    "hybrid": ["--parts", "hits", "--requests", "3", "--ratios", "1", "--models", "GDN"],
}


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"sgl_jax_hicache.bench.{name}")


def run_tiny(name: str) -> list[Record]:
    module = module_of(name)
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    records: list[Record] = module.run(parser.parse_args(TINY[name]))
    return records


def test_every_benchmark_is_run_here_or_needs_a_model() -> None:
    assert set(BENCHMARKS) - set(TINY) == {"decode_overhead", "ttft", "step_profile"}


@pytest.mark.parametrize("name", TINY)
def test_records_are_well_formed(name: str, tmp_path: Path) -> None:
    records = stamped(run_tiny(name), provenance([name], "a commit"))
    path = tmp_path / "records.json"
    write_json(records, path)
    data = json.loads(path.read_text())
    assert data
    for entry in data:
        assert set(entry) == FIELDS
        assert math.isfinite(entry["value"])
        assert all(math.isfinite(sample) for sample in entry["samples"])
        assert (entry["ratio"] is None) == (entry["limit"] in (None, 0))
        assert set(entry["params"]["run"]) >= {"command", "commit", "jax", "cpu", "python"}
    assert read_json(path) == records
    names = [(r.name, json.dumps(r.params)) for r in records]
    assert len(set(names)) == len(names)


def test_value_and_limit_are_medians_and_the_ratio_is_between_them() -> None:
    record = measured("x", [1.0, 2.0, 9.0], "us", [4.0, 4.0, 100.0])
    assert (record.value, record.limit, record.ratio) == (2.0, 4.0, 0.5)
    assert measured("x", [1.0], "us").ratio is None


def test_p90_is_the_bad_end_of_the_samples() -> None:
    samples = tuple(float(i) for i in range(101))
    assert Record("cost", 50.0, "us", samples=samples).p90 == 90.0
    assert Record("speed", 50.0, "GB/s", samples=samples).p90 == 10.0
    assert Record("one", 7.0, "MB").p90 == 7.0


def test_a_figure_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json([Record("x", math.nan, "us")], tmp_path / "x.json")


def test_actions_take_turns_and_warmups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(record_module, "seconds_of", lambda action: (action(), 1.5)[1])
    spent = side_by_side([lambda: order.append("a"), lambda: order.append("b")], 3, warmups=1)
    assert order == ["a", "b"] * 4
    assert spent == [[1.5] * 3, [1.5] * 3]
