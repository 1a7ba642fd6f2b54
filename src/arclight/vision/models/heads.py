"""Define the heads of the YOLO family: from a network's last feature maps to predictions.

Shapes: N images of H x W pixels, A anchor positions, C classes, L levels with k anchors each (3 at strides 8, 16 and 32).

`yolov5` puts one at the end of a network; losses (`loss`, ``tasks.classification``) read its raw output, ``tasks.processing`` its decoded one.
Attribute names are those of published checkpoints, and column orders are in exported programs: both must stay. A new head also needs a
row in `architectures`, ``yolov5._build_layers`` and a task.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from arclight.vision.keypoints import BOX_CORNERS
from arclight.vision.models.blocks import ConvBNAct
from arclight.vision.prob_iou import angle_of

OBJECTS_PER_IMAGE, IMAGE_SIDE = 8, 640  # the prior that the head starts from


class Head(nn.Module, abc.ABC):
    """The last layer of a network."""

    strides: tuple[int, ...]
    """Pixels of the image per cell of each map that comes in, finest first."""

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images in [0, 1] for the first layer."""
        return images

    @abc.abstractmethod
    def decode(self, raw: Any) -> Any:
        """Decode the output to what post-processing reads; at least float32."""

    def drop_training_branch(self) -> None:
        """Remove what only the loss reads."""


class DetectHead(Head):
    """Anchor-based detection head: one 1x1 convolution per level.

    Every anchor of a cell gets x, y, w, h, objectness, class logits and ``extra`` numbers.
    """

    anchors: Tensor

    def __init__(
        self, c_in: Sequence[int], num_classes: int, anchors_px: Tensor, strides: Sequence[int], extra: int = 0
    ) -> None:
        super().__init__()
        self.num_classes, self.extra = num_classes, extra
        self.strides = tuple(strides)
        per_level = anchors_px.shape[1]
        # in grid units, as in published checkpoints
        self.register_buffer("anchors", anchors_px / torch.tensor(strides, dtype=anchors_px.dtype).view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(c, per_level * (5 + num_classes + extra), 1) for c in c_in)
        self._init_priors()

    @torch.no_grad()
    def _init_priors(self) -> None:
        """Initialise biases for rare objects and likely classes, so that the first steps are stable.

        Focal loss paper (Lin et al. 2017), section 3.3. A single class is not trained (the loss has nothing to tell it
        apart from): its score is made constant here, practically 1.
        """
        for conv, stride in zip(self.m, self.strides):
            assert isinstance(conv, nn.Conv2d)
            assert conv.bias is not None
            columns, classes = 5 + self.num_classes + self.extra, slice(5, 5 + self.num_classes)
            bias = conv.bias.view(-1, columns)
            weight = conv.weight.view(-1, columns, conv.in_channels)
            bias[:, 4] = math.log(OBJECTS_PER_IMAGE / (IMAGE_SIDE / stride) ** 2)
            bias[:, classes] = math.log(0.6 / (self.num_classes - 0.99999))
            if self.num_classes == 1:
                weight[:, classes] = 0

    def forward(self, maps: list[Tensor]) -> Any:
        """Return the logits per level, each (N, k, H / stride, W / stride, 5 + C + extra)."""
        return self._levels(maps)

    def _levels(self, maps: list[Tensor]) -> list[Tensor]:
        shape = (-1, 5 + self.num_classes + self.extra)
        logits = [conv(x) for conv, x in zip(self.m, maps)]
        if self.training:  # gradients reach the convolutions in the order of their inputs
            return [level.unflatten(1, shape).permute(0, 1, 3, 4, 2) for level in logits]
        # the same values and strides; runtimes that hold channels last write them once less
        return [level.permute(0, 2, 3, 1).unflatten(3, shape).permute(0, 3, 1, 2, 4) for level in logits]

    def decode(self, raw: Any) -> Any:
        """Decode logits per level to rows; see `decode_levels`."""
        return self.decode_levels(raw)

    def decode_levels(self, raw: list[Tensor]) -> Tensor:
        """Decode logits of all levels to rows (N, A, 5 + C + extra).

        A row is x, y, w, h in input pixels, objectness, class scores in [0, 1], then the extra numbers as `_decode_extra` gives them.
        With s = sigmoid(logit): xy = (2 s - 0.5 + cell) * stride and wh = (2 s)^2 * anchor (YOLOv5), which bounds a box
        to 4 times its anchor and lets its centre leave its cell by half.
        """
        decoded = []
        for level, anchors, stride in zip(raw, self.anchors, self.strides):
            logits = level if level.dtype == torch.float64 else level.float()
            scores = logits[..., : 5 + self.num_classes].sigmoid()
            height, width = level.shape[2:4]
            # made again each time: a stored grid would be state, and would tie the model to one image size
            y = torch.arange(height, device=level.device, dtype=scores.dtype)
            x = torch.arange(width, device=level.device, dtype=scores.dtype)
            cell = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
            xy = (scores[..., 0:2] * 2 - 0.5 + cell) * stride
            wh = (scores[..., 2:4] * 2) ** 2 * (anchors.to(scores.dtype) * stride).view(1, -1, 1, 1, 2)
            parts = [xy, wh, scores[..., 4:]]
            if self.extra:
                parts.append(
                    self._decode_extra(
                        logits[..., 5 + self.num_classes :], torch.cat((xy, wh), -1), cell, anchors, stride
                    )
                )
            decoded.append(torch.cat(parts, dim=-1).flatten(1, 3))
        return torch.cat(decoded, dim=1)

    def _decode_extra(self, logits: Tensor, boxes: Tensor, cell: Tensor, anchors: Tensor, stride: int) -> Tensor:
        """Decode the extra numbers (N, k, H, W, extra) of one level.

        Given are its boxes (N, k, H, W, 4) xywh in pixels, its cells (H, W, 2), and its anchors (k, 2) in cells.
        """
        return logits


