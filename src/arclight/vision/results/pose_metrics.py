"""Compute pose metrics: average precision by object keypoint similarity, and of the boxes.

`PoseEstimator` and `CornerDetector` (``tasks.detection``) score by this, and ``tasks.deployment`` their programs. Numbers of keypoints that are
not cyclic must stay those of pycocotools, and ``state_dict`` must merge over processes to the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from arclight.vision.boxes import nms
from arclight.vision.keypoints import AREA_SHARE, keypoint_similarity
from arclight.vision.results.metrics import CONFIDENCE_FLOOR, EVALUATION_IOU, DetectionMetrics, DetectionResults, Floats

MAX_POSES = 20
"""Predictions of a class in an image that count, most confident first (COCO)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PoseResults:
    """Scores of a pose estimator: of its boxes, and of its keypoints."""

    boxes: DetectionResults
    keypoints: DetectionResults

    @property
    def images(self) -> int:
        return self.boxes.images

    @property
    def class_scores(self) -> Floats:
        """Return the average precision of each class (C,), of keypoints."""
        return self.keypoints.class_scores

    def summary(self) -> dict[str, float]:
        """Return the headline numbers by name, for logs and JSON: of keypoints first."""
        return {f"keypoint_{name}": value for name, value in self.keypoints.summary().items()} | self.boxes.summary()


class PoseMetrics:
    """Metrics of boxes and keypoints, as `DetectionMetrics` has them for boxes.

    The numbers for keypoints are those of pycocotools on the same detections: overlap is object keypoint similarity, and objects
    without any labelled keypoint count neither as found nor as missed. An object's area is 0.53 of its box's if none is given.
    """

    def __init__(
        self, num_classes: int, keypoints: tuple[int, int], sigmas: Sequence[float], cyclic: bool = False
    ) -> None:
        """Initialise empty metrics for ``keypoints``: how many, and numbers of each.

        ``sigmas``: their deviations, see `sigmas_of`. ``cyclic``: see `keypoint_similarity`.
        """
        self.cyclic = cyclic
        self.num_classes, self.shape, self.sigmas = num_classes, (keypoints[0], keypoints[1]), tuple(sigmas)
        self.boxes = DetectionMetrics(num_classes)
        self.keypoints = DetectionMetrics(num_classes, max_detections=MAX_POSES)

    def reset(self) -> None:
        """Reset the metrics to no images."""
        self.boxes.reset()
        self.keypoints.reset()

    def update_output(self, output: Tensor, batch: dict[str, Any]) -> None:
        """Add a batch of decoded rows (N, A, 5 + C + K * dims), in pixels of its square images."""
        size, (count, dims) = batch["images"].shape[-1], self.shape
        kept = nms(output, CONFIDENCE_FLOOR, EVALUATION_IOU, multi_label=self.num_classes > 1, extra=count * dims)
        self.boxes.update_batch([found[:, :6] for found in kept], batch["targets"], size=size)
        targets = batch["targets"].cpu().double().numpy()
        for number, found in enumerate(kept):
            rows, true = found.cpu().double().numpy(), targets[targets[:, 0] == number]
            self.update(
                rows[:, 4],
                rows[:, 5],
                rows[:, 6:].reshape(len(rows), count, dims)[..., :2],
                true[:, 1],
                true[:, 6:].reshape(len(true), count, 2) * size,
                np.concatenate((true[:, 2:4] - true[:, 4:6] / 2, true[:, 2:4] + true[:, 4:6] / 2), axis=1) * size,
            )

    def update(
        self,
        conf: ArrayLike,
        cls: ArrayLike,
        points: ArrayLike,
        true_cls: ArrayLike,
        true_points: ArrayLike,
        true_boxes: ArrayLike,
        areas: ArrayLike | None = None,
    ) -> None:
        """Add the keypoints of one image: k found (k, K, 2) and m true ones (m, K, 2).

        Both with their classes, those found with confidences; true keypoints are NaN if not labelled.
        ``true_boxes``: (m, 4) xyxy; ``areas``: (m,) of the true objects; `AREA_SHARE` of their boxes' if not given.
        """
        score, label, truth, found, true, boxes = (
            np.asarray(array, np.float64) for array in (conf, cls, true_cls, points, true_points, true_boxes)
        )
        sizes = AREA_SHARE * (boxes[:, 2:] - boxes[:, :2]).prod(1) if areas is None else np.asarray(areas, np.float64)
        rows = np.concatenate((np.zeros((len(score), 4)), score[:, None], label[:, None]), axis=1)
        self.keypoints.update(
            [rows],
            [np.concatenate((truth[:, None], boxes), axis=1)],
            overlaps=[keypoint_similarity(found, true, boxes, sizes, self.sigmas, self.cyclic)],
            ignored=[~np.isfinite(true).all(axis=-1).any(axis=-1).reshape(-1)],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all images as a few plain arrays, to be sent to another process or kept."""
        return {"boxes": self.boxes.state_dict(), "keypoints": self.keypoints.state_dict()}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images of another process's ``state_dict()``."""
        self.boxes.merge(state["boxes"])
        self.keypoints.merge(state["keypoints"])

    def compute(self) -> PoseResults:
        """Score everything seen so far."""
        return PoseResults(boxes=self.boxes.compute(), keypoints=self.keypoints.compute())
