"""Qwen3 (Yang et al. 2025): Llama's blocks with heads of their own width, whose queries and keys are normalised before they turn."""

from __future__ import annotations

from dataclasses import dataclass

from arclight.text.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    head_dim: int | None = 128
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    max_positions: int = 40960
    qk_norm: bool = True


class Qwen3(Llama):
    config: Qwen3Config
