"""Flow matching: the transformer by its formulas in float64 and beside diffusers, its loss, its sampler."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from arclight.parallel import initialize
from arclight.text import from_hf, to_hf
from arclight.text.diffusion.flow_matching import flow_loss, sample, schedule, to_latents, to_tokens
from arclight.text.diffusion.flux import FLUX_SIZES, Conditions, DoubleBlock, Flux, FluxConfig, SingleBlock

SMALL = FluxConfig(
    in_channels=8, text_dim=12, summary_dim=10, dim=32, heads=2, hidden=128, double_layers=2, single_layers=2, axes=(4, 6, 6)
)  # fmt: skip


def shaken(module: Any, seed: int = 0) -> Any:
    """Gates are 0 in a fresh model, which would hide whatever they gate."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return module


def by_formulas(
    weights: dict[str, Tensor], x: dict[str, Tensor], told: Tensor, angles: Tensor, double: bool
) -> dict[str, Tensor]:
    """A block as the paper's code has it, in float64, head by head and pair by pair."""
    heads, width = 2, 16

    def linear(name: str, value: Tensor) -> Tensor:
        return value @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    def norm(value: Tensor) -> Tensor:
        return (value - value.mean(-1, keepdim=True)) / (value.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()

    def turned(value: Tensor, name: str) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    streams = [f"{name}." for name in x] if double else [""]
    held: dict[str, list[Tensor]] = {name: [] for name in "qkv"}
    told_by = {}
    for stream, value in zip(streams, x.values(), strict=True):
        told_by[stream] = linear(f"{stream}modulation.w", told * torch.sigmoid(told)).split(32, -1)
        changed = norm(value) * (1 + told_by[stream][1][:, None]) + told_by[stream][0][:, None]
        for name in "qkv":
            part = linear(f"{stream}heads.w{name}", changed).reshape(*value.shape[:2], heads, width)
            held[name].append(part if name == "v" else turned(part, f"{stream}heads.{name}_norm"))
    q, k, v = (torch.cat(held[name], 1) for name in "qkv")
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turn).flatten(-2) for t in (q, k)
    )
    scores = torch.einsum("bshc,bthc->bhst", q, k) / math.sqrt(width)
    seen = torch.einsum("bhst,bthc->bshc", scores.softmax(-1), v).flatten(2)
    out, place = {}, 0
    for (name, value), stream in zip(x.items(), streams, strict=True):
        own, told_own = seen[:, place : place + value.shape[1]], [part[:, None] for part in told_by[stream]]
        place += value.shape[1]
        if double:
            value = value + told_own[2] * linear(f"{stream}wo", own)
            changed = norm(value) * (1 + told_own[4]) + told_own[3]
            inner = F.gelu(linear(f"{stream}feed_forward.w1", changed), approximate="tanh")
            out[name] = value + told_own[5] * linear(f"{stream}feed_forward.w2", inner)
        else:
            changed = norm(value) * (1 + told_own[1]) + told_own[0]
            out[name] = value + told_own[2] * (
                linear("wo", own) + linear("w2", F.gelu(linear("w1", changed), approximate="tanh"))
            )
    return out


