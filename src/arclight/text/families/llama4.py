"""Define Llama 4's text model (Meta 2025): chunked attention, every fourth layer full.

Full layers have no rotary embeddings. In layers with experts each token uses ``top_k`` of many and a shared one.

`zoo` has the published sizes, `hf.moe_families` maps the hub's tensors. Parameter names are in checkpoints and in that map; tests compare
logits with those of transformers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from arclight._intervals import NonNegativeFloat, PositiveFloat
from arclight.text.families.llama import Attention, Block, Llama, LlamaConfig
from arclight.text.model.attention import Mask
from arclight.text.model.decoder import BlockContext
from arclight.text.model.layers import FeedForward
from arclight.text.model.moe import MoE, MoEConfig


@dataclass(frozen=True, kw_only=True)
class Llama4Config(LlamaConfig):
    moe: MoEConfig
    moe_every: int = 1
    """A layer has experts if its number plus one divides by this; the others have a feed-forward part of ``hidden``."""
    chunk: int | None = 8192
    """Length of the chunks that layers with rotary embeddings (RoPE layers) attend within; None: they attend to all."""
    no_rope_layer_interval: int = 4
    """A layer attends to all, without rotary embeddings (NoPE), if this divides its number plus one."""
    qk_l2_norm: bool = True
    """Whether rotated queries and keys are divided by their root mean square."""
    temperature: NonNegativeFloat | None = 0.1
    """Rate at which queries of NoPE layers grow with the logarithm of their position; None: they do not."""
    temperature_floor: PositiveFloat = 8192
    """Length of the steps of positions by which they grow; up to the first they stay as they are."""

    def is_rope_layer(self, layer: int) -> bool:
        """Return True for a layer with rotary embeddings, which attends within chunks."""
        return (layer + 1) % self.no_rope_layer_interval != 0

    def keys(self, layer: int, sequence: int) -> int:
        return min(sequence, self.chunk) if self.chunk is not None and self.is_rope_layer(layer) else sequence


class Llama4Attention(Attention):
    def __init__(self, config: Llama4Config, number: int) -> None:
        super().__init__(config, str(number))
        self.config = config
        self.rope = config.is_rope_layer(number)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        q_BTHC, k_BTKC, v_BTKC = (w(x_BTD).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
        if self.rope:
            assert context.rotation is not None
            q_BTHC, k_BTKC = context.rotation.apply_interleaved(q_BTHC), context.rotation.apply_interleaved(k_BTKC)
            if self.config.qk_l2_norm:
                q_BTHC, k_BTKC = self._normalised(q_BTHC), self._normalised(k_BTKC)
        elif self.config.temperature is not None:
            q_BTHC = q_BTHC * self._growth(context.positions, self.config.temperature).to(q_BTHC.dtype)
        k_BKTC, v_BKTC = k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
        if context.cache is not None:
            k_BKTC, v_BKTC = context.cache.extend(self.layer, k_BKTC, v_BKTC)
        mask = context.masks["chunk" if self.rope else "full"]
        out: Tensor = self.wo(self.inner(q_BTHC.transpose(1, 2), k_BKTC, v_BKTC, mask).transpose(1, 2).flatten(2))
        return out

    def _normalised(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)).to(x.dtype)

    def _growth(self, positions: Tensor, rate: float) -> Tensor:
        """Return the growth of queries with position (Nakanishi 2025), (B or 1, T, 1, 1).

        It is 1 + rate * log(1 + floor((position + 1) / temperature_floor)).
        """
        steps = ((positions.float() + 1) / self.config.temperature_floor).floor()
        growth = 1 + rate * steps.log1p()
        return (growth if growth.ndim == 2 else growth[None])[:, :, None, None]


class Llama4(Llama):
    config: Llama4Config

    @staticmethod
    def block(config: Any, number: int) -> nn.Module:
        if (number + 1) % config.moe_every:
            feed_forward: nn.Module = FeedForward(config.dim, config.hidden, config.std, config.std_out)
        else:
            feed_forward = MoE(config.moe, config.dim, config.std, config.std_out)
        return Block(config, Llama4Attention(config, number), feed_forward)

    def masks(self, mask: Mask) -> dict[str, Mask]:
        return {"full": mask, "chunk": dataclasses.replace(mask, chunk=self.config.chunk)}
