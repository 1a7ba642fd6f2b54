"""Report a federated run as one page: metrics, clients, traffic, time and privacy.

`federated_run` writes it when a run has ended or failed, and ``arclight federate report`` again later, with ``metrics.csv``. In: the run's history
(``federated.rounds``); out: ``report.html``. Nothing reads the page back: its layout is free.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from arclight.cli.arguments import Parser, UsageError
from arclight.federated.rounds.history import export_metrics, mean_by_samples, read_history, read_rounds
from arclight.federated.rounds.store import Rounds
from arclight.trainer.loggers.csv_logger import read_metrics
from arclight.trainer.run.curves import Chart, last_finite, number_text
from arclight.trainer.run.report import Section, chart_figure, figure, size_text, table, write_report
from arclight.trainer.run.svg import Point, Series, Stack, stacked_bars

Round = Mapping[str, Any]
"""A round's entry in the history of the run's database."""
MAX_CLIENTS = 8
"""Most clients with curves of their own; for more the range is shown."""
PHASES = {"waiting": "client training", "fold": "aggregation", "evaluate": "evaluation"}
"""Phases of a round in order: until the updates have arrived, until the weights are committed, until they are evaluated."""
_BEST = "val/loss"
_NORMALIZED = "unigram_normalized_loss"
"""Metric that compares sites with vocabularies of their own; see `arclight.text.loss.UnigramLoss`."""


def report(arguments: list[str]) -> None:
    """Rewrite a run's report and ``metrics.csv``: ``arclight federate report``."""
    parser = Parser(
        prog="arclight federate report", description="Write the report and metrics.csv of a federated run again."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--beside", type=with_curves, metavar="RUN", help="centralised run to compare with in the report"
    )
    options = parser.parse_args(arguments)
    if not read_rounds(options.run):
        raise UsageError(f"{options.run} has no history of rounds: give the folder of a federated run")
    export_metrics(options.run)
    print(f"The report is {federated_report(options.run, beside=options.beside)}")


def with_curves(path: str) -> Path:
    """Return the folder of a run with curves, as the ``type`` of an argument."""
    if not (Path(path) / "metrics.csv").is_file():
        raise argparse.ArgumentTypeError(
            f"{path} has no metrics.csv: give the folder of a run, as runs/<name>/<number>"
        )
    return Path(path)


def federated_report(folder: str | Path, *, beside: str | Path | None = None, failure: str | None = None) -> Path:
    """Write ``report.html`` of the run in ``folder``. beside: the folder of a centralised run."""
    folder = Path(folder)
    rounds: list[Round] = [*read_history(folder)]
    central = read_metrics(Path(beside) / "metrics.csv") if beside is not None else {}
    curves, settings = metric_curves(rounds), settings_of(folder)
    sections = [
        Section("Clients", clients(rounds)),
        Section("Traffic and time", costs(rounds)),
        Section("Privacy", privacy(rounds, settings.get("noise") or {})),
        Section("Rounds", round_table(rounds)),
        Section("Excluded updates", excluded_updates(rounds)),
    ]
    return write_report(
        folder,
        sections=sections,
        headline=headline(rounds, curves, central),
        failure=failure,
        kept=curves,
        charts=learning(curves, central, str(beside or "")),
        about=summarise_federation(settings, rounds),
    )


def settings_of(folder: Path) -> dict[str, Any]:
    """Read the federation's settings from the newest round, with the strategy's name.

    Empty without one.
    """
    rounds = Rounds(folder)
    newest = rounds.newest()
    if newest is None:
        return {}
    kept = rounds.trees(newest, "federation")["federation"]
    return {**kept["settings"], "strategy": kept["strategy"]}


def summarise_federation(settings: Mapping[str, Any], rounds: Sequence[Round]) -> dict[str, str]:
    """Describe the federation for the head of the page."""
    done = {"rounds": f"{sum(bool(here['contributors']) for here in rounds):,}"}
    if not settings:
        return done
    drawn = settings["sampling"]["per_round"]
    some = f", {drawn:,} a round" if drawn not in (None, settings["clients"]) else ""
    return {"clients": f"{settings['clients']:,}{some}", "strategy": settings["strategy"], **done}


# -- metrics ----------------------------------------------------------------------------------------------


