"""Schedules against closed forms, parameter groups, and optimizer state that comes back where it belongs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from arclight.optim import SGD, WSD, AdamW, Constant, Cosine, cosine, decay_groups, restore_optimizer, wsd


def test_cosine_is_the_formula() -> None:
    values = [cosine(step, total_steps=100, warmup=0.1, final=0.05) for step in range(101)]
    assert values[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert values[10:] == pytest.approx([0.05 + 0.95 * (1 + math.cos(math.pi * k / 90)) / 2 for k in range(91)])


def test_warm_up_stable_decay() -> None:
    values = [wsd(step, total_steps=100, warmup=0.1, decay=0.2, final=0.1) for step in range(101)]
    assert values[10:80] == [1.0] * 70
    assert values[90] == pytest.approx(0.55)
    assert values[100] == pytest.approx(0.1)


@pytest.mark.parametrize("settings", [AdamW(lr=0.1), SGD(lr=0.1)])
@pytest.mark.parametrize("schedule", [Cosine(), WSD(), Constant(warmup=0.5)])
def test_settings_build_the_named_optimizers(settings: AdamW | SGD, schedule: Cosine | WSD | Constant) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = settings.build(model.named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [settings.weight_decay, 0.0]
    scheduler = schedule.build(optimizer, 10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(0.1)


def test_everything_frozen_is_named() -> None:
    with pytest.raises(ValueError, match="no parameter requires gradients"):
        decay_groups(nn.Linear(2, 2).requires_grad_(False).named_parameters(), 0.1)


def test_state_comes_back_in_the_layout_of_its_parameter() -> None:
    """A fused step after a restore equals the step without one; plain ``load_state_dict`` scrambles channels_last moments."""
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    optimizer = AdamW(lr=0.1).build(model.named_parameters())
    images = torch.randn(2, 4, 8, 8)

    def step(conv: nn.Conv2d, with_optimizer: torch.optim.Optimizer) -> torch.Tensor:
        with_optimizer.zero_grad()
        conv(images).square().mean().backward()
        with_optimizer.step()
        return conv.weight.detach().clone()

    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for entries in saved["state"].values():  # as they come from a file
        entries.update({name: value.contiguous() for name, value in entries.items()})
    again = copy.deepcopy(model)
    restored = AdamW(lr=0.1).build(again.named_parameters())
    restore_optimizer(restored, saved)
    assert torch.equal(step(again, restored), step(model, optimizer))
