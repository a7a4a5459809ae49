"""What DeviceBuffers derives from arrays, and which buffers it refuses."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from page_fakes import make_rig

from sgl_jax.srt.mem_cache.hicache.device_buffers import BufferRef, DeviceBuffers
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.transfer import PageTransfer
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind


def mesh(data: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"))


def buffers_of(*arrays: jax.Array, dp_size: int = 1) -> DeviceBuffers:
    holder = list(arrays)
    return DeviceBuffers([BufferRef(f"b{i}", holder, i) for i in range(len(holder))], dp_size)


def test_layout_groups_equal_rows_and_lists_empty_buffers_last(rng: np.random.Generator) -> None:
    rig = make_rig(
        rng,
        6,
        [((0,), np.int32), ((4, 2), np.float32), ((3,), ml_dtypes.bfloat16), ((4, 2), np.float32)],
    )
    rows = [(b.name, b.row_shape, b.dtype, b.row_bytes) for b in rig.layout.buffers]
    assert rows == [
        ("b1", (4, 2), "float32", 32),
        ("b3", (4, 2), "float32", 32),
        ("b2", (3,), "bfloat16", 6),
        ("b0", (0,), "int32", 0),
    ]
    assert rig.layout.page_bytes == 70
    assert (rig.layout.shard_index, rig.layout.shard_count) == (0, 1)


def test_tensor_shards_of_one_process_are_named_and_repeated_ones_count_once(
    rng: np.random.Generator,
) -> None:
    grid = mesh(2, 2)
    split = NamedSharding(grid, PartitionSpec("data", None, "tensor"))
    repeated = NamedSharding(grid, PartitionSpec("data"))
    rig = make_rig(
        rng, 8, [((4, 2), np.float32), ((4, 3), np.float32)], [split, repeated], dp_size=2
    )
    assert [(b.name, b.row_shape) for b in rig.layout.buffers] == [
        ("b0@0", (4, 1)),
        ("b0@1", (4, 1)),
        ("b1", (4, 3)),
    ]
    assert rig.buffers.rows_per_rank == 4
    assert rig.buffers.local_ranks == (0, 1)


def test_a_sharded_and_a_whole_page_have_different_layouts(rng: np.random.Generator) -> None:
    rows = [((4, 2), np.float32)]
    split = NamedSharding(mesh(1, 2), PartitionSpec("data", None, "tensor"))
    whole = make_rig(rng, 8, rows).layout.layout_id
    assert make_rig(rng, 8, rows, split).layout.layout_id != whole


def test_arrays_are_read_afresh(rng: np.random.Generator) -> None:
    rig = make_rig(rng, 4, [((2,), np.float32)])
    successor = jax.device_put(np.zeros((4, 2), np.float32), jax.devices()[0])
    rig.holder[0] = successor
    assert rig.buffers.arrays() == [successor]


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((5, 2), np.float32),
        np.zeros((4, 3), np.float32),
        np.zeros((4, 2), np.int32),
    ],
)
def test_rebind_refuses_another_shape_or_dtype_and_changes_nothing(
    rng: np.random.Generator, wrong: np.ndarray
) -> None:
    rig = make_rig(rng, 4, [((2,), np.float32), ((2,), np.float32)])
    before = list(rig.holder)
    fine = jax.device_put(np.zeros((4, 2), np.float32), jax.devices()[0])
    with pytest.raises(ValueError, match="buffer b1 is float32"):
        rig.buffers.rebind([fine, jax.device_put(wrong, jax.devices()[0])])
    assert rig.holder == before


def test_rebind_refuses_another_device_and_another_count(rng: np.random.Generator) -> None:
    rig = make_rig(rng, 4, [((2,), np.float32)])
    elsewhere = jax.device_put(np.zeros((4, 2), np.float32), jax.devices()[1])
    with pytest.raises(ValueError, match="buffer b0 is"):
        rig.buffers.rebind([elsewhere])
    with pytest.raises(ValueError, match="0 arrays for 1 buffers"):
        rig.buffers.rebind([])


def test_refused_buffers() -> None:
    device = jax.devices()[0]
    four = jax.device_put(np.zeros((4, 2), np.float32), device)
    with pytest.raises(HiCacheConfigError, match="at least one"):
        DeviceBuffers([])
    with pytest.raises(HiCacheConfigError, match="one number of pages"):
        buffers_of(four, jax.device_put(np.zeros((5, 2), np.float32), device))
    with pytest.raises(HiCacheConfigError, match="multiple of dp_size 3"):
        buffers_of(four, dp_size=3)
    with pytest.raises(HiCacheConfigError, match="bool"):
        buffers_of(jax.device_put(np.zeros((4, 2), bool), device))
    with pytest.raises(HiCacheConfigError, match="complex64"):
        buffers_of(jax.device_put(np.zeros((4, 2), np.complex64), device))
    with pytest.raises(HiCacheConfigError, match="different devices"):
        buffers_of(four, jax.device_put(np.zeros((4, 2), np.float32), jax.devices()[1]))


def test_a_page_axis_that_is_not_sharded_by_rank_is_refused() -> None:
    whole = NamedSharding(mesh(2, 2), PartitionSpec())
    array = jax.device_put(np.zeros((8, 2), np.float32), whole)
    with pytest.raises(HiCacheConfigError, match="8 pages on a device, but 4 per rank"):
        buffers_of(array, dp_size=2)


def test_a_foreign_layout_is_refused(rng: np.random.Generator) -> None:
    ours = make_rig(rng, 4, [((2,), np.float32)])
    other = make_rig(rng, 4, [((3,), np.float32)])
    with pytest.raises(HiCacheConfigError, match="not that of the buffers"):
        PageTransfer(ours.buffers, other.buffers.layout(ComponentKind.FULL, 4))


def test_a_single_device_sharding_needs_no_mesh(rng: np.random.Generator) -> None:
    place = SingleDeviceSharding(jax.devices()[2])
    rig = make_rig(rng, 4, [((2,), np.float32)], place)
    assert rig.buffers.mesh is None
    assert rig.transfer.host_memory().shardings[0].device_set == {jax.devices()[2]}
