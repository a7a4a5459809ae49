"""How host memory is divided over the components: the shares add up, and none of them starves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.srt.mem_cache.hicache.host_split import (
    LONGEST_INTERVAL_TOKENS,
    LONGEST_STATE_INTERVAL_TOKENS,
    SHORTEST_INTERVAL_TOKENS,
    Checkpoints,
    choose_interval,
    companion_pages,
    unit_bytes,
)
from sgl_jax.srt.mem_cache.hicache.types import BufferLayout, ComponentKind, PageLayout

REPEATABLE = settings(deadline=None, database=None, derandomize=True)
FULL, SWA, STATE = ComponentKind.FULL, ComponentKind.SWA, ComponentKind.RECURRENT
PAGE_SIZE = 16

Layouts = Mapping[ComponentKind, PageLayout]


def layouts(full: int, **companions: int) -> dict[ComponentKind, PageLayout]:
    """One buffer for each kind, of that many bytes a page; `swa` and `recurrent` if there are such layers."""
    sizes = {FULL: full} | {ComponentKind(name): size for name, size in companions.items()}
    return {
        kind: PageLayout(kind, PAGE_SIZE, (BufferLayout("all", (size,), "uint8", size),))
        for kind, size in sizes.items()
    }


BYTES = st.integers(PAGE_SIZE, 1 << 20)
LAYOUTS = st.one_of(
    st.builds(lambda full, swa: layouts(full, swa=swa), BYTES, BYTES),
    st.builds(lambda full, state: layouts(full, recurrent=state), BYTES, BYTES),
    st.builds(
        lambda full, swa, state: layouts(full, swa=swa, recurrent=state), BYTES, BYTES, BYTES
    ),
)
CHECKPOINTS = st.builds(
    lambda window_pages, interval_pages: Checkpoints(
        PAGE_SIZE, window_pages, interval_pages * PAGE_SIZE
    ),
    st.integers(0, 40),
    st.integers(1, 64),
)
FULL_PAGES = st.integers(1, 5_000)


@REPEATABLE
@given(kinds=LAYOUTS, checkpoints=CHECKPOINTS, full_pages=FULL_PAGES)
def test_the_shares_add_up_to_what_the_full_pages_were_counted_for(
    kinds: Layouts, checkpoints: Checkpoints, full_pages: int
) -> None:
    pages = companion_pages(kinds, checkpoints, full_pages)
    assert pages.keys() == kinds.keys()
    assert pages[FULL] == full_pages
    least = {SWA: checkpoints.window_pages + 1, STATE: 2}
    num_bytes = sum(
        kinds[kind].page_bytes * num_pages
        for kind, num_pages in pages.items()
        if num_pages > least.get(kind, 0)  # the least that is of any use is given in any case
    )
    assert num_bytes <= full_pages * unit_bytes(kinds, checkpoints)


@REPEATABLE
@given(kinds=LAYOUTS, checkpoints=CHECKPOINTS, full_pages=FULL_PAGES)
def test_every_checkpoint_of_the_full_pages_has_its_window_and_state(
    kinds: Layouts, checkpoints: Checkpoints, full_pages: int
) -> None:
    pages = companion_pages(kinds, checkpoints, full_pages)
    num_checkpoints = full_pages // checkpoints.interval_pages
    if SWA in kinds:
        window_pages = min(checkpoints.window_pages, checkpoints.interval_pages)
        assert pages[SWA] >= num_checkpoints * window_pages
        assert pages[SWA] > checkpoints.window_pages, "one window, and the page behind it"
    if STATE in kinds:
        assert pages[STATE] >= max(num_checkpoints, 2)


@REPEATABLE
@given(kinds=LAYOUTS, window_pages=st.integers(0, 40))
def test_a_checkpoint_takes_about_the_bytes_of_the_pages_between_two(
    kinds: Layouts, window_pages: int
) -> None:
    interval = choose_interval(kinds, PAGE_SIZE, window_pages)
    longest = LONGEST_STATE_INTERVAL_TOKENS if STATE in kinds else LONGEST_INTERVAL_TOKENS
    assert interval % PAGE_SIZE == 0
    assert SHORTEST_INTERVAL_TOKENS <= interval <= longest
    of_companions = {SWA: window_pages, STATE: 1}
    checkpoint_bytes = sum(
        kinds[kind].page_bytes * of_companions[kind] for kind in kinds if kind is not FULL
    )
    between = kinds[FULL].page_bytes * interval // PAGE_SIZE
    assert between >= checkpoint_bytes or interval == longest
    one_page_less = between - kinds[FULL].page_bytes
    assert one_page_less < checkpoint_bytes or interval == SHORTEST_INTERVAL_TOKENS


@pytest.mark.parametrize(("window_pages", "interval"), [(0, PAGE_SIZE), (3, 3 * PAGE_SIZE)])
def test_where_full_slots_are_only_names_every_window_is_kept(
    window_pages: int, interval: int
) -> None:
    assert choose_interval(layouts(full=1, swa=4096), PAGE_SIZE, window_pages) == interval
