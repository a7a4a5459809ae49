"""What the prefix tree costs, and whether it grows with the number of nodes: evict, match, insert, bytes per node.

    python -m sgl_jax_hicache.bench.tree [--json FILE] [--leaves N ...]

No device and no lower tiers: slots are numbers. Each figure is the median over repeats, with P90.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from sgl_jax_hicache import overlay

overlay.activate()

from sgl_jax.srt.mem_cache.hicache.builder import (  # noqa: E402
    ModelIdentity,
    build_unified_radix_cache,
)
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig  # noqa: E402
from sgl_jax.srt.mem_cache.hicache.tree_types import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sgl_jax_hicache.provenance import commit, machine  # noqa: E402


class CountingAllocator:
    """Device slots that are only counted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_freed = 0

    def alloc(self, need_size: int, dp_rank: int = 0) -> Any:
        """Never asked for: the benchmark brings its own slots."""
        raise RuntimeError("the benchmark loads nothing")

    def free(self, free_index: Any, dp_rank: int = 0) -> None:
        """Count."""
        self.num_freed += len(free_index)

    def available_size(self, dp_rank: int = 0) -> int:
        """None: what is evicted is gone."""
        return 0

    def get_kvcache(self) -> Any:
        """There is none."""
        return None


class NoRequests:
    """A request table without rows."""

    req_to_token = np.empty((0, 0), np.int32)

    def write(self, indices: Any, values: Any) -> None:
        """Never called: the benchmark inserts directly."""
        raise RuntimeError("the benchmark has no requests")


@dataclass(frozen=True)
class Figure:
    """One measurement; `samples` are per operation."""

    name: str
    value: float
    p90: float
    unit: str
    params: dict[str, object]


def new_tree(page_size: int) -> UnifiedRadixCache:
    """A cache without lower tiers."""
    return build_unified_radix_cache(
        HiCacheConfig(),
        req_to_token_pool=NoRequests(),
        token_to_kv_pool_allocator=CountingAllocator(page_size),
        page_size=page_size,
        model_identity=ModelIdentity("bench", "0"),
    )


def insert(tree: UnifiedRadixCache, token_ids: Sequence[int]) -> None:
    """Insert a prompt with made-up slots."""
    slots = np.arange(len(token_ids), dtype=np.int32)
    tree.insert(InsertParams(RadixKey(token_ids), slots))


def seconds(action: Callable[[], object], repeats: int) -> list[float]:
    """Wall time of each repeat."""
    spent = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        action()
        spent.append(time.perf_counter() - begun_s)
    return spent


def figure(name: str, samples: Sequence[float], unit: str, **params: object) -> Figure:
    """Median and P90 of samples."""
    return Figure(name, float(np.median(samples)), float(np.percentile(samples, 90)), unit, params)


def measure_leaves(num_leaves: int, page_size: int = 16) -> list[Figure]:
    """Evict and match in a tree of that many two-page prompts under a shared first page."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    tree = new_tree(page_size)
    shared = list(range(page_size))
    for leaf in range(num_leaves):
        insert(tree, [*shared, *range(1000 + leaf, 1000 + leaf + page_size)])
    held = psutil.Process().memory_info().rss - before
    some = [*shared, *range(1000, 1000 + page_size), 7]
    match = seconds(lambda: tree.match_prefix(MatchPrefixParams(RadixKey(some))), 2000)
    evict = seconds(lambda: tree.evict(EvictParams(page_size)), min(num_leaves // 2, 2000))
    return [
        figure("evict one node", [s * 1e6 for s in evict], "us", leaves=num_leaves),
        figure("match a 32-token prefix", [s * 1e6 for s in match], "us", leaves=num_leaves),
        figure("memory per node", [held / (num_leaves + 1)], "bytes", leaves=num_leaves),
    ]


def measure_match(num_tokens: int = 32768, page_size: int = 64) -> list[Figure]:
    """Match of a long prompt that is all there, from an int array and from a list."""
    tree = new_tree(page_size)
    array = np.random.default_rng(0).integers(0, 100_000, num_tokens + 1)
    insert(tree, array[:num_tokens].tolist())
    figures = []
    for kind, token_ids in (("array", array), ("list", array.tolist())):
        key = RadixKey(token_ids)
        spent = seconds(lambda key=key: tree.match_prefix(MatchPrefixParams(key)), 200)  # type: ignore[misc]
        rates = [num_tokens / s / 1e6 for s in spent]
        figures.append(
            figure(f"match 32k tokens from a {kind}", rates, "M tokens/s", page_size=page_size)
        )
    return figures


def measure_insert(num_prompts: int = 30_000, page_size: int = 16) -> list[Figure]:
    """Insert 1,024-token prompts of which 512 are shared."""
    tree = new_tree(page_size)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100_000, 512).tolist()
    tails = rng.integers(0, 100_000, (num_prompts, 512)).tolist()
    rates = []
    for first in range(0, num_prompts, 1000):
        batch = tails[first : first + 1000]
        begun_s = time.perf_counter()
        for tail in batch:
            insert(tree, shared + tail)
        rates.append(len(batch) / (time.perf_counter() - begun_s) / 1e3)
    return [
        figure("insert 1,024-token prompts, 512 shared", rates, "thousand/s", prompts=num_prompts)
    ]


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--leaves", type=int, nargs="+", default=[1_000, 30_000, 300_000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    figures = [f for num_leaves in args.leaves for f in measure_leaves(num_leaves)]
    figures += measure_match() + measure_insert()
    print(f"command  python -m sgl_jax_hicache.bench.tree {shlex.join(argv)}")
    print(f"machine  {machine()}\ncommit   {commit()}")
    for f in figures:
        print(f"{f.name:42}{f.value:12.2f} {f.unit:12} P90 {f.p90:10.2f}  {f.params}")
    if args.json:
        record = {"machine": machine(), "commit": commit(), "figures": [asdict(f) for f in figures]}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
