"""Worker processes: they train as a process of one's own would, and what is killed goes on with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import warm
from tests.federated.clients.sites import Net, build, steps_in, weights_of
from tests.federated.fakes import AveragingServer, join_node, start_node
from tests.waiting import wait_until

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients import worker_processes
from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.clients.worker_processes import ProcessExecutor
from arclight.federated.errors import FederatedError
from arclight.federated.masks.transfer_mask import TransferMask
from arclight.federated.protocol import Failed, Fit, Leave, Update
from arclight.federated.transports.link import InProcessLink

CPU = {"accelerator": "cpu"}


def beginning() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return weights_of(Net())


def client_of(name: str, folder: Path, pause: float = 0.0, **trainer: Any) -> Client:
    made = partial(build, str(folder / f"{name}.steps"), pause, seed=len(name))
    return Client(name, build=made, trainer={**CPU, **trainer}, seed=5)


@pytest.fixture(autouse=True)
def quick_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers come from a fork server that has imported torch; of tests that are marked they are spawned, as sites have them."""
    if request.node.get_closest_marker("spawned") is None:
        context = SimpleNamespace(get_context=lambda method: warm.context())
        monkeypatch.setattr(worker_processes, "multiprocessing", context)


@pytest.fixture
def executors() -> Iterator[list[ProcessExecutor]]:
    made: list[ProcessExecutor] = []
    yield made
    for executor in made:
        executor.close()


def reached(file: Path, step: int) -> bool:
    steps = steps_in(file)
    return bool(steps) and steps[-1][1] >= step


def here(folder: Path, names: tuple[str, ...], **order: Any) -> AveragingServer:
    """The same run in this process, undisturbed."""
    server = AveragingServer(folder / "here", beginning(), names, **order)
    join_node(
        *start_node(
            Node(
                InProcessLink(server), [client_of(name, folder / "unseen") for name in names], folder / "here-node", "n"
            )
        )
    )
    return server


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def test_workers_train_alike_and_a_killed_one_goes_on(tmp_path: Path, executors: list[ProcessExecutor]) -> None:
    """Three clients on two workers; one worker is killed in the middle of a round."""
    names, order = ("a", "bb", "ccc"), {"rounds": 2, "steps": 12, "form": "delta", "checkpoint_every_steps": 4}
    (tmp_path / "unseen").mkdir()
    wanted = here(tmp_path, names, **order)
    server = AveragingServer(tmp_path / "server", beginning(), names, evaluate=True, **order)
    executors.append(ProcessExecutor([client_of(name, tmp_path, pause=0.05) for name in names], count=2))
    running = start_node(Node(InProcessLink(server), executors[0], tmp_path / "node", "n"))
    steps = partial(steps_in, tmp_path / "a.steps")
    wait_until(partial(reached, tmp_path / "a.steps", 18), "client a is in the middle of its second round")
    victim = steps()[-1][0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: all(victim not in pids for pids in executors[0].pids), "the death is noticed")
    join_node(*running)
    assert server.round == 3
    assert_equal(server.weights, wanted.weights)
    done = [step for _, step in steps()]
    again = [step for number, step in enumerate(done) if step in done[:number]]
    assert again, "some steps were lost with the worker"
    assert len(again) <= 4
    assert victim not in {pid for pid, _ in steps()[-4:]}  # a client may have moved to the other worker before, too
    assert not server.of(Failed)
    assert sorted(server.measured[3]) == list(names)


class Interrupted(ProcessExecutor):
    """Whoever is at the terminal has had enough at the third step."""

    received: list[Any]

    def fit(self, order: Fit, weights: FolderStore, progress: Callable[[int, float | None], None]) -> Update:
        def until_then(steps: int, loss: float | None) -> None:
            if steps >= 3:
                raise KeyboardInterrupt
            progress(steps, loss)

        return super().fit(order, weights, until_then)

    def close(self) -> None:
        assert not self.received or isinstance(self.received[-1], Leave), (
            "the server hears of it before workers have ended"
        )
        super().close()


def test_an_interrupted_node_leaves_and_breaks_off_what_is_trained(
    tmp_path: Path, executors: list[ProcessExecutor]
) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=200)
    executor = Interrupted([client_of("a", tmp_path, pause=0.3)])
    executor.received = server.received
    executors.append(executor)
    with pytest.raises(KeyboardInterrupt):
        Node(InProcessLink(server), executor, tmp_path / "node", "n").run()
    assert len(steps_in(tmp_path / "a.steps")) <= 6


