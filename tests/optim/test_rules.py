"""Update rules against torch's own and against the formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from arclight.optim import SGD, AdamW, Muon, NorMuon

STEPS = 6


def gradients(shape: tuple[int, ...], steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def trained(
    settings: Any, start: torch.Tensor, pushes: list[torch.Tensor], name: str = "w"
) -> tuple[torch.Tensor, Any]:
    """``start`` after one step for each gradient; the optimizer's state of it."""
    parameter = nn.Parameter(start.clone())
    optimizer = settings.build([(name, parameter)])
    for push in pushes:
        parameter.grad = push.to(parameter.dtype).clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("shape", [(5, 7), (9,)])
def test_adamw_is_torchs(shape: tuple[int, ...]) -> None:
    start, pushes = torch.randn(shape, generator=torch.Generator().manual_seed(1)), gradients(shape)
    found, _ = trained(AdamW(lr=0.1, weight_decay=0.3), start, pushes)
    wanted = nn.Parameter(start.clone())
    reference = torch.optim.AdamW([wanted], lr=0.1, weight_decay=0.3 if len(shape) > 1 else 0.0, fused=True)
    for push in pushes:
        wanted.grad = push.clone()
        reference.step()
    assert torch.equal(found, wanted.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    start, pushes = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), gradients((5, 7))
    found, _ = trained(SGD(lr=0.1, momentum=momentum), start, pushes)
    wanted = nn.Parameter(start.clone())
    reference = torch.optim.SGD(
        [wanted], lr=0.1, momentum=momentum, nesterov=momentum > 0, weight_decay=5e-4, fused=True
    )
    for push in pushes:
        wanted.grad = push.clone()
        reference.step()
    assert torch.equal(found, wanted.detach())


def adamw_in_float64(
    start: torch.Tensor, pushes: list[torch.Tensor], settings: AdamW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and second moment by the formulas."""
    weight, (beta1, beta2) = start.double(), settings.betas
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, push in enumerate(pushes, 1):
        push = push.double()
        mean, square = beta1 * mean + (1 - beta1) * push, beta2 * square + (1 - beta2) * push**2
        root = (square / (1 - beta2**step)).sqrt() + settings.eps
        weight = weight * (1 - settings.lr * settings.weight_decay) - settings.lr * mean / (1 - beta1**step) / root
    return weight, square


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_adamw_whose_moments_are_in_another_precision(weights: torch.dtype) -> None:
    """Either moments or weights are bfloat16, which keeps 8 bits: errors stay within it of the formula's."""
    settings = AdamW(lr=0.01, state_dtype="float32" if weights == torch.bfloat16 else "bfloat16")
    start, pushes = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)).to(weights), gradients((40, 50), 50)
    found, state = trained(settings, start, pushes)
    wanted, square = adamw_in_float64(start, [push.to(weights) for push in pushes], settings)
    assert state["exp_avg"].dtype == (torch.float32 if weights == torch.bfloat16 else torch.bfloat16)
    moved = (wanted - start).square().mean().sqrt()
    error = (found - wanted).square().mean().sqrt()
    assert error < 0.02 * moved if weights == torch.float32 else error < 0.02  # of weights about 1, each step rounded
    assert float((state["exp_avg_sq"].double() / square).mean()) == pytest.approx(1, abs=2e-3)


def test_rounding_at_random_lets_the_second_moment_shrink() -> None:
    """To the nearest, 0.999 of a bfloat16 number is the number."""
    pushes = [torch.ones(64, 64)] * 20 + [torch.zeros(64, 64)] * 1000
    means = {}
    for random in (True, False):
        settings = AdamW(state_dtype="bfloat16", stochastic_rounding=random)
        means[random] = float(trained(settings, torch.ones(64, 64), pushes)[1]["exp_avg_sq"].double().mean())
    wanted = float((1 - 0.999**20) * 0.999**1000)
    assert means[True] == pytest.approx(wanted, rel=0.02)
    assert means[False] > 2 * wanted


def test_stochastic_rounding_is_repeatable_and_differs_by_seed_and_name() -> None:
    start, pushes = torch.randn(30, 30, generator=torch.Generator().manual_seed(1)), gradients((30, 30))
    settings = AdamW(state_dtype="bfloat16", seed=1)
    found = trained(settings, start, pushes)[0]
    assert torch.equal(found, trained(settings, start, pushes)[0])
    assert not torch.equal(found, trained(AdamW(state_dtype="bfloat16", seed=2), start, pushes)[0])
    assert not torch.equal(found, trained(settings, start, pushes, name="v")[0])


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Apply the quintic iteration to singular values instead of the matrix."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def muon_in_float64(start: torch.Tensor, pushes: list[torch.Tensor], settings: Muon) -> torch.Tensor:
    weight, (rows, columns) = start.double(), start.shape
    velocity, running = torch.zeros_like(weight), torch.zeros(rows, 1, dtype=torch.float64)
    spectral = max(1, rows / columns) ** 0.5
    for push in pushes:
        velocity = settings.momentum * velocity + (1 - settings.momentum) * push.double()
        direction = (
            (1 - settings.momentum) * push.double() + settings.momentum * velocity if settings.nesterov else velocity
        )
        update = orthogonal(direction)
        if isinstance(settings, NorMuon):
            before = update.norm()
            running = settings.beta2 * running + (1 - settings.beta2) * update.square().mean(1, keepdim=True)
            update = update / running.sqrt()
            wanted = before * spectral if settings.scale == "spectral" else 0.2 * (rows * columns) ** 0.5
            update = update / update.norm() * wanted
        else:
            update = update * (spectral if settings.scale == "spectral" else 0.2 * max(rows, columns) ** 0.5)
        weight = weight * (1 - settings.lr * settings.weight_decay) - settings.lr * update
    return weight


@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_is_the_formula(kind: type[Muon], scale: Any, shape: tuple[int, int]) -> None:
    settings = kind(lr=0.1, weight_decay=0.2, scale=scale, precision="float32", nesterov=scale == "rms")
    start, pushes = torch.randn(shape, generator=torch.Generator().manual_seed(1)), gradients(shape)
    found, _ = trained(settings, start, pushes)
    torch.testing.assert_close(found.double(), muon_in_float64(start, pushes, settings), rtol=0, atol=2e-5)


def test_experts_are_orthogonalised_one_by_one() -> None:
    settings = NorMuon(precision="float32", state_dtype="bfloat16")
    start, pushes = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(1)), gradients((3, 6, 10))
    found, state = trained(settings, start, pushes, name="experts")
    assert state["momentum_buffer"].dtype == torch.bfloat16
    assert state["neuron_sq"].shape == (3, 6, 1)
    for number, expert in enumerate(found):
        alone, _ = trained(settings, start[number], [push[number] for push in pushes])
        torch.testing.assert_close(expert, alone, rtol=0, atol=1e-6)


def test_muon_in_half_precision_is_near_torchs() -> None:
    start, pushes = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), gradients((32, 16))
    found, _ = trained(Muon(lr=0.1), start, pushes)
    wanted = nn.Parameter(start.clone())
    reference = torch.optim.Muon([wanted], lr=0.1, weight_decay=0.0, adjust_lr_fn="original")
    for push in pushes:
        wanted.grad = push.clone()
        reference.step()
    assert (found - wanted.detach()).norm() < 0.02 * (wanted.detach() - start).norm()
