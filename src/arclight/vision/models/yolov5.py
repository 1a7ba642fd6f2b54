"""Build YOLO networks from `architectures`, fuse batch norms, load weights that fit.

Shapes: N images of H x W pixels, C classes, L levels with k anchors each (3 at strides 8, 16 and 32).

``tasks.module`` builds, fuses and loads networks by these; `build_model` and `fuse` are public in ``arclight.vision``. Names in state dicts
must stay: checkpoints and published weights have them.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from arclight import checkpoint as checkpoints
from arclight.vision.models.architectures import Architecture, Layer, find_architecture
from arclight.vision.models.blocks import (
    C3,
    SPP,
    SPPF,
    Activation,
    Bottleneck,
    C3Ghost,
    C3Transformer,
    Concat,
    ConvBNAct,
    GhostConv,
)
from arclight.vision.models.heads import (
    ClassifyHead,
    CornersHead,
    DetectHead,
    Head,
    OrientedHead,
    PoseHead,
    SegmentHead,
)
from arclight.vision.models.one_to_one import OneToOneHead


class Yolo(nn.Module):
    """A network over images (N, 3, H, W) float in [0, 1], sides multiples of the largest stride.

    In training mode the output is ``raw(images)``, in evaluation mode ``decode(raw(images))``; the head says what they are.
    """

    def __init__(self, layers: Sequence[nn.Module], sources: Sequence[tuple[int, ...]], *, names: list[str]) -> None:
        """Build the network from ``layers``, the last of which is a head.

        ``sources[i]``: numbers of the layers that layer i reads, -1 the image.
        """
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.sources = list(sources)
        self._kept = {s for i, source in enumerate(sources) for s in source if s != i - 1}
        self.names = names

    @property
    def head(self) -> Head:
        head = self.model[-1]
        assert isinstance(head, Head)
        return head

    @property
    def stride(self) -> tuple[int, ...]:
        return self.head.strides

    @property
    def anchors(self) -> Tensor:
        """(L, k, 2) width and height of each anchor in units of its level's cells."""
        head = self.head
        if not isinstance(head, DetectHead):
            raise AttributeError(f"a {type(head).__name__} has no anchors")
        return head.anchors

    def forward(self, images: Tensor) -> Any:
        raw = self.raw(images)
        return raw if self.training else self.decode(raw)

    def raw(self, images: Tensor) -> Any:
        """Return the output of the head before it is decoded.

        Raises ValueError for sides that are no multiples of the largest stride.
        """
        height, width, largest = images.shape[-2], images.shape[-1], self.stride[-1]
        if height % largest or width % largest:
            raise ValueError(f"image sides must be multiples of {largest}, they are {height} x {width}: letterbox them")
        kept: dict[int, Tensor] = {}
        x = self.head.normalise(images)
        for i, (layer, source) in enumerate(zip(list(self.model)[:-1], self.sources)):
            inputs = [kept.get(s, x) for s in source]
            x = layer(inputs) if isinstance(layer, Concat) else layer(inputs[0])
            if i in self._kept:
                kept[i] = x
        return self.head([kept.get(s, x) for s in self.sources[-1]])

    def decode(self, raw: Any) -> Any:
        """Decode ``raw`` by the head; at least float32."""
        return self.head.decode(raw)


def fuse(model: Yolo) -> Yolo:
    """Copy ``model`` in evaluation mode, every batch normalisation folded into its convolution.

    The head's training branch is removed, too. Outputs are equal up to rounding. ``model`` itself does not change; both have the same hooks.
    """
    hooks = {
        id(hook): hook
        for module in model.modules()
        for name, those in vars(module).items()
        if name.endswith("_hooks") and isinstance(those, dict)
        for hook in those.values()
    }  # a copy of a bound method would copy what it is bound to
    fused = copy.deepcopy(model, hooks).eval()
    for module in fused.modules():
        if isinstance(module, ConvBNAct) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            module.bn = nn.Identity()
    fused.head.drop_training_branch()
    return fused


_ACTIVATIONS: dict[str, Activation] = {
    "silu": nn.SiLU, "leaky_relu": partial(nn.LeakyReLU, 0.1), "relu": nn.ReLU, "hardswish": nn.Hardswish, "mish": nn.Mish,
}  # fmt: skip


