"""Spans of time as people write and read them."""

from __future__ import annotations

import re

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[smhdw]?)", re.ASCII)


def parse_age(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `7d`, `2w` or a plain number of seconds. Raises ValueError for anything else."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a span of time, such as 90s, 30m, 12h, 7d or 2w")
    return float(match["number"]) * _SECONDS[match["unit"]]


def show_age(seconds: float) -> str:
    """The two largest units: `3 d 4 h`, `2 min 5 s`, `0 s`."""
    rest = max(int(seconds), 0)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
