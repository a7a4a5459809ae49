"""The engine as a library, over the fake runner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fakes import expected_output
from http_world import WAIT_S, EngineWorld

from sgl_jax_hicache.engine.engine import EngineBusyError
from sgl_jax_hicache.engine.forward_batch import SamplingParams
from sgl_jax_hicache.engine.outputs import FinishKind, OutputChunk
from sgl_jax_hicache.engine.requests import GenerateSpec, RequestError
from sgl_jax_hicache.engine.scheduler_thread import EngineStoppedError


@pytest.fixture
def world() -> Iterator[EngineWorld]:
    running = EngineWorld()
    yield running
    running.gate.set()
    running.engine.shutdown(5)


def test_generate_text_tokens_and_lists(world: EngineWorld) -> None:
    engine = world.engine
    one = engine.generate("abc", {"max_new_tokens": 4})
    assert one["output_ids"] == expected_output(b"abc", 4)
    assert engine.generate(input_ids=[1, 2], sampling_params=SamplingParams(3))[
        "output_ids"
    ] == expected_output([1, 2], 3)
    many = engine.generate(["a", "b"], {"max_new_tokens": 2})
    assert [answer["output_ids"] for answer in many] == [
        expected_output(b"a", 2),
        expected_output(b"b", 2),
    ]
    assert len(engine.generate(input_ids=[[1], [2]], sampling_params={"max_new_tokens": 1})) == 2


def test_generate_names_what_is_wrong(world: EngineWorld) -> None:
    for arguments, field in (
        ({}, "prompt"),
        ({"prompt": ""}, "text"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params"),
        ({"input_ids": [1, 2**31]}, "input_ids"),
        ({"prompt": ["a"], "stream": True}, "stream"),
    ):
        with pytest.raises(RequestError) as caught:
            world.engine.generate(**arguments)
        assert caught.value.field == field


def test_a_stream_that_is_given_up_frees_everything(world: EngineWorld) -> None:
    world.hold(from_step=2)
    stream = world.engine.generate("abc", {"max_new_tokens": 200}, stream=True)
    assert next(stream)["output_ids"] == expected_output(b"abc", 1)
    stream.close()
    world.gate.set()
    assert world.released.wait(WAIT_S)
    world.assert_nothing_held()


def test_many_threads(world: EngineWorld) -> None:
    prompts = [bytes([65 + i % 7] * (1 + i % 40)).decode() for i in range(40)]

    def ask(prompt: str) -> bool:
        answer = world.engine.generate(prompt, {"max_new_tokens": 6})
        return bool(answer["output_ids"] == expected_output(prompt.encode(), 6))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, prompts))
    world.assert_nothing_held()


def test_output_is_cut_to_the_context(world: EngineWorld) -> None:
    answer = world.engine.generate("a" * 500, {"max_new_tokens": 100})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_sampling_without_a_seed_gets_one_that_survives_retraction(world: EngineWorld) -> None:
    world.engine.generate("a", {"temperature": 1.0, "max_new_tokens": 2})
    world.engine.generate("a", {"temperature": 1.0, "max_new_tokens": 2, "seed": 7})
    seeds = {item.sampling.seed for batch in world.runner.batches for item in batch.items}
    assert None not in seeds
    assert 7 in seeds
    assert len(seeds) == 2


def test_shutdown_finishes_what_runs_and_a_second_one_returns_at_once(world: EngineWorld) -> None:
    world.hold(from_step=1)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(world.engine.generate, "abc", {"max_new_tokens": 5})
        assert world.dispatched.wait(WAIT_S)
        stopped = pool.submit(world.engine.shutdown, WAIT_S)
        world.gate.set()
        assert stopped.result(WAIT_S) is True
        assert answer.result(WAIT_S)["output_ids"] == expected_output(b"abc", 5)
    assert world.engine.shutdown(5) is True
    assert not world.engine.healthy
    with pytest.raises(EngineStoppedError):
        world.engine.generate("a")


def test_shutdown_at_its_deadline_aborts_what_runs(world: EngineWorld) -> None:
    world.hold(from_step=1)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(world.engine.generate, "abc", {"max_new_tokens": 400})
        assert world.dispatched.wait(WAIT_S)
        stopped = pool.submit(world.engine.shutdown, 0.0)
        world.gate.set()
        assert stopped.result(WAIT_S) is False
        finish = answer.result(WAIT_S)["meta_info"]["finish_reason"]
    assert finish["type"] in ("abort", "length")


def test_the_queue_is_bounded() -> None:
    world = EngineWorld(max_queued_requests=2)
    world.hold()
    done = threading.Semaphore(0)

    def sink(chunk: OutputChunk) -> None:
        if chunk.finish is not None:
            assert chunk.finish.kind is FinishKind.LENGTH
            done.release()

    spec = GenerateSpec(text="a", sampling=SamplingParams(max_new_tokens=2))
    for _ in range(2):
        world.engine.submit(spec, sink)
    with pytest.raises(EngineBusyError):
        world.engine.submit(spec, sink)
    world.gate.set()
    assert all(done.acquire(timeout=WAIT_S) for _ in range(2))
    world.engine.submit(spec, sink)
    assert done.acquire(timeout=WAIT_S)
    assert world.engine.shutdown(5)
