"""Secure sums of sites in processes of their own, one of which is killed where it hurts."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.federated.fakes import Quadratic
from tests.federated.privacy.test_secure_runs import START, Site, settings, trained

from arclight.federated.clients import Outcome
from arclight.federated.coordination.settings import Waiting
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import Message, SecureSumRequest, Update
from arclight.federated.server.server import Server
from arclight.federated.transports.http_server import HttpServer

SCRIPT = Path(__file__).parent / "secure_site.py"
GOALS = {"0": 1.0, "1": -3.0, "2": 0.5}
SOME: dict[str, Any] = {
    "waiting": Waiting(quorum=0.6, grace_s=60.0, lease_s=5.0, nodes=3),
    "secure": SecureSum(threshold=0.6, step_timeout_s=20.0),
}


class Breaks(Quadratic):
    """Breaks down after ``rounds`` rounds."""

    rounds = 0

    def fit(self, order: Any, weights: Mapping[str, torch.Tensor], progress: Any) -> Outcome:
        if order.round > self.rounds:
            raise RuntimeError("this site has lost power")
        return super().fit(order, weights, progress)


class AfterOne(Breaks):
    rounds = 1


class AfterTwo(Breaks):
    rounds = 2


class Killing:
    """A server that kills client 2's process in round 2: once it has shared its secrets, or once its masked values are here."""

    def __init__(self, service: Any, when: str) -> None:
        self._service, self._when, self.blobs, self.run = service, when, service.blobs, service.run
        self.reserve_upload, self.largest_message = service.reserve_upload, service.largest_message
        self.victim: warm.Program | None = None

    def answer(self, message: Message) -> Message:
        answer: Message = self._service.answer(message)
        masking = isinstance(message, SecureSumRequest) and message.encrypted_shares is not None
        here = isinstance(message, Update)
        if (masking if self._when == "masking" else here) and (message.client, message.round) == ("2", 2):  # type: ignore[attr-defined]
            assert self.victim is not None
            self.victim.kill()
            self.victim.wait(60)
        return answer


def site(address: str, folder: Path, name: str) -> warm.Program:
    folder.mkdir()
    return warm.Program(SCRIPT, address, folder, name, str(GOALS[name]), merged=True)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["masking", "opening"])
def test_a_site_that_is_killed_leaves_the_sum_of_the_others(tmp_path: Path, when: str) -> None:
    kind = AfterOne if when == "masking" else AfterTwo
    sites = [Site("0", GOALS["0"]), Site("1", GOALS["1"]), Site("2", GOALS["2"], kind)]
    quick = {**SOME, "waiting": Waiting(quorum=0.6, grace_s=60.0)}
    survivors = Server(settings(**quick), START, folder=tmp_path / "survivors")
    trained(survivors, [sites])
    plain = Server(settings(**{**quick, "secure": None}), START, folder=tmp_path / "plain")
    trained(plain, [sites])
    server = Server(settings(**SOME), START, folder=tmp_path / "run")
    with ExitStack() as stack:
        run = stack.enter_context(server.opened())
        killing = Killing(run.service, when)
        http = stack.enter_context(HttpServer(killing))
        processes = {name: stack.enter_context(site(http.address, tmp_path / name, name)) for name in GOALS}
        killing.victim = processes["2"]
        assert run.runtime.wait(150), run.coordinator.status(run.runtime.now())
        for name in ("0", "1"):
            assert processes[name].wait(60) == 0, processes[name].said()[0]
    assert processes["2"].returncode == -signal.SIGKILL
    contributors = [here.contributors for here in server.history]
    both = ["0", "1"]
    assert contributors == [[], ["0", "1", "2"], both if when == "masking" else ["0", "1", "2"], both]
    assert not server.history[2].discarded
    assert [here.base for here in server.history] == [here.base for here in survivors.history]
    torch.testing.assert_close(server.weights()["w"], plain.weights()["w"], rtol=1e-6, atol=1e-7)