def metric_curves(rounds: Sequence[Round]) -> dict[str, list[Point]]:
    """Return evaluation metrics and the clients' mean training loss by optimizer steps."""
    curves: dict[str, list[Point]] = {}
    for here in rounds:
        for name, value in here["metrics"].items():
            curves.setdefault(name, []).append((here["clock"], value))
        if (loss := train_loss(here)) is not None:
            curves.setdefault("train/loss", []).append((here["clock"], loss))
    return curves


def train_loss(here: Round) -> float | None:
    """Average the clients' training loss, weighed by samples."""
    losses = {client: values["train/loss"] for client, values in here["train"].items() if "train/loss" in values}
    return mean_by_samples(losses, here["samples"])


def last_of_both(one: Sequence[Point], other: Sequence[Point]) -> tuple[float, float, float] | None:
    """Return the last step at which both curves are finite, with their values; None without one."""
    there = {step: value for step, value in other if math.isfinite(value)}
    both = [(step, value, there[step]) for step, value in one if step in there and math.isfinite(value)]
    return both[-1] if both else None


def headline(
    rounds: Sequence[Round], curves: Mapping[str, Sequence[Point]], central: Mapping[str, Sequence[Point]]
) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    first = (f"val/{_NORMALIZED}", _BEST)
    for name in sorted(
        (name for name in curves if name.startswith("val/")), key=lambda name: first.index(name) if name in first else 2
    )[:2]:
        found[name] = last_finite(curves[name])
        if (pair := last_of_both(curves[name], central.get(name, ()))) is not None:
            step, federated, alone = pair
            at = "" if step == curves[name][-1][0] else f" at step {step:,.0f}"
            found[f"{name} vs. centralised{at}"] = f"{(federated - alone) / abs(alone):+.2%}" if alone else "-"
    if "val/loss" not in found and "train/loss" in curves:
        found["train/loss"] = last_finite(curves["train/loss"])
    if spent := [here["epsilon"] for here in rounds if here.get("epsilon") is not None]:
        found["ε"] = spent[-1]
    up, down = (sum(sum(here[way].values()) for here in rounds) for way in ("bytes_up", "bytes_down"))
    return found | {"uploaded": size_text(up), "downloaded": size_text(down)}


def learning(curves: Mapping[str, Sequence[Point]], central: Mapping[str, Sequence[Point]], place: str) -> str:
    """Draw each metric over the run's steps, with the centralised run's if it has it."""
    charts = []
    for name in sorted(curves, key=lambda name: (name != _BEST, not name.startswith("val/"), name)):
        series = [line(name, curves[name], 0, label="federated")]
        if central.get(name):
            series.append(line(name, central[name], 1, label="centralised"))
        charts.append(Chart(name, series, last_finite(curves[name])))
    text = (
        f"A step of the centralised run ({escape(place)}) uses as many samples as all clients of a round together."
        if central
        else ""
    )
    figures = "".join(chart_figure(chart) for chart in charts)
    return (f'<p class="legend">{text}</p>' if text else "") + f'<div class="charts">{figures}</div>'


def line(name: str, points: Sequence[Point], colour: int, label: str) -> Series:
    return Series(name=label, points=points, colour=colour, dots=len(points) <= 40)


# -- clients -----------------------------------------------------------------------------------------------


