"""The dashboard as a picture: panels on Grafana's grid, curves and single numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .panels import Dashboard, Panel, Place
from .prometheus import Series, Window
from .units import tick_step, with_unit

Curves = Mapping[str, Series]
"""The series of a panel by legend."""

_COLUMNS = 24
_WIDTH_IN = 16.0
_ROW_IN = 0.36
_GAP_IN = 0.08
_LETTERS_PER_IN = 13
_DAY_S = 86_400
"""matplotlib's dates are days since 1970."""
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}


def draw(dashboard: Dashboard, curves: Sequence[Curves], window: Window, path: Path) -> None:
    """Write a PNG. `curves`: what each panel's queries gave, in the dashboard's order. Draws without a display."""
    rows = max(panel.place.y + panel.place.height for panel in dashboard.panels)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, rows * _ROW_IN), facecolor="#f4f5f5")
        grid = _Grid(figure, rows)
        for panel, found in zip(dashboard.panels, curves, strict=True):
            if panel.kind == "row":
                grid.heading(panel)
            elif panel.kind == "stat":
                _draw_stat(grid.axes(panel.place), panel, found)
            else:
                _draw_curves(grid.axes(panel.place, margins=True), panel, found, window)
        figure.savefig(path, dpi=100)


class _Grid:
    """Grafana's grid on a figure."""

    def __init__(self, figure: Figure, rows: int) -> None:
        self._figure = figure
        self._height_in = rows * _ROW_IN

    def heading(self, panel: Panel) -> None:
        top_in = self._height_in - (panel.place.y + 0.7) * _ROW_IN
        self._figure.text(
            _GAP_IN / _WIDTH_IN, top_in / self._height_in, panel.title, fontsize=11, weight="bold"
        )

    def axes(self, place: Place, margins: bool = False) -> Axes:
        """Axes on a white card, with room around them for labels if `margins`."""
        left, width = place.x * _WIDTH_IN / _COLUMNS, place.width * _WIDTH_IN / _COLUMNS
        bottom = self._height_in - (place.y + place.height) * _ROW_IN
        card = (
            left + _GAP_IN,
            bottom + _GAP_IN,
            width - 2 * _GAP_IN,
            place.height * _ROW_IN - 2 * _GAP_IN,
        )
        background = self._figure.add_axes(self._relative(card), facecolor="white")
        background.set(xticks=[], yticks=[])
        background.spines[:].set_visible(True)
        background.spines[:].set_color("#dcdcdc")
        if not margins:
            return background
        x, y, w, h = card
        return self._figure.add_axes(self._relative((x + 0.75, y + 0.65, w - 0.95, h - 1.0)))

    def _relative(
        self, box_in: tuple[float, float, float, float]
    ) -> tuple[float, float, float, float]:
        x, y, w, h = box_in
        return x / _WIDTH_IN, y / self._height_in, w / _WIDTH_IN, h / self._height_in


def _draw_stat(axes: Axes, panel: Panel, curves: Curves) -> None:
    axes.grid(False)
    value = next((series.values[-1] for series in curves.values()), float("nan"))
    reached = [step.colour for step in panel.thresholds if value >= step.value]
    words = (panel.words or {}).get(f"{value:g}")
    shown = words if words is not None else with_unit(value, panel.unit, panel.decimals)
    axes.text(0.03, 0.88, panel.title, transform=axes.transAxes, va="top", weight="bold")
    axes.text(
        *(0.5, 0.36, shown),
        transform=axes.transAxes,
        ha="center",
        va="center",
        fontsize=22,
        color=reached[-1] if reached else "#555555",
    )


def _draw_curves(axes: Axes, panel: Panel, curves: Curves, window: Window) -> None:
    axes.set_title(panel.title, loc="left", fontsize=9, weight="bold", x=-0.08)
    colours = dict(panel.colours or {})
    names = sorted(curves, key=lambda name: _rank(name, list(colours)))
    times = np.arange(window.start_s, window.end_s + window.step_s / 2, window.step_s)
    days = times / _DAY_S
    below = np.zeros(len(times))
    for name in names:
        values = _on(times, curves[name], window.step_s)
        if panel.stacked:
            top = below + np.nan_to_num(values)
            axes.fill_between(
                days, below, top, label=name, color=colours.get(name), lw=0, alpha=0.85
            )
            below = top
        else:
            axes.plot(days, values, label=name, color=colours.get(name), lw=1.3)
    axes.set_xlim(days[0], days[-1])
    _scale_values(axes, panel, curves)
    locator = AutoDateLocator(maxticks=6)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        ConciseDateFormatter(locator, show_offset=False)  # type: ignore[no-untyped-call]
    )
    if names:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.12, -0.12),
            ncols=_legend_columns(panel.place, names),
            frameon=False,
            columnspacing=1.0,
            labelspacing=0.2,
        )
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="#999999")


def _scale_values(axes: Axes, panel: Panel, curves: Curves) -> None:
    """The axis of the values: from 0, or logarithmic; ticks that are round in the panel's unit."""
    highest = max(
        (np.nan_to_num(series.values).max(initial=0) for series in curves.values()), default=0
    )
    if panel.logarithmic and highest > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, panel.maximum if panel.maximum or highest > 0 else 1)
        step = tick_step(axes.get_ylim()[1], panel.unit)
        ticks = step * np.asarray(MaxNLocator(5).tick_values(0, axes.get_ylim()[1] / step))
        axes.set_yticks(ticks[ticks <= axes.get_ylim()[1]])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, panel.unit)))


def _legend_columns(place: Place, names: Sequence[str]) -> int:
    """As many as fit side by side, four at most."""
    width_in = place.width * _WIDTH_IN / _COLUMNS
    longest_in = (max(map(len, names)) + 6) / _LETTERS_PER_IN  # with the line before it
    return min(4, max(1, int(width_in / longest_in)))


def _rank(name: str, known: list[str]) -> tuple[int, str]:
    """Series with a colour of their own first, in the order of the file."""
    return (known.index(name) if name in known else len(known), name)


def _on(times: np.ndarray, series: Series, step_s: float) -> np.ndarray:
    """The series' values at the given times; NaN where it has none."""
    values = np.full(len(times), np.nan)
    at = np.rint((np.asarray(series.times_s) - times[0]) / step_s).astype(int)
    values[at] = series.values
    return values
