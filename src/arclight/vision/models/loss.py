"""Compute the YOLOv5 training loss: assign predictions to objects, and measure their errors.

Shapes: N images, M objects, C classes; level l of the head has k anchors on a grid of H_l x W_l cells. Objects that match no anchor are
masked, not removed, so that nothing but `mask_loss` waits for the device.

`Detector` (``tasks.detection``) calls `yolo_loss` in its training step, `Segmenter` adds `mask_loss` and `PoseEstimator` `keypoint_loss`;
``tasks.distillation`` takes parts. In: raw levels (N, k, H_l, W_l, 5 + C and more) and targets (M, 6 and more). With default options it is
YOLOv5's loss, which a plain loop in the tests repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arclight.vision.anchor_limits import ANCHOR_T
from arclight.vision.boxes import complete_iou
from arclight.vision.keypoints import AREA_SHARE, numberings
from arclight.vision.models.heads import corners_of_boxes
from arclight.vision.prob_iou import angle_of, prob_iou

THREE_LEVELS = (4.0, 1.0, 0.4)
"""Objectness weights of heads with three levels, finest first (YOLOv5)."""
OTHER_LEVELS = (4.0, 1.0, 0.25, 0.06, 0.02)


def level_balance(levels: int) -> tuple[float, ...]:
    """Return the objectness loss weight of each level, finest first.

    Fine levels have more cells and learn more slowly.
    """
    return THREE_LEVELS if levels == len(THREE_LEVELS) else OTHER_LEVELS[:levels]


class Gains(NamedTuple):
    """Weights of the three parts of the loss."""

    box: float
    obj: float
    cls: float


class LossOptions(NamedTuple):
    """Variations of the loss; the defaults change nothing."""

    anchor_t: float = ANCHOR_T
    """An anchor is matched with objects less than this many times wider, narrower, taller or flatter than itself."""
    label_smoothing: float = 0.0
    """Class targets are ``1 - label_smoothing / 2`` and ``label_smoothing / 2`` (arXiv 1902.04103, eq. 3)."""
    focal_gamma: float = 0.0
    """Exponent of focal loss for objectness and class, by which easy predictions count less; 0 for plain cross-entropy."""
    quality: bool = False
    """Quality focal loss (arXiv 2006.04388), for targets between 0 and 1, in place of focal loss (arXiv 1708.02002)."""
    obj_pos_weight: float = 1.0
    """Weight of the positive term of the objectness loss (``pos_weight`` of binary cross-entropy)."""
    cls_pos_weight: float = 1.0
    """Weight of the positive term of the class loss."""


def boxes_in_cells(logits: Tensor, anchors: Tensor) -> Tensor:
    """Decode boxes (..., 4) xywh from logits (..., 4 and more), relative to their cell.

    Units are cells. ``anchors``: (..., 2) in cells.
    """
    answers = logits[..., :4].sigmoid() * 2
    return torch.cat((answers[..., :2] - 0.5, answers[..., 2:] ** 2 * anchors), dim=-1)


class KeypointOptions(NamedTuple):
    """Variations of the loss of keypoints; the defaults change nothing."""

    cyclic: bool = False
    """Compare each prediction with every rotation of the true keypoints' numbering; the one of least error counts."""
    error: Literal["similarity", "l1"] = "similarity"
    """Error of a keypoint: 1 - similarity and a small share of its distance, or (l1) its distance in units of the true box's sides."""
    from_box: bool = False
    """Decode keypoints relative to the corners of the predicted box (`heads.CornersHead`), which gets no gradient from them."""


FOCAL_ALPHA = 0.25
FAR_WEIGHT = 0.25
"""Weight of a keypoint's distance beside 1 - similarity; see `keypoint_loss`."""
AUTOBALANCE_RATE = 1e-4


class Assignment(NamedTuple):
    """Assigned predictions of one level: K = 3 k M candidates, of which those in ``mask`` count."""

    target: Tensor
    """(K,) row of the object in the targets."""
    image: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor
    box: Tensor
    """(K, 4) centre relative to the cell and size, in cells."""
    anchor_size: Tensor
    """(K, 2) in cells."""
    label: Tensor
    mask: Tensor


