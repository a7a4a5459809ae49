"""`show KEY`: what one page is, whether its file is whole, and the pages before it, as far as they are stored.

KEY is the page's name in hexadecimal, its first four digits or more, or the path of its file.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_jax.srt.mem_cache.hicache.byte_size import show_bytes
from sgl_jax.srt.mem_cache.hicache.errors import StorageCorruptionError
from sgl_jax.srt.mem_cache.hicache.storage.folders import open_folder
from sgl_jax.srt.mem_cache.hicache.storage.inventory import PageFolder, page_folders
from sgl_jax.srt.mem_cache.hicache.storage.page_info import (
    PageFileInfo,
    describe_entry,
    read_header,
)
from sgl_jax.srt.mem_cache.hicache.storage.sweep import page_key_of, page_name, shard_name
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink

from .ages import show_age
from .errors import ToolError
from .layouts import component_of, shard_of, shown_layout
from .place import add_place_arguments, model_folder, root_of, shown_model
from .report import DAMAGE, Report

_KEY = re.compile(r"[0-9a-f]{4,64}")
_MOST_CANDIDATES = 8
_MOST_STEPS = 1_000_000
_SHOWN_ENDS = 4
"""Pages of a long chain that are printed at either end; JSON has all."""


@dataclass(frozen=True)
class _Before:
    """One page of the chain before the one that was asked for."""

    key: PageKey
    index: int
    is_stored: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `show`."""
    add_place_arguments(parser)
    parser.add_argument("key", metavar="KEY", help="name of the page, its beginning, or its file")


def run(args: argparse.Namespace) -> Report:
    """Show one page."""
    root = root_of(args)
    folder, key = _find(root, args)
    path = root.joinpath(*folder.names, shard_name(key), page_name(key))
    report = Report({"path": str(path), "key": key.hex(), "model": shown_model(folder.model)})
    try:
        with open_folder(root, (*folder.names, shard_name(key)), create=False) as shard_fd:
            used_s = time.time() - os.lstat(page_name(key), dir_fd=shard_fd).st_mtime
            info = describe_entry(page_name(key), shard_fd)
    except (StorageCorruptionError, OSError) as error:
        reason = str(error).removeprefix(f"{page_name(key)}: ")
        report.data |= {"whole": False, "reason": reason}
        report.status = DAMAGE
        report.line(f"{path}")
        report.line(f"damaged: {reason}")
        return report
    is_right = info.page_key == key
    report.status = 0 if is_right else DAMAGE
    report.data |= _facts(info, used_s) | {"whole": is_right}
    chain = list(_chain(root, folder, info.link))
    report.data["before"] = [
        {"key": page.key.hex(), "index": page.index, "stored": page.is_stored} for page in chain
    ]
    _show(report, path, info, used_s)
    _show_chain(report, info, chain)
    return report


def _find(root: Path, args: argparse.Namespace) -> tuple[PageFolder, PageKey]:
    """The one page that is meant. Raises ToolError if there is none, or more than one."""
    text = Path(args.key).name.removesuffix(".npy").lower()
    if _KEY.fullmatch(text) is None:
        raise ToolError(f"{args.key}: a page is named by 4 to 64 hexadecimal digits")
    models = None if args.model is None else (model_folder(root, args.model),)
    try:
        matches = sorted(set(_matches(root, models, text)), key=lambda match: match[1])
    except OSError as error:
        raise ToolError(f"--path {root}: {error.strerror or error}") from error
    if not matches:
        raise ToolError(f"{args.key}: no such page in {root}")
    if len(matches) > 1:
        names = ", ".join(key.hex()[: len(text) + 8] for _, key in matches[:_MOST_CANDIDATES])
        raise ToolError(f"{args.key}: {len(matches)} pages begin like that: {names}")
    return matches[0]


def _matches(
    root: Path, models: tuple[str, ...] | None, text: str
) -> Iterator[tuple[PageFolder, PageKey]]:
    for folder in page_folders(root, models):
        try:
            with open_folder(root, (*folder.names, text[:2]), create=False) as shard_fd:
                names = os.listdir(shard_fd)
        except FileNotFoundError:
            continue
        for name in names:
            key = page_key_of(name)
            if key is not None and name.startswith(text):
                yield folder, key


