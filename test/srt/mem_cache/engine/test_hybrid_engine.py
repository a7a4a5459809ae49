"""Engines over models with sliding-window and recurrent layers: whole requests through small pools, and retracted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

NUM_NEW_TOKENS = 24


@contextmanager
def engine_of(name: str, **settings: Any) -> Iterator[Engine]:
    defaults = {
        "max_total_tokens": 192,  # too few for all prompts and their answers at once
        "swa_full_tokens_ratio": 1.0,
        "context_length": 256,
        "max_running_requests": 4,
        "decode_reserve_ratio": 0.0,
        "disable_radix_cache": True,
    }
    args = EngineArgs(model_path=f"random:{name}:5", **{**defaults, **settings})
    with build_engine(args) as engine:
        yield engine


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [[int(t) for t in rng.integers(0, 256, n)] for n in (150, 7, 90, 33, 64, 1)]


def ask(engine: Engine, ids: Any) -> Any:
    return engine.generate(
        input_ids=ids, sampling_params={"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    )


@pytest.mark.parametrize("name", ["tiny-swa", "tiny-hybrid"])
def test_requests_together_retracted_and_chunked_are_as_alone(name: str) -> None:
    with engine_of(name) as engine:
        alone = [ask(engine, ids)["output_ids"] for ids in prompts()]
        assert ask(engine, prompts()[0])["meta_info"]["cached_tokens"] == 0
        expect_retracted(ask(engine, prompts()), alone)
    settings = {"chunked_prefill_size": 48, "swa_full_tokens_ratio": 0.9}
    with engine_of(name, disable_overlap_schedule=True, **settings) as engine:
        expect_retracted(ask(engine, prompts()), alone)


def expect_retracted(answers: list[dict[str, Any]], outputs: list[list[int]]) -> None:
    """The very tokens, though some requests had to start again."""
    assert [answer["output_ids"] for answer in answers] == outputs
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("name", ["tiny-swa", "tiny-swa-only", "tiny-hybrid"])
def test_a_small_pool_for_sliding_layers_gives_the_tokens_of_a_large_one(name: str) -> None:
    long = [prompts()[0] * 3, prompts()[2] * 2]  # 450 and 180 tokens, through a pool of 160
    settings = {"max_total_tokens": 1024, "context_length": 1024, "chunked_prefill_size": 32}
    with engine_of(name, **settings) as engine:
        alone = [ask(engine, ids)["output_ids"] for ids in long]
    settings["disable_overlap_schedule"] = name == "tiny-swa-only"
    with engine_of(name, swa_full_tokens_ratio=160 / 1024, **settings) as engine:
        state = engine.get_server_info()["state"]
        assert state["swa"]["pool_tokens"] == state["swa"]["free_tokens"] == 160
        assert [answer["output_ids"] for answer in ask(engine, long)] == alone
        state = engine.get_server_info()["state"]
        assert state["free_tokens"] == 1024
        assert state["swa"]["free_tokens"] == 160


def test_an_abort_leaves_nothing_behind_for_the_next_request() -> None:
    with engine_of("tiny-hybrid") as engine:
        want = ask(engine, prompts()[2])["output_ids"]
        stream = engine.generate(
            input_ids=prompts()[0], sampling_params={"max_new_tokens": 40}, stream=True
        )
        next(stream)
        stream.close()
        assert ask(engine, prompts()[2])["output_ids"] == want
