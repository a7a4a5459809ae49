"""Hit tokens of hybrid models on a trace, beside those of a model of the same depth whose layers are all full."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .hybrid_models import FULL, HybridModel
from .hybrid_pools import chosen_interval, tokens_in_same_bytes
from .hybrid_replay import Memory, Replayed, replay_hybrid
from .record import Record
from .trace import BLOCK_TOKENS, TraceRequest

HITS, BY_INTERVAL = "hybrid hit tokens", "hybrid hit tokens by interval"
UNBOUNDED = "hybrid hit tokens, memory without bounds"
CAPACITY = "hybrid tokens in the same bytes"

INTERVALS_RATIO = 2.0
"""The ratio with which intervals are compared."""

BOUNDS = {"bounded": 1.0, "none": None, "unbounded": 0.0}
"""What stands below L2, as a multiple of the bound; 0: no bound."""


@dataclass(frozen=True)
class Plan:
    """What is replayed: sizes in blocks of a model whose layers are all full. `l3`: a name in BOUNDS."""

    l1_blocks: int
    l3_blocks: int
    page_size: int
    models: tuple[HybridModel, ...]
    l3: str

    def memory(self, ratio: float, interval: int | None = None) -> Memory:
        """Sizes of one replay."""
        share = BOUNDS[self.l3]
        return Memory(
            self.l1_blocks,
            ratio,
            l3_blocks=None if share is None else round(share * self.l3_blocks),
            interval=interval,
            page_size=self.page_size,
        )


def every_nth_conversation(requests: Sequence[TraceRequest], every: int) -> list[TraceRequest]:
    """Whole conversations, one in `every`, numbered by first arrival: so prompts come back as often as in the trace.

    A conversation is the requests with the same first block.
    """
    numbers: dict[int, int] = {}
    for request in requests:
        numbers.setdefault(request.hash_ids[0], len(numbers))
    return [r for r in requests if numbers[r.hash_ids[0]] % every == 0]


def unbounded_records(
    requests: Sequence[TraceRequest], intervals: Sequence[int]
) -> Iterator[Record]:
    """What a cache that forgets nothing finds if prompts resume at multiples of an interval only, as with states; the
    limit is what it finds at every block. Counted, not replayed: whole traces take a second."""
    num_tokens = sum(len(r.hash_ids) for r in requests) * BLOCK_TOKENS
    reusable = list(_reusable_tokens(requests))
    for interval in intervals:
        found = sum(tokens // interval * interval for tokens in reusable)
        params = {"interval": interval, "requests": len(requests)}
        shares = (100.0 * found / num_tokens, 100.0 * sum(reusable) / num_tokens)
        yield Record(UNBOUNDED, shares[0], "%", shares[1], params=params)


def _reusable_tokens(requests: Sequence[TraceRequest]) -> Iterator[int]:
    """Of each prompt, the tokens of its leading blocks that an earlier one had, one block left to compute at least."""
    seen: set[int] = set()
    for request in requests:
        ids = request.hash_ids
        reused = next((i for i, block in enumerate(ids) if block not in seen), len(ids) - 1)
        seen.update(ids)
        yield min(reused, len(ids) - 1) * BLOCK_TOKENS


def capacity_records(
    models: Sequence[HybridModel], intervals: Sequence[int], page_size: int
) -> Iterator[Record]:
    """Tokens that the same host memory keeps, in units of those of a model whose layers are all full. Computed."""
    for model in models:
        chosen = chosen_interval(model, page_size)
        for interval in dict.fromkeys((*intervals, chosen)):
            params = {"model": model.name, "interval": interval, "chosen": interval == chosen}
            kept = tokens_in_same_bytes(model, page_size, interval)
            yield Record(CAPACITY, kept, "x full", params={**params, "page_size": page_size})


class HitBench:
    """Replays one trace with one plan. What was replayed once is not replayed again; says on stderr how far it is."""

    def __init__(self, requests: Sequence[TraceRequest], plan: Plan) -> None:
        self._requests = requests
        self._plan = plan
        self._found: dict[tuple[HybridModel, Memory], Replayed] = {}

    def by_ratio(self, ratios: Sequence[float]) -> Iterator[Record]:
        """Hit tokens of every kind at every ratio; the limit is what a model finds whose layers are all full."""
        for ratio in ratios:
            for model in (FULL, *self._plan.models):
                yield self._record(HITS, model, ratio)

    def by_interval(self, intervals: Sequence[int]) -> Iterator[Record]:
        """Hit tokens of every kind at every interval and at that which the cache chooses, beside the same limit."""
        for model in self._plan.models:
            for interval in (None, *intervals):
                record = self._record(BY_INTERVAL, model, INTERVALS_RATIO, interval)
                record.params["chosen"] = interval is None
                yield record

    def _record(
        self, name: str, model: HybridModel, ratio: float, interval: int | None = None
    ) -> Record:
        plan = self._plan
        found = self._replay(model, plan.memory(ratio, interval))
        bound = self._replay(FULL, plan.memory(ratio))
        params = {
            "model": model.name,
            "hicache_ratio": ratio,
            "l3": plan.l3,
            "l1_blocks": plan.l1_blocks,
            "l3_blocks": plan.l3_blocks if plan.l3 == "bounded" else 0,
            "page_size": plan.page_size,
            "requests": len(found.tiers),
            "interval": found.interval,
            "tokens": found.tokens,
        }
        return Record(name, _percent(found), "%", _percent(bound), params=params)

    def _replay(self, model: HybridModel, memory: Memory) -> Replayed:
        found = self._found.get((model, memory))
        if found is None:
            begun_s = time.perf_counter()
            found = self._found[model, memory] = replay_hybrid(self._requests, model, memory)
            took = f"{_percent(found):.1f} % hit, {time.perf_counter() - begun_s:.0f} s"
            interval = f", states every {found.interval}" if found.interval else ""
            print(f"{model.name}, ratio {memory.l2_ratio:g}{interval}: {took}", file=sys.stderr)
        return found


def _percent(replayed: Replayed) -> float:
    return 100.0 * replayed.cached / sum(replayed.tokens.values())
