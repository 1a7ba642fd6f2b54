"""Whole runs with masks: what is on the wire, and what becomes of what nobody sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.clients import Outcome
from arclight.federated.codecs.encoding import decode, encode
from arclight.federated.codecs.settings import BF16, Int8, Raw, to_table
from arclight.federated.errors import FederatedError, SettingsError
from arclight.federated.masks.experts import ExpertParts
from arclight.federated.masks.settings import Experts, Masks
from arclight.federated.masks.transfer_mask import TransferMask
from arclight.federated.protocol import Fit, Update
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedAvg, FedMomentum
from arclight.federated.transports.link import InProcessLink

START = {
    "body.w": torch.linspace(-1, 1, 12).reshape(3, 4),
    "head.w": torch.ones(5),
    "experts.w": torch.linspace(0, 1, 8).reshape(4, 2),
}


class Masked(ScriptedNode):
    """A node that sends what its orders' masks let it send; what was sent is kept for the test."""

    def __init__(self, *given, moments: tuple[str, ...] = (), **more) -> None:
        super().__init__(*given, **more)
        self.moments, self.sent = moments, dict[tuple[str, int], set[str]]()

    def trained(self, order: Fit) -> Update:
        before = self.weights(order.weights)
        names = [key.removeprefix("model/") for key in before if key.startswith("model/")]
        table = {key: value for key, value in order.local_policy.items() if key != "reset_optimizer"}
        transfer_mask = TransferMask.from_table(table, names)
        outcome = self.learners[order.client].fit(order, before, lambda steps, loss: None)
        state = {f"{kind}/{name}": torch.full_like(START[name], 2.0) for kind in self.moments for name in names}
        after, known = ExpertParts({**outcome.tensors, **state}), ExpertParts(before)
        keys = transfer_mask.up([f"{kind}/{name}" for kind in ("model", *self.moments) for name in names], order.round)
        change = {
            key: known[key] - after[key] if key in known and order.form == "delta" else after[key] for key in keys
        }
        self.sent[order.client, order.round] = set(keys)
        return self.packed(order, change, outcome)


def run(folder: Path, learners: dict[str, Quadratic], moments: tuple[str, ...] = (), **given) -> tuple[Server, Masked]:
    federation = Federation(
        **{"clients": len(learners), "rounds": 3, "local_steps": 4, "moments": moments, "waiting": CALM, **given}
    )
    server = Server(federation, START, folder=folder / "run")
    with server.opened() as opened:
        script = Masked(InProcessLink(opened.service), learners, moments=moments)
        script.work()
        assert opened.runtime.wait(60)
    return server, script


def moved(start: torch.Tensor, goal: float, rounds: int) -> torch.Tensor:
    return goal + (1 - 0.1) ** (4 * rounds) * (start - goal)


@pytest.mark.parametrize("form", ["delta", "weights"])
def test_personal_tensors_stay_and_periodic_ones_move_in_their_rounds(tmp_path: Path, form) -> None:
    masks = Masks(personal=("head.",), frozen=("experts.w",), periods={"body.": 2})
    learners = {"0": Quadratic(1.0), "1": Quadratic(3.0)}
    with pytest.raises(FederatedError, match="nothing would travel in round 1"):
        run(tmp_path / "all", learners, send=form, masks=masks)
    masks = dataclasses.replace(masks, frozen=())
    server, script = run(tmp_path, learners, send=form, masks=masks)
    assert all(
        sent == {"model/experts.w", *(["model/body.w"] if number == 2 else [])}
        for (_, number), sent in script.sent.items()
    )
    weights = server.weights()
    assert torch.equal(weights["head.w"], START["head.w"])
    torch.testing.assert_close(weights["body.w"], moved(START["body.w"], 2.0, 1))
    torch.testing.assert_close(weights["experts.w"], moved(START["experts.w"], 2.0, 3))


@pytest.mark.parametrize(
    "key", ["model/head.w", "model/body.w", "exp_avg/experts.w", "model/experts.w[0]", "model/experts.w"]
)
def test_updates_outside_the_masks_are_refused(tmp_path: Path, key: str) -> None:
    federation = Federation(
        clients=1, rounds=1, local_steps=4, masks=Masks(personal=("head.",), periods={"body.": 2}), waiting=CALM
    )
    with Server(federation, START, folder=tmp_path / "run").opened() as opened:
        script = ScriptedNode(InProcessLink(opened.service), {"0": Quadratic(1.0)})
        script.join()
        order = script.ask()
        assert isinstance(order, Fit)
        like = START[key.partition("/")[2].removesuffix("[0]")]
        receipt = script.send(script.packed(order, {key: like}, Outcome(samples=8, steps=4)))
        if key == "model/experts.w":  # which nothing forbids
            assert receipt.accepted
        else:
            assert (receipt.accepted, receipt.reason) == (False, "wrong_names")
            assert key in receipt.message


