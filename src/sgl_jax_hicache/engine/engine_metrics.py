"""What the engine counts, in Prometheus form. Every label is there from the start, at 0.

Who served the prompt tokens is counted by the prefix cache (`hicache/metrics.py`), in the same registry.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .outputs import FinishKind, RequestStats

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class EngineMetrics:
    """Counters, gauges and histograms of one engine, in a registry of its own or a given one."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._requests = Counter(
            "sglang:requests", "Ended requests, by reason", ["finish"], registry=self.registry
        )
        self._generated = Counter(
            "sglang:generated_tokens", "Sampled tokens", registry=self.registry
        )
        self._retractions = Counter(
            "sglang:retractions", "Running requests sent back to wait", registry=self.registry
        )
        self._requests_now = Gauge(
            "sglang:requests_now", "Requests in the engine", ["state"], registry=self.registry
        )
        self._ttft = Histogram(
            "sglang:time_to_first_token_seconds",
            "Arrival to first token",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._e2e = Histogram(
            "sglang:e2e_latency_seconds",
            "Arrival to last token",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._decode_step = Histogram(
            "sglang:decode_step_seconds",
            "Wall time of a decode step, scheduling included",
            buckets=_STEP_BUCKETS_S,
            registry=self.registry,
        )
        self._show_every_label()

    def _show_every_label(self) -> None:
        for kind in FinishKind:
            self._requests.labels(finish=kind.value)
        self.set_requests(0, 0)

    def on_token(self) -> None:
        """A token was sampled for a request that still runs."""
        self._generated.inc()

    def on_retraction(self) -> None:
        """A running request was sent back to wait."""
        self._retractions.inc()

    def on_decode_step(self, seconds: float) -> None:
        """A decode step was settled."""
        self._decode_step.observe(seconds)

    def on_finished(self, kind: FinishKind, stats: RequestStats) -> None:
        """A request ended."""
        self._requests.labels(finish=kind.value).inc()
        if stats.ttft_s is not None:
            self._ttft.observe(stats.ttft_s)
        if stats.e2e_latency_s is not None:
            self._e2e.observe(stats.e2e_latency_s)

    def set_requests(self, waiting: int, running: int) -> None:
        """How many requests wait and run now."""
        self._requests_now.labels(state="waiting").set(waiting)
        self._requests_now.labels(state="running").set(running)
