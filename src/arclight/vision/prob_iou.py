"""Compute the probabilistic IoU of rotated boxes, and non-maximum suppression by it.

A rotated box is xywhr, as in `rotated`: centre x and y, width, height, and the angle in radians, clockwise on the screen.

``models.heads`` and ``models.loss`` (the angle and the loss), ``tasks.processing`` and ``results.obb_metrics`` (NMS) call these. The range of
`angle_of` must stay: trained heads and exported programs depend on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arclight.vision.boxes import MAX_DET, TOP_K, greedy_nms, nms, xyxy_to_xywh


def angle_of(logit: Tensor) -> Tensor:
    """Return the angle in (-pi / 4, 3 pi / 4) radians that a logit stands for."""
    return (logit.sigmoid() - 0.25) * math.pi


def prob_iou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    """Compute the probabilistic IoU (...) of pairs of rotated boxes (..., 5), differentiably.

    It is in [0, 1], up to rounding and ``eps``.
    1 minus the Hellinger distance of Gaussians with the boxes' means and covariances (Llerena et al. 2021, "Gaussian Bounding
    Boxes and Probabilistic Intersection-over-Union for Object Detection", arXiv 2106.06072, equations 4 to 9). Squares have round
    Gaussians: their angle does not change it.
    """
    (ax, ay, aw, ah, _), (bx, by, bw, bh, _) = a.unbind(-1), b.unbind(-1)
    (xx, yy, xy), other = _covariance(a), _covariance(b)
    xx, yy, xy = xx + other[0], yy + other[1], xy + other[2]
    dx, dy = ax - bx, ay - by
    determinant = (xx * yy - xy.square()).clamp(min=eps)
    apart = (xx * dy.square() + yy * dx.square() - 2 * xy * dx * dy) / determinant / 4
    single = (aw * ah * bw * bh / 144).clamp(min=eps)  # root of the product of both determinants
    unlike = (determinant / (4 * single)).clamp(min=eps).log() / 2
    distance = (apart + unlike).clamp(min=eps, max=100.0)
    return 1 - (1 - (-distance).exp() + eps).sqrt()


def _covariance(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return variances of x and y, and covariance, of uniform densities over boxes (..., 5).

    Each of the three is (...).
    """
    along, across = boxes[..., 2].square() / 12, boxes[..., 3].square() / 12
    cos, sin = boxes[..., 4].cos(), boxes[..., 4].sin()
    return along * cos**2 + across * sin**2, along * sin**2 + across * cos**2, (along - across) * cos * sin


@torch.no_grad()
def rotated_nms(
    predictions: Tensor,
    conf_threshold: float,
    iou_threshold: float,
    *,
    max_det: int = MAX_DET,
    top_k: int = TOP_K,
    multi_label: bool = False,
    agnostic: bool = False,
) -> list[Tensor]:
    """Select each image's boxes from decoded predictions (N, A, 5 + C + 1), best first.

    The angle is the last column. Returns N tensors (k, 7), k <= max_det: xywhr, confidence, class. As `boxes.nms`, with
    `prob_iou` for the overlap: the ``top_k`` most confident candidates are considered, and the result depends on the numbers alone.
    """
    candidates = nms(predictions, conf_threshold, None, max_det=top_k, top_k=top_k, multi_label=multi_label, extra=1)
    kept = []
    for rows in candidates:
        boxes, classes = torch.cat((xyxy_to_xywh(rows[:, :4]), rows[:, 6:]), 1), rows[:, 5]
        of_class = torch.zeros_like(classes) if agnostic else classes
        chosen = greedy_nms(boxes, of_class, iou_threshold, max_det, overlap=overlap_rotated)
        kept.append(torch.cat((boxes, rows[:, 4:6]), 1)[chosen])
    return kept


def overlap_rotated(a: Tensor, a_classes: Tensor, b: Tensor, b_classes: Tensor, iou_threshold: float) -> Tensor:
    """Return (n, m) True where rotated boxes of one class overlap by more than the threshold.

    Boxes are (n, 5) and (m, 5), overlap is `prob_iou`.
    """
    return (prob_iou(a[:, None], b[None]) > iou_threshold).logical_and_(a_classes[:, None] == b_classes)
