"""Frees storage: chooses what goes (see `chains`) and removes it. One policy for the `gc` of the tools and for the
bound that a server keeps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .chains import LinkReader, last_use, parent_rows, removal_order
from .inventory import (
    Int64Array,
    Inventory,
    OtherFile,
    Outcome,
    remove_other,
    remove_page,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemovalPlan:
    """What may go, in this order: files set aside (they serve nobody), then `rows` of the inventory.

    At least `must_bytes` of it have to go; what makes up `due_pages`, the leading rows, goes in any case.
    `parents`: int64[pages], the row of the page before each, or -1; `last_ns`: int64[pages], when each page or one
    behind it was last used.
    """

    found: Inventory
    set_aside: tuple[OtherFile, ...]
    rows: Int64Array
    parents: Int64Array
    last_ns: Int64Array
    due_pages: int
    must_bytes: int

    @property
    def pages_to_go(self) -> int:
        """How many leading rows go, if every removal works."""
        set_aside_bytes = sum(file.num_bytes for file in self.set_aside)
        missing, sizes = self.must_bytes - set_aside_bytes, self.found.num_bytes
        for count, row in enumerate(self.rows.tolist()):
            if count >= self.due_pages and missing <= 0:
                return count
            missing -= int(sizes[row])
        return len(self.rows)


@dataclass(frozen=True)
class Removal:
    """What was removed; `failed` could not be."""

    pages: int = 0
    other_files: int = 0
    num_bytes: int = 0
    failed: int = 0


def plan_removal(
    found: Inventory,
    reader: LinkReader,
    *,
    max_bytes: int | None = None,
    unused_since_ns: int | None = None,
    tick: Callable[[int], None] = lambda num_pages: None,
) -> RemovalPlan:
    """Plans until all is at most `max_bytes` and nothing is left that was last used before `unused_since_ns`.

    Reads the headers of pages that `reader` has not seen yet, unless nothing has to go.
    """
    held_bytes = found.page_bytes + found.quarantined_bytes
    must_bytes = 0 if max_bytes is None else max(held_bytes - max_bytes, 0)
    if not must_bytes and unused_since_ns is None:
        return RemovalPlan(found, (), _no_rows(), _no_rows(), _no_rows(), 0, 0)
    links = reader.read(found, tick)
    parents = parent_rows(links)
    last_ns = last_use(links.index, parents, found.used_ns)
    since_ns = 0 if unused_since_ns is None else unused_since_ns
    rows = removal_order(
        links.index, parents, last_ns, unused_since_ns=since_ns, now_ns=time.time_ns()
    )
    due_pages = int((last_ns < since_ns).sum())
    set_aside = tuple(file for file in found.quarantined if must_bytes or file.used_ns < since_ns)
    return RemovalPlan(found, set_aside, rows, parents, last_ns, due_pages, must_bytes)


def carry_out(plan: RemovalPlan, tick: Callable[[int], None] = lambda num_files: None) -> Removal:
    """Removes what the plan says. A page that cannot be removed, or that was used meanwhile, stays with all pages
    before it, and others go in their place.
    """
    pages = other_files = num_bytes = failed = 0
    for file in plan.set_aside:
        try:
            if remove_other(plan.found.root, file):
                other_files, num_bytes = other_files + 1, num_bytes + file.num_bytes
        except OSError as error:
            logger.debug("%s stays: %s", file.name, error)
            failed += 1
        tick(1)
    sizes, staying = plan.found.num_bytes, set[int]()
    for count, row in enumerate(plan.rows.tolist()):
        if count >= plan.due_pages and num_bytes >= plan.must_bytes:
            break
        tick(1)
        outcome = Outcome.USED if row in staying else _try_to_remove(plan.found, row)
        if outcome is Outcome.REMOVED:
            pages += 1
        if outcome in (Outcome.REMOVED, Outcome.GONE):
            num_bytes += int(sizes[row])
        else:
            staying.add(int(plan.parents[row]))
            failed += outcome is None
    return Removal(pages, other_files, num_bytes, failed)


def _try_to_remove(found: Inventory, row: int) -> Outcome | None:
    """None if the page cannot be removed."""
    try:
        return remove_page(found, row)
    except OSError as error:
        logger.debug("page %s stays: %s", found.key(row).hex(), error)
        return None


def _no_rows() -> Int64Array:
    return np.empty(0, np.int64)
