"""Define DeepSeek-V2 and V3 (Liu et al. 2024): latent attention, experts in groups.

`zoo` makes them by name, `hf.moe_families` maps V3's published weights. Parameter names are in checkpoints and in that map, and fields of
`DeepSeekConfig` are recipe keys: they stay. Beside the dimensions of `layers`: R width of a latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from arclight._intervals import NonNegativeInt, PositiveInt
from arclight.parallel.deterministic_init import Normal
from arclight.text.families.llama import Block
from arclight.text.model.attention import InnerAttention
from arclight.text.model.decoder import BlockContext, Decoder, DecoderConfig
from arclight.text.model.layers import FeedForward, RMSNorm, RotaryEmbedding, kept_on_device, rope_frequencies
from arclight.text.model.moe import MoE, MoEConfig

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, which does not follow ``norm_eps``."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN: slow rotations are stretched, and attention made sharper (Peng et al. 2023)."""

    factor: float = 40.0
    original_positions: int = 4096
    fast: float = 32.0
    """A rotation with at least so many turns within the original positions stays as it is."""
    slow: float = 1.0
    """A rotation with at most so many turns is slowed down by ``factor``."""
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def frequencies(self, width: int, theta: float) -> Tensor:
        """Return the angles per position (width / 2,)."""
        plain = rope_frequencies(width, theta)
        low, high = (
            width * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.fast, self.slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        slowed = ((torch.arange(width // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return plain * (1 - slowed) + plain / self.factor * slowed

    def temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    @property
    def rotation_factor(self) -> float:
        """Return the factor of cosines and sines of the rotary embedding."""
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature(1.0)


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(DecoderConfig):
    hidden: PositiveInt
    """Width of the feed-forward part of dense layers."""
    dense_layers: NonNegativeInt
    """First layers that have no experts."""
    moe: MoEConfig
    q_lora_rank: int | None
    """Width of the latent that queries are made from; None: they are made from the hidden states."""
    kv_lora_rank: PositiveInt = 512
    """Width of the latent that keys and values are made from."""
    qk_nope_head_dim: int = 128
    """Width of the part of a head's queries and keys without rotary embeddings."""
    qk_rope_head_dim: int = 64
    """Width of the part with rotary embeddings; its keys are the same for all heads."""
    v_head_dim: int = 128
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    norm_eps: float = 1e-6

    @property
    def attention_width(self) -> float:
        """Width of a head, as the mean of its keys' and its values'."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim) / 2

    @property
    def softmax_scale(self) -> float:
        scale = 1 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= self.yarn.temperature(self.yarn.mscale_all_dim) ** 2
        return scale


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024).

    The cache holds latents and turned keys, kv_lora_rank + qk_rope_head_dim numbers per token; keys and values are made from them again.
    """

    sharding: ClassVar[dict[str, str]] = {
        "": "gather", "wq": "column", "wq_a": "shared", "q_norm": "shared", "wq_b": "column",
        "wkv_a": "shared", "kv_norm": "shared", "wkv_b": "column", "wo": "row",
    }  # fmt: skip

    def __init__(self, config: DeepSeekConfig, layer: str) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        width, rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.q_lora_rank
        self.wq = nn.Linear(config.dim, config.heads * width, bias=False) if rank is None else None
        self.wq_a = nn.Linear(config.dim, rank, bias=False) if rank is not None else None
        self.q_norm = RMSNorm(rank, _LATENT_EPS) if rank is not None else None
        self.wq_b = nn.Linear(rank, config.heads * width, bias=False) if rank is not None else None
        self.wkv_a = nn.Linear(config.dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_lora_rank, _LATENT_EPS)
        self.wkv_b = nn.Linear(
            config.kv_lora_rank, config.heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.wo = nn.Linear(config.heads * config.v_head_dim, config.dim, bias=False)
        self.inner = InnerAttention(scale=config.softmax_scale)
        made = ("wq",) if rank is None else ("wq_a", "wq_b")
        self.initial = {f"{name}.weight": Normal(config.std) for name in (*made, "wkv_a", "wkv_b")}
        self.initial["wo.weight"] = Normal(config.std_out)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        config, rotation = self.config, context.rotation
        assert rotation is not None
        q_BTHC = self._queries(x_BTD).unflatten(-1, (-1, config.qk_nope_head_dim + config.qk_rope_head_dim))
        q_plain, q_turned = q_BTHC.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        q_BTHC = torch.cat((q_plain, rotation.apply_interleaved(q_turned)), dim=-1)
        latent_BTR, k_turned_BTC = self.wkv_a(x_BTD).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        latent_B1TR = self.kv_norm(latent_BTR)[:, None]
        k_turned_B1TC = rotation.apply_interleaved(k_turned_BTC[:, :, None]).transpose(1, 2)
        if context.cache is not None:
            latent_B1TR, k_turned_B1TC = context.cache.extend(self.layer, latent_B1TR, k_turned_B1TC)
        kv_BHTC = self.wkv_b(latent_B1TR[:, 0]).unflatten(-1, (-1, config.qk_nope_head_dim + config.v_head_dim))
        k_plain, v_BHTC = kv_BHTC.transpose(1, 2).split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k_BHTC = torch.cat((k_plain, k_turned_B1TC.expand(-1, k_plain.shape[1], -1, -1)), dim=-1)
        out_BHTC = self.inner(q_BTHC.transpose(1, 2), k_BHTC, v_BHTC, context.masks["full"])
        out: Tensor = self.wo(out_BHTC.transpose(1, 2).flatten(2))
        return out

    def _queries(self, x_BTD: Tensor) -> Tensor:
        if self.wq is not None:
            whole: Tensor = self.wq(x_BTD)
            return whole
        assert self.wq_a is not None
        assert self.wq_b is not None
        assert self.q_norm is not None
        made: Tensor = self.wq_b(self.q_norm(self.wq_a(x_BTD)))
        return made


class DeepSeek(Decoder):
    config: DeepSeekConfig

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(config, lambda number: self.block(config, number))

    @staticmethod
    def block(config: DeepSeekConfig, number: int) -> nn.Module:
        if number < config.dense_layers:
            feed_forward: nn.Module = FeedForward(config.dim, config.hidden, config.std, config.std_out)
        else:
            feed_forward = MoE(config.moe, config.dim, config.std, config.std_out)
        return Block(config, LatentAttention(config, str(number)), feed_forward)

    def rotation(self, positions: Tensor) -> RotaryEmbedding:
        width, theta, yarn = self.config.qk_rope_head_dim, self.config.rope_theta, self.config.yarn
        make = partial(rope_frequencies if yarn is None else yarn.frequencies, width, theta)
        factor = 1.0 if yarn is None else yarn.rotation_factor
        return RotaryEmbedding.at(positions, kept_on_device((width, theta, yarn), make, positions), factor)
