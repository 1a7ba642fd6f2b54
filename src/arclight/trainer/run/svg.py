"""Draw SVG charts for pages and pictures: axes, ticks, curves and bars.

`curves` and `report` draw with it, and so do reports of federated runs and searches, vision and the monitor of experts. Charts of a page
take their colours from its style sheet; :func:`standalone` makes a picture that carries its own. The look may change freely, but
``assets/report.js`` reads ``data-chart``, and the style sheets know the classes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import pairwise

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 244
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 24
COLOURS = 8
MAX_BARS = 120


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. ``points`` are (x, y) with x ascending; a y that is not finite leaves a gap."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    """Index into the page's palette: the classes ``c0`` to ``c7``, then again from ``c0``."""
    faint: bool = False
    """Drawn thin behind the others; neither sets the range of the axes nor appears in the read-out."""
    dots: bool = False
    """Mark each point."""


@dataclass(frozen=True)
class Axis:
    """Axis that maps [low, high] to pixels [start, end], linearly or by logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low * 1e-3) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, -3.0), 4.0) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        if not self.log:
            return nice_ticks(self.low, self.high, count)
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        stride = max(1, math.ceil(len(powers) / count))
        return [10.0**power for power in powers[::stride]]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str = "step",
    log_y: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Draw curves with axes as an ``<svg>`` element; "" if no point is finite.

    ``label`` is the description that a screen reader speaks. ``x_range`` and ``y_range`` are the ends of the axes where these
    are not the curves' own. The numbers of the read-out lie in the attribute ``data-chart`` as JSON, for the page's script.
    """
    leading = [s for s in series if not s.faint and any(finite_runs(s.points))] or [
        s for s in series if any(finite_runs(s.points))
    ]
    finite = [point for s in leading for run in finite_runs(s.points) for point in run if not log_y or point[1] > 0]
    if not finite:
        return ""
    x_ends = x_range or span(min(x for x, _ in finite), max(x for x, _ in finite))
    y_ends = y_range or padded(min(y for _, y in finite), max(y for _, y in finite), log_y)
    x_axis, y_axis = Axis(*x_ends, LEFT, WIDTH - RIGHT), Axis(*y_ends, HEIGHT - BOTTOM, TOP, log_y)
    curves = "".join(curve(s, x_axis, y_axis) for s in sorted(series, key=lambda s: not s.faint))
    data = escape(readout(leading, x_axis, y_axis, x_name))
    clip = f"clip-{zlib.crc32((label + data).encode()):08x}"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'data-chart="{data}">'
        f'<clipPath id="{clip}"><rect x="{LEFT - 4}" y="{TOP - 4}" width="{WIDTH - LEFT - RIGHT + 8}" '
        f'height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>{axes(x_axis, y_axis, x_name)}'
        f'<g clip-path="url(#{clip})">{curves}</g><line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


@dataclass(frozen=True)
class Stack:
    """One part of every bar."""

    name: str
    colour: int
    values: Sequence[float]


