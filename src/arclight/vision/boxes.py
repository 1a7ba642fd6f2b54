"""Convert boxes between formats; compute IoU and non-maximum suppression (NMS).

A box is xyxy (left, top, right, bottom) or xywh (centre x, centre y, width, height), in pixels unless said otherwise.

`nms` is called by ``tasks.processing`` and ``results.metrics``, `greedy_nms` by ``inference.fusion`` and `prob_iou`, `complete_iou` by the
losses, `box_iou` by ``results.analysis``, ``results.metrics`` and ``tracking.assignment``. NMS must keep the same boxes in the same order
for the same numbers; a faster way must give what a plain loop gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

TOP_K = 2000
"""Candidates per image that reach the overlap test by default, best first. More would change mAP by less than 0.001, and cost time."""

MAX_DET = 300
"""Boxes kept per image by default."""


def candidates_for(max_det: int) -> int:
    """Return how many candidates must reach the overlap test to keep up to ``max_det`` boxes.

    In proportion to ``max_det``, at least `TOP_K`: with fewer, the many candidates of the most confident objects of a crowd would
    leave no place for those of the others.
    """
    return max(TOP_K, math.ceil(max_det * TOP_K / MAX_DET))


_CHUNK = 256  # candidates tested together; small enough that their overlap matrix stays in cache
_MANY_CLASSES = 8  # from here on the maximum over classes costs more than reading objectness
_ROUNDS = 8  # rounds of `_greedy` on a CPU before rows are taken one by one; boxes in photos need two to four


def xywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Convert (..., 4) centres and sizes to corners."""
    xy, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((xy - half, xy + half), dim=-1)


