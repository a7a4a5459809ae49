"""Pages arrive bit by bit, in place, from where they were when the call was made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from page_fakes import Rig, make_rig, random_bits

from sgl_jax.srt.mem_cache.hicache.chunks import bucket_sizes, max_chunk_pages
from sgl_jax.srt.mem_cache.hicache.chunks import split_into_chunks as split
from sgl_jax.srt.mem_cache.hicache.host_memory import host_memory_kind
from sgl_jax.srt.mem_cache.hicache.host_pool.host_page import HostPage
from sgl_jax.srt.mem_cache.hicache.storage.page_buffers import PageBuffers

DTYPES = [
    np.float32,
    ml_dtypes.bfloat16,
    np.float16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.int8,
]
MHA_ROW = (4, 3, 2, 8)  # page_size, heads * 2 // packing, packing, head_dim
MLA_ROW = (4, 1, 24)
MakeRig = Callable[..., Rig]


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def make(request: pytest.FixtureRequest) -> MakeRig:
    """Rigs as they are on CPU, and rigs that copy between device and host as on other platforms."""
    return partial(make_rig, staged=request.param)


def move(rig: Rig, sources: npt.ArrayLike, targets: npt.ArrayLike, dp_rank: int = 0) -> None:
    """Backup and load: rows `sources` to rows `targets` by way of host memory."""
    pages = rig.transfer.to_host(rig.transfer.gather(np.asarray(sources, np.int32), dp_rank))
    staged = rig.transfer.to_device(pages, dp_rank)
    rig.transfer.scatter(staged, np.asarray(targets), dp_rank)


def expect(rig: Rig, sources: npt.ArrayLike, targets: npt.ArrayLike, dp_rank: int = 0) -> None:
    """The buffers hold what they held at first, with `sources` copied to `targets`; sentinel rows do not count."""
    rows = rig.buffers.rows_per_rank
    compared = np.arange(rig.buffers.dp_size * rows)
    compared = compared[compared % rows != 0]
    for number, (before, after) in enumerate(zip(rig.contents, rig.now(), strict=True)):
        wanted = before.copy()
        base = dp_rank * rows
        wanted[base + np.asarray(targets, np.int32)] = before[base + np.asarray(sources, np.int32)]
        np.testing.assert_array_equal(after[compared], wanted[compared], f"buffer {number}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("row", [MHA_ROW, MLA_ROW], ids=["mha", "mla"])
def test_round_trip_is_bit_exact(
    make: MakeRig, rng: np.random.Generator, dtype: npt.DTypeLike, row: tuple[int, ...]
) -> None:
    rig = make(rng, 12, [(row, dtype)] * 3)
    sources, targets = [1, 5, 3], [11, 2, 7]
    move(rig, sources, targets)
    expect(rig, sources, targets)


@pytest.mark.parametrize("num_pages", [0, 1, 3, 7, 65])
def test_any_number_of_pages(make: MakeRig, rng: np.random.Generator, num_pages: int) -> None:
    rig = make(rng, 150, [((2, 3), np.float32)])
    assert rig.transfer.chunk_pages == 64
    rows = rng.permutation(np.arange(1, 150))[: 2 * num_pages].astype(np.int32)
    sources, targets = rows[:num_pages], rows[num_pages:]
    move(rig, sources, targets)
    expect(rig, sources, targets)


def test_buffers_of_several_shapes_and_dtypes(make: MakeRig, rng: np.random.Generator) -> None:
    rows = [
        (MHA_ROW, ml_dtypes.bfloat16),
        ((4,), np.float32),
        ((0,), np.float32),
        (MHA_ROW, ml_dtypes.bfloat16),
        ((), np.int32),
        ((2, 5), ml_dtypes.float8_e4m3fn),
    ]
    rig = make(rng, 9, rows)
    move(rig, [8, 1], [2, 4])
    expect(rig, [8, 1], [2, 4])


def test_bytes_are_the_rows_in_layout_order(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 6, [((4, 2), np.float32), ((3,), np.int8), ((4, 2), np.float32)])
    (page,) = rig.transfer.to_host(rig.transfer.gather(np.array([4])))
    arrays = rig.transfer.host_page_bytes(page)
    assert all(a.dtype == np.uint8 and a.ndim == 1 and a.flags.c_contiguous for a in arrays)
    by_name = {f"b{i}": rows[4] for i, rows in enumerate(rig.contents)}
    wanted = np.concatenate([by_name[buffer.name] for buffer in rig.layout.buffers])
    np.testing.assert_array_equal(np.concatenate(arrays), wanted)


def test_a_page_from_bytes_equals_the_page(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 6, [((4, 2), ml_dtypes.bfloat16), ((3,), np.int8)])
    pages = rig.transfer.to_host(rig.transfer.gather(np.array([4, 2])))
    blobs = [np.concatenate(rig.transfer.host_page_bytes(page)) for page in pages]
    again = [rig.transfer.host_page_from_bytes(blob) for blob in blobs]
    assert {array.sharding.memory_kind for page in again for array in page} == {"pinned_host"}
    rig.transfer.scatter(rig.transfer.to_device(again), np.array([1, 5]))
    expect(rig, [4, 2], [1, 5])


def test_scatter_donates_the_buffers_and_puts_the_new_ones_back(
    make: MakeRig, rng: np.random.Generator
) -> None:
    rig = make(rng, 64, [((64, 64), np.float32), ((64, 64), ml_dtypes.bfloat16)])
    old = list(rig.holder)
    addresses = [array.unsafe_buffer_pointer() for array in old]
    move(rig, [1], [2])
    assert all(array.is_deleted() for array in old)
    assert [array.unsafe_buffer_pointer() for array in rig.holder] == addresses
    move(rig, [3, 4, 5], [6, 7, 8])
    assert [array.unsafe_buffer_pointer() for array in rig.holder] == addresses


def test_pages_lie_in_pinned_host_memory_and_come_back_to_the_device(
    rng: np.random.Generator,
) -> None:
    rig = make_rig(rng, 6, [((4, 2), np.float32)], staged=True)
    device = jax.devices()[0]
    assert host_memory_kind(device) == "pinned_host"
    pages = rig.transfer.to_host(rig.transfer.gather(np.array([4, 2])))
    assert {array.sharding.memory_kind for page in pages for array in page} == {"pinned_host"}
    loaded = rig.transfer.to_device(pages).arrays
    assert {array.sharding.memory_kind for array in loaded} == {"device"}


def test_a_cpu_device_writes_host_pages_and_reads_them_where_they_are(
    rng: np.random.Generator,
) -> None:
    rig = make_rig(rng, 6, [((4, 2), np.float32)])
    pages = rig.transfer.to_host(rig.transfer.gather(np.array([4, 2])))
    assert {array.sharding.memory_kind for page in pages for array in page} == {"pinned_host"}
    loaded = rig.transfer.to_device(pages).arrays
    assert [id(array) for array in loaded] == [id(array) for page in pages for array in page]


def addresses_of(pages: Sequence[HostPage]) -> list[int]:
    return [array.unsafe_buffer_pointer() for page in pages for array in page]


def test_a_page_is_written_into_the_memory_of_a_dead_one(rng: np.random.Generator) -> None:
    rig = make_rig(rng, 9, [((64, 64), np.float32), ((64, 64), ml_dtypes.bfloat16)])
    spares = rig.transfer.host_memory().spares
    spares.limit(3)
    dead = rig.transfer.to_host(rig.transfer.gather(np.array([1, 2, 3])))
    for page in dead:
        page.bequeath(spares)
    before = addresses_of(dead)
    assert len(set(before)) == 6, "every array has memory of its own"
    del page
    dead.clear()
    assert len(spares) == 3
    fresh = rig.transfer.to_host(rig.transfer.gather(np.array([4, 5, 6, 7])))
    assert len(spares) == 0
    assert set(before) < set(addresses_of(fresh))
    assert len(set(addresses_of(fresh))) == 8
    rig.transfer.scatter(rig.transfer.to_device(fresh), np.array([1, 2, 3, 8]))
    expect(rig, [4, 5, 6, 7], [1, 2, 3, 8])


def test_memory_is_written_again_only_after_what_still_reads_it(rng: np.random.Generator) -> None:
    """Scenario: a load was dispatched, its pages die, and the next backup takes their memory at once."""
    rig = make_rig(rng, 5, [((256, 256), np.float32)] * 4)
    spares = rig.transfer.host_memory().spares
    spares.limit(2)
    sources, targets = np.array([1, 2]), np.array([3, 4])
    for _ in range(40):
        pages = rig.transfer.to_host(rig.transfer.gather(sources))
        for page in pages:
            page.bequeath(spares)
        staged = rig.transfer.to_device(pages)
        rig.transfer.scatter(staged, targets)
        del page, pages, staged
        assert len(spares) == 2
        sources, targets = targets, sources
        overwritten = rig.transfer.to_host(rig.transfer.gather(np.array([0, 0])))
        assert len(spares) == 0
        for page in overwritten:
            page.bequeath(spares)
        del page, overwritten
    expect(rig, [1, 2], [3, 4])


def test_memory_that_numpy_refers_to_is_left_alone(rng: np.random.Generator) -> None:
    """Scenario: storage still writes a page's bytes when the page dies and the next backup takes its memory."""
    rig = make_rig(rng, 4, [((64, 64), np.float32)])
    spares = rig.transfer.host_memory().spares
    spares.limit(1)
    pages = rig.transfer.to_host(rig.transfer.gather(np.array([1])))
    pages[0].bequeath(spares)
    (payload,) = rig.transfer.host_page_bytes(pages[0])
    pages.clear()
    assert len(spares) == 1
    (fresh,) = rig.transfer.to_host(rig.transfer.gather(np.array([2])))
    assert len(spares) == 0
    np.testing.assert_array_equal(payload, rig.contents[0][1])
    np.testing.assert_array_equal(rig.transfer.host_page_bytes(fresh)[0], rig.contents[0][2])


