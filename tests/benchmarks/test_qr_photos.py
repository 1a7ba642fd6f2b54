"""Scores of the benchmark of real photos, by group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("zxingcpp")

from benchmarks.qr_photos import precision_by_group

from arclight.vision.results.metrics import DetectionMetrics


def photos(*names: str) -> SimpleNamespace:
    return SimpleNamespace(images=[Path(f"images/test/{name}.jpg") for name in names])


def test_groups_and_all_photos_are_scored_from_one_prediction_each() -> None:
    seen: list[int] = []

    def evaluated(chosen: list[int]) -> DetectionMetrics:
        """A detector that finds the code of even photos, and surer boxes without a code in odd ones."""
        seen.extend(chosen)
        metrics = DetectionMetrics(num_classes=1)
        for number in chosen:
            place = [0, 0, 10, 10] if number % 2 == 0 else [50, 50, 60, 60]
            metrics.update([[[*place, 0.8 if number % 2 == 0 else 0.9, 0]]], [[[0, 0, 0, 10, 10]]])
        return metrics

    values = precision_by_group(photos("phone_0", "packs_1", "phone_2"), evaluated)
    assert sorted(seen) == [0, 1, 2]
    assert values == pytest.approx({"phone": 1, "packs": 0, "": 67 * 2 / 3 / 101}, abs=1e-6)


def test_photos_of_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 photos"):
        precision_by_group(photos("phone_0", "other_1"), lambda chosen: scored(len(chosen)))


def scored(images: int) -> DetectionMetrics:
    metrics = DetectionMetrics(num_classes=1)
    metrics.update([[[0, 0, 10, 10, 0.9, 0]]] * images, [[[0, 0, 0, 10, 10]]] * images)
    return metrics
