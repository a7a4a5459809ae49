"""The device buffers of one component: where the engine keeps them, and how a page is cut out of them.

The engine donates its buffers to every step and puts new arrays in their place, so nobody may hold one across a step.
A `BufferRef` therefore names a place (a list and an index), and is read afresh each time.

The leading axis of every buffer is the page axis. On a mesh it may be sharded over data-parallel ranks (`dp_size` equal
parts; rows are counted from 0 within each) and the other axes over tensor-parallel shards. A page of one rank is then
the rows of its shards, as far as this process holds them; a shard that several devices repeat counts once.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .errors import HiCacheConfigError
from .types import BufferLayout, ComponentKind, PageLayout

_WORD_OF_BYTES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}


@dataclass(frozen=True)
class BufferRef:
    """One device buffer by the place where the engine keeps it: `holder[index]` is its present array."""

    name: str
    holder: MutableSequence[jax.Array]
    index: int


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel part of a rank's rows, and the local devices that hold it (all the same content)."""

    ordinal: int
    devices: tuple[jax.Device, ...]


@dataclass(frozen=True)
class BufferGroup:
    """Buffers with rows of one shape, dtype and sharding, which travel stacked into one array per page and shard.

    `positions` point into `DeviceBuffers.arrays()`; `shape` is the whole shape of each buffer, `row_shape` what
    one shard holds of one row; `local_shards[r]`
    are the shards of rank r in this process. `word` is the unsigned type as wide as `dtype`: rows travel as words,
    because moving floats may rewrite NaNs and is slow for 8 and 16 bits.
    """

    positions: tuple[int, ...]
    shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding
    num_shards: int
    local_shards: tuple[tuple[Shard, ...], ...]

    @property
    def word(self) -> np.dtype[Any]:
        """uint8, uint16 or uint32."""
        return _WORD_OF_BYTES[self.dtype.itemsize]

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Shape of one page's array of one shard: [num_buffers, *row_shape]."""
        return (len(self.positions), *self.row_shape)

    @property
    def stack_bytes(self) -> int:
        """Bytes of one page's array of one shard."""
        return int(np.prod(self.stack_shape, dtype=np.int64)) * self.dtype.itemsize


class DeviceBuffers:
    """Every buffer that a page of one component owns a row of. Engine thread only.

    HiCacheConfigError at construction if the buffers differ in rows per rank or mesh, or hold what cannot be moved bit
    by bit as 8, 16 or 32-bit words.
    """

    def __init__(self, refs: Sequence[BufferRef], dp_size: int = 1) -> None:
        if not refs:
            raise HiCacheConfigError("a component needs at least one device buffer")
        self.refs = tuple(refs)
        self.dp_size = dp_size
        arrays = self.arrays()
        self._described = tuple((a.shape, a.dtype, a.sharding) for a in arrays)
        self.rows_per_rank = _rows_per_rank(self.refs, arrays, dp_size)
        self.mesh = _common_mesh(self.refs, arrays)
        self.groups = _group(self.refs, arrays, dp_size)
        if self.mesh is not None and len({spec_of(group)[0] for group in self.groups}) > 1:
            raise HiCacheConfigError("buffers shard their page axis over different mesh axes")

    def arrays(self) -> list[jax.Array]:
        """The present arrays, in the order of `refs`; not to be kept."""
        return [ref.holder[ref.index] for ref in self.refs]

    def rebind(self, new_arrays: Sequence[jax.Array]) -> None:
        """Put arrays of the same shapes, dtypes and shardings in the buffers' places; ValueError otherwise."""
        if len(new_arrays) != len(self.refs):
            raise ValueError(f"{len(new_arrays)} arrays for {len(self.refs)} buffers")
        for ref, array, (shape, dtype, sharding) in zip(
            self.refs, new_arrays, self._described, strict=True
        ):
            same_place = array.sharding.is_equivalent_to(sharding, len(shape))
            if array.shape != shape or array.dtype != dtype or not same_place:
                raise ValueError(
                    f"buffer {ref.name} is {dtype}{shape} on {sharding}, got "
                    f"{array.dtype}{array.shape} on {array.sharding}"
                )
        for ref, array in zip(self.refs, new_arrays, strict=True):
            ref.holder[ref.index] = array

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The data-parallel ranks of which this process holds at least one shard."""
        ranks = range(self.dp_size)
        return tuple(r for r in ranks if any(group.local_shards[r] for group in self.groups))

    def layout(self, kind: ComponentKind, page_size: int) -> PageLayout:
        """The bytes of one page in this process: group by group, in it shard by shard, in it buffer by buffer.

        Buffers without bytes are listed last, so that a page without them has another layout. With several shards in
        one process a buffer's name carries its shard (`k0@1`).
        """
        if not self.local_ranks:
            raise HiCacheConfigError("this process holds no shard of any data-parallel rank")
        rank = self.local_ranks[0]
        rows = [
            self._row(position, group, shard.ordinal)
            for group in self.groups
            for shard in group.local_shards[rank]
            for position in group.positions
        ]
        grouped = {position for group in self.groups for position in group.positions}
        rows += [
            BufferLayout(self.refs[p].name, tuple(shape[1:]), np.dtype(dtype).name, 0)
            for p, (shape, dtype, _) in enumerate(self._described)
            if p not in grouped
        ]
        index, count = self._process_share(rank)
        return PageLayout(kind, page_size, tuple(rows), index, count)

    def _row(self, position: int, group: BufferGroup, ordinal: int) -> BufferLayout:
        several = any(len(shards) > 1 for shards in group.local_shards)
        name = self.refs[position].name
        row_bytes = group.stack_bytes // len(group.positions)
        return BufferLayout(
            f"{name}@{ordinal}" if several else name, group.row_shape, group.dtype.name, row_bytes
        )

    def _process_share(self, rank: int) -> tuple[int, int]:
        """Which part of a page this process holds, as index and count of equal parts."""
        widest = max(self.groups, key=lambda group: group.num_shards, default=None)
        if widest is None or not widest.local_shards[rank]:
            return 0, 1
        ordinals = [shard.ordinal for shard in widest.local_shards[rank]]
        first, held = ordinals[0], len(ordinals)
        if ordinals != list(range(first, first + held)) or first % held:
            raise HiCacheConfigError(f"this process holds scattered tensor shards {ordinals}")
        return first // held, widest.num_shards // held


def spec_of(group: BufferGroup) -> PartitionSpec:
    """The partition of a group's buffers, one entry for each axis."""
    if not isinstance(group.sharding, NamedSharding):
        raise TypeError(f"{group.sharding} has no partition")
    spec = tuple(group.sharding.spec)
    missing = 1 + len(group.row_shape) - len(spec)
    return PartitionSpec(*spec, *([None] * missing))  # type: ignore[no-untyped-call]


