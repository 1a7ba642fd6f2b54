"""Compute class activation maps of a network (HiResCAM, Draelos and Carin 2020).

``arclight predict --heatmap`` calls `heat_map` for each photo and draws it by `heated`. It needs gradients, so it takes modules, not
programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from arclight.fabric.extras import require
from arclight.fabric.modules import keeping_modes
from arclight.vision.data.images import Image
from arclight.vision.models.heads import ClassifyHead
from arclight.vision.models.yolov5 import Yolo
from arclight.vision.tasks.module import VisionModule

cv2 = require("cv2", extra="vision")

SURE = 1e-6
"""Scores are clamped to [SURE, 1 - SURE] before their logits are taken, which keeps these finite."""


def heat_map(module: VisionModule, image: Image, conf_threshold: float = 0.25) -> NDArray[np.float32]:
    """Return the activation heat (H, W) in [0, 1] of each pixel of an RGB uint8 photo.

    It is how much a pixel contributes to what the network finds: of detectors all scores from ``conf_threshold`` on, before suppression; of
    classifiers the likeliest class. The heat is the gradient of their logits times the activations of `deep_layer`, summed over
    channels, where that is positive, and divided by its largest value; all 0 if nothing is found. It is as coarse as that layer's cells.
    Weights, their gradients and the module's mode are left as they are.
    """
    module.check_weights()
    batch, context = module.processing.preprocess([image])
    weight = next(module.model.parameters())
    heat = activation_map(module.model, torch.from_numpy(batch).to(weight.device, weight.dtype), conf_threshold)
    square = cv2.resize(heat.float().cpu().numpy(), (batch.shape[3], batch.shape[2]), interpolation=cv2.INTER_LINEAR)
    height, width = image.shape[:2]
    if isinstance(module.model.head, ClassifyHead):  # sees the middle square alone
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        whole = np.zeros((height, width), np.float32)
        whole[top : top + side, left : left + side] = cv2.resize(square, (side, side), interpolation=cv2.INTER_LINEAR)
        return whole
    scale, pad_x, pad_y = context.placements[0]
    inside = square[pad_y : pad_y + max(round(height * scale), 1), pad_x : pad_x + max(round(width * scale), 1)]
    resized: NDArray[np.float32] = cv2.resize(inside, (width, height), interpolation=cv2.INTER_LINEAR)
    return resized


def heated(image: Image, heat: NDArray[np.float32]) -> Image:
    """Return an RGB photo in grey under its heat (H, W), from blue to red."""
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    colours = cv2.cvtColor(cv2.applyColorMap(np.uint8(heat.clip(0, 1) * 255), cv2.COLORMAP_TURBO), cv2.COLOR_BGR2RGB)
    mixed: Image = cv2.addWeighted(grey, 0.5, colours, 0.5, 0)
    return mixed


def deep_layer(model: Yolo) -> int:
    """Return the number of the deepest layer that all maps of the head depend on.

    Only layers before the first upsampling are considered.
    """
    layers = list(model.model)
    stop = next((i for i, layer in enumerate(layers) if isinstance(layer, nn.Upsample)), len(layers) - 1)
    for candidate in range(stop - 1, 0, -1):
        depends = [False] * len(layers)
        for i, source in enumerate(model.sources):
            depends[i] = i == candidate or any(depends[s] for s in source if s >= 0)
        if all(depends[s] for s in model.sources[-1]):
            return candidate
    return 0


def activation_map(model: Yolo, images: Tensor, conf_threshold: float) -> Tensor:
    """Return the activation heat (h, w) of the deep layer for one image (1, 3, H, W).

    The largest value is 1, or all are 0.
    """
    kept: list[Tensor] = []

    def cut(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())  # gradients go no further back than here
        return kept[0]

    handle = model.model[deep_layer(model)].register_forward_hook(cut)
    try:
        with keeping_modes(model), torch.enable_grad():
            answer = _evidence(model, model.eval().raw(images), conf_threshold)
            (gradient,) = torch.autograd.grad(answer, kept[0], allow_unused=True)
    finally:
        handle.remove()
    if gradient is None:
        return torch.zeros(kept[0].shape[-2:], device=images.device)
    heat = (gradient * kept[0].detach())[0].sum(0).clamp(min=0)
    return heat / heat.max().clamp(min=torch.finfo(heat.dtype).tiny)


def _evidence(model: Yolo, raw: Any, conf_threshold: float) -> Tensor:
    """Sum the logits of everything found.

    Logits, unlike scores, do not saturate near 1.
    """
    if isinstance(model.head, ClassifyHead):
        likeliest: Tensor = raw.amax(-1).sum()
        return likeliest
    decoded = model.decode(raw)
    rows = decoded[0] if isinstance(decoded, tuple) else decoded
    scores = rows[0, :, 4] * rows[0, :, 5 : 5 + len(model.names)].amax(-1)
    found = scores[scores >= conf_threshold]
    return torch.logit(found, eps=SURE).sum()
