"""Distil a trained network into another: a frozen teacher, and the losses by its outputs.

The outputs of both are compared before they are decoded, position by position, so they must mean the same: classes, input size,
levels and anchors. Divergences are 0 where both logits are equal, whatever they are.

`VisionModule` opens a teacher and adds the loss that `Detector` and `Classifier` compute by these, if the settings name one; it finds weights by
`checkpoint_at`, too. A teacher's weights are in no checkpoint; its digest is, so what it hashes must stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arclight.checkpoint import find_last
from arclight.checkpoint.retention import find_recorded, recorded_best
from arclight.vision.boxes import complete_iou
from arclight.vision.models.heads import ClassifyHead
from arclight.vision.models.loss import Gains, boxes_in_cells, level_balance
from arclight.vision.models.one_to_one import BOX_WEIGHT, CLASS_WEIGHT, OneToOneHead, join_levels
from arclight.vision.models.yolov5 import Yolo, fuse


class TeacherError(ValueError):
    """A teacher cannot teach the network at hand: what does not fit, and what would."""


class Teacher:
    """Frozen network in evaluation mode, whose weights are no part of the student's checkpoints.

    Nor are they of the student's state dict, or of its optimizer.
    """

    def __init__(self, network: Yolo, path: Path) -> None:
        """Copy ``network`` and fuse its batch norms.

        Raises TeacherError if a weight is NaN or infinite.
        """
        digest = hashlib.sha256()
        for name, tensor in network.state_dict().items():
            if not tensor.isfinite().all():
                raise TeacherError(
                    f"teacher = {path}: its tensor {name} is NaN or infinite, so nothing can be learned from it"
                )
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self.digest = digest.hexdigest()
        """Digest of its weights, by which a resumed run recognises it."""
        one_to_one = isinstance(network.head, OneToOneHead)  # whose branch that only training reads teaches most
        self.network = (network if one_to_one else fuse(network)).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Any:
        """Return the raw output for ``images`` (N, 3, H, W), on their device."""
        if next(self.network.parameters()).device != images.device:
            self.network.to(images.device)
        return self.network.raw(images)


def check_fit(path: Path, teacher: Yolo, student: Yolo) -> None:
    """Raise TeacherError if the outputs of teacher and student mean different things.

    Image sizes, which are no part of a network, are compared by the caller.
    """
    refuse(path, "the head", type(teacher.head).__name__, type(student.head).__name__)
    refuse(path, "the classes", list(teacher.names), list(student.names))
    if isinstance(student.head, ClassifyHead):
        return
    refuse(path, "the strides", teacher.stride, student.stride)
    if not isinstance(student.head, OneToOneHead):
        given, wanted = teacher.anchors.detach().cpu(), student.anchors.detach().cpu()
        if given.shape != wanted.shape or not torch.allclose(given, wanted, rtol=1e-3):
            refuse(path, "the anchors", given.tolist(), wanted.tolist())


def refuse(path: Path, what: str, given: object, wanted: object) -> None:
    """Raise TeacherError if the teacher's ``given`` is not what its student ``wanted``."""
    if given != wanted:
        raise TeacherError(
            f"teacher = {path} has {what} {given}, this network has {wanted}: outputs that mean other things cannot be learned"
        )


def checkpoint_at(path: Path, setting: str, failure: type[Exception]) -> Path:
    """Return ``path``, or the best checkpoint of a run folder, the newest if none was ranked.

    Raises ``failure``, naming the ``setting``, if there is none.
    """
    if not path.exists():
        raise failure(f"{setting} = {path}: there is nothing of that name, give a checkpoint or a run")
    if not (path / "checkpoints").is_dir():
        return path
    if (newest := find_last(path / "checkpoints")) is None:
        raise failure(f"{setting} = {path} has no checkpoint: it failed, or was stopped, before it saved one")
    best, _ = recorded_best(newest)
    if best is None:
        return newest
    if place := find_recorded(best, path / "checkpoints"):
        return place
    raise failure(
        f"{setting} = {path} recorded {best.name} as its best checkpoint, which is not there: name one, such as {newest}"
    )