def test_memory_from_outside_is_not_kept(rng: np.random.Generator) -> None:
    rig = make_rig(rng, 4, [((4,), np.float32)])
    spares = rig.transfer.host_memory().spares
    spares.limit(1)
    page = rig.transfer.host_page_from_bytes(np.zeros(16, np.uint8))
    page.bequeath(spares)
    del page
    assert len(spares) == 0


def test_a_gathered_page_keeps_its_bytes_when_its_row_is_written_over(
    make: MakeRig,
    rng: np.random.Generator,
) -> None:
    """Scenario: device pages are freed right after the gather and refilled by the next step."""
    rig = make(rng, 8, [((16, 64), np.float32)] * 2)
    overwrite = jax.jit(lambda buffer: buffer.at[3].set(7.0), donate_argnums=0)
    staged = rig.transfer.gather(np.array([3]))
    rig.holder[:] = [overwrite(array) for array in rig.holder]
    pages = rig.transfer.to_host(staged)
    rig.transfer.scatter(rig.transfer.to_device(pages), np.array([3]))
    expect(rig, [3], [3])


def test_a_gather_sees_what_the_step_before_it_wrote(
    make: MakeRig, rng: np.random.Generator
) -> None:
    rig = make(rng, 8, [((16, 64), np.float32)])
    step = jax.jit(lambda buffer: buffer.at[3].set(7.0), donate_argnums=0)
    rig.holder[0] = step(rig.holder[0])
    (row,) = rig.transfer.read_rows(np.array([3]))
    np.testing.assert_array_equal(row.view(np.float32), np.full(16 * 64, 7.0, np.float32))


