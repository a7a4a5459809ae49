"""The two device programs, gather and scatter, and how a page lies on the devices: on one, or over a mesh.

A program takes `rows` int32[n], the buffers group by group, and n pages; a page is one array ("stack") of words for
each group. `Placement` hides whether these are arrays of one device or global arrays of a mesh.

A CPU device's memory is the host's. There programs write host pages and read them (`HostDevice`), and nothing is copied
on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .device_buffers import BufferGroup, DeviceBuffers, spec_of
from .host_memory import host_memory_kind

Stacks = tuple[jax.Array, ...]
"""One page on the device: for each buffer group word[num_buffers, *row_shape] (on a mesh per shard and rank)."""

GroupedBuffers = tuple[tuple[jax.Array, ...], ...]
RowIndex = npt.NDArray[np.int32] | jax.Array
GatherProgram = Callable[[RowIndex, GroupedBuffers], tuple[Stacks, ...]]
ScatterProgram = Callable[[RowIndex, GroupedBuffers, tuple[Stacks, ...]], GroupedBuffers]
GatherIntoProgram = Callable[[RowIndex, GroupedBuffers, tuple[Stacks, ...]], tuple[Stacks, ...]]


class Placement(Protocol):
    """Programs, and the translation between stacks and the arrays of single devices that the host side deals in.

    "Pieces" of a page are those arrays, group by group and shard by shard, as in a `HostPage`.
    """

    def gather_program(self, num_pages: int) -> GatherProgram:
        """Compiled-on-demand copy of `num_pages` rows."""
        ...

    def scatter_program(self) -> ScatterProgram:
        """In-place writing of rows; the buffers are donated."""
        ...

    def index(self, rows: npt.NDArray[np.int32], dp_rank: int) -> RowIndex:
        """Rows of one rank as the programs take them."""
        ...

    def pieces(self, stacks: Stacks, dp_rank: int) -> list[jax.Array]:
        """One rank's local part of a page, one array for each part of a host page."""
        ...

    def targets(self, dp_rank: int) -> list[tuple[int, SingleDeviceSharding]]:
        """Where the parts of a host page go in a load: (part, destination), several if devices repeat a shard."""
        ...

    def stacks(self, loaded: Sequence[jax.Array], dp_rank: int) -> Stacks:
        """A page from the arrays that lie on `targets`."""
        ...


def create_placement(buffers: DeviceBuffers, staged: bool) -> Placement:
    """The placement that fits the buffers; `staged`: pages are copied between device and host everywhere."""
    if buffers.mesh is not None:
        return OnMesh(buffers, buffers.mesh)
    direct = not staged and buffers.groups and _all_cpu(buffers)
    return HostDevice(buffers) if direct else OneDevice(buffers)


class OneDevice:
    """Buffers on one device: stacks and pieces are the same arrays."""

    def __init__(self, buffers: DeviceBuffers) -> None:
        devices = [group.local_shards[0][0].devices[0] for group in buffers.groups]
        self._targets = [
            (part, SingleDeviceSharding(device)) for part, device in enumerate(devices)
        ]
        options = _options(buffers)
        self._gather = jax.jit(_gather_rows, compiler_options=options)
        self._scatter = jax.jit(_scatter_rows, donate_argnums=(1,), compiler_options=options)

    def gather_program(self, num_pages: int) -> GatherProgram:
        """One jit serves every size."""
        del num_pages
        return self._gather

    def scatter_program(self) -> ScatterProgram:
        """See `Placement`."""
        return self._scatter

    def index(self, rows: npt.NDArray[np.int32], dp_rank: int) -> RowIndex:
        """The rows themselves."""
        del dp_rank
        return rows

    def pieces(self, stacks: Stacks, dp_rank: int) -> list[jax.Array]:
        """The stacks themselves."""
        del dp_rank
        return list(stacks)

    def targets(self, dp_rank: int) -> list[tuple[int, SingleDeviceSharding]]:
        """Each part goes to the one device."""
        del dp_rank
        return self._targets

    def stacks(self, loaded: Sequence[jax.Array], dp_rank: int) -> Stacks:
        """The arrays themselves."""
        del dp_rank
        return tuple(loaded)


