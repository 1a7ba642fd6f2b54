"""Define DEPToE: a group of blocks repeated with shared weights, with experts in both parts.

`zoo` makes it by name, of the sizes at the end of this file, also without repeats and with experts in attention alone as the family
``switch-head-``; there is no table for Hugging Face. Parameter names are in checkpoints, fields of `DEPToEConfig` are recipe keys: they stay.

Experts are in attention (SwitchHead, Csordas et al. 2024) and in feed-forward parts (sigma-MoE, Csordas et al. 2023), which makes it a
mixture-of-experts universal transformer (MoEUT, Csordas et al. 2024). Blocks are MPT's, with its options (peri-LN, normalised queries and
keys, a norm of embeddings). Each run of a block computes with the same tensors, whose gradients autograd sums; a cache holds keys and values
of each run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from arclight.text.families.mpt import MPT, Attention, Block, MPTConfig, feed_forward
from arclight.text.model.decoder import BlockContext
from arclight.text.model.layers import RotaryEmbedding
from arclight.text.model.moe import MoEConfig
from arclight.text.model.switch_head import HeadOutputs, HeadValues, SwitchHeadConfig

XPOS_BASE, XPOS_GAMMA = 512, 0.4
"""xPos's constants: the fastest pair's factor is gamma / (1 + gamma) after 512 positions, with gamma 0.4."""
XPOS_POSITIONS, XPOS_HALF_POSITIONS = 65_536, 4096
"""Most positions in float32 and bfloat16; and in float16, where factors up to 150 leave room for elements up to 400."""


@dataclass(frozen=True, kw_only=True)
class DEPToEConfig(MPTConfig):
    group: int | None = None
    """Blocks with weights of their own, which run ``layers / group`` times; None: all."""
    switch_head: SwitchHeadConfig | None = None
    """Experts of attention's values and outputs; None: attention is MPT's."""
    interleaved: bool = False
    """Whether rotary embeddings turn pairs (2 i, 2 i + 1) instead of (i, i + width / 2)."""
    xpos: bool = False
    """Whether products of queries and keys decay with their distance (Sun et al. 2023)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None and (self.group < 1 or self.layers % self.group):
            raise ValueError(f"layers = {self.layers} is not a multiple of group = {self.group}: change one of them")
        for name in ("interleaved", "xpos"):
            if getattr(self, name) and self.position != "rotary":
                raise ValueError(f'{name} is of rotary embeddings, and position = "{self.position}": set "rotary"')
        if self.xpos and self.max_positions > XPOS_POSITIONS:
            raise ValueError(
                f"xpos reaches {XPOS_POSITIONS} positions, beyond which its factors leave float32's range: "
                f"max_positions = {self.max_positions}"
            )

    @property
    def repeats(self) -> int:
        return self.layers // (self.group or self.layers)


@dataclass
class Rotation(RotaryEmbedding):
    """Rotary embeddings of interleaved pairs, or with keys turned by other factors than queries."""

    interleaved: bool = False
    keys: RotaryEmbedding | None = None
    positions: int = 0
    """Positions of the model, which xPos needs; 0 for plain rotations."""

    @property
    def of_keys(self) -> RotaryEmbedding:
        return self if self.keys is None else self.keys

    def apply(self, x_BTHC: Tensor) -> Tensor:
        if x_BTHC.dtype == torch.float16 and self.positions > XPOS_HALF_POSITIONS:
            raise ValueError(
                f"xpos with max_positions = {self.positions} leaves float16's range, which has room for {XPOS_HALF_POSITIONS}: "
                "compute in bfloat16, or lower max_positions"
            )
        return self.apply_interleaved(x_BTHC) if self.interleaved else super().apply(x_BTHC)


def xpos_decay(positions: Tensor, pairs: int, centre: int) -> Tensor:
    """Return xPos's factors of queries (B or 1, T, pairs): zeta_i^((n - centre) / 512).

    n are ``positions``. Those of keys are their inverses. zeta_i = (i / pairs + 0.4) / 1.4. Products have zeta_i^((n -
    m) / 512), whatever the centre, which keeps both small.
    """
    zeta = (torch.arange(pairs, device=positions.device, dtype=torch.float32) / pairs + XPOS_GAMMA) / (1 + XPOS_GAMMA)
    places = positions if positions.ndim == 2 else positions[None]
    return zeta ** ((places[..., None] - centre).float() / XPOS_BASE)


