"""What the RFC left open, answered with the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .record import RUN, Record, short

Rows = list[tuple[str, ...]]
Answer = tuple[str, tuple[str, ...], Rows]
"""Question and what the figures say of it, columns, rows."""

_DIRECTIONS = ("backup", "load")


def answers(records: Sequence[Record]) -> list[Answer]:
    """An answer to every question of which there are figures."""
    given = (answer(records) for answer in _ANSWERS)
    return [answer for answer in given if answer is not None]


def _scheme(records: Sequence[Record]) -> Answer | None:
    return _compared(
        records,
        "scheme",
        ("per_block", "slab"),
        "**Scheme A or B** (`per_block` or `slab`): ratio to memcpy.",
    )


def _executor(records: Sequence[Record]) -> Answer | None:
    return _compared(
        records,
        "executor",
        ("threadpool", "future"),
        "**Threadpool or future**: ratio to memcpy, and milliseconds of the engine thread.",
    )


def _compared(
    records: Sequence[Record], parameter: str, values: tuple[str, str], question: str
) -> Answer | None:
    """Both values of one parameter of the transfers, where everything else is equal."""
    found: dict[tuple[str, ...], dict[str, Record]] = {}
    engine = parameter == "executor"
    for record in records:
        direction, _, part = record.name.removeprefix("transfer ").partition(", ")
        if record.name.startswith("transfer ") and direction in _DIRECTIONS:
            if (part and not engine) or record.params[RUN].get("environment"):
                continue
            others = {k: str(record.params[k]) for k in ("pages", "scheme", "executor")}
            value = others.pop(parameter)
            found.setdefault((record.name, *others.values()), {})[value] = record
    pairs = {key: both for key, both in found.items() if set(both) == set(values)}
    if not pairs:
        return None
    rows: Rows = []
    num_ahead = dict.fromkeys(values, 0)
    for key, both in pairs.items():
        figures = {value: _figure(both[value]) for value in values}
        lower_is_better = both[values[0]].ratio is None
        best = (min if lower_is_better else max)(figures, key=lambda value: figures[value])
        num_ahead[best] += 1
        rows.append((*key, *(short(figures[value]) for value in values)))
    tally = ", ".join(f"`{value}` is ahead in {n}" for value, n in num_ahead.items())
    other = "executor" if parameter == "scheme" else "scheme"
    text = f"{question} Of {len(rows)} comparisons {tally}; the default is `{values[0]}`."
    return text, ("what", "pages", other, *values), rows


def _figure(record: Record) -> float:
    return record.value if record.ratio is None else record.ratio


def _ratio(records: Sequence[Record]) -> Answer | None:
    alone, with_host = _host_replays(records)
    if alone is None or not with_host:
        return None
    l1_blocks = alone.params["l1_blocks"]
    rows: Rows = []
    before, ratio_before = alone.value, 0.0
    for record in with_host:
        ratio = record.params["l2_blocks"] / l1_blocks
        gain = (record.value - before) / (ratio - ratio_before)
        rows.append((f"{ratio:g}", short(record.value), short(gain)))
        before, ratio_before = record.value, ratio
    text = (
        f"**The default ratio**: hits in % of all prompt tokens, without L3, and what each further multiple of L1 "
        f"({l1_blocks:,} blocks) adds; L1 alone finds {short(alone.value)} %. The default is 2: host memory decides, "
        "not the curve, which goes on rising as long as the trace's prompts do not all fit."
    )
    return text, ("hicache-ratio", "hits, %", "% for one more multiple of L1"), rows


def _host_replays(records: Sequence[Record]) -> tuple[Record | None, list[Record]]:
    """The smallest L1 alone, and the same with growing L2."""
    replays = [r for r in records if r.name == "replay hit rate" and r.params["l3"] == "none"]
    smallest = min((r.params["l1_blocks"] for r in replays), default=0)
    chosen = [r for r in replays if r.params["l1_blocks"] == smallest]
    alone = next((r for r in chosen if not r.params["l2_blocks"]), None)
    return alone, sorted(
        (r for r in chosen if r.params["l2_blocks"]), key=lambda r: int(r.params["l2_blocks"])
    )


def _cap(records: Sequence[Record]) -> Answer | None:
    kept = [r for r in records if r.name == "replay L3 blocks kept"]
    if not kept:
        return None
    rows: Rows = [
        (
            str(r.params["levels"]),
            f"{r.params['requests']:,}",
            f"{r.value:,.0f}",
            f"{r.params['asked_again']:,}",
            f"{100.0 * r.params['asked_again'] / r.value:.0f}",
        )
        for r in kept[:1]
    ]
    text = (
        "**Does L3 need a cap?** Every block that was ever computed is kept, and most are never asked for again: "
        "without a cap a disk fills at the rate at which prompts are computed. Hence `--hicache-storage-max-bytes`, "
        "which lets the blocks go that were unused for longest."
    )
    return text, ("levels", "requests", "blocks kept", "asked for again", "%"), rows


_ANSWERS: Sequence[Callable[[Sequence[Record]], Answer | None]] = (_scheme, _executor, _ratio, _cap)
