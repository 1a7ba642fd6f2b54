"""Under a real Flower SuperLink with real SuperNodes: the same run to the bit, whatever of Flower dies on the way."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tests.federated.transports import quadratics
from tests.federated.transports.superlink import ABSENT, Deployment, installed, until

from arclight.cli.federate.flower import write_app
from arclight.federated.clients.node import Node
from arclight.federated.errors import FederatedError
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.server import Server
from arclight.federated.transports import flower
from arclight.federated.transports.link import InProcessLink
from arclight.federated.transports.server_process import ServerProcess

needs_flower = pytest.mark.skipif(not installed(), reason=ABSENT)
BUILDING = "from tests.federated.transports.quadratics import client, server\n"
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "flower_clients"


def in_process(folder: Path, rounds: int = 3) -> Server:
    """The same run with everything in this process."""
    server = quadratics.server(folder, {"rounds": rounds})
    with server.opened() as run:
        clients = [quadratics.client(name, {}) for name in quadratics.TARGETS]
        node = Node(InProcessLink(run.service), clients, folder / "node", "all")
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        assert run.runtime.wait(60), "the run in this process has not ended after 60 s"
        thread.join(30)
        assert not thread.is_alive()
    return server


def result(folder: Path) -> tuple[int, str]:
    """The newest round in a folder and the digest of its weights."""
    rounds = Rounds(folder)
    newest = rounds.newest(verify=True)
    assert newest is not None, f"{folder} has no round"
    return newest, rounds.weights(newest).digest


def app(tmp_path: Path, **config: str | int | float | bool) -> Path:
    said = {"rounds": 3, "pause": 0.0, "nodes": 2, "folder": str(tmp_path / "run"), **config}
    return write_app(tmp_path / "app", "quadratics", BUILDING, config=said)


def finished(flower: Deployment, seconds: float) -> None:
    run = flower.started["run"]
    until(lambda: run.poll() is not None, seconds, f"flwr run; it says {flower.log('run')[-3000:]}")


def steps(flower: Deployment, log: Path) -> str:
    return f"{flower.log('run')[-3000:]}\n{log.read_text() if log.exists() else ''}"


@needs_flower
@pytest.mark.slow
def test_two_supernodes_and_one_process_come_to_the_same_bits(tmp_path: Path) -> None:
    expected = in_process(tmp_path / "here")
    with Deployment(tmp_path / "flower", 2) as flower:
        flower.run(app(tmp_path))
        finished(flower, 400)
        said = steps(flower, tmp_path / "run" / "server.log")
        assert "is over after round 3" in said, said
    assert result(tmp_path / "run") == result(tmp_path / "here")
    assert torch.equal(expected.weights()["b.bias"], Rounds(tmp_path / "run").tensors(3, "model")["b.bias"])


@needs_flower
@pytest.mark.slow
def test_registered_supernodes_over_tls(tmp_path: Path) -> None:
    in_process(tmp_path / "here")
    with Deployment(tmp_path / "flower", 2, secure=True) as flower:
        host = "0.0.0.0"  # off loopback: our own plane must have a certificate and registered keys as well
        flower.run(app(tmp_path, host=host, **{"known-as": "localhost"}))
        finished(flower, 150)
        said = steps(flower, tmp_path / "run" / "server.log")
        assert "is over after round 3" in said, said
        assert "https://localhost:" in said, said
    assert result(tmp_path / "run") == result(tmp_path / "here")


@needs_flower
@pytest.mark.slow
def test_the_run_outlives_the_superlink(tmp_path: Path) -> None:
    """The SuperLink is killed: Flower ends its ServerApp, and server and nodes finish the run without it."""
    in_process(tmp_path / "here", rounds=40)
    run = tmp_path / "run"
    with Deployment(tmp_path / "flower", 2) as flower:
        flower.run(app(tmp_path, rounds=40, pause=0.5))
        until(lambda: newest(run) >= 1, 90, f"the first round: {flower.log('run')}")
        flower.kill("superlink")
        assert newest(run) < 40
        until(lambda: newest(run) >= 40, 180, f"the other rounds: {(run / 'server.log').read_text()}")
        assert "the run continues" in (run / "server.log").read_text()
        served = list(flower.processes("arclight.federated.transports.server_process"))
        psutil.wait_procs(served, timeout=60)
        assert not [p for p in served if p.is_running()], "the server has not ended after its run"
    assert result(run) == result(tmp_path / "here")


@needs_flower
@pytest.mark.slow
def test_a_killed_client_app_gets_another_session(tmp_path: Path) -> None:
    in_process(tmp_path / "here", rounds=4)
    run = tmp_path / "run"
    with Deployment(tmp_path / "flower", 2) as flower:
        flower.run(app(tmp_path, rounds=4, pause=0.5))
        until(lambda: newest(run) >= 1, 90, f"the first round: {flower.log('run')}")
        next(flower.processes("flwr-clientapp")).kill()
        finished(flower, 400)
        assert "it gets another" in flower.log("run"), flower.log("run")
    assert result(run) == result(tmp_path / "here")


@needs_flower
@pytest.mark.slow
def test_stopping_the_run_stops_the_server(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Deployment(tmp_path / "flower", 2) as flower:
        flower.run(app(tmp_path, rounds=1000, pause=0.5))
        until(lambda: newest(run) >= 1, 90, f"the first round: {flower.log('run')}")
        found = re.search(r"run (\d{6,})", flower.log("run"))
        assert found, flower.log("run")
        assert "successfully stopped" in flower.flwr("stop", found[1], "here", wait=60).stdout
        served = "arclight.federated.transports.server_process"
        until(lambda: not list(flower.processes(served)), 90, "the server to stop with the run")
    assert 1 <= newest(run) < 1000


@needs_flower
@pytest.mark.slow
def test_a_client_that_knows_only_flower_takes_part(tmp_path: Path) -> None:
    in_process(tmp_path / "here")
    folder = tmp_path / "app"
    shutil.copytree(EXAMPLE, folder)
    with Deployment(tmp_path / "flower", 2) as flower:
        flower.run(folder, folder=str(tmp_path / "run"), rounds=3)
        finished(flower, 240)
        assert "is over" in flower.log("run"), flower.log("run")
    newest, _ = result(tmp_path / "run")
    ours, theirs = Rounds(tmp_path / "here").tensors(3, "model"), Rounds(tmp_path / "run").tensors(newest, "model")
    assert newest == 3
    for name, tensor in ours.items():
        # bfloat16 is trained in float32 there, and rounded once a round
        torch.testing.assert_close(
            theirs[name], tensor, rtol=2e-2 if tensor.dtype is torch.bfloat16 else 1e-6, atol=1e-6
        )


RECIPE = """
name = "tiny"
[task]
kind = "language"
model = "llama3-debug"
[task.data]
data = "{text}"
sequence_length = 16
batch_size = 2
tokenizer = "bytes"
held_out = 0.0
[federation]
clients = 2
rounds = 2
local_steps = 2
evaluate_every = 0
[federation.waiting]
nodes = {nodes}
lease_s = 120.0
[trainer]
accelerator = "cpu"
"""


@needs_flower
@pytest.mark.slow
def test_a_recipe_gives_the_same_weights_here_and_under_flower(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(8):
        said = f"many sites train model {number}, and only changes of weights travel.\n" * 60
        (tmp_path / "texts" / f"{number}.txt").write_text(said)

    def arclight(*words: str | Path) -> None:
        command = [sys.executable, "-m", "arclight.cli", "federate", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    for nodes in (1, 2):
        (tmp_path / f"{nodes}.toml").write_text(RECIPE.format(text=tmp_path / "texts", nodes=nodes))
    arclight(tmp_path / "1.toml", "--root", tmp_path / "runs")
    arclight("flower", tmp_path / "2.toml", "--out", tmp_path / "app")
    with Deployment(tmp_path / "flower", 2, names=("0", "1")) as flower:
        flower.run(tmp_path / "app", folder=str(tmp_path / "run"))
        finished(flower, 240)
        assert "is over after round 2" in flower.log("run"), steps(flower, tmp_path / "run" / "server.log")
    (here,) = (tmp_path / "runs" / "tiny").iterdir()
    assert result(tmp_path / "run") == result(here)


def newest(run: Path) -> int:
    found = Rounds(run).newest() if (run / "rounds").exists() else None
    return -1 if found is None else found


def test_an_app_is_what_flower_takes(tmp_path: Path) -> None:
    folder = write_app(
        tmp_path / "app", "fed-lm", BUILDING, files={"recipe.toml": "name = 'x'\n"}, config={"rounds": 2}
    )
    assert sorted(p.name for p in (folder / "fed_lm").iterdir()) == [
        "__init__.py", "building.py", "client_app.py", "recipe.toml", "server_app.py",
    ]  # fmt: skip
    for file in folder.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
    with pytest.raises(FileExistsError):
        write_app(folder, "fed-lm", BUILDING)
    with pytest.raises(FederatedError, match="begins with a letter"):
        write_app(tmp_path / "other", "9 lives", BUILDING)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find this folder of tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3]))


def test_a_server_of_its_own_process_is_served_until_it_is_stopped(tmp_path: Path, importable: None) -> None:
    server = ServerProcess("tests.federated.transports.quadratics:server", tmp_path / "run")
    until(lambda: "is served at http" in server.log.read_text(), 60, "the server to answer")
    assert not server.wait(0.1)
    server.stop()
    assert server.wait(60)
    assert result(tmp_path / "run")[0] == 0


def test_sigterm_of_somebody_else_is_not_the_end_of_the_run(tmp_path: Path, importable: None) -> None:
    server = ServerProcess("tests.federated.transports.quadratics:server", tmp_path / "run")
    until(lambda: "is served at http" in server.log.read_text(), 60, "the server to answer")
    os.kill(server.pid, signal.SIGTERM)
    with pytest.raises(FederatedError, match=f"process {server.pid} was stopped by SIGTERM before the run was over"):
        server.wait(60)
    assert (tmp_path / "run" / "metrics.csv").exists()
    assert "Traceback" not in server.log.read_text()
    assert result(tmp_path / "run")[0] == 0


def test_sigterm_in_the_last_writes_of_a_run_lets_them_end(tmp_path: Path, importable: None) -> None:
    done = in_process(tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").unlink()
    server = ServerProcess("tests.federated.transports.quadratics:killed_while_it_writes", tmp_path / "run")
    assert server.wait(60), "the run is over, and so is the process"
    assert "SIGTERM was sent in the last writes" in server.log.read_text()
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + len(done.history)


@pytest.mark.slow
def test_a_server_of_its_own_process_says_what_is_wrong(tmp_path: Path, importable: None) -> None:
    wrong = ServerProcess("tests.federated.transports.quadratics:nothing", tmp_path / "run")
    with pytest.raises(FederatedError, match="builds a server"):
        wrong.wait(60)
    server = ServerProcess("tests.federated.transports.quadratics:server", tmp_path / "other")
    until((tmp_path / "other" / "rounds").exists, 60, "the run to begin")
    until(lambda: "is served at http" in server.log.read_text(), 60, "the server to answer")
    assert not server.wait(0.1)
    os.kill(server.pid, 9)
    with pytest.raises(FederatedError, match="has ended with status -9"):
        server.wait(30)
    again = ServerProcess("tests.federated.transports.quadratics:server", tmp_path / "other")
    until(lambda: again.log.read_text().count("is served at http") == 2, 60, "the server to answer")
    assert not again.wait(0.1)
    again.stop()
    assert again.wait(60)
    assert result(tmp_path / "other")[0] == 0


def test_an_app_of_a_former_version_in_compat_mode_gets_an_explanation() -> None:
    app = SimpleNamespace(main=lambda: lambda function: setattr(app, "serve", function))
    flower_app = SimpleNamespace(ServerApp=lambda: app)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flower, "_flower", lambda module: flower_app)
        flower.server_app("nobody:nothing")
    with pytest.raises(FederatedError, match="examples/flower_clients"):
        app.serve(None, SimpleNamespace(run_config={"mode": "compat"}, run_id=1))


class Grid:
    """Flower's grid as far as sessions use it: what is pushed, and what is answered to it."""

    def __init__(self) -> None:
        self.nodes, self.pushed, self.replies = [7], list[Any](), list[Any]()

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.pushed += messages
        return [f"m{len(self.pushed)}"]

    def pull_messages(self, messages: list[str]) -> list[Any]:
        found = [one for one in self.replies if one.metadata.reply_to_message_id in messages]
        self.replies = []
        return found

    def reply(self, message: str, content: dict[str, Any] | None, reason: str = "") -> None:
        self.replies.append(
            SimpleNamespace(
                metadata=SimpleNamespace(reply_to_message_id=message), content=content,
                has_error=lambda: content is None, error=SimpleNamespace(reason=reason),
            )
        )  # fmt: skip


