"""Scheme B: all host memory taken at start; pages are rows that are written in place."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..types import PageLayout
from .base import HostArrays, HostKVPool
from .host_page import HostPage
from .page_table import PageIds


class SlabHostPool(HostKVPool):
    """One slab per buffer group and shard, replaced by each write (the old one is donated, so it happens in place).

    The lock orders writers and readers: whoever reads has enqueued a copy of its rows before the slab is donated to the
    next write. What `get` and `read_bytes` hand out are such copies.
    """

    def __init__(self, num_pages: int, layout: PageLayout, arrays: HostArrays) -> None:
        super().__init__(num_pages, layout, arrays)
        self._slab_lock = threading.Lock()
        self._slab = arrays.new_slab(num_pages)

    @property
    def host_bytes(self) -> int:
        """Bytes of the slab: always all of them."""
        return self.capacity_bytes

    def _store(self, ids: PageIds, pages: Sequence[HostPage]) -> None:
        with self._slab_lock:
            self._slab = self._arrays.write_slab(self._slab, np.array(ids, np.int32), pages)

    def _fetch(self, ids: PageIds) -> list[HostPage]:
        with self._slab_lock:
            return self._arrays.read_slab(self._slab, np.array(ids, np.int32))

    def _drop(self, ids: Sequence[int]) -> None:
        del ids  # rows are simply written over by their next tenant
