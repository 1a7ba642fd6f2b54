"""The YOLOv5 family in one file: its blocks, the network with its decoding, and the table of its members.

Attribute names (``conv``, ``bn``, ``cv1``, ``m``) are those of published YOLOv5 checkpoints: weights keep their names.
Shapes: N images of H x W pixels, A anchor positions, C classes; 3 anchors at each of the strides 8, 16 and 32.
"""

from __future__ import annotations

import copy
import difflib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from arclight import checkpoint as checkpoints
from arclight.vision.models.anchors import ANCHORS_PX

BN_EPS, BN_MOMENTUM = 1e-3, 0.03  # part of the architecture: weights trained with other values give other outputs


class ConvBNAct(nn.Module):
    """Convolution without bias, batch normalisation, SiLU; the output is the input's size over ``stride``."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        padding = (kernel - 1) // 2  # the 6x6 stem, too, then halves the image exactly
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(c_out, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1 then 3x3 convolution at the same width, with a residual connection if ``shortcut``."""

    def __init__(self, channels: int, shortcut: bool = True) -> None:
        super().__init__()
        self.cv1 = ConvBNAct(channels, channels)
        self.cv2 = ConvBNAct(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Cross-stage partial block (Wang et al. 2019): half the channels pass bottlenecks, half go past them."""

    def __init__(self, c_in: int, c_out: int, repeats: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        hidden = c_out // 2
        self.cv1 = ConvBNAct(c_in, hidden)
        self.cv2 = ConvBNAct(c_in, hidden)
        self.cv3 = ConvBNAct(2 * hidden, c_out)
        self.m = nn.Sequential(*(Bottleneck(hidden, shortcut) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), dim=1))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """Spatial pyramid pooling: three 5x5 max pools in a row equal pools of 5, 9 and 13 side by side."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = ConvBNAct(c_in, hidden)
        self.cv2 = ConvBNAct(4 * hidden, c_out)
        self.m = nn.MaxPool2d(kernel, stride=1, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.cv1(x)]
        for _ in range(3):
            levels.append(self.m(levels[-1]))
        return self.cv2(torch.cat(levels, dim=1))  # type: ignore[no-any-return]


class Concat(nn.Module):
    """Join feature maps of the same size along channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.cat(maps, dim=1)


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
    """Copy ``model`` in evaluation mode, every batch normalisation folded into its convolution.

    Outputs are equal up to rounding. ``model`` itself does not change.
    """
    fused = copy.deepcopy(model).eval()
    for module in fused.modules():
        if isinstance(module, ConvBNAct) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            module.bn = nn.Identity()
    return fused


class Layer(NamedTuple):
    """One row of an architecture, before scaling; its place is its number in state-dict names."""

    block: Literal["conv", "c3", "sppf", "upsample", "concat", "detect"]
    channels: int = 0
    kernel: int = 1
    stride: int = 1
    repeats: int = 1
    shortcut: bool = True
    source: tuple[int, ...] = (-1,)
    """Rows whose outputs come in; -1 is the row before."""


class Scale(NamedTuple):
    """Factors of repeats and of channels by which a member of the family scales the table."""

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


def build_model(
    name: str, num_classes: int = 80, *, names: Sequence[str] | None = None, anchors_px: Tensor | None = None
) -> Yolo:
    """Build a freshly initialised detector of the YOLOv5 family.

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
    """Build the modules of ``rows`` at ``scale``, and list the numbers of the rows that each reads."""
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


_LOG = logging.getLogger("arclight")


def load_pretrained(model: Yolo, path: Path | str) -> int:
    """Copy into ``model`` every tensor of ``path`` that fits by name and shape; the number of those.

    A head trained for other classes does not fit and is left as initialised. A checkpoint's averaged weights
    are preferred to its trained ones. Raises CheckpointError when nothing fits or the file cannot be read safely.
    """
    weights = {name.removeprefix("model."): tensor for name, tensor in checkpoints.load_weights(path).items()}
    own = model.state_dict()
    prefix = "" if any(name in own for name in weights) else "model."
    fitting = {
        prefix + name: tensor
        for name, tensor in weights.items()
        if prefix + name in own and own[prefix + name].shape == tensor.shape
    }
    if not fitting:
        raise checkpoints.CheckpointError(
            f"{path}: none of its {len(weights)} tensors fits this model; was it made with another architecture?"
        )
    model.load_state_dict({**own, **{name: tensor.to(own[name].dtype) for name, tensor in fitting.items()}})
    missing = [name for name in own if name not in fitting]
    if missing:
        _LOG.warning(
            "%s: %d of %d tensors fit; the rest start fresh (%s ...)", path, len(fitting), len(own), missing[0]
        )
    return len(fitting)
