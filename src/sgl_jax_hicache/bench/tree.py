"""What the prefix tree costs: a match of a long prompt that is all there, and inserting many prompts that share a part.

No device and no lower tiers: slots are numbers. The limit of a match is encoding the tokens and comparing them once.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.token_key import TokenCodec, TokenIds
from sgl_jax.srt.mem_cache.hicache.tree_types import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .record import Record, measured, rates, seconds_of, side_by_side

PAGE_SIZE = 16
LONG_PAGE_SIZE = 64


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


def new_tree(page_size: int) -> UnifiedRadixCache:
    """A cache without lower tiers."""
    return build_unified_radix_cache(
        HiCacheConfig(),
        req_to_token_pool=NoRequests(),
        token_to_kv_pool_allocator=CountingAllocator(page_size),
        page_size=page_size,
        model_identity=ModelIdentity("bench", "0"),
    )


def insert(tree: UnifiedRadixCache, token_ids: TokenIds) -> None:
    """Insert a prompt with made-up slots."""
    tree.insert(InsertParams(RadixKey(token_ids), made_up_slots(len(token_ids))))


@cache
def made_up_slots(num_tokens: int) -> npt.NDArray[np.int32]:
    """Device slots such as an engine has at hand when it inserts."""
    return np.arange(num_tokens, dtype=np.int32)


def insert_all(tree: UnifiedRadixCache, prompts: Sequence[TokenIds]) -> None:
    """Insert prompt after prompt."""
    for prompt in prompts:
        insert(tree, prompt)


def tree_of(num_leaves: int) -> UnifiedRadixCache:
    """A tree of that many two-page prompts under a shared first page."""
    tree = new_tree(PAGE_SIZE)
    shared = list(range(PAGE_SIZE))
    for leaf in range(num_leaves):
        insert(tree, [*shared, *range(1000 + leaf, 1000 + leaf + PAGE_SIZE)])
    return tree


def measure_leaves(sizes: Sequence[int], repeats: int = 2000) -> list[Record]:
    """Match, insert and evict in trees of every size, in turns; bytes per node. The limit is the smallest tree."""
    trees, held_bytes = [], []
    for num_leaves in sizes:
        gc.collect()
        before = psutil.Process().memory_info().rss
        trees.append(tree_of(num_leaves))
        held_bytes.append(psutil.Process().memory_info().rss - before)
    prompt = RadixKey([*range(PAGE_SIZE), *range(1000, 1000 + PAGE_SIZE), 7])
    matches = [_match(tree, prompt) for tree in trees]
    inserts = [_insert_next(tree) for tree in trees]
    evictions = [lambda tree=tree: tree.evict(EvictParams(PAGE_SIZE)) for tree in trees]
    few = min(repeats, min(sizes) // 2)  # so that the smallest tree stays about as large as it is
    records = [
        *_growth("tree match, 32 tokens", matches, sizes, repeats),
        *_growth("tree insert one node", inserts, sizes, few),
        *_growth("tree evict one node", evictions, sizes, few),
    ]
    for num_leaves, held in zip(sizes, held_bytes, strict=True):
        records.append(
            Record(
                "tree memory", held / (num_leaves + 1), "bytes/node", params={"leaves": num_leaves}
            )
        )
    return records


def _match(tree: UnifiedRadixCache, key: RadixKey) -> Callable[[], object]:
    return lambda: tree.match_prefix(MatchPrefixParams(key))


def _insert_next(tree: UnifiedRadixCache) -> Callable[[], object]:
    """Insert one more two-page prompt under the shared first page, another one each time."""
    shared = list(range(PAGE_SIZE))
    firsts = count(1 << 32)  # beyond the tokens of any leaf
    return lambda: insert(tree, [*shared, *range(first := next(firsts), first + PAGE_SIZE)])


def _growth(
    name: str, actions: Sequence[Callable[[], object]], sizes: Sequence[int], repeats: int
) -> list[Record]:
    spent = [[s * 1e6 for s in seconds] for seconds in side_by_side(actions, repeats)]
    return [
        measured(name, us, "us", spent[0], leaves=size)
        for us, size in zip(spent, sizes, strict=True)
    ]


def measure_match(num_tokens: int, repeats: int = 200) -> list[Record]:
    """Match of a long prompt that is all there, from an int array and from a list."""
    tree, codec = new_tree(LONG_PAGE_SIZE), TokenCodec(LONG_PAGE_SIZE)
    array = np.random.default_rng(0).integers(0, 100_000, num_tokens + 1)
    insert(tree, array[:num_tokens])
    known = codec.encode(array)
    records = []
    kinds: dict[str, TokenIds] = {"array": array, "list": array.tolist()}
    for kind, token_ids in kinds.items():
        actions = (
            _match(tree, RadixKey(token_ids)),
            lambda token_ids=token_ids: codec.encode(token_ids) == known,
        )
        match, bare = (rates(num_tokens / 1e6, s) for s in side_by_side(actions, repeats))
        params = {"tokens": num_tokens, "page_size": LONG_PAGE_SIZE, "given_as": kind}
        records.append(measured("tree match, all there", match, "M tokens/s", bare, **params))
    return records


def measure_insert(num_prompts: int) -> list[Record]:
    """Insert 1,024-token prompts of which 512 are shared, from lists and from int arrays."""
    rng = np.random.default_rng(0)
    shared = np.tile(rng.integers(0, 100_000, 512), (num_prompts, 1))
    prompts = np.concatenate([shared, rng.integers(0, 100_000, (num_prompts, 512))], axis=1)
    records = []
    for kind in ("array", "list"):
        tree, samples = new_tree(PAGE_SIZE), []
        for first in range(0, num_prompts, 1000):
            rows = prompts[first : first + 1000]
            batch: Sequence[TokenIds] = list(rows) if kind == "array" else rows.tolist()
            took_s = seconds_of(partial(insert_all, tree, batch))
            samples.append(len(batch) / took_s / 1e3)
        params: dict[str, Any] = {"prompts": num_prompts, "page_size": PAGE_SIZE, "given_as": kind}
        records.append(
            measured("tree insert, 512 of 1,024 shared", samples, "thousand/s", **params)
        )
    return records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--prompts", type=int, default=30_000, help="prompts to insert")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of the long match")


def run(args: argparse.Namespace) -> list[Record]:
    """All of it."""
    return [*measure_match(args.tokens), *measure_insert(args.prompts)]
