"""How the scheduler processes of one engine agree, beside JAX.

With `--nnodes N` every process runs the same scheduler on the same requests, and the trees of all must stay alike. What
ends when a copy or a file is done does not end everywhere at once, so nothing may be taken note of before all have it.
`exchange` is a round in which every process says something and hears what all said; all call it equally often, because
they call it at the same points of the same loop. It uses a socket of its own (see `star`): a collective of JAX on the
scheduler's thread would meet those of the forward thread in another order on each process.
"""

from __future__ import annotations

from typing import Any, Protocol


class AgreementError(RuntimeError):
    """Another process is gone, or out of step."""


class Agreement(Protocol):
    """Rounds between all processes; scheduler thread only."""

    def exchange(self, said: Any) -> list[Any]:
        """Say something that JSON can carry; returns what every process said, by rank. Waits for all of them."""
        ...
