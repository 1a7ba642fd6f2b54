"""Define MPT (MosaicML 2023): ALiBi or rotary embeddings, LayerNorm without bias, GELU.

`zoo` makes it by name, also as ``mpt-mup-`` and, with sigma-MoE's experts (Csordas et al. 2023), as ``sigma-moe-``; `deptoe` builds on its
parts, and `hf.families` maps published weights. Parameter names are in checkpoints and in that map: they stay.

Queries and keys may be clipped or normalised. muP, by which learning rates transfer between widths (Yang et al. 2022), peri-LN, a norm of
embeddings and capped logits, which bound activations, are an option each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arclight._intervals import PositiveFloat, PositiveInt
from arclight.parallel.deterministic_init import Constant, Initial, Normal
from arclight.text.model.attention import InnerAttention
from arclight.text.model.decoder import BlockContext, Decoder, DecoderConfig
from arclight.text.model.layers import RotaryEmbedding, kept_on_device, rope_frequencies, scaled, without_autocast
from arclight.text.model.moe import MoE, MoEConfig


@dataclass(frozen=True, kw_only=True)
class MPTConfig(DecoderConfig):
    max_positions: PositiveInt = 2048
    tied: bool = True
    position: Literal["alibi", "rotary"] = "alibi"
    alibi_max: PositiveInt = 8
    """Exponent of the smallest slope among the heads: it is 2^-alibi_max."""
    rope_theta: float = 10_000.0
    softmax_scale: PositiveFloat | None = None
    """Softmax scale, the factor of the products of queries and keys; None: 1 / sqrt(head width), with muP 1 / head width."""
    head_dim: PositiveInt | None = None
    """Width of a head; None: dim / heads."""
    clip_qkv: PositiveFloat | None = None
    """Elements of queries, keys and values are clipped to this size; None: they are not."""
    qk_norm: bool = False
    """Whether queries and keys are normalised head by head."""
    peri_norm: bool = False
    """Whether what a block adds to the residual stream is normalised too (Kim et al. 2025)."""
    embedding_norm: bool = False
    moe: MoEConfig | None = None
    """Experts in the place of each feed-forward part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mup is not None and self.moe is not None:
            raise ValueError("muP has no factors for routers: leave mup or moe out")
        if (self.head_dim is None and self.dim % self.heads) or (self.position == "rotary" and self.width % 2):
            even = ", of even width each, as rotary embeddings need" if self.position == "rotary" else ""
            raise ValueError(
                f"dim = {self.dim} does not divide among {self.heads} heads{even}: change one of them, or head_dim"
            )

    @property
    def width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def attention_width(self) -> float:
        return self.width

    @property
    def hidden(self) -> int:
        return 4 * self.dim

    @property
    def scaled_queries(self) -> tuple[str, ...]:
        """Empty: config.json of MPT has a field for the attention scale, so none is folded."""
        return ()

    @property
    def query_scale(self) -> float:
        return self.softmax_scale or self.attention_scale(self.width) or 1 / math.sqrt(self.width)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Layer norm without a bias, in the precision of x (bfloat16 under ``bf16-mixed``)."""

    initial: ClassVar[dict[str, Initial]] = {"weight": Constant(1.0)}

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, kind = self.weight.to(x.dtype), x.device.type
        with without_autocast(kind):
            if kind != "cpu":
                return F.layer_norm(x, self.normalized_shape, weight, None, self.eps)
            wide = torch.promote_types(x.dtype, torch.float32)  # half kernels of CPUs sum gradients in their own type
            return F.layer_norm(x.to(wide), self.normalized_shape, weight.to(wide), None, self.eps).to(x.dtype)


def alibi_slopes(heads: int, maximum: int) -> Tensor:
    """Return each head's slope (H,): powers of two from 2^(-maximum / H) to 2^-maximum.

    Of heads that are no power of two, some are of the next.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-torch.arange(1, power + 1, dtype=torch.float32) * maximum / power)
    return slopes if power == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]


