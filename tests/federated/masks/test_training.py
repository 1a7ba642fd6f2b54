"""Clients that train with a Trainer keep to the masks of their orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.clients.sites import Net, Rows, fit_order, weights_of
from tests.federated.fakes import TemporaryStore

from arclight import Callback, Module, Trainer
from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.clients.local_policy import clamp_adam_moments
from arclight.federated.clients.trainer_learner import TrainerLearner, trainer_factory
from arclight.federated.protocol import Evaluate


class First(Callback):
    """The weights with which each round begins."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        self._fresh = False

    def on_fit_start(self, trainer: Any, pl_module: Module) -> None:
        self._fresh = True

    def on_train_batch_start(self, trainer: Any, pl_module: Module, *_: Any) -> None:
        if self._fresh:
            self.seen.append({key: value.clone() for key, value in weights_of(pl_module).items()})
            self._fresh = False


class Site:
    """A client that is given orders with masks."""

    def __init__(self, folder: Path, module: Module, **options: Any) -> None:
        self.module, self.first = module, First()
        maker = trainer_factory(accelerator="cpu", callbacks=[self.first], **options)
        self.learner = TrainerLearner(module, Rows(), maker, folder, seed=3)

    def train(self, number: int, weights: dict[str, torch.Tensor], **keep: Any) -> dict[str, torch.Tensor]:
        """Train a round of two steps and return the tensors that are sent."""
        manifest = write_blobs(weights, TemporaryStore(), kind="weights")
        order = fit_order(number, 2, 2 * (number - 1), weights=manifest, local_policy=keep)
        tensors = self.learner.fit(order, weights, lambda steps, loss: None).tensors
        return {key: tensors[key] for key in tensors}


def test_periodic_tensors_continue_from_local_values_in_between(tmp_path: Path) -> None:
    site = Site(tmp_path, Net())
    server = [
        {key: torch.full_like(value, 0.1 * number) for key, value in weights_of(Net()).items()} for number in range(6)
    ]
    keep = {"masks": {"periods": {"net.4.": 2, "exp_avg": 3}}, "moments": ["exp_avg"]}
    for number in range(1, 5):
        before = weights_of(site.module)
        sent = site.train(number, server[number], **keep)
        begins = site.first.seen[-1]
        assert ("model/net.4.weight" in sent) == (number % 2 == 0)
        assert ("exp_avg/net.4.weight" in sent) == (number in (1, 3))
        assert "model/net.0.weight" in sent
        takes = number == 1 or (number - 1) % 2 == 0
        assert torch.equal(
            begins["model/net.4.weight"],
            server[number]["model/net.4.weight"] if takes else before["model/net.4.weight"],
        )
        assert torch.equal(begins["model/net.0.weight"], server[number]["model/net.0.weight"])


@pytest.mark.parametrize("mix", [0.0, 0.25, 1.0])
def test_a_fragment_that_arrives_is_mixed_with_the_clients_own(tmp_path: Path, mix: float) -> None:
    site = Site(tmp_path, Net())
    keep = {"streaming": {"fragments": 2, "overlap": 0, "mix": mix}}
    server = {key: torch.full_like(value, 0.2) for key, value in weights_of(Net()).items()}
    assert set(site.train(1, server, **keep)) == {"model/net.4.weight", "model/net.4.bias"}
    own = weights_of(site.module)
    assert set(site.train(2, server, **keep)) == {"model/net.0.weight", "model/net.0.bias"}
    begins = site.first.seen[-1]
    for key in begins:
        expected = mix * own[key] + (1 - mix) * server[key] if "net.4" in key else own[key]
        torch.testing.assert_close(begins[key], expected, rtol=1e-6, atol=1e-7)


