"""How large the pools become, and which sizes are refused because a long request could not run in them alone."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_jax_hicache.engine.engine_args import ArgumentError, EngineArgs
from sgl_jax_hicache.engine.pool_budget import DeviceRoom
from sgl_jax_hicache.engine.pool_sizes import PoolSizes, check_device_room, pool_sizes
from sgl_jax_hicache.engine.swa_bounds import SWABounds
from sgl_jax_hicache.engine.weights import read_config


def _sizes(name: str, **settings: Any) -> PoolSizes:
    model = f"random:{name}:0"
    return pool_sizes(EngineArgs(model_path=model, **settings), read_config(model))


def test_pools_that_a_model_does_not_need_are_empty() -> None:
    assert _sizes("tiny-mha", max_total_tokens=1024) == PoolSizes(1024, 0, 0, 0)
    assert _sizes("tiny-swa", max_total_tokens=1024) == PoolSizes(1024, 816, 0, 0)
    assert _sizes("tiny-recurrent", max_total_tokens=1024) == PoolSizes(1024, 0, 8 * 3 + 32, 2)
    assert _sizes("tiny-hybrid", max_total_tokens=1024) == PoolSizes(1024, 816, 8 * 3 + 32, 2)


def test_states_for_requests_and_for_the_cache() -> None:
    requests = {"max_running_requests": 2}
    assert _sizes("tiny-recurrent", **requests).states == 2 * 3 + 8
    assert _sizes("tiny-recurrent", max_recurrent_states=5, **requests).states == 2 * 3 + 5
    normal = _sizes("tiny-recurrent", disable_overlap_schedule=True, **requests)
    assert (normal.states, normal.track_slots) == (2 * 2 + 8, 1)
    alone = _sizes("tiny-recurrent", disable_radix_cache=True, **requests)
    assert (alone.states, alone.track_slots) == (2, 0)


def test_the_smallest_pool_for_sliding_layers_is_named_and_accepted() -> None:
    # Window 40 in pages of 16: 48 locked, 80 kept; 80 + 512 for a chunk.
    with pytest.raises(ArgumentError, match=r"512 tokens for sliding layers.* needs 592; use"):
        _sizes("tiny-swa", max_total_tokens=1024, swa_full_tokens_ratio=0.5)
    least = _sizes("tiny-swa", max_total_tokens=1024, swa_full_tokens_ratio=592 / 1024)
    assert least.swa_tokens == 592
    # Small chunks do not help below two windows, and a slot for every slot is always enough.
    few = {"max_total_tokens": 1024, "chunked_prefill_size": 16}
    with pytest.raises(ArgumentError, match="needs 160"):
        _sizes("tiny-swa", swa_full_tokens_ratio=159 / 1024, **few)
    assert _sizes("tiny-swa", swa_full_tokens_ratio=160 / 1024, **few).swa_tokens == 160
    assert _sizes("tiny-swa", max_total_tokens=32, swa_full_tokens_ratio=1.0).swa_tokens == 32


@pytest.mark.parametrize("name", ["tiny-mha", "tiny-swa", "tiny-swa-only", "tiny-hybrid"])
def test_the_largest_pools_that_fit_are_named_and_fit(name: str) -> None:
    model = f"random:{name}:0"
    config, room = read_config(model), DeviceRoom(40 << 20, "40 MiB on a thing")

    def check(tokens: int) -> None:
        args = EngineArgs(model_path=model, max_total_tokens=tokens, swa_full_tokens_ratio=0.7)
        check_device_room(args, config, 1 << 20, room)
        sizes = pool_sizes(args, config)
        taken = sizes.kv_bytes(config, 16, "float32") + sizes.state_bytes(config)
        assert taken + (1 << 20) <= room.budget_bytes

    with pytest.raises(ArgumentError, match="use --max-total-tokens") as caught:
        check(16_000_000)
    largest = int(str(caught.value).partition("use --max-total-tokens ")[2].split()[0])
    check(largest)
    with pytest.raises(ArgumentError):
        check(largest + 16)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
def test_bounds_cover_every_window(page_size: int, window: int) -> None:
    bounds = SWABounds(page_size, window, chunk_tokens=64)
    for pre_len in range(200):
        first = max(0, pre_len - window + 1) // page_size * page_size
        needed = -(-(pre_len + 1) // page_size) * page_size - first
        assert needed <= bounds.kept - page_size, "one page more than needed"
        locked = -(-pre_len // page_size) * page_size - first
        if pre_len % page_size == 0:
            assert locked <= bounds.locked


def test_growth_is_what_is_missing_to_the_bound() -> None:
    bounds = SWABounds(page_size=4, window=10, chunk_tokens=16)
    assert (bounds.locked, bounds.kept, bounds.prefilling, bounds.decoding) == (12, 20, 40, 40)

    def growth(seq: int, new: int, tree: int = 0, freed: int = 0, prefills: bool = True) -> int:
        return bounds.growth(
            seq_len=seq, new_len=new, tree_len=tree, freed_len=freed, prefills=prefills
        )

    assert growth(0, 6) == 8
    assert growth(0, 1000) == 40
    assert growth(64, 1000, tree=64) == 40 - 12
    assert growth(4, 1000, tree=4) == 40 - 4
    assert growth(70, 1000, tree=64, prefills=False) == 40 - 12 - 8
    assert growth(100, 1000, tree=64, freed=88, prefills=False) == 40 - 12 - 12
    assert growth(100, 1000, prefills=False) == 0, "it holds more than the bound already"
