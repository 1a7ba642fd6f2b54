"""Processes that hold different parameters, as the stages of a pipeline do: one checkpoint, which opens whole and in other cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight import checkpoint
from arclight.fabric.distributed.optimizer_names import key_by_name, name_parameters, select_optimizer_state
from arclight.fabric.strategies import FSDPStrategy

torch.set_num_threads(1)


class Layers(nn.Module):
    """Some of four layers, under the names that they have in the whole."""

    def __init__(self, wanted: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in wanted})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def fill(model: nn.Module) -> None:
    """Weights by name, and a loss whose gradient is by name too."""
    for name, parameter in model.named_parameters():
        torch.manual_seed(sum(name.encode()))
        nn.init.normal_(parameter)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups = [[p for n, p in named.items() if n.endswith(kind)] for kind in ("weight", "bias")]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=0.05
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.stack([(p**3).sum() for p in model.parameters()]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(wanted: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Layers(wanted)
    fill(model)
    optimizer = optimizer_for(model)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def _save(fabric: al.Fabric, path: Path, cuts: list[list[int]]) -> None:
    model, optimizer = train(cuts[fabric.global_rank])
    fabric.strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer, "step": 2})


def _go_on(fabric: al.Fabric, path: Path, cuts: list[list[int]]) -> list[Any]:
    model = Layers(cuts[fabric.global_rank])
    optimizer = optimizer_for(model)
    fabric.strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
    step(model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return fabric.strategy.all_gather_object({name: p.tolist() for name, p in model.named_parameters()})


def fabric_for(devices: int) -> al.Fabric:
    return al.Fabric(accelerator="cpu", devices=devices, strategy=FSDPStrategy(start_method="fork"))


def test_stages_save_one_checkpoint_that_others_and_the_whole_go_on_from(tmp_path: Path) -> None:
    model, optimizer = train([0, 1, 2, 3])
    alone = al.Fabric(accelerator="cpu", devices=1)
    alone.save(tmp_path / "one", {"model": model, "optimizer": optimizer, "step": 2})
    fabric_for(2).launch(_save, tmp_path / "two", [[0, 1, 2], [3]])
    whole, cut = checkpoint.load(tmp_path / "one"), checkpoint.load(tmp_path / "two")
    assert list(cut["model"]) == list(whole["model"])
    assert all(torch.equal(cut["model"][name], tensor) for name, tensor in whole["model"].items())
    assert set(cut["optimizer"]["state"]) == set(whole["model"])
    step(model, optimizer)
    wanted = {name: p.tolist() for name, p in model.named_parameters()}
    for source in ("one", "two"):
        for cuts in ([[0], [1, 2, 3]], [[0], [1], [2, 3]]):
            parts = fabric_for(len(cuts)).launch(_go_on, tmp_path / source, cuts)
            assert {name: value for part in parts for name, value in part.items()} == wanted
        again = Layers([0, 1, 2, 3])
        moments = optimizer_for(again)
        alone.load(tmp_path / source, {"model": again, "optimizer": moments})
        step(again, moments)
        assert {name: p.tolist() for name, p in again.named_parameters()} == wanted


def _misfit(fabric: al.Fabric, path: Path) -> str:
    model = Layers([fabric.global_rank, 4])
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.4\.weight"):
        fabric.strategy.load_checkpoint(path, {"model": model})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers\.3\.weight"):  # that no stage has
        fabric.strategy.load_checkpoint(path, {"model": Layers([fabric.global_rank])})
    return "refused"


def test_unknown_and_missing_parameters_are_refused(tmp_path: Path) -> None:
    fabric_for(2).launch(_save, tmp_path / "c", [[0, 1, 2], [3]])
    assert fabric_for(2).launch(_misfit, tmp_path / "c") == "refused"
    _, optimizer = train([0])
    state = checkpoint.load(tmp_path / "c")["optimizer"]
    with pytest.raises(ValueError, match="by name, and the optimizer has a parameter whose name is not known"):
        select_optimizer_state(optimizer, state, {})
    with pytest.raises(ValueError, match="must be kept by name"):
        key_by_name(optimizer.state_dict())
    other = Layers([7])
    with pytest.raises(ValueError, match=r"the optimizer has layers\.7\.weight, which is not in it"):
        select_optimizer_state(optimizer_for(other), state, name_parameters([other]))