class PoseHead(DetectHead):
    """Detection head that gives each box keypoints.

    ``keypoints``: (count, numbers of each), 2 numbers (x, y) or 3 (x, y, how likely it is there). Raises ValueError for
    another count than the one that a kind of head is for.
    """

    fixed_count: ClassVar[int | None] = None
    """Keypoints of each box, for kinds of heads that take no other count."""

    def __init__(
        self,
        c_in: Sequence[int],
        num_classes: int,
        anchors_px: Tensor,
        strides: Sequence[int],
        keypoints: tuple[int, int],
    ) -> None:
        count, dims = keypoints
        if self.fixed_count not in (None, count):
            raise ValueError(f"{type(self).__name__} gives each box {self.fixed_count} keypoints, not {count}")
        super().__init__(c_in, num_classes, anchors_px, strides, extra=count * dims)
        self.keypoints = (count, dims)

    def _decode_extra(self, logits: Tensor, boxes: Tensor, cell: Tensor, anchors: Tensor, stride: int) -> Tensor:
        """Decode keypoints: xy = (cell + 0.5 + logit * anchor) * stride.

        They are relative to the middle of the cell, in sides of the anchor.
        """
        points = logits.unflatten(-1, self.keypoints)
        xy = (points[..., :2] * anchors.to(logits.dtype).view(-1, 1, 1, 1, 2) + (cell + 0.5)[..., None, :]) * stride
        return torch.cat((xy, points[..., 2:].sigmoid()), dim=-1).flatten(-2)


class CornersHead(PoseHead):
    """Detection head that gives each box four corners, relative to the box's own corners."""

    fixed_count = len(BOX_CORNERS)

    @torch.no_grad()
    def _init_priors(self) -> None:
        """Start as a detection head does, with corners that are those of the box."""
        super()._init_priors()
        rows = 5 + self.num_classes + self.extra
        for conv in self.m:
            assert isinstance(conv, nn.Conv2d)
            assert conv.bias is not None
            conv.weight.view(-1, rows, conv.in_channels)[:, -self.extra :] = 0
            conv.bias.view(-1, rows)[:, -self.extra :] = 0

    def _decode_extra(self, logits: Tensor, boxes: Tensor, cell: Tensor, anchors: Tensor, stride: int) -> Tensor:
        """Measure corners from those of the box in its width and height; see `corners_of_boxes`."""
        points = logits.unflatten(-1, self.keypoints)
        return torch.cat((corners_of_boxes(points[..., :2], boxes), points[..., 2:].sigmoid()), dim=-1).flatten(-2)


