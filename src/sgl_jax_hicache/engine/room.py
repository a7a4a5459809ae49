"""Amounts of device memory by kind: what is asked for, and what can be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """`full`, `swa`: token slots of the two KV pools; `states`: slots of the recurrent pool.

    A kind that a model does not have is 0 on both sides.
    """

    full: int = 0
    swa: int = 0
    states: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(self.full + other.full, self.swa + other.swa, self.states + other.states)

    def __sub__(self, other: Room) -> Room:
        return Room(self.full - other.full, self.swa - other.swa, self.states - other.states)

    def holds(self, need: Room) -> bool:
        """True if there is enough of every kind."""
        return need.full <= self.full and need.swa <= self.swa and need.states <= self.states

    def lacking(self, have: Room) -> Room:
        """What of this is missing in `have`, kind by kind."""
        return Room(
            max(0, self.full - have.full),
            max(0, self.swa - have.swa),
            max(0, self.states - have.states),
        )
