"""The two questions a dashboard asks of a Prometheus: a value now, and a curve over a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Window:
    """The time that is shown: Unix seconds, and the seconds between two points."""

    start_s: float
    end_s: float
    step_s: float


@dataclass(frozen=True)
class Series:
    """One curve: its labels, and a value at each Unix second where there is one."""

    labels: Mapping[str, str]
    times_s: Sequence[float]
    values: Sequence[float]


class QueryError(RuntimeError):
    """Prometheus refused an expression; the message has it and its words."""


class Prometheus:
    """A Prometheus server's HTTP API. Raises httpx.HTTPError if it does not answer."""

    def __init__(
        self, url: str, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def over(self, expression: str, window: Window) -> list[Series]:
        """The curves of an expression over a time. Raises QueryError."""
        result = self._ask(
            "/api/v1/query_range",
            query=expression,
            start=window.start_s,
            end=window.end_s,
            step=window.step_s,
        )
        return [_series(curve["metric"], curve["values"]) for curve in result]

    def at(self, expression: str, time_s: float) -> list[Series]:
        """The values of an expression at a time, as curves of one point. Raises QueryError."""
        result = self._ask("/api/v1/query", query=expression, time=time_s)
        return [_series(point["metric"], [point["value"]]) for point in result]

    def _ask(self, path: str, **parameters: str | float) -> list[dict[str, Any]]:
        response = self._http.get(path, params=parameters)
        if response.status_code == 400:
            raise QueryError(f"{parameters['query']}: {response.json()['error']}")
        result: list[dict[str, Any]] = response.raise_for_status().json()["data"]["result"]
        return result


def _series(labels: Mapping[str, str], points: Sequence[tuple[float, str]]) -> Series:
    """Prometheus writes values as text, NaN and infinities too."""
    return Series(labels, [time_s for time_s, _ in points], [float(value) for _, value in points])
