"""Detect without anchors and without non-maximum suppression: head, assignment and loss.

Every cell of every level predicts one box and a score per class. Two branches score the same boxes in training: *many*, for which up to
ten best cells of each object are positive, teaches boxes and features quickly (Feng et al. 2021, task-aligned assignment), and
*one*, for which one cell is, learns to score an object once (Wang et al. 2024, consistent dual assignment). Inference reads
the scores of *one* alone; `OneToOneHead.drop_training_branch` removes *many*.

Shapes: N images, M objects, C classes, A cells of all levels together.

`yolov5` builds the head if a table names ``one_to_one``; `Detector` computes its loss here, ``tasks.distillation`` takes parts. Attribute names
are in checkpoints and must stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arclight.vision.boxes import complete_iou
from arclight.vision.models.blocks import Activation, ConvBNAct
from arclight.vision.models.heads import Head

OBJECTS_PER_IMAGE, IMAGE_SIDE = 5, 640  # the prior that scores start from
CELLS_PER_SIDE = 4.0
"""Side of the boxes that the head starts from, in cells."""
MAX_LOG_SIZE = 6.0  # sides up to 400 cells: beyond that only overflow lies
TOP_K = 10
"""Cells that are considered for an object, best first."""
MATCH_ROUNDS = 6
"""Rounds of the greedy matching; see `match_one`."""
SCORE_POWER, OVERLAP_POWER = 0.5, 6.0
"""Exponents of score and overlap in the alignment by which cells are ranked."""
MARGIN_CELLS = 0.25
"""Boxes are widened by this many cells of the finest level before overlap ranks them, so that boxes of a few pixels are ranked too."""
BOX_WEIGHT, CLASS_WEIGHT = 7.5, 0.5
"""Weights of the box loss and of each branch's score loss, before the gains of a recipe."""


