"""Sizes as people write them: `10GiB`, `500MB`, `4096`; one parser and one printer for flags and tools."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z]*)", re.ASCII)

ALLOWED = "a number of bytes, such as 4096, 500MB (10**6) or 10GiB (2**30)"
"""What `parse_bytes` takes, for messages."""


def parse_bytes(text: str) -> int:
    """Bytes of `text`; a fraction of a byte is cut off. K, M, G and T alone are powers of 1024, as KiB and so on.

    Raises ValueError, with what is allowed, for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not {ALLOWED}")
    whole, _, fraction = match["number"].partition(".")
    # In integers: a float would lose bytes of large sizes.
    scale: int = 10 ** len(fraction)
    return int(whole) * unit + int(fraction or "0") * unit // scale


def show_bytes(num_bytes: int) -> str:
    """A size in the largest binary unit that leaves a number of 1 or more: `3.21 GiB`, `512 B`."""
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    size, names = float(num_bytes), ("KiB", "MiB", "GiB", "TiB")
    for name in names:
        size /= 1024
        if size < 1023.995 or name == names[-1]:
            break
    return f"{size:,.2f} {name}"
