"""Admission of waiting requests: held back while pages come from storage, and counted by tier."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def request_name(req: Any) -> str:
    """What a request's prefetch is known by. The engine's `rid` is text, or now and then a list with one text."""
    return str(req.rid)


class HiCachePrefillAdder(PrefillAdder):
    """The engine's, with the two things it lacks. With another cache than ours it is the engine's."""

    def add_one_req(self, req: Any) -> AddReqResult:
        """Admit `req`, or leave it in the queue and go on with the next one while its pages are on their way.

        Sets `req.hicache_tiers` (TierTokens) at its first admission.
        """
        tree = self.tree_cache
        if not isinstance(tree, UnifiedRadixCache):
            return super().add_one_req(req)
        if not tree.prefetch_ready(request_name(req)):
            # Not in can_run_list: to the engine that is a request which stays in the queue.
            return AddReqResult.CONTINUE
        device_len = len(req.prefix_indices)
        result = super().add_one_req(req)
        admitted = self.can_run_list[req.dp_rank or 0]
        if admitted and admitted[-1] is req and not hasattr(req, "hicache_tiers"):
            req.hicache_tiers = tree.tier_tokens(
                request_name(req), len(req.origin_input_ids), device_len, len(req.prefix_indices)
            )
        return result
