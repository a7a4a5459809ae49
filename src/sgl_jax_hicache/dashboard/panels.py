"""A Grafana dashboard as far as it is drawn here: panels with their place, their queries and their colours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """A rectangle of Grafana's grid: 24 columns, rows counted from the top."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Query:
    """One PromQL expression, and the name of each series it gives, as `{{label}}` in text."""

    expression: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        """The legend of the series with these labels."""
        name = self.legend
        for label, value in labels.items():
            name = name.replace("{{" + label + "}}", value)
        return name


@dataclass(frozen=True)
class Threshold:
    """A stat's colour from this value on."""

    value: float
    colour: str


@dataclass(frozen=True)
class Panel:
    """One panel. `kind`: Grafana's type, such as "timeseries", "stat" or "row"."""

    kind: str
    title: str
    place: Place
    queries: Sequence[Query] = ()
    unit: str = "none"
    decimals: int | None = None
    maximum: float | None = None
    stacked: bool = False
    logarithmic: bool = False
    colours: Mapping[str, str] | None = None
    thresholds: Sequence[Threshold] = ()
    words: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Dashboard:
    """The panels of a dashboard file, in its order."""

    title: str
    panels: Sequence[Panel]

    @classmethod
    def load(cls, path: Path) -> Dashboard:
        """Read a dashboard's JSON. Raises OSError, or KeyError and ValueError for a file that is none."""
        model = json.loads(path.read_text(encoding="utf-8"))
        return cls(model["title"], [_panel(panel) for panel in model["panels"]])


def _panel(model: Mapping[str, Any]) -> Panel:
    grid = model["gridPos"]
    fields = model.get("fieldConfig", {"defaults": {}, "overrides": []})
    defaults = fields["defaults"]
    steps = defaults.get("thresholds", {}).get("steps", ())
    return Panel(
        kind=model["type"],
        title=model["title"],
        place=Place(grid["x"], grid["y"], grid["w"], grid["h"]),
        queries=[Query(t["expr"], t["legendFormat"]) for t in model.get("targets", ())],
        unit=defaults.get("unit", "none"),
        decimals=defaults.get("decimals"),
        maximum=defaults.get("max"),
        stacked=defaults.get("custom", {}).get("stacking", {}).get("mode", "none") != "none",
        logarithmic=defaults.get("custom", {}).get("scaleDistribution", {}).get("type") == "log",
        colours={
            override["matcher"]["options"]: property_["value"]["fixedColor"]
            for override in fields["overrides"]
            for property_ in override["properties"]
            if property_["id"] == "color"
        },
        thresholds=[
            Threshold(-float("inf") if step["value"] is None else step["value"], step["color"])
            for step in steps
        ],
        words={
            value: shown["text"]
            for mapping in defaults.get("mappings", ())
            for value, shown in mapping["options"].items()
        },
    )
