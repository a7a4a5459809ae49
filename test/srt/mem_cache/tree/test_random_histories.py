"""Random histories of every mix of layers: requests, splits, evictions, loads, aborts, retractions, resets, restarts,
failed and late transfers, and a storage that fails, loses and damages pages, in pools that are too small for all of it.

After every step everything is compared with the oracle (`hybrid_checks`), and every look-up with the definition
(`brute_force`). A history that fails is shrunk, and printed as a script; the seed is printed too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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
STEPS_OF_ONE_HISTORY = 40

# Prompts begin like one of these; the first two share their first 14 tokens.
STEMS = [
    [*range(1, 41)],
    [*range(1, 15), *range(60, 86)],
    [*range(200, 240)],
]
PROMPTS = st.builds(
    lambda stem, cut, tail, repeat: STEMS[stem][:cut] + [300 + tail] * repeat,
    st.integers(0, 2),
    st.integers(0, 40),
    st.integers(0, 1),
    st.integers(1, 6),
)
EXTRA_KEYS = st.sampled_from([None, None, "tenant"])
CHOICE = st.integers(0, 99)  # of whatever there is, modulo its number


class History(RuleBasedStateMachine):
    """One history. `mix` says which kinds of layers there are; a window among them is drawn."""

    def __init__(self, mix: Mix, figures: Figures | None = None) -> None:
        super().__init__()
        self._mix = mix
        self._figures = figures
        self.world: HybridWorld
        self.waiting: list[Req] = []

    @initialize(
        window=st.sampled_from([1, 3, 4, 5, 10]),
        interval=st.sampled_from([4, 8, 16]),
        ratio=st.sampled_from([0.2, 0.5, 2.0]),
        policy=st.sampled_from(WritePolicy),
        storage=st.sampled_from([StorageKind.FILE, StorageKind.FILE, StorageKind.NONE]),
        track_slots=st.sampled_from([1, 2]),
        is_slab=st.booleans(),
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
    ) -> None:
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
        self.world = self._new_world(settings, Shelves())

    def _new_world(self, settings: Settings, shelves: Shelves) -> HybridWorld:
        world = HybridWorld(settings, shelves=shelves)
        world.executor.auto = False
        return world

    # -- requests ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(prompt=PROMPTS, extra_key=EXTRA_KEYS, prefetch=st.booleans())
    def arrive(self, prompt: list[int], extra_key: str | None, prefetch: bool) -> None:
        self.waiting.append(self.world.arrive(prompt, extra_key, prefetch=prefetch))

    @precondition(lambda self: self.waiting)
    @rule(which=CHOICE)
    def admit(self, which: int) -> None:
        req = self.waiting[which % len(self.waiting)]
        if not self.world.cache.prefetch_ready(req.rid):
            return
        self._look_up(req.all_token_ids[:-1], req.extra_key)
        if self.world.admit(req):
            self.waiting.remove(req)

    @precondition(lambda self: self.waiting)
    @rule(which=CHOICE)
    def abort_waiting(self, which: int) -> None:
        req = self.waiting.pop(which % len(self.waiting))
        self.world.cache.release_prefetch(req.rid)

    @precondition(lambda self: self.world.admitted)
    @rule(which=CHOICE, num_tokens=st.integers(1, 24))
    def compute(self, which: int, num_tokens: int) -> None:
        req = self._running(which)
        if len(req.prefix_indices) < req.num_tokens and not req.output_ids:
            self.world.extend(req, num_tokens)
        elif req.kv_committed_len == req.num_tokens < 60:
            self.world.decode(req, 400 + num_tokens % 2)
        else:
            self.world.extend(req, num_tokens)  # after a retraction

    @precondition(lambda self: self.world.admitted)
    @rule(which=CHOICE, insert=st.booleans())
    def finish(self, which: int, insert: bool) -> None:
        req = self._running(which)
        computed = req.kv_committed_len > 0 and not req.prefilling
        self.world.finish(req, is_insert=insert and computed)
        self.world.cache.release_prefetch(req.rid)

    @precondition(lambda self: self.world.admitted)
    @rule(which=CHOICE)
    def retract(self, which: int) -> None:
        req = self._running(which)
        self.world.retract(req)
        self.waiting.append(req)

    @rule(prompt=PROMPTS, extra_key=EXTRA_KEYS)
    def look_up(self, prompt: list[int], extra_key: str | None) -> None:
        self._look_up(prompt, extra_key)

    def _look_up(self, prompt: list[int], extra_key: str | None) -> None:
        want = Dictionary(self.world).usable(prompt, extra_key)
        assert self.world.match(prompt, extra_key) == want

    def _running(self, which: int) -> Req:
        return self.world.admitted[which % len(self.world.admitted)]

    # -- the device --------------------------------------------------------------------------------------------------

    @rule(full=st.integers(0, 24), swa=st.integers(0, 24), states=st.integers(0, 3))
    def evict(self, full: int, swa: int, states: int) -> None:
        self.world.evict(full=full, swa=swa, states=states)

    # -- transfers ---------------------------------------------------------------------------------------------------

    @rule()
    def poll(self) -> None:
        self.world.finish_loads()
        self.world.cache.check_hicache_events()

    @precondition(lambda self: self.world.executor.jobs)
    @rule(which=CHOICE, num_jobs=st.integers(1, 4))
    def let_jobs_run(self, which: int, num_jobs: int) -> None:
        jobs = self.world.executor.jobs
        for _ in range(min(num_jobs, len(jobs))):
            self.world.executor.run_one(which % len(jobs))

    @rule(num_jobs=st.integers(0, 3))
    def fail_the_next_jobs(self, num_jobs: int) -> None:
        self.world.executor.fail_next = ["injected"] * num_jobs

    @rule(seconds=st.sampled_from([0.3, 1.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    # -- storage -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.tree.has_storage)
    @rule(kind=CHOICE, trouble=st.sampled_from(["refuse_sets", "raises", None]))
    def storage_has_trouble(self, kind: int, trouble: str | None) -> None:
        shelf = self._shelf(kind)
        shelf.heal()
        if trouble is not None:
            setattr(shelf, trouble, True)

    @precondition(lambda self: self.world.tree.has_storage)
    @rule(kind=CHOICE, which=CHOICE, damage=st.booleans())
    def a_page_is_lost(self, kind: int, which: int, damage: bool) -> None:
        shelf = self._shelf(kind)
        keys = sorted(shelf.pages)
        if keys and damage:
            shelf.damaged.add(keys[which % len(keys)])
        elif keys:
            shelf.delete([keys[which % len(keys)]])

    @precondition(lambda self: self.world.tree.has_storage)
    @rule()
    def flush(self) -> None:
        self.world.finish_loads()
        self.world.cache.flush_to_storage(10.0)

    def _shelf(self, which: int) -> Any:
        kinds = self.world.settings.mix.kinds
        return self.world.shelf(kinds[which % len(kinds)])

    # -- the end, and a new beginning --------------------------------------------------------------------------------

    @precondition(lambda self: not self.world.admitted)
    @rule()
    def rest(self) -> None:
        check_at_rest(self.world)

    @precondition(lambda self: not self.world.admitted)
    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        if not killed:
            self._end()
        old, self.waiting = self.world, []
        self.world = self._new_world(old.settings, old.shelves)
        self.world.sequences = old.sequences

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
        while self.world.admitted:
            self.world.finish(self.world.admitted[0], is_insert=False)
        for req in self.waiting:
            self.world.cache.release_prefetch(req.rid)
        check_at_rest(self.world)


def run_histories(
    mix: Mix, seed: int, num_histories: int, figures: Figures | None = None
) -> None:
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


@pytest.mark.soak
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
