"""The history of rounds in the run's database survives deaths of the process that writes it."""

from __future__ import annotations

import contextlib
import csv
import gc
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import fsspec
import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.clients import Outcome
from arclight.federated.coordination import records as r
from arclight.federated.coordination.run_database import NAME, RunDatabase, UnavailableError, read_journal
from arclight.federated.coordination.run_state import RunState, StateSaved
from arclight.federated.protocol import Fit, Message
from arclight.federated.rounds import tools
from arclight.federated.rounds.history import History, Round, export_metrics, read_history, read_rounds
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink
from arclight.trainer.loggers.csv_logger import read_metrics

START = {"w": torch.zeros(10)}


class Moving(Quadratic):
    """Its target moves on, so that no two of its updates are alike."""

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        self.target = float(order.round) * (1 + int(order.client))
        return super().fit(order, weights, progress)


def served(
    folder: Path, rounds: int, until: Callable[[Message], bool] = lambda message: False, **more: object
) -> Server:
    """A run that has come to its end, or to an order for which ``until`` is true."""
    settings = Federation(
        **{"clients": 2, "rounds": rounds, "local_steps": 1, "evaluate_every": 0, "waiting": CALM, **more}
    )  # type: ignore[arg-type]
    server = Server(settings, START, folder=folder, evaluate=lambda weights: {"loss": float(weights["w"].sum())})
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), {name: Moving(1.0) for name in ("0", "1")}).work(until)
        if run.coordinator.state.ended is not None:
            assert run.runtime.wait(60)
    return server


def at(number: int) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, Fit) and message.round == number


def of_a_round(told: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in told.items() if not name.startswith("seconds")}


def test_a_late_round_costs_what_an_early_one_did(tmp_path: Path) -> None:
    sizes, kept = dict[int, list[int]](), dict[int, int]()
    folder = tmp_path / "run"
    gc.collect()
    others = [one for one in gc.get_objects() if type(one) is Round]  # of tests before it in this process

    def observe(what: object) -> None:
        if isinstance(what, r.RoundCommitted) and what.round in (10, 60):
            checkpoint = sum(path.stat().st_size for path in Rounds(folder).path(what.round).iterdir())
            entries = sum(len(str(entry)) for entry in read_history(folder))
            sizes[what.round] = [checkpoint, entries // what.round]
            gc.collect()
            kept[what.round] = sum(type(one) is Round for one in gc.get_objects()) - len(others)

    settings = Federation(clients=2, rounds=60, local_steps=1, evaluate_every=0, keep_rounds=0, waiting=CALM)
    server = Server(settings, START, folder=folder, observer=observe)
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), {name: Moving(1.0) for name in ("0", "1")}).work()
        assert run.runtime.wait(60)
    for early, late in zip(sizes[10], sizes[60], strict=True):
        assert late < 1.1 * early + 50, sizes
    assert len(read_journal(folder)) < 60, "the journal is as long as the run"
    assert kept[60] <= kept[10] <= 4, "rounds that are over are kept in memory"
    assert [here.round for here in server.history] == list(range(61))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[RunDatabase]:
    with RunDatabase.open(tmp_path) as opened:
        yield opened


def test_a_round_written_while_open_is_written_again(database: RunDatabase, tmp_path: Path) -> None:
    """The process was killed after the round was committed, and before its row was written again."""
    database.write_history(0, [(False, {"round": 0, "base": "a"}), (True, {"round": 1, "base": ""})])
    history = History(database)
    history.load(2, 1)
    for number in (0, 1):
        history.note(r.RoundCommitted(round=number, base=f"b{number}", checkpoint="x", norm=1.0))
    history.write(2)
    assert [told["base"] for told in read_history(tmp_path)] == ["a", "b1"]


def test_no_row_is_ahead_of_the_journal(database: RunDatabase, tmp_path: Path) -> None:
    """An older copy of the journal was put back."""
    database.write_history(0, [(False, {"round": number, "base": "a"}) for number in range(5)])
    history = History(database)
    history.load(2, 3)
    assert [here.round for here in history.rounds] == [0, 1, 2, 3]
    history.write(2)
    assert [told["round"] for told in read_history(tmp_path)] == [0, 1, 2, 3]