@pytest.mark.parametrize("strategy", [FedAvg(), FedMomentum()])
@pytest.mark.parametrize("codec", [None, Int8()])
def test_experts_move_by_those_that_have_them_and_others_stay(tmp_path: Path, strategy, codec) -> None:
    """The first client has the experts 0 and 1, the second 1 and 2; nobody has 3."""

    def stepped(start: torch.Tensor, goal: float) -> torch.Tensor:
        return strategy.step(start, start - moved(start, goal, 1), {}, 0)[0]

    experts = Experts(tensors=("experts.w",), per_client=2, overlap=1)
    learners = {"0": Quadratic(1.0, samples=1), "1": Quadratic(5.0, samples=3)}
    given = {} if codec is None else {"down": codec}
    server, script = run(
        tmp_path, learners, ("exp_avg",), rounds=1, strategy=strategy, masks=Masks(experts=experts), **given
    )
    assert {key for key in script.sent["1", 1] if "experts" in key} == {
        f"{kind}/experts.w[{number}]" for kind in ("model", "exp_avg") for number in (1, 2)
    }
    goals = (1.0, (1 * 1.0 + 3 * 5.0) / 4, 5.0)
    weights, start = server.weights(), START["experts.w"]
    for number, goal in enumerate(goals):
        torch.testing.assert_close(weights["experts.w"][number], stepped(start[number], goal), rtol=1e-5, atol=1e-5)
    assert torch.equal(weights["experts.w"][3], start[3])
    torch.testing.assert_close(weights["body.w"], stepped(START["body.w"], 4.0), rtol=1e-5, atol=1e-5)


def test_experts_steps_and_states_are_their_own(tmp_path: Path) -> None:
    """With momentum over rounds in which an expert is not drawn: as if each were a model of its own."""
    experts = Experts(tensors=("experts.w",), per_client=2, assign="random")
    learners = {"0": Quadratic(1.0), "1": Quadratic(3.0)}
    server, script = run(tmp_path, learners, rounds=5, strategy=FedMomentum(), masks=Masks(experts=experts))
    drawn = {
        number: [key for client in "01" for key in script.sent[client, number] if "experts" in key]
        for number in range(1, 6)
    }
    for expert in range(4):
        weight, state, count = START["experts.w"][expert], {}, 0
        for number in range(1, 6):
            holders = [c for c in "01" if f"model/experts.w[{expert}]" in script.sent[c, number]]
            if holders:
                goal = sum({"0": 1.0, "1": 3.0}[c] for c in holders) / len(holders)
                weight, state = FedMomentum().step(weight, weight - moved(weight, goal, 1), state, count)
                count += 1
        torch.testing.assert_close(server.weights()["experts.w"][expert], weight, rtol=1e-5, atol=1e-5)
    assert len({tuple(sorted(keys)) for keys in drawn.values()}) > 1


def test_a_federation_whose_masks_do_not_fit_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"'hed\.', which matches no parameter; did you mean head\.\?"):
        run(tmp_path, {"0": Quadratic(1.0)}, masks=Masks(personal=("hed.",)))


def test_a_fleet_may_mix_codecs(tmp_path: Path) -> None:
    """One client writes its changes raw, one in bfloat16, one in eight bits: what is averaged is what each of them said."""

    class Mixed(Masked):
        def packed(self, order: Fit, change, outcome: Outcome) -> Update:
            codec = {"0": Raw(), "1": BF16(), "2": Int8()}[order.client]
            return super().packed(dataclasses.replace(order, codec=to_table(codec)), change, outcome)

    start = {"w": torch.linspace(-1, 1, 4096).reshape(64, 64)}
    learners = {str(number): Quadratic(float(number)) for number in range(3)}
    server = Server(Federation(clients=3, rounds=1, local_steps=4, waiting=CALM), start, folder=tmp_path / "run")
    with server.opened() as opened:
        Mixed(InProcessLink(opened.service), learners).work()
        assert opened.runtime.wait(60)
    after = [moved(start["w"], float(number), 1) for number in range(3)]
    said = [
        decode("w", encode("w", start["w"] - w, codec)[0])
        for w, codec in zip(after, (Raw(), BF16(), Int8()), strict=True)
    ]
    mean = sum(change.double() for change in said) / 3
    torch.testing.assert_close(server.weights()["w"], (start["w"].double() - mean).float(), rtol=1e-6, atol=1e-6)


def test_untrained_experts_are_reported_before_the_first_round(tmp_path: Path, caplog) -> None:
    """Four experts, two clients with one each."""
    run(tmp_path, {"0": Quadratic(1.0), "1": Quadratic(1.0)}, masks=Masks(experts=Experts(tensors=("experts.w",))))
    said = [record.getMessage() for record in caplog.records if "trained by no client" in record.getMessage()]
    assert said == [
        "2 of 4 experts are trained by no client (2, 3): masks.experts.per_client x 2 clients leaves them out; raise per_client, or set "
        'assign = "random"'
    ]


def test_more_experts_than_the_model_has_are_refused_before_the_initial_weights_are_measured(tmp_path: Path) -> None:
    measured: list[int] = []
    federation = Federation(clients=1, masks=Masks(experts=Experts(tensors=("experts.w",), per_client=5)))
    server = Server(
        federation, START, folder=tmp_path / "run", evaluate=lambda weights: measured.append(1) or {"loss": 0.0}
    )
    with (
        pytest.raises(SettingsError, match=r"masks\.experts\.per_client is 5, the model has 4 experts"),
        server.opened(),
    ):
        pass
    assert not measured
