"""What the demo found, as tables for a person, `demo-report.json` for a program and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sgl_jax.srt.mem_cache.hicache.types import Tier
from sgl_jax_hicache.provenance import commit, machine

from .play import Record, long_prompts_only, median_ttft_ms, mismatches, total_tokens

TIER_TITLES = {
    Tier.DEVICE: "L1 device",
    Tier.HOST: "L2 host",
    Tier.STORAGE: "L3 files",
    Tier.COMPUTED: "computed",
}
MOVE_TITLES = {
    "backup": "device -> host",
    "load": "host -> device",
    "store": "host -> files",
    "fetch": "files -> host",
}


@dataclass(frozen=True)
class Findings:
    """All records of the three runs and the bytes that moved in those with a cache."""

    without_cache: Sequence[Record]
    with_cache: Sequence[Record]
    after_restart: Sequence[Record]
    bytes_moved: dict[str, int]

    @property
    def cached_runs(self) -> list[Record]:
        """Everything that was asked of a server with HiCache on."""
        return [*self.with_cache, *self.after_restart]

    @property
    def mismatched(self) -> list[str]:
        """Names of the answers that differ from those without a cache."""
        return mismatches(self.without_cache, self.cached_runs)

    def as_json(self) -> dict[str, Any]:
        """The content of `demo-report.json`."""
        return {
            "mismatched_answers": len(self.mismatched),
            "tokens": asdict(total_tokens(self.cached_runs)),
            "ttft_ms": median_ttft_ms(self.cached_runs),
            "long_prompt_ttft_ms": {
                tier.value: ms for tier, ms in self.long_prompt_ttft_ms().items()
            },
            "bytes_moved": self.bytes_moved,
            "machine": machine(),
            "commit": commit(),
        }

    def long_prompt_ttft_ms(self) -> dict[Tier, float | None]:
        """Median time to first token of the 2,000-token prompts: computed without any cache, and from L2 and L3."""
        cached = median_ttft_ms(long_prompts_only(self.cached_runs))
        computed = median_ttft_ms(long_prompts_only(self.without_cache))
        return {
            Tier.COMPUTED: computed["computed"],
            Tier.HOST: cached["host"],
            Tier.STORAGE: cached["storage"],
        }


def run_table(title: str, records: Sequence[Record]) -> Table:
    """One row per request, in tokens: where its prompt came from, and the time to the first token."""
    table = Table(title=title, title_justify="left")
    table.add_column("request")
    for heading in ("prompt", *TIER_TITLES.values(), "first token"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        answer = record.answer
        counts = [getattr(answer.tiers, tier.value) for tier in TIER_TITLES]
        table.add_row(
            record.step.name,
            f"{answer.prompt_tokens:,}",
            *(f"{count:,}" if count else "" for count in counts),
            _ms(1000 * answer.ttft_s),
        )
    return table


def summary_table(findings: Findings) -> Table:
    """Prompt tokens and median time to first token by level."""
    table = Table(title="Where the prompt tokens came from", title_justify="left")
    table.add_column("level")
    for heading in ("prompt tokens", "share", "median first token"):
        table.add_column(heading, justify="right")
    tokens = asdict(total_tokens(findings.cached_runs))
    ttft_ms = median_ttft_ms(findings.cached_runs)
    for tier, tier_title in TIER_TITLES.items():
        share = tokens[tier.value] / max(1, sum(tokens.values()))
        table.add_row(
            tier_title, f"{tokens[tier.value]:,}", f"{share:.0%}", _ms(ttft_ms[tier.value])
        )
    return table


def moved_table(findings: Findings) -> Table:
    """Bytes moved between the levels."""
    table = Table(title="Bytes moved", title_justify="left")
    table.add_column("direction")
    table.add_column("MiB", justify="right")
    for kind, num_bytes in findings.bytes_moved.items():
        table.add_row(MOVE_TITLES[kind], f"{num_bytes / 2**20:,.1f}")
    return table


def long_prompt_table(findings: Findings) -> Table:
    """The 2,000-token prompt: recomputed, from L2 and from L3."""
    table = Table(title="First token of a 2,000-token prompt", title_justify="left")
    table.add_column("level")
    table.add_column("median", justify="right")
    table.add_column("of recomputing", justify="right")
    ttft_ms = findings.long_prompt_ttft_ms()
    recomputed_ms = ttft_ms[Tier.COMPUTED]
    for tier, milliseconds in ttft_ms.items():
        ratio = f"{milliseconds / recomputed_ms:.1%}" if milliseconds and recomputed_ms else "-"
        table.add_row(TIER_TITLES[tier], _ms(milliseconds), ratio)
    return table


def write_json(findings: Findings, path: Path) -> None:
    """Write `demo-report.json`."""
    path.write_text(json.dumps(findings.as_json(), indent=2) + "\n", encoding="utf-8")


def _ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
