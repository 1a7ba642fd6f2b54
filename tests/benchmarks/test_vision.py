"""The scenes and scores that the vision benchmark is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("segno")

from benchmarks.moving_codes import SIDE, MovingFrame, frames

from arclight.vision import Detections
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.lint.checks import lint
from benchmarks import vision


def found(boxes: np.ndarray, conf: float = 0.9) -> Detections:
    return Detections.from_arrays(boxes, np.full(len(boxes), conf), np.zeros(len(boxes)), names=["qr_code"])


@pytest.fixture(scope="module")
def scene() -> list[MovingFrame]:
    return list(frames(3, 30))


def test_moving_scenes_are_the_same_each_time_and_hide_codes(scene: list[MovingFrame]) -> None:
    for one, other in zip(scene, frames(3, 30)):
        np.testing.assert_array_equal(one.image, other.image)
        np.testing.assert_array_equal(one.boxes, other.boxes)
        assert one.image.shape == (SIDE, SIDE, 3)
        assert len(one.ids) == len(one.boxes) == 5 - len(one.hidden)
        assert (one.boxes[:, 2:] > one.boxes[:, :2]).all()
        assert one.boxes.min() >= 0
        assert one.boxes.max() <= SIDE
    assert any(len(frame.hidden) for frame in scene)


@pytest.mark.parametrize("name", vision.TRACKERS)
def test_perfect_boxes_are_followed_and_hidden_codes_are_no_mistake(name: str, scene: list[MovingFrame]) -> None:
    perfect = [found(np.concatenate((frame.boxes, frame.hidden))) for frame in scene]
    scores = vision._score(name, scene, perfect)
    assert scores.idf1 > 0.9
    shifted = [found(frame.boxes + 300) for frame in scene]
    assert vision._score(name, scene, shifted).idf1 == 0


def test_boxes_in_hidden_codes_are_ignored_and_others_are_not() -> None:
    nothing, image = np.zeros((0, 4)), np.zeros((1, 1, 3), np.uint8)
    hidden = MovingFrame(image, np.arange(0), nothing, np.array([[0.0, 0, 100, 100]]))
    for box, wrong in (([50, 0, 100, 100], 0), ([200, 200, 300, 300], 4)):
        scores = vision._score("bytetrack", [hidden] * 4, [found(np.array([box], float))] * 4)
        assert scores.false_positives == wrong


def test_sheets_give_the_places_of_their_codes() -> None:
    image, boxes = vision._sheet(0)
    assert image.shape == (960, 960, 3)
    assert len(boxes) >= 9 - 3
    assert boxes.min() >= 0
    assert boxes.max() <= 960
    exact = vision.average_precision([found(boxes)], [boxes])
    assert exact.map50_95 == pytest.approx(1, abs=0.01)
    assert vision._hits(found(boxes[:2]), boxes) == 2
    assert vision._hits(found(np.zeros((0, 4))), boxes) == 0


def test_images_that_lint_is_timed_on_are_sound_and_unlike_each_other(tmp_path: Path) -> None:
    report = lint(read_data_yaml(vision.unlike_images(tmp_path, 30, size=96)), image_size=320, cache=False)
    assert {split: len(found.images) for split, found in report.splits.items()} == {"train": 27, "val": 3}
    assert not report.findings