@pytest.mark.parametrize("double", [True, False])
def test_blocks_match_their_formulas(double: bool) -> None:
    block: Any = shaken(DoubleBlock(SMALL) if double else SingleBlock(SMALL))
    flux = Flux(SMALL)
    places = torch.cat((torch.zeros(3, 3), torch.tensor([[0, r, c] for r in range(2) for c in range(4)])))
    frequencies = [torch.tensor([10_000 ** (-2 * i / axis) for i in range(axis // 2)]).double() for axis in SMALL.axes]
    angles = torch.cat([places[:, axis, None].double() * own for axis, own in enumerate(frequencies)], -1)
    text, image, told = torch.randn(2, 3, 32), torch.randn(2, 8, 32), torch.randn(2, 32)
    weights = {name: value.detach().double() for name, value in block.named_parameters()}
    if double:
        got = dict(zip(("text", "image"), block(text, image, told, flux.rotation(places)), strict=True))
        inputs = {"text": text.double(), "image": image.double()}
    else:
        got = {"": block(torch.cat((text, image), 1), told, flux.rotation(places))}
        inputs = {"": torch.cat((text, image), 1).double()}
    expected = by_formulas(weights, inputs, told.double(), angles, double)
    for name, value in got.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("guidance", [True, False])
def test_a_folder_goes_to_diffusers_and_back(guidance: bool, tmp_path: Path) -> None:
    ours = shaken(Flux(replace(SMALL, guidance=guidance)))
    to_hf(ours, tmp_path / "flux", max_shard_size="40KB")
    again = from_hf(tmp_path / "flux")
    assert again.config == ours.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: its Flux is not compared with")
    theirs, report = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "flux", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    image, places = to_tokens(torch.randn(2, 2, 4, 6))
    conditions = Conditions(torch.randn(2, 3, 12), torch.randn(2, 10), torch.tensor([3.5, 1.0]) if guidance else None)
    times = torch.tensor([0.3, 0.9])
    expected = theirs(
        image, conditions.text, conditions.summary, times, places, torch.zeros(3, 3), conditions.guidance
    ).sample  # fmt: skip
    torch.testing.assert_close(
        ours(image, places, times, conditions), expected, rtol=1e-5, atol=1e-5 * expected.std().item()
    )


def test_tokens_are_squares_of_latents() -> None:
    latents = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).float()
    tokens, places = to_tokens(latents)
    assert tokens.shape == (2, 6, 12)
    assert places.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert tokens[1, 4].tolist() == latents[1, :, 2:4, 2:4].flatten().tolist()
    assert torch.equal(to_latents(tokens, 4, 6), latents)
    with pytest.raises(ValueError, match="5 x 6 do not divide"):
        to_tokens(torch.zeros(1, 3, 5, 6))


def test_times_and_their_shift() -> None:
    assert schedule(4, 256, shifted=False) == [1, 0.75, 0.5, 0.25, 0]
    shifted = schedule(4, 4096)
    assert shifted[0] == pytest.approx(1, abs=1e-12)
    assert shifted[-1] == 0
    assert shifted[2] == pytest.approx(math.exp(1.15) / (math.exp(1.15) + 1))
    assert schedule(4, 256)[2] == pytest.approx(math.exp(0.5) / (math.exp(0.5) + 1))


def test_a_straight_flow_is_followed_exactly() -> None:
    """To a model that knows the image, every velocity is (x - image) / time, and Euler's steps lead there."""
    image = torch.randn(2, 6, 8)
    told = []

    def knows(x: Tensor, places: Tensor, times: Tensor, conditions: Any) -> Tensor:
        told.append(times[0].item())
        return (x - image) / times[:, None, None]

    found = sample(knows, torch.randn(2, 6, 8), torch.zeros(6, 3), None, steps=5)  # type: ignore[arg-type]
    torch.testing.assert_close(found, image, rtol=0, atol=1e-5)
    assert told == pytest.approx(schedule(5, 6)[:-1])

    def by_kind(x: Tensor, places: Tensor, times: Tensor, kind: Any) -> Tensor:
        return torch.full_like(x, kind)

    guided = sample(by_kind, torch.zeros(1, 2, 2), torch.zeros(2, 3), 3.0, steps=3, without=1.0, strength=2.5)  # type: ignore[arg-type]
    torch.testing.assert_close(guided, torch.full((1, 2, 2), -(1 + 2.5 * 2)))


@pytest.mark.slow
def test_pictures_of_two_kinds_are_learned() -> None:
    """Kind 0 is light at the left, kind 1 at the top; what is sampled looks like the kind that was asked for."""
    config = FluxConfig(
        in_channels=16, text_dim=16, summary_dim=8, dim=64, heads=2, hidden=256, double_layers=1, single_layers=1, axes=(4, 14, 14)
    )  # fmt: skip
    model = Flux(config)
    initialize(model, seed=0)
    random = torch.Generator().manual_seed(0)
    kinds = torch.randn(2, 3, 16, generator=random), torch.randn(2, 8, generator=random)
    base = torch.full((2, 4, 4, 4), -1.0)
    base[0, :, :, :2], base[1, :, :2] = 1.0, 1.0

    def conditions(kind: Tensor) -> Conditions:
        return Conditions(kinds[0][kind], kinds[1][kind])

    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0)
    losses = []
    for _ in range(150):
        kind = torch.randint(0, 2, (32,), generator=random)
        tokens, places = to_tokens(base[kind] + torch.randn(32, 4, 4, 4, generator=random) * 0.1)
        loss = flow_loss(model, tokens, places, conditions(kind), random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.0, rel=0.1)  # a model that says 0 misses noise and image
    assert sum(losses[-10:]) / 10 < 0.2
    kind = torch.tensor([0, 1] * 8)
    found = to_latents(sample(model, torch.randn(16, 4, 16, generator=random), places, conditions(kind), 12), 4, 4)
    assert (found - base[kind]).abs().mean((1, 2, 3)).max() < 0.3


def test_published_sizes_match_and_invalid_configurations_are_refused() -> None:
    with torch.device("meta"):
        dev, schnell = Flux(FLUX_SIZES["dev"]), Flux(FLUX_SIZES["schnell"])
    assert sum(p.numel() for p in dev.parameters()) == 11_901_408_320
    assert sum(p.numel() for p in schnell.parameters()) == 11_891_178_560
    with pytest.raises(ValueError, match="sum up to a head's width, 16"):
        FluxConfig(dim=32, heads=2, axes=(4, 4, 4))
    with pytest.raises(ValueError, match=r"guidance is (required|not taken) by this model"):
        conditions = Conditions(torch.randn(1, 3, 12), torch.randn(1, 10), guidance=torch.tensor([3.5]))
        Flux(SMALL)(torch.randn(1, 2, 8), torch.zeros(2, 3), torch.tensor([0.5]), conditions)
