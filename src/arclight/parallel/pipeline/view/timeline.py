"""Draw a pipeline step as an HTML page: actions, idle time and memory of each rank.

`timeline` is public; ``arclight plan`` and the callback `PipelineTimeline` call it. In: simulated or recorded steps; out: one HTML page
that needs no network, or an SVG figure of the lanes. The layout is free.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from arclight.parallel.pipeline.runtime.recording import Recording
from arclight.parallel.pipeline.schedule.step_trace import Span, Trace, bubble, busy, by_process, idle, peak_bytes
from arclight.parallel.plan import PlanError

KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
CAUSES = {
    "warm_up": ("warm-up", "before its first action: the pipeline fills"),
    "schedule": ("schedule", "waiting that the order itself asks for, were all stages alike"),
    "cool_down": ("cool-down", "after its last action: the pipeline drains"),
    "imbalance": ("imbalance", "waiting because stages take different times"),
    "communication": ("communication", "waiting because what was computed arrives later"),
    "overhead": ("overhead", "between actions, with nothing to wait for"),
}
"""Causes of idleness with name and meaning: first what the schedule costs, then what can be improved."""


def timeline(
    run: Recording | Trace, predicted: Trace | None = None, file: str | Path = "timeline.html", title: str | None = None
) -> Path:
    """Write one self-contained page that shows a step of a pipeline.

    It opens anywhere, without a network or another file.
    run: what was recorded (its training step of median length is shown), or one step, measured or simulated. predicted: the
    same step as simulated, shown above what was measured. file: ``.svg`` is a figure of the lanes alone, for papers and slides.
    Of the processes of a recording the first of all writes. Gives the page's path; an older page is replaced in one step. Raises
    PlanError if there is nothing to show, or the two steps are not of the same pipeline.
    """
    trace = run.typical if isinstance(run, Recording) else run
    path = Path(file)
    if isinstance(run, Recording) and not run.first:
        return path
    _check(trace, predicted)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        recorded = run.traces if isinstance(run, Recording) else ()
        drawn = path.suffix.lower() == ".svg"
        made = figure(trace, predicted, title) if drawn else _page(trace, predicted, title, recorded)
        draft.write_text(made, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _check(trace: Trace, predicted: Trace | None) -> None:
    for one in (trace, predicted):
        if one is not None and not one.spans:
            raise PlanError("there is nothing to show of a step without actions")
    if predicted is None:
        return
    for name in ("ranks", "stages", "micro_batches"):
        ours, other = getattr(trace, name), getattr(predicted, name)
        if ours != other:
            raise PlanError(
                f"the predicted step has {other} {name.replace('_', '-')}, the one it is compared with {ours}: "
                "predict it for the same pipeline"
            )


# -- the page ------------------------------------------------------------------------------------------------------


class _Figures:
    """Figures of one step for the page, computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.seconds = trace, trace.seconds
        self.begin = min(span.start for span in trace.spans)
        self.busy, self.idle, self.peaks = busy(trace), [asdict(cause) for cause in idle(trace)], peak_bytes(trace)
        self.bubble = 1 - sum(self.busy) / (trace.ranks * self.seconds)
        self.worked = [dict.fromkeys(KIND_NAMES, 0.0) for _ in range(trace.ranks)]
        self.stages: list[set[int]] = [set() for _ in range(trace.ranks)]
        for span in trace.spans:
            self.worked[span.rank][span.action.kind] += span.end - span.start
            self.stages[span.rank].add(span.action.stage)

    def share_of(self, *causes: str) -> float:
        """Return a share of all processes' time, in [0, 1]."""
        seconds = sum(float(cause[name]) for cause in self.idle for name in causes)
        return seconds / (self.trace.ranks * self.seconds)

    def place(self, rank: int) -> str:
        stages = sorted(self.stages[rank])
        return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _page(trace: Trace, predicted: Trace | None, title: str | None, recorded: Sequence[Trace]) -> str:
    """Return the whole page. recorded: all steps that ``trace`` is one of."""
    shown = _Figures(trace)
    before = _Figures(predicted) if predicted is not None else None
    data = {
        "kinds": list(KIND_NAMES.values()), "letters": list(KIND_NAMES), "stages": trace.stages,
        "microBatches": trace.micro_batches,
        "traces": ([_lanes("predicted", before)] if before else []) + [_lanes("measured" if before else "", shown)],
    }  # fmt: skip
    heading = title or f"{trace.schedule} on {trace.ranks} processes"
    return _PAGE.format(
        title=escape(heading),
        css=_asset("timeline.css"),
        js=_asset("steps.js") + "\n" + _asset("timeline.js"),
        facts=_facts(trace, recorded, title is not None),
        cards=_cards(shown, before),
        legend=_legend(shown, before is not None),
        bars=_bars(shown, before),
        table=_table(shown),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _lanes(name: str, shown: _Figures) -> dict[str, Any]:
    """Return a step for the page's script: a flat list of spans for each process.

    A span is kind, stage, micro-batch, start, end (us), bytes.
    """
    kinds, lanes = list(KIND_NAMES), []
    for rank, lane in enumerate(by_process(shown.trace)):
        flat: list[float] = []
        for span in lane:
            flat += [kinds.index(span.action.kind), span.action.stage, span.action.micro_batch]
            flat += [round((span.start - shown.begin) * 1e6, 1), round((span.end - shown.begin) * 1e6, 1), span.live]
        lanes.append({"place": shown.place(rank), "stages": sorted(shown.stages[rank]), "spans": flat})
    return {"name": name, "microseconds": round(shown.seconds * 1e6, 1), "lanes": lanes}


def _facts(trace: Trace, recorded: Sequence[Trace], titled: bool) -> str:
    facts: list[tuple[str, object]] = [("schedule", trace.schedule)] if titled else []
    facts += [("processes", trace.ranks), ("stages", trace.stages), ("micro-batches", trace.micro_batches)]
    if len(recorded) > 1:
        lengths = sorted(one.seconds for one in recorded)
        facts.append(
            ("recorded", f"{len(recorded)} steps, {_ms(lengths[0])} to {_ms(lengths[-1])}; this is the median")
        )
    return "".join(f"<li>{escape(name)} <b>{escape(str(value))}</b></li>" for name, value in facts)


def _cards(shown: _Figures, before: _Figures | None) -> str:
    step, bubble = "first action to last", "of all processes' time is idle"
    if before is not None:
        step = f"predicted {_ms(before.seconds)} ({(shown.seconds / before.seconds - 1) * 100:+.1f} %)"
        bubble = f"predicted {before.bubble:.1%}"
    mendable = shown.share_of("imbalance", "communication", "overhead")
    cards = [
        ("Step", _ms(shown.seconds), step),
        ("Bubble", f"{shown.bubble:.1%}", bubble),
        ("Bubble beyond the schedule", f"{mendable:.1%}", "imbalance, communication, overhead"),
    ]
    if peak := max(shown.peaks):
        cards.append(("Activations", _size(peak), f"at most, on process {shown.peaks.index(peak)}"))
    return "".join(
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, value, note in cards
    )


def _legend(shown: _Figures, compared: bool) -> str:
    kinds = {span.action.kind for span in shown.trace.spans}
    items = [f'<li><i class="box k{kind}">{kind}</i>{name}</li>' for kind, name in KIND_NAMES.items() if kind in kinds]
    items.append(
        '<li><i class="box waiting"></i>waiting for a stage</li><li><i class="box transfer"></i>on its way</li>'
    )
    if max(map(len, shown.stages)) > 1:
        items.append('<li class="note">deeper: later stages of a process</li>')
    if compared:
        items.append('<li class="note">above: predicted &middot; below: measured</li>')
    return "".join(items)


def _bars(shown: _Figures, before: _Figures | None) -> str:
    """Draw a bar of the step for each process: its actions, then its idle time by cause."""
    scale = max(one.seconds for one in (shown, before) if one is not None)
    rows = []
    for rank in range(shown.trace.ranks):
        bars = "".join(
            f'<div class="bar {name}" style="width:{100 * one.seconds / scale:.3f}%">{_segments(one, rank)}</div>'
            for name, one in (("before", before), ("", shown))
            if one is not None
        )
        rows.append(f'<div class="row"><div class="who">{rank}</div><div class="bars">{bars}</div></div>')
    done = {kind for worked in shown.worked for kind, seconds in worked.items() if seconds > 0}
    keys = "".join(
        f'<li><i class="box k{kind}">{kind}</i>{escape(name)}</li>' for kind, name in KIND_NAMES.items() if kind in done
    ) + "".join(
        f'<li title="{escape(meaning)}"><i class="box c{cause}"></i>{escape(name)}</li>'
        for cause, (name, meaning) in CAUSES.items()
    )
    return f'<ul class="legend">{keys}</ul><div class="stack">{"".join(rows)}</div>'


def _segments(one: _Figures, rank: int) -> str:
    worked = one.worked[rank]
    parts = [(f"k{kind}", name, worked[kind]) for kind, name in KIND_NAMES.items()]
    parts += [(f"c{cause}", name, one.idle[rank][cause]) for cause, (name, _) in CAUSES.items()]
    return "".join(
        f'<span class="{style}" style="flex-grow:{seconds / one.seconds:.6f}" '
        f'title="{escape(name)}: {_ms(seconds)}, {seconds / one.seconds:.1%}"></span>'
        for style, name, seconds in parts
        if seconds > 0
    )


def _table(shown: _Figures) -> str:
    names = [name for name, _ in CAUSES.values()]
    head = "".join(f"<th class=number>{escape(name)}</th>" for name in ["busy", *names, "activations"])
    rows = []
    for rank in range(shown.trace.ranks):
        cells = [shown.busy[rank] / shown.seconds] + [shown.idle[rank][cause] / shown.seconds for cause in CAUSES]
        numbers = "".join(f'<td class="number{"" if cell >= 5e-4 else " none"}">{cell:.1%}</td>' for cell in cells)
        peak = _size(shown.peaks[rank]) if shown.peaks[rank] else ""
        rows.append(
            f'<tr><th scope="row">{rank} <span>{shown.place(rank)}</span></th>{numbers}<td class=number>{peak}</td></tr>'
        )
    whole = [1 - shown.bubble] + [shown.share_of(cause) for cause in CAUSES]
    foot = "".join(f"<td class=number>{cell:.1%}</td>" for cell in whole)
    return (
        f'<div class="sheet"><table><thead><tr><th>process</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f'<tfoot><tr><th scope="row">all</th>{foot}<td></td></tr></tfoot></table></div>'
    )


def _ms(seconds: float) -> str:
    """Format milliseconds with three significant digits."""
    value = seconds * 1000
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3}f} ms"


