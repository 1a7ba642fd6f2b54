"""Define a vision-language model: SigLIP 2's features, a projector, and Llama's trunk.

`zoo` builds it by name. `generate` passes images to it as ``inputs``, users' own steps as ``images``; `LanguageModel` trains it on tokens alone.
Parameter names are in checkpoints and stay.

The projector has two maps (Liu et al. 2023). Each patch takes the place of one placeholder token in the text. Letters
as elsewhere: B batch, T text, D width of the trunk, N patches, W width of the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.parallel.deterministic_init import Constant, Initial, Normal
from arclight.text.families.llama import Llama, LlamaConfig
from arclight.text.model.decoder import BlockContext
from arclight.text.model.layers import LayerNorm
from arclight.text.vision_language.siglip import Images, VisionConfig, VisionEncoder


@dataclass(frozen=True, kw_only=True)
class VisionLlamaConfig(LlamaConfig):
    vision: VisionConfig
    image_token: int
    """Id of the placeholder token, which patches replace."""


class Projector(nn.Module):
    """Two maps from features to the trunk's width, GELU between them (Liu et al. 2023)."""

    def __init__(self, config: VisionLlamaConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.vision.dim, config.norm_eps)
        self.w1 = nn.Linear(config.vision.dim, config.dim)
        self.w2 = nn.Linear(config.dim, config.dim)
        self.initial: dict[str, Initial] = {
            "w1.weight": Normal(config.std), "w2.weight": Normal(config.std), "w1.bias": Constant(0.0), "w2.bias": Constant(0.0)
        }  # fmt: skip

    def forward(self, x_NW: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(self.norm(x_NW))))
        return out


class VisionLlama(Llama):
    """Llama with images, called with ``images=Images(...)``.

    There are as many patches as placeholders, in their order.
    """

    inputs: ClassVar[frozenset[str]] = frozenset({"images"})
    non_trunk: ClassVar[tuple[str, ...]] = ("vision", "projector")
    config: VisionLlamaConfig

    def __init__(self, config: VisionLlamaConfig) -> None:
        super().__init__(config)
        self.vision = VisionEncoder(config.vision)
        self.projector = Projector(config)

    @property
    def placeholders(self) -> tuple[int, ...]:
        return (self.config.image_token,)

    def embed(self, tokens_BT: Tensor, context: BlockContext) -> Tensor:
        h_BTD = super().embed(tokens_BT, context)
        images: Images | None = context.extra.get("images")
        places_BT = tokens_BT == self.config.image_token
        held, brought = int(places_BT.sum()), 0 if images is None else len(images.patches)
        if held != brought:
            raise ValueError(f"the text has {held} places for patches, the images have {brought}")
        if images is None:
            return self._with_no_image(h_BTD)
        seen_ND = self.projector(self.vision(images)).to(h_BTD.dtype)
        return h_BTD.masked_scatter(places_BT[..., None], seen_ND)

    def _with_no_image(self, h_BTD: Tensor) -> Tensor:
        """Return ``h_BTD``, after running the encoder on a blank patch if others may have images.

        The patch's output is multiplied by 0. Other ranks wait for this one in each unit of the encoder that FSDP
        shards, and for the gradients of its parameters.
        """
        from torch.distributed.fsdp import FSDPModule

        shares = any(isinstance(part, FSDPModule) for part in (*self.vision.modules(), *self.projector.modules()))
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        trains = torch.is_grad_enabled() and any(
            p.requires_grad for p in (*self.vision.parameters(), *self.projector.parameters())
        )
        if not (shares or (several and trains)):
            return h_BTD
        config = self.config.vision
        blank = Images(h_BTD.new_zeros(1, config.channels * config.patch**2), [(1, 1)])
        nothing: Tensor = 0 * self.projector(self.vision(blank)).sum().to(h_BTD.dtype)
        return h_BTD + nothing
