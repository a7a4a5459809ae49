"""Device buffers with random bits, and what is in them, for tests of transfers and host pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from sgl_jax.srt.mem_cache.hicache.device_buffers import BufferRef, DeviceBuffers
from sgl_jax.srt.mem_cache.hicache.transfer import PageTransfer
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, PageLayout

Bytes = npt.NDArray[np.uint8]
PAGE_SIZE = 4


def random_bits(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> np.ndarray:
    """Every bit random: NaNs, infinities and denormals included.

    Never 64-byte aligned: JAX would keep referring to aligned numpy memory, and not donate it.
    """
    kind = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * kind.itemsize
    raw = np.empty(num_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    raw[start : start + num_bytes] = rng.integers(0, 256, num_bytes, dtype=np.uint8)
    return raw[start : start + num_bytes].view(kind).reshape(shape)


def bits(array: jax.Array) -> Bytes:
    """uint8[rows, row_bytes] of a device buffer, copied, through no numpy view that would stop its donation."""
    host = jax.device_put(array, array.sharding.with_memory_kind("unpinned_host"))
    values = np.array(host)
    return values.reshape(values.shape[0], -1).view(np.uint8)


@dataclass
class Rig:
    """Buffers as an engine would keep them, and a transfer over them."""

    holder: list[jax.Array]
    buffers: DeviceBuffers
    layout: PageLayout
    transfer: PageTransfer
    contents: list[Bytes] = field(default_factory=list)

    def now(self) -> list[Bytes]:
        """What is in the buffers now."""
        return [bits(array) for array in self.holder]


def make_rig(
    rng: np.random.Generator,
    num_rows: int,
    rows: Sequence[tuple[tuple[int, ...], npt.DTypeLike]],
    shardings: Sharding | Sequence[Sharding] | None = None,
    dp_size: int = 1,
    staged: bool = False,
) -> Rig:
    """Buffers [num_rows, *row_shape] of random bits, one for each of `rows`; `staged` as in `PageTransfer`."""
    if shardings is None:
        shardings = SingleDeviceSharding(jax.devices()[0])
    each = [shardings] * len(rows) if isinstance(shardings, Sharding) else list(shardings)
    holder = [
        jax.device_put(random_bits(rng, (num_rows, *shape), dtype), place)
        for (shape, dtype), place in zip(rows, each, strict=True)
    ]
    refs = [BufferRef(f"b{i}", holder, i) for i in range(len(holder))]
    buffers = DeviceBuffers(refs, dp_size)
    layout = buffers.layout(ComponentKind.FULL, PAGE_SIZE)
    rig = Rig(holder, buffers, layout, PageTransfer(buffers, layout, staged))
    rig.contents = rig.now()
    return rig
