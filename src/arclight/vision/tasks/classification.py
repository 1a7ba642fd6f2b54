"""Define the Module, DataModule and processing of image classification.

A recipe of kind ``classification`` (`ClassificationTask`) builds these classes; users take `Classifier` from ``arclight.vision``.
Training and validation run through `VisionModule`; an exported program has the same processing. Parameter names are in checkpoints, the
name of `ClassificationProcessing` and its fields in programs: they stay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from arclight.fabric.atomic_replace import replace_text
from arclight.vision.data.image_folder import ImageFolder, central_square, class_names, collate
from arclight.vision.data.images import Image
from arclight.vision.models.architectures import HeadBlock
from arclight.vision.models.heads import ClassifyHead
from arclight.vision.results.image_class import Classification
from arclight.vision.results.metrics import ClassificationMetrics, ClassificationResults
from arclight.vision.tasks.distillation import class_distillation
from arclight.vision.tasks.module import TaskMetrics, VisionData, VisionModule
from arclight.vision.tasks.processing import as_batch, check_photos

_LOG = logging.getLogger("arclight")


class Classifier(VisionModule):
    """Trains and runs a classifier of whole images.

    >>> classifier = Classifier(ClassificationTask(data="flowers", model="yolov5n-cls"), names=["rose", "tulip"])
    >>> classifier.predict([photo])[0].label                # photo: RGB uint8 (H, W, 3)
    """

    head: ClassVar[HeadBlock] = "classify"
    output_names: ClassVar[list[str]] = ["probabilities"]

    def __init__(self, settings: Any, names: Sequence[str], table: str | None = None) -> None:
        """Initialise the classifier from a `ClassificationTask`.

        ``table``: as for every `VisionModule`.
        """
        super().__init__(settings, names, table)
        head = self.model.head
        assert isinstance(head, ClassifyHead)
        head.drop.p = settings.dropout

    @property
    def processing(self) -> ClassificationProcessing:
        return ClassificationProcessing(names=self.names, image_size=self.settings.image_size)

    def loss(self, raw: Tensor, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(raw.device.type, enabled=False):
            logits = raw if raw.dtype == torch.float64 else raw.float()
            loss = F.cross_entropy(logits, batch["targets"], label_smoothing=self.settings.label_smoothing)
        return loss, {"cls": loss.detach()}

    def distillation_loss(self, raw: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
        return class_distillation(raw, taught, self.settings.teacher_temperature)

    def _build_metrics(self) -> TaskMetrics:
        return ClassificationMetrics(len(self.names))

    def scores(self, results: ClassificationResults) -> dict[str, float]:
        return results.summary()

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        (probabilities,) = outputs
        return {"probabilities": probabilities}

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import class_confusion

        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "confusion_matrix.svg", class_confusion(self.results, self.names), durable=False)
        return {"confusion_matrix.svg": "What the images were (columns) and what was likeliest (rows)."}


@dataclass(frozen=True, kw_only=True)
class ClassificationProcessing:
    """Processing of classification: the middle square of each photo before, class names after."""

    names: list[str]
    """Class names, by number."""
    image_size: int
    """Side of the square input, pixels."""

    def preprocess(self, images: Sequence[Image]) -> tuple[np.ndarray[Any, Any], list[Image]]:
        """Convert RGB uint8 photos (H, W, 3) to one float32 batch (N, 3, S, S) in [0, 1].

        Photos may have any sizes.
        """
        check_photos(images)
        return as_batch([central_square(image, self.image_size) for image in images]), list(images)

    def postprocess(self, outputs: Any, context: list[Image]) -> list[Classification]:
        """Convert probabilities (N, C) to one :class:`Classification` per photo."""
        probs = np.asarray(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
        return [Classification(row, tuple(self.names), image) for row, image in zip(probs, context, strict=True)]


class ClassificationData(VisionData):
    """Loaders over folders of images."""

    collate = staticmethod(collate)

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._names = class_names(settings.data)

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def open_for_training(self) -> ImageFolder:
        return self.open("train", augment=self.settings.augment, cache=self.settings.cache)

    def open(self, split: str, **options: Any) -> ImageFolder:
        dataset = ImageFolder.open(
            self.settings.data, split, self.names, image_size=self.settings.image_size, **options
        )
        if (report := dataset.report) is not None and (report.corrupt or report.empty):
            _LOG.warning("%s", report)
        return dataset
