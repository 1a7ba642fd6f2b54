"""Define FLUX.1's transformer (Black Forest Labs 2024): noisy image tokens to a velocity.

`flow_matching` trains and samples it; `from_hf` reads the published weights by a table in `hf.families`. Parameter names are in checkpoints
and in that table.

Text and image tokens attend to one another, first with weights of their own, then with the same; time and a summary of the text
scale, shift and gate every part. Letters: B batch, N image tokens, L text tokens, S both, D width, H heads, C width of a head,
I values of an image token, E width of text features, Q width of the summary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.parallel.deterministic_init import Constant, Initial, Normal
from arclight.text.families.gpt2 import FeedForward
from arclight.text.model.attention import InnerAttention, Mask
from arclight.text.model.layers import RMSNorm, RotaryEmbedding, kept_on_device, rope_frequencies


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """Sizes; by default those of the published models."""

    in_channels: int = 64
    text_dim: int = 4096
    summary_dim: int = 768
    dim: int = 3072
    heads: int = 24
    hidden: int = 12288
    double_layers: int = 19
    single_layers: int = 38
    axes: tuple[int, ...] = (16, 56, 56)
    """Widths of a head's parts that rotary embeddings turn by place in the sequence, row and column."""
    rope_theta: float = 10_000.0
    guidance: bool = False
    """Whether guidance strength is an input, as in guidance-distilled models (FLUX.1-dev)."""
    norm_eps: float = 1e-6
    std: float = 0.02

    @property
    def std_out(self) -> float:
        return self.std / math.sqrt(2 * (self.double_layers + self.single_layers))

    def __post_init__(self) -> None:
        if sum(self.axes) != self.dim // self.heads or any(axis % 2 for axis in self.axes):
            raise ValueError(f"axes {self.axes} must be even and sum up to a head's width, {self.dim // self.heads}")


@dataclass
class Conditions:
    """Conditions that an image is made from."""

    text: Tensor
    """Features of the text's tokens (B, L, E)."""
    summary: Tensor
    """One vector for the whole text (B, Q)."""
    guidance: Tensor | None = None
    """Guidance strength (B,), for models with this input."""


def _linear(module: nn.Module, names: dict[str, float], biases: bool = True) -> dict[str, Initial]:
    """Initialise linear maps: weights at random, or 0 for a deviation of 0; biases 0."""
    found: dict[str, Initial] = {f"{name}.weight": Normal(std) if std else Constant(0.0) for name, std in names.items()}
    return found | {f"{name}.bias": Constant(0.0) for name in names if module.get_submodule(name).bias is not None}


def waves(times_B: Tensor, width: int) -> Tensor:
    """Embed times: cosines and sines of 1000 * time, (B, width) float32.

    Frequencies go from 1 down to 1 / 10000.
    """
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=times_B.device) / (width // 2))
    angles = 1000 * times_B.float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


class Embedder(nn.Module):
    def __init__(self, width: int, dim: int, std: float) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, dim), nn.Linear(dim, dim)
        self.initial = _linear(self, {"w1": std, "w2": std})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x.to(self.w1.weight.dtype))))
        return out


class Modulation(nn.Module):
    """Shifts, scales and gates (B, 1, D) from the conditions.

    All are 0 at first, so that blocks begin as identity.
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.w = nn.Linear(dim, count * dim)
        self.initial = _linear(self, {"w": 0.0})

    def forward(self, modulation_BD: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.w(F.silu(modulation_BD))[:, None].chunk(self.count, -1)
        return parts


def modulated(x_BTD: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x_BTD, x_BTD.shape[-1:], eps=eps) * (1 + scale) + shift


class Heads(nn.Module):
    """Queries, keys and values (B, T, H, C), the first two normalised head by head."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.width = config.dim // config.heads
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, config.dim) for _ in range(3))
        self.q_norm, self.k_norm = RMSNorm(self.width, config.norm_eps), RMSNorm(self.width, config.norm_eps)
        self.initial = _linear(self, dict.fromkeys(("wq", "wk", "wv"), config.std))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (w(x_BTD).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
        return self.q_norm(q), self.k_norm(k), v


def attend(inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, rotation: RotaryEmbedding) -> Tensor:
    """Attend without a mask: q, k, v (B, S, H, C) to (B, S, D)."""
    q, k = rotation.apply_interleaved(q), rotation.apply_interleaved(k)
    out: Tensor = inner(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), Mask(causal=False))
    return out.transpose(1, 2).flatten(2)


