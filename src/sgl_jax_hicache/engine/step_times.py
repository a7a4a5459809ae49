"""Recent step times, for /get_server_info and the benchmarks."""

from __future__ import annotations

from collections import deque

import numpy as np


class StepTimes:
    """The last `keep` durations in seconds. Written by one thread; `summary` may be called from any."""

    def __init__(self, keep: int = 4096) -> None:
        self._recent: deque[float] = deque(maxlen=keep)
        self.num_steps = 0

    def add(self, seconds: float) -> None:
        """Record one step."""
        self._recent.append(seconds)
        self.num_steps += 1

    def last(self, num_steps: int) -> list[float]:
        """Seconds of the most recent steps, oldest first; fewer if there were fewer."""
        return list(self._recent)[-num_steps:] if num_steps else []

    def summary(self) -> dict[str, float]:
        """Count of all steps; mean, median, 90th and 99th percentile of the recent ones, in seconds."""
        recent = np.asarray(list(self._recent))
        if not len(recent):
            return {"count": 0}
        p50, p90, p99 = (float(np.percentile(recent, q)) for q in (50, 90, 99))
        return {
            "count": self.num_steps,
            "mean_s": float(recent.mean()),
            "p50_s": p50,
            "p90_s": p90,
            "p99_s": p99,
        }
