"""Average precision against pycocotools, and the other scores against hand counts."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from arclight.vision.results.metrics import DetectionMetrics

coco = pytest.importorskip("pycocotools.coco")
cocoeval = pytest.importorskip("pycocotools.cocoeval")


def scene(rng, num_classes, boxes, extra, grid=None):
    """True boxes (m, 5), and predictions (k, 6): jittered and mislabelled copies of them, and noise."""
    xy, wh = rng.uniform(0, 500, (boxes, 2)), rng.uniform(5, 140, (boxes, 2))
    true = np.concatenate((rng.integers(num_classes, size=(boxes, 1)), xy, xy + wh), axis=1)
    copies = true[rng.integers(boxes, size=3 * boxes)] if boxes else np.empty((0, 5))
    jitter = copies[:, 1:] + rng.normal(0, 6, (len(copies), 4))
    noise_xy, noise_wh = rng.uniform(0, 500, (extra, 2)), rng.uniform(5, 140, (extra, 2))
    found = np.concatenate((jitter, np.concatenate((noise_xy, noise_xy + noise_wh), axis=1)))
    found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
    labels = np.concatenate((copies[:, 0], rng.integers(num_classes, size=extra)))
    wrong = rng.random(len(labels)) < 0.1
    labels[wrong] = rng.integers(num_classes, size=wrong.sum())
    predictions = np.concatenate((found, rng.random((len(found), 1)), labels[:, None]), axis=1)
    if grid:  # equal scores and equal overlaps everywhere
        true[:, 1:] = np.round(true[:, 1:] / grid) * grid
        predictions[:, :4] = np.round(predictions[:, :4] / grid) * grid
        true[:, 3:] = np.maximum(true[:, 3:], true[:, 1:3] + grid)
        predictions[:, 2:4] = np.maximum(predictions[:, 2:4], predictions[:, :2] + grid)
        predictions[:, 4] = np.round(predictions[:, 4], 1)
    return predictions.astype(np.float32), true.astype(np.float32)


def coco_evaluation(scenes, num_classes):
    """The reference's evaluation of scenes."""
    annotations, detections = [], []
    for image_id, (predictions, truths) in enumerate(scenes):
        for label, x1, y1, x2, y2 in truths.astype(float).tolist():
            w, h = x2 - x1, y2 - y1
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image_id, "category_id": int(label), "bbox": [x1, y1, w, h]}
                | {"area": w * h, "iscrowd": 0}
            )
        for x1, y1, x2, y2, score, label in predictions.astype(float).tolist():
            bbox = [x1, y1, x2 - x1, y2 - y1]
            detections.append({"image_id": image_id, "category_id": int(label), "bbox": bbox, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(len(scenes))],
            "categories": [{"id": c} for c in range(num_classes)],
            "annotations": annotations,
        }
        truth.createIndex()
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def pycocotools_ap(scenes, num_classes):
    """(C, 10) average precision by the reference, NaN for classes without boxes."""
    precision = coco_evaluation(scenes, num_classes).eval["precision"][
        :, :, :, 0, 2
    ]  # (T, recall, C) for all areas and 100 detections
    ap = precision.mean(axis=1).T
    return np.where(ap < 0, np.nan, ap)


def score(scenes, num_classes, **options):
    metrics = DetectionMetrics(num_classes)
    metrics.update([p for p, _ in scenes], [t for _, t in scenes], **options)
    return metrics.compute()