def _size(size: int) -> str:
    unit, name = next((u for u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if size >= u[0]), (1, "bytes"))
    return f"{size / unit:,.{1 if unit > 1 else 0}f} {name}"


def _asset(name: str) -> str:
    return (resources.files("arclight.parallel.pipeline.view") / "assets" / name).read_text(encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
<header>
<p class="over">Pipeline timeline</p><h1>{title}</h1><ul class="facts">{facts}</ul>
<button id="theme" title="light or dark (t)" aria-label="light or dark">&#9680;</button>
</header>
<main>
<div class="cards">{cards}</div>
<section>
<div class="bar-of-tools">
<ul class="legend">{legend}</ul>
<div class="tools"><label><input type="checkbox" id="memory" checked> memory</label>
<button id="out" title="zoom out (-)">&minus;</button><button id="in" title="zoom in (+)">+</button><button id="reset" title="all of it (0)">all</button></div>
</div>
<div id="chart" tabindex="0" role="application" aria-label="Timeline. Arrow keys go from action to action, plus and minus zoom, 0 shows all."
><canvas id="base"></canvas><canvas id="over"></canvas></div>
<p class="help">Drag to zoom into a range, double-click for all of it, Ctrl and wheel to zoom. Arrow keys go from action to action;
pointing at one shows where its micro-batch goes.</p>
<div id="readout" role="status" aria-live="polite"></div>
</section>
<section><h2>Where the time goes</h2>{bars}{table}</section>
</main>
<footer>Times are shares of the step; processes of one pipeline, their clocks compared.</footer>
<script type="application/json" id="data">{data}</script>
<script type="module">
{js}</script>
</body>
</html>
"""


WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200, 84, 16, 58, 34
TALL, LOW, GAP = 26, 14, 12
"""Heights of a lane, of the one of a prediction above it, and between processes."""
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
    """Draw an ``<svg>`` figure: measured lanes of each process, below predicted ones.

    The axis is milliseconds.
    """
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
        f'<text class="muted" x="{WIDTH - RIGHT}" y="24" text-anchor="end">{escape(_caption(trace, predicted))}</text>'
        f"{''.join(parts)}{_key(trace, height)}</svg>\n"
    )


def _caption(trace: Trace, predicted: Trace | None) -> str:
    text = f"step {trace.seconds * 1000:,.1f} ms, bubble {bubble(trace):.1%}"
    if predicted is not None:
        text += f"; above: predicted, {predicted.seconds * 1000:,.1f} ms and {bubble(predicted):.1%}"
    return text


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
    """Yield the boxes of one process, numbered by micro-batch if there is room.

    Those too thin to be seen are left out.
    """
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
    for kind, name in KIND_NAMES.items():
        if kind not in kinds:
            continue
        parts.append(f'<rect class="{kind}" x="{x}" y="{height - 22}" width="20" height="14" rx="3"/>')
        if kind == "W":
            parts.append(f'<rect class="hatch" x="{x}" y="{height - 22}" width="20" height="14" rx="3"/>')
        parts.append(f'<text class="muted" x="{x + 27}" y="{height - 11}">{name}</text>')
        x += 50 + 7 * len(name)
    return "".join(parts)
