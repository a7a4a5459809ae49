"""The host pools that a cache is built with: every kind has its share, and a budget too small for one is refused."""

from __future__ import annotations

import re

import pytest
from hybrid_checks import window_tokens
from hybrid_pools import FULL, HYBRIDS, STATE, SWA
from hybrid_world import HybridWorld, Settings

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError

hybrids = pytest.mark.parametrize("name", HYBRIDS)


@hybrids
def test_too_small_a_budget_is_refused_in_one_line_with_one_that_is_enough(name: str) -> None:
    with pytest.raises(HiCacheConfigError, match="less than one host page") as caught:
        HybridWorld(Settings(HYBRIDS[name], ratio=1e-6))
    message = str(caught.value)
    assert "\n" not in message
    found = re.search(r"use --hicache-ratio (\S+) or more", message)
    assert found is not None
    world = HybridWorld(Settings(HYBRIDS[name], ratio=float(found.group(1))))
    pages = {kind: world.host_pool(kind).num_pages for kind in HYBRIDS[name].kinds}
    assert pages[FULL] >= 1
    if SWA in pages:
        assert pages[SWA] > window_tokens(world) // world.settings.page_size
    if STATE in pages:
        assert pages[STATE] >= 2


@hybrids
@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0])
def test_a_prompt_as_long_as_the_full_host_pool_keeps_every_checkpoint(
    name: str, ratio: float
) -> None:
    """No kind runs out before the Full pages do: the whole prompt comes back from the host."""
    settings = Settings(
        HYBRIDS[name], device_pages=40, swa_pages=40, num_states=24, interval=16, ratio=ratio
    )
    world = HybridWorld(settings)
    page_size = settings.page_size
    num_pages = min(world.host_pool(FULL).num_pages, settings.device_pages - 1)
    num_tokens = num_pages * page_size // settings.interval * settings.interval
    assert num_tokens > 0
    prompt = list(range(1, num_tokens + 2))
    world.run(prompt)
    world.clear_device()
    assert world.match(prompt[:num_tokens]) == (0, num_tokens)
