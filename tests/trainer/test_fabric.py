"""A loop of one's own on Fabric."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al


def loop(fabric: al.Fabric, model: nn.Module, loader: Any, epochs: int = 1) -> nn.Module:
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(loader)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def test_equals_the_loop_without_it() -> None:
    al.seed_everything(1)
    model = nn.Linear(4, 1)
    hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    for x, y in DataLoader(data(), 6):
        optimizer.zero_grad()
        nn.functional.mse_loss(hand(x), y).backward()
        optimizer.step()
    fabric = al.Fabric()
    fabric.launch()
    trained = loop(fabric, model, DataLoader(data(), 6))
    assert torch.equal(trained.weight, hand.weight)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    fabric = al.Fabric(precision="bf16-mixed")
    layer, inside = nn.Linear(4, 4), list[torch.dtype]()
    layer.register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))
    model = fabric.setup(layer)
    assert model(torch.randn(2, 4)).dtype == torch.float32
    assert inside == [torch.bfloat16]
    assert model.weight.dtype == torch.float32


def test_true_precision_converts_weights() -> None:
    assert al.Fabric(precision="bf16-true").setup(nn.Linear(4, 4)).weight.dtype == torch.bfloat16
    assert al.Fabric(precision="64-true").setup(nn.Linear(4, 4)).weight.dtype == torch.float64


def test_a_loop_resumes_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    al.seed_everything(1)
    fabric = al.Fabric()
    loader = fabric.setup_dataloaders(DataLoader(data(), 4, shuffle=True))
    passes = [[x.clone() for x, _ in loader] for _ in range(2)]
    loader.set_epoch(0)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    model = nn.Linear(4, 1)
    fabric.save(tmp_path / "state", {"model": model, "loader": loader, "note": "here"})

    other = fabric.setup_dataloaders(DataLoader(data(), 4, shuffle=True))
    again = nn.Linear(4, 1)
    rest = fabric.load(tmp_path / "state", {"model": again, "loader": other})
    assert rest == {"note": "here"}
    assert torch.equal(again.weight, model.weight)
    tail = [x for x, _ in other]
    assert len(tail) == 3
    assert all(torch.equal(a, b) for a, b in zip(tail, passes[0][3:], strict=True))


def test_wrong_use_is_named(tmp_path: Path) -> None:
    fabric = al.Fabric()
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="You have to specify either `clip_val` or `max_norm`"):
        fabric.clip_gradients(model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        al.Fabric(devices=2, strategy="ddp").setup(model)


def test_two_spawned_processes_share_the_data(tmp_path: Path) -> None:
    fabric = al.Fabric(devices=2, strategy="ddp_spawn")
    seen = fabric.launch(_seen)
    assert sorted(seen) == list(range(8))


def _seen(fabric: al.Fabric) -> list[int]:
    torch.manual_seed(0)
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8), 2, shuffle=True))
    own = torch.cat(list(loader))
    return [int(i) for i in fabric.all_gather(own).flatten()]
