"""Run every benchmark and write bench.md with its plots.

Each benchmark runs in a process of its own, so that none finds the memory or the programs of another. With --from, the
report is made of records that were written before.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .__main__ import BENCHMARKS
from .answers import answers
from .plots import GROWTH, write_plots
from .record import COLUMNS, RUN, Record, read_json, row_of, short, write_json
from .targets import REASONS, judged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `all`."""
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), help="for bench.md and the plots (here)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for replay")
    parser.add_argument("--files", type=int, nargs="+", metavar="N", help="for scaling")
    parser.add_argument("--leaves", type=int, nargs="+", metavar="N", help="for scaling")
    parser.add_argument(
        "--skip", nargs="+", choices=BENCHMARKS, default=[], help="benchmarks to leave out"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="measure nothing again with a C library that keeps freed memory",
    )
    parser.add_argument(
        "--from", dest="sources", nargs="+", type=Path, metavar="FILE", help="records to show"
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Measure, and write the report. Raises ArgumentTypeError if a benchmark fails or --from cannot be read."""
    records = _measure_all(args) if args.sources is None else _read(args.sources)
    if not records:
        raise argparse.ArgumentTypeError("there are no records to report")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    plots = write_plots(records, args.output_dir)
    path = args.output_dir / "bench.md"
    path.write_text(markdown(records, [(title, p.name) for title, p in plots]), encoding="utf-8")
    print(f"Written: {', '.join(str(p) for p in (path, *(p for _, p in plots)))}")
    return records


def _read(sources: Sequence[Path]) -> list[Record]:
    try:
        return [_without_path(record) for source in sources for record in read_json(source)]
    except (OSError, ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"--from: no records: {error}") from error


_OPTIONS = {
    "transfer": (
        *("--schemes", "per_block", "slab", "--executors", "threadpool", "future"),
        *("--repeats", "9"),
    ),
}
"""Beyond the defaults: what the answers to the RFC's questions need."""

_KEEP_FREED_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:"
    "glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=67108864"
}
"""The C library keeps large blocks that were freed, and asks for large pages of the kernel."""

_BOUND_BY_FRESH_MEMORY = ("transfer", "storage")
"""Measured with that setting, too: most of their time is the kernel's, who hands out memory page by page."""


def _measure_all(args: argparse.Namespace) -> list[Record]:
    options = {name: [*_OPTIONS.get(name, ())] for name in BENCHMARKS if name not in args.skip}
    for name, option in (("replay", "trace"), ("scaling", "files"), ("scaling", "leaves")):
        value = getattr(args, option)
        if value is not None and name in options:
            values = value if isinstance(value, list) else [value]
            options[name] += [f"--{option}", *map(str, values)]
    records: list[Record] = []
    for name, given in options.items():
        records += _measure(name, given, {})
        if name in _BOUND_BY_FRESH_MEMORY and not args.once:
            records += _measure(name, [], _KEEP_FREED_MEMORY)
        if args.json is not None:  # what a later one that fails must not take along
            write_json(records, args.json)
    return records


def _measure(name: str, options: Sequence[str], environment: Mapping[str, str]) -> list[Record]:
    """Run one benchmark in a process of its own. Raises ArgumentTypeError if it fails."""
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        path = Path(folder) / "records.json"
        command = [sys.executable, "-m", __package__, name, *options, "--json", str(path)]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, check=False, env={**os.environ, **environment}
        )
        if done.returncode:
            raise argparse.ArgumentTypeError(f"{name} ended with status {done.returncode}")
        records = [_without_path(record) for record in read_json(path)]
    print(f"{name:16} {time.perf_counter() - begun_s:6.0f} s {' '.join(environment)}", flush=True)
    return records


def _without_path(record: Record) -> Record:
    """Where the records were written, and where a trace lay, is nothing that a reader could use."""
    run = record.params[RUN]
    words = shlex.split(run["command"].partition(" --json ")[0])
    run["command"] = shlex.join(Path(w).name if Path(w).is_absolute() else w for w in words)
    return record


