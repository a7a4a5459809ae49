"""Numbers with Grafana's units, short enough for an axis."""

from __future__ import annotations

import math

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T")


def with_unit(value: float, unit: str, decimals: int | None = None) -> str:
    """A value as a person reads it. `unit`: Grafana's id; one that is not known here is left out."""
    if not math.isfinite(value):
        return "no data"
    if unit == "percentunit":
        return f"{100 * value:.{0 if decimals is None else decimals}f} %"
    if unit == "s":
        return _seconds(value)
    if unit == "bytes":
        number, prefix = _scaled(value, 1024, _BINARY)
        return f"{number:.4g} {prefix}"
    if unit in ("Bps", "short"):
        number, prefix = _scaled(value, 1000, _DECIMAL)
        return f"{number:.4g}{prefix}" if unit == "short" else f"{number:.4g} {prefix}B/s"
    return f"{value:.{decimals}f}" if decimals is not None else f"{value:g}"


def tick_step(top: float, unit: str) -> float:
    """What the ticks of an axis up to `top` are multiples of, so that they read as round numbers: 1, or a power of
    1024 bytes."""
    step = 1.0
    while unit == "bytes" and top >= 1024 * step:
        step *= 1024
    return step


def _seconds(value: float) -> str:
    if abs(value) >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} us"


def _scaled(value: float, base: int, prefixes: tuple[str, ...]) -> tuple[float, str]:
    for prefix in prefixes[:-1]:
        if abs(value) < base:
            return value, prefix
        value /= base
    return value, prefixes[-1]
