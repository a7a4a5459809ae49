"""The number of reused prompt tokens, with the tiers they came from.

The engine sends that number from the scheduler through the detokenizer to the process that answers, untouched. An int
that carries the tiers with it needs no change to any message on the way. No engine and no jax here: the detokenizer
imports this module when it unpacks one.
"""

from __future__ import annotations


class CachedTokens(int):
    """An int with `tiers`: tokens of the prompt by where they came from, names as in `Tier`."""

    tiers: dict[str, int]

    def __new__(cls, value: int, tiers: dict[str, int]) -> CachedTokens:
        """`value` reused tokens, of which `tiers` tells the origin."""
        self = super().__new__(cls, value)
        self.tiers = tiers
        return self

    def __getnewargs__(self) -> tuple[int, dict[str, int]]:  # type: ignore[override]
        """What rebuilds it in another process."""
        return int(self), self.tiers
