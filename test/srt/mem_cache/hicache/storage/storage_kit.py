"""What the storage tests share: a namespace, pages, keys, and file operations that fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher, StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink

WAIT_S = 30.0
"""Bound of every wait: reached only if the test fails."""

PAGE_BYTES = 1000  # no multiple of anything
SPACE = StorageNamespace(
    model_id="org/model",
    model_version="0123abcd",
    page_size=4,
    kv_dtype="bfloat16",
    layout_id="hicache-page-v1|full|page=4|shard=0/1|k0:bfloat16[4,125]",
    page_bytes=PAGE_BYTES,
)


def make_keys(num_keys: int, first_token: int = 0) -> list[PageKey]:
    tokens = np.arange(first_token, first_token + num_keys * SPACE.page_size, dtype="<i8")
    return PageHasher(SPACE, None).chain(None, tokens.tobytes())


def make_links(keys: Sequence[PageKey]) -> list[PageLink]:
    """The links of the leading pages of one prompt."""
    return [PageLink(keys[i - 1] if i else None, i) for i in range(len(keys))]


def make_page(number: int, num_bytes: int = PAGE_BYTES) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)


class GatedOps(FileOps):
    """Stops in the middle of the first write until `gate` is set; `halfway` tells when it got there."""

    def __init__(self) -> None:
        self.halfway = threading.Event()
        self.gate = threading.Event()

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        if self.halfway.is_set():
            return super().writev(fd, buffers)
        whole = memoryview(b"".join(buffers))
        count = super().writev(fd, [whole[: len(whole) // 2]])
        self.halfway.set()
        if not self.gate.wait(WAIT_S):
            raise TimeoutError("the gate never opened")
        return count


class FailingOps(FileOps):
    """Fails the calls named in `errors` with that errno, after `good_bytes` written bytes of a file."""

    def __init__(self, good_bytes: int = 0, **errors: int) -> None:
        self.errors = errors
        self.good_bytes = good_bytes

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise OSError(self.errors[call], f"injected into {call}")

    def open_for_read(self, name: str, folder_fd: int) -> int:
        self._fail("open_for_read")
        return super().open_for_read(name, folder_fd)

    def create(self, name: str, folder_fd: int) -> int:
        self._fail("create")
        return super().create(name, folder_fd)

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        if "writev" in self.errors and self.good_bytes:
            count = super().writev(fd, [buffers[0][: self.good_bytes]])
            self.good_bytes = 0
            return count
        self._fail("writev")
        return super().writev(fd, buffers)

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self._fail("readv")
        return super().readv(fd, buffers)

    def replace(self, source: str, target: str, folder_fd: int) -> None:
        self._fail("replace")
        super().replace(source, target, folder_fd)

    def fsync(self, fd: int) -> None:
        self._fail("fsync")
        super().fsync(fd)


class ShortOps(FileOps):
    """Writes and reads at most 7 bytes per call, as a file system may."""

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        return super().writev(fd, [buffers[0][:7]])

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        return super().readv(fd, [buffers[0][:7]])
