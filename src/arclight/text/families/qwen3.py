"""Define Qwen3 (Yang et al. 2025): Llama's blocks with normalised queries and keys.

Its feed-forward parts may be mixtures of experts. `zoo` makes it by name, `hf.families` and `hf.moe_families` map published weights.
Parameter names are in checkpoints and in these maps: they stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from arclight._intervals import PositiveInt
from arclight.text.families.llama import Attention, Block, Llama, LlamaConfig
from arclight.text.model.moe import MoE, MoEConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    head_dim: PositiveInt | None = 128
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    max_positions: PositiveInt = 40960
    qk_norm: bool = True


class Qwen3(Llama):
    config: Qwen3Config


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(Qwen3Config):
    moe: MoEConfig


class Qwen3MoE(Llama):
    config: Qwen3MoEConfig

    @staticmethod
    def block(config: Any, number: int) -> nn.Module:
        return Block(config, Attention(config, str(number)), MoE(config.moe, config.dim, config.std, config.std_out))
