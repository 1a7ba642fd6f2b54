"""Define Llama 3 (Grattafiori et al. 2024): grouped-query attention, SwiGLU, RoPE, RMSNorm.

`zoo` makes it by name, `from_hf` from a folder; `qwen3`, `llama4`, `deepseek` and `vision_llama` build on its parts. Token ids (B, T) become
logits (B, T, V). Parameter names are in checkpoints and in `hf.families`: they must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from arclight._intervals import PositiveInt
from arclight.parallel.deterministic_init import Normal
from arclight.text.model.attention import InnerAttention
from arclight.text.model.decoder import BlockContext, Decoder, DecoderConfig
from arclight.text.model.layers import (
    FeedForward,
    RMSNorm,
    RopeScaling,
    RotaryEmbedding,
    kept_on_device,
    rope_frequencies,
    scaled,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    kv_heads: PositiveInt
    hidden: PositiveInt
    """Hidden width of the SwiGLU feed-forward part."""
    head_dim: PositiveInt | None = None
    """Width of a head; None: dim / heads."""
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    """Whether queries and keys are normalised head by head (Qwen3)."""

    @property
    def width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def attention_width(self) -> float:
        return self.width

    @property
    def scaled_queries(self) -> str:
        """Suffix of the parameter into which `mup.folded_factor` folds muP's attention scale."""
        return ".attention.q_norm.weight" if self.qk_norm else ".attention.wq.weight"


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023)."""

    sharding: ClassVar[dict[str, str]] = {
        "": "gather", "wq": "column", "wk": "column", "wv": "column", "wo": "row", "q_norm": "shared", "k_norm": "shared",
    }  # fmt: skip

    def __init__(self, config: LlamaConfig, layer: str) -> None:
        super().__init__()
        self.layer, self.width = layer, config.width
        self.wq = nn.Linear(config.dim, config.heads * config.width, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.width, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.width, bias=False)
        self.wo = nn.Linear(config.heads * config.width, config.dim, bias=False)
        self.q_norm = RMSNorm(config.width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.width, config.norm_eps) if config.qk_norm else None
        self.inner = InnerAttention(scale=config.attention_scale(config.width))
        self.initial = {f"{name}.weight": Normal(config.hidden_std) for name in ("wq", "wk", "wv")}
        self.initial["wo.weight"] = Normal(config.std_out)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        q_BTHC, k_BTKC, v_BTKC = (w(x_BTD).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        if context.rotation is not None:
            q_BTHC, k_BTKC = context.rotation.apply(q_BTHC), context.rotation.apply(k_BTKC)
        k_BKTC, v_BKTC = k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
        if context.cache is not None:
            k_BKTC, v_BKTC = context.cache.extend(self.layer, k_BKTC, v_BKTC)
        out_BHTC = self.inner(q_BTHC.transpose(1, 2), k_BKTC, v_BKTC, context.masks["full"])
        out: Tensor = self.wo(out_BHTC.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    sharding: ClassVar[dict[str, str]] = {"attention_norm": "sequence", "feed_forward_norm": "sequence"}

    def __init__(self, config: DecoderConfig, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = feed_forward
        self.branch_scale = config.branch_scale

    def forward(self, h_BTD: Tensor, context: BlockContext) -> Tensor:
        h_BTD = h_BTD + scaled(self.attention(self.attention_norm(h_BTD), context), self.branch_scale)
        out: Tensor = h_BTD + scaled(self.feed_forward(self.feed_forward_norm(h_BTD)), self.branch_scale)
        return out


class Llama(Decoder):
    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, lambda number: self.block(config, number))

    @staticmethod
    def block(config: Any, number: int) -> nn.Module:
        feed_forward = FeedForward(config.dim, config.hidden, config.hidden_std, config.std_out)
        return Block(config, Attention(config, str(number)), feed_forward)

    def rotation(self, positions: Tensor) -> RotaryEmbedding:
        key = self.config.width, self.config.rope_theta, self.config.rope_scaling
        return RotaryEmbedding.at(positions, kept_on_device(key, lambda: rope_frequencies(*key), positions))