class HostDevice(OneDevice):
    """Buffers of one CPU device: programs write into arrays in host memory, and read them from there."""

    def __init__(self, buffers: DeviceBuffers) -> None:
        super().__init__(buffers)
        near = buffers.groups[0].sharding
        (device,) = near.device_set
        options = _options(buffers)
        self._gather_into = jax.jit(
            _gather_rows_into,
            donate_argnums=(2,),
            out_shardings=near.with_memory_kind(host_memory_kind(device)),
            compiler_options=options,
        )
        self._scatter = jax.jit(
            _scatter_host_rows, donate_argnums=(1,), out_shardings=near, compiler_options=options
        )

    def gather_into_program(self) -> GatherIntoProgram:
        """Copy of rows into the arrays of host pages, which are donated and come back with the same memory."""
        return self._gather_into


class OnMesh:
    """Buffers on a mesh: each shard runs the program on its own rows, and nothing crosses between devices.

    A stack is a global array [dp_size * num_buffers, *row] sharded like its buffers, with the ranks one after the other
    along the leading axis. Global arrays are put together from arrays of single devices, never by a `device_put` that
    other processes would have to take part in.
    """

    def __init__(self, buffers: DeviceBuffers, mesh: Mesh) -> None:
        self._groups = buffers.groups
        self._mesh = mesh
        self._dp_size = buffers.dp_size
        self._specs = tuple(spec_of(group) for group in buffers.groups)
        self._page_axis = self._specs[0][0] if self._specs else None
        self._rank_of = {
            device: rank
            for group in buffers.groups
            for rank, shards in enumerate(group.local_shards)
            for shard in shards
            for device in shard.devices
        }
        self._gathers: dict[int, GatherProgram] = {}
        self._options = _options(buffers)

    def gather_program(self, num_pages: int) -> GatherProgram:
        """One program for each size: the number of results is part of it."""
        if num_pages not in self._gathers:
            mapped = jax.shard_map(
                _gather_rows,
                mesh=self._mesh,
                in_specs=(_over(self._page_axis), self._specs),
                out_specs=(self._specs,) * num_pages,
                check_vma=False,
            )
            self._gathers[num_pages] = jax.jit(mapped, compiler_options=self._options)
        return self._gathers[num_pages]

    def scatter_program(self) -> ScatterProgram:
        """See `Placement`."""
        return self._scatter

    @cached_property
    def _scatter(self) -> ScatterProgram:
        def scatter(
            rows: jax.Array, buffers: GroupedBuffers, pages: tuple[Stacks, ...]
        ) -> GroupedBuffers:
            return jax.shard_map(
                _scatter_rows,
                mesh=self._mesh,
                in_specs=(_over(self._page_axis), self._specs, (self._specs,) * len(pages)),
                out_specs=self._specs,
                check_vma=False,
            )(rows, buffers, pages)

        # The very sharding objects of the buffers, or the engine's next step would compile again.
        out = tuple((group.sharding,) * len(group.positions) for group in self._groups)
        return jax.jit(
            scatter, donate_argnums=(1,), out_shardings=out, compiler_options=self._options
        )

    def index(self, rows: npt.NDArray[np.int32], dp_rank: int) -> RowIndex:
        """int32[dp_size * n] over the page axis; ranks that are not addressed get the sentinel row 0."""
        sharding = NamedSharding(self._mesh, _over(self._page_axis))
        sentinels = np.zeros(len(rows), np.int32)
        pieces = {
            device: rows if rank == dp_rank else sentinels for device, rank in self._rank_of.items()
        }
        placed = jax.device_put(
            list(pieces.values()), [SingleDeviceSharding(device) for device in pieces]
        )
        shape = (len(rows) * self._dp_size,)
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    def pieces(self, stacks: Stacks, dp_rank: int) -> list[jax.Array]:
        """The shards of one rank, from the first device of each."""
        pieces = []
        for group, stack in zip(self._groups, stacks, strict=True):
            by_device = {piece.device: piece.data for piece in stack.addressable_shards}
            pieces += [by_device[shard.devices[0]] for shard in group.local_shards[dp_rank]]
        return pieces

    def targets(self, dp_rank: int) -> list[tuple[int, SingleDeviceSharding]]:
        """Each part goes to every device that holds its shard."""
        shards = [shard for group in self._groups for shard in group.local_shards[dp_rank]]
        return [
            (part, SingleDeviceSharding(device))
            for part, shard in enumerate(shards)
            for device in shard.devices
        ]

    def stacks(self, loaded: Sequence[jax.Array], dp_rank: int) -> Stacks:
        """Global arrays from what lies on the rank's devices, and zeros for the sentinels of the other ranks."""
        remaining = iter(loaded)
        stacks = []
        for number, (group, spec) in enumerate(zip(self._groups, self._specs, strict=True)):
            own = [next(remaining) for s in group.local_shards[dp_rank] for _ in s.devices]
            others = [a for rank, a in self._fillers[number] if rank != dp_rank]
            shape = (self._dp_size * len(group.positions), *group.shape[1:])
            sharding = NamedSharding(self._mesh, spec)
            stacks.append(jax.make_array_from_single_device_arrays(shape, sharding, own + others))
        return tuple(stacks)

    @cached_property
    def _fillers(self) -> list[list[tuple[int, jax.Array]]]:
        """For each group zeros of one page on every local device, with the device's rank."""
        if self._dp_size == 1:
            return [[] for _ in self._groups]
        return [
            [
                (rank, jax.device_put(_zero_stack(group), SingleDeviceSharding(device)))
                for device, rank in self._rank_of.items()
            ]
            for group in self._groups
        ]