class OneToOneHead(Head):
    """Towers of one 3x3 convolution per level, for boxes and for the scores of each branch."""

    def __init__(
        self, c_in: Sequence[int], num_classes: int, strides: Sequence[int], act: Activation = nn.SiLU
    ) -> None:
        super().__init__()
        self.num_classes, self.strides = num_classes, tuple(strides)
        hidden = max(16, c_in[0] // 2)

        def towers(outputs: int) -> nn.ModuleList:
            return nn.ModuleList(
                nn.Sequential(ConvBNAct(c, hidden, 3, act=act), nn.Conv2d(hidden, outputs, 1)) for c in c_in
            )

        self.box, self.one = towers(4), towers(num_classes)
        self.many: nn.ModuleList | None = towers(num_classes)
        self._init_priors()

    @torch.no_grad()
    def _init_priors(self) -> None:
        """Initialise boxes of `CELLS_PER_SIDE` cells and scores for rare objects.

        The prior is that of Lin et al. 2017, section 3.3.
        """
        assert self.many is not None
        for box, one, many, stride in zip(self.box, self.one, self.many, self.strides, strict=True):
            box[1].bias.zero_()  # type: ignore[index]
            box[1].bias[2:] = math.log(CELLS_PER_SIDE)  # type: ignore[index]
            for branch in (one, many):
                prior = OBJECTS_PER_IMAGE / self.num_classes / (IMAGE_SIDE / stride) ** 2
                branch[1].bias.fill_(math.log(prior / (1 - prior)))  # type: ignore[index]

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return per level (N, H / stride, W / stride, 4 + C or 4 + 2 C).

        They are the box, the logits of *one*, and those of *many* while that is there.
        """
        branches = [self.box, self.one, *([] if self.many is None else [self.many])]
        return [
            torch.cat([branch[level](x) for branch in branches], dim=1).permute(0, 2, 3, 1)
            for level, x in enumerate(maps)
        ]

    def drop_training_branch(self) -> None:
        """Remove *many*: decoded output stays as it is, the loss cannot be computed any more."""
        self.many = None

    def decode(self, raw: Sequence[Tensor]) -> Tensor:
        """Decode to rows (N, A, 5 + C); at least float32.

        A row is x, y, w, h in input pixels, 1, and class scores in [0, 1]. The 1 stands where other heads have
        objectness: scores are those of objects, and no box is another's double.
        """
        rows = join_levels(raw, self.strides)
        scores = rows.values[..., 4 : 4 + self.num_classes].sigmoid()
        return torch.cat((rows.boxes(), torch.ones_like(scores[..., :1]), scores), dim=-1)


class Rows(NamedTuple):
    """The predictions of all levels, one after another."""

    values: Tensor
    """(N, A, 4 + C or 4 + 2 C) as the head gives them, at least float32."""
    centres: Tensor
    """(A, 2) middle of each cell, pixels."""
    strides: Tensor
    """(A, 1) side of each cell, pixels."""

    def boxes(self) -> Tensor:
        """Return boxes (N, A, 4) x, y, w, h in pixels: offsets are in cells, sizes are log cells."""
        xy = self.centres + self.values[..., :2] * self.strides
        return torch.cat((xy, self.values[..., 2:4].clamp(max=MAX_LOG_SIZE).exp() * self.strides), dim=-1)


def join_levels(raw: Sequence[Tensor], strides: Sequence[int]) -> Rows:
    """Join the levels' predictions, with the centres and strides of their cells."""
    values, centres, sides = [], [], []
    for level, stride in zip(raw, strides, strict=True):
        height, width = level.shape[1:3]
        dtype = torch.promote_types(level.dtype, torch.float32)
        # made again each time: a stored grid would be state, and would tie the model to one image size
        y = torch.arange(height, device=level.device, dtype=dtype)
        x = torch.arange(width, device=level.device, dtype=dtype)
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        values.append(level.to(dtype).flatten(1, 2))
        centres.append((grid.flatten(0, 1) + 0.5) * stride)
        sides.append(torch.full((height * width, 1), float(stride), device=level.device, dtype=dtype))
    return Rows(torch.cat(values, dim=1), torch.cat(centres), torch.cat(sides))


# ---------------------------------------------------------------- assignment


class Candidates(NamedTuple):
    """The best cells of each object: K for each of M, best first."""

    alignment: Tensor
    """(M, K) how well box and score of a cell fit the object; 0 where there is no such cell."""
    cell: Tensor
    """(M, K) number of the cell, over all images: image * A + cell in image."""
    overlap: Tensor
    """(M, K) overlap of the cell's box with the object, in [0, 1]."""


def reachable(boxes: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Return (M, A) True for the cells that may be assigned to the xywh boxes (M, 4).

    Those are the cells whose middle lies inside. On the finest level boxes count as at least two cells wide and high:
    however small an object and wherever it lies, some cells can answer for it.
    """
    side, finest = strides[:, 0], strides[:, 0] == strides.min()

    def along(axis: int) -> Tensor:
        half = boxes[:, axis + 2, None] / 2
        half = torch.where(finest, half.maximum(side), half)
        return (centres[:, axis] - boxes[:, axis, None]).abs() < half

    return along(0) & along(1)


def widened_overlap(predicted: Tensor, boxes: Tensor, margin: float) -> Tensor:
    """Compute the IoU (M, A) of boxes (M, A, 4) with each object's box (M, 4), both widened.

    Boxes are xywh; widened: wider and higher by ``2 * margin`` pixels. That changes nothing for large boxes, and lets
    boxes of a few pixels that do not meet yet be nearer or farther.
    """
    # side by side, as reductions over a last dimension of two numbers take several times as long
    ax, ay, aw, ah = predicted.unbind(-1)
    bx, by, bw, bh = boxes[:, None].unbind(-1)
    aw, ah, bw, bh = (sides + 2 * margin for sides in (aw, ah, bw, bh))

    def common(a: Tensor, a_side: Tensor, b: Tensor, b_side: Tensor) -> Tensor:
        a_half, b_half = a_side / 2, b_side / 2
        return (torch.minimum(a + a_half, b + b_half) - torch.maximum(a - a_half, b - b_half)).clamp_(min=0)

    shared = common(ax, aw, bx, bw).mul_(common(ay, ah, by, bh))
    return shared / (aw * ah + bw * bh - shared)


def rank_candidates(
    branches: Sequence[Tensor], overlap: Tensor, reach: Tensor, image: Tensor, top_k: int = TOP_K
) -> list[Candidates]:
    """Rank each object's cells by score ** 0.5 * (overlap + 0.001) ** 6, for each branch.

    branches: scores (M, A) of each. overlap, reach: (M, A). image: (M,). Cells out of reach rank last, with an alignment of 0.
    """
    quality = (overlap + 1e-3).pow(OVERLAP_POWER)
    first = image[:, None] * overlap.shape[1]
    found = []
    for scores in branches:
        alignment = torch.where(reach, scores.pow(SCORE_POWER) * quality, 0.0)
        best, cell = alignment.topk(min(top_k, overlap.shape[1]), dim=1)
        found.append(Candidates(best, cell + first, overlap.gather(1, cell)))
    return found


PAIRS_AT_ONCE = 1 << 22
"""Pairs of object and cell that are compared together: bounds memory for images of thousands of objects."""


def candidates_of(
    rows: Rows,
    predicted: Tensor,
    branches: Sequence[Tensor],
    boxes: Tensor,
    image: Tensor,
    label: Tensor,
    margin: float,
) -> list[Candidates]:
    """Return the best cells of each object for each branch.

    predicted: boxes (N, A, 4) of the cells, xywh in pixels like those of the objects, ``boxes`` (M, 4). branches: logits (N, A, C) each.
    image, label: (M,) of the objects. margin: see `widened_overlap`. Objects are compared
    `PAIRS_AT_ONCE` pairs at a time, which changes no more than rounding.
    """
    planes = predicted.permute(2, 0, 1).contiguous()
    logits = [branch.transpose(1, 2) for branch in branches]
    step = max(1, PAIRS_AT_ONCE // predicted.shape[1])
    parts: list[list[Candidates]] = []
    for start in range(0, max(len(boxes), 1), step):
        own, of, at = boxes[start : start + step], image[start : start + step], label[start : start + step]
        reach = reachable(own, rows.centres, rows.strides)
        overlap = widened_overlap(planes[:, of].permute(1, 2, 0), own, margin)
        parts.append(rank_candidates([one[of, at].sigmoid() for one in logits], overlap, reach, of))
    return [Candidates(*map(torch.cat, zip(*of_branch, strict=True))) for of_branch in zip(*parts, strict=True)]


def settle(alignment: Tensor, cell: Tensor, cells: int) -> Tensor:
    """Return (M, K) True where an object wins its candidate cell by alignment.

    Of equal ones the first wins.
    """
    flat, row = cell.flatten(), torch.arange(len(cell), device=cell.device)[:, None].expand_as(cell)
    best = alignment.new_zeros(cells).scatter_reduce(0, flat, alignment.flatten(), "amax")
    wins = (alignment > 0) & (alignment == best[cell])
    first = row.new_full((cells,), len(cell)).scatter_reduce(
        0, flat, torch.where(wins, row, len(cell)).flatten(), "amin"
    )
    return wins & (first[cell] == row)


def match_one(candidates: Candidates, cells: int, rounds: int = MATCH_ROUNDS) -> Tensor:
    """Return (M, K) True for at most one cell of each object, and of no two objects the same.

    The greedy matching: of all pairs of object and cell the best aligned first. In each round every pair that is the best of
    its object and of its cell is matched; objects that crowd so much that ``rounds`` are too few go without, this time.
    """
    matched = torch.zeros_like(candidates.alignment, dtype=torch.bool)
    free = torch.ones_like(candidates.alignment[:, :1], dtype=torch.bool)
    taken = torch.zeros(cells, device=candidates.cell.device)
    for _ in range(rounds):
        open_pairs = torch.where(free & (taken[candidates.cell] == 0), candidates.alignment, 0.0)
        favourite = torch.zeros_like(matched).scatter(1, open_pairs.argmax(1, keepdim=True), True)
        pairs = settle(open_pairs, candidates.cell, cells) & favourite
        matched |= pairs
        free = free & ~pairs.any(1, keepdim=True)
        taken = taken.scatter_reduce(0, candidates.cell.flatten(), pairs.float().flatten(), "amax")
    return matched


class Assignment(NamedTuple):
    """Target of each cell."""

    owner: Tensor
    """(N * A,) number of the object that a cell is assigned to; M for none."""
    score: Tensor
    """(N * A,) score that it should give to the object's class."""


def assign(candidates: Candidates, chosen: Tensor, wanted: Tensor, cells: int) -> Assignment:
    """Assign each cell its object and wanted score from the ``chosen`` (M, K) candidates.

    ``wanted``: scores (M, K).
    """
    m = len(chosen)
    row = torch.arange(m, device=chosen.device)[:, None].expand_as(chosen)
    flat = candidates.cell.flatten()
    owner = row.new_full((cells,), m).scatter_reduce(0, flat, torch.where(chosen, row, m).flatten(), "amin")
    score = wanted.new_zeros(cells).scatter_reduce(0, flat, torch.where(chosen, wanted, 0.0).flatten(), "amax")
    return Assignment(owner, score)


# ---------------------------------------------------------------- loss


def one_to_one_loss(
    raw: Sequence[Tensor], targets: Tensor, head: OneToOneHead, box_gain: float = 1.0, cls_gain: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch and its weighted parts ``box``, ``one`` and ``many``, detached.

    raw: what ``head`` gave. targets: (M, 6) image in batch, class, then centre x, centre y, width, height as shares of
    the image. Box: 1 - complete IoU of the cells of *many*, weighted by the score that they should give. Scores: binary
    cross-entropy of all cells; the target of a cell of *many* is the overlap of the object's best cell times its alignment relative to the
    best, that of the cell of *one* is its own overlap. All are sums over cells over the sum of target scores, at least 1. Computed in
    float32 also under autocast. No objects at all is a valid batch.
    """
    if head.many is None:
        raise ValueError("the head has no training branch any more: train the model itself, not what fuse made of it")
    num_classes, strides = head.num_classes, head.strides
    with torch.autocast(raw[0].device.type, enabled=False):
        rows = join_levels(raw, strides)
        n, a = rows.values.shape[:2]
        predicted = rows.boxes()
        one, many = rows.values[..., 4:].split(num_classes, dim=-1)
        size = torch.tensor((raw[0].shape[2], raw[0].shape[1]), device=targets.device) * strides[0]
        boxes = (targets[:, 2:].view(-1, 2, 2) * size).flatten(1).to(predicted.dtype)
        image, label = targets[:, 0].long(), targets[:, 1].long()
        with torch.no_grad():
            wide, narrow = candidates_of(
                rows, predicted.detach(), (many.detach(), one.detach()), boxes, image, label, MARGIN_CELLS * strides[0]
            )
            chosen = settle(wide.alignment, wide.cell, n * a)
            aligned = torch.where(chosen, wide.alignment, 0.0)
            best = torch.where(chosen, wide.overlap, 0.0).amax(1, keepdim=True)
            wanted = aligned / aligned.amax(1, keepdim=True).clamp(min=1e-30) * best
            to_many = assign(wide, chosen, wanted, n * a)
            to_one = assign(narrow, match_one(narrow, n * a), narrow.overlap, n * a)
        parts = {
            "box": BOX_WEIGHT * box_gain * _box_loss(predicted.view(-1, 4), boxes, to_many),
            "one": CLASS_WEIGHT * cls_gain * _score_loss(one.reshape(-1, num_classes), label, to_one),
            "many": CLASS_WEIGHT * cls_gain * _score_loss(many.reshape(-1, num_classes), label, to_many),
        }
        total = torch.stack(list(parts.values())).sum()
    return total, {name: part.detach() for name, part in parts.items()}


def _box_loss(predicted: Tensor, boxes: Tensor, assignment: Assignment) -> Tensor:
    padded = torch.cat((boxes, boxes.new_ones(1, 4)))
    iou = complete_iou(predicted, padded[assignment.owner])
    return ((1 - iou) * assignment.score).sum() / assignment.score.sum().clamp(min=1)


def _score_loss(logits: Tensor, label: Tensor, assignment: Assignment) -> Tensor:
    classes = torch.arange(logits.shape[1], device=logits.device)
    padded = torch.cat((label, label.new_full((1,), -1)))
    wanted = (padded[assignment.owner][:, None] == classes) * assignment.score[:, None]
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
    return entropy / assignment.score.sum().clamp(min=1)
