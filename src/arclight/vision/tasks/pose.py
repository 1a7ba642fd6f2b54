"""Define the Module and DataModule of pose estimation: detection of boxes that have keypoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from arclight.vision.data.labels import DatasetError, TaskGeometry
from arclight.vision.data.letterbox import unletterbox
from arclight.vision.keypoints import sigmas_of
from arclight.vision.models.architectures import HeadBlock
from arclight.vision.models.heads import PoseHead
from arclight.vision.models.loss import keypoint_loss
from arclight.vision.results.detections import Detections
from arclight.vision.results.pose_metrics import PoseMetrics
from arclight.vision.tasks.detection import DetectionData, Detector
from arclight.vision.tasks.module import TaskMetrics
from arclight.vision.tasks.processing import Context, DetectionProcessing
from arclight.vision.tasks.settings import PoseTask


class PoseEstimator(Detector):
    """Trains and runs a detector of boxes and their keypoints.

    >>> estimator = PoseEstimator(PoseTask(data="data.yaml", model="yolov5n-pose"), names=["person"], keypoints=(17, 3))
    >>> found = estimator.predict([photo])[0]               # photo: RGB uint8 (H, W, 3)
    >>> found.keypoints[..., :2], found.boxes.xyxy          # (k, 17, 2) pixels
    """

    head: ClassVar[HeadBlock] = "pose"
    settings: PoseTask

    def __init__(
        self,
        settings: PoseTask,
        names: Sequence[str],
        table: str | None = None,
        keypoints: tuple[int, int] = (17, 3),
    ) -> None:
        """``keypoints``: how many, and numbers of each, 2 for x y, 3 for x y and how likely it is there, as ``kpt_shape`` says."""
        super().__init__(settings, names, table, {"keypoints": list(keypoints)})

    @property
    def keypoints(self) -> tuple[int, int]:
        """How many keypoints each box has, and numbers of each."""
        head = self.model.head
        assert isinstance(head, PoseHead)
        return head.keypoints

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The deviation of each keypoint that loss and score go by."""
        return sigmas_of(self.keypoints[0], self.settings.keypoint_sigmas)

    @classmethod
    def settings_class(cls) -> type[PoseTask]:
        return PoseTask

    @property
    def processing(self) -> PoseProcessing:
        s = self.settings
        return PoseProcessing(
            names=self.names,
            image_size=s.image_size,
            conf_threshold=s.conf_threshold,
            iou_threshold=s.iou_threshold,
            keypoints=self.keypoints,
            sigmas=self.sigmas,
        )

    def setup(self, stage: str) -> None:
        """Check that the data set has the keypoints that the network has. Raises DatasetError."""
        data = self.trainer.datamodule
        if (
            isinstance(data, PoseData)
            and (shape := data.spec.pose_shape())
            and ((shape.count, shape.dims) != self.keypoints)
        ):
            count, dims = self.keypoints
            raise DatasetError(
                f"{data.spec.file} has {shape}, this network finds {count} keypoints of {dims} numbers: use data of these, or train "
                "a network for those"
            )
        super().setup(stage)

    def loss(self, raw: list[Tensor], batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the loss of keypoints to the detector's."""
        s, classes = self.settings, len(self.names)
        loss, parts = super().loss([level[..., : 5 + classes] for level in raw], batch)
        points, visible = keypoint_loss(
            raw, batch["targets"], self.model.anchors, classes, self.keypoints, self.sigmas, s.anchor_t
        )
        per_level = 3 / len(raw)
        added = {"keypoint": s.keypoint_gain * per_level * points}
        if self.keypoints[1] == 3:
            added["visible"] = s.visible_gain * per_level * visible
        total = loss + sum(added.values()) * len(raw[0])
        return total, {**parts, **{name: part.detach() for name, part in added.items()}}

    def _build_metrics(self) -> TaskMetrics:
        return PoseMetrics(len(self.names), self.keypoints, self.sigmas)

    def scores(self, results: Any) -> dict[str, float]:
        names = ("keypoint_map50", "keypoint_map50_95", "map50", "map50_95", "precision", "recall")
        summary = results.summary()
        return {name: summary[name] for name in names}

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Boxes and keypoints are in pixels, scores in [0, 1]: each is judged by itself."""
        (predictions,) = outputs
        count, dims = self.keypoints
        rows, points = predictions.split((predictions.shape[-1] - count * dims, count * dims), dim=-1)
        points = points.unflatten(-1, (count, dims))
        parts = {**super().output_parts(rows), "keypoints": points[..., :2]}
        return parts if dims == 2 else {**parts, "visible": points[..., 2]}

    def keep_records(self) -> None:
        raise ValueError(
            "records are of boxes, and this network is judged by keypoints: keep_records is for a Detector"
        )

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import write_charts

        return write_charts(self.results.keypoints, self.names, folder, of="keypoints")


class PoseData(DetectionData):
    """Loaders over a YOLO-format data set whose rows are boxes with keypoints, as ``kpt_shape`` in its data.yaml says."""

    geometry: ClassVar[TaskGeometry] = "keypoints"

    @property
    def network_arguments(self) -> dict[str, Any]:
        shape = self.spec.pose_shape()
        return {**super().network_arguments, "keypoints": (shape.count, shape.dims)}


@dataclass(frozen=True, kw_only=True)
class PoseProcessing(DetectionProcessing):
    """Letterbox before; non-maximum suppression after, and keypoints of the boxes that are kept."""

    keypoints: tuple[int, int]
    """How many keypoints, and numbers of each."""
    sigmas: tuple[float, ...]
    """Deviation of each keypoint, which similarity is measured by; nothing here reads it but evaluation."""

    def postprocess(self, outputs: Any, context: Context) -> list[Detections]:
        """Rows (N, A, 5 + classes + K * dims) as one :class:`Detections` with keypoints per photo, in its own pixels."""
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