def test_a_dropped_host_page_still_arrives(make: MakeRig, rng: np.random.Generator) -> None:
    """Scenario: host pages are freed and their memory is refilled right after the load was dispatched."""
    rig = make(rng, 8, [((64, 64), np.float32)] * 2)
    pages = rig.transfer.to_host(rig.transfer.gather(np.array([1, 2])))
    staged = rig.transfer.to_device(pages)
    pages.clear()
    gc.collect()
    refill = rig.transfer.to_host(rig.transfer.gather(np.array([5, 6])))
    rig.transfer.scatter(staged, np.array([3, 4]))
    expect(rig, [1, 2], [3, 4])
    del refill


def test_indices_may_be_changed_after_the_call(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 8, [((64, 64), np.float32)] * 2)
    sources, targets = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    staged = rig.transfer.gather(sources)
    sources[:] = 7
    staged = rig.transfer.to_device(rig.transfer.to_host(staged))
    rig.transfer.scatter(staged, targets)
    targets[:] = 6
    expect(rig, [1, 2], [3, 4])


def test_bytes_handed_over_can_not_be_changed_and_views_are_copied(
    make: MakeRig,
    rng: np.random.Generator,
) -> None:
    rig = make(rng, 8, [((64, 64), np.float32)])
    size = rig.layout.page_bytes
    owned = np.arange(size).astype(np.uint8)
    rig.transfer.host_page_from_bytes(owned)
    with pytest.raises(ValueError, match="read-only"):
        owned[0] = 1
    for offset in range(64):  # one of them is aligned so that JAX would refer to it
        base = np.zeros(size + 64, np.uint8)
        page = rig.transfer.host_page_from_bytes(base[offset : offset + size])
        base[:] = 9
        assert all(not part.any() for part in rig.transfer.host_page_bytes(page))


