"""Images to label next, and labels of confident detections."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from arclight.vision import Detections
from arclight.vision.results.labelling import MostUncertain, PseudoLabels, read_thresholds, uncertainty
from arclight.vision.results.writers import Prediction

NAMES = ["cat", "dog"]


def found(*confidences: float, labels: list[int] | None = None) -> Detections:
    boxes = [[10 * i, 0, 10 * i + 8, 8] for i in range(len(confidences))]
    return Detections.from_arrays(boxes, confidences, labels or [0] * len(confidences), names=NAMES)


def prediction(name: str, candidates: Detections) -> Prediction:
    sure = candidates[candidates.boxes.conf >= 0.25]
    return Prediction(name, name, name, None, None, np.zeros((40, 80, 3), np.uint8), sure, (), candidates)


def test_uncertainty_by_hand() -> None:
    assert f"{uncertainty(found()):.2f}" == "0.00", "and not -0.00, as it was printed"
    assert uncertainty(found(0.5)) == pytest.approx(1)
    assert uncertainty(found(0.25, 0.75)) == pytest.approx(2 * 0.811278, abs=1e-6)
    assert uncertainty(found(1.0)) == pytest.approx(0, abs=1e-6)
    assert uncertainty(found(0.5, 0.04)) == pytest.approx(1), "noise does not count"


def test_the_most_uncertain_images_first() -> None:
    most = MostUncertain(2)
    with most as writer:
        for name, confidences in (
            ("sure", [0.99]),
            ("torn", [0.5, 0.5]),
            ("half", [0.5]),
            ("same", [0.5]),
            ("empty", []),
        ):
            writer.write(prediction(name, found(*confidences)))
    assert [(name, round(score, 6)) for score, name in most.ranking] == [("torn", 2), ("half", 1)]


def test_doubtful_boxes_count_only_on_request() -> None:
    doubtful = prediction("a", found(0.9, 0.1))
    assert len(doubtful.found) == 1
    assert len(doubtful.doubtful) == 2
    plain = Prediction("a", "a", "a", None, None, np.zeros((4, 4, 3), np.uint8), found(0.9))
    assert len(plain.doubtful) == 1


def test_labels_of_what_is_above_the_threshold_of_its_class(tmp_path: Path) -> None:
    with PseudoLabels(tmp_path / "new", {"cat": 0.6, "dog": 0.1}) as writer:
        writer.write(prediction("a", found(0.7, 0.5, 0.2, labels=[0, 0, 1])))
        writer.write(prediction("b", found(0.5, labels=[0])))
        writer.write(prediction("c", found()))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"], "no file calls an image background"
    rows = [line.split() for line in (tmp_path / "new" / "a.txt").read_text().splitlines()]
    assert [row[0] for row in rows] == ["0", "1"]
    assert [float(value) for value in rows[1][1:]] == pytest.approx([24 / 80, 4 / 40, 8 / 80, 8 / 40])
    with PseudoLabels(tmp_path / "none", {"dog": 0.1}) as writer:
        writer.write(prediction("a", found(0.99)))
    assert not (tmp_path / "none").exists(), "a class without a threshold is never sure"


def test_thresholds_are_those_of_validate(tmp_path: Path) -> None:
    file = tmp_path / "validate.json"
    file.write_text(json.dumps({"classes": {"cat": {"confidence": 0.6, "f1": 0.9}, "dog": {"labels": 0}}}))
    assert read_thresholds(file) == {"cat": 0.6}
    for text in ("no json", "[]", '{"classes": [1]}', '{"classes": {"cat": {"confidence": "much"}}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"holds no thresholds: give the validate\.json"):
            read_thresholds(file)
    for confidence in ("NaN", "-0.1", "1e999"):
        file.write_text(f'{{"classes": {{"cat": {{"confidence": {confidence}}}}}}}')
        with pytest.raises(ValueError, match=r"the confidence of class 'cat' is .*: it must be from 0 to 1"):
            read_thresholds(file)
    file.write_text('{"classes": {"cat": {}}}')
    with pytest.raises(ValueError, match="has no threshold of any class"):
        read_thresholds(file)
