"""Bars over rounds, in the style of the report's other charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from arclight.trainer.run.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, nice_ticks, tick_texts

MOST_BARS = 120


@dataclass(frozen=True)
class Stack:
    """One part of every bar."""

    name: str
    colour: int
    values: Sequence[float]


def stacked_bars(title: str, rounds: Sequence[int], stacks: Sequence[Stack], text: Callable[[float], str]) -> str:
    """A figure with a bar for each round; an empty string where there is nothing to show.

    text: a value as it is written above the figure and in the read-out of a bar.
    """
    if not rounds or not any(value for stack in stacks for value in stack.values):
        return ""
    group = -(-len(rounds) // MOST_BARS)
    first = list(rounds[::group])
    parts = [_means(stack.values, group) for stack in stacks]
    tops = [sum(column) for column in zip(*parts, strict=True)]
    y_axis = Axis(0.0, max(tops) * 1.06, HEIGHT - BOTTOM, TOP)
    x_axis = Axis(-0.5, len(first) - 0.5, LEFT, WIDTH - RIGHT)
    width = max(1.0, 0.72 * (x_axis(1) - x_axis(0)) if len(first) > 1 else 40.0)
    body = [_grid(y_axis), *_numbers(first, x_axis)]
    for place in range(len(first)):
        low = 0.0
        label = ", ".join(f"{stack.name} {text(values[place])}" for stack, values in zip(stacks, parts, strict=True))
        bars = []
        for stack, values in zip(stacks, parts, strict=True):
            top, bottom = y_axis(low + values[place]), y_axis(low)
            bars.append(
                f'<rect class="bar c{stack.colour % 8}" x="{x_axis(place) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(bottom - top, 0.0):.1f}"/>'
            )
            low += values[place]
        body.append(f"<g><title>round {first[place]}: {escape(label)}</title>{''.join(bars)}</g>")
    keys = "".join(f'<span><i class="c{stack.colour % 8}"></i>{escape(stack.name)}</span>' for stack in stacks)
    mean = text(sum(tops) / len(tops))
    return (
        f'<figure><header><span class="name">{escape(title)}</span><span class="value">{escape(mean)} on average</span></header>'
        f'<svg class="bars" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
        f'<div class="legend">{keys}</div></figure>'
    )


def _means(values: Sequence[float], group: int) -> list[float]:
    """Of so many values each, one after the other."""
    pieces = [values[at : at + group] for at in range(0, len(values), group)]
    return [sum(piece) / len(piece) for piece in pieces]


def _grid(y_axis: Axis) -> str:
    parts = []
    ticks = nice_ticks(y_axis.low, y_axis.high, 5)
    for value, label in zip(ticks, tick_texts(ticks), strict=True):
        y = y_axis(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def _numbers(rounds: Sequence[int], x_axis: Axis) -> list[str]:
    base = HEIGHT - BOTTOM
    stride = max(1, -(-len(rounds) // 8))
    ticks = [
        f'<text class="tick" x="{x_axis(place):.1f}" y="{base + 17}" text-anchor="middle">{rounds[place]}</text>'
        for place in range(0, len(rounds), stride)
    ]
    return [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>',
        f'<text class="tick name" x="{LEFT - 14}" y="{base + 17}" text-anchor="end">round</text>',
        *ticks,
    ]
