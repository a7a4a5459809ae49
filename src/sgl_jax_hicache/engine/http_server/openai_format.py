"""Answers in the OpenAI shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..generation import Generation
from ..outputs import FinishReason


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """The account of one HTTP request: the sum over its prompts, cached tokens by tier."""
    stats = [generation.stats for generation in generations]
    prompt_tokens = sum(one.prompt_tokens for one in stats)
    completion_tokens = sum(one.completion_tokens for one in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.tiers.cached for one in stats),
            "device": sum(one.tiers.device for one in stats),
            "host": sum(one.tiers.host for one in stats),
            "storage": sum(one.tiers.storage for one in stats),
            "computed": sum(one.tiers.computed for one in stats),
        },
    }


def finish_name(finish: FinishReason | None) -> str | None:
    """`stop`, `length`, or the engine's word for an answer that is none."""
    return None if finish is None else finish.kind.value


def completion_logprobs(
    generation: Generation, first_token: int, text_offset: int
) -> dict[str, Any]:
    """The `logprobs` object of /v1/completions for the tokens from `first_token` on."""
    entries = generation.logprobs[first_token:]
    offsets = []
    for entry in entries:
        offsets.append(text_offset)
        text_offset += len(generation.token_text(entry.token_id))
    return {
        "tokens": [generation.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {generation.token_text(token): logprob for token, logprob in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def chat_logprobs(generation: Generation, first_token: int) -> dict[str, Any]:
    """The `logprobs` object of /v1/chat/completions for the tokens from `first_token` on."""
    return {
        "content": [
            {
                **_chat_token(generation, entry.token_id, entry.logprob),
                "top_logprobs": [
                    _chat_token(generation, token, logprob) for token, logprob in entry.top
                ],
            }
            for entry in generation.logprobs[first_token:]
        ]
    }


def _chat_token(generation: Generation, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": generation.token_text(token_id),
        "logprob": logprob,
        "bytes": list(generation.token_bytes(token_id)),
    }