def test_memory_of_a_page_is_not_used_again_before_its_load_has_run(
    make: MakeRig, rng: np.random.Generator
) -> None:
    """Scenario: a page read from a file goes to the device behind a long step, and leaves the host at once."""
    rig = make(rng, 8, [((64, 64), np.float32)])
    size = rig.layout.page_bytes
    buffers, addresses = PageBuffers(size), set()

    @partial(jax.jit, donate_argnums=0)
    def long_step(buffer: jax.Array) -> jax.Array:
        busy = jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), jnp.ones((128, 128)))
        return buffer + 0.0 * busy[0, 0]

    for turn in range(20):
        rig.holder[:] = [long_step(array) for array in rig.holder]
        data = buffers.take()
        addresses.add(data.ctypes.data)
        data[:] = np.frombuffer(np.full(size // 4, turn, np.float32).data, np.uint8)
        page = rig.transfer.host_page_from_bytes(data)
        rig.transfer.scatter(rig.transfer.to_device([page]), np.array([3]))
        del page, data
        buffers.take()[:] = 255
        row = np.asarray(rig.holder[0])[3]
        np.testing.assert_array_equal(row, np.full((64, 64), turn, np.float32))
    assert len(addresses) < 20, "memory is not used again"


def test_bytes_of_another_length_are_refused(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 8, [((4,), np.float32)])
    with pytest.raises(ValueError, match=r"a page is uint8\[16\]"):
        rig.transfer.host_page_from_bytes(np.zeros(15, np.uint8))
    with pytest.raises(ValueError, match=r"a page is uint8\[16\]"):
        rig.transfer.host_page_from_bytes(np.zeros(16, np.int8))  # type: ignore[arg-type]


def test_rows_outside_the_buffers_are_refused_and_nothing_changes(
    make: MakeRig,
    rng: np.random.Generator,
) -> None:
    rig = make(rng, 8, [((4,), np.float32)])
    staged = rig.transfer.gather(np.array([1, 2]))
    for rows in ([8], [-1], [[1]]):
        with pytest.raises(ValueError, match=r"within \[0, 8\)"):
            rig.transfer.gather(np.array(rows))
    with pytest.raises(ValueError, match=r"within \[0, 8\)"):
        rig.transfer.scatter(staged, np.array([3, 8]))
    with pytest.raises(ValueError, match="2 pages of rank 0 for 1 rows"):
        rig.transfer.scatter(staged, np.array([3]))
    with pytest.raises(ValueError, match="dp_rank 1 outside"):
        rig.transfer.gather(np.array([1]), dp_rank=1)
    expect(rig, [], [])


def test_a_poisoned_sentinel_touches_nothing_else(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 8, [((4,), np.float32)])
    rig.holder[0] = jax.jit(lambda b: b.at[0].set(np.nan), donate_argnums=0)(rig.holder[0])
    move(rig, [1, 2, 3], [4, 5, 6])
    expect(rig, [1, 2, 3], [4, 5, 6])


def test_precompile_leaves_the_pages_alone(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 8, [((4,), np.float32), ((3,), ml_dtypes.bfloat16)])
    rig.transfer.precompile(5)
    expect(rig, [], [])


def test_read_and_write_rows(make: MakeRig, rng: np.random.Generator) -> None:
    rig = make(rng, 8, [((4,), np.float32), ((3,), ml_dtypes.bfloat16)])
    dump = rig.transfer.read_rows(np.array([1, 6]))
    assert dump.shape == (2, rig.layout.page_bytes)
    rig.transfer.write_rows(np.array([3, 2]), dump)
    expect(rig, [1, 6], [3, 2])
    assert rig.transfer.read_rows(np.array([], np.int32)).shape == (0, rig.layout.page_bytes)


AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]


def grid(data: int, tensor: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(axis_type, axis_type))


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=lambda axis_type: axis_type.name)
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_round_trip_on_a_mesh(
    rng: np.random.Generator, data: int, tensor: int, axis_type: AxisType
) -> None:
    mesh = grid(data, tensor, axis_type)
    split_heads = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    latent = NamedSharding(mesh, PartitionSpec("data", None, None))
    rig = make_rig(
        rng,
        10 * data,
        [((4, 2, 8), ml_dtypes.bfloat16), ((4, 6), np.float32), ((4, 2, 8), ml_dtypes.bfloat16)],
        [split_heads, latent, split_heads],
        dp_size=data,
    )
    rank = data - 1
    before = list(rig.holder)
    move(rig, [1, 5, 3], [9, 2, 7], rank)
    expect(rig, [1, 5, 3], [9, 2, 7], rank)
    assert all(array.is_deleted() for array in before)
    assert [a.sharding for a in rig.holder] == [split_heads, latent, split_heads]