class Mixture(Net):
    """A net with something like experts: each row block of a stack acts on the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(count, 3, 5))})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.experts["w"].square().sum()


@pytest.mark.parametrize("held", [4, 2])
def test_a_client_sends_its_own_experts_whether_its_model_has_all_or_only_these(tmp_path: Path, held: int) -> None:
    server = weights_of(Mixture(4))
    site = Site(tmp_path, Mixture(held))
    keep = {
        "masks": {"experts": {"tensors": ["experts.w"], "per_client": 2}},
        "moments": ["exp_avg"],
        "experts": [1, 3],
    }
    sent = site.train(1, server, **keep)
    stack = server["model/experts.w"]
    assert torch.equal(site.first.seen[0]["model/experts.w"], stack if held == 4 else stack[[1, 3]])
    assert {key for key in sent if "experts" in key} == {
        f"{s}/experts.w[{n}]" for s in ("model", "exp_avg") for n in (1, 3)
    }
    after = weights_of(site.module)["model/experts.w"]
    for place, number in enumerate((1, 3)):
        assert torch.equal(sent[f"model/experts.w[{number}]"], after[number if held == 4 else place])
        assert not torch.equal(sent[f"model/experts.w[{number}]"], stack[number])


@pytest.mark.parametrize("again", [False, True])
def test_weights_are_measured_with_what_is_the_clients_own(tmp_path: Path, again: bool) -> None:
    keep = {"masks": {"personal": ["net.4."]}}
    server = {key: torch.full_like(value, 0.1) for key, value in weights_of(Net()).items()}
    site = Site(tmp_path, Net())
    site.train(1, server, **keep)
    trained = weights_of(site.module)
    if again:  # its process has been started again
        site = Site(tmp_path, Net())
    before = weights_of(site.module)
    newer = {key: torch.randn_like(value) for key, value in server.items()}
    measured = site.learner.evaluate(_evaluate(newer, keep), newer)
    whole = Net()
    own = {key: value for key, value in trained.items() if "net.4." in key}
    whole.load_state_dict({key.removeprefix("model/"): value for key, value in {**newer, **own}.items()})
    assert measured.metrics["val/loss"] == pytest.approx(_loss(whole), rel=1e-5)
    assert measured.samples == 36
    for key, value in weights_of(site.module).items():
        assert torch.equal(value, before[key]), f"{key} is not what it was"


class Blocks(Mixture):
    """Its experts, two or all, add up to a shift of the scores; those that a client does not have are zero at the server."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0]) + self.experts["w"].sum()
        self.log("val/loss", torch.nn.functional.cross_entropy(scores * scores.abs(), batch[1]))


@pytest.mark.parametrize("held", [4, 2])
def test_weights_are_measured_with_the_experts_that_a_client_has(tmp_path: Path, held: int) -> None:
    keep = {"masks": {"experts": {"tensors": ["experts.w"], "per_client": 2}}, "experts": [1, 3]}
    torch.manual_seed(2)
    server = weights_of(Blocks(4))
    server["model/experts.w"][[0, 2]] = 0
    site = Site(tmp_path, Blocks(held))
    measured = site.learner.evaluate(_evaluate(server, keep), server)
    whole = Blocks(4)
    whole.load_state_dict({key.removeprefix("model/"): value for key, value in server.items()})
    assert measured.metrics["val/loss"] == pytest.approx(_loss(whole), rel=1e-5)


def _evaluate(weights: dict[str, torch.Tensor], keep: dict[str, Any]) -> Evaluate:
    manifest = write_blobs(weights, TemporaryStore(), kind="weights")
    return Evaluate(run="r", client="c", round=2, base="2" * 64, weights=manifest, local_policy=keep)


def _loss(module: Module) -> float:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return float(trainer.validate(module, datamodule=Rows(), verbose=False)[0]["val/loss"])


def test_averaged_moments_are_clipped_to_the_bound_of_adam() -> None:
    """Adam's own states never touch the bound; a mean beside squares of zero does, and would throw the weight away."""
    w = torch.nn.Parameter(torch.zeros(4))
    adam = torch.optim.AdamW([w], lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for step in range(300):  # steady, growing, random and no gradients
        w.grad = torch.tensor([1.0, 1.01**step, float(torch.randn((), generator=generator)), 0.0])
        adam.step()
        before = adam.state[w]["exp_avg"].clone()
        clamp_adam_moments([adam])
        assert torch.equal(adam.state[w]["exp_avg"], before)
    adam.state[w]["exp_avg"] += torch.tensor([0.0, 0.0, 1e3, 1e-3])
    clamp_adam_moments([adam])
    state = adam.state[w]
    assert torch.equal(state["exp_avg"][:2], before[:2])
    assert state["exp_avg"][2] == pytest.approx(7.27 * float(state["exp_avg_sq"][2].sqrt()), rel=1e-2)
    assert state["exp_avg"][3] == 0
    there = w.detach().clone()
    w.grad = torch.zeros(4)
    adam.step()
    assert (w - there).abs().max() < 1.0
