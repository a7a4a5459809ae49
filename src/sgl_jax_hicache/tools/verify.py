"""`verify`: read every page file and check it: header, checksums, name, place. Exit status 1 if one is damaged.

Safe beside running servers: a file that appears, is replaced or goes meanwhile is no damage. With `--quarantine` what
is damaged is moved out of the way, as a server does when it reads such a file; nothing else is changed.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_jax.srt.mem_cache.hicache.byte_size import show_bytes
from sgl_jax.srt.mem_cache.hicache.errors import StorageCorruptionError
from sgl_jax.srt.mem_cache.hicache.storage.folders import (
    QUARANTINE,
    move_away,
    open_child,
    open_folder,
    safe_name,
)
from sgl_jax.srt.mem_cache.hicache.storage.inventory import PageFolder
from sgl_jax.srt.mem_cache.hicache.storage.page_info import PageFileInfo, describe_entry
from sgl_jax.srt.mem_cache.hicache.storage.sweep import is_shard_name, page_key_of, shard_name
from sgl_jax.srt.mem_cache.hicache.types import PageKey

from .place import add_place_arguments, inventory_of
from .progress import Tick, progress
from .report import DAMAGE, Report

_MODEL_BYTES = 88
"""What of a model's name fits into a page file."""

MOST_SHOWN = 100
"""Damaged files that are printed one by one; JSON has all."""


@dataclass(frozen=True)
class Damage:
    """One file that is not the page its name says."""

    path: Path
    reason: str
    is_set_aside: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `verify`."""
    add_place_arguments(parser)
    parser.add_argument(
        "--quarantine",
        action="store_true",
        help="move damaged files to .quarantine, out of the way",
    )


def run(args: argparse.Namespace) -> Report:
    """Check everything."""
    found = inventory_of(args)
    damaged: list[Damage] = []
    num_files = num_bytes = 0
    with progress("verifying", found.page_bytes, in_bytes=True) as tick:
        for folder in found.folders:
            for damage, file_bytes in _check_folder(found.root, folder, tick, args.quarantine):
                num_files, num_bytes = num_files + 1, num_bytes + file_bytes
                if damage is not None:
                    damaged.append(damage)
    report = Report(
        {
            "path": str(found.root),
            "files": num_files,
            "bytes": num_bytes,
            "damaged": [
                {"path": str(d.path), "reason": d.reason, "set_aside": d.is_set_aside}
                for d in damaged
            ],
            "set_aside_before": len(found.quarantined),
        },
        status=DAMAGE if damaged else 0,
    )
    _show(report, damaged, f"{num_files:,} files, {show_bytes(num_bytes)}")
    if found.quarantined:
        report.line(f"{len(found.quarantined)} damaged files were set aside before.")
    return report


def _show(report: Report, damaged: list[Damage], checked: str) -> None:
    for damage in damaged[:MOST_SHOWN]:
        moved = " (set aside)" if damage.is_set_aside else ""
        report.line(f"damaged: {damage.path}: {damage.reason}{moved}")
    if len(damaged) > MOST_SHOWN:
        report.line(f"... and {len(damaged) - MOST_SHOWN:,} more; --json has them all")
    report.line(f"{checked} read: {f'{len(damaged):,} damaged' if damaged else 'all are whole'}.")


def _check_folder(
    root: Path, folder: PageFolder, tick: Tick, quarantine: bool
) -> Iterator[tuple[Damage | None, int]]:
    """What is wrong, if anything, and the bytes, of every entry that has a page's name."""
    try:
        with open_folder(root, folder.names, create=False) as folder_fd:
            for shard in sorted(filter(is_shard_name, os.listdir(folder_fd))):
                yield from _check_shard(root, folder, folder_fd, shard, tick, quarantine)
    except FileNotFoundError:
        return  # somebody removed it


def _check_shard(
    root: Path, folder: PageFolder, folder_fd: int, shard: str, tick: Tick, quarantine: bool
) -> Iterator[tuple[Damage | None, int]]:
    place = root.joinpath(*folder.names, shard)
    try:
        with open_child(shard, folder_fd) as shard_fd:
            for name in sorted(os.listdir(shard_fd)):
                key = page_key_of(name)
                if key is None:
                    continue
                try:
                    before = os.lstat(name, dir_fd=shard_fd)
                    reason = _reason(name, shard, shard_fd, key, folder)
                except FileNotFoundError:
                    continue  # removed since it was listed
                tick(before.st_size)
                if reason is None:
                    yield None, before.st_size
                    continue
                moved = quarantine and _set_aside(root, folder, name, shard_fd, before)
                yield Damage(place / name, reason, moved), before.st_size
    except FileNotFoundError:
        return
    except OSError as error:
        yield Damage(place, f"cannot be looked into: {error.strerror}", False), 0


def _reason(name: str, shard: str, shard_fd: int, key: PageKey, folder: PageFolder) -> str | None:
    """What is wrong with a page file; None if it is whole and in its place. Raises FileNotFoundError."""
    try:
        info = describe_entry(name, shard_fd)
    except FileNotFoundError:
        raise
    except StorageCorruptionError as error:
        return str(error).removeprefix(f"{name}: ")
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return _misplaced(info, shard, key, folder)


def _misplaced(info: PageFileInfo, shard: str, key: PageKey, folder: PageFolder) -> str | None:
    if info.page_key != key:
        return f"holds the page {info.page_key.hex()}"
    if shard != shard_name(key):
        return f"belongs into the folder {shard_name(key)}"
    if str(info.page_size) != folder.page_size:
        return f"is of page size {info.page_size}"
    is_cut = len(info.model_id.encode()) >= _MODEL_BYTES - 3  # the last character may be cut too
    if not is_cut and safe_name(info.model_id) != folder.model:
        return f"is of the model {info.model_id!r}"
    return None


def _set_aside(
    root: Path, folder: PageFolder, name: str, shard_fd: int, before: os.stat_result
) -> bool:
    """Moves a damaged entry to the quarantine, unless another file stands in its place by now."""
    target = f"{name}.{secrets.token_hex(4)}"
    try:
        now = os.lstat(name, dir_fd=shard_fd)
        if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
            return False
        with open_folder(root, (*folder.names, QUARANTINE), create=True) as quarantine_fd:
            move_away(name, shard_fd, quarantine_fd, target, before.st_size)
    except OSError:
        return False
    return True
