"""Arrays in host memory: which memory kind they have, their bytes, and slabs of them.

Pages are made of words (see `BufferGroup.word`), so that nothing on the way computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .chunks import split_into_chunks
from .device_buffers import BufferGroup, DeviceBuffers
from .errors import HiCacheError
from .host_pool.base import ByteArray, Slab
from .host_pool.host_page import HostArraysOfPage, HostPage, SparePages
from .host_pool.page_table import HostPages

_PINNED = "pinned_host"


def host_memory_kind(device: jax.Device) -> str:
    """`pinned_host` where the device lists it, otherwise its first memory that is the host's, or its own default."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _PINNED in kinds:
        return _PINNED
    return next((kind for kind in kinds if "host" in kind), str(device.default_memory().kind))


class HostMemory:
    """The `HostArrays` of the host pools: pages of one set of buffers, for the devices of one data-parallel rank.

    `parts` are the arrays of a page in order: one (group, device) for each group and each local shard of the rank. Any
    thread, except that a slab has one user at a time.
    """

    def __init__(self, buffers: DeviceBuffers, dp_rank: int, chunk_pages: int) -> None:
        self.parts: tuple[tuple[BufferGroup, jax.Device], ...] = tuple(
            (group, shard.devices[0])
            for group in buffers.groups
            for shard in group.local_shards[dp_rank]
        )
        self.shardings = [
            SingleDeviceSharding(device, memory_kind=host_memory_kind(device))
            for _, device in self.parts
        ]
        self.page_bytes = sum(group.stack_bytes for group, _ in self.parts)
        self.spares = SparePages()
        self._chunk_pages = chunk_pages
        self._write_rows = [
            jax.jit(_write_rows, donate_argnums=(0,), out_shardings=sharding)
            for sharding in self.shardings
        ]
        self._read_rows = [jax.jit(_read_rows, out_shardings=s) for s in self.shardings]

    def place(self, arrays: Sequence[jax.Array], num_pages: int) -> list[HostPage]:
        """Start the copy of `num_pages` pages, page by page in the order of `parts`, to host memory in one call."""
        placed = jax.device_put(list(arrays), self.shardings * num_pages)
        self._check_kind(placed)
        width = len(self.parts)
        return [HostPage(tuple(placed[i * width : (i + 1) * width])) for i in range(num_pages)]

    def blank_pages(self, num_pages: int) -> list[HostArraysOfPage]:
        """Arrays in host memory to write pages into, spare ones first; their content is undefined. One device only."""
        blank = self.spares.take(num_pages)
        for run in split_into_chunks(num_pages - len(blank), self._chunk_pages):
            blank += self._new_pages(run.stop - run.start)
        return blank

    def host_page_bytes(self, page: HostPage) -> list[ByteArray]:
        """The bytes of a page as C-contiguous uint8 arrays in layout order; waits until the page is complete."""
        return [_as_bytes(np.asarray(array)) for array in page]

    def host_page_from_bytes(self, data: ByteArray) -> HostPage:
        """A page in host memory from uint8[page_bytes].

        JAX may keep referring to `data` instead of copying it, so it is taken over and made read-only; a view of
        another array is copied. ValueError if the length is not that of a page.
        """
        if data.dtype != np.uint8 or data.shape != (self.page_bytes,):
            raise ValueError(
                f"a page is uint8[{self.page_bytes}], got {data.dtype}{list(data.shape)}"
            )
        is_view = isinstance(data.base, np.ndarray) or not data.flags.c_contiguous
        owned = data.copy() if is_view else data
        owned.flags.writeable = False
        pieces, start = [], 0
        for group, _ in self.parts:
            piece = owned[start : start + group.stack_bytes]
            pieces.append(piece.view(group.word).reshape(group.stack_shape))
            start += group.stack_bytes
        placed = jax.device_put(pieces, self.shardings)
        self._check_kind(placed)
        return HostPage(tuple(placed))

    def new_slab(self, num_pages: int) -> Slab:
        """Zeroed arrays word[num_pages, *stack_shape] in host memory, one for each part."""
        slab = []
        for (group, _), sharding in zip(self.parts, self.shardings, strict=True):
            shape, word = (num_pages, *group.stack_shape), group.word
            zeros = jax.jit(partial(_zeros, shape, word, sharding), out_shardings=sharding)
            slab.append(zeros())
        self._check_kind(slab)
        return tuple(slab)

    def write_slab(self, slab: Slab, host_pages: HostPages, pages: Sequence[HostPage]) -> Slab:
        """Write pages into rows; `slab` is donated and must not be used again."""
        parts = list(slab)
        for run in split_into_chunks(len(pages), self._chunk_pages):
            for part, sharding in enumerate(self.shardings):
                rows = jax.device_put(host_pages[run].copy(), sharding)
                arrays = tuple(page.arrays[part] for page in pages[run])
                parts[part] = self._write_rows[part](parts[part], rows, arrays)
        return tuple(parts)

    def read_slab(self, slab: Slab, host_pages: HostPages) -> list[HostPage]:
        """Copies of rows, which stay valid whatever is written to the slab afterwards."""
        pages: list[HostPage] = []
        for run in split_into_chunks(len(host_pages), self._chunk_pages):
            columns = [
                read(array, jax.device_put(host_pages[run].copy(), sharding))
                for read, array, sharding in zip(self._read_rows, slab, self.shardings, strict=True)
            ]
            pages.extend(HostPage(arrays) for arrays in zip(*columns, strict=True))
        return pages

    @cached_property
    def _new_pages(self) -> Callable[[int], tuple[HostArraysOfPage, ...]]:
        shapes = [(group.stack_shape, group.word) for group, _ in self.parts]

        def zeros(num_pages: int) -> tuple[HostArraysOfPage, ...]:
            return tuple(
                tuple(jnp.zeros(shape, word) for shape, word in shapes) for _ in range(num_pages)
            )

        return jax.jit(zeros, static_argnums=0, out_shardings=self.shardings[0])

    def _check_kind(self, arrays: Sequence[jax.Array]) -> None:
        """A copy that silently stayed on the device would make the host tier eat device memory."""
        wanted = {sharding.memory_kind for sharding in self.shardings}
        found = {array.sharding.memory_kind for array in arrays}
        if not found <= wanted:
            raise HiCacheError(f"asked for memory kind {sorted(map(str, wanted))}, got {found}")


def _as_bytes(array: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]) -> ByteArray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _zeros(
    shape: tuple[int, ...], word: np.dtype[np.unsignedinteger], sharding: SingleDeviceSharding
) -> jax.Array:
    """Made in host memory: a slab is usually larger than what the device has free."""
    zeros: jax.Array = jax.device_put(jnp.zeros(shape, word), sharding)
    return zeros


def _write_rows(slab: jax.Array, rows: jax.Array, pages: tuple[jax.Array, ...]) -> jax.Array:
    for i, page in enumerate(pages):
        slab = jax.lax.dynamic_update_index_in_dim(slab, page, rows[i], 0)
    return slab


def _read_rows(slab: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(
        jax.lax.dynamic_index_in_dim(slab, rows[i], 0, keepdims=False) for i in range(rows.shape[0])
    )
