"""Which pages of a prefix are there, and the one rule that decides how much of it can be used.

Pages are counted from the start of the prompt; the border after page p is p + 1 pages from the start. A component is
legal at a border if the last `reach` pages before it are there: all of them for full attention, the window for a
sliding window, the state of the page itself for a recurrent layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Run = tuple[int, int]


@dataclass(frozen=True)
class Coverage:
    """The pages of one component that are there: half-open runs, ascending, apart from each other."""

    runs: tuple[Run, ...] = ()

    @classmethod
    def of_runs(cls, runs: Iterable[Run]) -> Coverage:
        """From runs in ascending order, which may touch; empty ones are left out."""
        merged: list[Run] = []
        for start, end in runs:
            if start >= end:
                continue
            if merged and merged[-1][1] >= start:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return cls(tuple(merged))

    @classmethod
    def of_pages(cls, pages: Iterable[int]) -> Coverage:
        """From page numbers in any order."""
        return cls.of_runs((page, page + 1) for page in sorted(pages))

    def union(self, other: Coverage) -> Coverage:
        """What is in either."""
        return Coverage.of_runs(sorted(self.runs + other.runs))

    def missing(self, start: int, end: int) -> tuple[int, ...]:
        """The pages of [start, end) that are not there."""
        pages: list[int] = []
        for run_start, run_end in self.runs:
            if start >= end:
                break
            pages.extend(range(start, min(run_start, end)))
            start = max(start, run_end)
        pages.extend(range(start, end))
        return tuple(pages)

    def largest_legal_border(self, reach: int | None, limit: int) -> int:
        """The greatest border <= `limit` whose last `reach` pages (None: all from the start) are there; 0 if none."""
        if reach is None:
            whole = bool(self.runs) and self.runs[0][0] == 0
            return min(self.runs[0][1], limit) if whole else 0
        if reach == 0:
            return limit
        for start, end in reversed(self.runs):
            border = min(end, limit)
            if border > start and (start == 0 or border - start >= reach):
                return border
        return 0


@dataclass(frozen=True)
class Part:
    """One component's say: what is there of it, and how far back a reader looks (None: to the start)."""

    coverage: Coverage
    reach: int | None


def usable_prefix(parts: Sequence[Part], limit: int) -> int:
    """The greatest border <= `limit`, in pages, that is legal for every part at once; 0 if there is none.

    The only place that answers this, for match, prefetch and load alike. Each part lowers the border to its own
    greatest legal one until all agree, which finds the greatest element of the intersection, never just the minimum of
    the parts' maxima.
    """
    border = limit
    while True:
        start = border
        for part in parts:
            border = part.coverage.largest_legal_border(part.reach, border)
        if border == start:
            return border
