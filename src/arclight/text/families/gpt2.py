"""Define GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases.

`zoo` makes it by name, `hf.families` maps published weights; `vision_language.siglip` uses `Block`, and `diffusion.flux` uses `FeedForward`.
Parameter names are in checkpoints and in that map: they stay. Embeddings and output share their weights. Queries, keys and values are
three maps where the published weights have one, so that each can be sharded by heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from arclight._intervals import PositiveInt
from arclight.parallel.deterministic_init import Constant, Initial, Normal
from arclight.text.model.attention import InnerAttention
from arclight.text.model.decoder import BlockContext, Decoder, DecoderConfig
from arclight.text.model.layers import LayerNorm, in_compute_type


@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    max_positions: PositiveInt = 1024
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} does not divide among {self.heads} heads: change one of them")

    @property
    def hidden(self) -> int:
        return 4 * self.dim


class BlockConfig(Protocol):
    """Sizes that a block reads of its configuration: GPT-2's, or an image encoder's."""

    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def std(self) -> float: ...
    @property
    def std_out(self) -> float: ...


class Attention(nn.Module):
    sharding: ClassVar[dict[str, str]] = {"": "gather", "wq": "column", "wk": "column", "wv": "column", "wo": "row"}

    def __init__(self, config: BlockConfig, layer: str) -> None:
        super().__init__()
        self.layer, self.width = layer, config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.dim)
        self.wv = nn.Linear(config.dim, config.dim)
        self.wo = nn.Linear(config.dim, config.dim)
        self.inner = InnerAttention()
        self.initial: dict[str, Initial] = {f"{name}.weight": Normal(config.std) for name in ("wq", "wk", "wv")}
        self.initial["wo.weight"] = Normal(config.std_out)
        self.initial |= {f"{name}.bias": Constant(0.0) for name in ("wq", "wk", "wv", "wo")}

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        q_BHTC, k_BHTC, v_BHTC = (
            w(x_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        if context.cache is not None:
            k_BHTC, v_BHTC = context.cache.extend(self.layer, k_BHTC, v_BHTC)
        out_BHTC = self.inner(q_BHTC, k_BHTC, v_BHTC, context.masks["full"])
        out: Tensor = self.wo(out_BHTC.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    sharding: ClassVar[dict[str, str]] = {"": "gather", "w1": "column", "w2": "row"}

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden)
        self.w2 = nn.Linear(config.hidden, config.dim)
        self.initial: dict[str, Initial] = {"w1.weight": Normal(config.std), "w2.weight": Normal(config.std_out)}
        self.initial |= {"w1.bias": Constant(0.0), "w2.bias": Constant(0.0)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x_BTD), approximate="tanh"))
        return out


class Block(nn.Module):
    sharding: ClassVar[dict[str, str]] = {"attention_norm": "sequence", "feed_forward_norm": "sequence"}

    def __init__(self, config: BlockConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, str(number))
        self.feed_forward_norm = LayerNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, h_BTD: Tensor, context: BlockContext) -> Tensor:
        h_BTD = h_BTD + self.attention(self.attention_norm(h_BTD), context)
        out: Tensor = h_BTD + self.feed_forward(self.feed_forward_norm(h_BTD))
        return out


class GPT2(Decoder):
    """GPT-2, whose ``positions`` stay with ``tok_embeddings`` where a pipeline cuts the model."""

    sharding: ClassVar[dict[str, str]] = Decoder.sharding | {"positions": "vocabulary"}
    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config, lambda number: Block(config, number))
        self.positions = nn.Embedding(config.max_positions, config.dim)
        self.initial["positions.weight"] = Normal(config.std / 2)

    def final_norm(self, config: DecoderConfig) -> nn.Module:
        return LayerNorm(config.dim, config.norm_eps)

    def embed(self, tokens_BT: Tensor, context: BlockContext) -> Tensor:
        places = context.positions if context.positions.ndim == 2 else context.positions[None]
        h_BTD: Tensor = super().embed(tokens_BT, context) + in_compute_type(self.positions(places))
        return h_BTD
