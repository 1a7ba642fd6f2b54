"""The timeline of a step: a page that a browser shows without a complaint, and the same step in Chrome's format."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.parallel.pipeline.schedule.hand_written_steps import gpipe, one_forward_one_backward, run
from tests.serve.browser import Browser, chromium

from arclight.parallel.pipeline.runtime.recording import Recording
from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.step_trace import Span, Trace, bubble, busy, idle
from arclight.parallel.pipeline.view.chrome import chrome_trace
from arclight.parallel.pipeline.view.timeline import timeline
from arclight.parallel.plan import PlanError

PREDICTED = run(one_forward_one_backward(4, 8), {"F": 0.01, "B": 0.02}, name="1F1B")
MEASURED = run(one_forward_one_backward(4, 8), {"F": 0.01, "B": 0.02}, {2: 1.3}, 0.001, "1F1B")
HOSTILE = "</script><script>document.title = 'taken'</script>\"'&<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Collect tags, attributes, tables, and texts of elements with an id from a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.scripts: dict[str, str] = {}
        self.bars: list[list[float]] = []
        self._open: list[tuple[str, dict[str, Any]]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "div" and (found.get("class") or "").split()[:1] == ["bar"]:
            self.bars.append([])
        elif tag == "span" and (grow := re.fullmatch(r"flex-grow:([\d.]+)", found.get("style") or "")):
            self.bars[-1].append(float(grow[1]))
        if tag not in ("meta", "link", "input"):
            self._open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag, attributes = self._open[-1]
        if tag == "script":
            self.scripts[attributes.get("type", "")] = data
        elif self.rows and any(name in ("td", "th") for name, _ in self._open):
            self.rows[-1][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts["application/json"])


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_action_and_the_measured_numbers(tmp_path: Path) -> None:
    path = timeline(MEASURED, PREDICTED, tmp_path / "plots" / "timeline.html")
    page = Page(path)
    assert [name for name in page.links if name != "data:,"] == []  # nothing is fetched
    assert "http" not in path.read_text(encoding="utf-8").replace("http-equiv", "")
    assert [step["name"] for step in page.data["traces"]] == ["predicted", "measured"]
    for step, trace in zip(page.data["traces"], (PREDICTED, MEASURED), strict=True):
        assert step["microseconds"] == pytest.approx(trace.seconds * 1e6, abs=0.1)
        for rank, lane in enumerate(step["lanes"]):
            flat = lane["spans"]
            shown = [flat[i : i + 6] for i in range(0, len(flat), 6)]
            letters = page.data["letters"]
            assert [(letters[kind], stage, number, size) for kind, stage, number, _, _, size in shown] == [
                (span.action.kind, span.action.stage, span.action.micro_batch, span.live) for span in trace.of(rank)
            ]
            assert [x for *_, start, end, _ in shown for x in (start, end)] == pytest.approx(
                [x * 1e6 for span in trace.of(rank) for x in (span.start, span.end)], abs=0.1
            )
    head, *rows, foot = page.rows
    assert head[:4] == ["process", "busy", "warm-up", "schedule"]
    for rank, row in enumerate(rows):
        cause = idle(MEASURED)[rank]
        assert row[0].split() == [str(rank), "stage", str(rank)]
        assert row[1] == f"{busy(MEASURED)[rank] / MEASURED.seconds:.1%}"
        assert row[head.index("communication")] == f"{cause.communication / MEASURED.seconds:.1%}"
        assert row[head.index("imbalance")] == f"{cause.imbalance / MEASURED.seconds:.1%}"
    assert foot[1] == f"{1 - bubble(MEASURED):.1%}"
    assert len(page.bars) == 2 * 4
    assert [sum(bar) for bar in page.bars] == pytest.approx([1.0] * 8, abs=1e-4)


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    trace = Trace(HOSTILE, 1, 1, 1, (Span(0, Action(0, "F", 0), 0.0, 1.0),))
    page = Page(timeline(trace, file=tmp_path / "a.html", title=HOSTILE))
    plain = Page(timeline(Trace("x", 1, 1, 1, trace.spans), file=tmp_path / "b.html", title="x"))
    assert page.tags == plain.tags


def test_invalid_timelines_are_refused_and_keep_the_former_page(tmp_path: Path) -> None:
    path = timeline(MEASURED, file=tmp_path / "timeline.html")
    bars = path.read_text().partition("<h2>Where the time goes</h2>")[2].partition("</section>")[0]
    legend = bars.partition("</ul>")[0]
    for kind in {span.action.kind for span in MEASURED.spans}:
        assert f'class="box k{kind}"' in legend
    before = path.read_bytes()
    with pytest.raises(PlanError, match="predicted step has 4 ranks, the one it is compared with 2"):
        timeline(run(gpipe(2, 4), {"F": 1, "B": 1}), PREDICTED, path)
    with pytest.raises(PlanError, match="nothing to show of a step without actions"):
        timeline(Trace("1F1B", 1, 1, 1, ()), file=path)
    with pytest.raises(PlanError, match="no step was recorded"):
        timeline(Recording(), file=path)
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.html"]
    assert path.read_bytes() == before


def test_of_a_recording_the_first_process_writes_the_step_of_median_length(tmp_path: Path) -> None:
    slow, quick = (run(gpipe(2, 4), {"F": 0.01 * n, "B": 0.01}) for n in (3, 1))
    middle = run(gpipe(2, 4), {"F": 0.02, "B": 0.01})
    only_forward = Trace("GPipe", 2, 2, 4, tuple(s for s in middle.spans if s.action.kind == "F"))
    recording = Recording(traces=[slow, only_forward, quick, middle])
    page = Page(timeline(recording, file=tmp_path / "timeline.html"))
    assert page.data["traces"][0]["microseconds"] == pytest.approx(middle.seconds * 1e6)
    assert str(recording).splitlines()[0].startswith("test: 2 processes")
    other = Recording(traces=[slow], first=False)
    assert timeline(other, file=tmp_path / "other.html") == tmp_path / "other.html"
    assert chrome_trace(other, tmp_path / "other.json") == tmp_path / "other.json"
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.html"]


def test_a_figure_is_sound_svg_with_a_box_for_every_action(tmp_path: Path) -> None:
    path = timeline(MEASURED, PREDICTED, tmp_path / "step.svg", title=HOSTILE)
    tree = ElementTree.parse(path)  # written just now
    name = "{http://www.w3.org/2000/svg}"
    assert tree.getroot().tag == f"{name}svg"
    assert [text.text for text in tree.iter(f"{name}text") if text.get("class") == "title"] == [HOSTILE]
    scale = (1200 - 84 - 16) / MEASURED.seconds
    for group, trace in zip(("low", "step"), (PREDICTED, MEASURED), strict=True):
        (lanes,) = (g for g in tree.iter(f"{name}g") if g.get("class") == group)
        boxes = [r for r in lanes.iter(f"{name}rect") if r.get("class") in ("F", "B")]
        assert Counter(r.get("class") for r in boxes) == {"F": 32, "B": 32}
        wanted = sorted(84 + span.start * scale for span in trace.spans)
        assert sorted(float(r.get("x", "nan")) for r in boxes) == pytest.approx(wanted, abs=0.01)
        assert [r.get("class") for r in lanes.iter(f"{name}rect")].count("lane") == 4
        texts = Counter(text.text for text in lanes.iter(f"{name}text"))
        assert texts["B3"] == 4


# -- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def colours(browser: Browser) -> int:
    """Count the colours of the timeline, of pixels on a grid."""
    return browser.run(
        "const b = document.getElementById('base'), c = document.createElement('canvas');"
        "c.width = b.width; c.height = b.height; const g = c.getContext('2d', {willReadFrequently: true});"
        "g.drawImage(b, 0, 0); const d = g.getImageData(0, 0, c.width, c.height).data;"
        "const s = new Set(); for (let i = 0; i < d.length; i += 4 * 7) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
        "return s.size"
    )


def point(browser: Browser, rank: int, share: float) -> str:
    """Return the text at the mouse: the measured lane of a process, at a share of the step."""
    x, y = browser.run(
        "const r = document.getElementById('chart').getBoundingClientRect();"
        "window.scrollTo(0, 0); return [r.left + 104 + arguments[1] * (r.width - 118), r.top + arguments[0]]",
        34 + 20 + rank * 90,
        share,
    )
    move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
    browser._post(
        "actions",
        actions=[{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}],
    )
    return browser.text("#readout")


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_browser_shows_it_in_both_themes_without_a_complaint(browser: Browser, tmp_path: Path, theme: str) -> None:
    path = timeline(MEASURED, PREDICTED, tmp_path / "timeline.html", title=HOSTILE)
    browser.theme(theme)
    browser.resize(1400, 1000)
    browser.open(path.as_uri())
    assert browser.run("return document.title") == HOSTILE
    assert colours(browser) > 20
    said = point(browser, 0, 0.005)
    assert "Forward, measured" in said
    assert "stage 0 · micro-batch 0 · process 0 · 0F0" in said
    assert "took 10.00 ms (predicted 10.00 ms)" in said
    before = colours(browser)
    browser.resize(700, 900)
    browser.wait("document.getElementById('base').clientWidth < 700")
    assert colours(browser) != before
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.console() == []


def test_keys_go_from_action_to_action_and_say_what_was_waited_for(browser: Browser, tmp_path: Path) -> None:
    browser.resize(1400, 1000)
    browser.open(timeline(MEASURED, file=tmp_path / "timeline.html").as_uri())
    browser.run("document.getElementById('chart').focus()")
    right, down, escape = "\ue014", "\ue015", "\ue00c"
    browser.press(right)
    assert "0F0" in browser.text("#readout")
    browser.press(right * 4)  # the first backward, which has come through all stages
    said = browser.text("#readout")
    assert "0B0" in said
    waited = next(span for span in MEASURED.of(0) if span.action.kind == "B").start - MEASURED.of(0)[3].end
    assert f"waited {waited * 1000:.2f} ms for 1B0 of process 1" in said
    assert "1.000 ms more until here" in said
    browser.press(down)
    assert "process 1" in browser.text("#readout")
    browser.press("++")
    browser.press(escape)
    assert browser.run("return document.getElementById('readout').style.display") == "none"
    assert browser.console() == []


def test_a_range_is_zoomed_into_and_left_again(browser: Browser, tmp_path: Path) -> None:
    browser.resize(1400, 1000)
    browser.open(timeline(MEASURED, file=tmp_path / "timeline.html").as_uri())
    picture = "return document.getElementById('base').toDataURL()"
    whole = browser.run(picture)
    left, top = browser.run(
        "const r = document.getElementById('chart').getBoundingClientRect(); return [r.left, r.top]"
    )
    pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
    steps = [
        {"type": "pointerMove", "duration": 0, "x": round(left) + 104, "y": round(top) + 40}, {"type": "pointerDown", "button": 0},
        {"type": "pointerMove", "duration": 20, "x": round(left) + 160, "y": round(top) + 60}, {"type": "pointerUp", "button": 0},
    ]  # fmt: skip
    browser._post("actions", actions=[pointer | {"actions": steps}])
    browser.wait(f"document.getElementById('base').toDataURL() !== {json.dumps(whole)}")
    # The first 5 % of the step fill the lane now, so that the middle of it is the first or second forward.
    assert re.search(r"0F[01]\b", point(browser, 0, 0.5))
    browser.press("0")
    browser.wait(f"document.getElementById('base').toDataURL() === {json.dumps(whole)}")
    assert browser.console() == []


@pytest.mark.slow
def test_a_large_step_stays_fluid(browser: Browser, tmp_path: Path) -> None:
    trace = run(one_forward_one_backward(64, 256), {"F": 0.001, "B": 0.002}, transfer=1e-4)
    assert len(trace.spans) == 64 * 256 * 2
    path = timeline(trace, file=tmp_path / "timeline.html")
    assert path.stat().st_size < 4e6
    browser.resize(1600, 1000)
    browser.open(path.as_uri())
    frames = browser.run(
        "const canvas = document.getElementById('chart'), took = [];"
        "for (let i = 0; i < 5; i++) { const t = performance.now(); window.dispatchEvent(new Event('resize'));"
        "document.getElementById('memory').click(); took.push(performance.now() - t); } return took.sort((a, b) => a - b)[2]"
    )
    assert frames < 1000  # 20 on an idle machine, with everything laid out anew
    assert browser.console() == []


# -- Chrome's format -----------------------------------------------------------------------------------------------


def test_chrome_events_keep_to_the_format(tmp_path: Path) -> None:
    written = json.loads(chrome_trace(MEASURED, tmp_path / "trace.json", PREDICTED).read_text(encoding="utf-8"))
    assert written["displayTimeUnit"] == "ms"
    events = written["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= set(event)
        assert event["ph"] in "XsfMC"
        if event["ph"] != "M":
            assert event["ts"] >= 0
    slices = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert len(slices) == 2 * 4 * 8 * 2
    for process, trace in ((0, MEASURED), (1, PREDICTED)):
        for span in trace.spans:
            found = slices[process, str(span.action)]
            assert (found["tid"], found["ts"]) == (span.rank, pytest.approx(span.start * 1e6))
            assert found["dur"] == pytest.approx((span.end - span.start) * 1e6)
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {"1F1B, measured", "1F1B, predicted"}


def test_an_arrow_goes_from_every_sender_to_its_receiver(tmp_path: Path) -> None:
    events = json.loads(chrome_trace(MEASURED, tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def around(event: dict[str, Any]) -> str:
        (name,) = (
            e["name"] for e in slices if e["tid"] == event["tid"] and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        )
        return name

    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    starts = [e for e in events if e["ph"] == "s"]
    assert len(starts) == len(ends) == 2 * 3 * 8
    arrows = {(around(start), around(ends[start["id"]]), start["name"]) for start in starts}
    assert arrows == {(f"{s}F{n}", f"{s + 1}F{n}", "activation") for s in range(3) for n in range(8)} | {
        (f"{s + 1}B{n}", f"{s}B{n}", "gradient") for s in range(3) for n in range(8)
    }
    assert all(e["bp"] == "e" for e in ends.values())
