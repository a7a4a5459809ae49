"""Waiting for files: hits and time to the first token by prefetch policy, on disks of several speeds.

    python -m sgl_jax_hicache.bench prefetch --read-rates 0.1 0.5 2 --compute-rate 8000

The real cache serves a request trace whose pages are all in storage: a server after a restart. The disk and the device
are simulated, and so is time: the disk reads page after page at a given rate, the device computes one prompt after the
other at a given rate, and requests arrive as in the trace. So the figures are the same on every machine. A page's KV is
one number, checked on every hit; `--token-bytes` says how large it would be.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax

from sgl_jax.srt.mem_cache.hicache.async_impl import (
    Completion,
    DeviceJob,
    IoJob,
    IoLane,
    TransferExecutor,
)
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, PrefetchPolicy, StorageKind
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens

from .record import Record, measured
from .replay_engine import ReplayEngine, ReplayError
from .trace import BLOCK_TOKENS, DEFAULT_TRACE, TraceError, TraceRequest, read_trace

LOOKUP_S = 0.001
_SLICE_S = 0.01  # how often a request that waits is looked at, in simulated seconds


class Shelf(MemoryStorage):
    """A storage that outlives the cache that closes it, as files do."""

    def close(self) -> None:
        """Stays open."""


class SimulatedDisk:
    """A `TransferExecutor` to its caller, in simulated time. Reads and look-ups are done one after the other and take
    their time; copies and writes take none."""

    def __init__(self, seconds_per_page: float) -> None:
        self.now_s = 0.0
        self._seconds_per_page = seconds_per_page
        self._free_at_s = 0.0
        self._under_way: list[tuple[float, int, Completion]] = []
        self._done: list[Completion] = []

    def clock(self) -> float:
        """Simulated seconds."""
        return self.now_s

    @property
    def num_in_flight(self) -> int:
        """Jobs whose completion was not handed out yet."""
        return len(self._under_way) + len(self._done)

    @property
    def next_end_s(self) -> float:
        """When the next read ends; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def submit_device(self, job: DeviceJob) -> None:
        """Done at once."""
        jax.block_until_ready(job.start())  # type: ignore[no-untyped-call]
        self._done.append(Completion(job.transfer_id, job.finish(), None, 0.0))

    def submit_io(self, job: IoJob) -> None:
        """A write is done at once, a read when the disk has come to it."""
        completion = Completion(job.transfer_id, job.run(), None, 0.0)
        if job.lane is IoLane.WRITE:
            self._done.append(completion)
            return
        is_lookup = isinstance(completion.value, Mapping)
        took_s = LOOKUP_S if is_lookup else len(completion.value) * self._seconds_per_page
        self._free_at_s = max(self._free_at_s, self.now_s) + took_s
        heapq.heappush(self._under_way, (self._free_at_s, int(job.transfer_id), completion))

    def advance(self, to_s: float) -> None:
        """Time passes; what has ended by then can be polled."""
        self.now_s = max(self.now_s, to_s)
        while self.next_end_s <= self.now_s:
            self._done.append(heapq.heappop(self._under_way)[2])

    def poll(self) -> list[Completion]:
        """What has ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait_any(self, timeout_s: float) -> bool:
        """Time passes until something ends, or no longer than `timeout_s`."""
        if not self._done:
            self.advance(min(self.next_end_s, self.now_s + timeout_s))
        return bool(self._done)

    def drain(self, deadline_s: float) -> bool:
        """Time passes until all has ended, or no longer than `deadline_s`."""
        end_s = self.now_s + deadline_s
        while self._under_way and self.next_end_s <= end_s:
            self.advance(self.next_end_s)
        return not self._under_way

    def renew_io(self) -> None:
        """Nothing here can be stuck."""

    def shutdown(self, deadline_s: float) -> bool:
        """Forget what is under way."""
        self._under_way.clear()
        self._done.clear()
        return True


@dataclass(frozen=True)
class Setting:
    """One run. `read_gb_s`: of the disk; `compute_tokens_s`: of the device; `token_bytes`: KV of one token."""

    policy: PrefetchPolicy
    deadline_s: float
    threshold: int
    read_gb_s: float
    compute_tokens_s: float
    token_bytes: int
    l1_blocks: int
    l2_blocks: int

    @property
    def seconds_per_page(self) -> float:
        """How long the disk reads one page."""
        return BLOCK_TOKENS * self.token_bytes / (self.read_gb_s * 1e9)


@dataclass
class Outcome:
    """What a run gave; seconds are simulated. `first_token_s`: from arrival to the end of the prompt's computation."""

    tiers: TierTokens = field(default_factory=TierTokens)
    first_token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Waiting:
    rid: str
    request: TraceRequest
    key: RadixKey
    arrived_s: float


