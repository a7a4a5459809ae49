"""What goes wrong with one request ends that request: the others, and the engine, go on."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

import pytest
from engine_fakes import expected_output
from http_world import EngineWorld
from scheduler_world import Client, SchedulerWorld

from sgl_jax_hicache.engine.forward_batch import SamplingParams
from sgl_jax_hicache.engine.outputs import FinishKind, OutputChunk
from sgl_jax_hicache.engine.req import GenerateRequest
from sgl_jax_hicache.engine.requests import GenerateSpec

PROMPT, OTHER = [1, 2, 3, 4, 5], [9, 8, 7]
WAIT_S = 20.0


class BrokenMatcher:
    """Raises at its third token, as a tokenizer does for an id that it does not know."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, token_id: int) -> str | None:
        self._count += 1
        if self._count == 3:
            raise KeyError(token_id)
        return None


class BrokenSink(Client):
    """Takes `good` chunks and raises from then on."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self._good = good

    def __call__(self, chunk: OutputChunk) -> None:
        if len(self.chunks) == self._good:
            raise RuntimeError("the client is gone")
        super().__call__(chunk)


def submit(world: SchedulerWorld, sink: Callable[[OutputChunk], None], **fields: Any) -> None:
    """A request named "broken"."""
    sampling = SamplingParams(max_new_tokens=10)
    request = GenerateRequest("broken", tuple(PROMPT), sampling, sink, arrival_s=0.0, **fields)
    world.scheduler.submit(request)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_stop_conditions_that_raise_end_their_request_with_an_error(overlap: bool) -> None:
    world, broken = SchedulerWorld(overlap=overlap), Client()
    submit(world, broken, stop_matcher=BrokenMatcher())
    fine = world.submit("fine", OTHER, 10)
    world.run()
    assert fine.tokens == expected_output(OTHER, 10)
    finish = broken.last.finish
    assert finish is not None
    assert finish.kind is FinishKind.ERROR
    assert finish.message is not None and "its stop conditions failed" in finish.message
    assert broken.tokens == expected_output(PROMPT, 3)
    assert world.held_tokens() == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_sink_that_raises_ends_its_request(
    overlap: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world, broken = SchedulerWorld(overlap=overlap), BrokenSink(2 if stream else 0)
    submit(world, broken, stream=stream)
    fine = world.submit("fine", OTHER, 10)
    with caplog.at_level(logging.ERROR):
        world.run()
    assert broken.tokens == expected_output(PROMPT, 2 if stream else 0)
    assert fine.tokens == expected_output(OTHER, 10)
    assert "the tokens of broken cannot be delivered" in caplog.text
    assert world.held_tokens() == 0


def test_a_failing_engine_tells_every_client_though_one_of_them_raises() -> None:
    world = SchedulerWorld()
    submit(world, BrokenSink(0))
    fine = world.submit("fine", OTHER, 10)
    world.scheduler.fail_all("the device is gone")
    finish = fine.last.finish
    assert finish is not None and finish.kind is FinishKind.ERROR


def test_the_engine_lives_and_the_name_is_free_again() -> None:
    world = EngineWorld()
    try:
        spec = GenerateSpec(input_ids=PROMPT, rid="name", sampling=SamplingParams(max_new_tokens=3))
        world.engine.submit(spec, BrokenSink(0))
        assert world.released.wait(WAIT_S)
        chunks: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
        world.state()  # the scheduler has done with the first one
        world.engine.submit(spec, chunks.put)
        assert list(chunks.get(timeout=WAIT_S).token_ids) == expected_output(PROMPT, 3)
        assert world.engine.healthy
        world.assert_nothing_held()
    finally:
        assert world.engine.shutdown(5)
