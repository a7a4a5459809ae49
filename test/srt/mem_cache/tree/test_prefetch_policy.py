"""How long a request waits for its pages from storage: by policy, with reads that end when the test says so."""

from __future__ import annotations

from typing import Any

import pytest
from tree_world import ManualExecutor, Request, World

from sgl_jax.srt.mem_cache.hicache.config import PrefetchPolicy, StorageKind
from sgl_jax.srt.mem_cache.hicache.storage_prefetch import FETCH_CHUNK_PAGES
from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens

PAGE_SIZE = 4
CHUNK_TOKENS = FETCH_CHUNK_PAGES * PAGE_SIZE
NUM_CHUNKS = 3
PROMPT = list(range(1, NUM_CHUNKS * CHUNK_TOKENS + 2))
OTHER = list(range(1001, CHUNK_TOKENS + 1002))
DEADLINE_S = 5.0
POLICIES = list(PrefetchPolicy)
BOUNDED = [PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.TIMEOUT]


class Waiting:
    """A cache that must read its prompts from storage; look-ups and reads end, and time passes, by hand."""

    def __init__(self, policy: PrefetchPolicy, *prompts: list[int], threshold: int = 0) -> None:
        shelf: dict[Any, Any] = {}
        for token_ids in prompts or (PROMPT,):
            before = World(storage=StorageKind.FILE, shelf=shelf, device_pages=64)
            before.run(token_ids)
            before.settle()
        self.now_s = 100.0
        self.executor = ManualExecutor(auto=False)
        self.world = World(
            storage=StorageKind.FILE,
            shelf=shelf,
            device_pages=64,
            executor=self.executor,
            clock=lambda: self.now_s,
            settings={
                "storage_prefetch_policy": policy,
                "prefetch_deadline_s": DEADLINE_S,
                "prefetch_threshold": threshold,
            },
        )

    def arrive(self, token_ids: list[int], rid: str = "r") -> None:
        self.world.cache.start_prefetch(rid, RadixKey(token_ids[:-1], None, 0))

    def end_jobs(self, num_jobs: int = 1) -> None:
        """The next look-ups or reads end."""
        for _ in range(num_jobs):
            self.executor.run_one()
        self.world.cache.check_hicache_events()

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def ready(self, rid: str = "r") -> bool:
        return self.world.cache.prefetch_ready(rid)

    def admit(self, token_ids: list[int], rid: str = "r") -> TierTokens:
        """Every reused token's content is checked; the request computes the rest."""
        req = Request(rid, token_ids)
        self.executor.auto = True
        self.world.admit(req)
        assert self.world.extend(req, len(token_ids))
        self.world.finish(req)
        assert req.tiers is not None
        return req.tiers

    def metric(self, name: str) -> float:
        value = self.world.registry.get_sample_value(f"sglang:hicache_{name}")
        assert value is not None
        return value

    def end(self) -> None:
        self.executor.run_all()
        self.world.verify_at_rest()


def test_wait_complete_waits_for_a_slow_disk_longer_than_the_deadline() -> None:
    waiting = Waiting(PrefetchPolicy.WAIT_COMPLETE)
    waiting.arrive(PROMPT)
    assert not waiting.ready()
    waiting.end_jobs()  # the look-up
    for _ in range(NUM_CHUNKS):
        waiting.pass_s(DEADLINE_S - 0.1)
        assert not waiting.ready()
        waiting.end_jobs()
    assert waiting.ready()
    assert waiting.admit(PROMPT).storage == NUM_CHUNKS * CHUNK_TOKENS
    assert waiting.metric("prefetch_timeouts_total") == 0
    waited_s = NUM_CHUNKS * (DEADLINE_S - 0.1)
    assert waiting.metric("prefetch_wait_seconds_sum") == pytest.approx(waited_s)
    waiting.end()


def test_wait_complete_lets_go_of_a_disk_that_hangs_and_keeps_what_it_had_read() -> None:
    waiting = Waiting(PrefetchPolicy.WAIT_COMPLETE)
    waiting.arrive(PROMPT)
    assert not waiting.ready()
    waiting.end_jobs()  # the look-up
    waiting.end_jobs()
    waiting.pass_s(DEADLINE_S - 0.1)
    assert not waiting.ready()
    waiting.pass_s(0.1)
    assert waiting.ready()
    assert waiting.metric("prefetch_timeouts_total") == 0, "counted when it is admitted"
    assert waiting.admit(PROMPT).storage == CHUNK_TOKENS
    assert waiting.metric("prefetch_timeouts_total") == 1
    waiting.end()


