"""`stat`: what the pages are, by model and layout: sizes, ages, how long prompts are, what is cut off. Reads every
header.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.byte_size import show_bytes
from sgl_jax.srt.mem_cache.hicache.storage.chains import (
    UNKNOWN_INDEX,
    Links,
    id_of,
    is_cut_off,
    parent_rows,
)
from sgl_jax.srt.mem_cache.hicache.storage.headers import read_headers
from sgl_jax.srt.mem_cache.hicache.storage.inventory import Inventory, PageFolder
from sgl_jax.srt.mem_cache.hicache.storage.page_info import PageFileInfo

from .ages import show_age
from .layouts import component_of, shown_layout
from .place import add_place_arguments, inventory_of, shown_model
from .progress import progress
from .report import Report


@dataclass
class _Group:
    """Pages of one namespace: their rows in the inventory, and the header of the first."""

    folder: PageFolder
    info: PageFileInfo
    rows: list[int] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stat`."""
    add_place_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Say what is there."""
    found = inventory_of(args)
    groups, links, unreadable = _read_headers(found)
    cut_off = is_cut_off(links.index, parent_rows(links))
    entries = [_entry(found, group, links, cut_off) for group in groups]
    report = Report({"path": str(found.root), "layouts": entries, "unreadable_headers": unreadable})
    report.table(
        [
            "model",
            "layout",
            "namespace",
            ">pages",
            ">bytes",
            ">tokens",
            ">beginnings",
            ">longest",
            ">cut off",
            "used (median)",
        ],
        [_row(entry) for entry in entries],
    )
    report.line(
        "As far as the files tell: beginnings are different first pages of prompts, longest is the longest prompt in "
        "tokens, and a page is cut off if one before it is missing."
    )
    if unreadable:
        report.line(f"{unreadable:,} files have no header that can be read: run verify.")
    return report


def _read_headers(found: Inventory) -> tuple[list[_Group], Links, int]:
    groups: dict[tuple[PageFolder, bytes], _Group] = {}
    parent_id = np.zeros(len(found), np.uint64)
    index = np.full(len(found), UNKNOWN_INDEX, np.int64)
    unreadable = 0
    with progress("reading headers", len(found)) as tick:
        for row, info in read_headers(found, np.arange(len(found))):
            tick(1)
            if info is None:
                unreadable += 1
                continue
            folder = found.folder(row)
            group = groups.setdefault((folder, info.namespace_digest), _Group(folder, info))
            group.rows.append(row)
            group.versions[info.format_version] += 1
            if info.link is not None:
                parent_id[row], index[row] = id_of(info.link.parent), info.link.index
    ordered = sorted(
        groups.values(), key=lambda g: (g.folder.names, g.info.layout_id, -len(g.rows))
    )
    return ordered, Links(found.key_ids, parent_id, index), unreadable


def _entry(found: Inventory, group: _Group, links: Links, cut_off: Any) -> dict[str, Any]:
    info, rows = group.info, np.array(group.rows)
    index = links.index[rows]
    ages_s = (time.time_ns() - found.used_ns[rows]) / 1e9
    component = component_of(info)
    is_chain = component in (None, "full")
    return {
        "model": shown_model(group.folder.model),
        "page_size": info.page_size,
        "component": component,
        "layout": info.layout_id,
        "layout_digest": info.layout_digest.hex(),
        "namespace_digest": info.namespace_digest.hex(),
        "kv_dtype": info.kv_dtype,
        "page_bytes": info.payload_bytes,
        "format_versions": {str(number): count for number, count in sorted(group.versions.items())},
        "pages": len(rows),
        "bytes": int(found.num_bytes[rows].sum()),
        "tokens": len(rows) * info.page_size if is_chain else None,
        "beginnings": int((index == 0).sum()) if is_chain else None,
        "longest_tokens": int(index.max() + 1) * info.page_size if is_chain else None,
        "cut_off_pages": int(cut_off[rows].sum()),
        "age_s": {
            "youngest": float(ages_s.min()),
            "median": float(np.median(ages_s)),
            "oldest": float(ages_s.max()),
        },
    }


def _row(entry: dict[str, Any]) -> list[str]:
    def number(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    return [
        entry["model"],
        shown_layout(
            entry["component"], entry["page_size"], entry["kv_dtype"], entry["page_bytes"]
        ),
        entry["namespace_digest"][:8],
        number(entry["pages"]),
        show_bytes(entry["bytes"]),
        number(entry["tokens"]),
        number(entry["beginnings"]),
        number(entry["longest_tokens"]),
        number(entry["cut_off_pages"]),
        f"{show_age(entry['age_s']['median'])} ago",
    ]
