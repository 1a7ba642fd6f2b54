"""Qwen3 with mixtures of experts (Yang et al. 2025): softmax over 128 experts, 8 chosen, their scores made to sum to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from arclight.text.models.llama import Attention, Block, Llama
from arclight.text.models.moe import MoE, MoEConfig
from arclight.text.models.qwen3 import Qwen3Config


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(Qwen3Config):
    moe: MoEConfig


class Qwen3MoE(Llama):
    config: Qwen3MoEConfig

    @staticmethod
    def block(config: Any, number: int) -> nn.Module:
        return Block(config, Attention(config, str(number)), MoE(config.moe, config.dim, config.std, config.std_out))