def test_what_a_disk_reads_for_others_shows_that_it_does_not_hang() -> None:
    waiting = Waiting(PrefetchPolicy.WAIT_COMPLETE, PROMPT, OTHER)
    waiting.arrive(PROMPT, "first")
    waiting.arrive(OTHER, "second")
    waiting.end_jobs(2)
    for _ in range(NUM_CHUNKS):
        assert not waiting.ready("second")
        waiting.pass_s(DEADLINE_S - 0.1)
        waiting.end_jobs()  # of the first one's
    assert not waiting.ready("second")
    waiting.end_jobs()
    assert waiting.ready("second")
    assert waiting.admit(PROMPT, "first").storage == NUM_CHUNKS * CHUNK_TOKENS
    assert waiting.admit(OTHER, "second").storage == CHUNK_TOKENS
    waiting.end()


def test_timeout_lets_go_of_a_slow_disk_too() -> None:
    waiting = Waiting(PrefetchPolicy.TIMEOUT)
    waiting.arrive(PROMPT)
    assert not waiting.ready()
    waiting.end_jobs()
    for _ in range(NUM_CHUNKS - 1):
        waiting.end_jobs()
        waiting.pass_s(DEADLINE_S / 2)
    assert waiting.ready()
    assert waiting.admit(PROMPT).storage == (NUM_CHUNKS - 1) * CHUNK_TOKENS
    assert waiting.metric("prefetch_timeouts_total") == 1
    waiting.end()


@pytest.mark.parametrize("num_read", [0, 1, NUM_CHUNKS])
def test_best_effort_uses_what_has_arrived_when_the_request_could_be_admitted(
    num_read: int,
) -> None:
    waiting = Waiting(PrefetchPolicy.BEST_EFFORT)
    waiting.arrive(PROMPT)
    waiting.end_jobs()
    if num_read:
        waiting.end_jobs(num_read)
    assert waiting.ready()
    assert waiting.admit(PROMPT).storage == num_read * CHUNK_TOKENS
    assert waiting.metric("prefetch_timeouts_total") == 0
    assert waiting.metric("prefetch_wait_seconds_sum") == 0
    waiting.end()


def test_best_effort_starts_no_read_for_a_request_that_went_on_before_its_look_up_ended() -> None:
    waiting = Waiting(PrefetchPolicy.BEST_EFFORT)
    waiting.arrive(PROMPT)
    assert waiting.ready()
    look_up = waiting.executor.jobs.pop()
    assert waiting.admit(PROMPT) == TierTokens(computed=len(PROMPT))
    waiting.executor.jobs.append(look_up)
    waiting.world.settle()
    fetches = waiting.world.registry.get_sample_value(
        "sglang:hicache_transfers_total",
        {"kind": "fetch", "component": "full", "outcome": "ok"},
    )
    assert fetches == 0
    waiting.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_that_come_too_late_serve_the_next_prompt(policy: PrefetchPolicy) -> None:
    """Computed by nobody meanwhile: the request that asked for them went away."""
    waiting = Waiting(policy)
    waiting.arrive(PROMPT)
    assert waiting.ready() == (policy is PrefetchPolicy.BEST_EFFORT)
    waiting.end_jobs()
    waiting.pass_s(DEADLINE_S)
    assert waiting.ready()
    waiting.world.cache.release_prefetch("r")
    waiting.executor.run_all()
    waiting.world.cache.check_hicache_events()
    assert waiting.admit(PROMPT, "next").host == NUM_CHUNKS * CHUNK_TOKENS
    waiting.end()


@pytest.mark.parametrize("policy", BOUNDED)
def test_the_wait_is_counted_from_when_the_request_could_be_admitted(
    policy: PrefetchPolicy,
) -> None:
    waiting = Waiting(policy)
    waiting.arrive(PROMPT)
    waiting.pass_s(10 * DEADLINE_S)  # others were served first
    assert not waiting.ready()
    waiting.pass_s(DEADLINE_S)
    assert waiting.ready()
    waiting.world.cache.release_prefetch("r")
    waiting.end()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("threshold", "asks"), [(0, True), (64, True), (65, False)])
def test_storage_is_asked_if_enough_tokens_are_lacking(
    policy: PrefetchPolicy, threshold: int, asks: bool
) -> None:
    waiting = Waiting(policy, threshold=threshold)
    waiting.arrive(PROMPT[:65])
    assert bool(waiting.executor.jobs) == asks
    assert waiting.ready() == (not asks or policy is PrefetchPolicy.BEST_EFFORT)
    waiting.world.cache.release_prefetch("r")
    waiting.end()


def test_the_threshold_counts_what_the_tiers_above_lack() -> None:
    waiting = Waiting(PrefetchPolicy.WAIT_COMPLETE, threshold=CHUNK_TOKENS + 1)
    assert waiting.admit(PROMPT[: 2 * CHUNK_TOKENS + 1]).computed == 2 * CHUNK_TOKENS + 1
    waiting.world.settle()
    waiting.executor.auto = False
    waiting.arrive(PROMPT)
    assert not waiting.executor.jobs
    assert waiting.ready()
    assert waiting.admit(PROMPT).device == 2 * CHUNK_TOKENS
    waiting.end()
