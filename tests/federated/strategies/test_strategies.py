"""Strategies against torch's optimizers, the papers' own formulas in float64, and quadratics that must shrink."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch

from arclight import recipe
from arclight.federated.settings import Federation
from arclight.federated.strategies import (
    DiLoCo,
    FedAdam,
    FedAvg,
    FedMomentum,
    FedNesterov,
    FedYogi,
    SparseLoCo,
    Strategy,
)

EVERY = [FedAvg(), FedAvg(lr=0.5), SparseLoCo(), FedNesterov(lr=0.3), DiLoCo(momentum=0.6), FedMomentum(lr=0.2),
         FedAdam(), FedAdam(bias_correction=True), FedYogi(), FedYogi(bias_correction=True)]  # fmt: skip


def steps(strategy: Strategy, weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    state: dict[str, torch.Tensor] = {}
    for count, gradient in enumerate(gradients):
        weight, state = strategy.step(weight, gradient, state, count)
        assert set(state) == set(strategy.state_keys)
    return weight


def case(seed: int = 0, count: int = 12) -> tuple[torch.Tensor, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    return weight, [torch.randn(7, 5, generator=draw, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (FedAvg(lr=0.6), lambda p: torch.optim.SGD(p, lr=0.6)),
        (SparseLoCo(lr=0.8), lambda p: torch.optim.SGD(p, lr=0.8)),
        (FedNesterov(lr=0.3, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True)),
        (DiLoCo(), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        (
            FedAdam(lr=0.05, betas=(0.8, 0.95), tau=1e-3, bias_correction=True),
            lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.95), eps=1e-3),
        ),
    ],
)
def test_each_is_the_optimizer_that_torch_has(strategy: Strategy, optimizer: Any) -> None:
    weight, gradients = case()
    parameter = torch.nn.Parameter(weight.clone())
    oracle = optimizer([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        oracle.step()
    assert torch.allclose(steps(strategy, weight, gradients), parameter.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("yogi", [False, True])
def test_the_adaptive_ones_are_those_of_the_paper(yogi: bool) -> None:
    """Algorithm 2 of Reddi et al., number by number, in the paper's own signs."""
    weight, gradients = case(1)
    lr, b1, b2, tau = 0.1, 0.9, 0.99, 1e-3
    x, m, v = weight.clone(), torch.zeros_like(weight), torch.full_like(weight, tau**2)
    for gradient in gradients:
        delta = -gradient
        m = b1 * m + (1 - b1) * delta
        v = v - (1 - b2) * delta**2 * torch.sign(v - delta**2) if yogi else b2 * v + (1 - b2) * delta**2
        x = x + lr * m / (torch.sqrt(v) + tau)
    kind = FedYogi if yogi else FedAdam
    ours = steps(kind(lr=lr, betas=(b1, b2), tau=tau), weight, gradients)
    assert torch.allclose(ours, x, rtol=1e-12, atol=1e-14)


def test_momentum_is_that_of_the_paper() -> None:
    weight, gradients = case(2)
    w, v = weight.clone(), weight.clone()
    for gradient in gradients:
        after = w - 0.4 * gradient
        w, v = after + 0.7 * (after - v), after
    assert torch.allclose(steps(FedMomentum(lr=0.4, momentum=0.7), weight, gradients), w, rtol=1e-13)


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
def test_a_quadratic_shrinks(strategy: Strategy) -> None:
    """Clients that go a quarter of the way to the minimum: a step of the wrong sign would go away from it."""
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    state: dict[str, torch.Tensor] = {}
    start = weight.norm()
    for count in range(150):
        weight, state = strategy.step(weight, 0.25 * weight, state, count)
    assert weight.norm() < 0.2 * start


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_strategies_leave_arguments_and_dtypes_unchanged(strategy: Strategy, dtype: torch.dtype) -> None:
    weight = torch.randn(6, generator=torch.Generator().manual_seed(3)).to(dtype)
    gradient = torch.full((6,), 0.5, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    before = weight.clone()
    new, state = strategy.step(weight, gradient, {}, 0)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    again, _ = strategy.step(new, gradient, state, 1)
    assert new.dtype == again.dtype == dtype
    assert torch.equal(weight, before)
    assert torch.equal(gradient, torch.full_like(gradient, 0.5))
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    assert not torch.equal(new, before)


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
def test_a_recipe_names_it_in_lower_case(strategy: Strategy) -> None:
    kind = type(strategy).__name__.lower()
    assert type(recipe.read(Federation, {"strategy": kind}).strategy) is type(strategy)
    table = {"strategy": {"kind": kind, **asdict(strategy)}}
    assert recipe.read(Federation, table).strategy == strategy


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FedAvg(lr=0), "lr: need number > 0, got 0"),
        (lambda: FedYogi(lr=float("nan")), "lr: need number > 0, got nan"),
        (lambda: DiLoCo(momentum=1), r"momentum: need number in \[0, 1\), got 1"),
        (lambda: FedAdam(betas=(0.9, 1.0)), r"betas: need"),
        (lambda: FedAdam(tau=0), "tau: need number > 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_settings_are_read_without_torch() -> None:
    code = "import sys, arclight.federated.settings, arclight.federated.strategies; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
