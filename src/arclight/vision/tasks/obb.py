"""Define the Module and DataModule of oriented detection: detection of boxes that have an angle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from arclight.vision.data.dataset import DetectionDataset
from arclight.vision.data.labels import TaskGeometry
from arclight.vision.models.architectures import HeadBlock
from arclight.vision.models.loss import yolo_loss
from arclight.vision.prob_iou import rotated_nms
from arclight.vision.results.detections import Detections
from arclight.vision.results.obb_metrics import OrientedMetrics
from arclight.vision.rotated import OrientedBoxes, hulls_of, smallest_rectangles
from arclight.vision.tasks.detection import DetectionData, Detector
from arclight.vision.tasks.module import TaskMetrics
from arclight.vision.tasks.processing import Context, DetectionProcessing
from arclight.vision.tasks.settings import OrientedDetectionTask


class OrientedDetector(Detector):
    """Trains and runs a detector of rotated boxes.

    >>> detector = OrientedDetector(OrientedDetectionTask(data="data.yaml", model="yolov5n-obb"), names=["ship"])
    >>> found = detector.predict([photo])[0]                # photo: RGB uint8 (H, W, 3)
    >>> found.obb.xywhr, found.obb.corners                  # (k, 5) pixels and radians, (k, 4, 2) pixels
    """

    head: ClassVar[HeadBlock] = "obb"
    settings: OrientedDetectionTask

    @classmethod
    def settings_class(cls) -> type[OrientedDetectionTask]:
        return OrientedDetectionTask

    @property
    def processing(self) -> OrientedProcessing:
        s = self.settings
        return OrientedProcessing(
            names=self.names, image_size=s.image_size, conf_threshold=s.conf_threshold, iou_threshold=s.iou_threshold
        )

    def loss(self, raw: list[Tensor], batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        learns = self.training and torch.is_grad_enabled()
        loss, parts = yolo_loss(
            raw, batch["targets"], self.model.anchors, self.gains, self.loss_options, self.level_weights, learns, oriented=True
        )  # fmt: skip
        if len(self.names) == 1:
            del parts["cls"]  # a single class has nothing to tell apart
        return loss, parts

    def _build_metrics(self) -> TaskMetrics:
        return OrientedMetrics(len(self.names))

    def _box_sizes(self, dataset: DetectionDataset) -> np.ndarray[Any, Any]:
        corners = [points for of_image in dataset.outlines or () for points in of_image]
        return smallest_rectangles(np.array(corners).reshape(-1, 4, 2))[:, 2:4].astype(np.float32)

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Boxes are in pixels, scores in [0, 1], angles in radians: each is judged by itself."""
        (predictions,) = outputs
        return {**super().output_parts(predictions[..., :-1]), "angles": predictions[..., -1]}

    def keep_records(self) -> None:
        raise ValueError(
            "records are of upright boxes, and this network finds rotated ones: keep_records is for a Detector"
        )

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import write_charts

        return write_charts(self.results, self.names, folder, of="rotated boxes")


class OrientedData(DetectionData):
    """Loaders over a YOLO-format data set whose rows are the four corners of each object."""

    geometry: ClassVar[TaskGeometry] = "oriented"


@dataclass(frozen=True, kw_only=True)
class OrientedProcessing(DetectionProcessing):
    """Letterbox before, non-maximum suppression of rotated boxes after."""

    iou_threshold: float = 0.45
    """Threshold of non-maximum suppression, in [0, 1], of the probabilistic IoU of rotated boxes."""

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Rows (N, A, 5 + classes + 1) as one :class:`Detections` with ``obb`` per photo, in its own pixels."""
        predictions = torch.as_tensor(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
        kept = rotated_nms(
            predictions, self.conf_threshold, self.iou_threshold, max_det=self.max_det, agnostic=self.agnostic
        )
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
