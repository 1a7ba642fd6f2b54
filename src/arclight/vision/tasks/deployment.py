"""Export a trained detector as programs, and evaluate a program on a data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arclight.deploy import Program, export, quantize
from arclight.deploy.settings import Int8
from arclight.vision.data.dataset import DatasetError, DetectionDataset, collate
from arclight.vision.models.yolov5 import fuse
from arclight.vision.results.metrics import DetectionMetrics, DetectionResults
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.module import evaluate

CALIBRATION_BATCH = 8
"""Images per calibration batch."""


def export_detector(
    detector: Detector, path: Path | str, dataset: DetectionDataset, int8: Int8 | None = None
) -> Program:
    """Write ``detector`` as one program file: float32, or with ``int8`` settings quantized on ``dataset``.

    ``dataset``: letterboxed training images without augmentation; a few of them check the program against the model.
    The file says how photos become its input and its output becomes boxes, so ``Program.load(path).predict([photo])`` works.
    Raises ExportError or QuantizeError where the program would not compute what the model does, DatasetError where no image of
    those picked can be decoded, CheckpointError where the weights that the settings name are missing.
    """
    detector.check_weights()
    batches = list(_float_batches(dataset, int8.calibration_batches if int8 is not None else 1))
    if not batches:
        raise DatasetError(
            f"none of the images picked of {len(dataset)} can be decoded: repair or remove the damaged ones"
        )
    model: Any = fuse(detector.model).cpu()  # a copy: the detector stays on its device
    if int8 is not None:
        model = quantize(model, batches, recipe=int8, parts=_parts)
    metadata = {
        "task": "detect",
        "names": detector.names,
        "image_size": detector.settings.image_size,
        "processing": "arclight.vision.tasks.processing:DetectionProcessing",
        "processing_args": asdict(detector.processing),
        "model": detector.settings.model,
    }
    return export(
        model,
        path,
        example_inputs=batches[0][:3],
        input_names=["images"],
        output_names=["predictions"],
        metadata=metadata,
        parts=_parts,
    )


def _parts(predictions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Boxes are in pixels and scores in [0, 1]: judged together, boxes would hide scores that are all wrong."""
    return {"boxes": predictions[..., :4], "scores": predictions[..., 4:]}


def _float_batches(dataset: DetectionDataset, count: int) -> Iterator[torch.Tensor]:
    """Up to ``count`` batches spread evenly over ``dataset``, as the model takes them."""
    picks = np.linspace(0, len(dataset) - 1, min(len(dataset), count * CALIBRATION_BATCH)).astype(int).tolist()
    for start in range(0, len(picks), CALIBRATION_BATCH):
        batch = collate(dataset.__getitems__(picks[start : start + CALIBRATION_BATCH]))
        if len(batch["images"]):
            yield batch["images"].float() / 255


def evaluate_program(program: Program, dataset: DetectionDataset, batch_size: int = 8) -> DetectionResults:
    """Average precision of a program, measured exactly as a detector's is during training."""
    metrics = DetectionMetrics(num_classes=len(program.metadata["names"]))
    results: DetectionResults = evaluate(program, dataset, metrics, collate, batch_size)
    return results
