"""The life cycle of host pages, against a plain model and in its refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.errors import InvariantError, PageStateError
from sgl_jax.srt.mem_cache.hicache.host_pool.page_table import PageState, PageTable

FREE, WRITING, READY = PageState.FREE, PageState.WRITING, PageState.READY


@dataclass
class Model:
    """The specification as dicts and lists."""

    num_pages: int
    state: dict[int, PageState] = field(default_factory=dict)
    refs: dict[int, int] = field(default_factory=dict)
    epoch: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # READY without a lock, oldest first

    def __post_init__(self) -> None:
        for page in range(self.num_pages):
            self.state[page], self.refs[page], self.epoch[page] = FREE, 0, 0

    def with_state(self, *states: PageState) -> list[int]:
        return [page for page, state in self.state.items() if state in states]

    def take(self, pages: list[int]) -> None:
        for page in pages:
            assert self.state[page] is FREE
            self.state[page] = WRITING
            self.epoch[page] += 1

    def ready(self, pages: list[int]) -> None:
        for page in pages:
            self.state[page] = READY
            if not self.refs[page]:
                self.order.append(page)

    def give(self, pages: list[int]) -> None:
        for page in pages:
            self.state[page] = FREE
            if page in self.order:
                self.order.remove(page)

    def touch(self, pages: list[int]) -> None:
        for page in pages:
            if page in self.order:
                self.order.remove(page)
                self.order.append(page)

    def lock(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] += 1
            if page in self.order:
                self.order.remove(page)

    def unlock(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] -= 1
            if not self.refs[page] and self.state[page] is READY:
                self.order.append(page)


def pick(rng: np.random.Generator, pages: list[int]) -> np.ndarray:
    count = int(rng.integers(0, min(len(pages), 4) + 1))
    return rng.permutation(np.array(pages, np.int32))[:count]


def same(table: PageTable, model: Model) -> None:
    table.check_invariants()
    everything = np.arange(model.num_pages, dtype=np.int32)
    assert table.states_of(everything).tolist() == list(model.state.values())
    assert table.refs_of(everything).tolist() == list(model.refs.values())
    assert table.epochs(everything).tolist() == list(model.epoch.values())
    assert table.oldest(model.num_pages).tolist() == model.order
    assert table.num_free == len(model.with_state(FREE))
    assert table.num_evictable == len(model.order)
    assert table.num_locked == sum(refs > 0 for refs in model.refs.values())


def test_random_operations_agree_with_the_model(rng: np.random.Generator) -> None:
    table, model = PageTable(13), Model(13)
    for _ in range(1500):
        unlocked = [page for page, refs in model.refs.items() if not refs]
        live = model.with_state(WRITING, READY)
        match rng.integers(0, 8):
            case 0 | 1:
                wanted = int(rng.integers(0, 6))
                pages = table.alloc(wanted)
                if wanted > len(model.with_state(FREE)):
                    assert pages is None
                else:
                    assert pages is not None
                    assert len(set(pages.tolist())) == wanted
                    model.take(pages.tolist())
            case 2 | 3:
                chosen = pick(rng, model.with_state(WRITING))
                table.mark_ready(chosen)
                model.ready(chosen.tolist())
            case 4:
                chosen = pick(rng, [page for page in live if page in unlocked])
                table.free(chosen)
                model.give(chosen.tolist())
            case 5:
                chosen = pick(rng, live)
                table.touch(chosen)
                model.touch(chosen.tolist())
                table.lock(chosen)
                model.lock(chosen.tolist())
            case 6:
                chosen = pick(rng, [page for page, refs in model.refs.items() if refs])
                table.unlock(chosen)
                model.unlock(chosen.tolist())
            case 7:
                wanted = int(rng.integers(0, 3))
                expected = model.order[:wanted]
                assert table.evict(wanted).tolist() == expected
                model.give(expected)
        same(table, model)


def ready_table(num_pages: int) -> PageTable:
    table = PageTable(num_pages)
    pages = table.alloc(num_pages)
    assert pages is not None
    table.mark_ready(pages)
    return table


def refused(table: PageTable, call: str, pages: list[int], match: str) -> None:
    """The call raises and nothing at all has changed."""
    everything = np.arange(table.num_pages, dtype=np.int32)

    def snapshot() -> tuple[object, ...]:
        return (
            table.states_of(everything).tolist(),
            table.refs_of(everything).tolist(),
            table.epochs(everything).tolist(),
            table.oldest(table.num_pages).tolist(),
            table.num_free,
        )

    before = snapshot()
    with pytest.raises(PageStateError, match=match):
        getattr(table, call)(np.array(pages, np.int32))
    assert snapshot() == before
    table.check_invariants()


@pytest.mark.parametrize("call", ["free", "lock", "unlock", "mark_ready", "touch"])
def test_calls_on_free_or_unknown_pages_are_refused_whole(call: str) -> None:
    table = ready_table(4)
    if call == "mark_ready":
        table.free(np.array([0]))
        table.alloc(1)  # page 0 is WRITING again: a good one beside the bad one
    table.free(np.array([1]))
    refused(table, call, [0, 1], "1 host pages" if call != "unlock" else "host pages")
    refused(table, call, [0, 4], r"\[4\] outside \[0, 4\)")
    refused(table, call, [0, -1], r"\[-1\] outside \[0, 4\)")


@pytest.mark.parametrize("call", ["free", "lock", "unlock"])
def test_a_page_named_twice_is_refused(call: str) -> None:
    table = ready_table(4)
    table.lock(np.array([3]))
    refused(table, call, [3, 3] if call == "unlock" else [2, 2], "named twice")


def test_double_free_is_refused() -> None:
    table = ready_table(4)
    table.free(np.array([2]))
    refused(table, "free", [2], "freed twice")


def test_locked_pages_are_neither_freed_nor_evicted_until_the_last_unlock() -> None:
    table = ready_table(3)
    page = np.array([0], np.int32)
    table.lock(page)
    table.lock(page)
    refused(table, "free", [1, 0], "freed while locked")
    assert table.evict(3).tolist() == [1, 2]
    table.unlock(page)
    assert table.evict(3).tolist() == []
    table.unlock(page)
    assert table.evict(3).tolist() == [0]


def test_a_page_locked_while_writing_becomes_evictable_at_unlock() -> None:
    table = PageTable(2)
    page = table.alloc(1)
    assert page is not None
    table.lock(page)
    table.mark_ready(page)
    assert table.evict(1).tolist() == []
    table.unlock(page)
    assert table.evict(1).tolist() == page.tolist()


def test_an_epoch_counts_tenancies() -> None:
    table = PageTable(1)
    for tenancy in (1, 2, 3):
        page = table.alloc(1)
        assert page is not None
        assert table.epochs(page).tolist() == [tenancy]
        table.free(page)


def test_alloc_without_room_changes_nothing() -> None:
    table = PageTable(3)
    assert table.alloc(2) is not None
    assert table.alloc(2) is None
    assert table.num_free == 1
    table.check_invariants()


def test_what_alloc_returns_is_no_window_into_the_table() -> None:
    table = PageTable(4)
    pages = table.alloc(2)
    assert pages is not None
    kept = pages.copy()
    pages[:] = 3
    table.free(kept)
    table.check_invariants()
    assert pages.base is None


def test_clear_starts_new_epochs_and_is_refused_under_a_lock() -> None:
    table = ready_table(3)
    table.lock(np.array([1]))
    with pytest.raises(PageStateError, match="cleared while locked"):
        table.clear()
    assert table.num_free == 0
    table.unlock(np.array([1]))
    before = table.epochs(np.arange(3))
    table.clear()
    assert (table.epochs(np.arange(3)) > before).all()
    assert table.num_free == 3
    table.check_invariants()


def test_empty_calls_do_nothing() -> None:
    table = ready_table(2)
    for call in (table.free, table.lock, table.unlock, table.touch, table.mark_ready):
        call(np.array([], np.int32))
    taken = PageTable(0).alloc(0)
    assert taken is not None
    assert len(taken) == 0


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ("table._free_stack[0] = 2", "P1"),
        ("table._lru.pop(1)", r"P2.*\[1\]"),
        ("table._refs[3] = 1", "P3"),
        ("table._refs[1] = -1; table._lru.pop(1)", "P3"),
    ],
)
def test_check_invariants_finds_damage(damage: str, match: str) -> None:
    table = ready_table(4)
    table.free(np.array([3]))
    table.check_invariants()
    exec(damage)
    with pytest.raises(InvariantError, match=match):
        table.check_invariants()