def scaled_gains(gains: Gains, num_classes: int, image_size: int, levels: int = 3) -> Gains:
    """Scale ``gains``, given for 3 levels, 80 classes and 640 pixels, to another model and size.

    Sums over levels grow with their number; the class loss is a mean over classes; objectness is a mean over cells, of
    which a larger image has more that are empty (YOLOv5).
    """
    per_level = 3 / levels
    return Gains(
        box=gains.box * per_level,
        obj=gains.obj * per_level * (image_size / 640) ** 2,
        cls=gains.cls * per_level * num_classes / 80,
    )


def update_balance(balance: Tensor, level_losses: Sequence[Tensor]) -> None:
    """Balance the weights of the levels' objectness losses, in place (YOLOv5's autobalance).

    They are divided by the second level's, which stays 1. A batch whose losses are NaN moves nothing: its step may be skipped, and
    weights that are NaN once would stay so. Nothing waits for the device.
    """
    losses = torch.stack(list(level_losses)).detach().clamp(min=1e-9)
    moved = balance * (1 - AUTOBALANCE_RATE) + AUTOBALANCE_RATE / losses
    moved /= moved[min(1, len(moved) - 1)].clone()
    balance.copy_(torch.where(moved.isfinite().all(), moved, balance))


def yolo_loss(
    raw: Sequence[Tensor],
    targets: Tensor,
    anchors: Tensor,
    gains: Gains,
    options: LossOptions = LossOptions(),  # noqa: B008 (it cannot be changed)
    balance: Tensor | None = None,
    learns_balance: bool = False,
    *,
    oriented: bool = False,
    matches: Sequence[Assignment] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch and its weighted parts ``box``, ``obj`` and ``cls``, detached.

    raw: per level (N, k, H_l, W_l, 5 + C) logits, ``Yolo.raw``. targets: (M, 6) image in batch, class, then centre x,
    centre y, width, height as shares of the image. ``oriented``: boxes are rotated, with the logit of their angle as a last
    column of raw and the angle as a last column of targets; see `oriented_error`. anchors: (levels, k, 2) in cells, ``Yolo.anchors``.
    balance: (levels,) weights of the levels' objectness in place of `level_balance`; this batch updates it if ``learns_balance``.
    matches: what `assign_levels` gave, if another loss needs it too.

    Box: 1 - complete IoU, a mean over the level's matches. Objectness: binary cross-entropy with the (detached) IoU as
    target, a mean over all positions. Class: binary cross-entropy, a mean over matches and classes; none for a single
    class. Levels are summed. The total is N times the sum of the parts (YOLOv5), so it grows with the batch; the parts
    do not. Computed in float32 also under autocast. No objects at all is a valid batch.
    """
    assert len(raw) == len(anchors)
    device = raw[0].device
    box = obj = cls = torch.zeros((), device=device)
    if matches is None:
        matches = assign_levels(raw, targets, anchors, options.anchor_t)
    with torch.autocast(device.type, enabled=False):
        level_losses: list[Tensor] = []
        for level, (logits, match, weight) in enumerate(zip(raw, matches, level_balance(len(raw)), strict=True)):
            logits = logits if logits.dtype == torch.float64 else logits.float()
            level_box, level_obj, level_cls = _level_loss(logits, targets, match, options, oriented)
            level_losses.append(level_obj)
            box, cls = box + level_box, cls + level_cls
            obj = obj + (weight if balance is None else balance[level].clone()) * level_obj
        if balance is not None and learns_balance:
            update_balance(balance, level_losses)
        box, obj, cls = gains.box * box, gains.obj * obj, gains.cls * cls
        total = (box + obj + cls) * len(raw[0])
    return total, {"box": box.detach(), "obj": obj.detach(), "cls": cls.detach()}


def assign(targets: Tensor, anchors: Tensor, grid: tuple[int, int], anchor_t: float = ANCHOR_T) -> Assignment:
    """Assign one level's predictions to ``targets`` (M, 6), in the own cell and the two nearest.

    A candidate counts if its anchor is within a factor ``anchor_t`` of the object's width and height and its cell is on
    the ``grid`` (height, width). The nearest cells are those on the side of the cell where the object's centre lies; a
    prediction can reach half a cell beyond its own, so all of them can give the exact answer.
    """
    height, width = grid
    size = torch.tensor((width, height), device=targets.device)
    xy, wh = targets[:, 2:4] * size, targets[:, 4:6] * size
    home = torch.minimum(xy.floor().long().clamp(min=0), size - 1)
    inside = xy - home
    side = torch.where(inside < 0.5, -1, 1)  # towards the nearest cell left or right, above or below
    stay = torch.zeros_like(side[:, 0])
    steps = torch.stack((stay, stay, side[:, 0], stay, stay, side[:, 1]), dim=1).view(-1, 3, 2)
    cell = home[:, None] + steps  # (M, 3, 2)
    reachable = ((cell >= 0) & (cell < size)).all(-1)
    reachable[:, 1:] &= inside != 0.5  # from the very middle neither neighbour is reached

    ratio = wh[:, None] / anchors.to(wh.dtype)  # (M, k, 2)
    fits = torch.maximum(ratio, 1 / ratio).amax(-1) < anchor_t

    m, a = len(targets), len(anchors)
    boxes = torch.cat((xy[:, None] - cell, wh[:, None].expand(m, 3, 2)), dim=-1)  # (M, 3 cells, 4)

    def every(values: Tensor) -> Tensor:
        """Flatten (M, anchors or 1, cells or 1, ...) to (K, ...)."""
        return values.expand(m, a, 3, *values.shape[3:]).flatten(0, 2)

    return Assignment(
        target=every(torch.arange(m, device=targets.device).view(m, 1, 1)),
        image=every(targets[:, 0].long().view(m, 1, 1)),
        anchor=every(torch.arange(a, device=targets.device).view(1, a, 1)),
        row=every(cell[:, None, :, 1].clamp(0, height - 1)),
        column=every(cell[:, None, :, 0].clamp(0, width - 1)),
        box=every(boxes[:, None]),
        anchor_size=every(anchors.to(wh.dtype).view(1, a, 1, 2)),
        label=every(targets[:, 1].long().view(m, 1, 1)),
        mask=every(fits[:, :, None] & reachable[:, None]),
    )


def assign_levels(
    raw: Sequence[Tensor], targets: Tensor, anchors: Tensor, anchor_t: float = ANCHOR_T
) -> list[Assignment]:
    """Assign predictions of every level to ``targets`` (M, 6 or more); see `assign`.

    Computed in float32 at least.
    raw: per level (N, k, H_l, W_l, ...). anchors: (levels, k, 2) in cells.
    """
    return [
        assign(
            targets.to(torch.promote_types(level.dtype, torch.float32)), own, (level.shape[2], level.shape[3]), anchor_t
        )
        for level, own in zip(raw, anchors, strict=True)
    ]


def _cross_entropy(
    logits: Tensor, wanted: Tensor, options: LossOptions, pos_weight: float, reduction: str = "none"
) -> Tensor:
    """Compute binary cross-entropy on logits, focal if the options ask for it.

    ``reduction`` is none or mean.
    """
    weight = None if pos_weight == 1 else torch.full((), pos_weight, dtype=logits.dtype, device=logits.device)
    if not options.focal_gamma:
        return F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction=reduction)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    answer = logits.sigmoid()
    alpha = wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)
    right = wanted * answer + (1 - wanted) * (1 - answer)
    error = (wanted - answer).abs() if options.quality else 1 - right
    focal = loss * alpha * error.clamp(min=1e-7) ** options.focal_gamma
    return focal.mean() if reduction == "mean" else focal


def _level_loss(
    logits: Tensor, targets: Tensor, match: Assignment, options: LossOptions, oriented: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return box, objectness and class loss of one level, unweighted."""
    num_classes = logits.shape[-1] - 5 - oriented
    matches = match.mask.sum().clamp(min=1)
    answers = logits[match.image, match.anchor, match.row, match.column]  # (K, 5 + C)

    boxes = boxes_in_cells(answers, match.anchor_size)
    if oriented:
        found = torch.cat((boxes, angle_of(answers[:, -1:])), dim=-1)
        angles = targets[match.target, 6:].to(logits.dtype)
        iou, error = oriented_error(found, torch.cat((match.box, angles), dim=-1))
    else:
        iou = complete_iou(boxes, match.box)
        error = 1 - iou
    box_loss = torch.where(match.mask, error, 0.0).sum() / matches

    # Several objects may claim one position: the best answered one sets its target, whatever their order.
    positions = logits[..., 4]
    _, a, height, width = positions.shape
    flat = ((match.image * a + match.anchor) * height + match.row) * width + match.column
    quality = torch.where(match.mask, iou.detach().clamp(min=0), 0.0)
    wanted = torch.zeros_like(positions).flatten().scatter_reduce(0, flat, quality, "amax").view_as(positions)
    obj_loss = _cross_entropy(positions, wanted, options, options.obj_pos_weight, "mean")

    if num_classes == 1:
        return box_loss, obj_loss, torch.zeros_like(box_loss)
    one_hot = (match.label[:, None] == torch.arange(num_classes, device=logits.device)).to(logits.dtype)
    if options.label_smoothing:
        one_hot = one_hot * (1 - options.label_smoothing) + options.label_smoothing / 2
    per_match = _cross_entropy(answers[:, 5 : 5 + num_classes], one_hot, options, options.cls_pos_weight).mean(-1)
    return box_loss, obj_loss, torch.where(match.mask, per_match, 0.0).sum() / matches


SQUARE_WEIGHT = 0.5
"""Weight of the angle's error for a square, beside 1 - IoU."""


def oriented_error(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilistic IoU (...) of rotated boxes (..., 5), and their error.

    The error is 1 - IoU plus a share of the squared sine of twice the difference of the angles, the larger the nearer the wanted box is to
    a square, whose angle does not change that IoU. The sine is 0 for quarter turns too, which map a square to itself.
    """
    iou = prob_iou(found, wanted)
    square = torch.exp(-(wanted[..., 2] / wanted[..., 3]).log().square())
    turned = torch.sin(2 * (found[..., 4] - wanted[..., 4])).square()
    return iou, 1 - iou + SQUARE_WEIGHT * square * turned


def mask_loss(
    raw: Sequence[Tensor],
    prototypes: Tensor,
    masks: Tensor,
    targets: Tensor,
    matches: Sequence[Assignment],
    num_classes: int,
) -> Tensor:
    """Return the mask loss of a batch, unweighted, over the predictions assigned to objects.

    raw: per level (N, k, H_l, W_l, 5 + C + P) logits. prototypes: (N, P, h, w). masks: (N, h', w') number of the object seen there,
    from 1 in the order of the image's targets, 0 for none. matches: what `assign_levels` gave. Others as in `yolo_loss`.

    Binary cross-entropy inside the object's box, divided by the box's share of the image; a mean over an image's matches on a
    level, summed over levels, a mean over images (YOLOv5). It reads how many matches there are, so it waits for the device.
    """
    device = prototypes.device
    with torch.autocast(device.type, enabled=False):
        maps = prototypes if prototypes.dtype == torch.float64 else prototypes.float()
        wanted = _sampled(masks, maps.shape[-2:])
        number = _number_in_image(targets)
        total = maps.sum() * 0  # no match on any level: a loss that still has a gradient
        for logits, match in zip(raw, matches, strict=True):
            chosen = torch.nonzero(match.mask).squeeze(1)
            target = match.target[chosen]
            answers = logits[
                match.image[chosen], match.anchor[chosen], match.row[chosen], match.column[chosen], 5 + num_classes :
            ]
            for image in torch.unique(match.image[chosen]).tolist():
                own = torch.nonzero(match.image[chosen] == image).squeeze(1)
                objects = target[own]
                mixed = (answers[own].to(maps.dtype) @ maps[image].flatten(1)).view(-1, *maps.shape[-2:])
                truth = (wanted[image][None] == number[objects].view(-1, 1, 1)).to(maps.dtype)
                error = F.binary_cross_entropy_with_logits(mixed, truth, reduction="none")
                boxes = targets[objects, 2:6].to(maps.dtype)
                inside = _inside(boxes, maps.shape[-2:])
                total = total + ((error * inside).mean((1, 2)) / boxes[:, 2:].prod(1)).mean()
        return total / len(maps)


def keypoint_loss(
    raw: Sequence[Tensor],
    targets: Tensor,
    matches: Sequence[Assignment],
    num_classes: int,
    keypoints: tuple[int, int],
    sigmas: Sequence[float],
    options: KeypointOptions = KeypointOptions(),  # noqa: B008 (it cannot be changed)
) -> tuple[Tensor, Tensor]:
    """Return location and presence loss of keypoints, unweighted, over assigned predictions.

    raw: per level (N, k, H_l, W_l, 5 + C + K * dims) logits. targets: (M, 6 + 2 K), keypoints as shares of the image, NaN if
    not labelled. sigmas: (K,) deviations, see `keypoints.sigmas_of`. matches: what `assign_levels` gave. Others as in `yolo_loss`.

    Place: 1 - object keypoint similarity, and `FAR_WEIGHT` times the distance over the root of the object's area, which still has a
    gradient where the similarity is 0; a mean over an object's labelled keypoints and over matches that have one. Presence, of 3
    numbers: binary cross-entropy with whether a keypoint is labelled, a mean over matches. Levels are summed. ``options`` change what
    is measured. Nothing waits for the device.
    """
    count, dims = keypoints
    device = raw[0].device
    place = presence = torch.zeros((), device=device)
    ways = torch.from_numpy(numberings(count, options.cyclic)).to(device)
    with torch.autocast(device.type, enabled=False):
        for logits, match in zip(raw, matches, strict=True):
            logits = logits if logits.dtype == torch.float64 else logits.float()
            height, width = logits.shape[2], logits.shape[3]
            rows = logits[match.image, match.anchor, match.row, match.column]
            answers = rows[:, 5 + num_classes :].unflatten(-1, keypoints)
            size = torch.tensor((width, height), device=device)
            wanted = targets[match.target, 6:].to(logits.dtype).view(-1, count, 2) * size
            wanted = wanted - torch.stack((match.column, match.row), dim=-1)[:, None]
            labelled = wanted.isfinite().all(-1) & match.mask[:, None]
            wanted, labelled = wanted[:, ways], labelled[:, ways]  # (matches, S, K, ...): each way to number them
            if options.from_box:
                found = corners_of_boxes(answers[..., :2], boxes_in_cells(rows, match.anchor_size).detach())
            else:
                found = answers[..., :2] * match.anchor_size[:, None] + 0.5
            apart = torch.where(labelled[..., None], found[:, None] - wanted, 0.0)
            error = _apart(apart, match.box[:, None, None, 2:], sigmas, options)
            each = labelled.sum(-1)
            per_match, best = (torch.where(labelled, error, 0.0).sum(-1) / each.clamp(min=1)).min(-1)
            place = place + per_match.sum() / (each[:, 0] > 0).sum().clamp(min=1)
            if dims == 3:
                there = labelled[torch.arange(len(best), device=device), best].to(logits.dtype)
                entropy = F.binary_cross_entropy_with_logits(answers[..., 2], there, reduction="none").mean(-1)
                presence = presence + torch.where(match.mask, entropy, 0.0).sum() / match.mask.sum().clamp(min=1)
    return place, presence


def _apart(apart: Tensor, size: Tensor, sigmas: Sequence[float], options: KeypointOptions) -> Tensor:
    """Return the error (..., K) of keypoints ``apart`` (..., K, 2) from their targets.

    ``size``: (..., 1, 2) of the objects.
    """
    if options.error == "l1":
        return (apart / size).abs().sum(-1)
    area = AREA_SHARE * size.prod(-1)
    spread = 2 * (2 * torch.tensor(sigmas, device=apart.device, dtype=apart.dtype)).square()
    error = 1 - torch.exp(-apart.square().sum(-1) / (spread * area))
    return error + FAR_WEIGHT * apart.abs().sum(-1) / area.sqrt()


def _sampled(masks: Tensor, shape: Sequence[int]) -> Tensor:
    """Resize a map of numbers to ``shape``, by nearest neighbour."""
    if masks.shape[-2:] == tuple(shape):
        return masks
    return F.interpolate(masks[:, None].float(), tuple(shape), mode="nearest-exact")[:, 0]


def _number_in_image(targets: Tensor) -> Tensor:
    """Number each target (M,) within its image, from 1; targets of an image are contiguous."""
    image = targets[:, 0].long()
    first = torch.searchsorted(image.contiguous(), image.contiguous())
    return torch.arange(1, len(targets) + 1, device=targets.device) - first


def _inside(boxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Mark the cells (m, h, w) whose centre lies in each box (m, 4) by 1.

    Boxes are centre and size, as shares of the image.
    """
    height, width = shape
    y = (torch.arange(height, device=boxes.device, dtype=boxes.dtype) + 0.5) / height
    x = (torch.arange(width, device=boxes.device, dtype=boxes.dtype) + 0.5) / width
    centre, half = boxes[:, :2, None], boxes[:, 2:, None] / 2
    across = (x - centre[:, 0]).abs() <= half[:, 0]
    down = (y - centre[:, 1]).abs() <= half[:, 1]
    return (down[:, :, None] & across[:, None, :]).to(boxes.dtype)
