"""One dispatched step and its results on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .forward_batch import StepOutput
from .outputs import TokenLogprob
from .req import Req


@dataclass(frozen=True)
class InFlightStep:
    """A step that the device is working on; `reqs` in the order of its batch's items.

    `started_s` is when the scheduler began to plan it.
    """

    output: StepOutput
    reqs: tuple[Req, ...]
    started_s: float


def read_tokens(output: StepOutput) -> list[int]:
    """The sampled token of each item. Blocks until the device is done."""
    return [int(token) for token in np.asarray(output.next_token_ids)[: len(output.batch.items)]]


def read_logprobs(output: StepOutput) -> list[TokenLogprob]:
    """Log probability, and the top ones that were asked for, of each item's token."""
    num_items = len(output.batch.items)
    tokens = read_tokens(output)
    chosen = np.asarray(output.next_logprobs)[:num_items].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * num_items
    if output.top_logprobs is not None:
        ids, values = (np.asarray(array)[:num_items].tolist() for array in output.top_logprobs)
        tops = [
            tuple(zip(ids[i], values[i], strict=True))[: item.top_logprobs_num]
            for i, item in enumerate(output.batch.items)
        ]
    return [
        TokenLogprob(token, logprob, top)
        for token, logprob, top in zip(tokens, chosen, tops, strict=True)
    ]