def _over(page_axis: Any) -> PartitionSpec:
    return PartitionSpec(page_axis)  # type: ignore[no-untyped-call]


def _zero_stack(group: BufferGroup) -> npt.NDArray[np.unsignedinteger]:
    zeros: npt.NDArray[np.unsignedinteger] = np.zeros(group.stack_shape, group.word)
    return zeros


def _gather_rows(rows: jax.Array, buffers: GroupedBuffers) -> tuple[Stacks, ...]:
    return tuple(
        tuple(jnp.stack([_row_words(buffer, rows[i]) for buffer in group]) for group in buffers)
        for i in range(rows.shape[0])
    )


def _gather_rows_into(
    rows: jax.Array, buffers: GroupedBuffers, pages: tuple[Stacks, ...]
) -> tuple[Stacks, ...]:
    """Written row by row into what is there: `jnp.stack` would take fresh memory for every row first.

    Host and device space are one memory here; changing the space copies nothing.
    """
    return tuple(
        tuple(_filled(stack, group, rows[i]) for group, stack in zip(buffers, stacks, strict=True))
        for i, stacks in enumerate(pages)
    )


def _filled(stack: jax.Array, group: tuple[jax.Array, ...], row: jax.Array) -> jax.Array:
    near = jax.device_put(stack, jax.memory.Space.Device)
    for position, buffer in enumerate(group):
        near = jax.lax.dynamic_update_index_in_dim(near, _row_words(buffer, row), position, 0)
    written: jax.Array = jax.device_put(near, jax.memory.Space.Host)
    return written


def _row_words(buffer: jax.Array, row: jax.Array) -> jax.Array:
    values = jax.lax.dynamic_index_in_dim(buffer, row, 0, keepdims=False)
    return jax.lax.bitcast_convert_type(values, _word_of(buffer))


def _scatter_rows(
    rows: jax.Array, buffers: GroupedBuffers, pages: tuple[Stacks, ...]
) -> GroupedBuffers:
    groups = [list(group) for group in buffers]
    for i, stacks in enumerate(pages):
        for group, stack in zip(groups, stacks, strict=True):
            for position, buffer in enumerate(group):
                values = jax.lax.bitcast_convert_type(stack[position], buffer.dtype)
                group[position] = jax.lax.dynamic_update_index_in_dim(buffer, values, rows[i], 0)
    return tuple(tuple(group) for group in groups)


def _scatter_host_rows(
    rows: jax.Array, buffers: GroupedBuffers, pages: tuple[Stacks, ...]
) -> GroupedBuffers:
    near = tuple(
        tuple(jax.device_put(stack, jax.memory.Space.Device) for stack in stacks)
        for stacks in pages
    )
    return _scatter_rows(rows, buffers, near)


def _word_of(buffer: jax.Array) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"uint{8 * buffer.dtype.itemsize}")


def _options(buffers: DeviceBuffers) -> dict[str, str] | None:
    """Compiler options: none, except that XLA must leave 8 and 16-bit floats alone on CPU.

    There it computes with such types in float32: to write one row it converts the whole buffer back and forth, which is
    slow (100 times and more) and turns signalling NaNs anywhere in the buffer into quiet ones. The programs
    only move rows, so the pass that inserts the conversions is not needed.
    """
    small_floats = {
        group.dtype.name.replace("bfloat16", "bf16").replace("float8_", "f8")
        for group in buffers.groups
        if group.dtype.name.startswith(("bfloat", "float8"))
    }
    if not small_floats or not _all_cpu(buffers):
        return None
    passes = ",".join(f"float-normalization-{name}" for name in sorted(small_floats))
    return {"xla_disable_hlo_passes": passes}


def _all_cpu(buffers: DeviceBuffers) -> bool:
    devices: set[Any] = {d for group in buffers.groups for d in group.sharding.device_set}
    return {device.platform for device in devices} == {"cpu"}
