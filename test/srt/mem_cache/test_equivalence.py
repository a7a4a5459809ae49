"""Which tier a prefix came from must not show: the distributions of whole continuations are equal from every tier.

For random tiny models (MHA, GQA, MLA) the same prompt is computed without any cache, computed with it, and answered
from device, host and storage; every next-token distribution (all log probabilities of the vocabulary) is compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from equivalence_engine import (
    Case,
    ask,
    assert_equal_answers,
    make_engine,
    random_prompt,
    random_words,
    settle,
    tiers,
)

from sgl_jax.srt.mem_cache.hicache.config import AsyncImpl, HostScheme, WritePolicy

NUM_NEW_TOKENS = 8
PROMPT_LEN = 150

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


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind in ("tiny-mha", "tiny-gqa", "tiny-mla") for case in CASES]
    + [("smollm2", CASES[0])]
    + [pytest.param("smollm2", case, marks=pytest.mark.matrix) for case in CASES[1:]],
    ids=str,
)
def test_answers_are_equal_from_every_tier(
    kind: str, case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = kind if kind == "smollm2" else f"random:{kind}:7"
    # Of the low tokens alone, which are single bytes, SmolLM2 often makes nothing but one more of them.
    tokens = random_words if kind == "smollm2" else random_prompt
    prompt = tokens(rng, PROMPT_LEN)
    filler = tokens(rng, 250 - NUM_NEW_TOKENS)
    reusable = (PROMPT_LEN - 1) // case.page_size * case.page_size
    with make_engine(model, case, None) as engine:
        reference = ask(engine, prompt, NUM_NEW_TOKENS)
        assert tiers(ask(engine, prompt, NUM_NEW_TOKENS)) == {"computed": PROMPT_LEN}
    assert len(set(reference["output_ids"])) > 1, "a model that repeats one token proves nothing"
    rest = {"computed": PROMPT_LEN - reusable}
    with make_engine(model, case, tmp_path) as engine:
        computed = ask(engine, prompt, NUM_NEW_TOKENS)
        settle(engine)
        assert tiers(computed) == {"computed": PROMPT_LEN}
        from_device = ask(engine, prompt, NUM_NEW_TOKENS)
        assert tiers(from_device) == {"device": reusable, **rest}
        ask(engine, filler, 1)
        from_host = ask(engine, prompt, NUM_NEW_TOKENS)
        assert tiers(from_host).get("host", 0) > reusable // 2
        assert from_host["meta_info"]["cached_tokens"] == reusable
        again_from_device = ask(engine, prompt, NUM_NEW_TOKENS)
        assert tiers(again_from_device) == {"device": reusable, **rest}
        assert engine.flush_cache()
        from_storage = ask(engine, prompt, NUM_NEW_TOKENS)
        assert tiers(from_storage) == {"storage": reusable, **rest}
    with make_engine(model, case, tmp_path) as engine:
        after_restart = ask(engine, prompt, NUM_NEW_TOKENS)
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
