"""Show a search as a page: history, parameters, importance and all trials.

`search` calls `write_search_report` as trials end. In: the Optuna study; out: one HTML file that opens offline, of the trainer's report parts,
with links to the trials' own reports. Nothing reads it back: layout and wording are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.tune import study as studies
from arclight.cli.tune.space import Choice, Parameter, Range
from arclight.trainer.run.curves import number_text
from arclight.trainer.run.report import Section, table, write_report
from arclight.trainer.run.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Point,
    Series,
    axes,
    curve,
    padded,
    span,
    tick_texts,
    widen,
)

if TYPE_CHECKING:
    from arclight.cli.tune.trial import Search

FEWEST_FOR_IMPORTANCE = 4
"""Least complete trials for which the importance of parameters is shown."""


def write_search_report(search: Search, study: Any) -> Path:
    """Write ``report.html`` into the folder of a search; returns its path."""
    trials = studies.finished(study)
    best = studies.best(study)
    known = [one for one in trials if one.value is not None and math.isfinite(one.value)]
    sections = [
        Section("History", history(search, known)),
        Section("Parameters", parameter_charts(search, known)),
        Section("Importance", importance(study, search.parameters)),
        Section("Trials", trial_table(search, trials, best)),
    ]
    states = {state: sum(one.state == state for one in trials) for state in (studies.PRUNED, studies.FAILED)}
    headline: dict[str, float | str] = {} if best is None else {f"best {search.monitor}": best.value}
    headline |= {} if best is None else {"of trial": str(best.number)}
    headline |= {"trials": str(len(trials))}
    headline |= {
        word: str(count) for word, count in zip(("ended early", "failed"), states.values(), strict=True) if count
    }
    return write_report(
        search.folder,
        title=f"{search.folder.parent.name} {search.folder.name}",
        sections=[section for section in sections if section.html],
        headline=headline,
        kept={},
        charts="",
        about={"sampler": search.sampler, "pruner": search.pruner, "objective": f"{search.mode} {search.monitor}"},
    )


def history(search: Search, trials: Sequence[Any]) -> str:
    """Draw the objective of each trial, and the best so far."""
    if not trials:
        return ""
    keep = max if search.mode == "max" else min
    line: list[Point] = []
    for one in trials:
        if one.state == studies.COMPLETE:
            line.append((float(one.number), keep([one.value, *(value for _, value in line[-1:])])))
    x_axis = Axis(*span(*widen(trials[0].number, max(one.number for one in trials))), LEFT, WIDTH - RIGHT)
    y_axis = _objective_axis(trials)
    body = axes(x_axis, y_axis, "trial") + curve(Series(name="best so far", points=line, colour=1), x_axis, y_axis)
    dots = "".join(_dot(one, x_axis(one.number), y_axis(one.value), search) for one in trials)
    keys = '<span><i class="c0"></i>trials</span><span><i class="c7"></i>ended early</span><span><i class="c1"></i>best so far</span>'
    return f'<div class="charts">{_figure(search.monitor, f"{search.monitor} by trial", body + dots, keys)}</div>'


def parameter_charts(search: Search, trials: Sequence[Any]) -> str:
    """Draw each parameter against the objective."""
    if not trials:
        return ""
    return f'<div class="charts">{"".join(_parameter_chart(one, search, trials) for one in search.parameters)}</div>'


def _parameter_chart(parameter: Parameter, search: Search, trials: Sequence[Any]) -> str:
    y_axis = _objective_axis(trials)
    if isinstance(parameter, Range):
        x_axis = Axis(parameter.low, parameter.high, LEFT, WIDTH - RIGHT, parameter.log)
        body = axes(x_axis, y_axis, "")
        places = {one.number: x_axis(one.params[parameter.field]) for one in trials}
    else:
        body, places = _choice_grid(parameter, y_axis, trials)
    dots = "".join(_dot(one, places[one.number], y_axis(one.value), search) for one in trials)
    scale = "log scale" if isinstance(parameter, Range) and parameter.log else ""
    return _figure(parameter.field, f"{search.monitor} by {parameter.field}", body + dots, value=scale)


def _choice_grid(parameter: Choice, y_axis: Axis, trials: Sequence[Any]) -> tuple[str, dict[int, float]]:
    """Draw the axes of choices; also return the position of each trial."""
    x_axis = Axis(0, len(parameter.options), LEFT, WIDTH - RIGHT)
    parts = []
    for value, text in zip(ticks := y_axis.ticks(5), tick_texts(ticks), strict=True):
        y = y_axis(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    base = HEIGHT - BOTTOM
    for index, option in enumerate(parameter.options):
        text = escape(option if len(option) <= 16 else f"...{option[-14:]}")
        parts.append(
            f'<text class="tick" x="{x_axis(index + 0.5):.1f}" y="{base + 17}" text-anchor="middle">{text}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    of_option: dict[str, list[int]] = {}
    for one in trials:
        of_option.setdefault(one.params[parameter.field], []).append(one.number)
    return "".join(parts), {
        number: x_axis(parameter.options.index(option) + (place + 1) / (len(numbers) + 1))
        for option, numbers in of_option.items()
        for place, number in enumerate(numbers)
    }


def _objective_axis(trials: Sequence[Any]) -> Axis:
    """Return the axis of values: logarithmic if positive ones span more than a factor of 1000."""
    values = [one.value for one in trials]
    log = min(values) > 0 and max(values) > 1000 * min(values)
    return Axis(*padded(min(values), max(values), log), HEIGHT - BOTTOM, TOP, log)


def _dot(one: Any, x: float, y: float, search: Search) -> str:
    colour = "c0" if one.state == studies.COMPLETE else "c7"
    title = escape(f"trial {one.number}: {search.monitor} {number_text(one.value)}")
    return f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.4"><title>{title}</title></circle>'


def _figure(name: str, label: str, body: str, keys: str = "", value: str = "") -> str:
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return (
        f'<figure><header><span class="name">{escape(name)}</span><span class="value">{value}</span></header>'
        f'<svg class="bars" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>{legend}</figure>'
    )


def importance(study: Any, parameters: Sequence[Parameter]) -> str:
    """Draw each parameter's importance: how well it separates good trials from others.

    PED-ANOVA, arXiv 2304.10255.
    """
    complete = study.get_trials(deepcopy=False, states=(studies.COMPLETE,))
    if len(complete) < FEWEST_FOR_IMPORTANCE or len({one.value for one in complete}) < 2:
        return ""
    found: Mapping[str, float] = studies.optuna.importance.get_param_importances(
        study, evaluator=studies.optuna.importance.PedAnovaImportanceEvaluator()
    )
    rows = sorted(((found.get(one.field, 0.0), one.field) for one in parameters), reverse=True)
    height = 26 * len(rows) + 8
    bars = "".join(
        f'<text class="tick" x="232" y="{26 * index + 20}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="bar c0" x="240" y="{26 * index + 8}" width="{max(share, 0.002) * 260:.1f}" height="16" rx="2"/>'
        f'<text class="tick" x="{248 + share * 260:.1f}" y="{26 * index + 20}">{share:.0%}</text>'
        for index, (share, name) in enumerate(rows)
    )
    return (
        f'<div class="charts"><figure><svg class="bars" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="importance of parameters">{bars}</svg>'
        "<figcaption>Share of what tells good trials from others, over complete trials (PED-ANOVA)</figcaption></figure></div>"
    )


def trial_table(search: Search, trials: Sequence[Any], best: Any) -> str:
    """List all trials with their values, each with its own report."""
    rows = []
    for one in sorted(trials, key=lambda one: -one.number):
        tag = '<span class="tag">best</span>' if best is not None and one.number == best.number else ""
        has_report = (search.folder / str(one.number) / "report.html").is_file()
        name = f'<a href="{one.number}/report.html">{one.number}</a>' if has_report else str(one.number)
        outcome = escape(str(one.user_attrs.get("error", ""))) if one.state == studies.FAILED else ""
        state = {studies.PRUNED: "ended early"}.get(one.state, outcome)
        took = (one.datetime_complete - one.datetime_start).total_seconds() if one.datetime_start else math.nan
        value = "" if one.value is None else number_text(one.value)
        cells = [escape(_text(one.params.get(parameter.field))) for parameter in search.parameters]
        rows.append([name + tag, value, *cells, number_text(took), state])
    names = ["trial", search.monitor, *(parameter.field for parameter in search.parameters), "seconds", ""]
    return table(names, rows, numbers=range(1, len(names) - 1)) if rows else ""


def _text(value: Any) -> str:
    return "" if value is None else number_text(value) if isinstance(value, int | float) else str(value)
