"""A request trace through the real cache, request by request in order of arrival: hits by tier, and what they cost.

    python -m sgl_jax_hicache.bench replay --trace FILE --l1-blocks 1000 --l2-blocks 3000 --l3

The trace's blocks are pages of 512 tokens whose KV is one number, checked on every hit. The yardstick is a plain LRU
over blocks of as many blocks as L1, computed beside it. Without --l1-blocks: L1 alone in four sizes, all three levels,
and L2 in growing ratios to L1.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.storage.registry import STORAGE_FACTORIES, StorageFactory
from sgl_jax.srt.mem_cache.hicache.types import Tier

from .record import Record, measured
from .replay_engine import ReplayEngine, ReplayError, Served
from .trace import BLOCK_TOKENS, DEFAULT_TRACE, BlockLru, TraceError, TraceRequest, read_trace

L3_KINDS = ("memory", "file")

_FACTORIES: Mapping[str, Mapping[str, StorageFactory]] = {
    "memory": {"file": lambda root, namespace: MemoryStorage(namespace)},
    "file": STORAGE_FACTORIES,
}

FULL_TRACE_BLOCKS = 121_877
"""Blocks of the whole Mooncake trace, for which the standard sizes are meant; they shrink with a shorter trace."""

L1_BLOCKS = (1_000, 3_000, 10_000, 30_000)
RATIOS = (1.0, 2.0, 3.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Levels:
    """Sizes of the levels in blocks; `l2_blocks` 0: L1 alone; `l3`: what stands below L2, if anything."""

    l1_blocks: int
    l2_blocks: int = 0
    l3: str | None = None

    @property
    def title(self) -> str:
        """Such as "L1+L2+L3"."""
        return "L1" + "+L2" * bool(self.l2_blocks) + "+L3" * bool(self.l3)

    def config(self, folder: Path) -> HiCacheConfig:
        """The flags that give these sizes."""
        if not self.l2_blocks:
            return HiCacheConfig()
        return HiCacheConfig(
            storage=StorageKind.FILE if self.l3 else StorageKind.NONE,
            ratio=self.l2_blocks / self.l1_blocks,
            storage_path=folder,
            prefetch_deadline_s=3600.0,
        )


def replay(
    requests: Sequence[TraceRequest],
    levels: Levels,
    token_lists: bool = False,
    precompile: bool = True,
) -> list[Served]:
    """Serve all requests with a cache of these levels; what each one found. Raises ReplayError.

    Without `precompile` the first requests compile the transfers: the hits are the same, the times are not.
    """
    gc.collect()  # what an earlier replay left is not to be walked through in this one
    with tempfile.TemporaryDirectory(prefix="hicache-replay-") as folder:
        config = levels.config(Path(folder))
        factories = _FACTORIES[levels.l3 or "memory"]
        engine = ReplayEngine(levels.l1_blocks, config, factories, token_lists, precompile)
        try:
            served = [engine.serve(request) for request in requests]
            engine.cache.check_invariants()
        finally:
            engine.close()
    return served


def plain_lru(requests: Sequence[TraceRequest], num_blocks: int) -> tuple[int, list[float]]:
    """Hits of a block LRU, and seconds of each request in it."""
    lru, num_hits, seconds = BlockLru(num_blocks), 0, []
    for request in requests:
        begun_s = time.perf_counter()
        num_hits += lru.serve(request.hash_ids)
        seconds.append(time.perf_counter() - begun_s)
    return num_hits, seconds


def records_of(requests: Sequence[TraceRequest], levels: Levels, token_lists: bool) -> list[Record]:
    """Replay, and the figures of it."""
    served = replay(requests, levels, token_lists)
    num_blocks = sum(s.num_blocks for s in served)
    lru_hits, lru_s = plain_lru(requests, levels.l1_blocks)
    tokens = {tier.value: sum(getattr(s.tiers, tier.value) for s in served) for tier in Tier}
    num_tokens = sum(tokens.values())
    params = {
        "levels": levels.title,
        "l1_blocks": levels.l1_blocks,
        "l2_blocks": levels.l2_blocks,
        "l3": levels.l3 or "none",
        "requests": len(served),
    }
    lru_us = [s * 1e6 for s in lru_s]
    kept = [_blocks_kept(requests, tokens[Tier.COMPUTED.value], params)] if levels.l3 else []
    return [
        *kept,
        Record(
            "replay hit rate",
            100.0 * (num_tokens - tokens[Tier.COMPUTED.value]) / num_tokens,
            "%",
            100.0 * lru_hits / num_blocks,
            params={**params, "tokens": tokens},
        ),
        measured(
            "replay engine thread per request",
            [s.engine_s * 1e6 for s in served],
            "us",
            lru_us,
            **params,
            **_trend([s.engine_s * 1e6 / s.num_blocks for s in served]),
            phases=_phases_us(served),
        ),
        measured(
            "replay engine thread CPU per request",
            [s.cpu_s * 1e6 for s in served],
            "us",
            lru_us,
            **params,
            **_trend([s.cpu_s * 1e6 / s.num_blocks for s in served]),
        ),
    ]


def _blocks_kept(
    requests: Sequence[TraceRequest], computed_tokens: int, params: Mapping[str, Any]
) -> Record:
    """What storage holds at the end: every block that was computed. `asked_again`: those of two requests or more."""
    askers = Counter(block for request in requests for block in set(request.hash_ids))
    asked_again = sum(n > 1 for n in askers.values())
    return Record(
        "replay L3 blocks kept",
        computed_tokens / BLOCK_TOKENS,
        "blocks",
        params={**params, "asked_again": asked_again},
    )


def _trend(us_per_block: Sequence[float]) -> dict[str, float]:
    """In the first and the last tenth of the trace: whether the cost grows with what the cache holds."""
    tenth = max(len(us_per_block) // 10, 1)
    return {
        "us_per_block_first_tenth": float(np.median(us_per_block[:tenth])),
        "us_per_block_last_tenth": float(np.median(us_per_block[-tenth:])),
    }


def _phases_us(served: Sequence[Served]) -> dict[str, float]:
    """Mean us per request of every phase, and of waiting."""
    names = sorted({name for s in served for name in s.phases})
    means = {n: float(np.mean([s.phases.get(n, 0.0) for s in served])) * 1e6 for n in names}
    return {**means, "waited": float(np.mean([s.waited_s for s in served])) * 1e6}


def standard_levels(
    requests: Sequence[TraceRequest], ratios: Sequence[float] = RATIOS
) -> list[Levels]:
    """What is replayed without sizes: the same shares of the trace, whatever its length."""
    scale = sum(len(r.hash_ids) for r in requests) / FULL_TRACE_BLOCKS
    longest = max(len(r.hash_ids) for r in requests)
    sizes = list(dict.fromkeys(max(round(n * scale), longest) for n in L1_BLOCKS))
    smallest = sizes[0]
    return [
        *(Levels(size) for size in sizes),
        *(Levels(smallest, round(smallest * ratio)) for ratio in ratios),
        *(Levels(smallest, 3 * smallest, kind) for kind in L3_KINDS),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, metavar="FILE")
    parser.add_argument("--l1-blocks", type=int, metavar="N", help="device pages")
    parser.add_argument("--l2-blocks", type=int, default=0, metavar="N", help="0: no host pool")
    parser.add_argument(
        "--l3", nargs="?", const="memory", choices=L3_KINDS, help="storage below L2 (memory)"
    )
    parser.add_argument(
        "--token-lists", action="store_true", help="prompts as Python lists, not as int arrays"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="*", default=RATIOS, help="of L2 to L1, without --l1-blocks"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")


def run(args: argparse.Namespace) -> list[Record]:
    """Replay what was asked for. Raises ArgumentTypeError for a wrong option or trace."""
    try:
        requests = read_trace(args.trace)[: args.requests]
        chosen = (
            [_levels(args)]
            if args.l1_blocks is not None
            else standard_levels(requests, args.ratios)
        )
        return [r for levels in chosen for r in records_of(requests, levels, args.token_lists)]
    except (TraceError, ReplayError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _levels(args: argparse.Namespace) -> Levels:
    if args.l1_blocks < 1 or args.l2_blocks < 0:
        raise argparse.ArgumentTypeError("--l1-blocks must be at least 1, --l2-blocks at least 0")
    if args.l3 and not args.l2_blocks:
        raise argparse.ArgumentTypeError("--l3 needs --l2-blocks: storage is read into host memory")
    return Levels(args.l1_blocks, args.l2_blocks, args.l3)