class Alibi(nn.Module):
    """Attention with linear biases (Press et al. 2022): slope * (place of key - place of query).

    The queries' part is the same for all keys, so softmax does without it. The keys' part is a product of two more dimensions of queries
    and keys, so that it is there on every back end, in caches, and if heads or sequences are sharded. Places are split at 256, which
    bfloat16 can represent.
    """

    def __init__(self, heads: int, maximum: int) -> None:
        super().__init__()
        self.heads, self.maximum = heads, maximum
        self.part = (0, 1)
        """Which of how many equal parts of the heads are here: tensor parallelism sets it."""

    def forward(self, q_BTHC: Tensor, k_BTHC: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        table = kept_on_device(
            ("alibi", self.heads, self.maximum), lambda: alibi_slopes(self.heads, self.maximum), positions
        )
        part, parts = self.part
        slopes_H = table.chunk(parts)[part].to(q_BTHC.dtype) / scale
        places = positions if positions.ndim == 2 else positions[None]
        coarse = places // 256 * 256
        split_BT12 = torch.stack((coarse, places - coarse), -1)[:, :, None].to(k_BTHC.dtype)
        q_more, k_more = slopes_H[:, None].expand(*q_BTHC.shape[:3], 2), split_BT12.expand(*k_BTHC.shape[:3], 2)
        return torch.cat((q_BTHC, q_more), -1), torch.cat((k_BTHC, k_more), -1)


class Attention(nn.Module):
    sharding: ClassVar[dict[str, str]] = {
        "": "gather", "wq": "column", "wk": "column", "wv": "column", "wo": "row", "q_norm": "shared", "k_norm": "shared",
        "alibi": "heads",
    }  # fmt: skip

    def __init__(
        self, config: MPTConfig, layer: str, values: nn.Module | None = None, output: nn.Module | None = None
    ) -> None:
        """Initialise attention.

        values, output: what is in the place of the linear maps ``wv`` and ``wo``, with first weights of its own.
        """
        super().__init__()
        self.layer, self.width, self.clip, self.scale = layer, config.width, config.clip_qkv, config.query_scale
        inner = config.heads * config.width
        self.wq, self.wk = (nn.Linear(config.dim, inner, bias=False) for _ in range(2))
        self.wv = values if values is not None else nn.Linear(config.dim, inner, bias=False)
        self.wo = output if output is not None else nn.Linear(inner, config.dim, bias=False)
        self.q_norm = LowPrecisionLayerNorm(config.width, config.norm_eps) if config.qk_norm else None
        self.k_norm = LowPrecisionLayerNorm(config.width, config.norm_eps) if config.qk_norm else None
        self.alibi = Alibi(config.heads, config.alibi_max) if config.position == "alibi" else None
        self.inner = InnerAttention(scale=self.scale)
        self.initial = {f"{name}.weight": Normal(config.hidden_std) for name in ("wq", "wk")}
        self.initial |= {"wv.weight": Normal(config.hidden_std)} if values is None else {}
        self.initial |= {"wo.weight": Normal(config.std_out)} if output is None else {}

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        rows_ND = x_BTD.flatten(
            0, 1
        )  # runtimes multiply integers by a matrix that several layers share where inputs are rows
        q_BTHC, k_BTHC, v_BTHC = (
            self._clipped(out).view(*x_BTD.shape[:2], -1, self.width)
            for out in (self.wq(rows_ND), self.wk(rows_ND), self.wv(x_BTD))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTHC = self.q_norm(q_BTHC), self.k_norm(k_BTHC)
        if self.alibi is not None:
            q_BTHC, k_BTHC = self.alibi(q_BTHC, k_BTHC, context.positions, self.scale)
        elif context.rotation is not None:
            q_BTHC, k_BTHC = context.rotation.apply(q_BTHC), context.rotation.of_keys.apply(k_BTHC)
        k_BHTC, v_BHTC = k_BTHC.transpose(1, 2), v_BTHC.transpose(1, 2)
        if context.cache is not None:
            k_BHTC, v_BHTC = context.cache.extend(f"{context.repeat}.{self.layer}", k_BHTC, v_BHTC)
        v_BHTC = F.pad(v_BHTC, (0, k_BHTC.shape[-1] - self.width))  # fast kernels want one width
        out_BHTC = self.inner(q_BTHC.transpose(1, 2), k_BHTC, v_BHTC, context.masks["full"])[..., : self.width]
        return self.combined(out_BHTC.transpose(1, 2).flatten(2), x_BTD)

    def combined(self, heads_BTF: Tensor, x_BTD: Tensor) -> Tensor:
        """Map the heads' results (B, T, H * C) to the output.

        ``x_BTD`` is what attention was given.
        """
        out: Tensor = self.wo(heads_BTF)
        return out

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)


class FeedForward(nn.Module):
    sharding: ClassVar[dict[str, str]] = {"": "gather", "w1": "column", "w2": "row"}

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.initial = {"w1.weight": Normal(config.hidden_std), "w2.weight": Normal(config.std_out)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x_BTD)))
        return out


