"""In which order pages may go: those unused for longest first, and no page before the pages that follow it.

A page is of use only together with all pages before it in its prompt. So a page counts as used whenever a stored page
behind it was (a system prompt whose conversations go on stays, although only the conversations' own pages are read),
and among pages of equal age the deepest goes first. What goes is therefore always the end of a chain, and what is left
is whole. Pages that are cut off, because one before them is missing, go before all that are not. The links come from
the pages' headers, read once for each file and remembered.

Pages are told apart by the first eight bytes of their keys. Two of a million pages share them once in 37 million disks;
it would cost a wrong order, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..types import PageKey
from .headers import read_headers
from .inventory import Int64Array, Inventory

UNKNOWN_INDEX = -1
"""Place in its chain of a page whose writer did not know it, or whose header cannot be read."""

SETTLED_AFTER_S = 60.0
"""Only from this age on a page counts as cut off: several workers write, and what a page follows may come after it."""

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Links:
    """One entry per page: its own id, the id of the page before it (0: none, or not known), and its place in the chain.

    key_id, parent_id: uint64[pages]; index: int64[pages].
    """

    key_id: UInt64Array
    parent_id: UInt64Array
    index: Int64Array


class LinkReader:
    """Reads the links of the pages of an inventory, each file's header once. Not for several threads at once."""

    def __init__(self) -> None:
        self._known = Links(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64))

    def read(self, found: Inventory, tick: Callable[[int], None] = lambda num_pages: None) -> Links:
        """The links of all pages, in the inventory's order. `tick` is told of every page looked at."""
        key_id = found.key_ids
        parent_id = np.zeros(len(found), np.uint64)
        index = np.full(len(found), UNKNOWN_INDEX, np.int64)
        at, is_known = _find(self._known.key_id, key_id)
        parent_id[is_known] = self._known.parent_id[at[is_known]]
        index[is_known] = self._known.index[at[is_known]]
        for row, info in read_headers(found, np.flatnonzero(~is_known)):
            if info is not None and info.link is not None:
                parent_id[row], index[row] = id_of(info.link.parent), info.link.index
            tick(1)
        tick(int(is_known.sum()))
        order = np.argsort(key_id)
        self._known = Links(key_id[order], parent_id[order], index[order])
        return Links(key_id, parent_id, index)


def id_of(key: PageKey | None) -> int:
    """What stands for a page in `Links`; 0 for none."""
    return 0 if key is None else int.from_bytes(key[:8], "big")


def _find(sorted_ids: UInt64Array, wanted: UInt64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Where each of `wanted` is in `sorted_ids`, and whether it is there at all."""
    at = np.searchsorted(sorted_ids, wanted).astype(np.int64)
    is_there = np.zeros(len(wanted), np.bool_)
    inside = at < len(sorted_ids)
    is_there[inside] = sorted_ids[at[inside]] == wanted[inside]
    return at, is_there


def parent_rows(links: Links) -> Int64Array:
    """int64[pages]: the row of the page before each, -1 where that one is not stored."""
    order = np.argsort(links.key_id)
    at, is_there = _find(links.key_id[order], links.parent_id)
    rows = np.full(len(links.key_id), -1, np.int64)
    rows[is_there] = order[at[is_there]]
    # A damaged link must not make a circle: the page before has the number before.
    rows[(rows >= 0) & (links.index[rows] + 1 != links.index)] = -1
    return rows


def last_use(index: Int64Array, parents: Int64Array, used_ns: Int64Array) -> Int64Array:
    """int64[pages]: when each page, or any stored page that follows it, was last used. `index` and `parents` as in
    `Links` and from `parent_rows`.
    """
    last_ns = used_ns.copy()
    rows = np.flatnonzero(parents >= 0)
    rows = rows[np.argsort(-index[rows], kind="stable")]
    for level in np.split(rows, np.flatnonzero(np.diff(index[rows])) + 1):  # the deepest first
        np.maximum.at(last_ns, parents[level], last_ns[level])
    return last_ns


def is_cut_off(index: Int64Array, parents: Int64Array) -> npt.NDArray[np.bool_]:
    """bool[pages]: whether a page before it is missing, so that no reader gets as far as that."""
    is_cut = (index > 0) & (parents < 0)
    rows = np.flatnonzero(parents >= 0)
    rows = rows[np.argsort(index[rows], kind="stable")]
    for level in np.split(rows, np.flatnonzero(np.diff(index[rows])) + 1):  # the first pages first
        is_cut[level] |= is_cut[parents[level]]
    return is_cut


def removal_order(
    index: Int64Array,
    parents: Int64Array,
    last_ns: Int64Array,
    *,
    unused_since_ns: int,
    now_ns: int,
) -> Int64Array:
    """Rows in the order in which they may go: those last used before `unused_since_ns`, then those that are cut off,
    then the others; in each group those unused for longest first, and of equal ones the deepest.
    """
    is_settled = last_ns < now_ns - int(SETTLED_AFTER_S * 1e9)
    is_useless = is_cut_off(index, parents) & is_settled
    group = np.where(last_ns < unused_since_ns, 0, np.where(is_useless, 1, 2))
    return np.lexsort((-index, last_ns, group)).astype(np.int64)
