"""The arithmetic of `size`: from what a model keeps to the pages of each level. Sizes of one server, all its devices
together; the host's share comes from the product's own `host_split`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_jax.srt.mem_cache.hicache.host_split import (
    Checkpoints,
    choose_interval,
    companion_pages,
    unit_bytes,
)
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.page_file import MAX_PAGE_BYTES, PageFileFormat
from sgl_jax.srt.mem_cache.hicache.types import BufferLayout, ComponentKind, PageLayout

from .errors import ToolError
from .kv_shape import HeadsKV, KVShape, LatentKV

LANES = 128
"""sgl-jax rounds the last axis of its buffers up to this."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Engine:
    """How an engine lays a model out: numbers per row rounded up to `lanes`, states in these dtypes."""

    lanes: int
    conv_bytes: int
    state_bytes: int = 4


ENGINES = {
    "sgl-jax": Engine(lanes=LANES, conv_bytes=2),
    "embedded": Engine(lanes=1, conv_bytes=4),
}


@dataclass(frozen=True)
class Demand:
    """What a person asks: memory in bytes for all devices together, the rest as the flags of the same names."""

    cache_bytes: int
    page_size: int
    kv_bytes: int
    num_devices: int
    ratio: float
    swa_ratio: float
    max_running: int
    kept_states: int
    interval: int | None


@dataclass(frozen=True)
class Level:
    """Pages (states) of each component, and the bytes of all."""

    pages: dict[ComponentKind, int]
    num_bytes: int
    tokens: int


@dataclass(frozen=True)
class Sizing:
    """The answer. `page_bytes`: of one page (state) of each component; `unit_bytes`: of one Full page with its share of
    windows and states, on the host; `file_bytes`: the same in files; `needed_states`: slots that requests need.
    """

    page_bytes: dict[ComponentKind, int]
    checkpoints: Checkpoints
    unit_bytes: int
    file_bytes: int
    device: Level
    host: Level
    request_states: int

    @property
    def host_bytes_per_token(self) -> float:
        """What a token takes in L2."""
        return self.unit_bytes / self.checkpoints.page_size

    @property
    def file_bytes_per_token(self) -> float:
        """What a token takes in L3."""
        return self.file_bytes / self.checkpoints.page_size


def size_levels(shape: KVShape, engine: Engine, demand: Demand) -> Sizing:
    """Sizes L1 into `demand.cache_bytes` and L2 at its ratio. Raises ToolError if not even one page fits."""
    layouts = _layouts(shape, engine, demand)
    page_bytes = {kind: layout.page_bytes for kind, layout in layouts.items()}
    window_pages = 0 if shape.window is None else -(-(shape.window - 1) // demand.page_size)
    interval = demand.interval or choose_interval(layouts, demand.page_size, window_pages)
    checkpoints = Checkpoints(demand.page_size, window_pages, interval)
    request_states = (
        0 if shape.state is None else demand.max_running * 3
    )  # running, and two tracked
    device = _device(page_bytes, demand, request_states)
    unit = unit_bytes(layouts, checkpoints)
    full_pages = math.floor(round(demand.ratio * max(device.num_bytes // unit, 1), 6))
    host_pages = companion_pages(layouts, checkpoints, full_pages)
    host = Level(
        host_pages,
        sum(host_pages[kind] * page_bytes[kind] for kind in host_pages),
        full_pages * demand.page_size,
    )
    return Sizing(
        page_bytes,
        checkpoints,
        unit,
        _file_bytes(page_bytes, checkpoints, demand.page_size),
        device,
        host,
        request_states,
    )


def _layouts(shape: KVShape, engine: Engine, demand: Demand) -> dict[ComponentKind, PageLayout]:
    def layout(kind: ComponentKind, num_bytes: int) -> PageLayout:
        return PageLayout(
            kind, demand.page_size, (BufferLayout("row", (num_bytes,), "uint8", num_bytes),)
        )

    token_bytes = 0 if shape.full is None else _token_bytes(shape.full, engine, demand)
    # A model without full attention keeps one byte a page for the names of its tokens.
    full_bytes = token_bytes * demand.page_size or 1
    layouts = {ComponentKind.FULL: layout(ComponentKind.FULL, full_bytes)}
    if shape.sliding is not None:
        sliding_bytes = _token_bytes(shape.sliding, engine, demand) * demand.page_size
        layouts[ComponentKind.SWA] = layout(ComponentKind.SWA, sliding_bytes)
    if shape.state is not None:
        one = (
            shape.state.state_values * engine.state_bytes
            + shape.state.conv_values * engine.conv_bytes
        )
        layouts[ComponentKind.RECURRENT] = layout(
            ComponentKind.RECURRENT, shape.state.num_layers * one
        )
    return layouts


def _token_bytes(kv: HeadsKV | LatentKV, engine: Engine, demand: Demand) -> int:
    """Bytes of one token over all layers of a kind and all devices."""
    if isinstance(kv, LatentKV):
        # Not divided between the devices of a tensor-parallel group: each keeps all of it.
        values = _up(kv.latent_dim, engine.lanes) + _up(kv.rope_dim, engine.lanes)
        return kv.num_layers * values * demand.kv_bytes * demand.num_devices
    heads = max(kv.num_kv_heads, demand.num_devices)  # too few heads are repeated
    return kv.num_layers * 2 * heads * _up(kv.head_dim, engine.lanes) * demand.kv_bytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _device(page_bytes: dict[ComponentKind, int], demand: Demand, request_states: int) -> Level:
    pages: dict[ComponentKind, int] = {}
    left = demand.cache_bytes
    if ComponentKind.RECURRENT in page_bytes:
        pages[ComponentKind.RECURRENT] = request_states + demand.kept_states
        left -= (pages[ComponentKind.RECURRENT] + 1) * page_bytes[ComponentKind.RECURRENT]
    swa_bytes = page_bytes.get(ComponentKind.SWA, 0)
    # One page more of each, for what padding writes.
    left -= page_bytes[ComponentKind.FULL] + swa_bytes
    full_pages = int(left // (page_bytes[ComponentKind.FULL] + demand.swa_ratio * swa_bytes))
    if full_pages < 1:
        raise ToolError(
            "not even one page fits: give more --hbm, or fewer --weights, --max-running or --max-recurrent-states"
        )
    pages[ComponentKind.FULL] = full_pages
    if swa_bytes:
        pages[ComponentKind.SWA] = int(full_pages * demand.swa_ratio)
    num_bytes = sum(count * page_bytes[kind] for kind, count in pages.items())
    return Level(pages, num_bytes, full_pages * demand.page_size)


def _file_bytes(
    page_bytes: dict[ComponentKind, int], checkpoints: Checkpoints, page_size: int
) -> int:
    """Bytes in files of one Full page with its share of windows and states, headers included."""
    share = {
        ComponentKind.FULL: 1.0,
        ComponentKind.SWA: checkpoints.window_share,
        ComponentKind.RECURRENT: checkpoints.states_per_page,
    }
    total = 0.0
    for kind, num_bytes in page_bytes.items():
        if num_bytes > MAX_PAGE_BYTES:
            raise ToolError(
                f"a page of {num_bytes} bytes fits into no file: use a smaller --page-size"
            )
        space = StorageNamespace("", "", page_size, "", "", num_bytes)
        total += share[kind] * PageFileFormat(space).file_bytes
    return math.ceil(total)
