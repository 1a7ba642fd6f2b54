"""Write a run's report as one HTML page that needs no network and no other file.

The callback `RunReport` writes it at the end of a fit, ``cli`` for searches and federated runs; these and vision's pages are made of the
same parts (`Section`, `table`, `figure`). Texts come from users: escape them. The layout is free, but for what ``assets/report.css`` and
``report.js`` name.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from arclight.fabric.atomic_replace import replace_text
from arclight.trainer.callbacks.progress.timing import clock_text
from arclight.trainer.loggers.csv_logger import read_metrics
from arclight.trainer.run.curves import Chart, Curves, best_point, charts_of, grouped, heading, last_finite, number_text
from arclight.trainer.run.folder import assignments, read_environment, read_json
from arclight.trainer.run.svg import line_chart, sparkline

log = logging.getLogger(__name__)

_IMAGE_TYPES = {".svg": "svg+xml", ".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
_WIDE = 900
"""Pixels from which on an image has a row of its own."""
_MAX_POINTS = 24_000
"""Points in all curves together, which keeps a page with many metrics below a megabyte."""


@dataclass(frozen=True)
class Section:
    """Section of the report that a caller adds: a heading and HTML.

    Texts in it are escaped (see :func:`table`).
    """

    title: str
    html: str


def write_report(
    folder: str | Path,
    title: str | None = None,
    sections: Sequence[Section] = (),
    *,
    headline: Mapping[str, float | str] | None = None,
    failure: str | None = None,
    kept: Curves | None = None,
    charts: str | None = None,
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write ``report.html`` into a run folder from what lies there; gives its path.

    It shows ``metrics.csv`` as curves, the images in ``plots/`` with the captions of ``plots/captions.json`` (file name
    to caption), ``checkpoints/``, ``recipe.toml`` and ``environment.json``; whatever is missing is left out.
    ``headline`` replaces the numbers at the top; ``failure`` says how the run ended if not well. ``kept`` are the curves to
    show where these are not all of metrics.csv, ``charts`` is HTML in place of their charts, ``about`` comes first in the head.
    The page replaces an older one in a single step.
    """
    folder = Path(folder)
    curves = read_metrics(folder / "metrics.csv") if kept is None else kept
    environment = read_environment(folder / "environment.json")
    recipe = read_text(folder / "recipe.toml")
    measured = folder / "metrics.csv"
    ended = datetime.fromtimestamp(measured.stat().st_mtime, UTC) if measured.exists() else datetime.now(UTC)
    parts = {
        "Curves": curve_charts(curves) if charts is None else charts,
        "Plots": plots(folder / "plots"),
        **{section.title: section.html for section in sections},
        "Checkpoints": checkpoint_table(folder / "checkpoints"),
        "Recipe": f"<pre>{highlighted(recipe)}</pre>" if recipe else "",
        "Environment": environment_table(environment),
    }
    html = page(
        title or f"{folder.resolve().parent.name} {folder.resolve().name}",
        "Run report",
        [Section(name, html) for name, html in parts.items()],
        facts=facts(curves, environment, ended, about or {}),
        alert=alert(failure),
        cards=cards(headline if headline is not None else headline_numbers(curves), curves),
        version=environment.get("arclight", ""),
    )
    path = folder / "report.html"
    replace_text(path, html, durable=False)
    return path


def page(
    title: str,
    kind: str,
    sections: Sequence[Section],
    *,
    facts: str = "",
    alert: str = "",
    cards: str = "",
    version: str = "",
) -> str:
    """Return an HTML page that needs no network and no other file.

    Sections without content are left out.

    ``title`` and ``kind``, which stands above it, are texts; ``facts``, ``alert`` and ``cards`` are HTML (see :func:`fact_list`,
    :func:`cards`).
    """
    sections = [section for section in sections if section.html]
    body = _BODY.format(
        title=escape(title),
        kind=escape(kind),
        js=asset("report.js"),
        facts=facts,
        alert=alert,
        cards=cards,
        nav="".join(f'<a href="#{anchor(one.title)}">{escape(one.title)}</a>' for one in sections),
        sections="".join(
            f'<section id="{anchor(one.title)}"><h2>{escape(one.title)}</h2>{one.html}</section>' for one in sections
        ),
        footer=escape(f"Written {now()} by Arclight {version}".strip()),
    )
    return document(title, asset("report.css"), body)


def document(title: str, css: str, body: str) -> str:
    """Return an HTML page with its styles in it; ``title`` is a text, ``body`` HTML."""
    return _DOCUMENT.format(title=escape(title), css=css, body=body)


_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""

_BODY = """<header><p class="over">{kind}</p><h1>{title}</h1><ul class="facts">{facts}</ul>{alert}</header>
<nav><div>{nav}</div></nav>
<main>{cards}{sections}</main>
<footer>{footer}</footer>
<div id="readout"></div>
<script type="module">
{js}</script>"""


