"""The file storage against raw files in the same folder: set against write + rename, get against readinto.

Everything stays in the page cache, so this is what the storage adds, not what the disk gives. `get`, which uses the
memory of pages that are gone, is compared with reading into memory that is there already, and into fresh memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey

from .record import Record, measured, rates, seconds_of

BATCH_PAGES = 8
EXISTS_KEYS = 256
MAX_LINKS = 30_000
"""Names of one file, below what file systems allow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--page-bytes", type=int, default=4 << 20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where the files go (a temporary folder)")


def run(args: argparse.Namespace) -> list[Record]:
    """Set and get of large pages. Raises ArgumentTypeError for a wrong folder."""
    if args.folder is not None and not args.folder.is_dir():
        raise argparse.ArgumentTypeError(f"--folder {args.folder}: no such folder")
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=args.folder) as name:
        return measure_set_get(Path(name) / "large", args.page_bytes, args.repeats)


def new_storage(root: Path, page_bytes: int) -> LocalFileStorage:
    """An empty storage in a new folder."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    namespace = StorageNamespace("bench", "0", 64, "float32", "layout", page_bytes)
    return LocalFileStorage(root, namespace)


def new_keys(start: int, num_keys: int) -> list[PageKey]:
    """Keys that no other start gives."""
    rng = np.random.default_rng(start)
    return [PageKey(rng.bytes(32)) for _ in range(num_keys)]


def measure_set_get(root: Path, page_bytes: int, repeats: int) -> list[Record]:
    """Batches of pages written and read, in turns with raw files. The storage has its 256 folders already, as after its
    first thousands of pages."""
    storage, raw = new_storage(root, page_bytes), root / "raw"
    raw.mkdir()
    for shard in range(256):
        (storage.folder / f"{shard:02x}").mkdir(mode=0o700, parents=True)
    page = np.random.default_rng(0).integers(0, 256, page_bytes).astype(np.uint8)
    pages = [page] * BATCH_PAGES
    reused = np.zeros(page_bytes, np.uint8)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("raw", "set", "reused", "fresh", "get")
    }
    for repeat in range(repeats + 2):
        keys = new_keys(repeat, BATCH_PAGES)
        names = [raw / key.hex() for key in keys]
        spent = {
            "raw": seconds_of(lambda names=names: _write_raw(names, page)),  # type: ignore[misc]
            "set": seconds_of(lambda keys=keys: storage.set(keys, [[p] for p in pages])),  # type: ignore[misc]
            "reused": seconds_of(lambda names=names: _read_raw(names, [reused] * BATCH_PAGES)),  # type: ignore[misc]
            "fresh": seconds_of(lambda names=names: _read_fresh(names, page_bytes)),  # type: ignore[misc]
            "get": seconds_of(lambda keys=keys: _get_all(storage, keys)),  # type: ignore[misc]
        }
        for key, name in zip(keys, names, strict=True):
            storage.path_of(key).unlink()
            name.unlink()
        if repeat >= 2:
            for what, took_s in spent.items():
                seconds[what].append(took_s)
    gb = {name: rates(BATCH_PAGES * page_bytes / 1e9, took) for name, took in seconds.items()}
    size = {"page_bytes": page_bytes, "batch": BATCH_PAGES}
    return [
        measured("storage set", gb["set"], "GB/s", gb["raw"], against="write+rename", **size),
        measured("storage get", gb["get"], "GB/s", gb["reused"], against="readinto", **size),
        measured("storage get", gb["get"], "GB/s", gb["fresh"], against="readinto, fresh", **size),
    ]


def measure_exists(root: Path, sizes: Sequence[int], repeats: int) -> list[Record]:
    """Look-ups of batches, half of whose keys are there, in folders of every size, in turns.

    The limit is the smallest folder, so the ratio is the growth.
    """
    folders = [(*many_files(root / str(size), size), np.random.default_rng(1)) for size in sizes]
    fresh = count(1)

    def look_up(
        storage: LocalFileStorage, keys: Sequence[PageKey], rng: np.random.Generator
    ) -> float:
        there = [keys[i] for i in rng.integers(0, len(keys), EXISTS_KEYS // 2)]
        batch = there + new_keys(next(fresh), EXISTS_KEYS - len(there))
        return seconds_of(lambda: storage.exists(batch)) / EXISTS_KEYS * 1e6

    us: list[list[float]] = [[] for _ in sizes]
    for repeat in range(repeats + 2):
        for folder, samples in zip(folders, us, strict=True):
            took_us = look_up(*folder)
            if repeat >= 2:
                samples.append(took_us)
    return [
        measured("storage exists", samples, "us/key", us[0], files=size, batch=EXISTS_KEYS)
        for size, samples in zip(sizes, us, strict=True)
    ]


def many_files(root: Path, num_files: int) -> tuple[LocalFileStorage, list[PageKey]]:
    """A storage of that many small pages. Most are links to others: they are looked up, never read."""
    storage = new_storage(root, 64)
    keys = new_keys(0, num_files)
    for first in range(0, num_files, MAX_LINKS):
        source, *rest = keys[first : first + MAX_LINKS]
        storage.set([source], [[np.zeros(64, np.uint8)]])
        for key in rest:
            path = storage.path_of(key)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            path.hardlink_to(storage.path_of(source))
    return storage, keys


def _write_raw(paths: Sequence[Path], page: npt.NDArray[np.uint8]) -> None:
    for path in paths:
        temporary = f"{path}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, page.data)
        os.close(descriptor)
        os.rename(temporary, path)


def _read_raw(paths: Sequence[Path], targets: Sequence[npt.NDArray[np.uint8]]) -> None:
    for path, target in zip(paths, targets, strict=True):
        with open(path, "rb", buffering=0) as file:
            file.readinto(target.data)


def _read_fresh(paths: Sequence[Path], page_bytes: int) -> None:
    _read_raw(paths, [np.empty(page_bytes, np.uint8) for _ in paths])


def _get_all(storage: LocalFileStorage, keys: Sequence[PageKey]) -> None:
    if any(page is None for page in storage.get(keys)):
        raise RuntimeError("a page that was written is not there")
