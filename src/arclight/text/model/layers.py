"""Define the layers that language models share: norms, rotary embedding, feed-forward.

Families take from it what they need, and so do `moe`, ``diffusion`` and ``vision_language``. Parameter names are in checkpoints and in the
tables of ``text.hf``; tests compare logits with those of transformers.

Names of tensors end in their dimensions: B batch, T sequence, D model width, H heads, K key and value heads, C head width,
F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.parallel.deterministic_init import Constant, Initial, Normal


def in_compute_type(x: Tensor) -> Tensor:
    """Return ``x`` in bfloat16 where autocast computes in that.

    FSDP gathers weights in bfloat16 then, so that embeddings and with them the residual stream have it; one device must not
    compute with other numbers. (In float16, which sums overflow, weights are gathered as they are.)
    """
    kind = x.device.type
    if kind == "meta" or x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):  # which meta does not know
        return x
    return x.to(torch.bfloat16) if torch.get_autocast_dtype(kind) == torch.bfloat16 else x


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context without autocast, for captured graphs a null context if possible.

    Captured graphs know no such context, and need none if nothing would be cast.
    """
    active = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if active else nullcontext()


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


class RMSNorm(nn.RMSNorm):
    """RMS norm (Zhang and Sennrich 2019), computed in float32, returned in the type of x."""

    initial: ClassVar[dict[str, Initial]] = {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + (self.eps or 0.0))
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Layer norm (Ba et al. 2016), computed in float32 and given in the type of x."""

    initial: ClassVar[dict[str, Initial]] = {"weight": Constant(1.0), "bias": Constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # half kernels of CPUs sum gradients in their own type
        weight, bias = (parameter.to(x.dtype).to(wide) for parameter in (self.weight, self.bias))
        return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotations (Grattafiori et al. 2024)."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Compute rotary angles per position (width / 2,) float32, stretched by ``scaling``.

    Su et al. 2021.
    Unstretched: theta ** (-2 i / width).
    """
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = ((scaling.original_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


_TABLES: dict[tuple[Any, ...], Tensor] = {}


def kept_on_device(key: tuple[Any, ...], make: Callable[[], Tensor], positions: Tensor) -> Tensor:
    """Return the table of ``make``, copied once to the device of ``positions``.

    It is small, and computed on the host. A copy from pageable memory waits for the device, in each forward and for
    each generated token. Tensors without data and those of inference mode are made again, as no other forward could use
    them.
    """
    place = (*key, positions.device)
    ordinary = type(positions) is Tensor and not positions.is_meta and not torch.compiler.is_compiling()
    if ordinary and place in _TABLES:
        return _TABLES[place]
    table = make().to(positions.device)
    if ordinary and type(table) is Tensor and not table.is_inference():
        _TABLES[place] = table
    return table


@dataclass
class RotaryEmbedding:
    """Cosines and sines (B or 1, T, C / 2) float32 of each token's angles."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> RotaryEmbedding:
        """Compute the rotary embedding at ``positions``: (T,) or (B, T) int.

        factor: multiplies cosine and sine (YaRN's temperature).
        """
        angles = (positions if positions.ndim == 2 else positions[None])[..., None].float() * frequencies
        return cls(angles.cos() * factor, angles.sin() * factor)

    @property
    def of_keys(self) -> RotaryEmbedding:
        """Return the rotation of keys, if it differs from that of queries."""
        return self

    def apply(self, x_BTHC: Tensor) -> Tensor:
        """Rotate pairs (i, i + C / 2), as Hugging Face's weights have them."""
        first, second = x_BTHC.float().chunk(2, dim=-1)
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)

    def apply_interleaved(self, x_BTHC: Tensor) -> Tensor:
        """Rotate pairs (2 i, 2 i + 1), as the original weights of DeepSeek and Llama 4 have them."""
        first, second = x_BTHC.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        return (
            torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x_BTHC.dtype)
        )


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) (Shazeer 2020)."""

    sharding: ClassVar[dict[str, str]] = {"": "gather", "w1": "column", "w3": "column", "w2": "row"}

    def __init__(self, width: int, hidden: int, std: float, std_out: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.initial = {"w1.weight": Normal(std), "w3.weight": Normal(std), "w2.weight": Normal(std_out)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
        return out