def xyxy_to_xywh(boxes: Tensor) -> Tensor:
    """Convert (..., 4) corners to centres and sizes."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat(((low + high) / 2, high - low), dim=-1)


def areas(boxes: Tensor) -> Tensor:
    """Compute the areas (...) of xyxy boxes (..., 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _intersections(a: Tensor, b: Tensor) -> Tensor:
    """Compute the areas (n, m) common to the xyxy boxes a (n, 4) and b (m, 4)."""
    ax1, ay1, ax2, ay2 = a.T.contiguous()[:, :, None]  # contiguous sides run in vector instructions
    bx1, by1, bx2, by2 = b.T.contiguous()
    width = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp_(min=0)
    height = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp_(min=0)
    return width.mul_(height)


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute the IoU (n, m) of the xyxy boxes a (n, 4) and b (m, 4).

    It is 0 if both are empty.
    """
    common = _intersections(a, b)
    union = areas(a)[:, None] + areas(b) - common
    return torch.where(union > 0, common / union, 0.0)


def complete_iou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    """Compute complete IoU (...) of pairs of xywh boxes (..., 4), in (-1.5, 1], differentiable.

    IoU minus the squared distance of the centres over the squared diagonal of the common hull, minus a term for unlike
    aspect ratios (Zheng et al. 2020, "Distance-IoU Loss", equations 10 to 12).
    """
    a_low, a_high = xywh_to_xyxy(a).split(2, dim=-1)
    b_low, b_high = xywh_to_xyxy(b).split(2, dim=-1)
    common = (torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp(min=0).prod(-1)
    iou = common / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - common + eps)
    diagonal = (torch.maximum(a_high, b_high) - torch.minimum(a_low, b_low)).square().sum(-1)
    distance = (a[..., :2] - b[..., :2]).square().sum(-1)
    angles = torch.atan(a[..., 2] / (a[..., 3] + eps)) - torch.atan(b[..., 2] / (b[..., 3] + eps))
    aspect = 4 / math.pi**2 * angles.square()
    with torch.no_grad():
        weight = aspect / (1 - iou + aspect + eps)
    return iou - distance / (diagonal + eps) - weight * aspect


@torch.no_grad()
def nms(
    predictions: Tensor,
    conf_threshold: float = 0.25,
    iou_threshold: float | None = 0.45,
    *,
    max_det: int = MAX_DET,
    top_k: int | None = TOP_K,
    multi_label: bool = False,
    agnostic: bool = False,
    extra: int = 0,
) -> list[Tensor]:
    """Select each image's boxes from decoded predictions (N, A, 5 + C + extra), best first.

    Returns N tensors (k, 6 + extra), k <= max_det: xyxy, confidence = objectness x class score, class, what is extra. Boxes
    suppress only boxes of their class, or with ``agnostic`` those of all, or none with ``iou_threshold`` None, for networks that
    name an object once. ``multi_label`` lets a position name several classes (validation), else it names its best.
    Only the ``top_k`` most confident candidates are considered (None: all). The result depends on the numbers alone,
    never on time or load: equal confidences rank by position, then by class.
    """
    return [
        _nms_image(
            image, conf_threshold, iou_threshold, max_det, top_k, extra, multi_label=multi_label, agnostic=agnostic
        )
        for image in predictions.float()
    ]


def _nms_image(
    prediction: Tensor,
    conf_threshold: float,
    iou_threshold: float | None,
    max_det: int,
    top_k: int | None,
    extra: int,
    *,
    multi_label: bool,
    agnostic: bool,
) -> Tensor:
    end = prediction.shape[1] - extra
    num_classes = end - 5
    objectness = prediction[:, 4]
    likely = objectness > conf_threshold  # class scores are at most 1: the other positions cannot reach the threshold
    if top_k is not None and num_classes >= _MANY_CLASSES and len(prediction) > 2 * top_k:
        # The surest positions' worst confidence bounds what positions of less objectness could reach: most are never examined.
        surest = prediction[objectness.topk(top_k, sorted=False).indices]
        reached = (surest[:, 4] * surest[:, 5:end].amax(dim=1)).nan_to_num(nan=0.0)  # NaN bounds nothing
        likely &= objectness >= reached.min()
    if len(positions := torch.nonzero(likely).squeeze(1)) < len(prediction):
        prediction = prediction[positions]
    best = (prediction[:, 4] * prediction[:, 5:end].amax(dim=1)).nan_to_num(nan=-1.0)  # topk takes NaN for the largest
    # A position outside the first top_k by its best class is preceded by top_k candidates: dropping it changes nothing.
    positions = _ranked(best, conf_threshold, top_k)
    if multi_label:
        floor = (
            best[positions[-1:]] if len(positions) == top_k else None
        )  # top_k scores reach it: lower ones cannot rank
        positions = positions.sort().values  # so that equal confidences rank by position, then by class
        scores = (prediction[positions, 5:end] * prediction[positions, 4:5]).flatten()  # of positions without NaN
        ranked = _ranked(scores, conf_threshold, top_k, floor)
        positions, classes, confidence = positions[ranked // num_classes], ranked % num_classes, scores[ranked]
    else:
        classes, confidence = prediction[positions, 5:end].argmax(dim=1), best[positions]
    boxes = xywh_to_xyxy(prediction[positions, :4])
    if iou_threshold is None:
        kept = torch.arange(min(len(boxes), max_det), device=boxes.device)
    else:
        kept = greedy_nms(boxes, torch.zeros_like(classes) if agnostic else classes, iou_threshold, max_det)
    rows = [boxes[kept], confidence[kept, None], classes[kept, None].to(boxes.dtype)]
    return torch.cat((*rows, prediction[positions[kept], end:]) if extra else rows, dim=1)


def _ranked(scores: Tensor, threshold: float, limit: int | None, floor: Tensor | None = None) -> Tensor:
    """Return the indices of the ``limit`` highest ``scores`` above ``threshold``, in order.

    Equal scores are ordered by index.
    ``floor``: (1,) a score that ``limit`` others reach, if one is known. ``torch.topk`` alone may pick any of equal scores, and
    picks differently on CPU and GPU.
    """
    if floor is not None:
        candidates = torch.nonzero((scores > threshold) & (scores >= floor)).squeeze(1)
    elif limit is not None and limit < scores.numel():
        lowest = scores.topk(limit, sorted=False).values.min()
        candidates = torch.nonzero((scores > threshold) & (scores >= lowest)).squeeze(1)
    else:
        candidates = torch.nonzero(scores > threshold).squeeze(1)
    return candidates[scores[candidates].argsort(descending=True, stable=True)][:limit]


@torch.no_grad()
def greedy_nms(
    boxes: Tensor,
    classes: Tensor,
    iou_threshold: float,
    max_det: int | None = None,
    overlap: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] | None = None,
) -> Tensor:
    """Return the indices of the boxes that greedy NMS keeps, in order, at most ``max_det``.

    boxes: (n, 4) xyxy, most confident first, or rows of any width that ``overlap`` compares; classes: (n,). A box is suppressed if a kept box
    of its class overlaps it by more than ``iou_threshold``. Works through the boxes in chunks and stops once ``max_det`` are found, so that
    the cost grows with boxes kept times boxes seen instead of with boxes seen squared.
    """
    overlap = overlap or _overlap
    kept: list[Tensor] = []
    kept_boxes, kept_classes = boxes[:0], classes[:0]
    for start in range(0, len(boxes), _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, len(boxes)), device=boxes.device)
        if len(kept_boxes):
            free = ~overlap(kept_boxes, kept_classes, boxes[index], classes[index], iou_threshold).any(dim=0)
            index = index[free]
        index = index[_greedy(overlap(boxes[index], classes[index], boxes[index], classes[index], iou_threshold))]
        kept.append(index)
        kept_boxes = torch.cat((kept_boxes, boxes[index]))
        kept_classes = torch.cat((kept_classes, classes[index]))
        if max_det is not None and len(kept_boxes) >= max_det:
            break
    return torch.cat(kept)[:max_det] if kept else torch.arange(0, device=boxes.device)


def _overlap(a: Tensor, a_classes: Tensor, b: Tensor, b_classes: Tensor, iou_threshold: float) -> Tensor:
    """Return (n, m) True where boxes of one class overlap by more than the threshold.

    There is no division, so boxes may be empty.
    """
    common = _intersections(a, b)
    limit = (areas(a)[:, None] + areas(b)).sub_(common).mul_(iou_threshold)
    return (common > limit).logical_and_(a_classes[:, None] == b_classes)


def _greedy(overlap: Tensor) -> Tensor:
    """Return (n,) True for the rows that greedy suppression keeps, by ``overlap`` (n, n).

    ``overlap`` is symmetric. A row is kept if no kept row before it overlaps it. Applied to all rows at once until
    nothing changes, that rule gives the greedy answer: after k rounds at least the first k rows are final (Cluster-NMS,
    Zheng et al. 2021). Boxes that overlap in long chains take a round for each link: on a CPU the rows are then taken
    one by one instead.
    """
    before = overlap.triu(diagonal=1).to(torch.float32)
    keep = torch.ones(len(overlap), device=overlap.device)
    rounds = itertools.count() if overlap.device.type != "cpu" else range(_ROUNDS)
    for _ in rounds:
        again = (keep @ before == 0).to(torch.float32)
        if torch.equal(again, keep):
            return keep.bool()
        keep = again
    rows = overlap.numpy()
    free = np.ones(len(rows), np.bool_)
    for row in range(len(rows)):
        if free[row]:
            free[row + 1 :] &= ~rows[row, row + 1 :]
    return torch.from_numpy(free)
