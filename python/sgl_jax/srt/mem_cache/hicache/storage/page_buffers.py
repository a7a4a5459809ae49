"""Memory for pages that are read from files, used again once everybody has let go of it.

Memory that is new to the process costs more than reading a cached file into it: the kernel clears it page by page. And
only memory at the right alignment becomes a jax array on a CPU device without being copied once more.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from .base import PageBytes

ALIGNMENT = 64
"""What jax asks of memory that it takes over."""

MAX_IDLE_BYTES = 32 << 20
"""Of the memory that waits to be used again; what comes back beyond that goes to the system."""


class PageBuffers:
    """Buffers of one size. Any thread; the size is that of a page.

    A buffer comes back when the array that was handed out and everything that was made of it without a copy are gone,
    which they themselves keep track of; nobody gives it back by hand, so nobody can do so too early.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        # A deque, because a buffer may come back in the middle of `take`, on the same thread.
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=MAX_IDLE_BYTES // max(num_bytes, 1))

    @property
    def num_idle(self) -> int:
        """Buffers that wait to be used again."""
        return len(self._idle)

    def take(self) -> PageBytes:
        """uint8[num_bytes] with undefined content, aligned to `ALIGNMENT`. Raises MemoryError."""
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = np.empty(self._num_bytes + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        # Every view of the array refers to this object in the end, which an array cannot say of itself.
        lease = (ctypes.c_uint8 * self._num_bytes).from_buffer(memory.data, offset)
        weakref.finalize(lease, self._idle.append, memory).atexit = False
        return np.frombuffer(memoryview(lease), np.uint8)
