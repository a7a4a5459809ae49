"""What a benchmark gives: records of a value and the limit measured beside it; how they are timed, kept and shown.

In JSON a record is `{name, value, unit, limit, ratio, samples, params}`. `value` is the median of `samples`, `limit`
the median of what bounds it, in the same unit and from the same run, or null; `ratio` is value / limit. `params` holds
what was measured and, under "run", where and with what.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from sgl_jax_hicache.provenance import machine

RUN = "run"
"""The parameter that says where a record was measured."""

_ENVIRONMENT = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "XLA_FLAGS",
)
"""Variables that change figures: transfers and reads are bound by page faults of fresh memory."""

TABLE_WIDTH = 150
"""Columns of the printed tables where the output is no terminal."""


@dataclass(frozen=True)
class Record:
    """One figure. Rates (units that end in "/s") are better when higher, everything else when lower."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    samples: tuple[float, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The value in units of its limit."""
        return None if not self.limit else self.value / self.limit

    @property
    def p90(self) -> float:
        """What nine of ten samples are at least as good as."""
        if not self.samples:
            return self.value
        return float(np.percentile(self.samples, 10 if self.unit.endswith("/s") else 90))

    def to_json(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "ratio": self.ratio,
            "samples": list(self.samples),
            "params": {**self.params, "p90": self.p90},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_json`."""
        params = {key: value for key, value in data["params"].items() if key != "p90"}
        limit = data["limit"]
        return cls(data["name"], data["value"], data["unit"], limit, tuple(data["samples"]), params)


def measured(
    name: str,
    samples: Sequence[float],
    unit: str,
    limit: Sequence[float] | float | None = None,
    **params: Any,
) -> Record:
    """A record of repeated measurements; `limit` is given as its own samples, or as a number."""
    bound = None if limit is None else float(np.median(limit))
    return Record(
        name, float(np.median(samples)), unit, bound, tuple(float(s) for s in samples), params
    )


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def side_by_side(
    actions: Sequence[Callable[[], object]], repeats: int, warmups: int = 2
) -> list[list[float]]:
    """Seconds of every action's repeats; they take turns, so that a slow moment of the machine hits all of them."""
    spent: list[list[float]] = [[] for _ in actions]
    for repeat in range(warmups + repeats):
        for action, seconds in zip(actions, spent, strict=True):
            took_s = seconds_of(action)
            if repeat >= warmups:
                seconds.append(took_s)
    return spent


def rates(amount: float, seconds: Iterable[float]) -> list[float]:
    """Amount per second of each measurement."""
    return [amount / s for s in seconds]


def provenance(argv: Sequence[str], begun_at: str) -> dict[str, Any]:
    """Command, machine and versions of this run, the commit that it began at, and how busy the machine was in its last
    minute."""
    return {
        "command": f"python -m sgl_jax_hicache.bench {shlex.join(argv)}",
        "commit": begun_at,
        **machine(),
        "backend": jax.default_backend(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "load": round(os.getloadavg()[0], 1),
    }


def stamped(records: Iterable[Record], run: dict[str, Any]) -> list[Record]:
    """The records, each with where it was measured; one that was read from a file says so already."""
    return [replace(record, params={RUN: run, **record.params}) for record in records]


def write_json(records: Iterable[Record], path: Path) -> None:
    """Write the records as a JSON list. Raises OSError."""
    text = json.dumps([record.to_json() for record in records], indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Record]:
    """The records of a file that `write_json` wrote."""
    return [Record.from_json(data) for data in json.loads(path.read_text(encoding="utf-8"))]


def row_of(record: Record) -> tuple[str, ...]:
    """Name, parameters, median, P90, unit, limit and ratio as text."""
    shown = [
        f"{key}={short(value)}"
        for key, value in record.params.items()
        if key != RUN and not isinstance(value, dict)
    ]
    return (
        record.name,
        " ".join(shown),
        short(record.value),
        short(record.p90),
        record.unit,
        "" if record.limit is None else short(record.limit),
        "" if record.ratio is None else f"{record.ratio:.3f}",
    )


COLUMNS = ("what", "parameters", "median", "P90", "unit", "limit", "ratio")


def short(value: Any) -> str:
    """A number with four digits; other things as they are."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(records: Iterable[Record], run: dict[str, Any]) -> None:
    """Print the run and a table of its records."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for key, value in run.items():
        console.print(f"{key:11}{value}", highlight=False, markup=False)
    table = Table()
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index in (0, 1, 4) else "right")
    for record in records:
        table.add_row(*row_of(record))
    console.print(table)
