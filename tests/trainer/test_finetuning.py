"""Freezing and unfreezing parts of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.trainer.callbacks import BackboneFinetuning, BaseFinetuning


class Net(al.Module):
    """A backbone with a batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
        self.head = nn.Linear(3, 1)
        self.rates: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            (optimizer,) = self.trainer.optimizers
            self.rates.append([group["lr"] for group in optimizer.param_groups])
        x = batch[0].expand(4, -1)  # the norm needs more than one row
        return (self.head(self.backbone(x + torch.arange(4.0)[:, None])) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)


def frozen(module: nn.Module) -> list[bool]:
    return [not parameter.requires_grad for parameter in module.parameters()]


def test_freezing_with_and_without_the_norms() -> None:
    net = Net()
    BaseFinetuning.freeze(net.backbone)
    assert frozen(net.backbone) == [True, True, False, False, True, True]
    assert net.backbone[1].track_running_stats
    BaseFinetuning.freeze([net.backbone[:2], [net.head]], train_bn=False)
    assert frozen(net) == [True] * 8
    assert not net.backbone[1].track_running_stats
    BaseFinetuning.make_trainable(net)
    assert frozen(net) == [False] * 8
    assert net.backbone[1].track_running_stats
    assert len(list(BaseFinetuning.filter_params(net, train_bn=False))) == 6
    assert not list(BaseFinetuning.filter_params(net, requires_grad=False))


def test_parents_with_parameters_are_flattened_too() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.child = nn.Parameter(torch.zeros(1)), nn.Linear(1, 1)

    parent = Parent()
    assert BaseFinetuning.flatten_modules(nn.ModuleDict({"a": parent})) == [parent, parent.child]
    assert BaseFinetuning.flatten_modules([parent, [parent.child]]) == [parent, parent.child], "each once"


def test_a_group_of_its_own_for_what_is_new() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.5)
    BaseFinetuning.freeze(net.backbone)
    BaseFinetuning.unfreeze_and_add_param_group(net.backbone[0], optimizer)
    assert optimizer.param_groups[1]["params"] == list(net.backbone[0].parameters())
    assert optimizer.param_groups[1]["lr"] == 0.05
    with pytest.warns(UserWarning, match="4 are skipped. Did you init your optimizer in"):
        BaseFinetuning.unfreeze_and_add_param_group(net, optimizer, lr=0.25, train_bn=False)
    assert optimizer.param_groups[2]["params"] == list(net.backbone[2][1].parameters())
    assert optimizer.param_groups[2]["lr"] == 0.25


def test_equal_values_are_not_the_same_parameter() -> None:
    twins = [nn.Linear(1, 1), nn.Linear(1, 1)]
    twins[1].load_state_dict(twins[0].state_dict())
    optimizer = torch.optim.SGD(twins[0].parameters(), lr=1.0)
    BaseFinetuning.unfreeze_and_add_param_group(twins[1], optimizer)
    assert len(optimizer.param_groups) == 2


def test_the_backbone_is_unfrozen_and_its_rate_grows_to_that_of_the_head(fit: Any) -> None:
    net = Net()
    before = net.backbone[0].weight.detach().clone()
    moved: list[bool] = []

    class Watch(al.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            moved.append(not torch.equal(pl_module.backbone[0].weight, before))

    fit(net, BackboneFinetuning(2, lambda epoch: 4.0), Watch(), max_epochs=5)
    assert moved == [False, False, True, True, True]
    assert [rates[-1] for rates in net.rates[2:]] == pytest.approx([0.01, 0.04, 0.1]), "not above the head's"
    with pytest.raises(ValueError, match=r"nn\.Module `backbone` attribute; Scripted has none"):
        fit({"val/score": [1.0]}, BackboneFinetuning())


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("train_bn", [True, False])
@pytest.mark.parametrize("steps", [8, 10])
def test_a_resume_has_the_groups_again(fit: Any, tmp_path: Any, train_bn: bool, steps: int) -> None:
    """Stopped after the backbone came in, at an epoch's end or within one, a run goes on as if it had not been."""

    def callback() -> BackboneFinetuning:
        return BackboneFinetuning(1, backbone_initial_lr=0.02, train_bn=train_bn)

    whole, first, second = Net(), Net(), Net()
    fit(whole, callback(), max_epochs=4)
    trainer = fit(first, callback(), max_steps=steps)
    trainer.save_checkpoint(tmp_path / "half")
    fit(second, callback(), max_epochs=4, ckpt_path=tmp_path / "half")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert frozen(second) == frozen(whole)


@pytest.mark.parametrize("kind", ["backbone", "own"])
def test_a_callback_that_was_used_before_makes_checkpoints_to_resume_from(fit: Any, tmp_path: Any, kind: str) -> None:
    class Own(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)

    def callback() -> BaseFinetuning:
        return BackboneFinetuning(1, backbone_initial_lr=0.02) if kind == "backbone" else Own()

    whole, first, second, used = Net(), Net(), Net(), callback()
    fit(whole, callback(), max_epochs=4)
    fit(Net(), used, max_epochs=3)
    fit(first, used, max_epochs=2).save_checkpoint(tmp_path / "half")
    fit(second, used, max_epochs=4, ckpt_path=tmp_path / "half")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert second.rates == whole.rates[2:]