def _rows_per_rank(refs: Sequence[BufferRef], arrays: Sequence[jax.Array], dp_size: int) -> int:
    rows = {
        ref.name: array.shape[0] if array.ndim else 0
        for ref, array in zip(refs, arrays, strict=True)
    }
    total = next(iter(rows.values()))
    if set(rows.values()) != {total} or total == 0 or total % dp_size:
        raise HiCacheConfigError(
            f"buffers need one number of pages, a positive multiple of dp_size {dp_size}; got {rows}"
        )
    return total // dp_size


def _common_mesh(refs: Sequence[BufferRef], arrays: Sequence[jax.Array]) -> Mesh | None:
    """The mesh of all buffers, or None if all lie on one device without one."""
    places: dict[Any, str] = {}
    for ref, array in zip(refs, arrays, strict=True):
        sharding = array.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            places[sharding.mesh] = ref.name
        elif isinstance(sharding, SingleDeviceSharding):
            places[next(iter(sharding.device_set))] = ref.name
        else:
            raise HiCacheConfigError(
                f"buffer {ref.name} has a sharding of no known kind: {sharding}"
            )
    if len(places) > 1:
        raise HiCacheConfigError(f"buffers lie on different devices or meshes: {places}")
    place = next(iter(places))
    return place if isinstance(place, Mesh) else None


def _group(
    refs: Sequence[BufferRef], arrays: Sequence[jax.Array], dp_size: int
) -> tuple[BufferGroup, ...]:
    """Buffers of equal shape, dtype and sharding together, in order of first appearance; empty ones left out."""
    members: dict[Any, list[int]] = {}
    for position, (ref, array) in enumerate(zip(refs, arrays, strict=True)):
        dtype = np.dtype(array.dtype)
        if dtype.itemsize not in _WORD_OF_BYTES or dtype == np.bool_ or "int4" in dtype.name:
            raise HiCacheConfigError(f"buffer {ref.name} holds {dtype.name}, which has no word")
        if array.size:
            members.setdefault((array.shape, dtype, array.sharding), []).append(position)
    groups = []
    for (shape, dtype, sharding), positions in members.items():
        shards = _shards_by_rank(refs[positions[0]].name, shape, sharding, dp_size)
        row_shape = tuple(sharding.shard_shape(shape)[1:])
        num_shards = max(len(of_rank) for of_rank in shards)
        here = jax.process_index()
        local = tuple(
            tuple(
                Shard(ordinal, devices)
                for ordinal, all_devices in enumerate(of_rank)
                if (devices := tuple(d for d in all_devices if d.process_index == here))
            )
            for of_rank in shards
        )
        groups.append(
            BufferGroup(tuple(positions), shape, row_shape, dtype, sharding, num_shards, local)
        )
    return tuple(groups)


def _shards_by_rank(
    name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding, dp_size: int
) -> list[list[list[jax.Device]]]:
    """For each rank the devices of each distinct shard, in the order of the shards' places in the row."""
    rows = shape[0] // dp_size
    found: list[dict[tuple[int, ...], list[jax.Device]]] = [{} for _ in range(dp_size)]
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [part.indices(size) for part, size in zip(index or (), shape, strict=True)]
        start, stop, _ = bounds[0]
        if stop - start != rows:
            raise HiCacheConfigError(
                f"buffer {name} has {stop - start} pages on a device, but {rows} per rank"
            )
        place = tuple(bound[0] for bound in bounds[1:])
        found[start // rows].setdefault(place, []).append(device)
    return [
        [sorted(devices, key=lambda device: device.id) for _, devices in sorted(of_rank.items())]
        for of_rank in found
    ]
