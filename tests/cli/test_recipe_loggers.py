"""The tables ``[[loggers]]`` of a recipe: training writes rows of steps to them, a federated run rows of rounds."""

from __future__ import annotations

import csv
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arclight.cli.federate.federated_run import RoundLogging
from arclight.cli.schema import Recipe
from arclight.federated.coordination import records
from arclight.federated.rounds.history import Round
from arclight.recipe import read, write
from arclight.trainer.loggers import Logger
from arclight.trainer.loggers.settings import TensorBoard

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def notes(folder: Path) -> Iterator[Path]:
    """A logger of one's own, which writes lines of text, and one that always fails."""
    (folder / "my_loggers.py").write_text(
        textwrap.dedent("""
        from arclight.trainer.loggers import Logger


        class Notes(Logger):
            def __init__(self, file: str = "notes.txt"):
                self.file = file

            def write(self, *words):
                with open(self.file, "a") as file:
                    print(*words, file=file)

            def log_hyperparams(self, params, *args, **kwargs):
                self.write("params", sorted(params)[:1])

            def log_metrics(self, metrics, step=None):
                self.write("row", step, *sorted(metrics))

            def resume(self, step):
                self.write("resume", step)

            def finalize(self, status):
                self.write("end", status)


        class Broken(Logger):
            def log_metrics(self, metrics, step=None):
                raise ConnectionError("the service is away")


        class NoLogger:
            pass
        """)
    )
    yield folder / "notes.txt"
    sys.modules.pop("my_loggers", None)


def with_loggers(recipe: Path, *tables: str) -> str:
    text = recipe.read_text() + "".join(f"\n[[loggers]]\n{table}\n" for table in tables)
    place = recipe.with_name("logged.toml")
    place.write_text(text)
    return place.name


def rows_of(run: Path, name: str) -> list[tuple[int, Any]]:
    """Step and value of each row of a run's metrics.csv that has a value of that name."""
    with (run / "metrics.csv").open() as file:
        return [
            (int(row["step"]), pytest.approx(float(row[name]), rel=1e-6)) for row in csv.DictReader(file) if row[name]
        ]


