"""How much of their possible growth is kept free for running requests."""

from __future__ import annotations


class DecodeReserve:
    """A ratio in [base, 1]: 1 after a retraction, so that nothing is admitted into room that is about to be needed,
    then back to `base` by a small step for each decode step without one."""

    _DECAY_PER_STEP = 0.01

    def __init__(self, base: float) -> None:
        if not 0.0 <= base <= 1.0:
            raise ValueError(f"decode reserve ratio {base} outside [0, 1]")
        self._base = base
        self.ratio = base

    def on_retraction(self) -> None:
        """Be careful from now on."""
        self.ratio = 1.0

    def on_decode_step(self) -> None:
        """One step went well."""
        self.ratio = max(self._base, self.ratio - self._DECAY_PER_STEP)
