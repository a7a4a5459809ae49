"""How large the device pools of a model are, and whether they can work; told before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from .engine_args import STATES_PER_REQUEST, ArgumentError, EngineArgs
from .layers.recurrent_layer import chunk_tokens
from .model_config import LayerKind, ModelConfig
from .pool_budget import DeviceRoom, check_device_pool
from .swa_bounds import SWABounds


@dataclass(frozen=True)
class PoolSizes:
    """`tokens` of the full pool, `swa_tokens` of the sliding layers', 0 without them; the sentinels are not counted.

    `states`: slots of the recurrent pool without its dummy, 0 without recurrent layers: for each running request one
    that runs and `track_slots` that keep copies, the rest for the prefix cache.
    """

    tokens: int
    swa_tokens: int
    states: int
    track_slots: int

    def kv_bytes(self, config: ModelConfig, page_size: int, dtype: str) -> int:
        """Bytes of the KV pools, the sentinel pages included."""
        per_token = _bytes_per_token(config, dtype)
        return (self.tokens + page_size) * per_token[0] + (self.swa_tokens + page_size) * per_token[
            1
        ]

    def state_bytes(self, config: ModelConfig) -> int:
        """Bytes of the recurrent pool."""
        return (self.states + 1) * config.state_bytes_per_request()


def check_device_room(
    args: EngineArgs, config: ModelConfig, weight_bytes: int, room: DeviceRoom | None
) -> None:
    """Raises ArgumentError, with the largest --max-total-tokens that fits, if weights and pools do not fit `room`."""
    sizes, ratio = pool_sizes(args, config), args.swa_full_tokens_ratio
    full, swa = _bytes_per_token(config, args.dtype)
    # The smaller pool has a whole sentinel page too.
    sentinel_bytes = int((1 - ratio) * args.page_size * swa)
    unfinished_bytes = args.max_running_requests * config.unfinished_bytes_per_request(
        chunk_tokens(args.page_size)
    )
    check_device_pool(
        args.max_total_tokens,
        args.page_size,
        full + ratio * swa,
        weight_bytes + sizes.state_bytes(config) + unfinished_bytes + sentinel_bytes,
        room,
    )


def _bytes_per_token(config: ModelConfig, dtype: str) -> tuple[int, int]:
    """What one token takes in the full pool and in the sliding layers'."""
    full, swa = (LayerKind.FULL,), (LayerKind.SLIDING,)
    return config.kv_bytes_per_token(dtype, full), config.kv_bytes_per_token(dtype, swa)


def pool_sizes(args: EngineArgs, config: ModelConfig) -> PoolSizes:
    """Raises ArgumentError if a sliding layers' pool could not carry a long request alone."""
    track_slots = _track_slots(args, config)
    return PoolSizes(
        tokens=args.max_total_tokens,
        swa_tokens=0 if config.sliding_window is None else _swa_tokens(args, config.sliding_window),
        states=0 if config.recurrent is None else _states(args, track_slots),
        track_slots=track_slots,
    )


def _swa_tokens(args: EngineArgs, window: int) -> int:
    page_size, total = args.page_size, args.max_total_tokens
    tokens = int(total * args.swa_full_tokens_ratio) // page_size * page_size
    chunk = min(args.chunked_prefill_size, total)
    # With a slot for every slot of the full pool nothing is ever missing.
    least = min(total, SWABounds(page_size, window, chunk).prefilling)
    if tokens >= least:
        return tokens
    raise ArgumentError(
        f"--swa-full-tokens-ratio {args.swa_full_tokens_ratio:g} of --max-total-tokens {total}: {tokens} tokens "
        f"for sliding layers, but a window of {window} with --chunked-prefill-size {args.chunked_prefill_size} "
        f"needs {least}; use a larger ratio or pool, or smaller chunks"
    )


def _track_slots(args: EngineArgs, config: ModelConfig) -> int:
    if config.recurrent is None or args.disable_radix_cache:
        return 0
    return 1 if args.disable_overlap_schedule else 2


def _states(args: EngineArgs, track_slots: int) -> int:
    requests = args.max_running_requests
    if args.disable_radix_cache:
        return requests
    kept = args.max_recurrent_states or STATES_PER_REQUEST * requests
    return requests * (1 + track_slots) + kept
