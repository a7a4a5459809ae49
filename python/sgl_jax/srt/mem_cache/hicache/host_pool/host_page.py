"""One page in host memory, and the memory of those that nobody refers to any more.

Memory that was used once is worth keeping: writing 4 MB into fresh memory takes three times as long as writing them
into memory that has its page frames already. Where programs can write host memory (see `page_programs.HostDevice`),
a pool keeps the arrays of pages that it gave up, and the next pages are written into them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import jax

HostArraysOfPage = tuple[jax.Array, ...]
"""Per buffer group and local shard one array uint8/16/32[num_buffers, *row_shape]."""


class SparePages:
    """Arrays of dead pages, at most `limit` of them. Any thread: every step is a single operation of a deque."""

    def __init__(self) -> None:
        self._spares: deque[HostArraysOfPage] = deque()
        self._limit = 0

    def __len__(self) -> int:
        return len(self._spares)

    def limit(self, num_pages: int) -> None:
        """Keep at most that many from now on; what is more is let go."""
        self._limit = num_pages
        while len(self._spares) > num_pages:
            self.take(1)

    def offer(self, arrays: HostArraysOfPage) -> None:
        """Keep the arrays of a page that nobody refers to, if there is room."""
        if len(self._spares) < self._limit:
            self._spares.append(arrays)

    def take(self, num_pages: int) -> list[HostArraysOfPage]:
        """Up to that many, to be written over."""
        taken: list[HostArraysOfPage] = []
        try:
            for _ in range(num_pages):
                taken.append(self._spares.pop())
        except IndexError:  # no more, or another thread was faster
            pass
        return taken


class HostPage:
    """The arrays of one page: they are never written while this object lives.

    Whoever needs the bytes keeps the page, not its arrays. (A numpy view of an array is safe on its own: JAX does not
    write into memory that numpy refers to.)
    """

    __slots__ = ("_heir", "arrays", "writable")

    def __init__(self, arrays: HostArraysOfPage, writable: bool = False) -> None:
        """`writable`: a program can write into these arrays once the page is dead."""
        self.arrays = arrays
        self.writable = writable
        self._heir: SparePages | None = None

    def bequeath(self, heir: SparePages) -> None:
        """Say who gets the arrays when nobody refers to the page any more. Only for pages that are complete."""
        if self.writable:
            self._heir = heir

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __del__(self) -> None:
        if self._heir is not None:
            self._heir.offer(self.arrays)
