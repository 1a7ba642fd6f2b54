"""Define SigLIP 2's image encoder at native resolution (Tschannen et al. 2025).

`vision_llama` encodes `Images` by a `VisionEncoder`, and `zoo` has its configurations. Images of any size are packed into one sequence of N
patches; the attention mask keeps each patch within its own image. Parameter names are in checkpoints and in `hf.families`, which maps
them to those of Siglip2VisionModel: they stay. Letters: P values of a patch, W width of the encoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.parallel.deterministic_init import Constant, Initial, Normal
from arclight.text.families.gpt2 import Block
from arclight.text.model.attention import Mask
from arclight.text.model.decoder import BlockContext
from arclight.text.model.layers import LayerNorm, in_compute_type


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of the encoder; by default those of SigLIP 2's base model."""

    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    patch: int = 16
    """Side of a patch, pixels."""
    channels: int = 3
    grid: int = 16
    """Side of the square grid of learned positions, which is interpolated to each image's patches."""
    norm_eps: float = 1e-6
    std: float = 0.02

    @property
    def std_out(self) -> float:
        return self.std / math.sqrt(2 * self.layers)


@dataclass
class Images:
    """Images as one sequence of patches (N, P), row by row, with (height, width) of each.

    Height and width are in patches.
    """

    patches: Tensor
    sizes: list[tuple[int, int]]

    def __post_init__(self) -> None:
        listed = sum(height * width for height, width in self.sizes)
        if listed != len(self.patches):
            raise ValueError(f"images of sizes {self.sizes} have {listed} patches, not {len(self.patches)}")

    @classmethod
    def of(cls, images: list[Tensor], patch: int = 16, most: int | None = 256) -> Images:
        """Split images (3, H, W) in [-1, 1] into patches, each resized to at most ``most``.

        Images are float. An image keeps its proportions, up to whole patches.

        With ``most`` None images keep their size; raises ValueError if it is no multiple of ``patch``.
        """
        parts, sizes = [], []
        for image in images:
            if most is not None:
                height, width = native_size(image.shape[1], image.shape[2], patch, most)
                options = {"mode": "bilinear", "align_corners": False, "antialias": True}
                image = F.interpolate(image[None], (height * patch, width * patch), **options)[0]  # type: ignore[arg-type]
            if image.shape[1] % patch or image.shape[2] % patch:
                raise ValueError(f"an image of {tuple(image.shape[1:])} pixels does not divide into patches of {patch}")
            cut = image.unflatten(2, (-1, patch)).unflatten(1, (-1, patch))  # (C, h, p, w, p)
            sizes.append((cut.shape[1], cut.shape[3]))
            parts.append(cut.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1))
        return cls(torch.cat(parts), sizes)

    @property
    def documents(self) -> Tensor:
        """(1, N): the number of each patch's image."""
        lengths = torch.tensor([height * width for height, width in self.sizes], device=self.patches.device)
        return torch.arange(len(self.sizes), device=lengths.device).repeat_interleave(lengths)[None]


def native_size(height: int, width: int, patch: int, most: int) -> tuple[int, int]:
    """Return rows and columns of patches for an image scaled to at most ``most`` patches.

    They are rounded up.
    """

    def at(scale: float) -> tuple[int, int]:
        return max(1, math.ceil(height * scale / patch)), max(1, math.ceil(width * scale / patch))

    low, high = 0.0, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        rows, columns = at(middle)
        low, high = (middle, high) if rows * columns <= most else (low, middle)
    return at(low)


class VisionEncoder(nn.Module):
    """Patches to features (N, W)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Linear(config.channels * config.patch**2, config.dim)
        self.positions = nn.Embedding(config.grid**2, config.dim)
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in range(config.layers)})
        self.norm = LayerNorm(config.dim, config.norm_eps)
        self.initial: dict[str, Initial] = {
            "patches.weight": Normal(config.std), "patches.bias": Constant(0.0), "positions.weight": Normal(config.std)
        }  # fmt: skip

    def forward(self, images: Images) -> Tensor:
        h_1NW = (self.patches(images.patches) + self.places(images.sizes))[None]
        documents = images.documents
        mask = Mask(causal=False, documents_q=documents, documents_k=documents)
        context = BlockContext({"full": mask}, torch.arange(h_1NW.shape[1], device=h_1NW.device), None)
        for layer in self.layers.values():
            h_1NW = layer(h_1NW, context)
        out: Tensor = self.norm(h_1NW)[0]
        return out

    def places(self, sizes: list[tuple[int, int]]) -> Tensor:
        """Return learned positions interpolated to each image's grid, (N, W)."""
        grid = self.config.grid
        numbers = torch.arange(grid**2, device=self.positions.weight.device)
        table = in_compute_type(self.positions(numbers))  # called, as shares are then whole
        square = table.unflatten(0, (grid, grid)).permute(2, 0, 1)[None].float()
        found: dict[tuple[int, int], Tensor] = {}
        for size in sizes:
            if size not in found:
                fitted = F.interpolate(square, size, mode="bilinear", align_corners=False, antialias=True)[0]
                found[size] = fitted.flatten(1).T.to(table.dtype)
        return torch.cat([found[size] for size in sizes])
