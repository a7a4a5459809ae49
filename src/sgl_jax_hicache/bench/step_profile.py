"""What the cache costs of a scheduler step while 64 requests run, by the calls that the scheduler makes.

Every call of the cache is timed on the scheduler thread. The decode steps are those between the last prompt's end and
the first answer's: all requests take part in all of them. The same work without HiCache is the limit of the step. No
prompt comes twice, so every page is backed up and written, and none is found.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

from .record import Record, measured

PAGE_SIZE = 16
_SHARED_STEPS = 8
"""Decode steps that all requests take part in, at least."""

_WAITING = frozenset({"wait_events"})
"""Calls that wait because there is nothing else to do."""


@dataclass(frozen=True)
class Call:
    """One call of the cache: when it began, on the clock of `time.perf_counter`, and how long it took."""

    name: str
    begun_s: float
    seconds: float


class TimedTree:
    """A cache whose calls are written down. The scheduler thread calls, and others read when it rests."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tree, name)
        if not callable(value) or name in _WAITING:
            return value
        timed = self._timed(name, value)
        setattr(self, name, timed)  # so that the next call does not come here
        return timed

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls.append(Call(name, begun_s, time.perf_counter() - begun_s))

        return timed


@dataclass(frozen=True)
class Profile:
    """One run: seconds of the decode steps that all requests took part in, the cache's calls in them and in all."""

    steps_s: tuple[float, ...]
    in_steps: tuple[Call, ...]
    in_all: tuple[Call, ...]

    def us_per_step(self) -> dict[str, float]:
        """Of the decode steps, by call, the dearest first."""
        return _us_by_name(self.in_steps, len(self.steps_s))

    def us_per_request(self, num_requests: int) -> dict[str, float]:
        """From arrival to end, by call, the dearest first."""
        return _us_by_name(self.in_all, num_requests)


def profile(
    engine: Engine, tree: TimedTree, num_requests: int, prompt_len: int, new_tokens: int
) -> Profile:
    """Serve fresh prompts side by side. Raises RuntimeError if one of them hit, or never did all run at once."""
    rng = np.random.default_rng()
    prompts = rng.integers(3, 250, (num_requests, prompt_len)).tolist()
    tree.calls.clear()
    results = engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": new_tokens, "ignore_eos": True}
    )
    if any(result["meta_info"]["cached_tokens"] for result in results):
        raise RuntimeError("a fresh prompt hit the cache")
    while engine.get_server_info()["state"]["pending_transfers"]:
        time.sleep(0.001)
    calls = tuple(tree.calls)
    begins = [call.begun_s for call in calls if call.name == "flush_write_through_acks"]
    first = max(c.begun_s + c.seconds for c in calls if c.name == "cache_unfinished_req")
    last = min(c.begun_s for c in calls if c.name == "cache_finished_req")
    edges = [begun_s for begun_s in begins if first <= begun_s <= last]
    if len(edges) < 2:
        raise RuntimeError(f"the {num_requests} requests never ran all at once")
    steps = [after - before for before, after in pairwise(edges)]
    inside = tuple(call for call in calls if edges[0] <= call.begun_s < edges[-1])
    return Profile(tuple(steps), inside, calls)


def _us_by_name(calls: Sequence[Call], num_parts: int) -> dict[str, float]:
    us: dict[str, float] = {}
    for call in calls:
        us[call.name] = us.get(call.name, 0.0) + call.seconds * 1e6 / num_parts
    return dict(sorted(us.items(), key=lambda item: -item[1]))


def measure(args: argparse.Namespace, hicache: HiCacheConfig) -> Profile:
    """One engine with the cache on or off; the first of two runs is not counted."""
    per_request = -(-(args.prompt_len + args.new_tokens) // PAGE_SIZE) * PAGE_SIZE
    trees: list[TimedTree] = []

    def watch(tree: Any) -> Any:
        trees.append(TimedTree(tree))
        return trees[0]

    settings = EngineArgs(
        model_path=args.model_path,
        page_size=PAGE_SIZE,
        max_total_tokens=(args.requests + 2) * per_request,
        max_running_requests=args.requests,
        hicache=hicache,
    )
    with build_engine(settings, watch=watch) as engine:
        profile(engine, trees[0], 2, args.prompt_len, args.new_tokens)
        return profile(engine, trees[0], args.requests, args.prompt_len, args.new_tokens)


def records_of(args: argparse.Namespace) -> Iterator[Record]:
    """On and off, and what the calls of the one with the cache cost."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        storage = HiCacheConfig(storage=StorageKind.FILE, storage_path=Path(folder) / "l3")
        on, off = measure(args, storage), measure(args, HiCacheConfig())
    params = {
        "model": args.model_path,
        "requests": args.requests,
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
    }
    step_us = [s * 1e6 for s in on.steps_s]
    yield measured(
        "scheduler step, HiCache on", step_us, "us", [s * 1e6 for s in off.steps_s], **params
    )
    for hicache, found in (("on", on), ("off", off)):
        per_step, per_request = found.us_per_step(), found.us_per_request(args.requests)
        yield Record(
            "cache in a decode step",
            sum(per_step.values()),
            "us",
            float(np.median(found.steps_s)) * 1e6,
            params={**params, "hicache": hicache, "per_step_us": per_step},
        )
        yield Record(
            "cache in a request",
            sum(per_request.values()),
            "us",
            params={**params, "hicache": hicache, "per_request_us": per_request},
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=48)


def run(args: argparse.Namespace) -> list[Record]:
    """Both runs. Raises ArgumentTypeError if the requests cannot all be running at once."""
    prefill_steps = -(-args.requests * args.prompt_len // EngineArgs.chunked_prefill_size)
    fewest = prefill_steps + _SHARED_STEPS  # prompts and answers take turns
    if args.requests < 1 or args.new_tokens < fewest:
        raise argparse.ArgumentTypeError(f"--new-tokens must be at least {fewest}")
    return list(records_of(args))
