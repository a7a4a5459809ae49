"""Device pools of a hybrid model in small: as many pages and states as the model would have, a few words each.

They are divided, filled and read as an engine does; every word of a page or state is made from what it stands for, so
that a reused one can be told from any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.hicache.host_split import (
    Checkpoints,
    choose_interval,
    companion_pages,
    unit_bytes,
)
from sgl_jax.srt.mem_cache.hicache.types import BufferLayout, ComponentKind, PageLayout
from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator
from sgl_jax_hicache.engine.req_to_token_pool import HybridReqToTokenPool, ReqToTokenPool
from sgl_jax_hicache.engine.swa_allocator import SWATokenToKVPoolAllocator, TokenAllocator
from sgl_jax_hicache.engine.swa_bounds import SWABounds
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool

from .hybrid_models import WORD_BYTES, HybridModel, PageWords
from .replay_engine import ReplayError

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

CONV_WORDS = 8
"""Of a state's words, those in its convolution's buffer."""

TRACK_SLOTS = 1
"""States that a request takes besides its running one, without overlapping steps."""


@dataclass(frozen=True)
class DeviceSizes:
    """Pages of the full and the sliding pool, and states; 0 where the model has none. Sentinels are not counted."""

    full_pages: int
    sliding_pages: int
    states: int

    def num_bytes(self, words: PageWords) -> int:
        """What they take."""
        return WORD_BYTES * (
            self.full_pages * words.full
            + self.sliding_pages * words.sliding
            + self.states * words.state
        )


def layouts_of(model: HybridModel, page_size: int) -> dict[ComponentKind, PageLayout]:
    """The components' pages as the cache sees them."""
    words = model.words(page_size)
    buffers = {
        ComponentKind.FULL: _words_layout(words.full) if words.full else _NAME,
        ComponentKind.SWA: _words_layout(words.sliding),
        ComponentKind.RECURRENT: _words_layout(words.state),
    }
    return {
        kind: PageLayout(kind, page_size, (buffer,))
        for kind, buffer in buffers.items()
        if buffer.row_bytes
    }


def _words_layout(num_words: int) -> BufferLayout:
    return BufferLayout("words", (num_words,), "float32", num_words * WORD_BYTES)


_NAME = BufferLayout("names", (1,), "uint8", 1)
"""A Full page without layers, as the cache keeps it (see `pool_buffers`)."""


