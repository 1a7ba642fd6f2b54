"""Score rotated boxes: average precision by their exact overlap.

`OrientedDetector` (``tasks.detection``) scores by this, and ``tasks.deployment`` its programs. A rotated box is xywhr, see ``vision.rotated``;
results have the form of `DetectionMetrics`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from arclight.vision.prob_iou import rotated_nms
from arclight.vision.results.metrics import CONFIDENCE_FLOOR, EVALUATION_IOU, DetectionMetrics
from arclight.vision.rotated import hulls_of, rotated_iou


class OrientedMetrics(DetectionMetrics):
    """Metrics of rotated boxes, as `DetectionMetrics` by `rotated_iou`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, EVALUATION_IOU)

    def update_output(self, output: Tensor, batch: dict[str, Any]) -> None:
        """Add a batch of decoded rows (N, A, 5 + C + 1), in pixels of its square images."""
        size = batch["images"].shape[-1]
        kept = rotated_nms(output, CONFIDENCE_FLOOR, EVALUATION_IOU, multi_label=self.num_classes > 1)
        targets = batch["targets"].detach().cpu().double().numpy()
        targets[:, 2:6] *= size
        for number, found in enumerate(kept):
            rows, true = found.cpu().double().numpy(), targets[targets[:, 0] == number]
            self.update_rotated(rows[:, :5], rows[:, 5], rows[:, 6], true[:, 1], true[:, 2:])

    def update_rotated(
        self, xywhr: ArrayLike, conf: ArrayLike, cls: ArrayLike, true_cls: ArrayLike, true_xywhr: ArrayLike
    ) -> None:
        """Add an image: k rotated boxes (k, 5) with confidences and classes, and m true ones (m, 5)."""
        boxes, true = (np.asarray(array, np.float64).reshape(-1, 5) for array in (xywhr, true_xywhr))
        score, label, truth = (np.asarray(array, np.float64) for array in (conf, cls, true_cls))
        rows = np.concatenate((hulls_of(boxes), score[:, None], label[:, None]), axis=1)
        self.update(
            [rows],
            [np.concatenate((truth[:, None], hulls_of(true)), axis=1)],
            overlaps=[rotated_iou(boxes, true)],
        )