def test_a_state_and_the_rounds_that_it_leaves_out_are_one_commit(tmp_path: Path) -> None:
    state, points = StateSaved(state=RunState(run="a", committed=1)), list[str]()
    with RunDatabase.open(tmp_path / "run", inject=lambda point, number: points.append(point)) as database:
        history = History(database)
        history.at(0), history.at(1)
        history.write(1, state)
        assert [here.round for here in history.rounds] == [0, 1]
        assert (database.records(), database.last_settled()) == ([state], 0)
    assert points[3:] == ["before save", "in save", "after save"]


def test_a_full_disk_writes_no_round_twice(database: RunDatabase, tmp_path: Path) -> None:
    history = History(database)
    history.at(0), history.at(1)
    history.write(0)
    history.at(0).base = "a" * 100_000
    database._connection.execute("PRAGMA max_page_count = 4")
    with pytest.raises(UnavailableError, match="full"):
        history.write(1)
    assert [here.round for here in history.rounds] == [0, 1]
    database._connection.execute("PRAGMA max_page_count = 10000")
    history.write(1)
    history.write(1)
    assert [(here.round, len(here.base)) for here in read_rounds(tmp_path)] == [(0, 100_000), (1, 0)]


def test_no_metric_takes_the_place_of_a_column_of_the_run(database: RunDatabase, tmp_path: Path) -> None:
    history = History(database)
    history.note(r.RoundOpened(round=1, base="b", clients=("a",), wanted=1, clock=0, steps=5))
    named = dict.fromkeys(("round", "step", "norm", "epsilon", "val/loss"), 7.5)
    history.note(r.RoundEvaluated(round=1, client=None, samples=1, metrics=named))
    history.write(2)
    export_metrics(tmp_path)
    (row,) = csv.DictReader((tmp_path / "metrics.csv").open(encoding="utf-8"))
    assert (row["round"], row["step"], row["val/loss"]) == ("1", "5", "7.5")
    assert {row[f"metrics/{name}"] for name in ("round", "step", "norm", "epsilon")} == {"7.5"}
    assert read_metrics(tmp_path / "metrics.csv")["metrics/norm"] == [(5, 7.5)]


def test_excluded_clients_do_not_count_in_the_history(database: RunDatabase) -> None:
    """It was put out since it said that it weighs far more than the others: no mean is to go by that."""
    history = History(database)
    history.note(r.RoundOpened(round=1, base="b", clients=("a", "b"), wanted=2, clock=0, steps=5))
    for client, samples, loss in (("a", 10, 1.0), ("b", 1 << 40, 9.0)):
        update = r.UpdateAccepted(
            round=1, client=client, digest=client, samples=samples, tokens=0, steps=5, seconds=1.0, bytes=1, norm=1.0,
            metrics={"train/loss": loss},
        )  # fmt: skip
        history.note(update)
    assert history.at(1).train_loss is not None
    assert history.at(1).train_loss > 8.9  # type: ignore[operator]
    history.note(r.ClientFailed(round=1, client="b", message="it would outweigh them", redo=True))
    assert history.at(1).train_loss == 1.0
    assert (list(history.at(1).norms), list(history.at(1).failed)) == (["a"], ["b"])
    assert history.at(1).bytes_up == {"a": 1, "b": 1}, "it was sent"


def test_late_transfers_do_not_write_a_round_twice(database: RunDatabase, tmp_path: Path) -> None:
    """The order was given before the round was committed, and is counted after that."""
    history = History(database)
    history.at(0), history.at(1)
    history.write(1)
    history.sent(0, "a", 10)
    history.record_duration(0, "evaluate", 1.0)
    history.sent(1, "a", 20)
    history.write(2)
    assert [(told["round"], told["bytes_down"]) for told in read_history(tmp_path)] == [(0, {}), (1, {"a": 20})]


