"""Scores broken down: by size against pycocotools, errors and calibration against counts by hand; and the page of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from tests.vision.test_metrics import coco_evaluation, scene

from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.results.analysis import (
    ERROR_KINDS,
    SIZES,
    analyse_errors,
    average_precision_by_size,
    best_thresholds,
    calibrate,
    image_errors,
    label_statistics,
    mistakes,
    stage_times,
    summarise,
    worst_images,
)
from arclight.vision.results.metrics import DetectionMetrics, ImageRecord
from arclight.vision.results.records import RecordingMetrics
from arclight.vision.results.validation_page import write_validation
from arclight.vision.tasks.processing import DetectionProcessing

A, B, C, D = (0, 0, 100, 100), (200, 0, 300, 100), (400, 0, 500, 100), (0, 400, 100, 500)


def record(
    predicted: list[tuple[object, float, int]], true: list[tuple[int, object]], path: str = "a.jpg"
) -> ImageRecord:
    rows = [[*box, confidence, label] for box, confidence, label in predicted]
    rows.sort(key=lambda row: -row[4])
    boxes = [[label, *box] for label, box in true]
    return ImageRecord(
        path, (600, 800), np.array(rows, np.float64).reshape(-1, 6), np.array(boxes, np.float64).reshape(-1, 5)
    )


def shifted(box: tuple[int, ...], by: float) -> tuple[float, ...]:
    return (box[0] + by, box[1], box[2] + by, box[3])


# -- by size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [None, 16])
@pytest.mark.parametrize("num_classes", [1, 4])
def test_average_precision_by_size_agrees_with_pycocotools(num_classes: int, grid: int | None) -> None:
    rng = np.random.default_rng(3)
    scenes = [scene(rng, num_classes, boxes, 30, grid) for boxes in (6, 9, 0, 14, 3) * 6]
    records = []
    for i, (found, true) in enumerate(scenes):
        ordered = found[np.argsort(-found[:, 4], kind="stable")].astype(np.float64)
        records.append(ImageRecord(f"{i:03d}", (700, 700), ordered, true.astype(np.float64)))
    own = average_precision_by_size(records, num_classes)
    precision = coco_evaluation(scenes, num_classes).eval["precision"]  # (T, recall, C, area, most)
    for place, size in enumerate(SIZES, start=1):
        expected = precision[:, :, :, place, 2].mean(axis=1).T
        expected = np.where(expected < 0, np.nan, expected)
        assert 0.02 < np.nanmax(expected) < 0.98
        np.testing.assert_allclose(own[size], expected, rtol=0, atol=1e-6)


def test_a_size_that_is_not_there_has_no_score() -> None:
    own = average_precision_by_size([record([(A, 0.9, 0)], [(0, A)])], 2)
    assert own["large"][0].tolist() == pytest.approx([1] * 10)
    assert np.isnan(own["small"]).all()
    assert np.isnan(own["large"][1]).all()


# -- errors ------------------------------------------------------------------------------------------------------------


def six_kinds() -> ImageRecord:
    """Classes 0 and 1; a box of each kind of error."""
    return record(
        [
            (A, 0.9, 0),  # right
            (A, 0.8, 0),  # again
            ((600, 300, 700, 400), 0.7, 0),  # nothing there
            (shifted(B, 50), 0.6, 0),  # a third of B
            (C, 0.5, 0),  # C is of class 1
            (shifted(B, 60), 0.4, 1),  # neither
        ],
        [(0, A), (0, B), (1, C), (1, D)],
    )


def test_each_kind_of_error_is_classified_by_place_and_class() -> None:
    errors = image_errors(six_kinds())
    names = ["right" if kind < 0 else ERROR_KINDS[kind] for kind in errors.kinds]
    assert names == ["right", "duplicate", "background", "localisation", "classification", "both"]
    assert errors.target.tolist() == [0, -1, -1, 1, 2, -1]
    assert errors.undetected.tolist() == [False, True, True, True]
    assert errors.missed.tolist() == [False, False, False, True]
    assert (
        summarise(mistakes(errors)) == "1 classification, 1 localisation, 1 both, 1 duplicate, 1 background, 3 missed"
    )
    sure = image_errors(six_kinds(), confidence=0.65)
    assert len(sure.kinds) == 3
    assert sure.missed.tolist() == [False, True, True, True], "nobody tries to find B and C any more"


def test_cost_of_each_error_by_hand() -> None:
    found = analyse_errors([six_kinds()], 2)
    assert found.counts == dict.fromkeys(ERROR_KINDS, 1)
    # class 0: hits 1 0 0 0 0 of 2, so 51 of 101 recalls at precision 1; class 1: none of 2 found
    assert found.map50 == pytest.approx(51 / 101 / 2)
    expected = {
        # C is found first of class 1: 51 recalls at 1; class 0 loses its last box
        "classification": 51 / 101 / 2,
        # class 0 finds B with the fourth box: 50 more recalls at 2 / 4
        "localisation": 50 * 0.5 / 101 / 2,
        "both": 0.0,
        "duplicate": 0.0,
        "background": 0.0,
        "missed": 0.0,
    }
    assert found.cost == pytest.approx(expected)
    # one box right of two: without D, and with C given to class 1 by nobody, class 1 still has no score
    alone = analyse_errors([record([(A, 0.9, 0)], [(0, A), (0, D)])], 1)
    assert alone.cost["missed"] == pytest.approx(1 - 51 / 101)
    wrong_first = analyse_errors([record([((600, 300, 700, 400), 0.9, 0), (A, 0.5, 0)], [(0, A)])], 1)
    assert wrong_first.cost["background"] == pytest.approx(0.5)


def test_of_two_boxes_that_could_be_mended_the_more_confident_one_counts() -> None:
    both = record([(shifted(A, 50), 0.9, 0), (shifted(A, -50), 0.8, 0)], [(0, A)])
    found = analyse_errors([both], 1)
    assert found.counts["localisation"] == 2
    assert found.cost["localisation"] == pytest.approx(1.0), "the other one is left out"


def test_without_boxes_there_are_no_errors_to_cost() -> None:
    nothing = analyse_errors([], 2)
    assert math.isnan(nothing.map50)
    noise = analyse_errors([record([(A, 0.9, 1)], [])], 2)
    assert noise.counts["background"] == 1
    assert math.isnan(noise.map50)


# -- confidence --------------------------------------------------------------------------------------------------------


def test_calibration_by_hand() -> None:
    right = [(A, 0.95, 0), (B, 0.75, 0), (C, 0.72, 0)]
    wrong = [(shifted(A, 600), 0.78, 0), (shifted(A, 650), 0.01, 0)]
    found = calibrate([record(right + wrong, [(0, A), (0, B), (0, C)])])
    assert found.counts.tolist() == [0] * 7 + [3, 0, 1], "the box of little confidence is left out"
    assert found.precision[7] == pytest.approx(2 / 3)
    assert found.confidence[7] == pytest.approx((0.75 + 0.72 + 0.78) / 3)
    assert found.error == pytest.approx((3 * abs(0.75 - 2 / 3) + 1 * abs(0.95 - 1)) / 4)
    assert math.isnan(calibrate([]).error)


def test_best_threshold_of_each_class() -> None:
    metrics = DetectionMetrics(3)
    predicted = [[*A, 0.9, 0], [*B, 0.6, 0], [*shifted(A, 600), 0.4, 0]]
    metrics.update([np.array(predicted)], [np.array([[0, *A], [0, *B], [1, *C]])])
    first, unfound, absent = best_thresholds(metrics.compute())
    assert first is not None
    assert (first.confidence, first.f1, first.precision, first.recall) == pytest.approx((0.401, 1, 1, 1))
    assert unfound is None
    assert absent is None


# -- labels, images, speed ---------------------------------------------------------------------------------------------


def test_label_statistics() -> None:
    found = label_statistics([record([], [(0, A), (1, (0, 0, 40, 20))]), record([], [], "b.jpg")])
    assert found.per_image.tolist() == [2, 0]
    assert found.side.tolist() == pytest.approx([math.sqrt(100 * 100 / 480000), math.sqrt(800 / 480000)])
    assert found.aspect.tolist() == [1, 2]
    assert found.centres.tolist() == [[50 / 800, 50 / 600], [20 / 800, 10 / 600]]
    assert found.sizes == {"small": 1, "medium": 0, "large": 1}
    point = label_statistics([record([], [(0, (5, 5, 5, 5))])])
    assert len(point.aspect) == 0


def test_worst_images_first_and_clean_ones_never() -> None:
    clean = record([(A, 0.9, 0)], [(0, A)], "clean.jpg")
    one = record([(A, 0.9, 0)], [(0, A), (0, B)], "one.jpg")
    unsure = record([(A, 0.9, 0), (D, 0.2, 0)], [(0, A)], "unsure.jpg")
    two = record([(A, 0.9, 0), (D, 0.9, 0)], [(0, A), (0, B)], "two.jpg")
    worst = worst_images([clean, one, unsure, two], 0.5, 12)
    assert [shown.path for shown, _ in worst] == ["two.jpg", "one.jpg"]
    assert len(worst_images([one, two], 0.5, 1)) == 1


def test_stages_are_timed_without_the_warm_up(tmp_path: Path) -> None:
    photos = [tmp_path / f"{i}.png" for i in range(3)]
    for photo in photos:
        cv2.imwrite(str(photo), np.zeros((20, 30, 3), np.uint8))
    (tmp_path / "damaged.png").write_bytes(b"no image")
    processing = DetectionProcessing(names=["a"], image_size=32)
    times = stage_times(
        [photos[0], tmp_path / "damaged.png", *photos[1:]], processing, lambda batch: torch.zeros(len(batch), 4, 6)
    )
    assert list(times) == ["decode", "preprocess", "network", "postprocess"]
    assert all(len(of) == 2 and min(of) >= 0 for of in times.values())


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(data: Path) -> RecordingMetrics:
    """Eight images of which every label is found, in pixels of their squares; a box too many in each."""
    dataset = DetectionDataset.open(read_data_yaml(data), "train", image_size=64, cache_labels=False)
    metrics = RecordingMetrics(2)
    for start in range(0, len(dataset), 3):
        batch = collate(dataset.__getitems__(range(start, min(start + 3, len(dataset)))))
        found = []
        for place in range(len(batch["images"])):
            rows = batch["targets"][batch["targets"][:, 0] == place]
            low, high = (rows[:, 2:4] - rows[:, 4:6] / 2) * 64, (rows[:, 2:4] + rows[:, 4:6] / 2) * 64
            scores = torch.linspace(0.9, 0.6, len(rows))[:, None]
            right = torch.cat((low, high, scores, rows[:, 1:2]), dim=1)
            found.append(torch.cat((torch.tensor([[0.0, 0, 9, 9, 0.95, 1]]), right)))
        metrics.observe_batch(found, batch)
    return metrics


def test_records_hold_boxes_in_pixels_of_the_image(recorded: RecordingMetrics, data: Path) -> None:
    dataset = DetectionDataset.open(read_data_yaml(data), "train", image_size=64, cache_labels=False)
    results = recorded.compute()
    assert [one.path for one in results.records] == sorted(str(path) for path in dataset.images)
    for one, rows in zip(results.records, dataset.labels, strict=True):
        height, width = one.shape
        assert cv2.imread(one.path).shape[:2] == one.shape
        centres = rows[:, 1:3] * (width, height)
        np.testing.assert_allclose((one.true[:, 1:3] + one.true[:, 3:]) / 2, centres, atol=1e-3)
        assert one.predicted[0, 4] == pytest.approx(0.95)
        np.testing.assert_allclose(one.predicted[1:, :4], one.true[:, 1:], atol=1e-3)
    counted = analyse_errors(results.records, 2)
    assert counted.map50 == pytest.approx(results.map50), "records and scores are of the same boxes"


def test_records_travel_between_processes_and_count_once(recorded: RecordingMetrics) -> None:
    other = RecordingMetrics(2)
    other.load_state_dict(recorded.state_dict())
    for one, again in zip(recorded.compute().records, other.compute().records, strict=True):
        assert (one.path, one.shape) == (again.path, again.shape)
        assert (one.predicted == again.predicted).all()
        assert (one.true == again.true).all()
    other.merge(recorded.state_dict())
    assert len(other.compute().records) == 8
    other.reset()
    assert other.compute().records == ()
    assert DetectionMetrics(1).compute().records == ()


# -- the page ----------------------------------------------------------------------------------------------------------

NAMES = ["<b>code</b>", "text"]


def test_the_page_is_one_file_and_its_numbers_are_the_scores(recorded: RecordingMetrics, tmp_path: Path) -> None:
    results = recorded.compute()
    page = tmp_path / "new" / "validate.html"
    numbers = write_validation(
        page, results, NAMES, title="run & <1>", kind="Validation", facts={"model": "yolov5n"},
        stage_ms={"decode": [1.0, 3.0], "network": [10.0, 12.0]},
    )  # fmt: skip
    html = page.read_text("utf-8")
    assert [file.name for file in page.parent.iterdir()] == ["validate.html"]
    for title in ("Curves", "Classes", "Errors", "Calibration", "Worst images", "Labels", "Speed"):
        assert f"<h2>{title}</h2>" in html
    assert not re.search(r'(?:src|href)="(?!data:|#)', html), "nothing is loaded from elsewhere"
    assert "<b>code</b>" not in html
    assert "run &amp; &lt;1&gt;" in html
    assert html.count("data:image/jpeg") == 8, "each image has a false alarm"
    json.dumps(numbers, allow_nan=False)
    assert numbers["metrics"]["map50"] == results.map50
    assert numbers["images"] == 8
    assert numbers["stage_ms"] == {"decode": 2.0, "network": 11.0}
    assert numbers["errors"]["background"]["count"] == 8
    classes = numbers["classes"]
    assert list(classes) == NAMES
    assert classes["text"]["labels"] == int(results.labels[1])
    assert classes["text"]["confidence"] == pytest.approx(best_thresholds(results)[1].confidence)
    assert classes["text"]["map50_95_large"] is None
    for value in (f"{results.map50:.3f}", f"{classes['text']['f1']:.3f}", "11.0"):
        assert value in html


def test_the_page_of_images_without_boxes(tmp_path: Path) -> None:
    metrics = RecordingMetrics(1)
    batch = {"images": torch.zeros(1, 3, 32, 32), "targets": torch.zeros(0, 6), "paths": ["gone.jpg"]}
    metrics.observe_batch([torch.zeros(0, 6)], {**batch, "shapes": [(10, 10)], "letterbox": [(3.2, 0, 0)]})
    numbers = write_validation(
        tmp_path / "v.html", metrics.compute(), ["a"], title="t", kind="Test", facts={}, stage_ms={}
    )
    html = (tmp_path / "v.html").read_text("utf-8")
    assert "<h2>Errors</h2>" not in html
    assert numbers["metrics"]["map50"] is None
    assert numbers["classes"]["a"]["map50"] is None
    assert numbers["stage_ms"] == {}
