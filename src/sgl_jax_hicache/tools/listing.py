"""`ls`: the models in a storage, with their page sizes, pages, bytes and ages. Reads no file."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.byte_size import show_bytes
from sgl_jax.srt.mem_cache.hicache.storage.inventory import Inventory

from .ages import show_age
from .place import add_place_arguments, inventory_of, shown_model
from .report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ls`."""
    add_place_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """List what is there."""
    found = inventory_of(args)
    entries = [_entry(found, index) for index in range(len(found.folders))]
    held = found.page_bytes + found.quarantined_bytes
    report = Report({"path": str(found.root), "bytes": held, "models": entries})
    report.table(
        ["model", ">page size", ">pages", ">bytes", "used last", "unused for longest", "besides"],
        [
            [
                entry["model"],
                str(entry["page_size"]),
                f"{entry['pages']:,}",
                show_bytes(entry["bytes"]),
                _ago(entry["youngest_s"]),
                _ago(entry["oldest_s"]),
                _besides(entry),
            ]
            for entry in entries
        ],
    )
    report.line(f"{found.root}: {len(found):,} pages, {show_bytes(held)}")
    return report


def _entry(found: Inventory, index: int) -> dict[str, Any]:
    rows = np.flatnonzero(found.folder_of == index)
    ages_s = (time.time_ns() - found.used_ns[rows]) / 1e9
    folder = found.folders[index]
    return {
        "model": shown_model(folder.model),
        "folder": folder.model,
        "page_size": int(folder.page_size),
        "pages": len(rows),
        "bytes": int(found.num_bytes[rows].sum()),
        "youngest_s": float(ages_s.min()) if len(rows) else None,
        "oldest_s": float(ages_s.max()) if len(rows) else None,
        "set_aside": sum(file.folder == folder for file in found.quarantined),
        "being_written": sum(file.folder == folder for file in found.writing),
        "left_over": sum(file.folder == folder for file in found.stale),
    }


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{show_age(seconds)} ago"


def _besides(entry: dict[str, Any]) -> str:
    named = {
        "damaged, set aside": entry["set_aside"],
        "being written": entry["being_written"],
        "left by dead writers": entry["left_over"],
    }
    return ", ".join(f"{count} {name}" for name, count in named.items() if count)