def window_pages(model: HybridModel, page_size: int) -> int:
    """Pages before a border that a reader needs of the sliding layers."""
    return 0 if model.window is None else -(-(model.window - 1) // page_size)


def chosen_interval(model: HybridModel, page_size: int) -> int:
    """The tokens between checkpoints that the cache chooses for the model."""
    return choose_interval(layouts_of(model, page_size), page_size, window_pages(model, page_size))


def tokens_in_same_bytes(model: HybridModel, page_size: int, interval: int) -> float:
    """Tokens that host memory keeps, with their windows and states, for one that it would keep if all layers were
    full."""
    points = Checkpoints(page_size, window_pages(model, page_size), interval)
    unit = unit_bytes(layouts_of(model, page_size), points)
    return WORD_BYTES * model.words(page_size).all_full / unit


def device_sizes(
    model: HybridModel, page_size: int, chunk_tokens: int, num_bytes: int
) -> DeviceSizes:
    """Divide device memory: what one request needs to run, and the rest in the proportions that host memory has with
    the interval that the cache chooses. Raises ReplayError if that is not even one page."""
    layouts, reach = layouts_of(model, page_size), window_pages(model, page_size)
    points = Checkpoints(page_size, reach, chosen_interval(model, page_size))
    sliding = states = 0
    # Where every Full page has its sliding one, the windows of a request are among them.
    if model.window is not None and points.window_share < 1:
        sliding = SWABounds(page_size, model.window, chunk_tokens).prefilling // page_size
    if model.recurrent_layers:
        states = 1 + TRACK_SLOTS
    running = DeviceSizes(0, sliding, states).num_bytes(model.words(page_size))
    units = (num_bytes - running) // unit_bytes(layouts, points)
    if units < 1:
        raise ReplayError(
            f"{num_bytes} bytes of device memory do not hold one page of {model.name}"
        )
    pages = companion_pages(layouts, points, units)
    return DeviceSizes(
        units,
        sliding + pages.get(ComponentKind.SWA, 0),
        states + pages.get(ComponentKind.RECURRENT, 0),
    )


class WordPool:
    """`kv_buffer`: one float32[pages + 1, words], of which row 0 is the sentinel; none if pages have no words."""

    def __init__(self, num_pages: int, page_size: int, num_words: int) -> None:
        self.page_size = page_size
        self.size = num_pages * page_size
        self.kv_buffer = [_zeros(num_pages + 1, num_words)] if num_words else []

    def write(self, pages: Int32Array, marks: FloatArray) -> None:
        """Fill pages with what their marks stand for, in place, as a forward step does."""
        self.kv_buffer[:] = [_fill(words, *_padded(pages, marks)) for words in self.kv_buffer]

    def holds(self, pages: Int32Array, marks: FloatArray) -> bool:
        """True if every word of these pages is the marks'."""
        return all(bool(_check(words, *_padded(pages, marks))) for words in self.kv_buffer)


class WordStates:
    """`recurrent_buffers` and `conv_buffers` of one layer each, [states + 1, words]; slot 0 is the dummy."""

    def __init__(self, num_states: int, num_words: int) -> None:
        self.recurrent_buffers = [_zeros(num_states + 1, num_words - CONV_WORDS)]
        self.conv_buffers = [[_zeros(num_states + 1, CONV_WORDS)]]

    def write(self, slot: int, mark: float) -> None:
        """Fill a slot with what `mark` stands for."""
        slots, marks = _padded(np.array([slot], np.int32), np.array([mark], np.float32))
        self.recurrent_buffers[0] = _fill(self.recurrent_buffers[0], slots, marks)
        self.conv_buffers[0][0] = _fill(self.conv_buffers[0][0], slots, -marks)

    def holds(self, slot: int, mark: float) -> bool:
        """True if every word of the slot is the mark's."""
        slots, marks = _padded(np.array([slot], np.int32), np.array([mark], np.float32))
        return bool(
            _check(self.recurrent_buffers[0], slots, marks)
            and _check(self.conv_buffers[0][0], slots, -marks)
        )


@dataclass(frozen=True)
class HybridPools:
    """A model's device memory, and who hands it out; `sliding` and `states` are None where the model has none."""

    full: WordPool
    sliding: WordPool | None
    states: WordStates | None
    allocator: TokenAllocator
    rows: ReqToTokenPool


def build_pools(
    model: HybridModel, sizes: DeviceSizes, page_size: int, longest_prompt: int
) -> HybridPools:
    """Everything zero-filled and free, for one request at a time of up to `longest_prompt` tokens."""
    words = model.words(page_size)
    full = WordPool(sizes.full_pages, page_size, words.full)
    sliding = states = None
    allocator: TokenAllocator = PagedTokenToKVPoolAllocator(full.size, page_size, full)
    if sizes.sliding_pages:
        num_pages = min(sizes.sliding_pages, sizes.full_pages)
        sliding = WordPool(num_pages, page_size, words.sliding)
        both = SWAKVPool(full, sliding)  # type: ignore[arg-type]
        allocator = SWATokenToKVPoolAllocator(full.size, sliding.size, page_size, both)
    if sizes.states:
        states = WordStates(sizes.states, words.state)
        return HybridPools(
            full,
            sliding,
            states,
            allocator,
            HybridReqToTokenPool(1, longest_prompt, sizes.states, TRACK_SLOTS),
        )
    return HybridPools(full, sliding, states, allocator, ReqToTokenPool(1, longest_prompt))


def _zeros(num_rows: int, num_words: int) -> jax.Array:
    return jnp.zeros((num_rows, num_words), jnp.float32, device=jax.devices()[0])


def _padded(rows: Int32Array, marks: FloatArray) -> tuple[Int32Array, FloatArray]:
    """Up to a power of two with the sentinel's row and mark 0, so that few programs are compiled."""
    length = 1 << max(math.ceil(math.log2(max(len(rows), 1))), 0)
    padded, values = np.zeros(length, np.int32), np.zeros(length, np.float32)
    padded[: len(rows)], values[: len(rows)] = rows, marks
    return padded, values


def _content(marks: jax.Array, num_words: int) -> jax.Array:
    """float32[rows, words]: the mark and the word's number, whole numbers that float32 tells apart."""
    numbers = jnp.arange(num_words, dtype=marks.dtype)[None, :]
    return marks[:, None] + jnp.sign(marks)[:, None] * numbers


def _fill_rows(buffer: jax.Array, rows: jax.Array, marks: jax.Array) -> jax.Array:
    return buffer.at[rows].set(_content(marks, buffer.shape[1]))


_fill = jax.jit(_fill_rows, donate_argnums=(0,))


@jax.jit
def _check(buffer: jax.Array, rows: jax.Array, marks: jax.Array) -> jax.Array:
    return jnp.all(
        jnp.where(rows[:, None] == 0, True, buffer[rows] == _content(marks, buffer.shape[1]))
    )
