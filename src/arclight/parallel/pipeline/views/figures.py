"""A step of a pipeline as a figure for papers and slides: one SVG, sharp at any size, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from arclight.parallel.pipeline.actions import Span, Trace
from arclight.parallel.pipeline.views.bubbles import bubble, by_process

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200, 84, 16, 58, 34
TALL, LOW, GAP = 26, 14, 12
"""Heights of a lane, of the one of a prediction above it, and between processes."""
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_STYLE = """
svg { background: #fff; font: 600 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
text { fill: #1a1c1f; } .muted { fill: #63686f; font-weight: 400; } .title { font-size: 17px; font-weight: 650; }
.lane { fill: #efefeb; } .grid { stroke: #ececec; } .end { stroke: #63686f; stroke-dasharray: 4 3; } .low { opacity: .72; }
.F { fill: #a5cbf7; } .B { fill: #b0402f; } .I { fill: #df7b3f; } .W { fill: #a9c48a; }
.F.deep { fill: #72a6e6; } .B.deep { fill: #84291d; } .I.deep { fill: #c05e22; } .W.deep { fill: #86a962; }
.hatch { fill: url(#hatch); } #hatch path { stroke: #5f8340; stroke-width: 1.1; }
.in { fill: #16181a; text-anchor: middle; dominant-baseline: central; } .in.onB { fill: #fff; }
.in.onW { stroke: #a9c48a; stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; } .in.onW.deep { stroke: #86a962; }
@media (prefers-color-scheme: dark) {
  svg { background: #121315; } text { fill: #e9eaec; } .muted { fill: #9aa1ab; } .lane { fill: #222529; } .grid { stroke: #26292d; }
  .in { fill: #101214; }
}
"""


def figure(trace: Trace, predicted: Trace | None = None, title: str | None = None) -> str:
    """An ``<svg>`` document: for each process what it did, above it what was predicted, over milliseconds."""
    steps = [one for one in (predicted, trace) if one is not None]
    scale = (WIDTH - LEFT - RIGHT) / max(one.seconds for one in steps)
    row = TALL + (LOW + 2 if predicted is not None else 0) + GAP
    height = TOP + trace.ranks * row - GAP + BOTTOM
    parts = [*_axis(max(one.seconds for one in steps), scale, height)]
    for rank in range(trace.ranks):
        y = TOP + rank * row
        parts.append(f'<text x="12" y="{y + (row - GAP) / 2 + 4:.1f}">process {rank}</text>')
    for number, one in enumerate(steps):
        low = predicted is not None and number == 0
        offset, lane = (0, LOW) if low else (row - GAP - TALL, TALL)
        parts.append(f'<g class="{"low" if low else "step"}">')
        for rank, spans in enumerate(by_process(one)):
            y = TOP + rank * row + offset
            parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{one.seconds * scale:.2f}" height="{lane}"/>')
            parts += _boxes(one, spans, scale, y, lane)
        parts.append("</g>")
    if predicted is not None:
        x = LEFT + predicted.seconds * scale
        parts.append(f'<path class="end" d="M{x:.1f} {TOP - 8}V{height - BOTTOM + 4}"/>')
    heading = title or trace.schedule
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(heading)}">'
        f'<style>{_STYLE}</style><defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5"/></pattern></defs>'
        f'<text class="title" x="12" y="24">{escape(heading)}</text>'
        f'<text class="muted" x="{WIDTH - RIGHT}" y="24" text-anchor="end">{escape(_said(trace, predicted))}</text>'
        f"{''.join(parts)}{_key(trace, height)}</svg>\n"
    )


def _said(trace: Trace, predicted: Trace | None) -> str:
    said = f"step {trace.seconds * 1000:,.1f} ms, bubble {bubble(trace):.1%}"
    if predicted is not None:
        said += f"; above: predicted, {predicted.seconds * 1000:,.1f} ms and {bubble(predicted):.1%}"
    return said


def _axis(seconds: float, scale: float, height: int) -> Iterator[str]:
    rough = seconds * 1000 / 10
    power = 10 ** math.floor(math.log10(rough))
    tick = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    digits = max(0, -math.floor(math.log10(tick) + 1e-9))
    for number in range(math.floor(seconds * 1000 / tick) + 1):
        x = LEFT + number * tick / 1000 * scale
        yield f'<path class="grid" d="M{x:.1f} {TOP - 8}V{height - BOTTOM + 4}"/>'
        yield f'<text class="muted" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{number * tick:,.{digits}f}</text>'
    yield f'<text class="muted" x="12" y="{TOP - 14}">ms</text>'


def _boxes(step: Trace, spans: list[Span], scale: float, y: int, tall: int) -> Iterator[str]:
    """Boxes of one process, with the number of the micro-batch where there is room; those too thin to be seen are left out."""
    begin, last = min(span.start for span in step.spans), -1.0
    first = min((span.action.stage for span in spans), default=0)
    size = min(12, tall - 3)
    for span in spans:
        x, end = (LEFT + (time - begin) * scale for time in (span.start, span.end))
        if end < last + 0.4:
            continue
        last, width, kind = end, max(0.4, end - x - (0.6 if end - x > 4 else 0)), span.action.kind
        box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{tall}"' + (' rx="2.5"' if width > 7 else "")
        style = f"{kind} deep" if span.action.stage > first else kind
        yield f'<rect class="{style}" {box}/>'
        if kind == "W" and width > 2:
            yield f'<rect class="hatch" {box}/>'
        texts = (f"{kind}{span.action.micro_batch}", str(span.action.micro_batch))
        text = next((text for text in texts if (len(text) + text.count("W") * 0.8) * size * 0.62 + 2 <= width), None)
        if text is not None:
            centre = f'x="{x + width / 2:.2f}" y="{y + tall / 2 + 0.5:.1f}" font-size="{size}"'
            yield f'<text class="in on{style}" {centre}>{text}</text>'


def _key(trace: Trace, height: int) -> str:
    parts, x = [], LEFT
    kinds = {span.action.kind for span in trace.spans}
    for kind, name in _NAMES.items():
        if kind not in kinds:
            continue
        parts.append(f'<rect class="{kind}" x="{x}" y="{height - 22}" width="20" height="14" rx="3"/>')
        if kind == "W":
            parts.append(f'<rect class="hatch" x="{x}" y="{height - 22}" width="20" height="14" rx="3"/>')
        parts.append(f'<text class="muted" x="{x + 27}" y="{height - 11}">{name}</text>')
        x += 50 + 7 * len(name)
    return "".join(parts)
