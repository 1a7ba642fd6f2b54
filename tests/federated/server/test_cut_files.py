"""Every file of a run, cut anywhere: the next start goes on, or says in one sentence why it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.codecs.settings import Int8
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Fit
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedMomentum
from arclight.federated.transports.link import InProcessLink

SETTINGS = Federation(
    clients=2, rounds=3, local_steps=1, strategy=FedMomentum(), down=Int8(), keep_rounds=2, waiting=CALM
)  # fmt: skip
START = {"w": torch.linspace(-1, 1, 40).reshape(4, 10)}


def learners() -> dict[str, Quadratic]:
    return {"0": Quadratic(1.0), "1": Quadratic(-3.0)}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its third round, with one update of it here."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    with Server(SETTINGS, START, folder=folder).opened() as run:
        script = ScriptedNode(InProcessLink(run.service), learners())
        order = script.work(until=lambda message: isinstance(message, Fit) and message.round == 3)
        assert isinstance(order, Fit)
        assert script.send(script.trained(order)).accepted
        shutil.copytree(folder, folder.with_name("killed"), ignore=shutil.ignore_patterns("*-shm"))
    shutil.copy(folder / "metrics.csv", folder.with_name("killed"))
    return folder.with_name("killed")


def damaged(data: bytes) -> Iterator[bytes | None]:
    """Yield damaged versions of a file: missing, cut, zeroed from a place on, repeated."""
    lines = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")][:-1]
    if data.startswith(b"SQLite format 3"):
        lines = list(range(4096, len(data), 4096))
    places = sorted({0, 1, len(data) // 2, len(data) - 1, *lines[:3], *lines[-3:]} - {len(data)})
    yield None
    for place in places:
        yield data[:place]
        yield data[:place] + bytes(len(data) - place)
    yield data + data[len(data) // 2 :]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_each_file_of_a_run_may_be_cut_at_any_boundary(stopped: Path, every: int, tmp_path: Path) -> None:
    files = sorted(path.relative_to(stopped) for path in stopped.rglob("*") if path.is_file())
    assert {"run.db", "run.db-wal", "identity", "metrics.csv"} <= {str(name) for name in files}
    tried, went_on, wrong = 0, 0, list[str]()
    for number, name in enumerate(files):
        whole = (stopped / name).read_bytes()
        for left in list(damaged(whole))[number % every :: every]:
            folder = tmp_path / str(tried) / "run"
            shutil.copytree(stopped, folder)  # and no links: what is cut here stays whole elsewhere
            (folder / name).unlink()
            if left is not None:
                (folder / name).write_bytes(left)
            about = f"{name}: {'gone' if left is None else f'{len(left)} of {len(whole)} bytes'}"
            tried += 1
            try:
                went_on += goes_on(folder)
            except FederatedError as error:
                if "\n" in str(error) or not str(error):
                    wrong.append(f"{about}: {error}")
            except Exception as error:
                wrong.append(f"{about}: {type(error).__name__}: {error}")
            shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
    assert went_on > len(files) / every
    assert tried > 6 * len(files) / every


def goes_on(folder: Path) -> bool:
    server = Server(SETTINGS, folder=folder)
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), learners()).work()
        assert run.runtime.wait(60)
        if run.runtime.ended is not None and run.runtime.ended.failed:
            raise FederatedError(run.runtime.ended.why)
    assert [here.round for here in server.history][-1] == 3
    return True