def names_of(rounds: Sequence[Round]) -> list[str]:
    found = {client for here in rounds for client in [*here["norms"], *here["failed"], *here["samples"]]}
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def per_client(rounds: Sequence[Round], field: str, inner: str | None = None) -> list[Series]:
    """Draw a value of each client over the rounds.

    Of many clients the smallest, median and largest.
    """

    def value(here: Round, client: str) -> float | None:
        values = here[field].get(client)
        found = values.get(inner) if inner is not None and values is not None else values
        return float(found) if found is not None and math.isfinite(found) else None

    clients = names_of(rounds)
    if len(clients) <= MAX_CLIENTS:
        curves = [
            [(here["clock"], found) for here in rounds if (found := value(here, client)) is not None]
            for client in clients
        ]
        return [
            Series(name=f"client {client}", points=points, colour=number, dots=len(points) <= 40)
            for number, (client, points) in enumerate(zip(clients, curves, strict=True))
            if points
        ]
    spread: dict[str, list[Point]] = {"smallest": [], "median": [], "largest": []}
    for here in rounds:
        values = sorted(one for client in clients if (one := value(here, client)) is not None)
        for name, place in (("smallest", 0), ("median", len(values) // 2), ("largest", len(values) - 1)):
            if values:
                spread[name].append((here["clock"], values[place]))
    return [
        Series(name=f"{name} of all clients", points=points, colour=0 if name == "median" else 7)
        for name, points in spread.items()
        if points
    ]


def clients(rounds: Sequence[Round]) -> str:
    charts = []
    for field, inner, title in (
        ("drift", None, "cosine similarity to the mean update"),
        ("norms", None, "update norm (L2)"),
        ("train", "train/loss", "train/loss by client"),
        ("metrics_by_client", _BEST, f"{_BEST} by client"),
        ("train", f"train/{_NORMALIZED}", f"train/{_NORMALIZED} by client"),
        ("metrics_by_client", f"val/{_NORMALIZED}", f"val/{_NORMALIZED} by client"),
    ):
        series = per_client(rounds, field, inner)
        if series:
            charts.append(Chart(title, series, last_finite(series[0].points)))
    figures = "".join(without_last(chart_figure(chart)) for chart in charts)
    return (f'<div class="charts">{figures}</div>' if figures else "") + client_table(rounds)


def without_last(figure: str) -> str:
    """Drop the last value from a figure of several clients' curves."""
    before, mark, after = figure.partition('<span class="value">')
    return before + mark + after.partition("</span>")[2].join(["</span>", ""]) if mark else figure


def client_table(rounds: Sequence[Round]) -> str:
    rows = []
    for client in names_of(rounds)[:200]:
        took = [here for here in rounds if client in here["contributors"]]
        drift = [here["drift"][client] for here in rounds if client in here["drift"]]
        rows.append([
            f'<span class="mono">{escape(client)}</span>',
            f"{len(took):,}",
            f"{sum(here['steps'].get(client, 0) for here in took):,}",
            f"{sum(here['samples'].get(client, 0) for here in took):,}",
            f"{sum(here['tokens'].get(client, 0) for here in took):,}",
            f"{sum(drift) / len(drift):.3f}" if drift else "",
            size_text(sum(here["bytes_up"].get(client, 0) for here in rounds)),
            size_text(sum(here["bytes_down"].get(client, 0) for here in rounds)),
            f"{sum(here['seconds_by_client'].get(client, 0.0) for here in rounds):,.1f} s",
            f"{sum(client in excluded_clients(here) for here in rounds):,}",
        ])  # fmt: skip
    header = [
        "client",
        "rounds",
        "steps",
        "samples",
        "tokens",
        "cosine to mean",
        "uploaded",
        "downloaded",
        "training time",
        "excluded",
    ]
    hidden = {4: all(row[4] == "0" for row in rows), 7: not each_fetched(rounds), 9: all(row[9] == "0" for row in rows)}
    used = [column for column in range(len(header)) if not hidden.get(column)]
    shown = [[row[column] for column in used] for row in rows]
    return f"<h3>Totals</h3>{table([header[column] for column in used], shown, numbers=range(1, len(used)))}"


def each_fetched(rounds: Sequence[Round]) -> bool:
    """Return True if every client has fetched weights by itself.

    Clients of one node share them, and count as fetched by the first.
    """
    return all(any(here["bytes_down"].get(client) for here in rounds) for client in names_of(rounds))


# -- traffic, time and privacy --------------------------------------------------------------------------------------------------


def costs(rounds: Sequence[Round]) -> str:
    rounds = [here for here in rounds if here["contributors"]]
    ups = [sum(here["bytes_up"].values()) for here in rounds]
    downs = [sum(here["bytes_down"].values()) for here in rounds]
    numbers = [here["round"] for here in rounds]
    traffic = [Stack("uploads", 0, ups), Stack("downloads", 1, downs)]
    known = dict.fromkeys(phase for here in rounds for phase in here["seconds"] if phase != "round")
    phases = [*(phase for phase in PHASES if phase in known), *(phase for phase in known if phase not in PHASES)]
    times = [
        Stack(PHASES.get(phase, phase), colour, [here["seconds"].get(phase, 0.0) for here in rounds])
        for colour, phase in enumerate(phases)
    ]
    figures = [
        bars_figure("bytes per round", numbers, traffic, lambda size: size_text(round(size))),
        bars_figure("seconds per round", numbers, times, lambda seconds: f"{seconds:,.1f} s"),
    ]
    return f'<div class="charts">{"".join(figure for figure in figures if figure)}</div>'


def privacy(rounds: Sequence[Round], noise: Mapping[str, Any]) -> str:
    """Describe the privacy budget spent so far, if the run has one."""
    spent = [here for here in rounds if here.get("epsilon") is not None]
    if not spent:
        return ""
    points = [(here["clock"], float(here["epsilon"])) for here in spent]
    chart = Chart("ε spent", [Series(name="ε", points=points, dots=len(points) <= 40)], points[-1][1])
    text = ""
    if noise:
        budget = "no bound was set" if noise["epsilon"] is None else f"its bound is {noise['epsilon']:g}"
        text = (
            f"After {len(spent):,} rounds ε is {points[-1][1]:.3g} at δ = {noise['delta']:g} ({budget}): it bounds what the weights of all "
            "rounds reveal about whether a client took part. The norms, losses and names on this page are not covered. Updates were clipped to "
            f"a norm of {noise['clip']:g}; the noise on their sum is {noise['multiplier']:g} times that, added by the {noise['by']}."
        )
    return (f'<p class="legend">{text}</p>' if text else "") + f'<div class="charts">{chart_figure(chart)}</div>'


def round_table(rounds: Sequence[Round]) -> str:
    metrics = list(dict.fromkeys(name for here in rounds for name in here["metrics"]))[:3]
    header = [
        "round",
        "step",
        "train/loss",
        *metrics,
        "contributors",
        "excluded",
        "update norm",
        "uploaded",
        "downloaded",
        "time",
    ]
    rows = []
    for here in rounds:
        who, loss = here["contributors"], train_loss(here)
        named = escape(", ".join(who)) if len(who) <= 6 else f"{len(who):,} clients"
        rows.append([
            f"{here['round']:,}",
            f"{here['clock']:,}",
            number_text(loss) if loss is not None else "",
            *(number_text(here["metrics"][name]) if name in here["metrics"] else "" for name in metrics),
            named,
            f"{len(excluded):,}" if (excluded := excluded_clients(here)) else "",
            number_text(here["norm"]) if who and here["norm"] is not None else "",
            size_text(sum(here["bytes_up"].values())) if who else "",
            size_text(sum(here["bytes_down"].values())) if who else "",
            f"{here['seconds']['round']:,.1f} s" if "round" in here["seconds"] else "",
        ])  # fmt: skip
    text = 3 + len(metrics)
    return table(header, rows, numbers=[column for column in range(len(header)) if column != text])


def excluded_clients(here: Round) -> set[str]:
    """Return the clients that were refused or failed, and are not in the round all the same.

    A refused client has failed, too, and one that failed may have contributed when the round was requested again.
    """
    return {*here["failed"], *(refused["client"] for refused in here["refused"])} - set(here["contributors"])


def excluded_updates(rounds: Sequence[Round]) -> str:
    """Tabulate refused updates and failed clients, with round and reason."""
    rows = []
    for here in rounds:
        if here.get("skipped"):
            rows.append([f"{here['round']:,}", "all", f"the round was skipped: {escape(here['skipped'])}"])
        for refused in here["refused"]:
            why = f'{escape(refused["message"])} <span class="tag">{escape(refused["reason"])}</span>'
            rows.append([f"{here['round']:,}", f'<span class="mono">{escape(refused["client"])}</span>', why])
        for client, message in here["failed"].items():
            rows.append([f"{here['round']:,}", f'<span class="mono">{escape(client)}</span>', escape(message)])
    return table(["round", "client", "reason"], rows, numbers=(0,)) if rows else ""


def bars_figure(
    title: str, rounds: Sequence[int], stacks: Sequence[Stack], format_value: Callable[[float], str]
) -> str:
    """Return a figure with a bar for each round and the mean; "" if there is nothing to show."""
    drawing = stacked_bars([str(number) for number in rounds], stacks, format_value, label=title, x_name="round")
    if not drawing:
        return ""
    mean = format_value(sum(sum(stack.values) for stack in stacks) / len(rounds))
    return figure(title, drawing, f"{mean} on average", [(stack.colour, stack.name) for stack in stacks])