class Disk:
    """Copies what of a run's database is on the disk, as often as that is waited for: a power failure takes the rest."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.copy, self.saves = folder, folder.with_name("disk"), 0
        commit = RunDatabase._commit

        def noted(database: RunDatabase, what: str, statements: object, *, durable: bool = True) -> None:
            commit(database, what, statements, durable=durable)  # type: ignore[arg-type]
            self.saves += what == "save"
            if durable and folder.exists():
                shutil.rmtree(self.copy, ignore_errors=True)
                self.copy.mkdir()
                for name in (NAME, f"{NAME}-wal"):
                    shutil.copy(folder / name, self.copy / name)

        monkeypatch.setattr(RunDatabase, "_commit", noted)
        monkeypatch.setattr(
            RunDatabase, "is_long", property(lambda one: len(one) > 15 and not one._state)
        )  # once, early

    def fails(self) -> None:
        """Put back what was on the disk; what came after it may be there in part."""
        for path in self.copy.iterdir():
            shutil.copy(path, self.folder / path.name)
        with (self.folder / f"{NAME}-wal").open("ab") as log:
            log.write(bytes(range(256)) * 20)


@pytest.mark.parametrize("lost", [pytest.param("nothing", marks=pytest.mark.slow), "what was not on the disk"])
def test_a_resumed_run_reports_all_of_its_rounds(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = served(tmp_path / "whole", 10, evaluate_every=1)
    folder = tmp_path / "run"
    disk = Disk(folder, monkeypatch)
    served(folder, 10, at(9), evaluate_every=1)
    assert disk.saves == 1
    told = read_history(folder)
    if lost == "what was not on the disk":
        disk.fails()
        assert len(read_history(folder)) > 2
        assert read_history(folder) != told, "all of it was on the disk"
        (folder / "metrics.csv").unlink()
    went_on = served(folder, 10, evaluate_every=1)
    seen_here = {"bytes_down": 0}
    assert [of_a_round(asdict(here)) | seen_here for here in went_on.history] == [
        of_a_round(asdict(here)) | seen_here for here in whole.history
    ]
    assert [of_a_round(told) for told in read_history(folder)] == [of_a_round(asdict(h)) for h in went_on.history]
    with (folder / "metrics.csv").open(newline="") as rows:
        table = list(csv.DictReader(rows))
    assert [int(row["round"]) for row in table] == list(range(11))
    assert [float(row["loss"]) for row in table] == [here.metrics["loss"] for here in went_on.history]
    if lost == "nothing":
        assert [here.bytes_down for here in went_on.history[1:4]] == [here.bytes_down for here in whole.history[1:4]]


def test_a_fork_reports_the_rounds_before_it(tmp_path: Path) -> None:
    whole = served(tmp_path / "whole", 5, keep_rounds=0)
    tools.fork(tmp_path / "whole", tmp_path / "fork", 3)
    fork = served(tmp_path / "fork", 5)
    assert [here.base for here in fork.history] == [here.base for here in whole.history]
    assert [here.samples for here in fork.history] == [here.samples for here in whole.history]
    assert tools.inspect_round(tmp_path / "fork", 5).clients == tools.inspect_round(tmp_path / "whole", 5).clients


def test_a_run_at_an_address_is_forked_with_its_history(tmp_path: Path) -> None:
    """Its folder was copied there as it was, with its database."""
    whole = served(tmp_path / "whole", 2, keep_rounds=0)
    address = f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").put(str(tmp_path / "whole"), f"/{tmp_path.name}/run", recursive=True)
    assert read_rounds(address) == whole.history
    tools.fork(address, tmp_path / "fork", 1)
    assert read_rounds(tmp_path / "fork") == whole.history[:2]


def test_a_run_whose_database_is_damaged_is_forked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the message about the damage advises."""
    whole = served(tmp_path / "whole", 3, keep_rounds=0)
    told, content = whole.history, (tmp_path / "whole" / NAME).read_bytes()
    (tmp_path / "whole" / NAME).write_bytes(content[: len(content) // 2])
    tools.fork(tmp_path / "whole", tmp_path / "fork", 2)
    assert "begins without the history of rounds before its own" in caplog.text
    fork = served(tmp_path / "fork", 3)
    assert [(here.round, here.base) for here in fork.history] == [(here.round, here.base) for here in told[2:]]


def copied(source: str, target: str) -> None:
    """Copy a file unless it is gone: a run goes on and removes updates that no round needs any more."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def test_a_database_that_was_copied_without_its_log_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Federation(clients=2, rounds=3, local_steps=1, evaluate_every=0, keep_rounds=0, waiting=CALM)
    with Server(settings, START, folder=tmp_path / "run").opened() as run:
        ScriptedNode(InProcessLink(run.service), {name: Moving(1.0) for name in ("0", "1")}).work(at(3))
        shutil.copytree(
            tmp_path / "run", tmp_path / "copy", ignore=shutil.ignore_patterns("*-wal", "*-shm"), copy_function=copied
        )
    assert "run.db-wal" not in caplog.text
    served(tmp_path / "copy", 3, keep_rounds=0)
    assert "has none of the 3 rounds" in caplog.text
    assert "copied without its log (run.db-wal)" in caplog.text