# -- top of the page -----------------------------------------------------------------------------------------------


def facts(curves: Curves, environment: Mapping[str, Any], ended: datetime, about: Mapping[str, str]) -> str:
    """Describe the run: what, how long (until the last row of metrics, ``ended``) and on what."""
    items: list[tuple[str, str]] = list(about.items())
    steps = [x for points in curves.values() for x, _ in points]
    if steps:
        items.append(("steps", f"{int(max(steps)):,}"))
    if "epoch" in curves:
        items.append(("epochs", f"{int(curves['epoch'][-1][1]) + 1:,}"))
    if started := environment.get("started"):
        items.append(("took", clock_text((ended - datetime.fromisoformat(started)).total_seconds())))
    devices = environment.get("accelerators") or [environment["cpu"]] if environment.get("cpu") else []
    if devices:
        count = f"{len(devices)} × " if len(devices) > 1 else ""
        items.append(("on", count + str(devices[0])))
    return fact_list(items)


def fact_list(items: Iterable[tuple[str, str]]) -> str:
    """Return names and values for the head of a page."""
    return "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in items)


def alert(failure: str | None) -> str:
    return f'<p class="alert"><b>The run did not finish.</b> {escape(failure)}</p>' if failure else ""


def headline_numbers(curves: Curves) -> dict[str, float | str]:
    """Return the last value of up to six metrics, of validation if there are any."""
    groups = {group: names for group, names in grouped(curves).items() if group != "lr"}
    names = next(iter(groups.values()), [])
    return {name: last_finite(curves[name]) for name in names[:6]}


def cards(headline: Mapping[str, float | str], curves: Curves) -> str:
    return (
        f'<div class="cards">{"".join(card(name, value, curves) for name, value in headline.items())}</div>'
        if headline
        else ""
    )


def card(name: str, value: float | str, curves: Curves) -> str:
    points = curves.get(name, ())
    best = best_point(name, points) if len(points) > 1 else None
    note = f"best {number_text(best[1])} at step {int(best[0]):,}" if best else ""
    shown = value if isinstance(value, str) else number_text(value)
    return (
        f'<div class="card"><div class="name" title="{escape(name)}">{escape(name)}</div>'
        f'<div class="value">{escape(shown)}</div>'
        f'{sparkline(thin_for_spark(points))}<div class="note">{note}</div></div>'
    )