def markdown(records: Sequence[Record], plots: Sequence[tuple[str, str]]) -> str:
    """The report as text: what must be reached, then every figure with its command."""
    parts = ["# Benchmarks", _INTRODUCTION, *_about(records), "## What must be reached"]
    parts.append(_table(("what", "parameters", "must reach", "found", ""), _target_rows(records)))
    parts += _reasons(records)
    parts += [f"## {title}\n\n![{title}]({name})" for title, name in plots]
    if growth := _growth_rows(records):
        parts.append(_table(("what", "size", "cost", "unit", "of the smallest"), growth))
    if found := answers(records):
        parts.append("## The RFC's open questions")
        for text, columns, rows in found:
            parts += [text, _table(columns, rows)]
    for command in dict.fromkeys(map(_command, records)):
        own = [r for r in records if _command(r) == command]
        what = own[0].params[RUN]["command"].split()[3]
        load = own[0].params[RUN].get("load", "unknown")
        parts.append(f"## {what}\n\n`{command}`\n\nLoad average of the machine: {load}.")
        parts.append(_table(COLUMNS, [row_of(r) for r in own]))
        parts += _details(own)
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = (
    "Written by `python -m sgl_jax_hicache.bench all` (`make bench`). Every ratio is a figure in units of a limit\n"
    "that was measured beside it in the same run; rates (units ending in /s) are better when higher, everything else\n"
    "when lower. P90: what nine of ten repeats are at least as good as. Each section is one run, at the load\n"
    "that it names: runs at different loads compare roughly at best."
)


_OF_ONE_RUN = ("command", "commit", "load", "environment")


def _about(records: Sequence[Record]) -> list[str]:
    run = records[0].params[RUN]
    commits = dict.fromkeys(str(r.params[RUN]["commit"]) for r in records)
    shown = {key: value for key, value in run.items() if key not in _OF_ONE_RUN}
    loads = [float(r.params[RUN].get("load", 0.0)) for r in records]
    return [
        "\n".join(
            [
                *(f"* {key}: {value}" for key, value in shown.items()),
                f"* load average of the machine at the end of each benchmark: {min(loads)} to {max(loads)}",
                f"* commit: {', '.join(commits)}",
            ]
        )
    ]


def _command(record: Record) -> str:
    """The command with the environment that it ran in."""
    run = record.params[RUN]
    settings = [f"{name}={value}" for name, value in run.get("environment", {}).items()]
    return " ".join([*settings, run["command"]])


def _target_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for target, record in judged(records):
        found = target.found(record)
        rows.append(
            (
                record.name,
                " ".join([row_of(record)[1], *record.params[RUN].get("environment", ())]),
                target.text(record),
                "" if found is None else short(found),
                "met" if target.met(record) else "**not met**",
            )
        )
    return rows


def _reasons(records: Sequence[Record]) -> list[str]:
    """Why what is not met is not met, as far as that is known."""
    unmet = dict.fromkeys(
        record.name for target, record in judged(records) if not target.met(record)
    )
    return [f"**{name}**: {REASONS[name]}" for name in unmet if name in REASONS]


def _growth_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [
        (
            r.name,
            f"{r.params[GROWTH[r.name]]:,} {GROWTH[r.name]}",
            short(r.value),
            r.unit,
            f"{r.ratio or 0.0:.2f}",
        )
        for r in records
        if r.name in GROWTH
    ]


_DETAILS = {
    "tokens": "Tokens by tier.",
    "phases": "Mean us per request by phase.",
    "per_step_us": "Mean us per decode step by call.",
    "per_request_us": "Mean us per request by call.",
}


def _details(records: Sequence[Record]) -> list[str]:
    """Parameters that are tables themselves: tokens by tier, time by phase."""
    tables = []
    for name, title in _DETAILS.items():
        own = [r for r in records if isinstance(r.params.get(name), dict)]
        keys = list(dict.fromkeys(key for r in own for key in r.params[name]))
        if own:
            rows = [
                (row_of(r)[1], *(short(r.params[name].get(key, 0)) for key in keys)) for r in own
            ]
            tables.append(f"{title}\n\n{_table(('parameters', *keys), rows)}")
    return tables


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    lines.insert(1, "|" + " --- |" * len(columns))
    return "\n".join(lines)
