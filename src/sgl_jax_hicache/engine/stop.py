"""When a request has enough."""

from __future__ import annotations

from .outputs import FinishKind, FinishReason
from .req import Req


def finish_reason(req: Req, token_id: int) -> FinishReason | None:
    """Why the request ends with `token_id`, which is already its last output; None if it goes on.

    An end token beats a stop string, and both beat the length.
    """
    ends = not req.sampling.ignore_eos and token_id in req.request.eos_token_ids
    if ends or token_id in req.sampling.stop_token_ids:
        return FinishReason(FinishKind.STOP, matched=token_id)
    matcher = req.request.stop_matcher
    matched = matcher.add(token_id) if matcher is not None else None
    if matched is not None:
        return FinishReason(FinishKind.STOP, matched=matched)
    if len(req.output_ids) >= req.sampling.max_new_tokens:
        return FinishReason(FinishKind.LENGTH)
    return None
