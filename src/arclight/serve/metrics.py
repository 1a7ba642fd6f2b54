"""Counters in the Prometheus text exposition format, version 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class Metrics:
    """What happened since the server started; touched only by the event loop's thread."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by (path, status)."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Detections by latency: one count for each bound of BUCKETS_S, the last for everything slower."""
    seconds: float = 0.0
    in_flight: int = 0
    rejected: int = 0

    def answered(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.rejected += status == 429
        if path == "/detect":
            self.buckets[bisect_left(BUCKETS_S, seconds)] += 1
            self.seconds += seconds

    def exposition(self) -> str:
        lines = [*head("arclight_requests_total", "counter", "Answers sent, by path and status.")]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'arclight_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += head("arclight_detect_seconds", "histogram", "Time from request to answer of /detect.")
        total = 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), self.buckets, strict=True):
            total += count
            lines.append(f'arclight_detect_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"arclight_detect_seconds_sum {self.seconds:.6f}", f"arclight_detect_seconds_count {total}"]
        lines += head("arclight_in_flight", "gauge", "Requests to /detect not answered yet.")
        lines.append(f"arclight_in_flight {self.in_flight}")
        lines += head("arclight_rejected_total", "counter", "Requests refused because the server was full (429).")
        lines.append(f"arclight_rejected_total {self.rejected}")
        return "\n".join(lines) + "\n"


def head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"
