"""An executor whose jobs end for the tree when they have ended in every process, and with what all of them have.

Each process copies and reads its own shards with an executor of its own. A page has arrived when every shard of it has;
of a prompt, storage has the pages of which every process has its file. So the trees of all processes see the same
results in the same order, and a rank that lost a file shortens the hit on all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sgl_jax.srt.mem_cache.hicache.async_impl import (
    Completion,
    DeviceJob,
    IoJob,
    TransferExecutor,
)
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, TransferId

from .agreement import Agreement

_WAIT_SLICE_S = 0.01


class BusyClock:
    """Seconds during which something was under way, as rank 0 counts them; the same in every process.

    Time in which nothing is under way does not pass: nobody exchanges anything then.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._leader_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self._now_s

    def start(self, leader_s: float) -> None:
        """Something is under way again."""
        self._leader_s = leader_s

    def advance(self, leader_s: float) -> None:
        """Rank 0's clock shows `leader_s`."""
        self._now_s += max(0.0, leader_s - self._leader_s)
        self._leader_s = leader_s


class AgreeingExecutor:
    """A `TransferExecutor` to its caller; `inner` does the work of this process. Scheduler thread only.

    Every call that may hand something out, or wait, is a round with the other processes, as long as anything is under
    way; so all of them must call the same methods in the same order, as replicas of one scheduler do.
    """

    def __init__(self, inner: TransferExecutor, agreement: Agreement) -> None:
        self._inner = inner
        self._agreement = agreement
        self.clock = BusyClock()
        self._waiting: dict[
            TransferId, list[Any]
        ] = {}  # id -> outcomes by rank, None where not yet
        self._mine: dict[TransferId, Completion] = {}
        self._agreed: list[Completion] = []
        self._num_processes = len(agreement.exchange("here"))

    @property
    def num_in_flight(self) -> int:
        """Jobs submitted whose completion was not handed out yet."""
        return len(self._waiting) + len(self._agreed)

    def submit_device(self, job: DeviceJob) -> None:
        """Take a job of all processes."""
        self._expect(job.transfer_id)
        self._inner.submit_device(job)

    def submit_io(self, job: IoJob) -> None:
        """Take a job of all processes."""
        self._expect(job.transfer_id)
        self._inner.submit_io(job)

    def poll(self) -> list[Completion]:
        """What has ended everywhere since the last poll."""
        if self._waiting:
            self._round()
        agreed, self._agreed = self._agreed, []
        return agreed

    def wait_any(self, timeout_s: float) -> bool:
        """Wait until `poll` would return something, by the common clock; at once if nothing is in flight."""
        end_s = self.clock() + timeout_s
        while self._waiting and not self._agreed and self.clock() < end_s:
            self._inner.wait_any(_WAIT_SLICE_S)
            self._round()
        return bool(self._agreed)

    def drain(self, deadline_s: float) -> bool:
        """Wait until every job has ended everywhere."""
        end_s = self.clock() + deadline_s
        while self._waiting and self.clock() < end_s:
            self._inner.wait_any(_WAIT_SLICE_S)
            self._round()
        return not self._waiting

    def renew_io(self) -> None:
        """Go on with new workers for file work. The jobs of the old ones end for all processes with one that fails."""
        self._inner.renew_io()

    def shutdown(self, deadline_s: float) -> bool:
        """Stop this process's workers; no round any more."""
        self._waiting.clear()
        self._agreed.clear()
        return self._inner.shutdown(deadline_s)

    def _expect(self, transfer_id: TransferId) -> None:
        if not self._waiting:
            # Time does not pass while nothing is under way: see where rank 0's clock is now.
            self.clock.start(self._agreement.exchange(time.monotonic())[0])
        self._waiting[transfer_id] = [None] * self._num_processes

    def _round(self) -> None:
        ended = {str(c.transfer_id): self._outcome(c) for c in self._inner.poll()}
        heard = self._agreement.exchange([time.monotonic(), ended])
        self.clock.advance(heard[0][0])
        for rank, (_, outcomes) in enumerate(heard):
            for text, outcome in outcomes.items():
                self._waiting[TransferId(int(text))][rank] = outcome
        for transfer_id in sorted(i for i, found in self._waiting.items() if None not in found):
            outcomes = self._waiting.pop(transfer_id)
            self._agreed.append(_agree(self._mine.pop(transfer_id), outcomes))

    def _outcome(self, completion: Completion) -> Any:
        """What the other processes need to know of it."""
        self._mine[completion.transfer_id] = completion
        if completion.error is not None:
            return {"error": completion.error}
        if isinstance(completion.value, Mapping):
            return {"pages": {kind.value: [*found] for kind, found in completion.value.items()}}
        return {"flags": [bool(flag) for flag in completion.value]}


def _agree(mine: Completion, outcomes: list[dict[str, Any]]) -> Completion:
    """This process's completion, cut down to what every process has."""
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        return Completion(mine.transfer_id, None, errors[0], mine.seconds)
    if "flags" in outcomes[0]:
        flags = [all(at_one) for at_one in zip(*(o["flags"] for o in outcomes), strict=True)]
        return Completion(mine.transfer_id, flags, None, mine.seconds)
    common: dict[ComponentKind, Any] = {}
    for kind, found in mine.value.items():
        pages = set.intersection(*(set(outcome["pages"][kind.value]) for outcome in outcomes))
        common[kind] = {page: key for page, key in found.items() if page in pages}
    return Completion(mine.transfer_id, common, None, mine.seconds)
