"""Models with sliding windows and recurrent states: hits against --hicache-ratio and the checkpoint interval, and TTFT.

    python -m sgl_jax_hicache.bench hybrid --size whole --output-dir docs

A trace is replayed with the byte proportions of published models, each beside a model of the same depth whose layers
are all full: with the same bytes of device, host and storage. Tiny models of every kind then show the time to the first
token. --output-dir takes hybrid_bench.md, its pictures and its records. `--size small`, the default, is one
conversation in 64 of the whole trace, and the ratios only. --trace takes any trace of the format. With --from, what
--parts names is measured anew and the rest is shown as it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .hybrid_hits import (
    BOUNDS,
    BY_INTERVAL,
    CAPACITY,
    HITS,
    UNBOUNDED,
    HitBench,
    Plan,
    capacity_records,
    every_nth_conversation,
    unbounded_records,
)
from .hybrid_models import HYBRIDS
from .hybrid_report import write_hybrid_report
from .hybrid_ttft import TTFT, TTFT_AGAIN, Visits, keep_compiled, ttft_records
from .record import RUN, Record, read_json, write_json
from .replay import FULL_TRACE_BLOCKS
from .replay_engine import ReplayError
from .trace import DEFAULT_TRACE, TraceError, TraceRequest, read_trace

DEFAULT_CONVERSATIONS = DEFAULT_TRACE.parent / "mooncake_conversations_16.jsonl"
"""Every sixteenth conversation of the whole trace: a cut that keeps how often prompts come back."""

RATIOS = (0.5, 1.0, 2.0, 4.0)
INTERVALS = (512, 1024, 2048, 4096, 8192)

L1_BLOCKS, L3_BLOCKS = 1_000, 10_000
"""For the whole Mooncake trace; a shorter trace gets as much less, but L1 always room for two of the longest prompt and
L3 twice as much as L1."""

PARTS = {
    "unbounded": (UNBOUNDED, CAPACITY),
    "hits": (HITS,),
    "intervals": (BY_INTERVAL,),
    "ttft": (TTFT, TTFT_AGAIN),
}
"""What can be measured, and the names of its records."""


@dataclass(frozen=True)
class Size:
    """How much is measured if the options do not say: one conversation in `every` of the trace, and these parts."""

    every: int
    parts: tuple[str, ...]


SIZES = {"small": Size(4, ("unbounded", "hits")), "whole": Size(1, tuple(PARTS))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="how much, where nothing else says"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="what to measure")
    parser.add_argument("--trace", type=Path, default=DEFAULT_CONVERSATIONS, metavar="FILE")
    parser.add_argument("--every", type=int, metavar="N", help="of the trace one conversation in N")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, metavar="R")
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=INTERVALS,
        metavar="N",
        help="tokens between checkpoints to compare",
    )
    parser.add_argument(
        "--models", nargs="+", metavar="WORD", help="only those with it in their names"
    )
    parser.add_argument(
        "--l3", nargs="+", choices=BOUNDS, default=["bounded"], help="what stands below L2"
    )
    parser.add_argument(
        "--l1-blocks", type=int, metavar="N", help="device, in blocks of a full model"
    )
    parser.add_argument("--l3-blocks", type=int, metavar="N", help="bound of L3, likewise")
    parser.add_argument("--page-size", type=int, default=512, metavar="N", help="tokens")
    parser.add_argument(
        "--prompts", type=int, default=Visits.num_prompts, metavar="N", help="for TTFT"
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="for the report")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="records to show of what is not measured",
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Replay and measure what was asked for. Raises ArgumentTypeError for a wrong option or trace."""
    parts = _parts(args)
    records = _read(args.sources or ())
    measured_anew = {name for part in parts for name in PARTS[part]}
    records = [r for r in records if r.name not in measured_anew]
    if "ttft" in parts:
        keep_compiled()
    try:
        if {"unbounded", "hits", "intervals"} & set(parts):
            records += _replayed(args, parts)
    except (TraceError, ReplayError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if "ttft" in parts:
        if min(args.prompts, *args.ratios) <= 0:
            raise argparse.ArgumentTypeError("--prompts and --ratios must be above 0")
        records += ttft_records(args.ratios, Visits(num_prompts=args.prompts))
    return records


def write_report(args: argparse.Namespace, records: Sequence[Record]) -> None:
    """hybrid_bench.md, its pictures and its records, if a folder was named."""
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        records = list(map(_without_path, records))
        written = write_hybrid_report(records, args.output_dir)
        written.append(args.output_dir / "hybrid_bench.json")
        write_json(records, written[-1])
        print(f"Written: {', '.join(map(str, written))}")


def _without_path(record: Record) -> Record:
    """Where the records were written is nothing that a reader could use."""
    run = record.params[RUN]
    command = run["command"].partition(" --json ")[0].partition(" --output-dir ")[0]
    return replace(record, params={**record.params, RUN: {**run, "command": command}})


def _parts(args: argparse.Namespace) -> tuple[str, ...]:
    if args.parts is not None:
        return tuple(args.parts)
    return () if args.sources is not None else SIZES[args.size].parts


def _replayed(args: argparse.Namespace, parts: Sequence[str]) -> list[Record]:
    every = SIZES[args.size].every if args.every is None else args.every
    if every < 1:
        raise argparse.ArgumentTypeError("--every must be at least 1")
    if min(args.ratios) <= 0 or min((args.page_size, *args.intervals)) < 1:
        raise argparse.ArgumentTypeError("--ratios, --intervals and --page-size must be above 0")
    requests = every_nth_conversation(read_trace(args.trace), every)[: args.requests]
    records: list[Record] = []
    if "unbounded" in parts:
        records += unbounded_records(requests, args.intervals)
        records += capacity_records(HYBRIDS, args.intervals, args.page_size)
    for l3 in args.l3:
        bench = HitBench(requests, _plan(args, requests, l3))
        if "hits" in parts:
            records += bench.by_ratio(args.ratios)
        if "intervals" in parts and l3 == args.l3[0]:
            records += bench.by_interval(args.intervals)
    return records


def _plan(args: argparse.Namespace, requests: Sequence[TraceRequest], l3: str) -> Plan:
    scale = sum(len(r.hash_ids) for r in requests) / FULL_TRACE_BLOCKS
    longest = max(len(r.hash_ids) for r in requests)
    words = args.models or [""]
    models = tuple(model for model in HYBRIDS if any(word in model.name for word in words))
    if not models:
        raise argparse.ArgumentTypeError(f"--models: none of {[m.name for m in HYBRIDS]}")
    l1_blocks = args.l1_blocks or max(round(L1_BLOCKS * scale), 2 * longest)
    return Plan(
        l1_blocks,
        args.l3_blocks or max(round(L3_BLOCKS * scale), 2 * l1_blocks),
        args.page_size,
        models,
        l3,
    )


def _read(sources: Sequence[Path]) -> list[Record]:
    try:
        return [record for source in sources for record in read_json(source)]
    except (OSError, ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"--from: no records: {error}") from error
