"""The report's pictures. They are drawn without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sgl_jax.srt.mem_cache.hicache.types import Tier

from .record import Record

_COLOURS = {
    Tier.DEVICE: "#1b7f79",
    Tier.HOST: "#f2a541",
    Tier.STORAGE: "#6a5acd",
    Tier.COMPUTED: "#c8c8c8",
}
GROWTH = {
    "tree evict one node": "leaves",
    "tree match, 32 tokens": "leaves",
    "tree insert one node": "leaves",
    "storage exists": "files",
    "host pool alloc + free": "slots",
    "host pool alloc + put + mark_ready + free": "slots",
}
"""Records whose limit is the smallest size, and the parameter that is their size."""
_STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def write_plots(records: Sequence[Record], folder: Path) -> list[tuple[str, Path]]:
    """Write every plot that the records allow; title and path of each."""
    written = []
    for title, name, draw in _PLOTS:
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=(9, 4), layout="constrained")
            axes = figure.subplots()
            if not draw(axes, records):
                continue
            path = folder / name
            figure.savefig(path, dpi=130, metadata={"Software": None})
            written.append((title, path))
    return written


def _draw_ratios(axes: Axes, records: Sequence[Record]) -> bool:
    """Hit tokens by tier for growing L2."""
    chosen = [
        r
        for r in records
        if r.name == "replay hit rate" and r.params["l3"] == "none" and r.params["l2_blocks"]
    ]
    smallest = min((r.params["l1_blocks"] for r in chosen), default=0)
    chosen = [r for r in chosen if r.params["l1_blocks"] == smallest]
    _stack_tiers(axes, chosen, [f"{r.params['l2_blocks'] / smallest:g}" for r in chosen])
    axes.set_xlabel(f"hicache-ratio, L1 of {smallest:,} blocks of 512 tokens, no L3")
    return bool(chosen)


def _draw_levels(axes: Axes, records: Sequence[Record]) -> bool:
    """Hit tokens by tier for L1 alone and for all levels."""
    chosen = [
        r
        for r in records
        if r.name == "replay hit rate" and (r.params["l3"] != "none" or not r.params["l2_blocks"])
    ]
    names = [
        f"{r.params['levels']}\nL1 {r.params['l1_blocks']:,}"
        + (f", {r.params['l3']}" if r.params["l3"] != "none" else "")
        for r in chosen
    ]
    _stack_tiers(axes, chosen, names)
    return bool(chosen)


def _stack_tiers(axes: Axes, records: Sequence[Record], names: Sequence[str]) -> None:
    places = list(range(len(records)))
    bottom = [0.0] * len(records)
    for tier in (Tier.DEVICE, Tier.HOST, Tier.STORAGE):
        heights = [
            100.0 * r.params["tokens"][tier.value] / sum(r.params["tokens"].values())
            for r in records
        ]
        axes.bar(places, heights, bottom=bottom, color=_COLOURS[tier], label=tier.value)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.plot(
        places,
        [r.limit or 0.0 for r in records],
        "kD",
        markersize=4,
        label="plain LRU of L1's size",
    )
    axes.set_xticks(places, names)
    axes.set_ylabel("% of all prompt tokens")
    axes.legend(frameon=False, ncols=4, loc="upper left")
    axes.set_ylim(0, 1.25 * max([*bottom, 1.0]))


def _draw_growth(axes: Axes, records: Sequence[Record]) -> bool:
    """Cost of an operation relative to the smallest size."""
    drawn = False
    for name, parameter in GROWTH.items():
        chosen = [r for r in records if r.name == name and r.ratio is not None]
        if chosen:
            sizes = [r.params[parameter] for r in chosen]
            axes.plot(sizes, [r.ratio or 0.0 for r in chosen], "o-", label=f"{name} ({parameter})")
            drawn = True
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("cost, in units of the smallest size's")
    if drawn:
        axes.legend(frameon=False)
    return drawn


_PLOTS: Sequence[tuple[str, str, Callable[[Axes, Sequence[Record]], bool]]] = (
    ("Hit tokens by tier against hicache-ratio", "bench-ratio.png", _draw_ratios),
    ("Hit tokens by tier, L1 alone and all levels", "bench-levels.png", _draw_levels),
    ("Cost against size", "bench-growth.png", _draw_growth),
)