# ---------------------------------------------------------------- losses


def anchored_distillation(
    raw: Sequence[Tensor], taught: Sequence[Tensor], anchors: Tensor, gains: Gains
) -> tuple[Tensor, Tensor]:
    """Return the distillation loss of logits ``raw`` from ``taught``, and its part, detached.

    raw, taught: per level (N, k, H_l, W_l, 5 + C). anchors: (levels, k, 2) in cells. Objectness: the divergence, a mean over all positions,
    levels weighted as by `level_balance`. Box: 1 - complete IoU; class: the divergence, a mean over classes, none for a single class;
    both weighted by the teacher's objectness (Mehta and Ozturk 2018), so that its background teaches no boxes. Gains and scale are those
    of `yolo_loss`. Computed in float32 also under autocast.
    """
    box = obj = cls = torch.zeros((), device=raw[0].device)
    with torch.autocast(raw[0].device.type, enabled=False):
        for found, known, sizes, weight in zip(raw, taught, anchors, level_balance(len(raw)), strict=True):
            own, wanted = _exact(found), _exact(known)
            sure = wanted[..., 4].sigmoid()
            total = sure.sum().clamp(min=1)
            obj = obj + weight * divergence(own[..., 4], wanted[..., 4]).mean()
            anchor = sizes.to(own.dtype)[:, None, None]
            error = 1 - complete_iou(boxes_in_cells(own, anchor), boxes_in_cells(wanted, anchor))
            box = box + (sure * error).sum() / total
            if own.shape[-1] > 6:
                cls = cls + (sure * divergence(own[..., 5:], wanted[..., 5:]).mean(-1)).sum() / total
        part = gains.box * box + gains.obj * obj + gains.cls * cls
    return part * len(raw[0]), part.detach()


def one_to_one_distillation(
    raw: Sequence[Tensor], taught: Sequence[Tensor], head: OneToOneHead, box_gain: float = 1.0, cls_gain: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the distillation loss of a `OneToOneHead` from ``taught``, and the same, detached.

    Learned are the boxes and the scores of the branch *many*, which give each object several cells: which single cell *one* picks is for each
    network to settle by itself. Scores: the divergence; boxes: 1 - complete IoU, weighted by the teacher's best score; sums over cells, over
    the sum of those scores. Computed in float32 also under autocast.
    """
    with torch.autocast(raw[0].device.type, enabled=False):
        own, wanted = join_levels(raw, head.strides), join_levels(taught, head.strides)
        many = own.values[..., 4 + head.num_classes :]
        known = wanted.values[..., 4 + head.num_classes :]
        sure = known.sigmoid().amax(-1)
        total = sure.sum().clamp(min=1)
        box = (sure * (1 - complete_iou(own.boxes(), wanted.boxes()))).sum() / total
        cls = divergence(many, known).sum() / total
        loss = BOX_WEIGHT * box_gain * box + CLASS_WEIGHT * cls_gain * cls
    return loss, loss.detach()


def class_distillation(logits: Tensor, taught: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the distillation loss of class ``logits`` (N, C), and the same, detached.

    It is the divergence from the teacher's logits at ``temperature``. It is multiplied by the temperature's square, so
    that gradients are of the same size at each (Hinton et al. 2015).
    """
    with torch.autocast(logits.device.type, enabled=False):
        own, wanted = (_exact(values).div(temperature).log_softmax(-1) for values in (logits, taught))
        loss = F.kl_div(own, wanted, reduction="batchmean", log_target=True) * temperature**2
    return loss, loss.detach()


def divergence(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the binary Kullback-Leibler divergence (...) of logits (...) from a teacher's."""
    wanted = taught.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(taught, wanted, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") - entropy


def _exact(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
