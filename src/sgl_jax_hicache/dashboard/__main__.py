"""`python -m sgl_jax_hicache.dashboard`: draw a Grafana dashboard from what a Prometheus has, as a PNG.

    python -m sgl_jax_hicache.dashboard --prometheus http://localhost:9090 --minutes 30 --output hicache.png

For a picture in a report, or a look at the metrics where there is no Grafana. The exit status is 1 if Prometheus does
not answer or refuses a query.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx

from .draw import Curves, draw
from .panels import Dashboard, Panel
from .prometheus import Prometheus, QueryError, Window

_POINTS = 300


def ask(prometheus: Prometheus, panel: Panel, window: Window, scrape_s: float) -> Curves:
    """What a panel's queries give. Raises QueryError."""
    curves = {}
    for query in panel.queries:
        expression = _filled_in(query.expression, window, scrape_s)
        is_stat = panel.kind == "stat"
        found = (
            prometheus.at(expression, window.end_s)
            if is_stat
            else prometheus.over(expression, window)
        )
        curves.update({query.name(series.labels): series for series in found})
    return curves


def _filled_in(expression: str, window: Window, scrape_s: float) -> str:
    """The expression with Grafana's variables as Grafana sets them for all servers."""
    rate_s = max(window.step_s + scrape_s, 4 * scrape_s)
    return (
        expression.replace("$__range", f"{window.end_s - window.start_s:.0f}s")
        .replace("$__rate_interval", f"{rate_s:.0f}s")
        .replace("$instance", ".*")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; returns the exit status."""
    arguments = _parse(argv)
    end_s = arguments.end if arguments.end is not None else time.time()
    span_s = 60 * arguments.minutes
    window = Window(end_s - span_s, end_s, max(1.0, round(span_s / _POINTS)))
    try:
        dashboard = Dashboard.load(arguments.dashboard)
        with closing(Prometheus(arguments.prometheus)) as prometheus:
            curves = [
                ask(prometheus, panel, window, arguments.scrape_s) for panel in dashboard.panels
            ]
    except (OSError, httpx.HTTPError, QueryError) as error:
        print(f"sgl_jax_hicache.dashboard: {error}", file=sys.stderr)
        return 1
    draw(dashboard, curves, window, arguments.output)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax_hicache.dashboard", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--prometheus", metavar="URL", default="http://localhost:9090")
    parser.add_argument(
        *("--dashboard", "-d"),
        type=Path,
        default=Path("docs/grafana/hicache.json"),
        help="the dashboard's JSON (default docs/grafana/hicache.json)",
    )
    parser.add_argument("--output", type=Path, default=Path("hicache.png"), help="the PNG to write")
    parser.add_argument("--minutes", type=float, default=30.0, help="how far back (default 30)")
    parser.add_argument("--end", type=float, help="Unix seconds of the right edge (default: now)")
    parser.add_argument(
        "--scrape-s",
        type=float,
        default=15.0,
        help="Prometheus's scrape interval, seconds (default 15)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