CASES = {
    "one class": (1, [(6, 20)] * 20, None),
    "many classes": (8, [(8, 30)] * 20, None),
    "ties everywhere": (3, [(12, 40)] * 20, 20),
    "images without boxes": (3, [(5, 20), (0, 20), (0, 0), (6, 0)] * 5, None),
    "more than 100 predictions of a class": (2, [(60, 400)] * 4, None),
    "classes without boxes": (40, [(1, 60)] * 10, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_average_precision_agrees_with_pycocotools(case, seed):
    num_classes, images, grid = CASES[case]
    rng = np.random.default_rng(seed)
    scenes = [scene(rng, num_classes, boxes, extra, grid) for boxes, extra in images]
    expected = pycocotools_ap(scenes, num_classes)
    results = score(scenes, num_classes)
    assert 0.02 < np.nanmean(expected) < 0.98
    np.testing.assert_allclose(results.average_precision, expected, rtol=0, atol=1e-6)
    assert results.map50_95 == pytest.approx(np.nanmean(expected), abs=1e-6)
    assert results.map50 == pytest.approx(np.nanmean(expected[:, 0]), abs=1e-6)


def test_a_class_that_is_never_predicted_has_zero_precision():
    truths = [[0, 0, 0, 10, 10], [1, 20, 20, 40, 40]]
    results = score([(np.array([[0, 0, 10, 10, 0.9, 0]]), np.array(truths))], 3)
    assert results.average_precision[:2].tolist() == [pytest.approx([1] * 10), [0] * 10]
    assert np.isnan(results.average_precision[2]).all()
    assert results.map50 == pytest.approx(0.5)


def test_precision_recall_and_confusion_by_hand():
    truths = np.array([[0, 0, 0, 100, 100], [0, 200, 0, 300, 100], [1, 0, 200, 100, 300], [1, 400, 400, 500, 500]])
    predictions = np.array(
        [
            [0, 0, 100, 100, 0.9, 0],  # right
            [0, 2, 100, 100, 0.8, 0],  # the same box again
            [200, 0, 300, 100, 0.7, 1],  # right place, wrong class
            [0, 200, 100, 300, 0.6, 1],  # right
            [600, 600, 700, 700, 0.5, 1],  # nothing there
            [400, 400, 500, 500, 0.1, 1],  # right, but less confident than the matrix asks for
        ]
    )
    results = score([(predictions, truths)], 2)
    assert results.confusion.tolist() == [[1, 0, 1], [1, 1, 1], [0, 1, 0]]
    assert results.labels.tolist() == [2, 2]
    at = lambda threshold: round(threshold * 1000)  # noqa: E731
    assert results.precision_curve[0, at(0.5)] == pytest.approx(1 / 2)
    assert results.recall_curve[0, at(0.5)] == pytest.approx(1 / 2)
    assert results.precision_curve[1, at(0.05)] == pytest.approx(2 / 4)
    assert results.recall_curve[1, at(0.05)] == 1
    assert results.f1_curve[1, at(0.05)] == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert results.recall_curve[1, at(0.6)] == pytest.approx(1 / 2)  # a threshold keeps its own score
    assert results.recall_curve[1, at(0.601)] == 0
    best = results.f1_curve.mean(axis=0)
    assert results.f1 == best.max()
    assert best[at(results.confidence)] == best.max()
    # class 0 descends: 1 of 1, 1 of 2; class 1: 0 of 1, 1 of 2, 1 of 3, 2 of 4
    np.testing.assert_allclose(results.precision_at_recall[0], np.where(np.arange(101) <= 50, 1.0, 0.0))
    np.testing.assert_allclose(results.precision_at_recall[1], 0.5)


def test_a_batch_of_tensors_scores_like_its_images():
    rng = np.random.default_rng(0)
    scenes = [scene(rng, 2, boxes, 10) for boxes in (4, 0, 7)]
    targets = [
        [i, label, (x1 + x2) / 2 / 640, (y1 + y2) / 2 / 640, (x2 - x1) / 640, (y2 - y1) / 640]
        for i, (_, truths) in enumerate(scenes)
        for label, x1, y1, x2, y2 in truths.tolist()
    ]
    metrics = DetectionMetrics(2)
    metrics.update_batch([torch.from_numpy(p) for p, _ in scenes], torch.tensor(targets), size=640)
    assert len(metrics) == 3
    np.testing.assert_allclose(metrics.compute().average_precision, score(scenes, 2).average_precision, atol=1e-9)
    metrics.reset()
    metrics.update_batch([], torch.zeros(0, 6), size=640)
    assert len(metrics) == 0


def test_processes_merge_to_the_score_of_one_with_padding_and_ties():
    rng = np.random.default_rng(0)
    scenes = [scene(rng, 3, 6, 20, grid=20) for _ in range(11)]
    alone = score(scenes, 3, image_ids=range(11))
    shards = [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]  # a sampler gives image 0 twice, so that shards are equal
    merged = DetectionMetrics(3)
    for shard in reversed(shards):
        worker = DetectionMetrics(3)
        worker.update([scenes[i][0] for i in shard], [scenes[i][1] for i in shard], image_ids=shard)
        merged.merge(worker.state_dict())
    results = merged.compute()
    assert results.images == 11
    assert results.summary() == alone.summary()
    assert (results.average_precision == alone.average_precision).all()
    assert (results.confusion == alone.confusion).all()


def test_state_survives_and_does_not_grow_by_loading():
    rng = np.random.default_rng(0)
    metrics = DetectionMetrics(2)
    metrics.update(*zip(*[scene(rng, 2, boxes, 5) for boxes in (3, 0)]))
    other = DetectionMetrics(2)
    for _ in range(2):
        other.load_state_dict(metrics.state_dict())
    assert len(other) == 2
    assert other.compute().summary() == metrics.compute().summary()
    other.merge(DetectionMetrics(2).state_dict())
    assert len(other) == 2
    with pytest.raises(ValueError, match="2 classes into 3"):
        DetectionMetrics(3).merge(metrics.state_dict())


def test_metrics_without_labels_are_nan():
    results = DetectionMetrics(2).compute()
    assert results.images == 0
    assert np.isnan(results.map50)
    assert results.confusion.sum() == 0
    only_noise = score([(np.array([[0, 0, 5, 5, 0.9, 1]]), np.empty((0, 5)))], 2)
    assert np.isnan(only_noise.map50_95)
    assert only_noise.confusion[1, 2] == 1
    json.dumps(only_noise.summary())


@pytest.mark.parametrize(
    ("predictions", "truths", "message"),
    [
        (np.zeros((2, 5)), np.zeros((0, 5)), r"\(n, 6\), their shape is \(2, 5\)"),
        (np.zeros((0, 6)), np.zeros(5), r"\(n, 5\), their shape is \(5,\)"),
        (np.array([[0, 0, 1, 1, 0.5, 2]]), np.zeros((0, 5)), "class 2, but classes are numbered 0 to 1"),
        (np.zeros((0, 6)), np.array([[-1, 0, 0, 1, 1]]), "true box has class -1"),
    ],
)
def test_wrong_arrays_are_named(predictions, truths, message):
    with pytest.raises(ValueError, match=message):
        DetectionMetrics(2).update([predictions], [truths])


def test_the_best_threshold_and_its_scores_when_it_is_one_step_wide():
    truths = np.array([[0, 0, 0, 10, 10], [0, 20, 20, 40, 40]])
    predictions = np.array([[0, 0, 10, 10, 0.501, 0], [60, 60, 70, 70, 0.5, 0]])  # right, then nothing there
    results = score([(predictions, truths)], 1)
    assert results.confidence == pytest.approx(0.501)
    assert (results.precision, results.recall) == (1, 0.5)
    assert results.f1 == pytest.approx(2 / 3)
