"""Files that a killed process leaves in a client's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.federated.clients.sites import fit_order

from arclight.fabric import atomic_replace
from arclight.federated.clients.client_store import ClientStore, FinishedUpdates, Residuals
from arclight.federated.protocol import Fit, HeldRound, Manifest, Update


class Killed(BaseException):
    pass


def killed_at(number: int, function: Callable[..., object]) -> Callable[..., object]:
    """Dies when it is called for the n-th time."""
    calls = [0]

    def instead(*arguments: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == number:
            raise Killed
        return function(*arguments, **options)

    return instead


def finish(finished: FinishedUpdates, order: Fit, left: float | None = None) -> None:
    with finished.making(order, durable=False) as staging:
        manifest = Manifest(kind="update", tensors={}, blobs={}, base=order.base)
        update = Update(
            node="", session="", client=order.client, round=order.round, manifest=manifest, samples=1, tokens=0, steps=order.steps,
            seconds=1.0, fragment=order.fragment,
        )  # fmt: skip
        if left is not None:
            Residuals.save(staging / "residuals" / str(order.residual_slot), {"model/w": torch.tensor([left])})
        (staging / "update.json").write_text(update.to_json())


def rounds(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "finished").iterdir())


def test_started_rounds_are_offered_until_they_are_finished(tmp_path: Path) -> None:
    folder = ClientStore(tmp_path, "a", "run")
    for round in (1, 2):
        folder.start(round)
    stored = json.loads((tmp_path / "client.json").read_text())
    assert stored.pop("about")
    assert stored == {"client": "a", "run": "run", "begun": [1, 2], "version": 2}  # as other releases read it
    finish(FinishedUpdates(tmp_path), fit_order(1, 4, 0))  # as another process does, which writes nothing else
    again = ClientStore(tmp_path, "a", "run")
    held = [HeldRound(client="a", round=1, finished=True), HeldRound(client="a", round=2, finished=False)]
    assert folder.held() == again.held() == held
    again.end(2)
    again.start(3)
    assert [one.round for one in ClientStore(tmp_path, "a", "run").held()] == [1, 3]


def test_a_round_is_there_or_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, order = FinishedUpdates(tmp_path), fit_order(1, 4, 0)
    with monkeypatch.context() as patched:
        patched.setattr(atomic_replace, "replace_folder", killed_at(1, atomic_replace.replace_folder))
        with pytest.raises(Killed):
            finish(finished, order)
    assert (finished.rounds(), finished.of(order)) == ([], None)
    finish(finished, order)
    update = finished.of(order)
    assert update is not None
    assert (update.round, update.steps) == (1, 4)
    assert finished.of(fit_order(1, 4, 0, base="f" * 64)) is None, "from other weights"


def test_a_round_that_was_forgotten_half_way_is_forgotten_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = ClientStore(tmp_path, "a", "run").finished
    for round in (1, 2):
        finish(finished, fit_order(round, 4, 4 * round - 4))
    with monkeypatch.context() as patched:
        patched.setattr(atomic_replace, "discard", killed_at(1, atomic_replace.discard))
        with pytest.raises(Killed):
            finished.drop(1)
    assert finished.rounds() == [2]
    finished.accept(2, "s")
    finished.commit(1, "s")
    assert finished.rounds() == [2], "the server has it, and may ask for it again"
    finished.commit(2, "s")
    ClientStore(tmp_path, "a", "run")
    assert not [name for name in rounds(tmp_path) if not name.startswith(".")]


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("step", ["rename", "sync_folder", "retire", "write_text"])
def test_residuals_are_those_of_the_newest_taken_update_wherever_a_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, at: int
) -> None:
    """Two slots; the update of slot 0 comes for the second time."""
    folder = ClientStore(tmp_path, "a", "run")
    for number, slot in enumerate((0, 1, 0), 1):
        finish(folder.finished, fit_order(number, 4, 0, residual_slot=slot), left=float(number))
    for number in (1, 2):
        folder.finished.accept(number, "s")
    assert not folder.finished.is_accepted(3)
    owner = Path if step in ("rename", "write_text") else atomic_replace
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, killed_at(at, getattr(owner, step)))
        try:
            folder.finished.accept(3, "s")
        except Killed:
            pass
    again = ClientStore(tmp_path, "a", "run").finished
    if not again.is_accepted(3):  # it is sent again, and the server says again that it has it
        again.accept(3, "s")
    assert [again.residuals(slot).load(4)["model/w"].item() for slot in (0, 1)] == [3.0, 2.0]
    again.accept(3, "s")
    assert again.residuals(0).load(4)["model/w"].item() == 3.0


def test_an_update_that_does_not_count_leaves_no_trace_in_the_residuals(tmp_path: Path) -> None:
    finished = ClientStore(tmp_path, "a", "run").finished
    for number in (1, 2):
        finish(finished, fit_order(number, 4, 0), left=float(number))
        finished.accept(number, "s")
        assert finished.commit(number - 1, "s") == []
    assert finished.commit(2, "another") == [2], "the server may have lost it since"
    assert finished.rounds() == [2]
    assert finished.residuals(0).load(3)["model/w"].item() == 2.0
    assert finished.residuals(0).load(2)["model/w"].item() == 1.0, "what it adds itself, were it made again"
    finished.drop(2)
    assert finished.residuals(0).load(3)["model/w"].item() == 1.0
    finish(finished, fit_order(2, 4, 0), left=5.0)
    finished.accept(2, "another")
    assert finished.commit(2, "another") == []
    assert finished.residuals(0).load(3)["model/w"].item() == 5.0
    assert [path.name for path in finished.residuals(0).folder.iterdir()] == ["2"], "what was left before is said"


def test_residuals_that_two_threads_settle_are_dropped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a heartbeat and that to an update may delete older residuals of a slot at the same moment."""
    slot = Residuals(tmp_path)
    for round in (1, 2, 3):
        (tmp_path / str(round)).mkdir()
    listed = slot._rounds()
    slot.delete_older(3)
    monkeypatch.setattr(slot, "_rounds", lambda: listed)  # what the other thread had listed before
    slot.delete_older(3)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
