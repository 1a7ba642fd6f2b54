"""Record each image's detections and true boxes, for an analysis beyond the scores.

`Detector.keep_records` and ``arclight compare`` take `RecordingMetrics` in place of `DetectionMetrics`; `analysis` and the pages read the
`ImageRecord` of each image. Records are sent between ranks, as plain arrays and paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from arclight.vision.results.metrics import DetectionMetrics, DetectionResults, ImageRecord


class RecordingMetrics(DetectionMetrics):
    """Metrics as `DetectionMetrics` that keep each image in ``compute().records``.

    They are in the order of their paths. An image that several processes saw is kept once. Takes about 50 bytes for
    each box found.
    """

    def reset(self) -> None:
        super().reset()
        self._records: dict[str, ImageRecord] = {}

    def observe_batch(self, predictions: Sequence[Tensor], batch: dict[str, Any]) -> None:
        super().observe_batch(predictions, batch)
        height, width = batch["images"].shape[-2:]
        size, targets = np.array([width, height, width, height]), batch["targets"].detach().cpu().double().numpy()
        for place, (found, path) in enumerate(zip(predictions, batch["paths"], strict=True)):
            scale, pad_x, pad_y = batch["letterbox"][place]
            offset = np.array([pad_x, pad_y, pad_x, pad_y], np.float64)
            rows = found.detach().cpu().double().numpy().reshape(-1, 6)
            rows = rows[np.argsort(-rows[:, 4], kind="stable")]
            own = targets[targets[:, 0] == place]
            low, high = own[:, 2:4] - own[:, 4:6] / 2, own[:, 2:4] + own[:, 4:6] / 2
            true = np.concatenate((own[:, 1:2], (np.concatenate((low, high), axis=1) * size - offset) / scale), axis=1)
            predicted = np.concatenate(((rows[:, :4] - offset) / scale, rows[:, 4:]), axis=1)
            height, width = batch["shapes"][place]
            self._records.setdefault(str(path), ImageRecord(str(path), (int(height), int(width)), predicted, true))

    def state_dict(self) -> dict[str, Any]:
        kept = list(self._records.values())
        return {
            **super().state_dict(),
            "paths": [one.path for one in kept],
            "shapes": np.array([one.shape for one in kept], np.int64).reshape(-1, 2),
            "predicted": np.concatenate([np.empty((0, 6)), *(one.predicted for one in kept)]),
            "predicted_lengths": np.array([len(one.predicted) for one in kept], np.int64),
            "true": np.concatenate([np.empty((0, 5)), *(one.true for one in kept)]),
            "true_lengths": np.array([len(one.true) for one in kept], np.int64),
        }

    def merge(self, state: dict[str, Any]) -> None:
        super().merge(state)
        rows = (np.split(state[name], np.cumsum(state[f"{name}_lengths"])[:-1]) for name in ("predicted", "true"))
        for path, (height, width), predicted, true in zip(state["paths"], state["shapes"].tolist(), *rows):
            self._records.setdefault(path, ImageRecord(path, (height, width), predicted, true))

    def compute(self) -> DetectionResults:
        records = tuple(self._records[path] for path in sorted(self._records))
        return dataclasses.replace(super().compute(), records=records)


def name_of(record: ImageRecord) -> str:
    """Name an image as a page has room for: its file's name."""
    return Path(record.path).name
