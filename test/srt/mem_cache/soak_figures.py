"""What a soak run is judged by: how long each soak test may go on, and the figures that it prints at the end.

`make soak` divides its time among the selected soak tests (`soak_seconds`): one part each, or as many as the mark says,
`@pytest.mark.soak(parts=4)`. A test adds up what it did in `figures`; the sum over all tests is printed last.
`wrong_tokens` is always there: a run that counted none of them says so with a 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

ALWAYS = ("operations", "kills", "damaged_files", "requests", "wrong_tokens")


class Figures:
    """Counts by name, over all tests of one run."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(ALWAYS, 0))

    def add(self, **counts: int) -> None:
        """Adds to the named counts."""
        self._counts.update(counts)

    def counts(self) -> Mapping[str, int]:
        """All counts so far."""
        return dict(self._counts)

    def lines(self) -> list[str]:
        """The figures for a person, and as one line of JSON for a report."""
        names = max(map(len, self._counts))
        table = [f"{name.replace('_', ' '):{names}} {n:>12,}" for name, n in self._counts.items()]
        return [*table, json.dumps({"soak_figures": self._counts})]