def stacked_bars(
    places: Sequence[str],
    stacks: Sequence[Stack],
    format_value: Callable[[float], str],
    *,
    label: str,
    x_name: str,
    y_max: float | None = None,
) -> str:
    """Draw stacked bars at ``places`` as an ``<svg>`` element; "" if there is nothing to show.

    Of more than 120 places, neighbours share a bar: their mean. ``format_value`` is for the tooltips.
    """
    if not places or not any(value for stack in stacks for value in stack.values):
        return ""
    group = -(-len(places) // MAX_BARS)
    first = list(places[::group])
    parts = [_means(stack.values, group) for stack in stacks]
    tops = [sum(column) for column in zip(*parts, strict=True)]
    y_axis = Axis(0.0, max(tops) * 1.06 if y_max is None else y_max, HEIGHT - BOTTOM, TOP)
    x_axis = Axis(-0.5, len(first) - 0.5, LEFT, WIDTH - RIGHT)
    width = max(1.0, 0.72 * (x_axis(1) - x_axis(0)) if len(first) > 1 else 40.0)
    stride = max(1, -(-len(first) // 8))
    body = [axes(x_axis, y_axis, x_name, x_texts={place: first[place] for place in range(0, len(first), stride)})]
    for place, name in enumerate(first):
        low = 0.0
        bars = []
        for stack, values in zip(stacks, parts, strict=True):
            top, bottom = y_axis(low + values[place]), y_axis(low)
            bars.append(
                f'<rect class="bar c{stack.colour % COLOURS}" x="{x_axis(place) - width / 2:.1f}" y="{top:.1f}" '
                f'width="{width:.1f}" height="{max(bottom - top, 0.0):.1f}"/>'
            )
            low += values[place]
        text = ", ".join(f"{s.name} {format_value(values[place])}" for s, values in zip(stacks, parts, strict=True))
        body.append(f"<g><title>{escape(f'{x_name} {name}: {text}'.strip())}</title>{''.join(bars)}</g>")
    return f'<svg class="bars" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _means(values: Sequence[float], group: int) -> list[float]:
    """Average groups of so many values, one after the other."""
    pieces = [values[at : at + group] for at in range(0, len(values), group)]
    return [sum(piece) / len(piece) for piece in pieces]


def standalone(width: float, height: float, title: str, subtitle: str, marks: Iterable[str]) -> str:
    """Draw ``marks`` on a card with a title, as a file without external styles or scripts.

    It follows the reader's light or dark theme, alone in a browser, as an image in a page, or pasted into one.
    """
    style = (resources.files("arclight.trainer") / "assets" / "chart.css").read_text(encoding="utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="arclight-chart" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}: {escape(subtitle)}">'
        f'<style>{style}</style><rect class="card" width="100%" height="100%"/>'
        f"{text(22, 30, title, 'title')}{text(22, 50, subtitle, 'muted')}{''.join(marks)}</svg>\n"
    )


def sparkline(points: Sequence[Point], *, width: int = 168, height: int = 30) -> str:
    """Draw a small curve without axes, its last point marked; "" below two finite points."""
    finite = [point for run in finite_runs(points) for point in run]
    if len(finite) < 2:
        return ""
    x_axis = Axis(*widen(finite[0][0], finite[-1][0]), 3, width - 3)
    y_axis = Axis(*widen(min(y for _, y in finite), max(y for _, y in finite)), height - 4, 4)
    x, y = x_axis(finite[-1][0]), y_axis(finite[-1][1])
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="xMinYMid meet" aria-hidden="true">'
        f'<path d="{path(finite, x_axis, y_axis)}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/></svg>'
    )


def curve(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    runs = list(finite_runs(series.points))
    css = f"c{series.colour % COLOURS}"
    lines = " ".join(path(run, x_axis, y_axis) for run in runs)
    line = f'<path class="curve {css}{" faint" if series.faint else ""}" d="{lines}"/>'
    lonely = not series.faint and sum(map(len, runs)) == 1
    marked = (point for run in runs for point in run) if series.dots or lonely else ()
    return line + "".join(
        f'<circle class="dot {css}" cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="2.6"/>' for x, y in marked
    )


def path(points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    return "M" + "L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y in points)


def finite_runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the stretches of ``points`` between gaps."""
    run: list[Point] = []
    for x, y in points:
        if math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def axes(
    x_axis: Axis, y_axis: Axis, x_name: str, y_name: str = "", *, x_texts: Mapping[float, str] | None = None
) -> str:
    """Draw both axes: grid lines, tick texts and names.

    Compact without ``y_name``: the name of x stands before its ticks. With it, grid lines run both ways, and the names have room
    of their own below and at the left. ``x_texts``: the ticks of x and what they say, if these are not its numbers.
    """
    left, right, base, top = x_axis.start, x_axis.end, y_axis.start, y_axis.end
    y_ticks = y_axis.ticks(5)
    if x_texts is None:
        x_ticks = x_axis.ticks(5 if y_name else 6)
        if x_name == "step":  # there is no half of one
            x_ticks = [round(tick) for tick in x_ticks if math.isclose(tick, round(tick))]
        x_texts = dict(zip(x_ticks, tick_texts(x_ticks), strict=True))
    parts = []
    for value, label in zip(y_ticks, tick_texts(y_ticks), strict=True):
        y = y_axis(value)
        parts.append(f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(left - (10 if y_name else 8), y + 4, label, "tick", anchor="end"))
    for value, label in x_texts.items():
        x = x_axis(value)
        if y_name:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{base:g}"/>')
            parts.append(text(x, base + 20, label, "tick", anchor="middle"))
            continue
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:g}" y2="{base + 4:g}"/>')
        anchor, shift = ("end", 8) if x > right - 12 else ("middle", 0)
        parts.append(text(x + shift, base + 17, label, "tick", anchor=anchor))
    if y_name:
        parts.append(f'<path class="axis" d="M{left:g} {top:g}V{base:g}H{right:g}"/>')
        parts.append(text((left + right) / 2, base + 44, x_name, "muted", anchor="middle"))
        parts.append(text(22, (top + base) / 2, y_name, "muted", anchor="middle", turn=-90))
    else:
        parts.append(f'<line class="axis" x1="{left:g}" x2="{right:g}" y1="{base:g}" y2="{base:g}"/>')
        parts.append(text(left - 20, base + 17, x_name, "tick name", anchor="end"))
    return "".join(parts)


def text(
    x: float, y: float, words: str, css: str = "", *, anchor: str = "start", size: int | None = None, turn: int = 0
) -> str:
    """Return a line of text; ``turn`` in degrees around its anchor."""
    style = f' style="font-size:{size}px"' if size else ""
    transform = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
    css = f' class="{css.strip()}"' if css.strip() else ""
    return f'<text{css} x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}{transform}>{escape(words)}</text>'


def readout(series: Sequence[Series], x_axis: Axis, y_axis: Axis, x_name: str) -> str:
    """Return a chart's data as JSON for the page's script."""
    return json.dumps(
        {
            "t": x_name,
            "x": [x_axis.low, x_axis.high, x_axis.start, x_axis.end],
            "y": [y_axis.low, y_axis.high, y_axis.start, y_axis.end, int(y_axis.log)],
            "s": [
                {
                    "n": s.name,
                    "c": s.colour % COLOURS,
                    "p": [[short(x), short(y)] for run in finite_runs(s.points) for x, y in run],
                }
                for s in series
            ],
        },
        separators=(",", ":"),
    )


def short(value: float) -> float | int:
    """Round ``value`` to five significant digits, more than a screen shows."""
    return int(value) if value == int(value) else float(f"{value:.5g}")


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """List about ``count`` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / raw)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return ``values`` as people write them, all with the same number of decimals."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e4:
        unit, letter = (1e9, "G") if largest >= 1e9 else (1e6, "M") if largest >= 1e6 else (1e3, "k")
        return [f"{value / unit:g}{letter}" if value else "0" for value in values]
    steps = [b - a for a, b in pairwise(values)]
    if largest < 1e-3 or not steps or max(steps) > 1.5 * min(steps):  # tiny, lonely or logarithmic
        return [f"{value:g}".replace("e-0", "e-") for value in values]
    decimals = max(0, math.ceil(-math.log10(min(steps)) - 1e-9))
    return [f"{value:,.{decimals}f}" if round(value, decimals) else "0" for value in values]


def widen(low: float, high: float) -> tuple[float, float]:
    """Widen [low, high] if both are equal."""
    if low < high:
        return low, high
    half = abs(low) / 2 or 0.5
    return low - half, high + half


def span(low: float, high: float) -> tuple[float, float]:
    """Return an axis' range for [low, high], from zero if that is near."""
    return (0.0, high) if 0 <= low < high * 0.2 else widen(low, high)


def padded(low: float, high: float, log: bool) -> tuple[float, float]:
    """Pad [low, high] above and below; a range close to zero starts at zero."""
    if log:
        return (low / 1.15, high * 1.15) if low < high else (low / 10, high * 10)
    low, high = widen(low, high)
    room = (high - low) * 0.06
    near_zero = 0 <= low < (high - low) * 0.25
    return (0.0 if near_zero else low - room), high + room