def test_a_page_of_one_rank_holds_that_rank_only(rng: np.random.Generator) -> None:
    mesh = grid(2, 2)
    rig = make_rig(
        rng,
        8,
        [((4, 2), np.float32)],
        NamedSharding(mesh, PartitionSpec("data", None, "tensor")),
        2,
    )
    (page,) = rig.transfer.to_host(rig.transfer.gather(np.array([3]), 1))
    assert [array.shape for array in page] == [(1, 4, 1), (1, 4, 1)]
    assert [array.sharding.device_set for array in page] == [{d} for d in mesh.devices[1]]
    assert {array.sharding.memory_kind for array in page} == {"pinned_host"}
    row = rig.contents[0][4 + 3].view(np.float32).reshape(4, 2)
    held = [part.view(np.float32) for part in rig.transfer.host_page_bytes(page)]
    np.testing.assert_array_equal(held[0].view(np.uint32), row[:, 0].copy().view(np.uint32))
    np.testing.assert_array_equal(held[1].view(np.uint32), row[:, 1].copy().view(np.uint32))


def test_staged_pages_of_another_rank_are_refused(rng: np.random.Generator) -> None:
    place = NamedSharding(grid(2, 1), PartitionSpec("data"))
    rig = make_rig(rng, 8, [((4,), np.float32)], place, 2)
    staged = rig.transfer.gather(np.array([3]), 1)
    with pytest.raises(ValueError, match="1 pages of rank 1 for 1 rows of 0"):
        rig.transfer.scatter(staged, np.array([2]), 0)


@pytest.mark.parametrize("largest", [1, 2, 8, 64])
def test_splits_cover_everything_once_in_known_sizes(largest: int) -> None:
    for num_pages in range(3 * largest + 2):
        runs = split(num_pages, largest)
        covered = [i for run in runs for i in range(run.start, run.stop)]
        assert covered == list(range(num_pages))
        assert {run.stop - run.start for run in runs} <= set(bucket_sizes(largest))


def test_chunks_are_bounded_by_bytes_by_program_size_and_by_the_pool() -> None:
    assert max_chunk_pages(4 << 20, 16, 1000) == 8
    assert max_chunk_pages(64 << 10, 1, 1000) == 64
    assert max_chunk_pages(1 << 10, 30, 1000) == 4
    assert max_chunk_pages(1 << 30, 1, 1000) == 1
    assert max_chunk_pages(1, 10_000, 1000) == 1
    assert max_chunk_pages(1, 1, 17) == 16
    assert max_chunk_pages(1, 1, 2) == 2


def test_the_test_data_has_bits_that_arithmetic_would_change(rng: np.random.Generator) -> None:
    """Without signalling NaNs the exactness tests above would prove little."""
    words = random_bits(rng, (10_000,), ml_dtypes.bfloat16).view(np.uint16)
    signalling = ((words & 0x7F80) == 0x7F80) & ((words & 0x7F) != 0) & ((words & 0x40) == 0)
    assert signalling.any()