def corners_of_boxes(logits: Tensor, boxes: Tensor) -> Tensor:
    """Decode corners (..., 4, 2) from logits of that shape and boxes (..., 4) xywh.

    xy = centre + (own corner + logit) * size.
    """
    start = torch.tensor(BOX_CORNERS, device=logits.device, dtype=logits.dtype)
    return boxes[..., None, :2] + (start + logits) * boxes[..., None, 2:]


class Prototypes(nn.Module):
    """Mask prototypes, which each object mixes: (N, C_in, H, W) to (N, masks, 2 H, 2 W)."""

    def __init__(self, c_in: int, hidden: int, masks: int) -> None:
        super().__init__()
        self.cv1 = ConvBNAct(c_in, hidden, 3)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.cv2 = ConvBNAct(hidden, hidden, 3)
        self.cv3 = ConvBNAct(hidden, masks)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(self.cv2(self.upsample(self.cv1(x))))  # type: ignore[no-any-return]


class SegmentHead(DetectHead):
    """Detection head that gives each box mask coefficients (YOLACT, Bolya et al. 2019).

    The mask prototypes that they mix are made of the finest map.
    """

    def __init__(
        self,
        c_in: Sequence[int],
        num_classes: int,
        anchors_px: Tensor,
        strides: Sequence[int],
        masks: int,
        hidden: int,
    ) -> None:
        super().__init__(c_in, num_classes, anchors_px, strides, extra=masks)
        self.proto = Prototypes(c_in[0], hidden, masks)

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return logits per level, and mask prototypes at half the finest stride.

        With a finest stride of 8 these are (N, masks, H / 4, W / 4).
        """
        return self._levels(maps), self.proto(maps[0])

    def decode(self, raw: tuple[list[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Decode to rows (N, A, 5 + C + masks), and return the prototypes; at least float32."""
        levels, prototypes = raw
        return self.decode_levels(levels), prototypes if prototypes.dtype == torch.float64 else prototypes.float()


class OrientedHead(DetectHead):
    """Detection head that gives each box an angle, in (-pi / 4, 3 pi / 4) radians.

    x, y, w, h are of the box before it is rotated.
    """

    def __init__(self, c_in: Sequence[int], num_classes: int, anchors_px: Tensor, strides: Sequence[int]) -> None:
        super().__init__(c_in, num_classes, anchors_px, strides, extra=1)
        with torch.no_grad():
            for conv in self.m:
                assert isinstance(conv, nn.Conv2d)
                assert conv.bias is not None
                conv.bias.view(-1, 6 + num_classes)[:, -1] = math.log(1 / 3)  # the angle 0

    def _decode_extra(self, logits: Tensor, boxes: Tensor, cell: Tensor, anchors: Tensor, stride: int) -> Tensor:
        return angle_of(logits)


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ClassifyHead(Head):
    """Classification head: 1x1 convolution to 1,280 channels, global average pool, linear layer."""

    mean: Tensor
    std: Tensor

    def __init__(self, c_in: int, num_classes: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.strides = (stride,)
        self.conv = ConvBNAct(c_in, 1280)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(1280, num_classes)
        for name, values in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images by the mean and deviation of ImageNet, as published weights expect."""
        return (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return class logits (N, C)."""
        return self.linear(self.drop(self.pool(self.conv(maps[0])).flatten(1)))  # type: ignore[no-any-return]

    def decode(self, raw: Tensor) -> Tensor:
        """Return class probabilities (N, C), which add up to 1; at least float32."""
        return (raw if raw.dtype == torch.float64 else raw.float()).softmax(dim=-1)