def thin_for_spark(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, len(points) // 60)]


# -- sections ------------------------------------------------------------------------------------------------------


def curve_charts(curves: Curves) -> str:
    lines = {name: points for name, points in curves.items() if len({x for x, _ in points}) > 1}
    single = {name: points for name, points in curves.items() if name not in lines and name != "epoch"}
    most_points = min(600, max(40, _MAX_POINTS // max(1, 2 * len(lines))))
    html = []
    for group in grouped(lines):
        figures = "".join(chart_figure(chart) for chart in charts_of(group, lines, most_points))
        html.append(f'<h3>{escape(heading(group))}</h3><div class="charts">{figures}</div>')
    if single:
        rows = [
            [escape(name), number_text(points[-1][1]), f"{int(points[-1][0]):,}"] for name, points in single.items()
        ]
        html.append(f"<h3>Logged once</h3>{table(['name', 'value', 'step'], rows, numbers=(1, 2))}")
    return "".join(html)


def chart_figure(chart: Chart) -> str:
    drawing = line_chart(chart.series, label=f"{chart.title} by step", log_y=chart.log_y)
    keys = [(s.colour, s.name) for s in chart.series if not s.faint]
    value = number_text(chart.last) + (" · log scale" if chart.log_y else "")
    return figure(
        chart.title, drawing or '<p class="legend">no finite values</p>', value, keys if len(keys) > 1 else ()
    )


def figure(
    title: str, drawing: str, value: str = "", keys: Sequence[tuple[int, str]] = (), *, caption: str = "", css: str = ""
) -> str:
    """Return a card with a drawing: title and value above, legend and caption below."""
    marks = "".join(f'<span><i class="c{colour % 8}"></i>{escape(name)}</span>' for colour, name in keys)
    legend = f'<div class="legend">{marks}</div>' if marks else ""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure{f" class={css}" if css else ""}><header><span class="name">{escape(title)}</span>'
        f'<span class="value">{escape(value)}</span></header>{drawing}{legend}{words}</figure>'
    )


def plots(folder: Path) -> str:
    """Return every image of ``folder``: in the order of its captions, then by name."""
    captions = {name: str(caption) for name, caption in read_json(folder / "captions.json").items()}
    files = (
        {file.name: file for file in sorted(folder.iterdir()) if file.suffix.lower() in _IMAGE_TYPES}
        if folder.is_dir()
        else {}
    )
    order = [name for key in captions for name in files if key in (name, Path(name).stem)]
    names = dict.fromkeys([*order, *files])
    figures = "".join(
        plot_figure(files[name], captions.get(name, captions.get(files[name].stem, ""))) for name in names
    )
    return f'<div class="plots">{figures}</div>' if figures else ""


def image_source(content: bytes, suffix: str) -> str:
    """Return an image as a data URI.

    An SVG is embedded as an image too: scripts and links inside it do not run.
    """
    return f"data:image/{_IMAGE_TYPES[suffix]};base64,{base64.b64encode(content).decode()}"


def plot_figure(file: Path, caption: str) -> str:
    kind, content = _IMAGE_TYPES[file.suffix.lower()], file.read_bytes()
    source = image_source(content, file.suffix.lower())
    name = file.stem.replace("_", " ").replace("-", " ")
    name = name[:1].upper() + name[1:]
    header = "" if kind == "svg+xml" else f'<header><span class="name">{escape(name)}</span></header>'
    text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    wide = ' class="wide"' if pixel_width(content) >= _WIDE else ""
    return f'<figure{wide}>{header}<img alt="{escape(caption or name)}" src="{source}">{text}</figure>'


def pixel_width(image: bytes) -> int:
    """Read the width of a PNG, JPEG or SVG in pixels; 0 for anything else."""
    if match := re.match(rb'<svg\s[^>]*?\bwidth="(\d+)"', image):
        return int(match[1])
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return int.from_bytes(image[16:20])
    at = 2 if image.startswith(b"\xff\xd8") else len(image)
    while at + 9 <= len(image) and image[at] == 0xFF:
        marker, size = image[at + 1], int.from_bytes(image[at + 2 : at + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start of frame, ITU-T T.81 table B.1
            return int.from_bytes(image[at + 7 : at + 9])
        at += 2 + size
    return 0


def checkpoint_table(folder: Path) -> str:
    from arclight.checkpoint import CheckpointError, inspect

    rows = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or not path.is_dir():
            continue
        link = f'<span class="tag">link to {escape(path.readlink().name)}</span>' if path.is_symlink() else ""
        name = f'<span class="mono">{escape(path.name)}</span>{link}'
        try:
            found = inspect(path)
        except CheckpointError as error:
            rows.append((-1, [name, "", "", f'<span class="tag">{escape(str(error))}</span>', ""]))
            continue
        cells = [
            count(found.step),
            count(found.epoch),
            size_text(found.bytes),
            escape(found.created.replace("T", " ")[:16]),
        ]
        rows.append((found.step if found.step is not None else -1, [name, *cells]))
    ordered = [cells for _, cells in sorted(rows, key=lambda row: -row[0])]
    return (
        table(["checkpoint", "step", "epoch", "size", "written (UTC)"], ordered, numbers=(1, 2, 3)) if ordered else ""
    )


def environment_table(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages", {})

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return escape(assignments(value))
        return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))

    rows = "".join(
        f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td>{text(value)}</td></tr>'
        for name, value in environment.items()
        if name != "packages" and value not in (None, [], "")
    )
    if not rows:
        return ""
    listed = "".join(
        f"<li>{escape(name)} <span>{escape(str(version))}</span></li>" for name, version in packages.items()
    )
    more = (
        f'<details><summary>{len(packages)} packages</summary><ul class="packages">{listed}</ul></details>'
        if packages
        else ""
    )
    return f'<div class="sheet"><table>{rows}</table></div>{more}'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return an HTML table, with columns in ``numbers`` aligned right.

    ``numbers``: their indices. Cells are HTML.
    """

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=number' if index in numbers else ''}>{cell}</{kind}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', [escape(name) for name in header])}</tr></thead>"
    return f'<div class="sheet"><table>{head}<tbody>{body}</tbody></table></div>'


# -- small things --------------------------------------------------------------------------------------------------

_TOML = re.compile(
    r'(?P<r>#[^\n]*)|(?P<s>"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\')|(?P<t>^\[[^\n]*\])|(?P<k>^[\w.\-"]+(?= *=))',
    re.MULTILINE,
)


def highlighted(toml: str) -> str:
    """Highlight TOML as HTML: tables, keys, texts and comments."""
    out, end = [], 0
    for match in _TOML.finditer(toml):
        out += [escape(toml[end : match.start()]), f'<span class="{match.lastgroup}">{escape(match[0])}</span>']
        end = match.end()
    return "".join([*out, escape(toml[end:])]).strip()


def asset(name: str) -> str:
    return (resources.files("arclight.trainer") / "assets" / name).read_text(encoding="utf-8")


def anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def size_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
