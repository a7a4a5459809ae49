"""What `bench hybrid` found, as text and pictures: hybrid_bench.md and hybrid-{ratio,interval,ttft}.png."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .hybrid_hits import BY_INTERVAL, CAPACITY, HITS, UNBOUNDED
from .hybrid_models import FULL, HYBRIDS
from .hybrid_ttft import TTFT, TTFT_AGAIN
from .record import RUN, Record, short
from .trace import BLOCK_TOKENS

TIERS = ("device", "host", "storage")
AIM = 0.9
"""Of full attention's hit tokens, with the same bytes."""

_COLOURS = dict(zip(TIERS, ("#1b7f79", "#f2a541", "#6a5acd"), strict=True))
_LINES = ("#1b7f79", "#4fb3ad", "#6a5acd", "#a99be8", "#d1495b", "#f2a541")
_STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def write_hybrid_report(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the report and every picture that the records allow; their paths."""
    pictures = {}
    for name, size, draw in _PICTURES:
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=size, layout="constrained")
            if draw(figure, records):
                figure.savefig(folder / name, dpi=130, metadata={"Software": None})
                pictures[name] = folder / name
    path = folder / "hybrid_bench.md"
    path.write_text(markdown(records, pictures), encoding="utf-8")
    return [path, *pictures.values()]


def markdown(records: Sequence[Record], pictures: Iterable[str]) -> str:
    """The report as text."""
    parts = ["# Hybrid models: hits and time to the first token", _INTRODUCTION, _about(records)]
    parts += ["## Models", _models()]
    unbounded = _of(records, UNBOUNDED)
    if unbounded:
        parts += ["## What the interval costs alone", _ABOUT_UNBOUNDED, _unbounded_table(unbounded)]
    capacities = _of(records, CAPACITY)
    if capacities:
        parts += ["## Tokens in the same bytes", _ABOUT_CAPACITY, _capacity_table(capacities)]
    for sizes in dict.fromkeys(map(_below, _of(records, HITS))):
        own = [r for r in _of(records, HITS) if _below(r) == sizes]
        parts += [f"## Hit tokens against --hicache-ratio, {_below(own[0])}", _hit_table(own)]
        parts += [_judgement(own)]
    parts += [f"![Hit tokens against the ratio]({name})" for name in pictures if "ratio" in name]
    by_interval = _of(records, BY_INTERVAL)
    if by_interval:
        first = by_interval[0]
        title = f"ratio {first.params['hicache_ratio']:g}, {_below(first)}"
        parts += [f"## Hit tokens against the interval, {title}", _interval_table(by_interval)]
        parts += [f"![Hit tokens against the interval]({n})" for n in pictures if "interval" in n]
    if _of(records, TTFT):
        parts += ["## Time to the first token, tiny models", _ABOUT_TTFT, _ttft_table(records)]
        parts += [f"![Time to the first token]({name})" for name in pictures if "ttft" in name]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = (
    "Written by `python -m sgl_jax_hicache.bench hybrid --size whole --output-dir docs`; what is in it now comes from\n"
    "the runs below. A trace is replayed through the real tree, host pools and prefetch, with the byte proportions of\n"
    "published models in pages of a few words; every page and state that is reused is compared with what computing\n"
    "gives. Device, host and storage take the same bytes for every model and for a model of the same depth whose\n"
    "layers are all full; sizes are given in blocks of the latter "
    f"({BLOCK_TOKENS} tokens). `x full` is what a model\nfinds in units of what that one finds."
)

_ABOUT_UNBOUNDED = (
    "Counted, not replayed: a cache that forgets nothing, and prompts that resume at multiples of the interval only,\n"
    "as with recurrent states. Where memory is short, a longer interval leaves room for more prompts, and costs less\n"
    "than this."
)

_ABOUT_CAPACITY = (
    "Computed from the bytes of a Full page, a window and a state: how many tokens L2 keeps, all that they need\n"
    "included, for one token of a model of the same depth whose layers are all full."
)

_ABOUT_TTFT = (
    "The embedded engine with random weights, one prompt at a time; device memory holds little more than one prompt.\n"
    "`asked again` is the mean of prompts asked again in random order: the larger L2, the more of it comes from\n"
    "there. The other columns are medians of the prompts that were served mostly from that tier. Models this small\n"
    "show how the ways to a first token compare, not how long a large model takes."
)


def _of(records: Sequence[Record], name: str) -> list[Record]:
    return [record for record in records if record.name == name]


_OF_ONE_RUN = ("command", "commit", "load", "environment")


def _about(records: Sequence[Record]) -> str:
    """Every run with its commit and the load that the machine had at its end, then the machines."""
    runs, machines = [], []
    for run in (r.params[RUN] for r in records):
        told = f"commit {run['commit']}, load average {run.get('load', 'unknown')}"
        runs.append(f"* `{run['command']}`: {told}")
        machines += [
            f"* {key}: {value}" for key, value in run.items() if key not in _OF_ONE_RUN and value
        ]
    return "\n".join(dict.fromkeys([*runs, *machines]))


def _judgement(records: Sequence[Record]) -> str:
    """The kind that finds least beside full attention, and whether that is what it must be."""
    hybrids = [r for r in records if r.params["model"] != FULL.name]
    least = min(hybrids, key=lambda r: r.ratio or 0.0)
    ratio, params = least.ratio or 0.0, least.params
    return (
        f"Must reach {AIM} of full attention's hit tokens with the same bytes: "
        f"{'met' if ratio >= AIM else '**not met**'}. Least: {ratio:.3f}, {params['model']} at ratio "
        f"{params['hicache_ratio']:g}."
    )


def _below(record: Record) -> str:
    """The trace's length and the levels that are the same at every ratio."""
    blocks, l3 = record.params["l3_blocks"], record.params["l3"]
    below = {
        "bounded": f"L3 of {blocks:,} blocks",
        "none": "no L3",
        "unbounded": "L3 without a bound",
    }[l3]
    requests = f"{record.params['requests']:,} requests"
    return f"{requests}, L1 of {record.params['l1_blocks']:,} blocks, {below}"


def _models() -> str:
    rows = [
        (
            model.name,
            model.about,
            f"{model.full_layers * model.full_token_bytes / 1024:,.1f}",
            f"{model.sliding_layers * model.sliding_token_bytes / 1024:,.1f}"
            if model.window
            else "",
            f"{model.recurrent_layers * model.state_bytes / 2**20:,.1f}"
            if model.recurrent_layers
            else "",
            f"{model.all_full_token_bytes / 1024:,.1f}",
        )
        for model in HYBRIDS
    ]
    columns = (
        "kind",
        "the numbers of",
        "KiB a token, Full",
        "KiB a token, sliding",
        "MiB a state",
        "KiB a token, all full",
    )
    return _table(columns, rows)


def _hit_table(records: Sequence[Record]) -> str:
    rows = []
    for r in records:
        tokens = r.params["tokens"]
        total = sum(tokens.values())
        rows.append(
            (
                f"{r.params['hicache_ratio']:g}",
                r.params["model"],
                str(r.params["interval"] or ""),
                *(f"{100 * tokens[tier] / total:.1f}" for tier in TIERS),
                f"{r.value:.1f}",
                f"{r.ratio or 0.0:.2f}",
            )
        )
    columns = (
        "ratio",
        "kind",
        "kept every",
        "% of L1",
        "% of L2",
        "% of L3",
        "% hit",
        "x full",
    )
    return _table(columns, rows)


def _unbounded_table(records: Sequence[Record]) -> str:
    rows = [
        (
            f"{r.params['requests']:,}",
            f"{r.params['interval']:,}",
            f"{r.value:.1f}",
            f"{r.ratio or 0.0:.3f}",
        )
        for r in records
    ]
    return _table(("requests", "interval", "% hit", "x every block"), rows)


def _capacity_table(records: Sequence[Record]) -> str:
    intervals = sorted({r.params["interval"] for r in records})
    kept = {(r.params["model"], r.params["interval"]): f"{r.value:.2f}" for r in records}
    chosen = {r.params["model"]: r.params["interval"] for r in records if r.params["chosen"]}
    rows = [
        (model, *(kept.get((model, interval), "") for interval in intervals), f"{own:,}")
        for model, own in chosen.items()
    ]
    return _table(("x full; kind", *(f"{i:,}" for i in intervals), "chosen"), rows)


def _interval_table(records: Sequence[Record]) -> str:
    chosen = {r.params["model"]: r for r in records if r.params["chosen"]}
    intervals = sorted({r.params["interval"] for r in records if not r.params["chosen"]})
    rows = []
    for model, record in chosen.items():
        by_interval = {
            r.params["interval"]: r
            for r in records
            if r.params["model"] == model and not r.params["chosen"]
        }
        cells = [
            f"{by_interval[i].ratio or 0.0:.2f}" if i in by_interval else "" for i in intervals
        ]
        rows.append((model, *cells, f"{record.ratio or 0.0:.2f}", str(record.params["interval"])))
    columns = ("x full; kind", *map(str, intervals), "chosen", "which is")
    return _table(columns, rows)


def _ttft_table(records: Sequence[Record]) -> str:
    rows = []
    for again in _of(records, TTFT_AGAIN):
        own = {
            r.params["served_from"]: r
            for r in _of(records, TTFT)
            if r.params["kind"] == again.params["kind"]
            and r.params["hicache_ratio"] == again.params["hicache_ratio"]
        }
        tokens = again.params["tokens"]
        total = sum(tokens.values())
        rows.append(
            (
                f"{again.params['hicache_ratio']:g}",
                f"{again.params['kind']} ({again.params['model']})",
                *(_ms(own.get(tier)) for tier in ("computed", "host", "storage")),
                short(sum(again.samples) / len(again.samples)),
                *(f"{100 * tokens[tier] / total:.0f}" for tier in TIERS),
            )
        )
    columns = (
        "ratio",
        "kind",
        "ms computed",
        "ms from L2",
        "ms from L3",
        "ms asked again",
        "% of L1",
        "% of L2",
        "% of L3",
    )
    return _table(columns, rows)


def _ms(record: Record | None) -> str:
    return "" if record is None else short(record.value)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    lines.insert(1, "|" + " --- |" * len(columns))
    return "\n".join(lines)


def _draw_ratios(figure: Figure, records: Sequence[Record]) -> bool:
    """For each ratio the kinds side by side, hit tokens by tier."""
    hits = _of(records, HITS)
    hits = [r for r in hits if _below(r) == _below(hits[0])]
    if not hits:
        return False
    axes = figure.subplots()
    ratios = list(dict.fromkeys(r.params["hicache_ratio"] for r in hits))
    models = list(dict.fromkeys(r.params["model"] for r in hits))
    places = {
        (ratio, model): i * (len(models) + 1) + j
        for i, ratio in enumerate(ratios)
        for j, model in enumerate(models)
    }
    for r in hits:
        place = places[r.params["hicache_ratio"], r.params["model"]]
        total, bottom = sum(r.params["tokens"].values()), 0.0
        for tier in TIERS:
            height = 100.0 * r.params["tokens"][tier] / total
            label = tier if place == 0 else None
            axes.bar(place, height, 0.9, bottom, color=_COLOURS[tier], label=label)
            bottom += height
    axes.set_xticks(list(places.values()), [model for _, model in places], rotation=90, fontsize=7)
    for i, ratio in enumerate(ratios):
        middle = i * (len(models) + 1) + (len(models) - 1) / 2
        axes.text(
            middle, 1.0, f"ratio {ratio:g}", ha="center", transform=axes.get_xaxis_transform()
        )
    axes.set_ylabel("% of all prompt tokens")
    axes.set_title(_below(hits[0]), fontsize=9, loc="left", pad=16)
    axes.legend(frameon=False, ncols=3, loc="upper left")
    axes.set_ylim(0, 1.2 * max(1.0, *(r.value for r in hits)))
    return True


def _draw_intervals(figure: Figure, records: Sequence[Record]) -> bool:
    """A line for each kind, in units of full attention's hits; the chosen interval is marked."""
    own = _of(records, BY_INTERVAL)
    if not own:
        return False
    axes = figure.subplots()
    models = dict.fromkeys(r.params["model"] for r in own)
    for colour, model in zip(cycle(_LINES), models, strict=False):
        of_model = sorted(
            (r for r in own if r.params["model"] == model), key=lambda r: r.params["interval"]
        )
        axes.plot(
            [r.params["interval"] for r in of_model],
            [r.ratio or 0.0 for r in of_model],
            "o-",
            color=colour,
            markersize=3,
            label=model,
        )
        for r in of_model:
            if r.params["chosen"]:
                axes.plot(r.params["interval"], r.ratio or 0.0, "D", color=colour, markersize=7)
    axes.axhline(AIM, color="#d1495b", linewidth=0.8, linestyle=":")
    axes.axhline(1.0, color="#222222", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({r.params["interval"] for r in own if not r.params["chosen"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(
        "--hicache-checkpoint-interval, tokens (diamond: what is chosen without the flag)"
    )
    axes.set_ylabel("hit tokens, in units of full attention's")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return True


def _draw_ttft(figure: Figure, records: Sequence[Record]) -> bool:
    """For each kind the time to the first token against the ratio: asked again, and by tier."""
    again = _of(records, TTFT_AGAIN)
    if not again:
        return False
    kinds = list(dict.fromkeys(r.params["kind"] for r in again))
    grid = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, kind in zip(grid, kinds, strict=True):
        own = [r for r in again if r.params["kind"] == kind]
        axes.plot(
            [r.params["hicache_ratio"] for r in own],
            [sum(r.samples) / len(r.samples) for r in own],
            "kD-",
            markersize=4,
            label="asked again, mean",
        )
        for tier, colour in (("computed", "#c8c8c8"), *((t, _COLOURS[t]) for t in TIERS[1:])):
            of_tier = [
                r
                for r in _of(records, TTFT)
                if r.params["kind"] == kind and r.params["served_from"] == tier
            ]
            axes.plot(
                [r.params["hicache_ratio"] for r in of_tier],
                [r.value for r in of_tier],
                "o-",
                color=colour,
                markersize=3,
                label=tier,
            )
        _label_ttft(axes, kind, [r.params["hicache_ratio"] for r in own])
    grid[0].set_ylim(
        bottom=0
    )  # for all of them, now that all are drawn: it ends the scaling to what is there
    grid[0].set_ylabel("ms to the first token")
    grid[0].legend(frameon=False, fontsize=7)
    return True


def _label_ttft(axes: Axes, kind: str, ratios: Sequence[float]) -> None:
    axes.set_title(kind, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_xlabel("hicache-ratio")


_PICTURES: Sequence[tuple[str, tuple[float, float], Callable[[Figure, Sequence[Record]], bool]]] = (
    ("hybrid-ratio.png", (9, 5), _draw_ratios),
    ("hybrid-interval.png", (9, 4), _draw_intervals),
    ("hybrid-ttft.png", (9, 3), _draw_ttft),
)
