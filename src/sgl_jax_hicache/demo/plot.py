"""The demo's picture: where each prompt came from, and what that did to the time to the first token."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sgl_jax.srt.mem_cache.hicache.types import Tier

from .report import TIER_TITLES, Findings

COLOURS = {
    Tier.DEVICE: "#1b7f79",
    Tier.HOST: "#f2a541",
    Tier.STORAGE: "#6a5acd",
    Tier.COMPUTED: "#c8c8c8",
}


def write_plot(findings: Findings, path: Path) -> None:
    """Write the PNG. Draws without a display."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        requests, first_token = figure.subplots(1, 2, width_ratios=(3, 1))
        _draw_requests(requests, findings)
        _draw_long_prompt(first_token, findings)
        figure.savefig(path, dpi=150)


def _draw_requests(axes: Axes, findings: Findings) -> None:
    records = findings.cached_runs
    bottom = [0] * len(records)
    for tier, title in TIER_TITLES.items():
        heights = [getattr(record.answer.tiers, tier.value) for record in records]
        axes.bar(range(len(records)), heights, bottom=bottom, color=COLOURS[tier], label=title)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(records)), [record.step.name for record in records], rotation=60)
    axes.set_ylabel("prompt tokens")
    axes.set_title("Where the tokens of each prompt came from", loc="left")
    axes.set_ylim(0, 1.22 * max(bottom, default=1))
    border = len(findings.with_cache) - 0.5
    axes.axvline(border, color="#b00020", linestyle="--", linewidth=1)
    axes.text(border, 1.04 * max(bottom, default=1), " SIGKILL, restart", color="#b00020")
    axes.legend(loc="upper left", ncols=4, frameon=False)


def _draw_long_prompt(axes: Axes, findings: Findings) -> None:
    known = {tier: ms for tier, ms in findings.long_prompt_ttft_ms().items() if ms is not None}
    bars = axes.bar(
        [TIER_TITLES[tier] for tier in known],
        list(known.values()),
        color=[COLOURS[tier] for tier in known],
    )
    axes.bar_label(bars, fmt="{:,.0f} ms")
    axes.set_yscale("log")
    axes.set_ylabel("ms, log scale")
    axes.set_title("First token, 2,000-token prompt", loc="left")
