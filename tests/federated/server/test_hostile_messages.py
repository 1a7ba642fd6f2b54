"""Every field of every message with values that nobody means: one sentence for the node, and a run that goes on as its journal says."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.federated.fakes import Quadratic, ScriptedNode

from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.run_database import read_journal
from arclight.federated.coordination.settings import Waiting
from arclight.federated.errors import FederatedError, ProtocolError
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import (
    ActiveWork,
    Evaluated,
    Failed,
    Fit,
    Heartbeat,
    HeldRound,
    Join,
    Leave,
    Message,
    SecureSumRequest,
    Update,
    Welcome,
    WorkRequest,
    read,
)
from arclight.federated.server.server import Server
from arclight.federated.server.server_run import ServerRun
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 7, 1 << 31, 1 << 53, (1 << 62), -(1 << 62), 1 << 63, 10**400, -1.0, 5e-324, 1e308, -1e308,
    float("nan"), float("inf"), "", "0", "x" * 300, "../../x", "a\nb", "\u202e", "\ud800", "\x00", [], {}, [[]], ["0"], {"a": 1}, {"\n": -1},
)  # fmt: skip
KINDS: tuple[type[Message], ...] = (Join, WorkRequest, Heartbeat, Update, Evaluated, Failed, Leave, SecureSumRequest)


@dataclass
class Target:
    """A run, and a node of it that says what a test has changed in what an honest one says."""

    run: ServerRun
    script: ScriptedNode = field(init=False)
    orders: list[Fit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script = ScriptedNode(InProcessLink(self.run.service), {"0": Quadratic(1.0), "1": Quadratic(-3.0)})

    def honest(self, kind: type[Message]) -> Message:
        """A message of that kind that the server would take now, or a little earlier."""
        script = self.script
        if script.session not in self.run.coordinator.cluster.sessions:
            assert isinstance(script.join(), Welcome)
        at = self.order()
        here = {"node": script.name, "session": script.session}
        of = {**here, "client": at.client, "round": at.round}
        if kind is Join:
            held = (HeldRound(client="0", round=at.round, finished=False),)
            return Join(
                node=script.name, clients=script.clients, held=held, process=script.process, steps_per_second=1.0
            )
        if kind is Update:
            return script.trained(at)
        made: dict[type[Message], dict[str, Any]] = {
            WorkRequest: {
                **here,
                "hold_s": 0.0,
                "active_work": (ActiveWork(client="0", round=at.round, steps=1, loss=1.0),),
            },
            Heartbeat: {**here, "active_work": (ActiveWork(client="0", round=at.round, steps=1, loss=1.0),)},
            Evaluated: {**of, "samples": 3, "metrics": {"val/loss": 1.0}},
            Failed: {**of, "error": "out of memory", "retryable": True},
            Leave: {**here, "reason": "maintenance"},
            SecureSumRequest: {
                **of,
                "attempt": 0,
                "keys": {"mask": "00" * 32, "cipher": "00" * 32, "seal": "00" * 32},
                "encrypted_shares": {"1": "00"},
                "seed_shares": {"1": "0"},
                "key_shares": {"1": "0"},
            },
        }
        return kind(**made[kind])

    def order(self) -> Fit:
        """The newest order, of a round that is not closed: the weights that it begins from are there."""
        for _ in range(100):
            if isinstance(order := self.script.ask(0.0), Fit):
                self.orders.append(order)
            open = self.run.coordinator.state.open.get(self.orders[-1].round) if self.orders else None
            if open is not None and open.closed is None:
                return self.orders[-1]
            self.run.runtime.until(lambda: self.run.coordinator.cluster.aggregating is None, 10.0)
            if self.script.session not in self.run.coordinator.cluster.sessions:
                assert isinstance(self.script.join(), Welcome)
        raise AssertionError(self.run.coordinator.status(0.0))

    def say(self, table: dict[str, Any]) -> None:
        """As the network's edge does it; what is refused is refused in words."""
        with suppress(FederatedError):  # and nothing else
            assert isinstance(self.run.service.answer(read(json.dumps(table))), Message)
        assert self.run.runtime.error is None, table


@contextmanager
def target(folder: Path, **given: Any) -> Iterator[Target]:
    """The run; when the block ends, its journal says what the server had in memory, and an honest node is heard."""
    waiting = Waiting(
        heartbeat_interval_s=0.2, quorum=0.5, retries=10**9, attempts=10**9, join_timeout_s=1e6, on_failed_round="skip"
    )
    federation = Federation(
        **{"clients": 2, "rounds": 10**6, "local_steps": 1, "evaluate_every": 0, "waiting": waiting, **given}
    )
    with Server(federation, {"w": torch.linspace(-1, 1, 4)}, folder=folder).opened() as run:
        aim = Target(run)
        yield aim
        if run.coordinator.state.ended is None:
            assert isinstance(aim.script.join(), Welcome)
            assert isinstance(aim.script.ask(0.0), Message)
    shadow = Coordinator(federation, federation.clients, 0, run.name)
    shadow.replay(read_journal(folder))
    assert repr(shadow.state) == repr(run.coordinator.state)


def places(table: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all values in a nested table."""
    inner = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(message: Message, at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(message.to_json())
    within: Any = table
    for key in at[:-1]:
        within = within[key]
    within[at[-1]] = value
    return table


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_each_field_of_each_message_takes_any_value(tmp_path: Path, kind: type[Message], every: int) -> None:
    """Of the values that nobody means, each field takes all, or every so many, and the next field others."""
    secure = {"secure": SecureSum(threshold=0.51, step_timeout_s=0.5)} if kind is SecureSumRequest else {}
    waiting = (
        {"waiting": Waiting(heartbeat_interval_s=0.2, quorum=0.6, join_timeout_s=1e6, on_failed_round="skip")}
        if secure
        else {}
    )
    said = 0
    with target(tmp_path / "run", **secure, **waiting) as aim:
        there = list(places(json.loads(aim.honest(kind).to_json())))
        assert len(there) > 4
        for number, at in enumerate(there):
            for value in HOSTILE[number % every :: every]:
                aim.say(changed(aim.honest(kind), at, value))
                said += 1
    assert said >= len(there) * (len(HOSTILE) // every)


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_several_hostile_fields_together(examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        with target(tmp_path_factory.mktemp("hostile") / "run") as aim:
            for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)):
                table = json.loads(aim.honest(kind).to_json())
                for _ in range(data.draw(st.integers(1, 3))):
                    at = data.draw(st.sampled_from(list(places(table))))
                    within: Any = table
                    for key in at[:-1]:
                        within = within[key]
                    within[at[-1]] = copy.deepcopy(data.draw(st.sampled_from(HOSTILE)))  # the next draw may change it
                aim.say(table)

    check()


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e308, float("nan")])
def test_a_speed_that_none_is_is_refused_in_one_sentence(tmp_path: Path, speed: float) -> None:
    with target(tmp_path / "run") as aim:
        with pytest.raises(ProtocolError, match=r"node 'evil' says steps_per_second = .* positive and at most"):
            aim.run.service.answer(Join(node="evil", clients=(), steps_per_second=speed))
        assert isinstance(aim.honest(WorkRequest), WorkRequest)


def test_an_update_whose_manifest_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    with target(tmp_path / "run") as aim:
        update = aim.honest(Update)
        assert isinstance(update, Update)
        with pytest.raises(ProtocolError, match="manifest is of version 7, this side speaks 1"):
            aim.run.service.answer(replace(update, manifest=replace(update.manifest, version=7)))
