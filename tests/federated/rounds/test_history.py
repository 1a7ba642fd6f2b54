"""What becomes of rounds is told in files that grow by a round at a time, whatever happens to the process that writes them."""

from __future__ import annotations

import csv
import errno
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.clients import Outcome
from arclight.federated.coordination import records as r
from arclight.federated.coordination.journal import Journal, read
from arclight.federated.protocol import Fit, Message
from arclight.federated.rounds import tools
from arclight.federated.rounds.history import NAME, GrowingFile, History, HistoryFile, Round, read_history
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

    def told(what: object) -> None:
        if isinstance(what, r.RoundCommitted) and what.round in (10, 60):
            checkpoint = sum(path.stat().st_size for path in Rounds(folder).path(what.round).iterdir())
            sizes[what.round] = [checkpoint, (folder / NAME).stat().st_size // what.round]
            gc.collect()
            kept[what.round] = sum(type(one) is Round for one in gc.get_objects()) - len(others)

    settings = Federation(clients=2, rounds=60, local_steps=1, evaluate_every=0, keep_rounds=0, waiting=CALM)
    server = Server(settings, START, folder=folder, told=told)
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), {name: Moving(1.0) for name in ("0", "1")}).work()
        assert run.runtime.wait(60)
    for early, late in zip(sizes[10], sizes[60], strict=True):
        assert late < 1.1 * early + 50, sizes
    assert sum(1 for _ in read(folder / "journal.jsonl")) < 60, "the journal is as long as the run"
    assert kept[60] <= kept[10] <= 4, "rounds that are over are kept in memory"
    assert [here.round for here in server.history] == list(range(61))


def test_a_round_that_was_open_when_it_was_last_told_is_told_again(tmp_path: Path) -> None:
    """The process was killed after the round was committed, and before its line was written anew."""
    HistoryFile(tmp_path).write([{"round": 0, "base": "a"}], [{"round": 1, "base": ""}])
    again = HistoryFile(tmp_path)
    settled, later = again.take_up(2, [0, 1])
    assert settled == {0}
    assert [told["round"] for told in later] == [1]
    again.write([{"round": 1, "base": "b"}], [])
    assert [told["base"] for told in read_history(tmp_path)] == ["a", "b"]


def test_a_full_disk_tells_no_round_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, write = History(tmp_path), HistoryFile.write
    history.at(0), history.at(1)
    history.write(0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(HistoryFile, "write", full)
    with pytest.raises(OSError, match="No space"):
        history.write(1)
    monkeypatch.setattr(HistoryFile, "write", write)
    history.write(1)
    history.write(1)
    with (tmp_path / "metrics.csv").open(newline="") as rows:
        assert [row["round"] for row in csv.DictReader(rows)] == ["0", "1"]


def test_no_metric_takes_the_place_of_a_column_of_the_run(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.note(r.RoundOpened(round=1, base="b", clients=("a",), wanted=1, clock=0, steps=5))
    named = dict.fromkeys(("round", "step", "norm", "epsilon", "val/loss"), 7.5)
    history.note(r.RoundEvaluated(round=1, client=None, samples=1, metrics=named))
    history.write(2)
    (row,) = csv.DictReader((tmp_path / "metrics.csv").open(encoding="utf-8"))
    assert (row["round"], row["step"], row["val/loss"]) == ("1", "5", "7.5")
    assert {row[f"metrics/{name}"] for name in ("round", "step", "norm", "epsilon")} == {"7.5"}
    assert read_metrics(tmp_path / "metrics.csv")["metrics/norm"] == [(5, 7.5)]


def test_what_a_client_said_that_was_put_out_does_not_count(tmp_path: Path) -> None:
    """It was put out since it said that it weighs far more than the others: no mean is to go by that."""
    history = History(tmp_path)
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


def test_what_is_sent_for_a_round_that_is_over_does_not_tell_it_twice(tmp_path: Path) -> None:
    """The order was given before the round was committed, and is counted after that."""
    history = History(tmp_path)
    history.at(0), history.at(1)
    history.write(1)
    history.sent(0, "a", 10)
    history.took(0, "evaluate", 1.0)
    history.sent(1, "a", 20)
    history.write(2)
    assert [(told["round"], told["bytes_down"]) for told in read_history(tmp_path)] == [(0, {}), (1, {"a": 20})]


class Disk:
    """What of a run's history is on the disk: a power failure takes the rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content, write = b"", GrowingFile.write

        def noted(file: GrowingFile, settled: str, later: str, *, durable: bool = False) -> None:
            write(file, settled, later, durable=durable)
            if durable:
                self.content = file.path.read_bytes()

        monkeypatch.setattr(GrowingFile, "write", noted)
        monkeypatch.setattr(Journal, "is_long", property(lambda one: len(one) > 15 and not one._state))  # once, early


@pytest.mark.parametrize("lost", ["nothing", "the last line", "what was not on the disk"])
def test_a_run_that_goes_on_tells_all_of_its_rounds(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = served(tmp_path / "whole", 10, evaluate_every=1)
    folder = tmp_path / "run"
    disk = Disk(monkeypatch)
    served(folder, 10, at(9), evaluate_every=1)
    file = folder / NAME
    if lost == "the last line":
        file.write_bytes(file.read_bytes()[:-20])
    elif lost == "what was not on the disk":
        assert b'"round": 0' in disk.content
        assert disk.content.count(b"\n") < file.read_bytes().count(b"\n")
        file.write_bytes(disk.content[:-30] + bytes(200) + b"}\n")
        (folder / "metrics.csv").unlink()
    went_on = served(folder, 10, evaluate_every=1)
    seen_here = {"bytes_down": 0} | ({"noise_scale": None} if lost == "what was not on the disk" else {})
    assert [of_a_round(asdict(here)) | seen_here for here in went_on.history] == [
        of_a_round(asdict(here)) | seen_here for here in whole.history
    ]
    assert [of_a_round(told) for told in read_history(folder)] == [of_a_round(asdict(h)) for h in went_on.history]
    with (folder / "metrics.csv").open(newline="") as rows:
        table = list(csv.DictReader(rows))
    assert [int(row["round"]) for row in table] == list(range(11))
    assert [float(row["loss"]) for row in table] == [here.metrics["loss"] for here in went_on.history]
    if lost != "what was not on the disk":
        assert [here.bytes_down for here in went_on.history[1:4]] == [here.bytes_down for here in whole.history[1:4]]


def test_a_fork_tells_what_was_before_it(tmp_path: Path) -> None:
    whole = served(tmp_path / "whole", 5, keep_rounds=0)
    tools.fork(tmp_path / "whole", tmp_path / "fork", 3)
    fork = served(tmp_path / "fork", 5)
    assert [here.base for here in fork.history] == [here.base for here in whole.history]
    assert [here.samples for here in fork.history] == [here.samples for here in whole.history]
    assert tools.inspect_round(tmp_path / "fork", 5).clients == tools.inspect_round(tmp_path / "whole", 5).clients