class Stream(nn.Module):
    """Parameters that text or image has of its own in a double block."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.modulation = Modulation(config.dim, 6)
        self.heads = Heads(config)
        self.wo = nn.Linear(config.dim, config.dim)
        self.feed_forward = FeedForward(config)
        self.initial = _linear(self, {"wo": config.std_out})


class DoubleBlock(nn.Module):
    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.text, self.image = Stream(config), Stream(config)
        self.inner = InnerAttention()

    def forward(
        self, text_BLD: Tensor, image_BND: Tensor, modulation_BD: Tensor, rotation: RotaryEmbedding
    ) -> tuple[Tensor, Tensor]:
        streams = ((self.text, text_BLD), (self.image, image_BND))
        modulations = [stream.modulation(modulation_BD) for stream, _ in streams]
        heads = [
            stream.heads(modulated(x, shift, scale, stream.eps))
            for (stream, x), (shift, scale, *_) in zip(streams, modulations, strict=True)
        ]
        q, k, v = (torch.cat(pair, 1) for pair in zip(*heads, strict=True))
        seen = attend(self.inner, q, k, v, rotation).split((text_BLD.shape[1], image_BND.shape[1]), 1)
        out = []
        for (stream, x), (_, _, gate, shift, scale, gate_after), own in zip(streams, modulations, seen, strict=True):
            x = x + gate * stream.wo(own)
            out.append(x + gate_after * stream.feed_forward(modulated(x, shift, scale, stream.eps)))
        return out[0], out[1]


class SingleBlock(nn.Module):
    """Attention and feed-forward part side by side, on text and image as one sequence."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.modulation = Modulation(config.dim, 3)
        self.heads = Heads(config)
        self.inner = InnerAttention()
        self.wo = nn.Linear(config.dim, config.dim)
        self.w1 = nn.Linear(config.dim, config.hidden)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.initial = _linear(self, {"wo": config.std_out, "w1": config.std, "w2": config.std_out})

    def forward(self, x_BSD: Tensor, modulation_BD: Tensor, rotation: RotaryEmbedding) -> Tensor:
        shift, scale, gate = self.modulation(modulation_BD)
        changed = modulated(x_BSD, shift, scale, self.eps)
        q, k, v = self.heads(changed)
        seen = attend(self.inner, q, k, v, rotation)
        out: Tensor = x_BSD + gate * (self.wo(seen) + self.w2(F.gelu(self.w1(changed), approximate="tanh")))
        return out


class Flux(nn.Module):
    """The velocity (B, N, I) with which noisy image tokens move from image to noise."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        self.image_in, self.text_in = nn.Linear(config.in_channels, config.dim), nn.Linear(config.text_dim, config.dim)
        self.time_in = Embedder(256, config.dim, config.std)
        self.summary_in = Embedder(config.summary_dim, config.dim, config.std)
        self.guidance_in = Embedder(256, config.dim, config.std) if config.guidance else None
        self.double_layers = nn.ModuleDict({str(i): DoubleBlock(config) for i in range(config.double_layers)})
        self.layers = nn.ModuleDict({str(i): SingleBlock(config) for i in range(config.single_layers)})
        self.modulation = Modulation(config.dim, 2)
        self.output = nn.Linear(config.dim, config.in_channels)
        self.initial = _linear(self, {"image_in": config.std, "text_in": config.std, "output": 0.0})

    def forward(self, image_BNI: Tensor, places_NA: Tensor, times_B: Tensor, conditions: Conditions) -> Tensor:
        """Return the velocity of each image token.

        places: (N, axes) coordinates of image tokens (text tokens are at 0); times: (B,) from 0, the image, to 1,
        noise.
        """
        modulation_BD = self.time_in(waves(times_B, 256)) + self.summary_in(conditions.summary)
        if (self.guidance_in is None) != (conditions.guidance is None):
            needs = "required" if conditions.guidance is None else "not taken"
            raise ValueError(
                f"conditions.guidance is {needs} by this model, whose configuration has guidance = {self.config.guidance}"
            )
        if self.guidance_in is not None and conditions.guidance is not None:
            modulation_BD = modulation_BD + self.guidance_in(waves(conditions.guidance, 256))
        image_BND, text_BLD = self.image_in(image_BNI), self.text_in(conditions.text)
        length = text_BLD.shape[1]
        rotation = self.rotation(F.pad(places_NA, (0, 0, length, 0)))
        for double in self.double_layers.values():
            text_BLD, image_BND = double(text_BLD, image_BND, modulation_BD, rotation)
        both_BSD = torch.cat((text_BLD, image_BND), 1)
        for single in self.layers.values():
            both_BSD = single(both_BSD, modulation_BD, rotation)
        scale, shift = self.modulation(modulation_BD)
        out: Tensor = self.output(modulated(both_BSD[:, length:], shift, scale, self.config.norm_eps))
        return out

    def rotation(self, places_SA: Tensor) -> RotaryEmbedding:
        """Rotate each axis by its share of a head."""
        theta = self.config.rope_theta
        angles = [
            places_SA[:, axis, None].float()
            * kept_on_device((width, theta, None), partial(rope_frequencies, width, theta), places_SA)
            for axis, width in enumerate(self.config.axes)
        ]
        together = torch.cat(angles, -1)[None]
        return RotaryEmbedding(together.cos(), together.sin())


FLUX_SIZES = {
    "debug": FluxConfig(
        in_channels=16, text_dim=64, summary_dim=32, dim=128, heads=4, hidden=512, double_layers=2, single_layers=3, axes=(4, 14, 14)
    ),
    "schnell": FluxConfig(),
    "dev": FluxConfig(guidance=True),
}  # fmt: skip
