"""The figures of a soak run add up and say 0 where nothing was counted."""

from __future__ import annotations

import json

from soak_figures import ALWAYS, Figures


def test_figures_add_up_and_are_there_at_zero() -> None:
    figures = Figures()
    assert figures.counts() == dict.fromkeys(ALWAYS, 0)
    figures.add(kills=2)
    figures.add(kills=1, restarts=1)
    lines = figures.lines()
    assert lines[1].split() == ["kills", "3"]
    counts = json.loads(lines[-1])["soak_figures"]
    assert counts["kills"] == 3
    assert counts["restarts"] == 1
    assert counts["wrong_tokens"] == 0
