"""Moving pages between device buffers and host memory.

With `device_buffers`, `page_programs` and `host_memory` this is the only place that knows of memory kinds, gather,
scatter and donation. The way of a page:

    buffers ──gather──▶ StagedPages ──to_host──▶ HostPage        backup
    buffers ◀─scatter── StagedPages ◀─to_device─ HostPage        load

On a CPU device staged pages are host pages already (see `page_programs.HostDevice`), and the middle step does nothing.

`gather` and `scatter` touch the engine's buffers: engine thread only, in the window that the engine leaves between two
steps. They only enqueue work, which the data orders after the last step and before the next one; what a gather produced
is a copy, so the rows may be freed and refilled at once. `to_host` and `to_device` touch only such copies and host
arrays, on any thread. Nothing here waits, except the diagnosis functions at the end.

Rows travel as unsigned words, all buffers of one group stacked into one array per page. A batch is cut into programs of
few sizes (`chunks`), so that nothing is padded and little is compiled.

On a mesh, the programs run on every shard at once, each on its own rows: nothing is gathered across devices. The ranks
that a call does not address read and write their row 0, the sentinel that the engine never reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from .chunks import bucket_sizes, max_chunk_pages, split_into_chunks
from .device_buffers import DeviceBuffers
from .errors import HiCacheConfigError
from .host_memory import HostMemory
from .host_pool.base import ByteArray
from .host_pool.host_page import HostPage
from .page_programs import GroupedBuffers, HostDevice, Stacks, create_placement
from .types import PageLayout

DeviceRows = npt.NDArray[np.int32]
"""Rows of the page axis, counted within one data-parallel rank: int32[num_pages]."""


@dataclass(frozen=True)
class StagedPages:
    """Copies of pages between buffers and host: `pages[i]` has one array for each buffer group.

    They are on the device, or, if `host_pages` names them, those host pages' own arrays.
    """

    dp_rank: int
    pages: tuple[Stacks, ...]
    host_pages: tuple[HostPage, ...] | None = None

    @property
    def arrays(self) -> list[jax.Array]:
        """Every array, to wait for."""
        return [array for page in self.pages for array in page]

    def __len__(self) -> int:
        return len(self.pages)


class PageTransfer:
    """Gather, scatter and the copies between device and host for one component's buffers.

    `layout` is checked against the buffers. `staged`: copy between device and host even on a CPU device, as everywhere
    else. See the module for threads.
    """

    def __init__(self, buffers: DeviceBuffers, layout: PageLayout, staged: bool = False) -> None:
        expected = buffers.layout(layout.component, layout.page_size)
        if layout != expected:
            raise HiCacheConfigError(
                f"layout {layout.layout_id} is not that of the buffers, {expected.layout_id}"
            )
        self.layout = layout
        self._buffers = buffers
        num_buffers = sum(len(group.positions) for group in buffers.groups)
        self.chunk_pages = max_chunk_pages(layout.page_bytes, num_buffers, buffers.rows_per_rank)
        self._hosts = [
            HostMemory(buffers, rank, self.chunk_pages) for rank in range(buffers.dp_size)
        ]
        self._placement = create_placement(buffers, staged)

    def host_memory(self, dp_rank: int = 0) -> HostMemory:
        """The host arrays of one rank, as the host pools need them."""
        return self._hosts[dp_rank]

    def gather(self, rows: DeviceRows, dp_rank: int = 0) -> StagedPages:
        """Enqueue a copy of rows; never waits. Engine thread only. ValueError on rows outside the rank."""
        rows = self._checked_rows(rows, dp_rank)
        buffers, placement = self._grouped_arrays(), self._placement
        runs = split_into_chunks(len(rows), self.chunk_pages)
        pages: list[Stacks] = []
        if not isinstance(placement, HostDevice):
            for run in runs:
                index = placement.index(rows[run], dp_rank)
                pages.extend(placement.gather_program(run.stop - run.start)(index, buffers))
            return StagedPages(dp_rank, tuple(pages))
        blank, program = (
            self._hosts[dp_rank].blank_pages(len(rows)),
            placement.gather_into_program(),
        )
        for run in runs:
            pages.extend(program(rows[run], buffers, tuple(blank[run])))
        host_pages = tuple([HostPage(arrays, writable=True) for arrays in pages])
        return StagedPages(dp_rank, tuple(pages), host_pages)

    def to_host(self, staged: StagedPages) -> list[HostPage]:
        """Start the copies to host memory; the arrays returned become ready by themselves. Any thread."""
        if staged.host_pages is not None:
            return list(staged.host_pages)
        if not staged.pages:
            return []
        pieces = [
            piece
            for stacks in staged.pages
            for piece in self._placement.pieces(stacks, staged.dp_rank)
        ]
        return self._hosts[staged.dp_rank].place(pieces, len(staged))

    def to_device(self, host_pages: Sequence[HostPage], dp_rank: int = 0) -> StagedPages:
        """Start the copies to the device. Any thread. The pages may be dropped as soon as this returns."""
        if isinstance(self._placement, HostDevice):
            return StagedPages(
                dp_rank, tuple(page.arrays for page in host_pages), tuple(host_pages)
            )
        if not host_pages:
            return StagedPages(dp_rank, ())
        targets = self._placement.targets(dp_rank)
        sources = [page.arrays[part] for page in host_pages for part, _ in targets]
        destinations = [sharding for _, sharding in targets] * len(host_pages)
        loaded = jax.device_put(sources, destinations)
        width = len(targets)
        pages = tuple(
            self._placement.stacks(loaded[i * width : (i + 1) * width], dp_rank)
            for i in range(len(host_pages))
        )
        return StagedPages(dp_rank, pages)

    def scatter(self, staged: StagedPages, rows: DeviceRows, dp_rank: int = 0) -> None:
        """Enqueue writing staged pages into rows, in place: the buffers are donated and put back. Engine thread only.

        ValueError (nothing changed) on rows outside the rank, a wrong number of rows or pages of another rank.
        """
        rows = self._checked_rows(rows, dp_rank)
        if len(rows) != len(staged) or staged.dp_rank != dp_rank:
            raise ValueError(
                f"{len(staged)} pages of rank {staged.dp_rank} for {len(rows)} rows of {dp_rank}"
            )
        program = self._placement.scatter_program()
        for run in split_into_chunks(len(rows), self.chunk_pages):
            index = self._placement.index(rows[run], dp_rank)
            # Every chunk is put back at once: if a later one raises, the engine still holds live buffers.
            self._put_back(program(index, self._grouped_arrays(), staged.pages[run]))

    def host_page_bytes(self, page: HostPage) -> list[ByteArray]:
        """The bytes of a page as C-contiguous uint8 arrays in layout order; waits until the page is complete."""
        return self._hosts[0].host_page_bytes(page)

    def host_page_from_bytes(self, data: ByteArray, dp_rank: int = 0) -> HostPage:
        """A page in host memory from uint8[page_bytes], which is taken over (see `HostMemory`)."""
        return self._hosts[dp_rank].host_page_from_bytes(data)

    def precompile(self, max_pages: int) -> None:
        """Compile what batches of up to `max_pages` pages need, on every local rank's row 0. At start only; waits."""
        sizes = [size for size in bucket_sizes(self.chunk_pages) if size <= max(max_pages, 1)]
        for dp_rank in self._buffers.local_ranks:
            for size in sizes:
                rows = np.zeros(size, np.int32)
                pages = self.to_host(self.gather(rows, dp_rank))
                self.scatter(self.to_device(pages, dp_rank), rows, dp_rank)
        jax.block_until_ready(self._buffers.arrays())  # type: ignore[no-untyped-call]

    def read_rows(self, rows: DeviceRows, dp_rank: int = 0) -> npt.NDArray[np.uint8]:
        """Diagnosis: rows as uint8[num_pages, page_bytes]; waits. Engine thread only."""
        pages = self.to_host(self.gather(rows, dp_rank))
        copies = [np.concatenate(self.host_page_bytes(page)) for page in pages]
        return np.stack(copies) if copies else np.empty((0, self.layout.page_bytes), np.uint8)

    def write_rows(self, rows: DeviceRows, data: npt.NDArray[np.uint8], dp_rank: int = 0) -> None:
        """Diagnosis: write uint8[num_pages, page_bytes] into rows; waits. Engine thread only."""
        pages = [self.host_page_from_bytes(page.copy(), dp_rank) for page in data]
        self.scatter(self.to_device(pages, dp_rank), rows, dp_rank)
        jax.block_until_ready(self._buffers.arrays())  # type: ignore[no-untyped-call]

    def _checked_rows(self, rows: DeviceRows, dp_rank: int) -> DeviceRows:
        """A private copy: JAX may go on referring to an index array after the call."""
        if not 0 <= dp_rank < self._buffers.dp_size:
            raise ValueError(f"dp_rank {dp_rank} outside [0, {self._buffers.dp_size})")
        checked = np.array(rows, dtype=np.int32, ndmin=1)
        limit = self._buffers.rows_per_rank
        # Seen as unsigned, a negative row is above every limit.
        if checked.ndim != 1 or np.count_nonzero(checked.view(np.uint32) >= limit):
            raise ValueError(f"rows {checked[:8].tolist()} are not a list within [0, {limit})")
        return checked

    def _grouped_arrays(self) -> GroupedBuffers:
        arrays = self._buffers.arrays()
        return tuple(
            tuple(arrays[position] for position in group.positions)
            for group in self._buffers.groups
        )

    def _put_back(self, grouped: GroupedBuffers) -> None:
        arrays = self._buffers.arrays()
        for group, new_arrays in zip(self._buffers.groups, grouped, strict=True):
            for position, array in zip(group.positions, new_arrays, strict=True):
                arrays[position] = array
        self._buffers.rebind(arrays)
