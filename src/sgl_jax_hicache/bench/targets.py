"""What the figures must reach, on two cores and the CPU backend; the report puts them beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .record import Record, short


@dataclass(frozen=True)
class Target:
    """A bound on the value or the ratio of the records of a name that have these parameters."""

    name: str
    bound: float
    of: str = "ratio"
    at_least: bool = True
    where: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, record: Record) -> bool:
        """True if the record is one of those meant."""
        return record.name == self.name and all(
            record.params.get(key) == value for key, value in self.where.items()
        )

    def found(self, record: Record) -> float | None:
        """The figure that is bounded."""
        return record.ratio if self.of == "ratio" else record.value

    def met(self, record: Record) -> bool:
        """True if the record reaches the bound."""
        found = self.found(record)
        if found is None:
            return False
        return found >= self.bound if self.at_least else found <= self.bound

    def text(self, record: Record) -> str:
        """Such as "ratio 0.25 or more"."""
        unit = "ratio" if self.of == "ratio" else record.unit
        return f"{unit} {short(float(self.bound))} or {'more' if self.at_least else 'less'}"


_DEFAULT = {"scheme": "per_block", "executor": "threadpool"}

TARGETS: Sequence[Target] = (
    Target("transfer backup", 0.35, where={"pages": "64x4MB-f32", **_DEFAULT}),
    Target("transfer backup", 0.25, where={"pages": "64x4MB-bf16", **_DEFAULT}),
    Target("transfer load", 0.25, where={"pages": "64x4MB-f32", **_DEFAULT}),
    Target("transfer load", 0.05, where={"pages": "64x4MB-bf16", **_DEFAULT}),
    Target("transfer load", 0.05, where={"pages": "64x4MB-bf16-large-pool", **_DEFAULT}),
    Target("transfer backup", 0.10, where={"pages": "256x64KB-f32", **_DEFAULT}),
    Target("transfer load", 0.10, where={"pages": "256x64KB-f32", **_DEFAULT}),
    Target("host pool alloc + free", 1.5, at_least=False),
    Target("host pool alloc + free", 1.0, "value", at_least=False),
    Target("tree evict one node", 20.0, "value", at_least=False),
    Target("tree evict one node", 2.0, at_least=False),
    Target("tree match, all there", 200.0, "value", where={"given_as": "array"}),
    Target("tree match, all there", 100.0, "value", where={"given_as": "list"}),
    Target("tree insert, 512 of 1,024 shared", 25.0, "value"),
    Target("page keys from bytes", 0.5, where={"page_size": 64}),
    Target("storage set", 0.8),
    Target("storage get", 0.5, where={"against": "readinto"}),
    Target("storage exists", 20.0, "value", at_least=False),
    Target("storage exists", 1.5, at_least=False),
    Target("decode step, on / off", 1.02, "value", at_least=False),
    Target("TTFT, L2 hit", 0.05, at_least=False, where={"prompt_tokens": 2048}),
    Target("TTFT, L3 hit", 0.08, at_least=False, where={"prompt_tokens": 2048}),
    Target("replay hit rate", 1.0, where={"levels": "L1"}),
    Target("replay hit rate", 63.9, "value", where={"levels": "L1+L2+L3", "requests": 3993}),
    Target("replay engine thread per request", 1000.0, "value", at_least=False),
    Target("hybrid hit tokens", 0.9),
    Target("host memory held", 0.9),
    Target("host memory held", 1.1, at_least=False),
)


def judged(records: Sequence[Record]) -> list[tuple[Target, Record]]:
    """Every target with every record that it bounds."""
    return [(target, r) for target in TARGETS for r in records if target.applies(r)]


REASONS: Mapping[str, str] = {
    "replay engine thread per request": (
        "every page that a request computes moves down a level or two and pushes others out, and each is an array\n"
        "of its own, which the engine's thread hands to jax's programs and keeps the books of in Python. With L2\n"
        "that comes to about the bound. With L3 there are four times as many transfers to start and settle (on\n"
        "the whole trace 2.3 backups, 2.4 stores, 0.9 reads and 0.4 loads a request), while the workers that\n"
        "write and read take turns with the engine's thread in the interpreter. The replay settles all of it\n"
        "before it asks again; a running engine does so between the steps of a prefill. L1 alone stays far below\n"
        "the bound."
    ),
    "storage set": (
        "beyond the raw write and rename there are the checksum over the page, and a walk from the root down to the\n"
        "page's folder that follows no link, for every page."
    ),
    "tree insert, 512 of 1,024 shared": (
        "with a list, half of the time is CPython's, which reads a thousand numbers that lie anywhere in memory."
    ),
}
"""Why a bound may not be reached, by the name of the record."""
