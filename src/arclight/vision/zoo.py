"""The YOLOv5 family described as data, and the one function that builds a member of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from arclight.vision.blocks import C3, SPPF, Concat, ConvBNAct
from arclight.vision.yolo import DetectHead, Yolo


class Layer(NamedTuple):
    """One row of an architecture, before scaling; its place in the table is its number in state-dict names."""

    block: Literal["conv", "c3", "sppf", "upsample", "concat", "detect"]
    channels: int = 0
    kernel: int = 1
    stride: int = 1
    repeats: int = 1
    shortcut: bool = True
    source: tuple[int, ...] = (-1,)
    """Rows whose outputs come in; -1 is the row before."""


class Scale(NamedTuple):
    """How a member of the family scales the table: factors of repeats and of channels."""

    depth: float
    width: float


YOLOV5: tuple[Layer, ...] = (
    # backbone: stride 2, 4, 8, 16, 32
    Layer("conv", 64, kernel=6, stride=2),
    Layer("conv", 128, kernel=3, stride=2),
    Layer("c3", 128, repeats=3),
    Layer("conv", 256, kernel=3, stride=2),
    Layer("c3", 256, repeats=6),
    Layer("conv", 512, kernel=3, stride=2),
    Layer("c3", 512, repeats=9),
    Layer("conv", 1024, kernel=3, stride=2),
    Layer("c3", 1024, repeats=3),
    Layer("sppf", 1024),
    # top-down path: back up to stride 8
    Layer("conv", 512),
    Layer("upsample"),
    Layer("concat", source=(-1, 6)),
    Layer("c3", 512, repeats=3, shortcut=False),
    Layer("conv", 256),
    Layer("upsample"),
    Layer("concat", source=(-1, 4)),
    Layer("c3", 256, repeats=3, shortcut=False),
    # bottom-up path: down to stride 32 again
    Layer("conv", 256, kernel=3, stride=2),
    Layer("concat", source=(-1, 14)),
    Layer("c3", 512, repeats=3, shortcut=False),
    Layer("conv", 512, kernel=3, stride=2),
    Layer("concat", source=(-1, 10)),
    Layer("c3", 1024, repeats=3, shortcut=False),
    Layer("detect", source=(17, 20, 23)),
)

SCALES: dict[str, Scale] = {
    "yolov5n": Scale(depth=0.33, width=0.25),
    "yolov5s": Scale(depth=0.33, width=0.50),
    "yolov5m": Scale(depth=0.67, width=0.75),
    "yolov5l": Scale(depth=1.00, width=1.00),
    "yolov5x": Scale(depth=1.33, width=1.25),
}

STRIDES = (8, 16, 32)

ANCHORS_PX: tuple[tuple[tuple[int, int], ...], ...] = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
"""(width, height) in pixels of the three anchors at each stride, as published for COCO at 640 pixels."""


def build_model(
    name: str, num_classes: int = 80, *, names: Sequence[str] | None = None, anchors_px: Tensor | None = None
) -> Yolo:
    """A freshly initialised detector of the YOLOv5 family.

    name: yolov5n, yolov5s, yolov5m, yolov5l or yolov5x. names: one per class; numbers where not given.
    anchors_px: (9, 2) or (3, 3, 2) widths and heights in pixels, small to large (``anchors.fit_anchors``), COCO's where
    not given. Raises ValueError for a name outside the family, for fewer than one class, for names that do not match
    ``num_classes`` and for anchors of another shape.
    """
    if name not in SCALES:
        near = difflib.get_close_matches(str(name), SCALES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name!r} is not a known detector: choose one of {', '.join(SCALES)}{hint}")
    if num_classes < 1:
        raise ValueError(f"a detector needs at least one class, num_classes is {num_classes}")
    names = [str(i) for i in range(num_classes)] if names is None else list(names)
    if len(names) != num_classes:
        raise ValueError(f"num_classes is {num_classes}, but {len(names)} names are given: {names}")
    anchors = torch.tensor(ANCHORS_PX, dtype=torch.float32) if anchors_px is None else anchors_px.float()
    if anchors.numel() != 18:
        raise ValueError(f"anchors_px must be (9, 2) or (3, 3, 2), its shape is {tuple(anchors.shape)}")
    layers, sources = _build_layers(YOLOV5, SCALES[name], num_classes, anchors.reshape(3, 3, 2))
    return Yolo(layers, sources, names=names)


def _build_layers(
    rows: Sequence[Layer], scale: Scale, num_classes: int, anchors_px: Tensor
) -> tuple[list[nn.Module], list[tuple[int, ...]]]:
    """The modules of ``rows`` at ``scale``, and for each the absolute numbers of the rows it reads."""
    layers: list[nn.Module] = []
    sources: list[tuple[int, ...]] = []
    channels: list[int] = []
    for i, row in enumerate(rows):
        source = tuple(i + s if s < 0 else s for s in row.source)
        c_in = [channels[s] if s >= 0 else 3 for s in source]
        c_out = 8 * math.ceil(row.channels * scale.width / 8)  # a multiple of 8 suits vector units
        repeats = max(round(row.repeats * scale.depth), 1)
        module: nn.Module
        match row.block:
            case "conv":
                module = ConvBNAct(c_in[0], c_out, row.kernel, row.stride)
            case "c3":
                module = C3(c_in[0], c_out, repeats, row.shortcut)
            case "sppf":
                module = SPPF(c_in[0], c_out)
            case "upsample":
                module, c_out = nn.Upsample(scale_factor=2, mode="nearest"), c_in[0]
            case "concat":
                module, c_out = Concat(), sum(c_in)
            case "detect":
                module = DetectHead(c_in, num_classes, anchors_px, STRIDES)
        layers.append(module)
        sources.append(source)
        channels.append(c_out)
    return layers, sources