def build_model(
    name: str,
    num_classes: int = 80,
    *,
    names: Sequence[str] | None = None,
    anchors_px: Tensor | None = None,
    table: str | None = None,
    keypoints: Sequence[int] | None = None,
) -> Yolo:
    """Build a freshly initialised network.

    name: a key of `architectures.ARCHITECTURES` (yolov5n to yolov5x, yolov5n6 to yolov5x6 and variants, yolov5n-seg,
    yolov5n-pose, yolov5n-corners, yolov5n-obb, yolov5n-cls), or a .yaml file of YOLOv5's form. names: one per class; their numbers if
    not given. anchors_px: widths and heights in pixels, small to large (``anchors.fit_anchors``), as many for each level, (K, 2) or
    (levels, k, 2); the architecture's if not given. table: the text of that .yaml file, if it was read already. keypoints:
    (count, numbers of each) of a pose or corners head; (17, 3) and (4, 3) if not given. Raises ValueError for
    an unknown name, for fewer than one class, for names that do not match ``num_classes`` and for anchors that do not divide by levels.
    """
    architecture = find_architecture(name, table)
    keypoints = keypoints or ((4, 3) if architecture.head == "corners" else (17, 3))
    if num_classes < 1:
        raise ValueError(f"a model needs at least one class, num_classes is {num_classes}")
    names = [str(i) for i in range(num_classes)] if names is None else list(names)
    if len(names) != num_classes:
        raise ValueError(f"num_classes is {num_classes}, but {len(names)} names are given: {names}")
    if not architecture.has_anchors:
        if anchors_px is not None:
            raise ValueError(f"{name} has no anchors: leave anchors_px out")
        return Yolo(*_build_layers(architecture, num_classes, torch.empty(0), keypoints), names=names)
    anchors = torch.tensor(architecture.anchors_px, dtype=torch.float32) if anchors_px is None else anchors_px.float()
    levels = architecture.levels
    if anchors.ndim not in (2, 3) or anchors.shape[-1] != 2 or not anchors.numel() or anchors.numel() % (2 * levels):
        raise ValueError(
            f"anchors_px must be (K, 2), K a multiple of {levels}, or ({levels}, k, 2), its shape is {tuple(anchors.shape)}"
        )
    layers, sources = _build_layers(architecture, num_classes, anchors.reshape(levels, -1, 2), keypoints)
    return Yolo(layers, sources, names=names)


def _build_layers(
    architecture: Architecture, num_classes: int, anchors_px: Tensor, keypoints: Sequence[int]
) -> tuple[list[nn.Module], list[tuple[int, ...]]]:
    """Build the modules of an architecture's rows, and list the rows that each one reads."""
    layers: list[nn.Module] = []
    sources: list[tuple[int, ...]] = []
    channels: list[int] = []
    scale, act = architecture.scale, _ACTIVATIONS[architecture.activation]
    for i, row in enumerate(architecture.rows):
        source = tuple(i + s if s < 0 else s for s in row.source)
        c_in = [channels[s] if s >= 0 else 3 for s in source]
        c_out = 8 * math.ceil(row.channels * scale.width / 8)  # a multiple of 8 suits vector units
        module: nn.Module
        match row.block:
            case "detect":
                module = DetectHead(c_in, num_classes, anchors_px, architecture.strides)
            case "one_to_one":
                module = OneToOneHead(c_in, num_classes, architecture.strides, act)
            case "segment":
                module = SegmentHead(c_in, num_classes, anchors_px, architecture.strides, row.masks, c_out)
            case "pose" | "corners":
                kind = PoseHead if row.block == "pose" else CornersHead
                count, dims = keypoints
                module = kind(c_in, num_classes, anchors_px, architecture.strides, (count, dims))
            case "obb":
                module = OrientedHead(c_in, num_classes, anchors_px, architecture.strides)
            case "classify":
                module = ClassifyHead(c_in[0], num_classes, architecture.strides[0])
            case _:
                module, c_out = _build(row, c_in, c_out, max(round(row.repeats * scale.depth), 1), act)
        layers.append(module)
        sources.append(source)
        channels.append(c_out)
    return layers, sources


def _build(row: Layer, c_in: list[int], c_out: int, repeats: int, act: Activation) -> tuple[nn.Module, int]:
    """Build the module of one row that is no head; also return its output channels."""
    match row.block:
        case "c3":
            return C3(c_in[0], c_out, repeats, row.shortcut, act), c_out
        case "c3_ghost":
            return C3Ghost(c_in[0], c_out, repeats, row.shortcut, act), c_out
        case "c3_transformer":
            return C3Transformer(c_in[0], c_out, repeats, row.shortcut, act), c_out
        case "concat":
            return Concat(), sum(c_in)
        case "upsample":
            return nn.Upsample(scale_factor=2, mode="nearest"), c_in[0]
        case "max_pool":
            return nn.MaxPool2d(row.kernel, row.stride), c_in[0]
        case "pad":
            return nn.ZeroPad2d(row.padding), c_in[0]
    modules: list[nn.Module] = []
    for channels in (c_in[0], *[c_out] * (repeats - 1)):  # these know no repeats: several come in a row
        match row.block:
            case "conv":
                modules.append(ConvBNAct(channels, c_out, row.kernel, row.stride, act=act))
            case "ghost_conv":
                modules.append(GhostConv(channels, c_out, row.kernel, row.stride, act))
            case "bottleneck":
                modules.append(Bottleneck(channels, c_out, row.shortcut, act=act))
            case "spp":
                modules.append(SPP(channels, c_out, row.kernels, act))
            case "sppf":
                modules.append(SPPF(channels, c_out, row.kernel, act))
    return (modules[0] if len(modules) == 1 else nn.Sequential(*modules)), c_out


_LOG = logging.getLogger("arclight")


def load_pretrained(model: Yolo, path: Path | str) -> int:
    """Copy into ``model`` each tensor of ``path`` that fits by name and shape; return how many.

    A head trained for other classes does not fit and is left as initialised. A checkpoint's averaged weights
    are preferred to its trained ones. Raises CheckpointError when nothing fits or the file cannot be read safely.
    """
    weights = checkpoints.load_weights(path)
    own = model.state_dict()
    fitting = fitting_tensors(own, weights)
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


def fitting_tensors(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pick the tensors of ``weights`` that have a name and shape of ``own``, under that name.

    Names may differ in a prefix ``model.``.
    """
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    prefix = "" if any(name in own for name in bare) else "model."
    return {
        prefix + name: tensor
        for name, tensor in bare.items()
        if prefix + name in own and own[prefix + name].shape == tensor.shape
    }
