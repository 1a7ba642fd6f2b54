"""The run folder and the page that is made of it."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import multiprocessing
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from arclight import checkpoint
from arclight.fabric.atomic_replace import temporary_path
from arclight.trainer import Callback, RunFolder
from arclight.trainer.callbacks import ModelCheckpoint, RunReport
from arclight.trainer.loggers import CSVLogger, DummyLogger
from arclight.trainer.run.curves import best_point, grouped, number_text, smoothed, thinned
from arclight.trainer.run.report import Section, table, write_report
from arclight.trainer.run.svg import Series, line_chart, nice_ticks, sparkline, tick_texts

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Page(HTMLParser):
    """Tags with their attributes, the text outside scripts and styles, and whether every element is closed."""

    VOID = {"meta", "link", "img", "br", "rect", "path", "circle", "line"}

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def charts(self) -> dict[str, Any]:
        return {a["aria-label"]: json.loads(a["data-chart"]) for a in self.all("svg") if a.get("class") == "chart"}


def filled(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path, "demo")
    logger = CSVLogger()
    logger.use_folder(run.path)
    for step in range(1, 301):
        logger.log_metrics({"epoch": step // 100, "train/loss": 3 / step, "lr-SGD": 0.1}, step)
        if step % 100 == 0:
            logger.log_metrics(
                {"epoch": step // 100, "val/loss": 5 / step, "val/map50": step / 400, "speed": 7.0}, step
            )
    run.recipe.write_text('[trainer]\nmax_epochs = 3 # <few>\nname = "a&b"\n')
    run.write_environment(seed=7)
    checkpoint.save(
        run.checkpoints / "epoch=2.ckpt",
        {"model": {"w": torch.zeros(50_000)}, "progress": {"epoch": 2, "global_step": 300}},
    )
    (run.checkpoints / "last.ckpt").symlink_to("epoch=2.ckpt")
    (run.plots / "b_matrix.png").write_bytes(PNG)
    (run.plots / "curve.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>')
    (run.plots / "notes.txt").write_text("not an image")
    (run.plots / "captions.json").write_text(
        json.dumps({"curve.svg": "Precision <by> recall", "b_matrix": "Who is taken for whom"})
    )
    return run


def test_the_page_holds_everything_and_needs_nothing_else(tmp_path: Path) -> None:
    run = filled(tmp_path)
    path = write_report(
        run.path, sections=[Section("Programs & more", table(["name", "size"], [["int8", "<b>2 MB</b>"]], numbers=[1]))]
    )
    assert path == run.report
    page = Page(path)
    assert page.charts().keys() == {
        f"{name} by step" for name in ("val/loss", "val/map50", "train/loss", "lr-SGD", "speed")
    }
    assert page.charts()["val/map50 by step"]["s"][0]["p"] == [[100, 0.25], [200, 0.5], [300, 0.75]]
    for text in (
        "demo 1",
        "0.75",
        "best 0.01667 at step 300",
        "epoch=2.ckpt",
        "link to epoch=2.ckpt",
        "200 kB",
        "max_epochs = 3 # <few>",
        '"a&b"',
        "seed",
        "Precision <by> recall",
        "Who is taken for whom",
        "Programs & more",
        "2 MB",
        str(torch.__version__),
        "numpy",
        "Learning rate",
    ):
        assert text in page.text, text
    loaded = [a[key] for _, a in page.tags for key in ("src", "href", "data", "action") if key in a]
    assert loaded
    assert all(address.startswith(("data:", "#")) for address in loaded)
    assert not re.search(r"url\(\s*['\"]?http|@import|fetch\(|XMLHttpRequest|<iframe", path.read_text())
    assert not list(run.path.glob(".*")), "nothing half-written stays behind"


def test_values_logged_once_are_a_table_and_large_images_have_a_row_of_their_own(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "x")
    run.metrics.write_text("step,epoch,val/map50,test/map50\n10,0,0.5,\n20,1,0.7,\n20,1,,0.625\n")
    wide = io.BytesIO()
    wide.write(
        b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x0b\x08"
        + (700).to_bytes(2)
        + (1280).to_bytes(2)
        + b"\x01\x01\x11\x00\xff\xd9"
    )
    (run.plots / "wide.jpg").write_bytes(wide.getvalue())
    (run.plots / "small.png").write_bytes(PNG)
    page = Page(write_report(run.path))
    assert page.charts().keys() == {"val/map50 by step"}
    assert re.search(r"Logged once.*test/map50\s*0\.6250\s*20", page.text, re.DOTALL)
    assert [a.get("class") for a in page.all("figure")] == [None, None, "wide"]


def test_foreign_svg_cannot_run_code(tmp_path: Path) -> None:
    page = Page(write_report(filled(tmp_path).path))
    assert len(page.all("script")) == 1
    images = [a["src"] for a in page.all("img")]
    assert [src.partition(";")[0] for src in images] == ["data:image/svg+xml", "data:image/png"], (
        "in the order of the captions"
    )
    assert b"alert(1)" in base64.b64decode(images[0].partition(",")[2])


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "x")
    logger = CSVLogger()
    logger.use_folder(run.path)
    evil = '"><script>alert(1)</script>'
    for step in (1, 2, 3):
        logger.log_metrics({f"val/{evil}": float(step)}, step)
    (run.plots / "<img src=x onerror=alert(1)>.png").write_bytes(PNG)
    run.recipe.write_text(f"a = '{evil}'\n# {evil}\n")
    page = Page(write_report(run.path, title=evil, failure=f"ValueError: {evil}", headline={evil: evil}))
    assert len(page.all("script")) == 1
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert page.text.count(evil) >= 6
    assert "The run did not finish." in page.text


def test_an_empty_folder_still_gives_a_page(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert page.charts() == {}
    assert page.all("section") == []


def test_a_long_run_with_many_metrics_stays_below_a_megabyte(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    generator = torch.Generator().manual_seed(0)
    names = [f"train/{number}" for number in range(60)]
    lines = [
        f"{step}," + ",".join(map(repr, torch.rand(60, generator=generator).tolist())) for step in range(0, 30000, 10)
    ]
    run.metrics.write_text("\n".join(["step," + ",".join(names), *lines]) + "\n")
    path = write_report(run.path)
    assert len(Page(path).charts()) == 60
    assert path.stat().st_size < 1_000_000


def test_fit_ends_with_a_report_and_so_does_a_failure(fit: Any, scripted: Any) -> None:
    trainer = fit({"val/score": [1.0, 2.0]}, RunReport("My run"), ModelCheckpoint(save_last=True))
    page = Page(trainer.run_folder.report)
    assert page.charts().keys() >= {"val/score by step", "train/loss by step"}, (
        "a curve, though the fit has 8 steps only"
    )
    assert "My run" in page.text
    assert "last.ckpt" in page.text
    assert json.loads(trainer.run_folder.environment.read_text())["torch"] == torch.__version__

    class Fails(scripted):  # type: ignore[misc, valid-type]
        def on_train_epoch_end(self) -> None:
            raise ValueError("no <more>")

    with pytest.raises(ValueError, match="no <more>"):
        fit(Fails(), RunReport(), max_epochs=1, run_name="failed")
    folder = RunFolder.newest(trainer.default_root_dir, "failed")
    assert folder is not None
    assert "The run did not finish. ValueError: no <more>" in Page(folder.report).text


def test_a_report_that_cannot_be_written_ends_no_run(
    fit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arclight.trainer.run.report.write_report", fail)
    trainer = fit({"val/score": [1.0, 2.0]}, RunReport(), ModelCheckpoint(save_last=True))
    assert trainer.state.finished
    assert f"the report of {trainer.run_folder.path} could not be written: [Errno 28] No space left" in caplog.text
    assert "val/score" in trainer.run_folder.metrics.read_text()


def test_a_logger_that_cannot_save_at_the_end_neither_ends_the_run_nor_takes_its_report(
    fit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(DummyLogger):
        def save(self) -> None:
            if trained:
                trained.clear()  # by and by there is room again
                raise OSError(28, "No space left on device")

    class Trained(Callback):
        def on_fit_end(self, *_: Any) -> None:
            trained.append(True)

    trained: list[bool] = []
    trainer = fit({"val/score": [1.0, 2.0]}, Trained(), RunReport(), logger=[Full()], run_name="full")
    assert (trainer.run_folder.path / "report.html").is_file()
    assert "Full could not save before the report: [Errno 28] No space left on device" in caplog.text


# -- curves and charts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "points",
    [
        [(0, 1.0)],
        [(0, 1.0), (10, 1.0)],
        [(0, 0.0), (10, 0.0)],
        [(0, 1e-9), (10, 2e-9), (20, -3e-9)],
        [(0, 1e12), (1_000_000, 3e12)],
        [(0, math.nan), (1, 2.0), (2, math.nan), (3, math.inf), (4, 5.0)],
    ],
)
def test_any_curve_is_drawn_within_its_frame(points: list[tuple[float, float]]) -> None:
    svg = line_chart([Series(name="a", points=points, dots=True)], label='a "b" <c>')
    tree = ElementTree.fromstring(svg)
    assert tree.attrib["aria-label"] == 'a "b" <c>'
    numbers = [
        float(n) for e in tree.iter() if e.tag == "path" for n in re.findall(r"-?[\d.]+(?:e-?\d+)?", e.attrib["d"])
    ]
    assert numbers
    assert all(0 <= n <= 560 for n in numbers)
    assert len([e for e in tree.iter() if e.tag == "text"]) >= 3
    assert tree.attrib["data-chart"].count("NaN") == tree.attrib["data-chart"].count("Infinity") == 0


def test_gaps_outliers_and_nothing() -> None:
    assert line_chart([Series(name="a", points=[(1, math.nan)])], label="a") == ""
    assert sparkline([(1, 2.0)]) == ""
    gap = line_chart([Series(name="a", points=[(0, 1.0), (1, 1.0), (2, math.nan), (3, 1.0), (4, 1.0)])], label="a")
    assert len(re.findall("M", re.search(r'class="curve c0" d="([^"]+)"', gap)[1])) == 2
    spiky = line_chart(
        [
            Series(name="raw", points=[(0, 1.0), (1, 1e6)], faint=True),
            Series(name="smooth", points=[(0, 1.0), (1, 2.0)]),
        ],
        label="a",
    )
    chart = json.loads(ElementTree.fromstring(spiky).attrib["data-chart"])
    assert chart["y"][1] < 3, "a spike in the raw values does not flatten the curve"
    assert [s["n"] for s in chart["s"]] == ["smooth"]
    logarithmic = line_chart([Series(name="a", points=[(0, 1e-3), (1, 0.0), (2, 10.0)])], label="a", log_y=True)
    assert {"0.001", "0.01", "0.1", "1", "10"} <= set(re.findall(r">([\d.]+)</text>", logarithmic))


def test_ticks_are_round_and_inside() -> None:
    generator = random.Random(4)
    for _ in range(300):
        low = generator.uniform(-1, 1) * 10 ** generator.randint(-3, 3)
        high = low + generator.uniform(0.1, 1) * 10 ** generator.randint(-3, 6)
        ticks = nice_ticks(low, high, 5)
        assert 2 <= len(ticks) <= 9
        assert low - (high - low) * 1e-6 <= ticks[0] <= ticks[-1] <= high + (high - low) * 1e-6
        step = ticks[1] - ticks[0]
        assert min(abs(step / 10 ** math.floor(math.log10(step)) - nice) for nice in (1, 2, 5, 10)) < 1e-6
    assert tick_texts([0.0, 0.05, 0.1]) == ["0", "0.05", "0.10"]
    assert tick_texts([0, 20000, 40000]) == ["0", "20k", "40k"]
    assert tick_texts([1000, 1500, 2000]) == ["1,000", "1,500", "2,000"]
    assert tick_texts([2e-5, 4e-5]) == ["2e-5", "4e-5"]


def test_steps_are_whole_numbers() -> None:
    chart = line_chart([Series(name="a", points=[(10, 1.0), (12, 2.0), (14, 1.5)])], label="a")
    assert ">12<" in chart
    assert ">10.5<" not in chart


def test_smoothing_keeps_level_and_does_not_lag() -> None:
    line = [(float(x), 2.0 * x) for x in range(400)]
    middle = smoothed(line)[150:250]
    assert all(abs(y - 2 * x) < 0.5 for x, y in middle)
    generator = torch.Generator().manual_seed(1)
    noisy = [(float(x), 5 + v) for x, v in enumerate(torch.randn(2000, generator=generator).tolist())]
    flat = torch.tensor([y for _, y in smoothed(noisy)])
    assert abs(flat.mean() - 5) < 0.1
    assert flat.std() < 0.3


def test_thinning_keeps_spikes_and_ends() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[5_432] = (5432.0, 9.0)
    few = thinned(points, 100)
    assert len(few) <= 102
    assert (5432.0, 9.0) in few
    assert few[-1] == points[-1]
    assert [x for x, _ in few] == sorted(x for x, _ in few)


def test_grouping_best_and_numbers() -> None:
    curves = {
        name: [(1, 3.0), (2, 1.0), (3, 2.0)]
        for name in ("lr-SGD", "train_loss", "zeta", "epoch", "val/map50", "val/power", "x/y")
    }
    assert list(grouped(curves)) == ["val", "train", "x", "lr", ""]
    assert best_point("train_loss", curves["zeta"]) == (2, 1.0)
    assert best_point("val/map50", curves["zeta"]) == (1, 3.0)
    assert best_point("val/power", curves["zeta"]) is None
    assert [number_text(v) for v in (0.123456, 1234.5678, 12.0, 1e-7, math.nan)] == [
        "0.1235",
        "1,235",
        "12",
        "1.000e-07",
        "nan",
    ]


# -- the folder ----------------------------------------------------------------------------------------------------


def make_folders(root: str, barrier: Any, out: Any) -> None:
    barrier.wait()
    out.put([RunFolder(root, "race").number for _ in range(20)])


def test_two_processes_never_share_a_number(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(3), context.Queue()
    workers = [context.Process(target=make_folders, args=(str(tmp_path), barrier, out)) for _ in range(3)]
    for worker in workers:
        worker.start()
    numbers = sorted(number for _ in workers for number in out.get(timeout=60))
    for worker in workers:
        worker.join()
    assert numbers == list(range(1, 61))


def test_numbers_opening_and_the_newest(tmp_path: Path) -> None:
    assert RunFolder.newest(tmp_path, "a") is None
    first, second = RunFolder(tmp_path, "a"), RunFolder(tmp_path, "a")
    assert (first.number, second.number, second.name) == (1, 2, "a")
    (tmp_path / "a" / "notes").mkdir()
    assert RunFolder(tmp_path, "a", 12).path == tmp_path / "a" / "12"
    assert RunFolder.newest(tmp_path, "a").number == 12
    with pytest.raises(FileExistsError):
        RunFolder(tmp_path, "a", 12)
    again = RunFolder.open(tmp_path / "a" / "2")
    assert os.fspath(again) == str(second.path)
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        RunFolder.open(tmp_path / "a" / "99")


def test_the_environment_holds_versions_but_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2-secret")
    run = RunFolder(tmp_path)
    first = json.loads(run.write_environment(device="cpu").read_text())
    assert {
        "python",
        "torch",
        "arclight",
        "platform",
        "cpu",
        "threads",
        "git_commit",
        "packages",
        "device",
        "started",
    } <= first.keys()
    assert first["packages"]["torch"] == torch.__version__
    assert "hunter2" not in run.environment.read_text()
    again = json.loads(run.write_environment().read_text())
    assert again["started"] == first["started"]
    assert "resumed" not in again, "the same run wrote it"
    second = json.loads(RunFolder.open(run.path).write_environment().read_text())
    assert second["started"] == first["started"]
    assert "resumed" in second


def killed_while_writing(path: Path) -> None:
    """Leave what a process leaves that is killed while it replaces ``path``."""
    if (child := os.fork()) == 0:
        temporary_path(path).write_text("{")
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("resumed", [True, False])
def test_remains_of_a_killed_run_are_removed_by_the_next(tmp_path: Path, resumed: bool) -> None:
    run = RunFolder(tmp_path)
    run.write_environment()
    killed_while_writing(run.environment)
    living = temporary_path(run.report)
    living.write_text("<html>")
    following = RunFolder.open(run.path) if resumed else RunFolder(tmp_path)
    following.write_environment()
    assert {entry.name for entry in run.path.iterdir()} == {"environment.json", living.name}


def test_the_log_file(tmp_path: Path) -> None:
    run, logger = RunFolder(tmp_path), logging.getLogger("arclight.test_report")
    handler = run.log_handler()
    assert not run.log.exists(), "nothing is written before there is something to write"
    logger.addHandler(handler)
    logger.warning("three checkpoints are gone")
    logger.removeHandler(handler)
    handler.close()
    assert re.search(r"WARNING +arclight\.test_report: three checkpoints are gone", run.log.read_text())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_log_of_a_full_disk_neither_raises_nor_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, logger = RunFolder(tmp_path), logging.getLogger("arclight.test_report")
    run.log.symlink_to("/dev/full")
    handler = run.log_handler()
    logger.addHandler(handler)
    logger.error("the disk is full")
    logger.error("the disk is full " + 10_000 * "x")
    logger.removeHandler(handler)
    handler.close()
    assert capsys.readouterr().err == ""
