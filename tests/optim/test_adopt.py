"""ADOPT and QHADOPT against their formulas in float64 NumPy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from arclight.optim import ADOPT, QHADOPT, AdamW, Cosine
from arclight.optim.adopt import _foreach_update

SHAPES = {"w": (5, 7), "deep": (3, 4, 2), "b": (9,)}


def pushes(steps: int) -> list[dict[str, torch.Tensor]]:
    """Gradients whose size differs by orders of magnitude, with zeros in the first."""
    generator = torch.Generator().manual_seed(3)
    made = [
        {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** (step % 5 - 2)
            for name, shape in SHAPES.items()
        }
        for step in range(steps)
    ]
    for first in made[0].values():
        first.view(-1)[:3] = 0
    return made  # fmt: skip


def start(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def step(optimizer: Any, weights: dict[str, nn.Parameter], push: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        weight.grad = push[name].to(weight.dtype).clone()
    optimizer.step()


def reference(settings: Any, steps: int, rates: list[float]) -> dict[str, np.ndarray]:
    """Weights by the formulas, tensor by tensor."""
    found, (beta1, beta2) = {}, settings.betas
    v1 = settings.v1 if isinstance(settings, QHADOPT) else 1.0
    for name, first in start().items():
        w, m = first.detach().numpy().copy(), np.zeros(SHAPES[name])
        decay = settings.weight_decay / (settings.lr if settings.decay_scale == "lr/peak" else 1) * (w.ndim > 1)
        for t, push in enumerate(pushes(steps)):
            g = push[name].numpy()
            if t == 0:
                v = g * g
                continue
            n = np.clip(g / np.maximum(np.sqrt(v), settings.eps), -(t**0.25), t**0.25)
            m = beta1 * m + (1 - beta1) * n
            w = w * (1 - rates[t] * decay) - rates[t] * ((1 - v1) * n + v1 * m)
            v = beta2 * v + (1 - beta2) * g * g
        found[name] = w
    return found


@pytest.mark.parametrize(
    "settings",
    [
        ADOPT(lr=0.01, weight_decay=0.1),
        ADOPT(lr=0.01, betas=(0.0, 0.9), eps=0.1, decay_scale="lr/peak", weight_decay=1e-3),
        QHADOPT(lr=0.01, weight_decay=0.1),
        QHADOPT(lr=0.01, betas=(0.99, 0.999), v1=0.25),
    ],
)
def test_two_hundred_steps_are_the_formula(settings: Any) -> None:
    weights, rates = start(), []
    optimizer = settings.build(weights.items())
    schedule = Cosine(warmup=20).build(optimizer, 200)
    for push in pushes(200):
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer, weights, push)
        schedule.step()
    wanted = reference(settings, 200, rates)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight.detach().numpy(), wanted[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [ADOPT(), QHADOPT()])
def test_the_first_step_only_measures_gradients(settings: Any) -> None:
    weights = start(torch.float32)
    before = copy.deepcopy(weights)
    optimizer = settings.build(weights.items())
    step(optimizer, weights, pushes(1)[0])
    for name, weight in weights.items():
        assert torch.equal(weight, before[name])
        assert torch.equal(optimizer.state[weight]["exp_avg_sq"], pushes(1)[0][name].float() ** 2)


@pytest.mark.parametrize("settings", [ADOPT(state_dtype="bfloat16", weight_decay=0.1), QHADOPT()])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_bits(settings: Any, weights_dtype: torch.dtype) -> None:
    weights = start(weights_dtype)
    optimizer = settings.build(weights.items())
    for push in pushes(4):
        step(optimizer, weights, push)
    again = copy.deepcopy(weights)
    resumed = settings.build(again.items())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for push in pushes(8)[4:]:
        step(optimizer, weights, push)
        step(resumed, again, push)
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())


def test_skipped_steps_are_not_counted() -> None:
    """Also a skipped first one, behind which the second moment begins."""
    weights, reached = start(torch.float32), start(torch.float32)
    optimizer, straight = (ADOPT(lr=0.1).build(pair.items()) for pair in (weights, reached))
    for number, push in enumerate(pushes(8)):
        if number in (0, 3):
            optimizer.skip = torch.tensor(True)
            step(optimizer, weights, {name: torch.full_like(value, torch.nan) for name, value in push.items()})
        optimizer.skip = torch.tensor(False) if number % 2 else None
        step(optimizer, weights, push)
        step(straight, reached, push)
    assert all(torch.equal(weight, reached[name]) for name, weight in weights.items())


@pytest.mark.parametrize("settings", [ADOPT(weight_decay=0.1), QHADOPT()])
def test_steps_counted_on_a_device_give_what_steps_counted_on_the_host_do(settings: Any) -> None:
    """If a step may be skipped, the count is a tensor, as is a rate that only a device knows."""
    group = settings.options() | {"weight_decay": settings.weight_decay}
    pairs = []
    for on_device in (False, True):
        tensors = [[weight.detach() for weight in start().values()] for _ in range(3)]
        for moment in (*tensors[1], *tensors[2]):
            moment.zero_()
        weights, means, squares = tensors
        for number, push in enumerate(pushes(5)):
            count: Any = torch.tensor(float(number), dtype=torch.float64) if on_device else number
            rate = {"lr": torch.tensor(settings.lr, dtype=torch.float64)} if on_device else {}
            _foreach_update(weights, list(push.values()), means, squares, [count] * len(SHAPES), group | rate)
        pairs.append([*weights, *means, *squares])
    for host, device in zip(*pairs, strict=True):
        torch.testing.assert_close(host, device, rtol=0, atol=1e-13)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_states_stay_near_the_formula(weights_dtype: torch.dtype) -> None:
    settings = ADOPT(
        lr=0.01, betas=(0.9, 0.99), state_dtype="bfloat16" if weights_dtype == torch.float32 else "float32"
    )
    weights = start(weights_dtype)
    optimizer = settings.build(weights.items())
    for push in pushes(60):
        step(optimizer, weights, push)
    wanted = reference(settings, 60, [0.01] * 60)
    for name, weight in weights.items():
        moved = np.abs(wanted[name] - start()[name].detach().numpy()).mean()
        error = np.abs(weight.detach().double().numpy() - wanted[name]).mean()
        assert error < (0.1 * moved if weights_dtype == torch.float32 else 0.03), name


def test_decay_by_lr_over_peak_does_not_depend_on_the_peak() -> None:
    shrunk = []
    for kind in (AdamW, ADOPT):
        for lr in (1e-3, 1e-5):
            weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
            optimizer = kind(lr=lr, decay_scale="lr/peak", weight_decay=0.1).build([("w", weight)])
            schedule = Cosine(warmup=2, final=0.5).build(optimizer, 10)
            for _ in range(10):
                weight.grad = torch.zeros_like(weight)
                optimizer.step()
                schedule.step()
            shrunk.append(float(weight.detach()[0, 0]))
    assert shrunk[0] == pytest.approx(shrunk[1], rel=1e-12)
    assert shrunk[2] == pytest.approx(shrunk[3], rel=1e-12)
    assert shrunk[0] == pytest.approx(shrunk[2] * (1 - 0.1 / 3), rel=1e-12)  # ADOPT's first step does not decay
    assert shrunk[0] < 0.6


def test_a_resumed_decay_keeps_its_scale() -> None:
    usual, scaled = ADOPT(weight_decay=0.1), ADOPT(weight_decay=0.1, decay_scale="lr/peak")
    for saved, resumed in ((usual, scaled), (scaled, usual)):
        optimizer = resumed.build(start().items())
        optimizer.load_state_dict(saved.build(start().items()).state_dict())
        assert {group.get("decay_scale", "lr") for group in optimizer.param_groups} == {saved.decay_scale}


@pytest.mark.parametrize("kind", [ADOPT, QHADOPT])
def test_moments_of_torchs_adam_are_refused(kind: Any) -> None:
    weights = start()
    theirs = torch.optim.AdamW(weights.values())
    step(theirs, weights, pushes(1)[0])
    with pytest.raises(ValueError, match="from an optimizer of torch, which has no ADOPT: resume with AdamW"):
        kind().build(start().items()).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("wrong", [{"v1": 1.5}, {"v1": float("nan")}, {"betas": (0.9, 1.0)}, {"eps": -1.0}])
def test_numbers_beyond_their_interval_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QHADOPT(**wrong)
    optimizer = QHADOPT().build(start().items())
    with pytest.raises(ValueError, match=next(iter(wrong))):
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))], **wrong})


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_no_gradient_yet_is_no_nan_whatever_eps_is(eps: float) -> None:
    """Its square is 0 in float32, as eps squared is: weights without a gradient became NaN."""
    found = []
    for used in (eps, 1e-12):
        weight = nn.Parameter(torch.ones(3))
        optimizer = ADOPT(lr=0.1, eps=used).build([("w", weight)])
        for gradient in ([0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]):
            weight.grad = torch.tensor(gradient)
            optimizer.step()
        found.append(weight.detach())
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
