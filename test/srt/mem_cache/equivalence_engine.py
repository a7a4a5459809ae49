"""Engines whose answers are compared to the last log probability, and what is read off an answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    StorageKind,
    WritePolicy,
)
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

MAX_LOGPROB_DIFFERENCE = 1e-5
MAX_RUNNING_REQUESTS = 4

Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One way to run the engine. `pool_tokens`: of the device pools, which one prompt may fill; `interval`: tokens
    between checkpoints, None for the one chosen from the model."""

    page_size: int = 16
    chunk: int = 512
    overlap: bool = True
    scheme: HostScheme = HostScheme.PER_BLOCK
    async_impl: AsyncImpl = AsyncImpl.THREADPOOL
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    interval: int | None = None
    host_ratio: float = 4.0
    pool_tokens: int = 256

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "serial"
        every = f"-every{self.interval}" if self.interval else ""
        return (
            f"page{self.page_size}-chunk{self.chunk}-{overlap}-{self.scheme.value}"
            f"-{self.async_impl.value}-{self.policy.value}{every}"
        )


def make_engine(model: str, case: Case, storage_path: Path | None) -> Engine:
    """An engine whose device pool holds one prompt and a half; without a path, one that never reuses anything."""
    hicache = (
        HiCacheConfig(
            storage=StorageKind.FILE,
            storage_path=storage_path,
            ratio=case.host_ratio,
            write_policy=case.policy,
            async_impl=case.async_impl,
            host_scheme=case.scheme,
            checkpoint_interval=case.interval,
        )
        if storage_path
        else HiCacheConfig()
    )
    return build_engine(
        EngineArgs(
            model_path=model,
            page_size=case.page_size,
            max_total_tokens=case.pool_tokens,
            swa_full_tokens_ratio=1.0,
            # Pools of one size with and without overlap, which takes a track slot more: the same compiled programs.
            max_recurrent_states=(4 if case.overlap else 5) * MAX_RUNNING_REQUESTS,
            context_length=case.pool_tokens + 16,
            max_running_requests=MAX_RUNNING_REQUESTS,
            chunked_prefill_size=case.chunk,
            disable_overlap_schedule=not case.overlap,
            disable_radix_cache=storage_path is None,
            hicache=hicache,
        )
    )


def ask(engine: Engine, prompt: list[int], num_new_tokens: int) -> Answer:
    """The answer with the log probability of every token of the vocabulary at each position."""
    (answer,) = ask_together(engine, [prompt], num_new_tokens)
    return answer


def ask_together(engine: Engine, prompts: list[list[int]], num_new_tokens: int) -> list[Answer]:
    """The same for several prompts at once."""
    answers: list[Answer] = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": num_new_tokens, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=engine.tokenizer.vocab_size,
    )
    return answers


def random_prompt(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Tokens that every model has and none of which ends an answer."""
    return [int(token) for token in rng.integers(3, 250, num_tokens)]


def random_words(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Tokens of a large vocabulary that are whole words or large parts of one."""
    return [int(token) for token in rng.integers(1_000, 40_000, num_tokens)]


def distributions(result: Answer) -> np.ndarray:
    """float64[num_new_tokens, vocab] log probabilities, ordered by token id."""
    rows = result["meta_info"]["output_top_logprobs"]
    ordered = np.full((len(rows), len(rows[0])), np.nan)
    for values, row in zip(ordered, rows, strict=True):
        logprobs, ids, _ = zip(*row, strict=True)
        values[list(ids)] = logprobs
    assert not np.isnan(ordered).any(), "a token without its log probability"
    return ordered


def tiers(result: Answer) -> dict[str, int]:
    """Prompt tokens by the tier that served them, without those that served none."""
    counts: dict[str, int] = result["meta_info"]["cached_tokens_details"]
    return {tier: n for tier, n in counts.items() if n}


def assert_equal_answers(result: Answer, reference: Answer) -> None:
    """The same tokens, and all log probabilities within `MAX_LOGPROB_DIFFERENCE`."""
    assert result["output_ids"] == reference["output_ids"]
    difference = np.abs(distributions(result) - distributions(reference)).max()
    assert difference < MAX_LOGPROB_DIFFERENCE, f"max |logprob difference| {difference:g}"


def settle(engine: Engine) -> None:
    """Wait until no transfer is under way: what was computed has reached every tier it goes to."""
    deadline = time.monotonic() + 60.0
    while engine.get_server_info()["state"]["pending_transfers"]:
        assert time.monotonic() < deadline, "transfers do not come to an end"
