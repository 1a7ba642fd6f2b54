"""What a killed process leaves in a client's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.federated.clients.sites import fit_order

from arclight.fabric import replacing
from arclight.federated.clients import state
from arclight.federated.clients.state import Begun, ClientFolder
from arclight.federated.protocol import Fit, Manifest, Update


class Killed(BaseException):
    pass


def killed(*_: object, **__: object) -> None:
    raise Killed


def finish(folder: ClientFolder, order: Fit) -> None:
    with folder.finishing(order, durable=False) as staging:
        update = Update(
            node="", session="", client="a", round=order.round, manifest=Manifest(kind="update", tensors={}, blobs={}),
            samples=1, tokens=0, steps=4, seconds=0.0,
        )  # fmt: skip
        (staging / "update.json").write_text(update.to_json())


def rounds(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "finished").iterdir())


def test_a_round_that_was_not_noted_is_removed_and_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, order = ClientFolder(tmp_path, "a", "run"), fit_order(1, 4, 0)
    folder.begin(order)
    with monkeypatch.context() as patched:
        patched.setattr(state, "replace_text", killed)
        with pytest.raises(Killed):
            finish(folder, order)
    assert rounds(tmp_path) == ["000001"]
    again = ClientFolder(tmp_path, "a", "run")
    assert (rounds(tmp_path), again.account.begun, again.finished(order)) == ([], Begun.of(order), None)


def test_a_round_that_was_forgotten_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, first, second = ClientFolder(tmp_path, "a", "run"), fit_order(1, 4, 0), fit_order(2, 4, 4)
    finish(folder, first)
    finish(folder, second)
    with monkeypatch.context() as patched:
        patched.setattr(replacing, "retire", killed)
        with pytest.raises(Killed):
            folder.drop(Begun.of(first))
    assert rounds(tmp_path) == ["000001", "000002"]
    ClientFolder(tmp_path, "a", "run", writes=False)
    assert rounds(tmp_path) == ["000001", "000002"], "who only looks removes nothing"
    assert [one.round for one in ClientFolder(tmp_path, "a", "run").account.finished] == [2]
    assert rounds(tmp_path) == ["000002"]
