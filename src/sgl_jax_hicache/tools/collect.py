"""`gc`: free room in the files. What was unused for longest goes first; without `--apply` it only says what would go.

A page counts as used when it, or a stored page behind it in the same prompt, was read or stored; so what goes is always
the end of a chain, and what stays is of use. Pages that no reader can reach any more, because one before them is
missing, go before the others. Damaged files that were set aside go first of all when room is wanted.

Safe beside running servers: a page that is used meanwhile stays, with all pages before it, and a server that misses a
page computes it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from sgl_jax.srt.mem_cache.hicache.byte_size import parse_bytes, show_bytes
from sgl_jax.srt.mem_cache.hicache.storage.chains import LinkReader
from sgl_jax.srt.mem_cache.hicache.storage.inventory import Inventory, PageFolder, remove_other
from sgl_jax.srt.mem_cache.hicache.storage.retention import RemovalPlan, carry_out, plan_removal
from sgl_jax.srt.mem_cache.hicache.storage.usage_ledger import UsageLedger

from .ages import parse_age, show_age
from .errors import ToolError
from .place import add_place_arguments, inventory_of, shown_model
from .progress import progress
from .report import DAMAGE, Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `gc`."""
    add_place_arguments(parser)
    parser.add_argument(
        "--max-bytes",
        metavar="BYTES",
        help="free until the files of the root, or of --model, take at most this, as 100GiB or 500MB",
    )
    parser.add_argument(
        "--max-age",
        metavar="AGE",
        help="free what was unused for longer than this, as 7d, 12h or 30m",
    )
    parser.add_argument(
        "--apply", action="store_true", help="remove; without it nothing is changed"
    )


def run(args: argparse.Namespace) -> Report:
    """Say what would go, or remove it."""
    max_bytes, unused_since_ns = _limits(args)
    found = inventory_of(args)
    with progress("reading headers", len(found)) as tick:
        plan = plan_removal(
            found, LinkReader(), max_bytes=max_bytes, unused_since_ns=unused_since_ns, tick=tick
        )
    report = Report({"path": str(found.root), "applied": args.apply, "plan": _planned(plan)})
    _show_plan(report, plan)
    if args.apply:
        _apply(report, plan)
    else:
        report.line("Nothing was removed: add --apply.")
    return report


def _limits(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """(most bytes, oldest time in nanoseconds). Raises ToolError."""
    if args.max_bytes is None and args.max_age is None:
        raise ToolError("give --max-bytes, --max-age or both")
    try:
        max_bytes = None if args.max_bytes is None else parse_bytes(args.max_bytes)
    except ValueError as error:
        raise ToolError(f"--max-bytes {error}") from error
    try:
        age_s = None if args.max_age is None else parse_age(args.max_age)
    except ValueError as error:
        raise ToolError(f"--max-age {error}") from error
    return max_bytes, None if age_s is None else time.time_ns() - int(age_s * 1e9)


def _planned(plan: RemovalPlan) -> dict[str, Any]:
    found, rows = plan.found, plan.rows[: plan.pages_to_go]
    freed = int(found.num_bytes[rows].sum()) + sum(file.num_bytes for file in plan.set_aside)
    held = found.page_bytes + found.quarantined_bytes
    return {
        "pages": len(rows),
        "set_aside_files": len(plan.set_aside),
        "left_over_files": len(found.stale),
        "freed_bytes": freed,
        "held_bytes": held,
        "bytes_after": held - freed,
        "folders": [_folder_plan(plan, folder, part) for folder, part in _by_folder(found, rows)],
    }


def _by_folder(found: Inventory, rows: Any) -> list[tuple[PageFolder, Any]]:
    of = found.folder_of[rows]
    return [(folder, rows[of == i]) for i, folder in enumerate(found.folders) if (of == i).any()]


def _folder_plan(plan: RemovalPlan, folder: PageFolder, rows: Any) -> dict[str, Any]:
    ages_s = (time.time_ns() - plan.last_ns[rows]) / 1e9
    return {
        "model": shown_model(folder.model),
        "page_size": int(folder.page_size),
        "pages": len(rows),
        "freed_bytes": int(plan.found.num_bytes[rows].sum()),
        "youngest_s": float(ages_s.min()),
        "oldest_s": float(ages_s.max()),
    }


def _show_plan(report: Report, plan: RemovalPlan) -> None:
    planned = report.data["plan"]
    if planned["folders"]:
        report.table(
            ["model", ">page size", ">pages to go", ">bytes", "unused for"],
            [
                [
                    entry["model"],
                    str(entry["page_size"]),
                    f"{entry['pages']:,}",
                    show_bytes(entry["freed_bytes"]),
                    f"{show_age(entry['youngest_s'])} to {show_age(entry['oldest_s'])}",
                ]
                for entry in planned["folders"]
            ],
        )
    besides = {
        "damaged files that were set aside": planned["set_aside_files"],
        "files left over by dead writers": planned["left_over_files"],
    }
    named = "".join(f" and {count} {name}" for name, count in besides.items() if count)
    report.line(
        f"{planned['pages']:,} of {len(plan.found):,} pages{named} to go: {show_bytes(planned['freed_bytes'])} of "
        f"{show_bytes(planned['held_bytes'])}, {show_bytes(planned['bytes_after'])} stay."
    )


def _apply(report: Report, plan: RemovalPlan) -> None:
    found = plan.found
    with progress("removing", plan.pages_to_go + len(plan.set_aside)) as tick:
        removal = carry_out(plan, tick)
    left_over = failed = 0
    for file in found.stale:
        try:
            left_over += remove_other(found.root, file)
        except OSError:
            failed += 1
    failed += removal.failed
    report.data["removed"] = {
        "pages": removal.pages,
        "set_aside_files": removal.other_files,
        "left_over_files": left_over,
        "bytes": removal.num_bytes,
        "failed": failed,
    }
    _tell_ledgers(found)
    report.line(f"Removed {removal.pages:,} pages, {show_bytes(removal.num_bytes)} in all.")
    if failed:
        report.status = DAMAGE
        report.line(
            f"{failed:,} files could not be removed: look at their folders' owner and mode."
        )


def _tell_ledgers(found: Inventory) -> None:
    """Servers that keep a bound on these folders count anew, the next time they need room."""
    for model in {folder.model for folder in found.folders}:
        try:
            with UsageLedger(found.root, model).locked(create=False) as usage:
                usage.held_bytes = None
        except FileNotFoundError:
            continue  # nobody keeps one here
        except OSError:
            continue  # the ledger says too much then, and the server that finds it full counts anew