def message(content: Any, dst_node_id: int, message_type: str, ttl: float) -> Any:
    return SimpleNamespace(content=content, node=dst_node_id, kind=message_type, ttl=ttl)


def test_a_sites_private_key_never_goes_through_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(RecordDict=dict, ConfigRecord=dict, Message=message)
    monkeypatch.setattr(flower, "_flower", lambda module: names)
    place = SimpleNamespace(address="http://127.0.0.1:1", fingerprint=None, nodes=tmp_path / "nodes")
    grid: Any = Grid()
    sessions = flower.Sessions(grid, place, ttl_s=60.0)  # type: ignore[arg-type]
    sessions.poll()
    sessions.poll()
    (asked,) = grid.pushed
    assert (asked.kind, asked.content) == ("query", {"session": {"want": "key"}})
    key = flower._key_in(tmp_path / "site")
    private = (tmp_path / "site" / "node.key").read_text()
    assert flower._key_in(tmp_path / "site").public == key.public
    grid.reply("m1", {"session": {"key": key.public, "clients": "0,1"}})
    sessions.poll()
    assert place.nodes.read_text() == f"flower-7 {key.public} 0,1\n"
    assert (grid.pushed[1].kind, grid.pushed[1].node) == ("train", 7)
    assert grid.pushed[1].content == {
        "session": {"address": "http://127.0.0.1:1", "fingerprint": "", "node": "flower-7"}
    }
    assert private.splitlines()[1] not in repr([one.content for one in grid.pushed])
    grid.reply("m2", None, "it has died")
    sessions.poll()
    assert place.nodes.read_text() == "", "its key joins no more"
    for number, wrong in enumerate(({"session": {"key": "none", "clients": "0"}}, {"session": {"clients": "0"}}), 3):
        grid.reply(f"m{number}", wrong)
        sessions.poll()
        assert place.nodes.read_text() == ""
        assert grid.pushed[-1].kind == "query"
