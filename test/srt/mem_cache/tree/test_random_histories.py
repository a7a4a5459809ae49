"""Random histories of every mix of layers: requests, splits, evictions, loads, aborts, retractions, resets, restarts,
failed and late transfers, and a storage that fails, loses and damages pages, in pools that are too small for all of it.

After every step everything is compared with the oracle (`hybrid_checks`), and every look-up with the definition
(`brute_force`). A history that fails is shrunk, and printed as a script; the seed is printed too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from brute_force import Dictionary
from faulty_shelf import Shelves
from hybrid_checks import check, check_at_rest
from hybrid_pools import Mix
from hybrid_world import HybridWorld, Settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    initialize,
    invariant,
    precondition,
    rule,
)
from soak_figures import Figures

from sgl_jax.srt.mem_cache.hicache.config import HostScheme, StorageKind, WritePolicy
from sgl_jax_hicache.engine.req import Req

KINDS = {
    "full": Mix(),
    "full-swa": Mix(window=10),
    "full-recurrent": Mix(states=True),
    "full-swa-recurrent": Mix(window=10, states=True),
    "swa-only": Mix(full=False, window=10),
}
STEPS_OF_ONE_HISTORY = 50

# Prompts begin like one of these; the first two share their first 14 tokens.
STEMS = [
    [*range(1, 41)],
    [*range(1, 15), *range(60, 86)],
    [*range(200, 240)],
]
PROMPTS = st.builds(
    lambda stem, cut, tail: STEMS[stem][:cut] + tail,
    st.integers(0, 2),
    st.sampled_from([40, 33, 32, 28, 23, 16, 12, 9, 0]),
    st.sampled_from([[300], [301], [300, 302], [303] * 5, [304] * 8]),
)
EXTRA_KEYS = st.sampled_from([None, None, None, "tenant"])
CHUNKS = st.sampled_from([64, 16, 9, 4])
FAILURES = ["refuse_sets", "refuse_some", "raise_for_some", "raises"]
TROUBLES = ["lost", "damaged", *FAILURES, "none"]
CHOICE = st.integers(0, 99)  # of whatever there is, modulo its number


class History(RuleBasedStateMachine):
    """One history. `mix` says which kinds of layers there are; a window among them is drawn."""

    def __init__(self, mix: Mix, figures: Figures | None = None) -> None:
        super().__init__()
        self._mix = mix
        self._figures = figures
        self.world: HybridWorld
        self.waiting: list[Req] = []
        self.served: list[tuple[list[int], str | None]] = []

    @initialize(
        window=st.sampled_from([10, 5, 4, 3, 1]),
        interval=st.sampled_from([8, 4, 16]),
        ratio=st.sampled_from([0.5, 0.2, 2.0]),
        policy=st.sampled_from(WritePolicy),
        storage=st.sampled_from([StorageKind.FILE, StorageKind.FILE, StorageKind.NONE]),
        track_slots=st.sampled_from([1, 2]),
        is_slab=st.booleans(),
        is_late=st.booleans(),
        first=st.lists(PROMPTS, max_size=3),
    )
    def start(
        self,
        window: int,
        interval: int,
        ratio: float,
        policy: WritePolicy,
        storage: StorageKind,
        track_slots: int,
        is_slab: bool,
        is_late: bool,
        first: list[list[int]],
    ) -> None:
        """`is_late`: transfers end when `let_jobs_run` says so, else at once."""
        mix = self._mix
        settings = Settings(
            mix if mix.window is None else Mix(mix.full, window, mix.states),
            device_pages=16,
            swa_pages=12,
            num_states=12,
            rows=3,
            track_slots=track_slots,
            interval=interval,
            ratio=ratio,
            policy=policy,
            storage=storage,
            scheme=HostScheme.SLAB if is_slab and ratio == 0.5 else HostScheme.PER_BLOCK,
        )
        self._is_late = is_late
        self.world = self._new_world(settings, Shelves())
        for prompt in first:
            self.serve(prompt, None, 64, num_output=9)

    def _new_world(self, settings: Settings, shelves: Shelves) -> HybridWorld:
        world = HybridWorld(settings, shelves=shelves)
        world.executor.auto = not self._is_late
        return world

    # -- requests ----------------------------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, extra_key=EXTRA_KEYS, chunk=CHUNKS, num_output=st.integers(0, 20))
    def serve(self, prompt: list[int], extra_key: str | None, chunk: int, num_output: int) -> None:
        """A whole request, as far as there is room for it."""
        req = self.world.arrive(prompt, extra_key)
        self.world.finish_loads()
        self.world.await_prefetch(req)
        if self._admit(req):
            while not self._is_computed(req) and self.world.extend(req, chunk):
                check(self.world)
            while self._is_computed(req) and num_output and self.world.decode(req, 400):
                num_output -= 1
            self._end_running(req, insert=True)

    @rule(which=CHOICE, num_shared=st.sampled_from([60, 40, 32, 24, 15, 9]), chunk=CHUNKS)
    def go_on(self, which: int, num_shared: int, chunk: int) -> None:
        """A prompt that begins with one that was served, and its answer."""
        if self.served:
            tokens, extra_key = self.served[which % len(self.served)]
            self.serve([*tokens[:num_shared], 500], extra_key, chunk, num_output=3)

    @rule(which=CHOICE, num_shared=st.sampled_from([60, 40, 32, 24, 15, 9]))
    def go_on_from_below(self, which: int, num_shared: int) -> None:
        """The same, after the device has lost all that nobody keeps."""
        self.world.evict(full=10**6)
        self.let_jobs_run(0, 100)
        self.go_on(which, num_shared, 64)

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(prompt=PROMPTS, extra_key=EXTRA_KEYS, prefetch=st.booleans())
    def arrive(self, prompt: list[int], extra_key: str | None, prefetch: bool) -> None:
        self.waiting.append(self.world.arrive(prompt, extra_key, prefetch=prefetch))

    @precondition(lambda self: self.waiting)
    @rule(which=CHOICE)
    def admit(self, which: int) -> None:
        req = self.waiting[which % len(self.waiting)]
        if self.world.cache.prefetch_ready(req.rid) and self._admit(req):
            self.waiting.remove(req)

    @precondition(lambda self: self.world.admitted)
    @rule(which=CHOICE, num_tokens=st.sampled_from([40, 16, 9, 4, 1]))
    def compute(self, which: int, num_tokens: int) -> None:
        req = self._running(which)
        if not self._is_computed(req):
            self.world.extend(req, num_tokens)
        for _ in range(num_tokens):
            if self._is_computed(req) and req.num_tokens < 60:
                self.world.decode(req, 400 + num_tokens % 2)

    @precondition(lambda self: self.world.admitted)
    @rule(which=CHOICE, how=st.sampled_from(["insert", "drop", "retract"]))
    def end(self, which: int, how: str) -> None:
        req = self._running(which)
        if how == "retract":
            self.world.retract(req)
            self.waiting.append(req)
        else:
            self._end_running(req, insert=how == "insert")

    @precondition(lambda self: self.waiting)
    @rule(which=CHOICE)
    def abort_waiting(self, which: int) -> None:
        req = self.waiting.pop(which % len(self.waiting))
        self.world.cache.release_prefetch(req.rid)

    @rule(prompt=PROMPTS, extra_key=EXTRA_KEYS)
    def look_up(self, prompt: list[int], extra_key: str | None) -> None:
        want = Dictionary(self.world).usable(prompt, extra_key)
        assert self.world.match(prompt, extra_key) == want

    def _admit(self, req: Req) -> bool:
        self.look_up(req.all_token_ids[:-1], req.extra_key)
        is_admitted = self.world.admit(req)
        check(self.world)  # before what was loaded is in place
        return is_admitted

    def _running(self, which: int) -> Req:
        return self.world.admitted[which % len(self.world.admitted)]

    @staticmethod
    def _is_computed(req: Req) -> bool:
        return req.kv_committed_len == req.num_tokens

    def _end_running(self, req: Req, *, insert: bool) -> None:
        self.served.append((req.all_token_ids, req.extra_key))
        self.world.finish(req, is_insert=insert and self._is_computed(req))
        self.world.cache.release_prefetch(req.rid)

    # -- tiers -------------------------------------------------------------------------------------------------------

    @rule(full=st.integers(0, 24), swa=st.integers(0, 24), states=st.integers(0, 3))
    def evict(self, full: int, swa: int, states: int) -> None:
        self.world.evict(full=full, swa=swa, states=states)

    @rule()
    def clear_device(self) -> None:
        self.world.evict(full=10**6)

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.5, 6.0]))
    def poll(self, seconds: float) -> None:
        self.world.finish_loads()
        self.world.now_s += seconds
        self.world.cache.check_hicache_events()

    @precondition(lambda self: self.world.executor.jobs)
    @rule(which=CHOICE, num_jobs=st.sampled_from([1, 3, 100]))
    def let_jobs_run(self, which: int, num_jobs: int) -> None:
        jobs = self.world.executor.jobs
        for _ in range(min(num_jobs, len(jobs))):
            self.world.executor.run_one(which % len(jobs))
        self.world.finish_loads()
        self.world.cache.check_hicache_events()

    @precondition(lambda self: self.world.executor.auto or self.world.executor.jobs)
    @rule(num_jobs=st.integers(1, 3))
    def transfers_fail(self, num_jobs: int) -> None:
        self.world.executor.fail_next = ["injected"] * num_jobs

    @precondition(lambda self: self.world.tree.has_storage)
    @rule(kind=CHOICE, which=CHOICE, what=st.sampled_from(TROUBLES))
    def storage_has_trouble(self, kind: int, which: int, what: str) -> None:
        kinds = self.world.settings.mix.kinds
        shelf = self.world.shelf(kinds[kind % len(kinds)])
        keys = sorted(shelf.pages)
        key = keys[which % len(keys)] if keys else None
        if what == "none":
            shelf.heal()
        elif what == "damaged" and key is not None:
            shelf.damaged.add(key)
        elif what == "lost" and key is not None:
            shelf.delete([key])
        elif what in FAILURES:
            setattr(shelf, what, True)

    @precondition(lambda self: self.world.tree.has_tiers)
    @rule(which=st.sampled_from(["storage", "nothing", "nothing"]))
    def come_or_go(self, which: str) -> None:
        """Storage is detached, or attached (again), whatever is under way."""
        cache = self.world.cache
        if which == "nothing":
            return
        if self.world.tree.has_storage:
            cache.detach_storage()
        else:
            cache.attach_storage(cache.open_storage(Path("shelves")))

    # -- the end, and a new beginning --------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.world.finish_loads()
        self.world.cache.flush_to_storage(10.0)

    @precondition(lambda self: not self.world.admitted)
    @rule(forget=st.sampled_from([False, False, False, True]))
    def rest(self, forget: bool) -> None:
        if forget:
            self.world.reset()
            check(self.world)
        check_at_rest(self.world)

    @rule(how=st.sampled_from(["in order", "killed", "not", "not"]), which=CHOICE)
    def restart(self, how: str, which: int) -> None:
        if how == "not":
            return
        if how == "in order":
            self.flush()
            self._end()
        old, self.waiting = self.world, []
        self.world = self._new_world(old.settings, old.shelves)
        self.world.sequences = old.sequences
        self.go_on(which, 60, 64)

    @invariant()
    def everything_is_right(self) -> None:
        if self._figures is not None:
            self._figures.add(operations=1)
        check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self._end()

    def _end(self) -> None:
        self.world.executor.fail_next = []
        for shelf in self.world.shelves.by_namespace.values():
            shelf.heal()
        while self.world.admitted:
            self.world.finish(self.world.admitted[0], is_insert=False)
        for req in self.waiting:
            self.world.cache.release_prefetch(req.rid)
        check_at_rest(self.world)
        self.world.now_s += 100.0
        assert self.world.cache.flush_to_storage(10.0), "a storage in order gets everything"
        check_at_rest(self.world)


def run_histories(mix: Mix, seed: int, num_histories: int, figures: Figures | None = None) -> None:
    settings = hypothesis.settings(
        max_examples=num_histories,
        stateful_step_count=STEPS_OF_ONE_HISTORY,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def history() -> History:
        return History(mix, figures)

    test: Callable[[], None] = get_state_machine_test(history, settings=settings)
    hypothesis.seed(seed)(test)()


@pytest.mark.parametrize("name", KINDS)
def test_random_histories(name: str, seed: int) -> None:
    run_histories(KINDS[name], seed, num_histories=12)


@pytest.mark.soak(parts=2)
@pytest.mark.parametrize("name", KINDS)
def test_random_histories_for_long(
    name: str, seed: int, soak_seconds: float, figures: Figures
) -> None:
    """One batch after the other, each from a seed of its own."""
    end = time.monotonic() + soak_seconds
    while time.monotonic() < end:
        print(f"batch of seed {seed}")
        run_histories(KINDS[name], seed, num_histories=50, figures=figures)
        seed += 1
