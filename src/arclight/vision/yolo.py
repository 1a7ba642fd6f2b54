"""The YOLOv5 network: it runs a table of layers, and decodes what its head says into boxes.

Shapes: N images of H x W pixels, A anchor positions, C classes; 3 anchors at each of the strides 8, 16 and 32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from arclight.vision.blocks import Concat, ConvBNAct

OBJECTS_PER_IMAGE, IMAGE_SIDE = 8, 640  # the prior that the head starts from


class DetectHead(nn.Module):
    """One 1x1 convolution per level: for every anchor x, y, w, h, objectness and class logits."""

    anchors: Tensor

    def __init__(self, c_in: Sequence[int], num_classes: int, anchors_px: Tensor, strides: Sequence[int]) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.strides = tuple(strides)
        per_level = anchors_px.shape[1]
        # in grid units, as in published checkpoints
        self.register_buffer("anchors", anchors_px / torch.tensor(strides, dtype=anchors_px.dtype).view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(c, per_level * (5 + num_classes), 1) for c in c_in)
        self._init_priors()

    @torch.no_grad()
    def _init_priors(self) -> None:
        """Start from rare objects and likely classes, so that the first steps are not spent unlearning noise.

        Focal loss paper (Lin et al. 2017), section 3.3. A single class is not trained (the loss has nothing to tell it
        apart from): its score is made constant here, practically 1.
        """
        for conv, stride in zip(self.m, self.strides):
            assert isinstance(conv, nn.Conv2d)
            assert conv.bias is not None
            bias = conv.bias.view(-1, 5 + self.num_classes)
            weight = conv.weight.view(-1, 5 + self.num_classes, conv.in_channels)
            bias[:, 4] = math.log(OBJECTS_PER_IMAGE / (IMAGE_SIDE / stride) ** 2)
            bias[:, 5:] = math.log(0.6 / (self.num_classes - 0.99999))
            if self.num_classes == 1:
                weight[:, 5:] = 0

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        shape = (-1, 5 + self.num_classes)
        return [conv(x).unflatten(1, shape).permute(0, 1, 3, 4, 2) for conv, x in zip(self.m, maps)]


class Yolo(nn.Module):
    """A detector: images (N, 3, H, W) float in [0, 1], sides multiples of 32.

    In training mode the output is ``raw(images)``, in evaluation mode ``decode(raw(images))``.
    """

    def __init__(self, layers: Sequence[nn.Module], sources: Sequence[tuple[int, ...]], *, names: list[str]) -> None:
        """``layers`` end with a DetectHead; ``sources[i]``: numbers of the layers that layer i reads, -1 the image."""
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.sources = list(sources)
        self._kept = {s for i, source in enumerate(sources) for s in source if s != i - 1}
        self.names = names

    @property
    def head(self) -> DetectHead:
        head = self.model[-1]
        assert isinstance(head, DetectHead)
        return head

    @property
    def stride(self) -> tuple[int, ...]:
        return self.head.strides

    @property
    def anchors(self) -> Tensor:
        """(3, 3, 2) width and height of each anchor in units of its level's cells."""
        return self.head.anchors

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        raw = self.raw(images)
        return raw if self.training else self.decode(raw)

    def raw(self, images: Tensor) -> list[Tensor]:
        """Logits per level, each (N, 3, H / stride, W / stride, 5 + C); ValueError for sides not multiples of 32."""
        height, width, largest = images.shape[-2], images.shape[-1], self.stride[-1]
        if height % largest or width % largest:
            raise ValueError(f"image sides must be multiples of {largest}, they are {height} x {width}: letterbox them")
        kept: dict[int, Tensor] = {}
        x = images
        for i, (layer, source) in enumerate(zip(list(self.model)[:-1], self.sources)):
            inputs = [kept.get(s, x) for s in source]
            x = layer(inputs) if isinstance(layer, Concat) else layer(inputs[0])
            if i in self._kept:
                kept[i] = x
        levels: list[Tensor] = self.head([kept.get(s, x) for s in self.sources[-1]])
        return levels

    def decode(self, raw: list[Tensor]) -> Tensor:
        """(N, A, 5 + C): x, y, w, h in input pixels, objectness, class scores in [0, 1]; at least float32.

        With s = sigmoid(logit): xy = (2 s - 0.5 + cell) * stride and wh = (2 s)^2 * anchor (YOLOv5), which bounds a
        box to 4 times its anchor and lets its centre leave its cell by half.
        """
        decoded = []
        for level, anchors, stride in zip(raw, self.anchors, self.stride):
            scores = (level if level.dtype == torch.float64 else level.float()).sigmoid()
            height, width = level.shape[2:4]
            # made anew each time: a stored grid would be state, and would tie the model to one image size
            y = torch.arange(height, device=level.device, dtype=scores.dtype)
            x = torch.arange(width, device=level.device, dtype=scores.dtype)
            cell = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
            xy = (scores[..., 0:2] * 2 - 0.5 + cell) * stride
            wh = (scores[..., 2:4] * 2) ** 2 * (anchors.to(scores.dtype) * stride).view(1, -1, 1, 1, 2)
            decoded.append(torch.cat((xy, wh, scores[..., 4:]), dim=-1).flatten(1, 3))
        return torch.cat(decoded, dim=1)


def fuse(model: Yolo) -> Yolo:
    """A copy of ``model`` in evaluation mode with every batch normalisation folded into its convolution.

    Outputs are equal up to rounding. ``model`` itself does not change.
    """
    fused = copy.deepcopy(model).eval()
    for module in fused.modules():
        if isinstance(module, ConvBNAct) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            module.bn = nn.Identity()
    return fused
