"""Count answers, latencies and refusals by model, for Prometheus.

`middleware` counts each request here; `app` makes the `Metrics`, passes batches and reloads of its models to it, and returns the text at
``GET /metrics``. Names and labels of metrics are public: dashboards read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SERVER_FULL = (429, 503)


class RouteLabels(NamedTuple):
    """Labels of a request: a path of the API, and the model it asks, empty if it asks none."""

    path: str
    model: str = ""


OTHER = RouteLabels("other")
"""Labels of all unknown paths, since each label stays in memory for good."""


class Metrics:
    """Metrics of one server since it started."""

    def __init__(self, models: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "arclight_requests", "Answers sent, by path and status.", ["path", "model", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "arclight_request_seconds", "Time from request to answer of requests to a model that were answered 200.",
            ["path", "model"], buckets=BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._in_flight = Gauge(
            "arclight_in_flight", "Requests to a model not answered yet.", ["model"], registry=self._registry
        )
        self._rejected = Counter(
            "arclight_rejected", "Requests to a model refused because the server was full or stopping (429, 503).",
            ["model"], registry=self._registry,
        )  # fmt: skip
        self._batches = Histogram(
            "arclight_batch_requests", "Requests for tensors that one call of a program computed, where they may be computed together.",
            ["model"], buckets=BATCHES, registry=self._registry,
        )  # fmt: skip
        self._reloads = Counter(
            "arclight_reloads", "Programs found replaced at their paths, which answer from then on or were refused.",
            ["model", "outcome"], registry=self._registry,
        )  # fmt: skip
        # `labels` costs more than the rest of a count
        self._requests_of = cache(self._requests.labels)
        self._seconds_of = cache(self._seconds.labels)
        self._in_flight_of = cache(self._in_flight.labels)
        self._batches_of = cache(self._batches.labels)
        for model in models:
            self._in_flight_of(model)
            self._rejected.labels(model)
            for outcome in ("replaced", "refused"):
                self._reloads.labels(model, outcome)

    def received(self, labels: RouteLabels) -> None:
        """Count a request in; `answered` or `left` must follow."""
        if labels.model:
            self._in_flight_of(labels.model).inc()

    def answered(self, labels: RouteLabels, status: int, seconds: float, *, admitted: bool) -> None:
        """Count an answer, and observe the latency of a 200 from a model.

        ``admitted``: not refused for its API key, which may have sent too many requests (429).
        Refusals are fast, and would make the latency look better than it is.
        """
        self._requests_of(labels.path, labels.model, status).inc()
        if labels.model and status == 200:
            self._seconds_of(labels.path, labels.model).observe(seconds)
        if labels.model and admitted and status in SERVER_FULL:
            self._rejected.labels(labels.model).inc()
        self.finish(labels)

    def finish(self, labels: RouteLabels) -> None:
        """Count a request out: it was answered, or its client has left."""
        if labels.model:
            self._in_flight_of(labels.model).dec()

    def reloaded(self, model: str, replaced: bool) -> None:
        """Count a reload: the program was replaced, or the newer one refused."""
        self._reloads.labels(model, "replaced" if replaced else "refused").inc()

    def batch(self, model: str, requests: int) -> None:
        """Observe the number of requests in one call of a program."""
        self._batches_of(model).observe(requests)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type, in the text format that ``accept`` asks for."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # its comparison of versions fails on those that are no numbers
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type