def feed_forward(config: MPTConfig) -> nn.Module:
    """Return the feed-forward part of a block, or its experts."""
    return FeedForward(config) if config.moe is None else MoE(config.moe, config.dim, config.std, config.std_out)


class Block(nn.Module):
    """Transformer block with pre-norm, or with norms before and after both parts (peri-LN).

    It adds norm(f(norm(x))) to x for attention and feed-forward part; the outer norms with ``peri_norm`` only.
    """

    sharding: ClassVar[dict[str, str]] = {
        "attention_norm": "sequence", "attention_out_norm": "sequence", "feed_forward_norm": "sequence",
        "feed_forward_out_norm": "sequence",
    }  # fmt: skip

    def __init__(self, config: MPTConfig, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()

        def norm() -> LowPrecisionLayerNorm:
            return LowPrecisionLayerNorm(config.dim, config.norm_eps)

        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.attention_out_norm = norm() if config.peri_norm else None
        self.feed_forward_out_norm = norm() if config.peri_norm else None
        self.attention, self.feed_forward = attention, feed_forward
        self.branch_scale = config.branch_scale

    def forward(self, h_BTD: Tensor, context: BlockContext) -> Tensor:
        out_BTD = self.attention(self.attention_norm(h_BTD), context)
        h_BTD = h_BTD + scaled(_normed(self.attention_out_norm, out_BTD), self.branch_scale)
        out_BTD = self.feed_forward(self.feed_forward_norm(h_BTD))
        out: Tensor = h_BTD + scaled(_normed(self.feed_forward_out_norm, out_BTD), self.branch_scale)
        return out


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    normed: Tensor = x if norm is None else norm(x)
    return normed


class MPT(Decoder):
    """MPT; pipeline cuts keep ``embedding_norm`` with ``tok_embeddings``."""

    sharding: ClassVar[dict[str, str]] = Decoder.sharding | {"embedding_norm": "sequence"}
    config: MPTConfig

    def __init__(self, config: MPTConfig) -> None:
        super().__init__(config, lambda number: self.block(config, number))
        self.embedding_norm = LowPrecisionLayerNorm(config.dim, config.norm_eps) if config.embedding_norm else None

    @staticmethod
    def block(config: Any, number: int) -> nn.Module:
        return Block(config, Attention(config, str(number)), feed_forward(config))

    def final_norm(self, config: DecoderConfig) -> nn.Module:
        return LowPrecisionLayerNorm(config.dim, config.norm_eps)

    def embed(self, tokens_BT: Tensor, context: BlockContext) -> Tensor:
        return _normed(self.embedding_norm, super().embed(tokens_BT, context))

    def rotation(self, positions: Tensor) -> RotaryEmbedding | None:
        if self.config.position != "rotary":
            return None
        key = self.config.width, self.config.rope_theta
        return RotaryEmbedding.at(positions, kept_on_device((*key, None), lambda: rope_frequencies(*key), positions))