def event_values(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_training_writes_to_all_loggers(tiny: Path, notes: Path, typed: Typed, folder: Path) -> None:
    recipe = with_loggers(tiny, 'kind = "tensorboard"', 'kind = "csv"\nfolder = "copies"', 'kind = "my_loggers:Notes"')
    status, _, err = typed(f"train {recipe}")
    assert status == 0, err
    run = folder / "runs/tiny/1"
    rows = rows_of(run, "train/loss")
    assert len(rows) == 12
    assert (run / "metrics.csv").read_bytes() == (folder / "copies/tiny/version_0/metrics.csv").read_bytes()
    (events,) = {path.parent for path in run.rglob("events.out.tfevents*")}
    assert event_values(events, "train/loss") == rows
    assert sum("train/loss" in line for line in notes.read_text().splitlines()) == 12
    assert notes.read_text().splitlines()[-1] == "end success"

    before = notes.read_text()
    status, _, err = typed(f"validate {run}")
    assert status == 0, err
    assert notes.read_text() == before, "a run that was scored is not a run that went on"
    status, _, err = typed(f"train {recipe} --resume {run} --trainer.max_epochs 4")
    assert status == 0, err
    assert "resume 12" in notes.read_text()[len(before) :]
    assert [step for step, _ in event_values(events, "train/loss")] == [*range(1, 17)]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('kind = "my_loggers:NoLogger"', "loggers[0]: need an arclight.trainer.loggers.Logger, got NoLogger"),
        ('kind = "wandb"', "loggers[0]: wandb is not installed; this feature needs it: pip install"),
        ('kind = "wanda"', "did you mean wandb?"),
        ('kind = "tensorboard"\nlog_grap = true', "did you mean loggers[0].log_graph?"),
        ('kind = "csv"', "loggers[0].folder is missing"),
        ('kind = "mlflow"\nlog_model = "some"', "loggers[0].log_model"),
    ],
)
def test_invalid_loggers_are_refused_before_a_run_starts(
    tiny: Path, notes: Path, typed: Typed, folder: Path, monkeypatch: pytest.MonkeyPatch, table: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, _, err = typed(f"train {with_loggers(tiny, table)}")
    assert status == 2
    assert words in err
    assert not (folder / "runs").exists()


def test_recipes_with_loggers_are_written_and_read(tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    tables = [
        {"kind": "tensorboard", "log_graph": True},
        {"kind": "mlflow", "tracking_uri": "file:x", "log_model": "all"},
    ]
    recipe = read(Recipe, {"task": "tiny_task:Fit", "loggers": tables})
    assert recipe.loggers[0] == TensorBoard(log_graph=True)
    again = tiny.with_name("again.toml")
    again.write_text(write(recipe))
    assert read(Recipe, again) == recipe


class Rows(Logger):
    """Keep what was logged; raise for the rounds named."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.fails, self.rows, self.status = fails, list[tuple[int | None, dict[str, Any]]](), ""
        self.resumed = -1

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if metrics["round"] in self.fails:
            raise ConnectionError("the service is away")
        self.rows.append((step, dict(metrics)))

    def resume(self, step: int) -> None:
        self.resumed = step

    def finalize(self, status: str) -> None:
        self.status = status


class Rounds:
    """The part of a run's history that is logged."""

    def __init__(self) -> None:
        self.rounds = [Round(round=0, clock=0), Round(round=1, clock=4)]

    def at(self, number: int) -> Round:
        return self.rounds[number]


def test_rounds_go_to_every_logger_and_a_broken_one_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, broken, history = Rows(), Rows(fails=(1,)), Rounds()
    logging = RoundLogging([broken, good], tmp_path)
    # by a thread of the run, which may be quicker than what opens the log
    logging.observe(records.RoundCommitted(round=0, base="", checkpoint="", norm=0.5))
    logging.observe(records.RoundEvaluated(round=0, client=None, samples=1, metrics={"val/loss": 3.0}))
    history.rounds[0].metrics = {"val/loss": 3.0}
    with logging.opened(history, {"seed": 1}):  # type: ignore[arg-type]
        logging.observe(records.RoundCommitted(round=1, base="", checkpoint="", norm=0.5))
        logging.observe(records.RoundEvaluated(round=1, client="a", samples=1, metrics={"val/loss": 9.0}))
        logging.observe(records.RoundEvaluated(round=1, client=None, samples=1, metrics={"val/loss": 2.0}))
    assert [(step, row["round"], row.get("val/loss")) for step, row in good.rows] == [
        (0, 0, None),
        (0, 0, 3.0),
        (4, 1, None),
        (4, 1, 2.0),
    ]
    assert [row["round"] for _, row in broken.rows] == [0, 0]
    assert "round 1 could not be logged with Rows: the service is away" in caplog.text
    assert (good.status, good.resumed) == ("success", 4)


class Hosted(Rows):
    """A service that fails wherever a run begins and ends, or answers slowly."""

    def __init__(self, away: bool = False, slow: threading.Event | None = None) -> None:
        super().__init__()
        self.away, self.slow, self.calls = away, slow, list[str]()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.away:
            raise ConnectionError(f"no answer to {name}")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._called("params")

    def resume(self, step: int) -> None:
        self._called("resume")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append("begin")
        if self.slow is not None:
            self.slow.wait(30)
        super().log_metrics(metrics, step)
        self.calls.append("end")

    def finalize(self, status: str) -> None:
        self._called("finalize")
        super().finalize(status)


def test_a_service_that_is_away_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    away, good = Hosted(away=True), Rows()
    logging = RoundLogging([away, good], tmp_path)
    with logging.opened(Rounds(), {"seed": 1}):  # type: ignore[arg-type]
        logging.observe(records.RoundCommitted(round=1, base="", checkpoint="", norm=0.5))
    assert away.calls == ["params", "resume", "begin", "end", "finalize"]
    assert (good.status, good.resumed, len(good.rows)) == ("success", 4, 1)
    for name in ("params", "resume", "finalize"):
        assert f"with Hosted: no answer to {name}" in caplog.text


def test_a_slow_service_is_left_and_never_ended_while_it_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()
    slow, quick = Hosted(slow=answers), Hosted()
    logging = RoundLogging([slow, quick], tmp_path, patience_s=0.05)
    with pytest.raises(ValueError, match="the run's own"), logging.opened(Rounds(), {}):  # type: ignore[arg-type]
        logging.observe(records.RoundCommitted(round=1, base="", checkpoint="", norm=0.5))
        raise ValueError("the run's own")
    assert "finalize" not in slow.calls
    assert (quick.status, len(quick.rows)) == ("failed", 1)  # no service waits for another
    assert "Hosted is not done after 0.05 s" in caplog.text
    answers.set()
    (thread,) = (one for one in threading.enumerate() if one.name == "arclight-loggers")
    thread.join(30)
    assert slow.calls == ["params", "resume", "begin", "end", "finalize"]
    assert slow.status == "failed"


def test_a_federated_run_writes_a_row_for_each_round(tiny: Path, notes: Path, typed: Typed, folder: Path) -> None:
    recipe = with_loggers(tiny, 'kind = "tensorboard"', 'kind = "my_loggers:Notes"', 'kind = "my_loggers:Broken"')
    text = (folder / recipe).read_text().replace("max_epochs = 3\n", "")
    task = (folder / "tiny_task.py").read_text()
    site = "    def site(self, number, count):\n        return self\n\n    def build"
    (folder / "tiny_task.py").write_text(task.replace("    def build", site))
    (folder / recipe).write_text(f"{text}\n[federation]\nclients = 2\nrounds = 2\nlocal_steps = 3\n")
    status, _, err = typed(f"federate {recipe}")
    assert status == 0, err
    run = folder / "runs/tiny/1"
    lines = notes.read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("row") and "clients" in line] == ["0", "3", "6"]
    assert [line.split()[1] for line in lines if line.startswith("row") and "val/loss" in line] == ["0", "3", "6"]
    assert lines[-1] == "end success"
    (events,) = {path.parent for path in run.rglob("events.out.tfevents*")}
    assert event_values(events, "val/loss") == rows_of(run, "val/loss")
