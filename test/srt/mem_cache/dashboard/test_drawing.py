"""Drawing a dashboard from what a Prometheus answers: what is asked, how numbers read, what a picture needs."""

from __future__ import annotations

import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from sgl_jax_hicache.dashboard.__main__ import ask, main
from sgl_jax_hicache.dashboard.draw import draw
from sgl_jax_hicache.dashboard.panels import Dashboard, Panel, Place, Query
from sgl_jax_hicache.dashboard.prometheus import Prometheus, QueryError, Series, Window
from sgl_jax_hicache.dashboard.units import with_unit

FILE = Path(__file__).parents[4] / "docs" / "grafana" / "hicache.json"
WINDOW = Window(start_s=1_000.0, end_s=1_600.0, step_s=2.0)
PLACE = Place(0, 0, 12, 8)


class Server:
    """Answers every query with two tiers, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[httpx.URL] = []

    def prometheus(self) -> Prometheus:
        return Prometheus("http://test", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url)
        point = [1_600.0, "0.25"]
        curve = [[1_590.0, "NaN"], point]
        is_range = request.url.path.endswith("query_range")
        result = [
            {"metric": {"tier": tier}, **({"values": curve} if is_range else {"value": point})}
            for tier in ("device", "host")
        ]
        return httpx.Response(200, json={"data": {"result": result}})


def test_a_curve_is_asked_for_over_the_window_with_grafanas_variables_filled_in() -> None:
    server = Server()
    query = Query('rate(x{instance=~"$instance"}[$__rate_interval])', "{{tier}} tokens")
    curves = ask(server.prometheus(), Panel("timeseries", "t", PLACE, [query]), WINDOW, scrape_s=5)
    (url,) = server.asked
    assert url.path == "/api/v1/query_range"
    assert dict(url.params) == {
        "query": 'rate(x{instance=~".*"}[20s])',
        "start": "1000.0",
        "end": "1600.0",
        "step": "2.0",
    }
    assert set(curves) == {"device tokens", "host tokens"}
    assert math.isnan(curves["host tokens"].values[0])


def test_a_stat_is_asked_for_at_the_end_over_the_whole_window() -> None:
    server = Server()
    panel = Panel("stat", "t", PLACE, [Query("increase(x[$__range])", "")])
    ask(server.prometheus(), panel, WINDOW, scrape_s=5)
    (url,) = server.asked
    assert url.path == "/api/v1/query"
    assert dict(url.params) == {"query": "increase(x[600s])", "time": "1600.0"}


def test_a_refused_expression_is_told_with_prometheus_words() -> None:
    transport = httpx.MockTransport(
        lambda request: httpx.Response(400, json={"error": "unexpected end of input"})
    )
    with pytest.raises(QueryError, match=r"sum\(: unexpected end of input"):
        Prometheus("http://test", transport=transport).at("sum(", 0.0)


def test_the_whole_dashboard_is_drawn(tmp_path: Path) -> None:
    dashboard = Dashboard.load(FILE)
    prometheus = Server().prometheus()
    path = tmp_path / "dashboard.png"
    draw(dashboard, [ask(prometheus, p, WINDOW, 5) for p in dashboard.panels], WINDOW, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_panels_without_values_and_with_zeros_are_drawn(tmp_path: Path) -> None:
    kinds = ("stat", "timeseries", "timeseries", "timeseries")
    panels = [Panel(kind, "t", Place(6 * i, 0, 6, 4)) for i, kind in enumerate(kinds)]
    zero, none = ({"x": Series({}, [1_000.0], [value])} for value in (0.0, math.nan))
    draw(Dashboard("t", panels), [{}, {}, zero, none], WINDOW, tmp_path / "small.png")
    assert (tmp_path / "small.png").exists()


class Handler(BaseHTTPRequestHandler):
    """A Prometheus with one value, whatever it is asked."""

    def do_GET(self) -> None:
        result = [{"metric": {"tier": "host"}, "values": [[1_600.0, "1"]], "value": [1_600.0, "1"]}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": result}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


def test_the_command_draws_a_file(tmp_path: Path) -> None:
    model = json.loads(FILE.read_text(encoding="utf-8"))
    model["panels"] = model["panels"][:2]
    dashboard = tmp_path / "two_panels.json"
    dashboard.write_text(json.dumps(model))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        argv = [
            "--prometheus",
            f"http://127.0.0.1:{server.server_port}",
            "--end",
            "1600",
            "--minutes",
            "10",
        ]
        status = main([*argv, "--dashboard", str(dashboard), "--output", str(tmp_path / "x.png")])
        server.shutdown()
        thread.join()
    assert status == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_prometheus_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--prometheus", "http://127.0.0.1:1", "--dashboard", str(FILE)]
    assert main([*argv, "--output", str(tmp_path / "x.png")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.8765, "percentunit", "88 %"),
        (0.0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (0.000_05, "s", "50 us"),
        (2.5, "s", "2.5 s"),
        (3 << 30, "bytes", "3 GiB"),
        (1500, "Bps", "1.5 kB/s"),
        (12_300, "short", "12.3k"),
        (7, "none", "7"),
        (math.nan, "short", "no data"),
    ],
)
def test_numbers_with_units(value: float, unit: str, shown: str) -> None:
    assert with_unit(value, unit) == shown