class Simulation:
    """One server in simulated time: requests in order of arrival, one prompt computed at a time; one that waits for its
    pages lets others pass."""

    def __init__(self, setting: Setting, shelves: dict[StorageNamespace, Shelf]) -> None:
        self._setting = setting
        self._disk = SimulatedDisk(setting.seconds_per_page)
        config = HiCacheConfig(
            storage=StorageKind.FILE,
            ratio=setting.l2_blocks / setting.l1_blocks,
            storage_path=Path("simulated"),
            storage_prefetch_policy=setting.policy,
            prefetch_deadline_s=setting.deadline_s,
            prefetch_threshold=setting.threshold,
        )
        self._engine = ReplayEngine(
            setting.l1_blocks,
            config,
            {"file": lambda root, namespace: shelves.setdefault(namespace, Shelf(namespace))},
            precompile=False,
            executor=cast(TransferExecutor, self._disk),
            clock=self._disk.clock,
        )
        self._waiting: list[_Waiting] = []
        self._busy_until_s = 0.0
        self.outcome = Outcome()

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Serve all of them. Raises ReplayError."""
        arriving = list(reversed(requests))
        while arriving or self._waiting:
            while arriving and arriving[-1].arrival_ms / 1e3 <= self._disk.now_s:
                self._arrive(arriving.pop())
            self._engine.cache.check_hicache_events()
            if self._disk.now_s >= self._busy_until_s:
                self._start_one()
            self._disk.advance(self._next_s(arriving))
        self._engine.cache.check_hicache_events()
        self._engine.cache.check_invariants()
        self._engine.close()
        return self.outcome

    def _next_s(self, arriving: Sequence[TraceRequest]) -> float:
        """When something can change."""
        times = [self._disk.next_end_s]
        if arriving:
            times.append(arriving[-1].arrival_ms / 1e3)
        if self._waiting:
            idle = self._disk.now_s >= self._busy_until_s
            times.append(self._disk.now_s + _SLICE_S if idle else self._busy_until_s)
        soonest = min(times)
        return soonest if soonest != float("inf") else self._disk.now_s

    def _arrive(self, request: TraceRequest) -> None:
        key = self._engine.key_of(request)
        rid = f"r{len(self.outcome.first_token_s) + len(self._waiting)}-{request.arrival_ms}"
        self._engine.cache.start_prefetch(rid, key)
        self._waiting.append(_Waiting(rid, request, key, request.arrival_ms / 1e3))

    def _start_one(self) -> None:
        """The oldest that need not wait any longer."""
        for waiting in self._waiting:
            if self._engine.cache.prefetch_ready(waiting.rid):
                self._waiting.remove(waiting)
                self._serve(waiting)
                return

    def _serve(self, waiting: _Waiting) -> None:
        tiers = self._engine.compute(waiting.rid, waiting.request, waiting.key)
        # At least one token is computed, to have the first new one.
        seconds = max(tiers.computed, 1) / self._setting.compute_tokens_s
        self._busy_until_s = self._disk.now_s + seconds
        self.outcome.tiers += tiers
        self.outcome.first_token_s.append(self._busy_until_s - waiting.arrived_s)


def simulate(setting: Setting, requests: Sequence[TraceRequest]) -> Outcome:
    """A server that finds all pages of the requests in storage, and nothing above it."""
    shelves: dict[StorageNamespace, Shelf] = {}
    before = Setting(
        PrefetchPolicy.BEST_EFFORT, 1.0, 0, 1e6, 1e12, 1, setting.l1_blocks, setting.l2_blocks
    )
    Simulation(before, shelves).run(requests)
    return Simulation(setting, shelves).run(requests)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, metavar="FILE")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="only the first N")
    parser.add_argument("--l1-blocks", type=int, default=400, metavar="N", help="device pages")
    parser.add_argument("--l2-blocks", type=int, default=800, metavar="N", help="host pages")
    parser.add_argument(
        "--read-rates", type=float, nargs="+", default=[0.1, 0.5, 2.0], metavar="GB/S"
    )
    parser.add_argument("--compute-rate", type=float, default=8_000.0, metavar="TOKENS/S")
    parser.add_argument(
        "--spread", type=float, default=10.0, help="times between requests, of those in the trace"
    )
    parser.add_argument(
        "--token-bytes", type=int, default=147_456, help="KV of one token (default: 8B, bfloat16)"
    )
    parser.add_argument("--deadline-s", type=float, default=5.0, help="of the policies that wait")
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0], metavar="TOKENS")


def run(args: argparse.Namespace) -> list[Record]:
    """Every policy on every disk. Raises ArgumentTypeError for a wrong option or trace."""
    if min(*args.read_rates, args.compute_rate, args.spread, args.token_bytes) <= 0:
        raise argparse.ArgumentTypeError("rates, --spread and --token-bytes must be greater than 0")
    try:
        requests = [
            TraceRequest(round(request.arrival_ms * args.spread), request.hash_ids)
            for request in read_trace(args.trace)[: args.requests]
        ]
        return [
            _record(setting, simulate(setting, requests), len(requests))
            for read_gb_s in args.read_rates
            for threshold in args.thresholds
            for policy in PrefetchPolicy
            for setting in [
                Setting(
                    policy,
                    args.deadline_s,
                    threshold,
                    read_gb_s,
                    args.compute_rate,
                    args.token_bytes,
                    args.l1_blocks,
                    args.l2_blocks,
                )
            ]
        ]
    except (TraceError, ReplayError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _record(setting: Setting, outcome: Outcome, num_requests: int) -> Record:
    """The median time to the first token, and the hits beside it."""
    tiers = outcome.tiers
    num_tokens = tiers.cached + tiers.computed
    params: dict[str, Any] = {
        "policy": setting.policy.value,
        "read_gb_s": setting.read_gb_s,
        "compute_tokens_s": setting.compute_tokens_s,
        "deadline_s": setting.deadline_s,
        "threshold": setting.threshold,
        "requests": num_requests,
        "hit_percent": round(100.0 * tiers.cached / num_tokens, 1),
        "storage_percent": round(100.0 * tiers.storage / num_tokens, 1),
    }
    seconds = outcome.first_token_s
    return measured("prefetch time to first token", seconds, "s", None, **params)
