"""Export the trained model of a vision task as programs, and evaluate a program on a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arclight.deploy import Program, export, quantize
from arclight.deploy.formats.formats import Format
from arclight.deploy.settings import Quantization, calibration_batches
from arclight.vision.data.labels import DatasetError
from arclight.vision.models.yolov5 import fuse
from arclight.vision.results.metrics import ClassificationMetrics, DetectionMetrics, SegmentationMetrics
from arclight.vision.results.obb_metrics import OrientedMetrics
from arclight.vision.results.pose_metrics import PoseMetrics
from arclight.vision.tasks.classification import ClassificationData
from arclight.vision.tasks.detection import DetectionData
from arclight.vision.tasks.module import TaskMetrics, VisionModule, evaluate

CALIBRATION_BATCH = 8
"""Images per calibration batch."""


def export_module(
    module: VisionModule,
    path: Path | str,
    images: Any,
    recipe: Quantization | None = None,
    *,
    format: Format | None = None,
) -> Program:
    """Write ``module`` as a program: float32, or quantized by ``recipe``, on ``images`` if it is calibrated.

    ``images``: a data set of training images without augmentation, as the module's data opens them; a few of them check the program against
    the model. ``format`` as in `export`; a quantized model is placed for its runtime. The program says how photos become its input
    and its output becomes results, so ``Program.load(path).predict([photo])`` works.
    Raises ExportError or QuantizeError where the program would not compute what the model does, DatasetError where no image of
    those picked can be decoded, CheckpointError where the weights that the settings name are missing.
    """
    module.check_weights()
    batches = list(_float_batches(images, calibration_batches(recipe)))
    if not batches:
        raise DatasetError(
            f"none of the images picked of {len(images)} can be decoded: repair or remove the damaged ones"
        )
    model: Any = fuse(module.model).cpu()  # a copy: the module stays on its device
    if recipe is not None:
        calibration = batches if recipe.needs_calibration else None
        model = quantize(
            model, calibration, recipe=recipe, example=batches[0], parts=module.output_parts,
            target="openvino" if format == "openvino" else None,
        )  # fmt: skip
    processing = module.processing
    metadata = {
        "task": module.head,
        "names": module.names,
        "image_size": module.settings.image_size,
        "processing": f"{type(processing).__module__}:{type(processing).__name__}",
        "processing_args": asdict(processing),
        "model": module.settings.model,
    }
    return export(
        model,
        path,
        format=format,
        example_inputs=batches[0][:3],
        input_names=["images"],
        output_names=module.output_names,
        metadata=metadata,
        parts=module.output_parts,
    )


def _float_batches(data: Any, count: int) -> Iterator[torch.Tensor]:
    """Up to ``count`` batches spread evenly over ``data``, as the model takes them."""
    picks = np.linspace(0, len(data) - 1, min(len(data), count * CALIBRATION_BATCH)).astype(int).tolist()
    for start in range(0, len(picks), CALIBRATION_BATCH):
        images = [sample.image for sample in data.__getitems__(picks[start : start + CALIBRATION_BATCH])]
        if images:
            yield torch.stack(images).float() / 255


def evaluate_program(program: Program, images: Any, batch_size: int = 8) -> Any:
    """Score a program on ``images``, a data set of its task, exactly as its model is scored during training."""
    metrics, collate = _SCORED[program.metadata.get("task", "detect")]
    scores: Any = metrics(program)
    if isinstance(scores, DetectionMetrics) and getattr(program.processing, "iou_threshold", None) is None:
        scores.iou_threshold = None
    return evaluate(program, images, scores, collate, batch_size)


def _pose_metrics(program: Program) -> PoseMetrics:
    processing: Any = program.processing
    return PoseMetrics(len(processing.names), processing.keypoints, processing.sigmas)


def _by_classes(metrics: Callable[[int], TaskMetrics]) -> Callable[[Program], TaskMetrics]:
    return lambda program: metrics(len(program.metadata["names"]))


_SCORED: dict[str, tuple[Callable[[Program], TaskMetrics], Callable[[Any], dict[str, Any]]]] = {
    "detect": (_by_classes(DetectionMetrics), DetectionData.collate),
    "segment": (_by_classes(SegmentationMetrics), DetectionData.collate),
    "pose": (_pose_metrics, DetectionData.collate),
    "obb": (_by_classes(OrientedMetrics), DetectionData.collate),
    "classify": (_by_classes(ClassificationMetrics), ClassificationData.collate),
}
