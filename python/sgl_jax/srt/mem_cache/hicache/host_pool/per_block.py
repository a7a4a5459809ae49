"""Scheme A: one reference per page. Freeing drops the reference; the memory is kept for the next page or given back."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvariantError
from ..types import PageLayout
from .base import HostArrays, HostKVPool
from .host_page import HostPage
from .page_table import PageIds


class PerBlockHostPool(HostKVPool):
    """Keeps the arrays that a transfer produced, as they are: no copy on put, get or read.

    Host memory grows with use, up to `capacity_bytes`. A page handed out stays alive for as long as anybody refers to
    it, whatever happens to its slot. Where programs write host memory, the arrays of pages that died are kept to be
    written again: never more than there are FREE pages, so that both together stay within the capacity.
    """

    def __init__(self, num_pages: int, layout: PageLayout, arrays: HostArrays) -> None:
        super().__init__(num_pages, layout, arrays)
        self._slots: list[HostPage | None] = [None] * num_pages

    @property
    def host_bytes(self) -> int:
        """Bytes of the pages referred to now and of those kept for the next; O(num_pages)."""
        num_held = self._filled.count(True) + len(self._arrays.spares)
        return num_held * self._layout.page_bytes

    def clear(self) -> None:
        """As in the base; all memory is given back."""
        super().clear()
        self._arrays.spares.limit(0)

    def check_invariants(self) -> None:
        """As in the base; a slot refers to a page exactly if the page has bytes."""
        super().check_invariants()
        held = bytearray(slot is not None for slot in self._slots)
        if held != self._filled:
            raise InvariantError(
                f"P4: {held.count(True)} slots refer to a page, {self._filled.count(True)} have bytes"
            )

    def _store(self, ids: PageIds, pages: Sequence[HostPage]) -> None:
        for slot, page in zip(ids, pages, strict=True):
            page.bequeath(self._arrays.spares)
            self._slots[slot] = page
        # A page that brought memory of its own, from storage, takes the place of a spare one.
        self._arrays.spares.limit(self._table.num_free)

    def _fetch(self, ids: PageIds) -> list[HostPage]:
        pages = []
        for slot in ids:
            page = self._slots[slot]
            if page is None:
                raise InvariantError(f"P4: host page {slot} is READY but has no bytes")
            pages.append(page)
        return pages

    def _drop(self, ids: Sequence[int]) -> None:
        self._arrays.spares.limit(self._table.num_free)
        for slot in ids:
            self._slots[slot] = None
