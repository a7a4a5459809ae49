"""What a request yields: chunks of tokens, and at the end the reason and the account."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_jax.srt.mem_cache.hicache.types import TierTokens


class FinishKind(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class FinishReason:
    """`matched`: the token id or the stop string of a STOP. `message`: what went wrong, for ABORT and ERROR."""

    kind: FinishKind
    matched: int | str | None = None
    message: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a sampled token, and the likeliest tokens (id, log probability) if they were asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestStats:
    """The account of one request. Times are seconds since its arrival, None until they are known."""

    prompt_tokens: int
    completion_tokens: int = 0
    tiers: TierTokens = field(default_factory=TierTokens)
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_latency_s: float | None = None
    num_retractions: int = 0


@dataclass(frozen=True)
class OutputChunk:
    """New tokens of one request. The last chunk has `finish` set, possibly with no tokens."""

    rid: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    stats: RequestStats


OutputSink = Callable[[OutputChunk], None]
"""Takes the chunks of one request, in order, on the scheduler thread; must neither block nor raise."""
