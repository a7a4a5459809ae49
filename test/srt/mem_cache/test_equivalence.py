"""Which tier a prefix came from must not show: the distributions of whole continuations are equal from every tier.

For random tiny models (MHA, GQA, MLA) the same prompt is computed without any cache, computed with it, and answered
from device, host and storage; every next-token distribution (all log probabilities of the vocabulary) is compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
NUM_NEW_TOKENS = 8
PROMPT_LEN = 150


@dataclass(frozen=True)
class Case:
    """One way to run the engine."""

    page_size: int = 16
    chunk: int = 512
    overlap: bool = True
    scheme: HostScheme = HostScheme.PER_BLOCK
    async_impl: AsyncImpl = AsyncImpl.THREADPOOL
    policy: WritePolicy = WritePolicy.WRITE_THROUGH

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "serial"
        return (
            f"page{self.page_size}-chunk{self.chunk}-{overlap}-{self.scheme.value}"
            f"-{self.async_impl.value}-{self.policy.value}"
        )


CASES = (
    Case(),
    Case(overlap=False, async_impl=AsyncImpl.FUTURE, scheme=HostScheme.SLAB),
    Case(chunk=32, policy=WritePolicy.WRITE_THROUGH_AND_BACK),
    Case(page_size=1, chunk=64, async_impl=AsyncImpl.FUTURE),
    Case(
        page_size=1,
        overlap=False,
        scheme=HostScheme.SLAB,
        policy=WritePolicy.WRITE_THROUGH_AND_BACK,
    ),
    Case(page_size=64, chunk=128, scheme=HostScheme.SLAB),
    Case(
        page_size=64,
        overlap=False,
        async_impl=AsyncImpl.FUTURE,
        policy=WritePolicy.WRITE_THROUGH_AND_BACK,
    ),
)


def make_engine(model: str, case: Case, storage_path: Path | None) -> Engine:
    """An engine whose device pool holds one prompt and a half; without a path, one that never reuses anything."""
    hicache = (
        HiCacheConfig(
            storage=StorageKind.FILE,
            storage_path=storage_path,
            ratio=4.0,
            write_policy=case.policy,
            async_impl=case.async_impl,
            host_scheme=case.scheme,
        )
        if storage_path
        else HiCacheConfig()
    )
    return build_engine(
        EngineArgs(
            model_path=model,
            page_size=case.page_size,
            max_total_tokens=256,
            context_length=256,
            max_running_requests=4,
            chunked_prefill_size=case.chunk,
            disable_overlap_schedule=not case.overlap,
            disable_radix_cache=storage_path is None,
            hicache=hicache,
        )
    )


def ask(engine: Engine, prompt: list[int], num_new_tokens: int = NUM_NEW_TOKENS) -> dict[str, Any]:
    """The answer with the log probability of every token of the vocabulary at each position."""
    result: dict[str, Any] = engine.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": num_new_tokens, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=engine.tokenizer.vocab_size,
    )
    return result


def distributions(result: dict[str, Any]) -> np.ndarray:
    """float64[num_new_tokens, vocab] log probabilities, ordered by token id."""
    rows = result["meta_info"]["output_top_logprobs"]
    return np.array([[p for p, _, _ in sorted(row, key=lambda entry: entry[1])] for row in rows])


def tiers(result: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = result["meta_info"]["cached_tokens_details"]
    return {tier: n for tier, n in counts.items() if n}


def assert_equal_answers(result: dict[str, Any], reference: dict[str, Any]) -> None:
    assert result["output_ids"] == reference["output_ids"]
    difference = np.abs(distributions(result) - distributions(reference)).max()
    assert difference < MAX_LOGPROB_DIFFERENCE, f"max |logprob difference| {difference:g}"


def settle(engine: Engine) -> None:
    """Wait until no transfer is under way: what was computed has reached every tier it goes to."""
    deadline = time.monotonic() + 60.0
    while engine.get_server_info()["state"]["pending_transfers"]:
        assert time.monotonic() < deadline, "transfers do not come to an end"


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind in ("tiny-mha", "tiny-gqa", "tiny-mla") for case in CASES]
    + [("smollm2", CASES[0])],
    ids=str,
)
def test_answers_are_equal_from_every_tier(
    kind: str, case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = kind if kind == "smollm2" else f"random:{kind}:7"
    prompt = [int(t) for t in rng.integers(3, 250, PROMPT_LEN)]
    filler = [int(t) for t in rng.integers(3, 250, 250 - NUM_NEW_TOKENS)]
    reusable = (PROMPT_LEN - 1) // case.page_size * case.page_size
    with make_engine(model, case, None) as engine:
        reference = ask(engine, prompt)
        assert tiers(ask(engine, prompt)) == {"computed": PROMPT_LEN}
    assert len(set(reference["output_ids"])) > 1, "a model that repeats one token proves nothing"
    rest = {"computed": PROMPT_LEN - reusable}
    with make_engine(model, case, tmp_path) as engine:
        computed = ask(engine, prompt)
        settle(engine)
        assert tiers(computed) == {"computed": PROMPT_LEN}
        from_device = ask(engine, prompt)
        assert tiers(from_device) == {"device": reusable, **rest}
        ask(engine, filler, 1)
        from_host = ask(engine, prompt)
        assert tiers(from_host).get("host", 0) > reusable // 2
        assert from_host["meta_info"]["cached_tokens"] == reusable
        again_from_device = ask(engine, prompt)
        assert tiers(again_from_device) == {"device": reusable, **rest}
        assert engine.flush_cache()
        from_storage = ask(engine, prompt)
        assert tiers(from_storage) == {"storage": reusable, **rest}
    with make_engine(model, case, tmp_path) as engine:
        after_restart = ask(engine, prompt)
        assert tiers(after_restart) == {"storage": reusable, **rest}
    for result in (
        computed,
        from_device,
        from_host,
        again_from_device,
        from_storage,
        after_restart,
    ):
        assert_equal_answers(result, reference)
