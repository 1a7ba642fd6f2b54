"""Export the trained model of a vision task as programs; evaluate a program on data.

``arclight demo`` exports and scores by this, ``arclight compare`` opens evaluations of two programs by `evaluation_of` (``arclight export`` goes
through `VisionModule.configure_deployment`). Photos are preprocessed as in validation, so that a program is verified on what it will get.
A new task needs an entry in `_TASKS` and `_SCORED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from arclight.deploy import Program
from arclight.deploy.comparison import Evaluation
from arclight.deploy.deployment import ship
from arclight.deploy.settings import Quantization, calibration_batches
from arclight.vision.data.data_yaml import merges_classes, read_data_yaml
from arclight.vision.data.labels import DatasetError
from arclight.vision.results.metrics import ClassificationMetrics, DetectionMetrics, SegmentationMetrics
from arclight.vision.results.obb_metrics import OrientedMetrics
from arclight.vision.results.pose_metrics import PoseMetrics
from arclight.vision.tasks.classification import ClassificationData
from arclight.vision.tasks.detection import DetectionData
from arclight.vision.tasks.module import TaskMetrics, VisionModule, evaluate
from arclight.vision.tasks.settings import (
    ClassificationTask,
    CornersTask,
    DetectionTask,
    OrientedDetectionTask,
    PoseTask,
    SegmentationTask,
    VisionTask,
)


def export_module(
    module: VisionModule, path: Path | str, images: Any, recipe: Quantization | None = None, **options: Any
) -> Program:  # fmt: skip
    """Export ``module`` as a program, verified (and calibrated) on ``images``.

    See `VisionModule.deployment`, and `ship` for options and errors.
    """
    program: Program = ship(module.deployment(images, calibration_batches(recipe)), path, recipe, **options)
    return program


def evaluate_program(program: Program, images: Any, batch_size: int = 8) -> Any:
    """Score a program on ``images``, a data set of its task, by the metrics of its validation."""
    metrics, collate = _SCORED[program.metadata.get("task", "detect")]
    scores: Any = metrics(program)
    if isinstance(scores, DetectionMetrics) and getattr(program.processing, "iou_threshold", None) is None:
        scores.iou_threshold = None
    return evaluate(program, images, scores, collate, batch_size)


def evaluation_of(program: Program, data: Path | str, split: str = "val") -> Evaluation:
    """Return the evaluation of programs of a vision task on a split of ``data``.

    Raises DatasetError for data of other classes, ValueError if an architecture of one's own, which the program names, is not here.
    """
    described = program.metadata
    settings = _TASKS[described["task"]](data=Path(data), model=described["model"], image_size=described["image_size"])
    if isinstance(settings, DetectionTask) and merges_classes(described["names"], read_data_yaml(data).names):
        settings = replace(settings, single_class=True)
    if isinstance(settings, PoseTask):
        processing: Any = program.processing
        settings = replace(settings, keypoint_sigmas=tuple(processing.sigmas), cyclic=processing.cyclic)
    module, loaders = settings.build()
    assert isinstance(module, VisionModule)
    if module.names != list(described["names"]):
        raise DatasetError(
            f"{data} has the classes {', '.join(module.names)}, and {program.path} was trained on {', '.join(described['names'])}"
        )
    return module.evaluation(loaders, split)


def _pose_metrics(program: Program) -> PoseMetrics:
    processing: Any = program.processing
    return PoseMetrics(len(processing.names), processing.keypoints, processing.sigmas, processing.cyclic)


def _by_classes(metrics: Callable[[int], TaskMetrics]) -> Callable[[Program], TaskMetrics]:
    return lambda program: metrics(len(program.metadata["names"]))


_TASKS: dict[str, type[VisionTask]] = {
    "detect": DetectionTask, "segment": SegmentationTask, "pose": PoseTask, "corners": CornersTask, "obb": OrientedDetectionTask,
    "classify": ClassificationTask,
}  # fmt: skip
_SCORED: dict[str, tuple[Callable[[Program], TaskMetrics], Callable[[Any], dict[str, Any]]]] = {
    "detect": (_by_classes(DetectionMetrics), DetectionData.collate),
    "segment": (_by_classes(SegmentationMetrics), DetectionData.collate),
    "pose": (_pose_metrics, DetectionData.collate),
    "corners": (_pose_metrics, DetectionData.collate),
    "obb": (_by_classes(OrientedMetrics), DetectionData.collate),
    "classify": (_by_classes(ClassificationMetrics), ClassificationData.collate),
}