def test_a_failing_client_is_reported_with_its_own_error(tmp_path: Path, executors: list[ProcessExecutor]) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a", "bb"), rounds=1, steps=4)
    executors.append(ProcessExecutor([client_of("a", tmp_path / "missing"), client_of("bb", tmp_path)]))
    join_node(*start_node(Node(InProcessLink(server), executors[0], tmp_path / "node", "n")))
    (failed,) = server.of(Failed)
    assert "FileNotFoundError: [Errno 2] No such file or directory" in failed.error
    assert not failed.retryable
    assert [update.client for update in server.of(Update)] == ["bb"]


def test_cancelled_work_stops_in_the_worker_process(tmp_path: Path, executors: list[ProcessExecutor]) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=10_000)
    executors.append(ProcessExecutor([client_of("a", tmp_path, pause=0.02)]))
    node = Node(InProcessLink(server), executors[0], tmp_path / "node", "n")
    running = start_node(node)
    wait_until(lambda: len(steps_in(tmp_path / "a.steps")) > 3, "the client trains")
    (pid,) = executors[0].pids[0]
    node.stop()
    join_node(*running)
    assert not server.of(Failed)
    assert len(steps_in(tmp_path / "a.steps")) < 5_000
    wait_until(lambda: not alive(pid), "the worker has ended with its node")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.spawned
def test_a_site_may_train_with_several_processes(tmp_path: Path, executors: list[ProcessExecutor]) -> None:
    """Two ranks share a client's model (FSDP), and its moments travel; one of them is killed in the second round."""
    keep = TransferMask(moments=("exp_avg", "exp_avg_sq")).to_table()
    order: dict[str, Any] = {
        "rounds": 2,
        "steps": 6,
        "form": "delta",
        "checkpoint_every_steps": 2,
        "local_policy": keep,
    }
    ends = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        server = AveragingServer(folder / "server", beginning(), ("a",), evaluate=True, **order)
        executors.append(ProcessExecutor([client_of("a", folder, pause=0.1, strategy="fsdp", devices=2)], ranks=2))
        running = start_node(Node(InProcessLink(server), executors[-1], folder / "node", "n"))
        if disturbed:
            wait_until(partial(reached, folder / "a.steps", 9), "the client is in its second round")
            os.kill(executors[-1].pids[0][1], signal.SIGKILL)
        join_node(*running)
        assert server.round == 3
        assert not server.of(Failed)
        ends.append(server)
    assert_equal(ends[0].weights, ends[1].weights)
    # each process reads 18 of the 36 rows an epoch, in batches of 4, 4, 4, 4 and 2
    assert [update.samples for update in ends[0].of(Update)] == [44, 44]
    assert [update.samples for update in ends[1].of(Update)] == [44, 44]
    assert {key.partition("/")[0] for key in ends[0].weights} == {"model", "exp_avg", "exp_avg_sq"}
    assert ends[0].weights["exp_avg_sq/net.0.weight"].shape == (16, 8)
    losses = [ends[0].measured[number]["a"].metrics["val/loss"] for number in (1, 3)]
    assert losses[1] < losses[0]


def test_invalid_executors_are_refused() -> None:
    with pytest.raises(FederatedError, match="given a module of this process"):
        ProcessExecutor([Client("a", Net(), None)])
    with pytest.raises(FederatedError, match="at least one worker"):
        ProcessExecutor([], count=0)


@pytest.mark.parametrize("start", ["forked", pytest.param("spawned", marks=[pytest.mark.slow, pytest.mark.spawned])])
def test_workers_make_clients_by_their_names(tmp_path: Path, executors: list[ProcessExecutor], start: str) -> None:
    names, order = ("a", "bb"), {"rounds": 1, "steps": 4, "form": "delta"}
    (tmp_path / "unseen").mkdir()
    wanted = here(tmp_path, names, **order)
    server = AveragingServer(tmp_path / "server", beginning(), names, **order)
    executors.append(ProcessExecutor(partial(client_of, folder=tmp_path), names=names))
    assert ProcessExecutor(partial(client_of, folder=tmp_path)).clients == ()
    join_node(*start_node(Node(InProcessLink(server), executors[0], tmp_path / "node", "n")))
    assert_equal(server.weights, wanted.weights)
    assert {pid for name in names for pid, _ in steps_in(tmp_path / f"{name}.steps")} - {os.getpid()}
