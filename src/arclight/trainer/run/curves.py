"""Group, smooth and thin logged metrics into the charts of training and federated reports.

`report` and the report of federated runs draw their charts from these. If a search is not told which way its metric goes, ``cli.tune``
asks `mode_of`, so its patterns decide what is kept. Nothing depends on smoothing and thinning: they may be tuned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arclight.trainer.run.svg import Point, Series

Curves = Mapping[str, Sequence[Point]]

NOISY = 100
"""Points from which on a curve is drawn smoothed, the raw values faint behind it."""
_STAGES = {"val": "Validation", "train": "Training", "test": "Test", "lr": "Learning rate"}
_LOWER = re.compile(r"loss|error|perplexity|latency|(?<![a-z])(ppl|mse|mae|rmse|wer|cer|nll)(?![a-z])", re.IGNORECASE)
_HIGHER = re.compile(
    r"precision|recall|score|reward|accuracy|(?<![a-z])(acc|map|f1|iou|miou|auc|bleu|rouge)(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True)
class Chart:
    """Hold the curves and axes of one chart."""

    title: str
    series: list[Series]
    last: float
    log_y: bool = False


def group_of(name: str) -> str:
    """Return the group of a metric: its prefix before ``/``, or a stage's name before ``_``."""
    if name == "lr" or name.startswith(("lr-", "lr/", "lr_")):
        return "lr"
    prefix, slash, _ = name.partition("/")
    if slash:
        return prefix
    stage = name.partition("_")[0]
    return stage if stage in _STAGES and stage != name else ""


def heading(group: str) -> str:
    return _STAGES.get(group, group or "Other")


def grouped(curves: Curves) -> dict[str, list[str]]:
    """Group names of metrics: validation first, then training, the rest in order of appearance."""
    groups: dict[str, list[str]] = {}
    for name in curves:
        if name != "epoch":
            groups.setdefault(group_of(name), []).append(name)
    order = {"val": 0, "train": 1, "test": 2, "lr": 4, "": 5}
    return dict(sorted(groups.items(), key=lambda item: order.get(item[0], 3)))


def charts_of(group: str, curves: Curves, most_points: int) -> list[Chart]:
    """Return the charts of one group of metrics.

    Rates share one, and so do ``x_step`` and ``x_epoch``; ``train/x`` shows ``val/x`` too.
    """
    names = grouped(curves).get(group, [])
    if group == "lr":
        rates = [name for name in names if not name.endswith(("-momentum", "-weight_decay"))]
        families = [rates, *([name] for name in names if name not in rates)]
        return [lr_chart(family, curves, most_points) for family in families if family]
    by_base: dict[str, list[str]] = {}
    for name in names:
        by_base.setdefault(base_name(name, curves), []).append(name)
    return [metric_chart(base, family, curves, most_points) for base, family in by_base.items()]


def base_name(name: str, curves: Curves) -> str:
    """Return ``x`` for ``x_step`` and ``x_epoch`` if both were logged."""
    for own, other in (("_step", "_epoch"), ("_epoch", "_step")):
        if name.endswith(own) and name.removesuffix(own) + other in curves:
            return name.removesuffix(own)
    return name


def metric_chart(base: str, family: Sequence[str], curves: Curves, most_points: int) -> Chart:
    names = list(family)
    counterpart = "val" + base.removeprefix("train") if group_of(base) == "train" else ""
    names += [name for name in (counterpart, f"{counterpart}_epoch") if name in curves][:1]
    series: list[Series] = []
    for colour, name in enumerate(names):
        series += drawn(name, curves[name], colour, most_points)
    return Chart(base, series, last_finite(curves[family[-1]]), spans_decades(series))


def lr_chart(names: Sequence[str], curves: Curves, most_points: int) -> Chart:
    """Chart learning rates; curves that are equal are drawn once, under all their names."""
    same: dict[tuple[Point, ...], list[str]] = {}
    for name in names:
        same.setdefault(tuple(curves[name]), []).append(name)
    series = [
        Series(name=", ".join(shared), points=thinned(points, most_points), colour=colour, dots=len(points) < 3)
        for colour, (points, shared) in enumerate(same.items())
    ]
    return Chart("lr" if len(names) > 1 else names[0], series, last_finite(curves[names[0]]))


def drawn(name: str, points: Sequence[Point], colour: int, most_points: int) -> list[Series]:
    if len(points) < NOISY:
        return [Series(name=name, points=points, colour=colour, dots=len(points) <= 40)]
    raw, smooth = thinned(points, most_points), thinned(smoothed(points), most_points // 2)
    return [
        Series(name=f"{name} (raw)", points=raw, colour=colour, faint=True),
        Series(name=name, points=smooth, colour=colour),
    ]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Smooth a curve exponentially, forwards and backwards, so that no step lags."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    keep = 1 - 1 / max(2.0, len(finite) / 40)

    def run(values: Sequence[float]) -> list[float]:
        total = weight = 0.0
        out = []
        for value in values:
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            out.append(total / weight)
        return out

    forwards = run([y for _, y in finite])
    backwards = run([y for _, y in reversed(finite)])[::-1]
    return [(x, (a + b) / 2) for (x, _), a, b in zip(finite, forwards, backwards, strict=True)]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Thin a curve to about ``most`` points, keeping spikes."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / max(1, most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {
            min(range(len(stretch)), key=lambda i: stretch[i][1]),
            max(range(len(stretch)), key=lambda i: stretch[i][1]),
        }
        kept += [stretch[i] for i in sorted(ends)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def spans_decades(series: Sequence[Series]) -> bool:
    """Return True if a logarithmic scale serves better.

    All values are positive, and the largest is over a thousand times the smallest.
    """
    values = [y for s in series if not s.faint for _, y in s.points if math.isfinite(y)]
    return bool(values) and min(values) > 0 and max(values) > 1000 * min(values)


def last_finite(points: Sequence[Point]) -> float:
    return next((y for _, y in reversed(points) if math.isfinite(y)), math.nan)


def best_point(name: str, points: Sequence[Point]) -> Point | None:
    """Return the best (step, value) of a metric; None if its name does not say what is better."""
    finite = [point for point in points if math.isfinite(point[1])]
    mode = mode_of(name)
    if not finite or mode is None:
        return None
    return (min if mode == "min" else max)(finite, key=lambda point: point[1])


def mode_of(name: str) -> str | None:
    """Return ``min`` or ``max``, whichever is better by a metric's name; None if unknown."""
    tail = name.rpartition("/")[2]
    return "min" if _LOWER.search(tail) else "max" if _HIGHER.search(tail) else None


def number_text(value: float) -> str:
    """Format a number with four significant digits and grouped thousands."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return (
        f"{value:.3e}"
        if abs(value) < 1e-4 or abs(value) >= 1e9
        else f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    )
