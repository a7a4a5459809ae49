"""How host memory is divided over the components, so that each keeps its share of the same prefixes.

The host pool of the Full pages sets how many tokens are kept; the others get what those tokens need: the windows and
states of their checkpoints. All together take `ratio` times the bytes of the device pools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .types import ComponentKind, PageLayout

SHORTEST_INTERVAL_TOKENS = 32
LONGEST_INTERVAL_TOKENS = 4096
LONGEST_STATE_INTERVAL_TOKENS = 2048
"""Bounds of the interval that is chosen when none is given. With recurrent states it is shorter: windows are also kept
at the end of every prompt, states are not, so a long interval costs such models more of their hits."""

TAIL_SLACK = 1.25
"""Windows and states beside those of the checkpoints: every prompt and answer ends somewhere in between."""


@dataclass(frozen=True)
class Checkpoints:
    """Where windows and states are kept. `window_pages`: pages of a window; `interval`: tokens, in whole pages."""

    page_size: int
    window_pages: int
    interval: int

    @property
    def interval_pages(self) -> int:
        """Pages between checkpoints."""
        return self.interval // self.page_size

    @property
    def window_share(self) -> float:
        """Part of all pages that lies in a window that is kept."""
        if self.window_pages >= self.interval_pages:
            return 1.0
        return min(1.0, self.window_pages / self.interval_pages * TAIL_SLACK)

    @property
    def states_per_page(self) -> float:
        """States that are kept, per page."""
        return TAIL_SLACK / self.interval_pages


def choose_interval(
    layouts: Mapping[ComponentKind, PageLayout], page_size: int, window_pages: int
) -> int:
    """The interval, in tokens, at which a checkpoint's window and state take as many bytes as the Full pages between
    two of them, within bounds and in whole pages."""
    full_bytes = layouts[ComponentKind.FULL].page_bytes
    # Only names (see `pool_buffers`): the windows are all there is, every one is kept.
    if full_bytes < page_size:
        return max(window_pages, 1) * page_size
    checkpoint_bytes, longest = 0, LONGEST_INTERVAL_TOKENS
    if ComponentKind.SWA in layouts:
        checkpoint_bytes += window_pages * layouts[ComponentKind.SWA].page_bytes
    if ComponentKind.RECURRENT in layouts:
        checkpoint_bytes += layouts[ComponentKind.RECURRENT].page_bytes
        longest = LONGEST_STATE_INTERVAL_TOKENS
    tokens = math.ceil(checkpoint_bytes / full_bytes) * page_size
    bounded = min(max(tokens, SHORTEST_INTERVAL_TOKENS), longest)
    return -(-bounded // page_size) * page_size


def unit_bytes(layouts: Mapping[ComponentKind, PageLayout], checkpoints: Checkpoints) -> int:
    """Host bytes of one Full page together with its share of windows and states."""
    total = float(layouts[ComponentKind.FULL].page_bytes)
    if ComponentKind.SWA in layouts:
        total += checkpoints.window_share * layouts[ComponentKind.SWA].page_bytes
    if ComponentKind.RECURRENT in layouts:
        total += checkpoints.states_per_page * layouts[ComponentKind.RECURRENT].page_bytes
    return math.ceil(total)


def companion_pages(
    layouts: Mapping[ComponentKind, PageLayout], checkpoints: Checkpoints, full_pages: int
) -> dict[ComponentKind, int]:
    """Host pages (states) of every component beside `full_pages` Full pages; enough for one checkpoint at least."""
    pages = {ComponentKind.FULL: full_pages}
    if ComponentKind.SWA in layouts:
        share = math.floor(full_pages * checkpoints.window_share)
        pages[ComponentKind.SWA] = max(share, checkpoints.window_pages + 1)
    if ComponentKind.RECURRENT in layouts:
        pages[ComponentKind.RECURRENT] = max(
            math.floor(full_pages * checkpoints.states_per_page), 2
        )
    return pages
