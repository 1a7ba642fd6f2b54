"""Ranges: where rounding costs least, found by brute force beside."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from tests.deploy.test_qat import Normed
from torch import Tensor, nn

from arclight.deploy import Int8, LowBit, prepare_qat
from arclight.deploy.quantizing.observers import (
    LeastErrorMovingRange,
    LeastErrorObserver,
    MovingRange,
    PerChannelLeastErrorRange,
    PerChannelWeightRange,
    _rebinned,
    least_error_range,
)
from arclight.deploy.quantizing.pt2e import activation_spec


def observer(**options: object) -> LeastErrorObserver:
    spec = activation_spec(LeastErrorObserver, **options)
    return spec.observer_or_fake_quant_ctr.with_args(
        dtype=spec.dtype, qscheme=spec.qscheme, quant_min=spec.quant_min, quant_max=spec.quant_max, is_dynamic=False
    )()


def rounded(values: Tensor, scale: float, zero_point: int) -> np.ndarray:
    levels = np.clip(np.round(values.double().numpy() / scale) + zero_point, 0, 255)
    return (levels - zero_point) * scale


def test_an_even_spread_keeps_its_whole_range() -> None:
    made = observer()
    made(torch.linspace(-1, 3, 100_000))
    scale, zero_point = made.calculate_qparams()
    assert scale.item() == pytest.approx(4 / 255, rel=0.02)
    assert zero_point.item() == pytest.approx(64, abs=2)


def test_every_value_of_a_small_tensor_counts() -> None:
    for seed in range(8):
        values = torch.rand(24, generator=torch.Generator().manual_seed(seed))
        made = observer()
        made(values)
        scale, zero_point = (float(v) for v in made.calculate_qparams())
        assert np.abs(rounded(values, scale, int(zero_point)) - values.double().numpy()).max() < 0.6 / 255


def test_rare_large_values_do_not_take_all_levels() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).abs()
    values[7] = 12.0
    made = observer()
    made(values)
    scale, zero_point = (float(v) for v in made.calculate_qparams())
    usual = values[values < 4]
    chosen, whole = (np.mean((rounded(usual, s, 0) - usual.double().numpy()) ** 2) for s in (scale, 12 / 255))
    assert scale < 0.7 * 12 / 255
    assert zero_point == 0
    assert chosen < 0.5 * whole


def test_before_silu_the_negative_side_is_given_up() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator) * 4
    errors = {}
    for reader in ("any", "silu"):
        made = observer(reader=reader)
        made(values)
        scale, zero_point = (float(v) for v in made.calculate_qparams())
        x = rounded(values, scale, int(zero_point))
        gate = np.round(255 / (1 + np.exp(-x))) / 255
        exact = torch.nn.functional.silu(values.double()).numpy()
        errors[reader] = np.mean((x * gate - exact) ** 2)
    assert errors["silu"] < 0.75 * errors["any"]


def test_the_search_finds_what_brute_force_finds() -> None:
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(1)).log().neg()  # exponential: a long tail
    high = float(values.max())
    counts = torch.histc(values, 2048, 0, high)
    _, top = least_error_range(counts, 0.0, high)
    tops = np.linspace(0.5, 1, 26) * high
    errors = [np.mean(np.abs(rounded(values, t / 255, 0) - values.double().numpy()) ** 2.4) for t in tops]
    found = np.mean(np.abs(rounded(values, top / 255, 0) - values.double().numpy()) ** 2.4)
    assert found <= 1.05 * min(errors)


def test_the_order_and_growth_of_batches_hardly_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    small, large = torch.rand(50_000, generator=generator), torch.rand(50_000, generator=generator) * 5 - 2
    ranges = []
    for batches in ((small, large), (large, small)):
        made = observer()
        for batch in batches:
            made(batch)
        ranges.append([float(v) for v in made.calculate_qparams()])
    assert ranges[0][0] == pytest.approx(ranges[1][0], rel=0.05)


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_constants_are_kept(value: float) -> None:
    made = observer()
    made(torch.full((100,), value))
    scale, zero_point = (float(v) for v in made.calculate_qparams())
    assert rounded(torch.tensor([value]), scale, int(zero_point))[0] == pytest.approx(value, abs=0.01)
    assert 0 <= zero_point <= 255


def test_the_same_data_give_the_same_range() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    first, second = observer(), observer()
    first(values)
    torch.rand(5)
    second(values)
    assert first.calculate_qparams() == second.calculate_qparams()


def searched(counts: Tensor, low: float, high: float, reader: str) -> tuple[float, float]:
    """The range of least error, one candidate and one value at a time."""
    values = [low + (k + 0.5) * (high - low) / len(counts) for k in range(len(counts))]
    silu = lambda x: x / (1 + math.exp(-x))  # noqa: E731
    found = {}
    for bottom in np.linspace(0.02 if reader == "silu" else 0.5, 1, 32) * low if low < 0 else [0.0]:
        for top in np.linspace(0.5, 1, 26) * high if high > 0 else [0.0]:
            scale, cost = (top - bottom) / 255, 0.0
            zero_point = round(-bottom / scale)
            for value, count in zip(values, counts.tolist(), strict=True):
                x = (min(max(round(value / scale) + zero_point, 0), 255) - zero_point) * scale
                if reader == "silu":
                    cost += count * abs(x * round(255 / (1 + math.exp(-x))) / 255 - silu(value)) ** 2.4
                else:
                    cost += count * abs(x - value) ** 2.4
            found[bottom, top] = cost
    return min(found, key=found.__getitem__)


@pytest.mark.parametrize("reader", ["any", "silu"])
@pytest.mark.parametrize(("low", "high"), [(-3.0, 9.0), (0.0, 7.0), (-5.0, 0.0), (0.0, 0.3), (-0.3, 0.0)])
def test_the_range_is_the_best_of_all_candidates(low: float, high: float, reader: Literal["any", "silu"]) -> None:
    place = torch.linspace(low, high, 64)
    counts = (1000 * torch.exp(-1.5 * place.abs() * 8 / (high - low))).round() + (torch.arange(64) % 7 == 3)
    assert least_error_range(counts, low, high, reader) == pytest.approx(searched(counts, low, high, reader), rel=1e-5)


def test_an_empty_range_stays_as_it_is() -> None:
    assert least_error_range(torch.zeros(8), 0.0, 0.0) == (0.0, 0.0)


def test_counts_keep_their_places_when_the_range_grows() -> None:
    counts = torch.arange(1.0, 9.0)
    assert torch.equal(_rebinned(counts, (-1.0, 3.0), (-1.0, 3.0)), counts)
    halved = [float(counts[k] + counts[k + 1]) for k in range(0, 8, 2)]
    assert _rebinned(counts, (0.0, 4.0), (0.0, 8.0)).tolist() == [*halved, 0, 0, 0, 0]
    assert _rebinned(counts, (-4.0, 0.0), (-8.0, 0.0)).tolist() == [0, 0, 0, 0, *halved]


def moving(kind: type[MovingRange], **options: object) -> MovingRange:
    spec = activation_spec(kind, bits=4, **options)
    return spec.observer_or_fake_quant_ctr.with_args(
        dtype=spec.dtype, qscheme=spec.qscheme, quant_min=spec.quant_min, quant_max=spec.quant_max
    )()


def peaked(count: int = 60_000) -> Tensor:
    """Values of which few are large, as (batch, channel, height, width)."""
    return (torch.randn(count, generator=torch.Generator().manual_seed(0)) ** 3).view(1, 6, 100, -1)


def test_sixteen_levels_leave_the_largest_values_of_a_batch() -> None:
    values = peaked()
    errors = {}
    for kind in (MovingRange, LeastErrorMovingRange):
        made = moving(kind).train()
        errors[kind] = float((made(values) - values).abs().pow(2.4).mean())
    tried = [
        float((torch.fake_quantize_per_tensor_affine(values, (high - low) / 15, round(-low * 15 / (high - low)), 0, 15) - values)
              .abs().pow(2.4).mean())
        for low in np.linspace(0.2, 1, 25) * float(values.min()) for high in np.linspace(0.2, 1, 25) * float(values.max())
    ]  # fmt: skip
    assert errors[LeastErrorMovingRange] < 0.8 * errors[MovingRange]
    assert errors[LeastErrorMovingRange] < 1.1 * min(tried)


def test_sixteen_levels_before_silu_are_those_that_it_passes_on() -> None:
    values = 3 * torch.randn(1, 6, 100, 100, generator=torch.Generator().manual_seed(0))

    def error(x: Tensor) -> float:
        return float((x * (15 * x.sigmoid()).round() / 15 - torch.nn.functional.silu(values)).abs().pow(2.4).mean())

    errors = {}
    for reader in ("any", "silu"):
        made = moving(LeastErrorMovingRange, reader=reader).train()
        errors[reader] = error(made(values))
        if reader == "silu":
            assert float(values.min()) < 5 * float(made.low) < 0  # silu(-2) is -0.24, and silu(-12) nearly 0
    tried = [
        error(torch.fake_quantize_per_tensor_affine(values, (high - low) / 15, round(-low * 15 / (high - low)), 0, 15))
        for low in np.linspace(0.02, 1, 50) * float(values.min()) for high in np.linspace(0.3, 1, 15) * float(values.max())
    ]  # fmt: skip
    assert errors["silu"] < 0.6 * errors["any"]
    assert errors["silu"] < 1.1 * min(tried)


@pytest.mark.parametrize("values", [torch.zeros(8), torch.tensor([0.0, math.nan]), torch.tensor([-math.inf, 1.0])])
def test_a_range_is_kept_by_batches_without_one(values: Tensor) -> None:
    made = moving(LeastErrorMovingRange).train()
    made.observe(torch.tensor([-1.0, 0.5, 2.0]))
    before = made.low.item(), made.high.item()
    made.observe(values)
    assert math.isfinite(made.low.item())
    assert math.isfinite(made.high.item())
    if not values.isfinite().all():
        assert (made.low.item(), made.high.item()) == before


def test_a_weight_of_few_bits_has_less_error_without_its_largest_values() -> None:
    weight = torch.randn(8, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    weight[:, 0, 0, 0] = 6
    weight[3] = 0
    errors = []
    for kind in (PerChannelWeightRange, PerChannelLeastErrorRange):
        made = kind(
            dtype=torch.int8, eps=1e-9, qscheme=torch.per_channel_symmetric, quant_min=-7, quant_max=7, ch_axis=0
        )
        errors.append((made(weight) - weight).pow(2).sum((1, 2, 3)))
    assert (errors[1] <= errors[0]).all()
    assert errors[1].sum() < 0.8 * errors[0].sum()


def test_ranges_of_least_error_are_for_few_bits() -> None:
    net = Normed()
    low, high = (
        {type(module) for module in prepare_qat(net, torch.rand(2, 4, 8, 8), recipe=recipe).modules()}
        for recipe in (LowBit(activation_bits=4, min_sqnr_db=-50), Int8(reduce_range=True))
    )
    assert {LeastErrorMovingRange, PerChannelLeastErrorRange} <= low
    assert {MovingRange, PerChannelWeightRange} <= high
    assert not {LeastErrorMovingRange, PerChannelLeastErrorRange} & high


def test_training_in_four_bits_has_ranges_for_silu_where_it_reads_integers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    x = torch.randn(4, 8, 12, 12) * 8
    lowest = float(model[0](x).detach().min())
    ranges = prepare_qat(model, x, recipe=LowBit(activation_bits=4, min_sqnr_db=-50)).state_dict()
    assert lowest < -10
    assert 0.3 * lowest < float(ranges["fake_quantize.0_conv2d.low"]) < 0
