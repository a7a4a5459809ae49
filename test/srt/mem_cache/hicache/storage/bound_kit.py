"""A storage with a bound, and what its tests look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from storage_kit import SPACE, make_links, make_page

from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import PageFileFormat
from sgl_jax.srt.mem_cache.hicache.types import PageKey

FILE_BYTES = PageFileFormat(SPACE).file_bytes
PAGE = make_page(0)


def open_bounded(root: Path, num_pages: int, ops: FileOps | None = None) -> LocalFileStorage:
    return LocalFileStorage(root, SPACE, max_bytes=num_pages * FILE_BYTES, ops=ops)


def store(storage: LocalFileStorage, keys: Sequence[PageKey]) -> list[bool]:
    return storage.set_linked(keys, [[PAGE]] * len(keys), make_links(keys))


def pages_below(root: Path) -> int:
    return len(list(root.rglob("*.npy*")))