def _facts(info: PageFileInfo, used_s: float) -> dict[str, Any]:
    tokens = _tokens(info)
    return {
        "format_version": info.format_version,
        "model_in_file": info.model_id,
        "component": component_of(info),
        "shard": shard_of(info),
        "page_size": info.page_size,
        "kv_dtype": info.kv_dtype,
        "layout": info.layout_id,
        "layout_digest": info.layout_digest.hex(),
        "namespace_digest": info.namespace_digest.hex(),
        "payload_bytes": info.payload_bytes,
        "file_bytes": info.file_bytes,
        "checksum": f"{info.checksum_kind} {info.checksum:016x}",
        "used_s": used_s,
        "first_token": None if tokens is None else tokens.start,
        "end_token": None if tokens is None else tokens.stop,
        "parent": None if info.link is None or info.link.parent is None else info.link.parent.hex(),
        "index": None if info.link is None else info.link.index,
    }


def _tokens(info: PageFileInfo) -> range | None:
    """The tokens of its prompt that a page holds, or, for a window's page and a state, stands beside."""
    if info.link is None:
        return None
    # What is kept beside the Full pages follows the Full page of its own tokens.
    page = info.link.index if component_of(info) in (None, "full") else info.link.index - 1
    return range(page * info.page_size, (page + 1) * info.page_size)


def _chain(root: Path, folder: PageFolder, link: PageLink | None) -> Iterator[_Before]:
    """The pages before one, nearest first, up to the start of the prompt or the first that is missing."""
    for _ in range(_MOST_STEPS):
        if link is None or link.parent is None or link.index < 1:
            return
        key, index = link.parent, link.index - 1
        try:
            with open_folder(root, (*folder.names, shard_name(key)), create=False) as shard_fd:
                info = read_header(page_name(key), shard_fd)
        except (OSError, StorageCorruptionError):
            yield _Before(key, index, False)
            return
        yield _Before(key, index, True)
        if info.link is not None and info.link.index != index:
            return  # a damaged link must not lead in a circle
        link = info.link


def _show(report: Report, path: Path, info: PageFileInfo, used_s: float) -> None:
    tokens = _tokens(info)
    layout = shown_layout(component_of(info), info.page_size, info.kv_dtype, info.payload_bytes)
    shard = shard_of(info)
    rows = {
        "file": str(path),
        "model": info.model_id,
        "holds": layout + (f", shard {shard}" if shard else ""),
        "tokens": "not known"
        if tokens is None
        else f"{tokens.start:,} to {tokens.stop - 1:,} of its prompt",
        "size": f"{show_bytes(info.file_bytes)}, format {info.format_version}",
        "checksum": f"{info.checksum_kind}, holds",
        "namespace": info.namespace_digest.hex(),
        "layout": f"{info.layout_digest.hex()} {info.layout_id}".rstrip(),
        "used": f"{show_age(used_s)} ago",
    }
    if report.status:
        rows["damaged"] = f"the file holds the page {info.page_key.hex()}"
    report.table(["page", report.data["key"]], [[name, value] for name, value in rows.items()])


def _show_chain(report: Report, info: PageFileInfo, chain: list[_Before]) -> None:
    if info.link is None:
        report.line("The file does not say which page is before it.")
        return
    stored = [page for page in chain if page.is_stored]
    if len(stored) == info.link.index:
        report.line(f"All pages before it ({len(stored):,}) are stored: it can be reached.")
    else:
        report.line(
            f"{len(stored):,} of {info.link.index:,} pages before it are stored, then one is missing: "
            "it is of use only while a server has those in memory."
        )
    shown = chain if len(chain) <= 2 * _SHOWN_ENDS + 1 else None
    ends = shown or [*chain[:_SHOWN_ENDS], *chain[-_SHOWN_ENDS:]]
    rows = [
        [f"{page.index:,}", page.key.hex(), "stored" if page.is_stored else "missing"]
        for page in ends
    ]
    if shown is None:
        rows.insert(_SHOWN_ENDS, ["...", f"{len(chain) - 2 * _SHOWN_ENDS:,} more", ""])
    if rows:
        report.table([">place", "page before it", ""], rows)
