"""Preprocess images to a detector's input, postprocess its output to boxes, alike in programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arclight.vision.boxes import MAX_DET, nms
from arclight.vision.data.letterbox import Letterbox, letterbox, unletterbox
from arclight.vision.results.detections import Detections

if TYPE_CHECKING:
    from arclight.deploy import Program


@dataclass(frozen=True)
class Context:
    """Photos, and where each lies in its square: what is needed to map boxes back."""

    images: list[np.ndarray[Any, Any]]
    placements: list[Letterbox]


@dataclass(frozen=True, kw_only=True)
class DetectionProcessing:
    """Letterbox before, non-maximum suppression after."""

    names: list[str]
    """Class names, by number."""
    image_size: int
    """Side of the square input, pixels."""
    conf_threshold: float = 0.25
    """Smallest confidence kept, in [0, 1]."""
    iou_threshold: float = 0.45
    """IoU threshold of non-maximum suppression, in [0, 1]."""
    max_det: int = MAX_DET
    """Most boxes per photo."""
    agnostic: bool = False
    """Whether boxes suppress those of other classes too."""

    def preprocess(self, images: Sequence[np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], Context]:
        """RGB uint8 photos (H, W, 3) of any sizes as one float32 batch (N, 3, S, S) in [0, 1]."""
        for image in images:
            if not (
                isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8
            ):
                what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
                raise ValueError(f"a photo must be a uint8 array (height, width, 3) in RGB, got {what}")
        squares, placements = zip(*(letterbox(image, self.image_size) for image in images), strict=True)
        batch = np.stack(squares).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(batch, dtype=np.float32) / np.float32(255), Context(list(images), list(placements))

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Predictions (N, A, 5 + classes) as one :class:`Detections` per photo, in its own pixels."""
        predictions = torch.as_tensor(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
        kept = nms(predictions, self.conf_threshold, self.iou_threshold, max_det=self.max_det, agnostic=self.agnostic)
        results = []
        for rows, image, placement in zip(kept, context.images, context.placements, strict=True):
            array = rows.cpu().numpy()
            boxes = unletterbox(array[:, :4], placement, image.shape[:2])
            results.append(Detections.from_arrays(boxes, array[:, 4], array[:, 5], names=self.names, image=image))
        return results


def load_detector_program(path: Path | str, **thresholds: Any) -> Program:
    """Load the program of a detector; ``thresholds`` replace fields of its `DetectionProcessing`.

    Raises ProgramError for the program of another task.
    """
    from arclight.deploy import Program, ProgramError

    program = Program.load(path)
    if (task := program.metadata.get("task")) != "detect":
        raise ProgramError(
            f"{path} is not a detector (its task is {task!r}): name a program that finds boxes in photos"
        )
    if thresholds:
        processing: Any = replace(program.processing, **thresholds)  # type: ignore[type-var]
        program = Program.load(path, processing=processing)
    return program
