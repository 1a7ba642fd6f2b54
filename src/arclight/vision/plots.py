"""Pictures of how a detector does, for the run's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.trainer import Callback
from arclight.vision import charts
from arclight.vision.draw import grid
from arclight.vision.images import decode_image

if TYPE_CHECKING:
    from arclight.trainer import Trainer
    from arclight.vision.dataset import DetectionDataset
    from arclight.vision.detector import Detector

SAMPLES = 12
"""Validation photos shown with their predictions."""


class DetectionPlots(Callback):
    """Writes the precision-recall curve, the confusion matrix and sample predictions into the run's ``plots`` folder.

    Only where the run writes anything at all: a trainer without loggers gets no files.
    """

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        detector: Detector = pl_module
        if not trainer.is_global_zero or not trainer.loggers or detector.results is None:
            return
        whole = not getattr(
            trainer.strategy, "in_stages", False
        )  # else no process has a model that could look at photos
        photos = getattr(trainer.datamodule, "val", None) if whole else None
        write_plots(detector, photos, trainer.run_folder.plots)


def write_plots(detector: Detector, photos: DetectionDataset | None, folder: Path) -> None:
    """The plots of ``detector.results`` and sample predictions on ``photos``, with captions, into ``folder``."""
    import cv2

    folder.mkdir(parents=True, exist_ok=True)
    results = detector.results
    (folder / "pr_curve.svg").write_text(charts.pr_curve(results, detector.names), encoding="utf-8")
    (folder / "confusion_matrix.svg").write_text(charts.confusion_matrix(results, detector.names), encoding="utf-8")
    captions = {
        "pr_curve.svg": "Precision against recall on the validation images, at an overlap of 0.5.",
        "confusion_matrix.svg": "What was there (columns) and what was found (rows), at confidence 0.25 and overlap 0.45.",
    }
    if photos is not None and len(photos):
        picks = np.linspace(0, len(photos) - 1, min(SAMPLES, len(photos))).astype(int)
        images = [decode_image(photos.images[int(i)]) for i in picks]
        shown = [found.plot() for found in detector.detect(images)]
        sheet = grid(shown, columns=4, side=320)
        cv2.imwrite(
            str(folder / "predictions.jpg"), cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 85]
        )
        captions["predictions.jpg"] = "Predictions on validation images."
    (folder / "captions.json").write_text(json.dumps(captions, indent=1), encoding="utf-8")
