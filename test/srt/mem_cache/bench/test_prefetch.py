"""The benchmark of prefetch policies: simulated time, so its figures repeat and can be told beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_jax.srt.mem_cache.hicache.config import PrefetchPolicy
from sgl_jax_hicache.bench.__main__ import main
from sgl_jax_hicache.bench.prefetch import Setting, simulate
from sgl_jax_hicache.bench.trace import BLOCK_TOKENS, TraceRequest

COMPUTE = 1000.0
"""Tokens a second: a block takes 0.512 s."""

FAR_APART = [TraceRequest(100_000 * i, tuple(range(10 * i, 10 * i + 4))) for i in range(3)]
WAITING = Setting(
    PrefetchPolicy.WAIT_COMPLETE,
    deadline_s=5.0,
    threshold=0,
    read_gb_s=BLOCK_TOKENS * 1000 / 1e9 / 0.1,  # a block in 0.1 s
    compute_tokens_s=COMPUTE,
    token_bytes=1000,
    l1_blocks=16,
    l2_blocks=16,
)


def test_waiting_gives_all_that_is_stored_and_costs_its_reading() -> None:
    outcome = simulate(WAITING, FAR_APART)
    assert outcome.tiers.storage == 3 * 4 * BLOCK_TOKENS
    for seconds in outcome.first_token_s:
        assert seconds == pytest.approx(4 * 0.1, abs=0.05)


def test_without_waiting_an_idle_server_computes_everything() -> None:
    outcome = simulate(replace(WAITING, policy=PrefetchPolicy.BEST_EFFORT), FAR_APART)
    assert outcome.tiers.computed == 3 * 4 * BLOCK_TOKENS
    for seconds in outcome.first_token_s:
        assert seconds == pytest.approx(4 * BLOCK_TOKENS / COMPUTE, abs=0.02)


def test_a_disk_that_is_too_slow_is_waited_for_no_longer_than_the_timeout() -> None:
    slow = replace(WAITING, read_gb_s=WAITING.read_gb_s / 100)  # a block in 10 s
    timeout = simulate(replace(slow, policy=PrefetchPolicy.TIMEOUT, deadline_s=1.0), FAR_APART)
    assert timeout.tiers.computed == 3 * 4 * BLOCK_TOKENS
    for seconds in timeout.first_token_s:
        assert seconds == pytest.approx(1.0 + 4 * BLOCK_TOKENS / COMPUTE, abs=0.05)


def test_what_waits_in_the_queue_is_read_meanwhile_without_waiting() -> None:
    """The second request's pages arrive while the first is computed."""
    together = [replace(FAR_APART[0], arrival_ms=0), replace(FAR_APART[1], arrival_ms=1)]
    outcome = simulate(replace(WAITING, policy=PrefetchPolicy.BEST_EFFORT), together)
    assert outcome.tiers.computed == outcome.tiers.storage == 4 * BLOCK_TOKENS


def test_a_threshold_leaves_short_prompts_to_the_device() -> None:
    outcome = simulate(replace(WAITING, threshold=4 * BLOCK_TOKENS + 1), FAR_APART)
    assert outcome.tiers.computed == 3 * 4 * BLOCK_TOKENS


def test_a_wrong_option_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["prefetch", "--compute-rate", "0"])
    assert end.value.code == 2
    assert "greater than 0" in capsys.readouterr().err
