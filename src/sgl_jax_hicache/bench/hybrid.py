"""Models with sliding windows and recurrent states: hits against --hicache-ratio and the checkpoint interval, and TTFT.

    python -m sgl_jax_hicache.bench hybrid --trace FILE --output-dir docs

A trace is replayed with the byte proportions of published models, each beside a model of the same depth whose layers
are all full: with the same bytes of device, host and storage. Tiny models of every kind then show the time to the first
token. --output-dir takes hybrid_bench.md and its pictures. The default trace is small; --trace takes any of its format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .hybrid_models import FULL, HYBRIDS, HybridModel
from .hybrid_replay import Memory, Replayed, replay_hybrid
from .hybrid_report import write_hybrid_report
from .hybrid_ttft import PRESETS, Visits, visit
from .record import Record, measured, read_json
from .replay import FULL_TRACE_BLOCKS
from .replay_engine import ReplayError
from .trace import DEFAULT_TRACE, TraceError, TraceRequest, read_trace

DEFAULT_CONVERSATIONS = DEFAULT_TRACE.parent / "mooncake_conversations_16.jsonl"
"""Every sixteenth conversation of the whole trace: a cut that keeps how often prompts come back."""

RATIOS = (0.5, 1.0, 2.0, 4.0)
INTERVALS = (512, 1024, 2048, 4096, 8192)
INTERVALS_RATIO = 2.0
"""The ratio with which intervals are compared."""

L1_BLOCKS, L3_BLOCKS = 1_000, 10_000
"""For the whole Mooncake trace; a shorter trace gets as much less."""

BOUNDS = {"bounded": 1.0, "none": None, "unbounded": 0.0}
"""What stands below L2, as a multiple of the bound; 0: no bound."""


@dataclass(frozen=True)
class Plan:
    """What is replayed: sizes in blocks of a model whose layers are all full."""

    l1_blocks: int
    l3_blocks: int
    page_size: int
    models: tuple[HybridModel, ...]

    def memory(self, ratio: float, l3: str, interval: int | None = None) -> Memory:
        """Sizes of one replay; `l3` is a name in BOUNDS."""
        share = BOUNDS[l3]
        return Memory(
            self.l1_blocks,
            ratio,
            l3_blocks=None if share is None else round(share * self.l3_blocks),
            interval=interval,
            page_size=self.page_size,
        )


def hit_records(
    requests: Sequence[TraceRequest], plan: Plan, ratios: Sequence[float], l3: str
) -> Iterator[Record]:
    """Hit tokens of every kind at every ratio; the limit is what a model finds whose layers are all full."""
    for ratio in ratios:
        bound = replay_hybrid(requests, FULL, plan.memory(ratio, l3))
        yield _hits("hybrid hit tokens", FULL, plan, ratio, l3, bound, bound)
        for model in plan.models:
            found = replay_hybrid(requests, model, plan.memory(ratio, l3))
            yield _hits("hybrid hit tokens", model, plan, ratio, l3, found, bound)


def interval_records(
    requests: Sequence[TraceRequest], plan: Plan, intervals: Sequence[int], l3: str
) -> Iterator[Record]:
    """Hit tokens of every kind at every interval, beside the same limit."""
    bound = replay_hybrid(requests, FULL, plan.memory(INTERVALS_RATIO, l3))
    for model in plan.models:
        for interval in (None, *intervals):
            memory = plan.memory(INTERVALS_RATIO, l3, interval)
            found = replay_hybrid(requests, model, memory)
            name = "hybrid hit tokens by interval"
            record = _hits(name, model, plan, INTERVALS_RATIO, l3, found, bound)
            record.params["chosen"] = interval is None
            yield record


def _hits(
    name: str,
    model: HybridModel,
    plan: Plan,
    ratio: float,
    l3: str,
    found: Replayed,
    bound: Replayed,
) -> Record:
    def percent(replayed: Replayed) -> float:
        return 100.0 * replayed.cached / sum(replayed.tokens.values())

    return Record(
        name,
        percent(found),
        "%",
        percent(bound),
        params={
            "model": model.name,
            "hicache_ratio": ratio,
            "l3": l3,
            "l1_blocks": plan.l1_blocks,
            "l3_blocks": plan.l3_blocks if l3 == "bounded" else 0,
            "page_size": plan.page_size,
            "requests": len(found.tiers),
            "interval": found.interval,
            "tokens": found.tokens,
        },
    )


def ttft_records(ratios: Sequence[float], visits: Visits) -> Iterator[Record]:
    """Time to the first token of tiny models, from each tier and on the whole; the limit is that of computing."""
    for kind, preset in PRESETS.items():
        for ratio in ratios:
            visited = visit(preset, ratio, visits)
            computed = [v.seconds * 1e3 for v in visited.first]
            params = {
                "kind": kind,
                "model": preset,
                "hicache_ratio": ratio,
                "prompt_tokens": visits.prompt_tokens,
                "l1_tokens": visits.device_tokens,
            }
            tiers = {
                tier: sum(v.tokens[tier] for v in visited.again) for tier in visited.again[0].tokens
            }
            yield measured(
                "hybrid TTFT, asked again",
                [v.seconds * 1e3 for v in visited.again],
                "ms",
                computed,
                **params,
                tokens=tiers,
            )
            for served_from in ("computed", "host", "storage"):
                seconds = visited.seconds(served_from)
                if seconds:
                    yield measured(
                        "hybrid TTFT",
                        [s * 1e3 for s in seconds],
                        "ms",
                        computed,
                        **params,
                        served_from=served_from,
                    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--trace", type=Path, default=DEFAULT_CONVERSATIONS, metavar="FILE")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, metavar="R")
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="*",
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
        "--prompts", type=int, default=Visits.num_prompts, metavar="N", help="for TTFT; 0: no TTFT"
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="for the report")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="records to show instead",
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Replay and measure what was asked for. Raises ArgumentTypeError for a wrong option or trace."""
    if args.sources is not None:
        return _read(args.sources)
    records: list[Record] = []
    try:
        requests = read_trace(args.trace)[: args.requests]
        plan = _plan(args, requests)
        for l3 in args.l3:
            records += hit_records(requests, plan, args.ratios, l3)
        if args.intervals:
            records += interval_records(requests, plan, args.intervals, args.l3[0])
    except (TraceError, ReplayError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if args.prompts:
        records += ttft_records(args.ratios, Visits(num_prompts=args.prompts))
    return records


def write_report(args: argparse.Namespace, records: Sequence[Record]) -> None:
    """hybrid_bench.md and its pictures, if a folder was named."""
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        print(f"Written: {', '.join(map(str, write_hybrid_report(records, args.output_dir)))}")


def _plan(args: argparse.Namespace, requests: Sequence[TraceRequest]) -> Plan:
    scale = sum(len(r.hash_ids) for r in requests) / FULL_TRACE_BLOCKS
    longest = max(len(r.hash_ids) for r in requests)
    words = args.models or [""]
    models = tuple(model for model in HYBRIDS if any(word in model.name for word in words))
    if not models:
        raise argparse.ArgumentTypeError(f"--models: none of {[m.name for m in HYBRIDS]}")
    if min(args.ratios) <= 0 or min((args.page_size, *args.intervals)) < 1:
        raise argparse.ArgumentTypeError("--ratios, --intervals and --page-size must be above 0")
    return Plan(
        args.l1_blocks or max(round(L1_BLOCKS * scale), 2 * longest),
        args.l3_blocks or round(L3_BLOCKS * scale),
        args.page_size,
        models,
    )


def _read(sources: Sequence[Path]) -> list[Record]:
    try:
        return [record for source in sources for record in read_json(source)]
    except (OSError, ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"--from: no records: {error}") from error
