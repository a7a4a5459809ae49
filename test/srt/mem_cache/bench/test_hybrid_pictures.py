"""The pictures of `bench hybrid` show every kind of model and every point."""

from __future__ import annotations

from matplotlib.figure import Figure

from sgl_jax_hicache.bench.hybrid_hits import BY_INTERVAL
from sgl_jax_hicache.bench.hybrid_models import HYBRIDS
from sgl_jax_hicache.bench.hybrid_report import _draw_intervals, _draw_ttft
from sgl_jax_hicache.bench.hybrid_ttft import TTFT, TTFT_AGAIN
from sgl_jax_hicache.bench.record import Record


def test_every_kind_has_its_line_over_the_interval() -> None:
    records = [
        Record(
            BY_INTERVAL, 50.0, "%", 50.0, params={"model": m.name, "interval": n, "chosen": not i}
        )
        for m in HYBRIDS
        for i, n in enumerate((512, 1024))
    ]
    figure = Figure()
    assert _draw_intervals(figure, records)
    (axes,) = figure.axes
    lines = {str(text.get_text()) for text in axes.get_legend().get_texts()}
    assert lines == {model.name for model in HYBRIDS}
    named = [line for line in axes.get_lines() if line.get_label() in lines]
    assert len({line.get_color() for line in named}) == len(HYBRIDS)


def test_no_point_lies_above_the_picture() -> None:
    """The kinds share one axis, and a later one takes longer."""
    records = []
    for kind, ms in (("full", 10.0), ("swa", 500.0)):
        params = {"kind": kind, "hicache_ratio": 2.0}
        records.append(Record(TTFT_AGAIN, ms, "ms", samples=(ms,), params=params))
        records.append(Record(TTFT, ms, "ms", params={**params, "served_from": "computed"}))
    figure = Figure()
    assert _draw_ttft(figure, records)
    for axes in figure.axes:
        lowest, highest = axes.get_ylim()
        assert lowest == 0.0
        assert highest >= 500.0
