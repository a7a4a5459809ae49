"""The rule of the usable prefix, against its definition page by page."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.srt.mem_cache.hicache.coverage import Coverage, Part, usable_prefix

REPEATABLE = settings(deadline=None, database=None, derandomize=True)
MOST_PAGES = 24
PAGES = st.sets(st.integers(0, MOST_PAGES - 1))
# Whole prefixes with holes: random sets alone hardly ever have a long legal prefix.
PAGES_WITH_HOLES = st.builds(
    lambda end, holes: set(range(end)) - holes,
    st.integers(0, MOST_PAGES),
    st.sets(st.integers(0, MOST_PAGES - 1), max_size=3),
)
REACHES = st.one_of(st.none(), st.integers(0, 5))
SETS = st.lists(st.tuples(PAGES | PAGES_WITH_HOLES, REACHES), min_size=1, max_size=3)
LIMITS = st.integers(0, MOST_PAGES + 2)


def is_legal(pages: set[int], reach: int | None, border: int) -> bool:
    """True if the last `reach` pages before the border (None: all) are there."""
    first = 0 if reach is None else max(border - reach, 0)
    return set(range(first, border)) <= pages


def longest(kinds: Sequence[tuple[set[int], int | None]], limit: int) -> int:
    """The greatest border within the limit that is legal for all of them."""
    return max(b for b in range(limit + 1) if all(is_legal(*kind, b) for kind in kinds))


@REPEATABLE
@given(kinds=SETS, limit=LIMITS)
def test_the_usable_prefix_is_the_greatest_border_that_is_legal_for_all(
    kinds: list[tuple[set[int], int | None]], limit: int
) -> None:
    parts = [Part(Coverage.of_pages(pages), reach) for pages, reach in kinds]
    assert usable_prefix(parts, limit) == longest(kinds, limit)


@REPEATABLE
@given(pages=PAGES, others=PAGES, start=LIMITS, end=LIMITS)
def test_coverage_is_a_set_of_pages(
    pages: set[int], others: set[int], start: int, end: int
) -> None:
    both = Coverage.of_pages(pages).union(Coverage.of_pages(others))
    assert both == Coverage.of_pages(pages | others)
    assert both.missing(start, end) == tuple(sorted(set(range(start, end)) - pages - others))
    covered = [page for run in both.runs for page in range(*run)]
    assert covered == sorted(pages | others)


def test_no_part_alone_decides() -> None:
    """Each kind is legal far out, but not at the same border: the answer is less than any of their own."""
    windows = Part(Coverage.of_runs([(0, 2), (4, 7)]), 2)
    states = Part(Coverage.of_pages([1, 4, 7]), 1)
    assert [p.coverage.largest_legal_border(p.reach, 9) for p in (windows, states)] == [7, 8]
    assert usable_prefix([windows, states], 9) == 2
