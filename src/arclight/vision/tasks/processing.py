"""Preprocess images to a detector's input, postprocess its output to boxes.

`detection` pre- and postprocesses by these in ``predict``, and so do exported programs, which name class and fields: both stay, and pixels
must be the same by either way. ``arclight predict`` and ``scan`` load programs by the functions at the end; `classification` shares
`check_photos` and `as_batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arclight.vision.boxes import MAX_DET, candidates_for, nms
from arclight.vision.data.letterbox import Letterbox, letterbox, unletterbox
from arclight.vision.prob_iou import rotated_nms
from arclight.vision.results.detections import Detections
from arclight.vision.results.masks import Masks
from arclight.vision.rotated import OrientedBoxes, hulls_of

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.deploy.programs.folder import Trusted
    from arclight.deploy.settings import FastestRuntime, Runtime


PROGRAM_TASKS = ("detect", "segment", "pose", "corners", "obb", "classify")
"""Values of ``task`` in the metadata of programs of vision tasks."""


@dataclass(frozen=True)
class Context:
    """Photos, and the placement of each in its square, to map boxes back."""

    images: list[np.ndarray[Any, Any]]
    placements: list[Letterbox]


def check_photos(images: Sequence[Any]) -> None:
    """Raise ValueError unless all are RGB uint8 photos (H, W, 3)."""
    for image in images:
        if not (isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8):
            what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise ValueError(f"a photo must be a uint8 array (height, width, 3) in RGB, got {what}")


def as_batch(squares: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return squares (S, S, 3) uint8 as one float32 batch (N, 3, S, S) in [0, 1].

    It lies in memory as the squares do, channels last: networks compute in that order, and dividing in it moves nothing.
    """
    batch: np.ndarray[Any, Any] = np.divide(np.stack(squares), np.float32(255), dtype=np.float32)
    return batch.transpose(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class DetectionProcessing:
    """Processing of detection: letterbox before, non-maximum suppression after."""

    names: list[str]
    """Class names, by number."""
    image_size: int
    """Side of the square input, pixels."""
    conf_threshold: float = 0.25
    """Smallest confidence kept, in [0, 1]."""
    iou_threshold: float | None = 0.45
    """IoU threshold of non-maximum suppression, in [0, 1]; None for networks that predict each object once."""
    max_det: int = MAX_DET
    """Most boxes per photo."""
    agnostic: bool = False
    """Whether boxes suppress those of other classes too."""

    def preprocess(self, images: Sequence[np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], Context]:
        """Convert RGB uint8 photos (H, W, 3) to one float32 batch (N, 3, S, S) in [0, 1].

        Photos may have any sizes.
        """
        check_photos(images)
        squares, placements = zip(*(letterbox(image, self.image_size) for image in images), strict=True)
        return as_batch(squares), Context(list(images), list(placements))

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Convert predictions (N, A, 5 + classes) to one :class:`Detections` per photo.

        They are in the photo's own pixels.
        """
        predictions = torch.as_tensor(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
        results = []
        for rows, image, placement in zip(self._kept(predictions), context.images, context.placements, strict=True):
            boxes = unletterbox(rows[:, :4], placement, image.shape[:2])
            results.append(Detections.from_arrays(boxes, rows[:, 4], rows[:, 5], names=self.names, image=image))
        return results

    def _kept(self, predictions: torch.Tensor, extra: int = 0) -> list[np.ndarray[Any, Any]]:
        kept = nms(
            predictions,
            self.conf_threshold,
            self.iou_threshold,
            max_det=self.max_det,
            top_k=candidates_for(self.max_det),
            agnostic=self.agnostic,
            extra=extra,
        )
        return [rows.cpu().numpy() for rows in kept]


@dataclass(frozen=True, kw_only=True)
class SegmentationProcessing(DetectionProcessing):
    """Processing of segmentation: letterbox before, non-maximum suppression and masks after."""

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Convert rows (N, A, 5 + classes + P) and prototypes to one :class:`Detections` per photo.

        Prototypes are (N, P, h, w); the detections have masks.
        """
        predictions, prototypes = (torch.as_tensor(output) for output in outputs)
        kept = self._kept(predictions, extra=prototypes.shape[1])
        stride = self.image_size / prototypes.shape[-1]
        results = []
        for rows, maps, image, placement in zip(kept, prototypes, context.images, context.placements, strict=True):
            shape = image.shape[:2]
            boxes = unletterbox(rows[:, :4], placement, shape)
            masks = Masks.from_prototypes(rows[:, 6:], maps.cpu().numpy(), boxes, shape, stride, placement)
            found = Detections.from_arrays(boxes, rows[:, 4], rows[:, 5], names=self.names, image=image, masks=masks)
            results.append(found)
        return results


@dataclass(frozen=True, kw_only=True)
class PoseProcessing(DetectionProcessing):
    """Processing of poses: letterbox before, non-maximum suppression and keypoints after."""

    keypoints: tuple[int, int]
    """How many keypoints, and numbers of each."""
    sigmas: tuple[float, ...]
    """OKS deviation of each keypoint; only ``tasks.deployment`` reads it, to score programs."""
    cyclic: bool = False
    """Whether any keypoint may be the first; only ``tasks.deployment`` reads it, to score programs."""

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Convert rows (N, A, 5 + classes + K * dims) to one :class:`Detections` per photo.

        They have keypoints, in the photo's own pixels.
        """
        predictions = torch.as_tensor(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
        count, dims = self.keypoints
        results = []
        kept = self._kept(predictions, extra=count * dims)
        for rows, image, placement in zip(kept, context.images, context.placements, strict=True):
            boxes = unletterbox(rows[:, :4], placement, image.shape[:2])
            points = rows[:, 6:].reshape(len(rows), count, dims).astype(np.float64)
            scale, pad_x, pad_y = placement
            points[..., :2] = (
                points[..., :2] - (pad_x, pad_y)
            ) / scale  # may lie beside the photo: the object does, too
            results.append(
                Detections.from_arrays(
                    boxes, rows[:, 4], rows[:, 5], names=self.names, image=image, keypoints=points.astype(np.float32)
                )
            )
        return results


@dataclass(frozen=True, kw_only=True)
class OrientedProcessing(DetectionProcessing):
    """Processing of rotated boxes: letterbox before, their non-maximum suppression after."""

    iou_threshold: float = 0.45
    """Threshold of non-maximum suppression, in [0, 1], of the probabilistic IoU of rotated boxes."""

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Convert rows (N, A, 5 + classes + 1) to one :class:`Detections` with ``obb`` per photo.

        They are in the photo's own pixels.
        """
        predictions = torch.as_tensor(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
        kept = rotated_nms(
            predictions, self.conf_threshold, self.iou_threshold, max_det=self.max_det, top_k=candidates_for(self.max_det),
            agnostic=self.agnostic,
        )  # fmt: skip
        results = []
        for found, image, (scale, pad_x, pad_y) in zip(kept, context.images, context.placements, strict=True):
            rows = found.cpu().double().numpy()
            height, width = image.shape[:2]
            rows[:, :2] -= (pad_x, pad_y)
            rows[:, :4] /= scale
            boxes = hulls_of(rows[:, :5]).clip(0, (width, height, width, height))
            obb = OrientedBoxes(rows[:, :5])
            results.append(
                Detections.from_arrays(boxes, rows[:, 5], rows[:, 6], names=self.names, image=image, obb=obb)
            )
        return results


def load_detector_program(
    path: Path | str,
    *,
    trusted: Trusted | None = None,
    runtime: Runtime | FastestRuntime | None = None,
    tasks: Sequence[str] = ("detect",),
    **thresholds: Any,
) -> Program:
    """Load the program of a detector.

    ``thresholds`` replace fields of its `DetectionProcessing`. trusted, runtime: as for `Program.load`.

    ``tasks`` are those of programs that will do. Raises ProgramError for the program of another.
    """
    from arclight.deploy import Program, ProgramError

    program = Program.load(path, trusted=trusted, runtime=runtime)
    if (task := program.metadata.get("task")) not in tasks:
        raise ProgramError(
            f"{path} is not a detector (its task is {task!r}): name a program that finds boxes in photos"
        )
    return _changed(program, thresholds)


def load_vision_program(
    path: Path | str,
    *,
    trusted: Trusted | None = None,
    runtime: Runtime | FastestRuntime | None = None,
    **changes: Any,
) -> Program:
    """Load the program of any vision task.

    ``changes`` replace fields of its processing, see `with_fields`. trusted, runtime: as for `Program.load`.
    """
    from arclight.deploy import Program, ProgramError

    program = Program.load(path, trusted=trusted, runtime=runtime)
    if (task := program.metadata.get("task")) not in PROGRAM_TASKS:
        raise ProgramError(f"{path} is not a program of a vision task (its task is {task!r})")
    return _changed(program, changes)


def _changed(program: Program, changes: dict[str, Any]) -> Program:
    return program.with_processing(with_fields(program.processing, changes)) if changes else program


def with_fields(processing: Any, changes: dict[str, Any]) -> Any:
    """Return ``processing`` with other values. Raises ValueError for fields that it has not."""
    known = [field.name for field in fields(processing)]
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(f"{unknown[0]} does nothing for {type(processing).__name__}: it has {', '.join(known)}")
    return replace(processing, **changes)
