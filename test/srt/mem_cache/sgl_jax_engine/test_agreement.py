"""Processes that see the same: an end everywhere or nowhere, with what all have, in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from sgl_jax.srt.mem_cache.hicache.async_impl import (
    Completion,
    DeviceJob,
    IoJob,
    IoLane,
    create_executor,
)
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, PageKey, TransferId
from sgl_jax_hicache.sgl_jax_engine.agreeing_executor import AgreeingExecutor

TIMEOUT_S = 60.0


class Table:
    """An `Agreement` between the threads of a test, one thread a process."""

    def __init__(self, num_processes: int) -> None:
        self._said: list[Any] = [None] * num_processes
        self._barrier = threading.Barrier(num_processes)

    def seat(self, rank: int) -> Table.Seat:
        """One process's end."""
        return Table.Seat(self, rank)

    class Seat:
        """See `Table`."""

        def __init__(self, table: Table, rank: int) -> None:
            self._table, self._rank = table, rank

        def exchange(self, said: Any) -> list[Any]:
            """Everybody says something, then everybody hears."""
            self._table._said[self._rank] = said
            self._table._barrier.wait(TIMEOUT_S)
            heard = list(self._table._said)
            self._table._barrier.wait(TIMEOUT_S)
            return heard


def together(plays: list[Callable[[AgreeingExecutor], Any]]) -> list[Any]:
    """Run one play a process at the same time; what each returned."""
    table = Table(len(plays))
    results: list[Any] = [None] * len(plays)

    def run(rank: int) -> None:
        inner = create_executor("threadpool", 1)
        executor = AgreeingExecutor(inner, table.seat(rank))
        try:
            results[rank] = plays[rank](executor)
        except BaseException as error:
            results[rank] = error
            table._barrier.abort()
            raise
        finally:
            executor.shutdown(TIMEOUT_S)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(plays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


def io(number: int, work: Callable[[], Any]) -> IoJob:
    return IoJob(TransferId(number), work, IoLane.READ)


def until_ended(executor: AgreeingExecutor, count: int) -> list[Completion]:
    ended: list[Completion] = []
    while len(ended) < count:
        assert executor.wait_any(TIMEOUT_S)
        ended += executor.poll()
    return ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_ends_before_it_has_ended_everywhere() -> None:
    gate = threading.Event()

    def quick(executor: AgreeingExecutor) -> list[Any]:
        executor.submit_io(io(1, lambda: [True]))
        first = executor.poll()  # ended here, and not there
        gate.set()
        return [first, until_ended(executor, 1)]

    def slow(executor: AgreeingExecutor) -> list[Any]:
        executor.submit_io(io(1, lambda: [gate.wait(TIMEOUT_S)]))
        return [executor.poll(), until_ended(executor, 1)]

    for first, ended in together([quick, slow]):
        assert first == []
        assert [(c.transfer_id, c.value, c.error) for c in ended] == [(1, [True], None)]


def test_a_page_counts_if_every_process_has_it() -> None:
    def play(*flags: bool) -> Callable[[AgreeingExecutor], Any]:
        def run(executor: AgreeingExecutor) -> Any:
            executor.submit_device(DeviceJob(TransferId(7), lambda: [], lambda: list(flags)))
            return until_ended(executor, 1)[0].value

        return run

    assert (
        together([play(True, True, False), play(True, False, True), play(True, True, True)])
        == [[True, False, False]] * 3
    )


def test_of_a_prompt_storage_has_what_every_process_has_a_file_of() -> None:
    full, swa = ComponentKind.FULL, ComponentKind.SWA

    def play(rank: int, found: dict[ComponentKind, list[int]]) -> Callable[[AgreeingExecutor], Any]:
        keys = {k: {p: PageKey(bytes([rank, p])) for p in pages} for k, pages in found.items()}

        def run(executor: AgreeingExecutor) -> Any:
            executor.submit_io(io(3, lambda: keys))
            return until_ended(executor, 1)[0].value

        return run

    results = together([play(0, {full: [2, 3, 4], swa: [3]}), play(1, {full: [2, 3], swa: [2, 3]})])
    for rank, found in enumerate(results):
        assert {kind: list(pages) for kind, pages in found.items()} == {full: [2, 3], swa: [3]}
        assert found[full][3] == bytes([rank, 3]), "the keys are the process's own: its files"


def test_a_failure_is_everybodys() -> None:
    def fails() -> list[bool]:
        raise OSError("disk on fire")

    def play(work: Callable[[], Any]) -> Callable[[AgreeingExecutor], Any]:
        def run(executor: AgreeingExecutor) -> Any:
            executor.submit_io(io(1, work))
            return until_ended(executor, 1)[0]

        return run

    for completion in together([play(lambda: [True]), play(fails)]):
        assert completion.value is None
        assert "disk on fire" in str(completion.error)


def test_one_order_and_one_clock() -> None:
    """Jobs end in different orders, at different times; what is handed out, and when by the clock, is the same."""

    def play(order: list[int]) -> Callable[[AgreeingExecutor], Any]:
        def run(executor: AgreeingExecutor) -> Any:
            turns = [threading.Event() for _ in order]
            turns[0].set()

            def work(number: int) -> Callable[[], list[bool]]:
                def wait_for_turn() -> list[bool]:
                    position = order.index(number)
                    assert turns[position].wait(TIMEOUT_S)
                    if position + 1 < len(order):
                        turns[position + 1].set()
                    return [True]

                return wait_for_turn

            for number in range(len(order)):
                lane = IoLane.READ if number % 2 else IoLane.WRITE
                executor.submit_io(IoJob(TransferId(number), work(number), lane))
            seen = []
            while len(seen) < len(order):
                executor.wait_any(TIMEOUT_S)
                seen += [(c.transfer_id, executor.clock()) for c in executor.poll()]
            return seen, executor.drain(TIMEOUT_S), executor.num_in_flight

        return run

    first, second = together([play([0, 1]), play([1, 0])])
    assert first == second
    assert first[1:] == (True, 0)


def test_time_does_not_pass_while_nothing_is_under_way() -> None:
    def play(executor: AgreeingExecutor) -> tuple[bool, bool]:
        idle = (
            executor.clock() == 0.0 and not executor.wait_any(TIMEOUT_S) and executor.poll() == []
        )
        stuck = threading.Event()
        executor.submit_io(io(1, lambda: [stuck.wait(TIMEOUT_S)]))
        waited = not executor.wait_any(0.05) and executor.clock() >= 0.05
        stuck.set()
        until_ended(executor, 1)
        return idle, waited

    assert together([play, play]) == [(True, True)] * 2


def test_the_star_carries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "zmq", reason="pyzmq comes with the sgl-jax engine, which is not installed here"
    )
    from sgl_jax_hicache.sgl_jax_engine import star
    from sgl_jax_hicache.sgl_jax_engine.agreement import AgreementError

    leader, port = star.Star.listen(3, "127.0.0.1")
    others = [star.Star.connect(rank, 3, "127.0.0.1", port) for rank in (1, 2)]
    heard: list[Any] = []

    def follow(seat: star.Star, rank: int) -> None:
        for number in range(50):
            heard.append(seat.exchange([rank, number]))

    threads = [
        threading.Thread(target=follow, args=(s, r)) for s, r in zip(others, (1, 2), strict=True)
    ]
    for thread in threads:
        thread.start()
    rounds = [leader.exchange([0, number]) for number in range(50)]
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert rounds == [[[rank, number] for rank in range(3)] for number in range(50)]
    assert sorted(heard) == sorted(rounds * 2)
    monkeypatch.setattr(star, "ROUND_TIMEOUT_S", 0.05)
    with pytest.raises(AgreementError, match="no word"):
        leader.exchange("anybody there?")
    for seat in (leader, *others):
        seat.close()