class SwitchHead(Attention):
    """MPT's attention whose values and outputs are mixtures of experts, head by head."""

    sharding: ClassVar[dict[str, str]] = Attention.sharding | {"wo": "column"}

    def __init__(self, config: DEPToEConfig, layer: str) -> None:
        assert config.switch_head is not None
        sizes, std = (config.switch_head, config.heads, config.dim, config.width), config.std
        super().__init__(config, layer, HeadValues(*sizes, std), HeadOutputs(*sizes, (std, config.std_out)))

    def combined(self, heads_BTF: Tensor, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.wo(heads_BTF, x_BTD)
        return out


class DEPToE(MPT):
    """DEPToE: ``layers`` runs of ``group`` blocks.

    Losses of routers count once for all runs of a block: each run adds its part.
    """

    config: DEPToEConfig

    @staticmethod
    def block(config: Any, number: int) -> nn.Module:
        runs, moe, heads = config.repeats, config.moe, config.switch_head
        if moe is not None:
            moe = replace(moe, entropy_loss=moe.entropy_loss / runs, balance_loss=moe.balance_loss / runs)
        if heads is not None:
            heads = replace(heads, entropy_loss=heads.entropy_loss / runs)
        config = replace(config, moe=moe, switch_head=heads)
        attention = Attention if heads is None else SwitchHead
        return Block(config, attention(config, str(number)), feed_forward(config))

    def run_layers(self, h_BTD: Tensor, context: BlockContext) -> Tensor:
        for repeat in range(self.config.repeats):
            h_BTD = super().run_layers(h_BTD, replace(context, repeat=repeat))
        return h_BTD

    def rotation(self, positions: Tensor) -> RotaryEmbedding | None:
        plain, config = super().rotation(positions), self.config
        if plain is None or not (config.interleaved or config.xpos):
            return plain
        cos, sin = plain.cos, plain.sin
        if not config.xpos:
            return Rotation(cos, sin, config.interleaved)
        decay = xpos_decay(positions, config.width // 2, config.max_positions // 2)
        interleaved, reach = config.interleaved, config.max_positions
        keys = Rotation(cos / decay, sin / decay, interleaved, positions=reach)
        return Rotation(cos * decay, sin * decay, interleaved, keys, reach)


def _sizes(
    dim: int, layers: int, group: int, heads: int, head_dim: int, ff: tuple[int, int], attention: int
) -> DEPToEConfig:
    """Return a configuration of MoEUT.

    ff: experts, and those of a token. attention: experts of a head.
    """
    moe = MoEConfig(
        experts=ff[0], top_k=ff[1], hidden=128, score="sigmoid", activation="relu", entropy_loss=0.01
    )  # fmt: skip
    return DEPToEConfig(
        vocab_size=8000, dim=dim, layers=layers, group=group, heads=heads, head_dim=head_dim, max_positions=1024,
        position="rotary", tied=False, moe=moe, switch_head=SwitchHeadConfig(experts=attention),
    )  # fmt: skip


DEPTOE: dict[str, Any] = {
    "debug": replace(
        _sizes(256, 4, 2, 4, 64, (16, 4), 4), vocab_size=2048, tied=True, max_positions=2048, peri_norm=True
    ),
    "44m": _sizes(412, 16, 2, 4, 82, (155, 12), 8),
    "126m": _sizes(768, 18, 2, 4, 96, (254, 12), 10),
    "244m": _sizes(1024, 18, 2, 4, 128, (387, 16), 10),
    "318m": _sizes(1024, 24, 3, 4, 128, (338, 16), 10),
    "1b": _sizes(1536, 36, 4, 6, 128, (565, 24), 12),
}
"""Sizes of MoEUT's authors, and one for tests."""
SWITCH_HEAD: dict[str, Any] = {
    "debug": DEPToEConfig(
        vocab_size=2048, dim=256, layers=4, heads=4, position="rotary", switch_head=SwitchHeadConfig(experts=4)
    )
}
