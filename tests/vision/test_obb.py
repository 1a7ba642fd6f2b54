"""Rotated boxes: their geometry is exact, labels follow the pixels, loss, suppression and score are by the book, results carry them."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from tests.vision.drawn import corner_row, draw_objects

from arclight.cli.command import main
from arclight.deploy import Program
from arclight.vision.boxes import TOP_K
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate
from arclight.vision.data.labels import DatasetError, parse_labels
from arclight.vision.data.letterbox import letterbox
from arclight.vision.data.lint.checks import lint
from arclight.vision.inference.fusion import ensemble
from arclight.vision.inference.slicing import sliced
from arclight.vision.inference.test_time import augmented
from arclight.vision.models.loss import Gains, oriented_error, yolo_loss
from arclight.vision.models.yolov5 import build_model
from arclight.vision.prob_iou import prob_iou, rotated_nms
from arclight.vision.results.detections import Detections
from arclight.vision.results.metrics import DetectionMetrics
from arclight.vision.results.obb_metrics import OrientedMetrics
from arclight.vision.rotated import (
    OrientedBoxes,
    corners_of,
    hulls_of,
    regularise,
    rotated_iou,
    smallest_rectangles,
)
from arclight.vision.tasks.deployment import evaluate_program, export_module
from arclight.vision.tasks.detection import OrientedDetector
from arclight.vision.tasks.processing import Context
from arclight.vision.tasks.settings import OrientedDetectionTask
from arclight.vision.tracking.byte_track import ByteTrack


def boxes(rng: np.random.Generator, count: int, far: float = 100.0) -> np.ndarray:
    return np.concatenate(
        (rng.uniform(0, far, (count, 2)), rng.uniform(2, 60, (count, 2)), rng.uniform(-7, 7, (count, 1))), 1
    )


# ---------------------------------------------------------------- geometry


def test_exact_overlap_equals_opencv() -> None:
    rng = np.random.default_rng(0)
    a, b = boxes(rng, 30), boxes(rng, 40)
    b[:5] = a[:5]
    b[5:10] = a[5:10] + [0, 0, 0, 0, math.pi]
    b[10:15] = a[10:15] * [1, 1, 0.5, 0.5, 1]
    found = rotated_iou(a, b)
    for i, j in np.ndindex(found.shape):
        of_a, of_b = (((x, y), (w, h), math.degrees(r)) for x, y, w, h, r in (a[i], b[j]))
        _, points = cv2.rotatedRectangleIntersection(of_a, of_b)
        common = 0.0 if points is None else cv2.contourArea(cv2.convexHull(points))
        assert found[i, j] == pytest.approx(common / (a[i, 2:4].prod() + b[j, 2:4].prod() - common), abs=1e-3)
    assert np.count_nonzero(found > 0.1) > 60
    np.testing.assert_allclose(np.diagonal(found)[:10], 1, atol=1e-12)
    np.testing.assert_allclose(np.diagonal(found)[10:15], 0.25, atol=1e-12)


def test_exact_overlap_of_known_shapes() -> None:
    square = [[50, 50, 10, 10, 0]]
    octagon = 2 * (math.sqrt(2) - 1) * 100  # a square and itself, turned by an eighth
    assert rotated_iou(square, [[50, 50, 10, 10, math.pi / 4]])[0, 0] == pytest.approx(
        octagon / (200 - octagon), rel=1e-12
    )
    assert rotated_iou(square, [[60, 50, 10, 10, 0]])[0, 0] == pytest.approx(0, abs=1e-12), (
        "sides that touch share nothing"
    )
    assert rotated_iou(square, [[50, 50, 0, 10, 0]])[0, 0] == 0
    moved = np.array([[1e6, 1e6, 0, 0, 0]])
    assert rotated_iou(square + moved, [[50, 50, 10, 5, 0]] + moved)[0, 0] == pytest.approx(0.5)
    assert rotated_iou(np.zeros((0, 5)), square).shape == (0, 1)


def test_one_box_has_one_form() -> None:
    rng = np.random.default_rng(1)
    every = boxes(rng, 200)
    found = regularise(every)
    assert (found[:, 2] >= found[:, 3]).all()
    assert (found[:, 4] >= -math.pi / 4).all()
    assert (found[:, 4] < 3 * math.pi / 4).all()
    np.testing.assert_allclose(np.diagonal(rotated_iou(every, found)), 1, atol=1e-9)
    np.testing.assert_allclose(regularise(every[:, [0, 1, 3, 2, 4]] + [0, 0, 0, 0, math.pi / 2]), found, atol=1e-9)
    corners = corners_of(found)
    np.testing.assert_allclose(smallest_rectangles(corners), found, atol=1e-9)
    np.testing.assert_allclose(smallest_rectangles(corners[:, [2, 1, 0, 3]]), found, atol=1e-9)


def test_smallest_rectangles_equal_opencv() -> None:
    points = np.random.default_rng(2).uniform(0, 50, (40, 7, 2))
    found = smallest_rectangles(points)
    for cloud, box in zip(points, found, strict=True):
        _, sides, _ = cv2.minAreaRect(cloud.astype(np.float32))
        assert box[2] * box[3] == pytest.approx(np.prod(sides), rel=1e-4)
        (corners,) = corners_of([box])
        assert all(
            cv2.pointPolygonTest(corners.astype(np.float32), p.tolist(), measureDist=True) > -1e-3 for p in cloud
        )


def test_probabilistic_overlap_is_one_minus_the_hellinger_distance() -> None:
    rng = np.random.default_rng(3)
    a, b = boxes(rng, 50, far=30.0), boxes(rng, 50, far=30.0)
    found = prob_iou(torch.tensor(a), torch.tensor(b)).numpy()
    for one, other, value in zip(a, b, found, strict=True):
        means, covariances = [], []
        for x, y, w, h, r in (one, other):
            turn = np.array([[math.cos(r), -math.sin(r)], [math.sin(r), math.cos(r)]])
            means.append(np.array([x, y]))
            covariances.append(turn @ np.diag([w * w / 12, h * h / 12]) @ turn.T)
        middle, apart = (covariances[0] + covariances[1]) / 2, means[0] - means[1]
        distance = apart @ np.linalg.solve(middle, apart) / 8
        distance += np.log(np.linalg.det(middle) / math.sqrt(np.prod([np.linalg.det(c) for c in covariances]))) / 2
        assert value == pytest.approx(1 - math.sqrt(1 - math.exp(-distance)), abs=1e-5)
    again = b[:, [0, 1, 3, 2, 4]] + [0, 0, 0, 0, math.pi / 2]
    np.testing.assert_allclose(prob_iou(torch.tensor(a), torch.tensor(again)), found, atol=1e-6)
    sample = torch.tensor(a[:4] / 10, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: prob_iou(x, torch.tensor(b[:4] / 10)), (sample,))


def test_the_angle_of_a_square_is_learned_by_its_own_error() -> None:
    wanted = torch.tensor([[5.0, 5, 4, 4, 0.3], [5, 5, 8, 1, 0.3]], dtype=torch.float64)
    off = torch.zeros(2, 5, dtype=torch.float64)
    off[:, 4] = 0.2
    angle = (wanted + off).requires_grad_()
    iou, error = oriented_error(angle, wanted)
    error.sum().backward()
    assert iou[0] > 0.999
    assert error[0] > 0.05
    assert (angle.grad[:, 4] > 0.05).all(), "both are turned back"
    quarter = wanted + torch.tensor([0, 0, 0, 0, math.pi / 2])
    assert oriented_error(quarter, wanted)[1][0] < 1e-3, "a quarter turn is the same square"
    assert oriented_error(quarter, wanted)[1][1] > 0.3


# ---------------------------------------------------------------- suppression


def predictions(rng: np.random.Generator, count: int, classes: int, side: float) -> torch.Tensor:
    """(1, count, 5 + classes + 1) rows as a head decodes them; scores repeat."""
    columns = (
        rng.uniform(0, side, (count, 2)), rng.uniform(6, 50, (count, 2)), np.ones((count, 1)),
        rng.random((count, classes)).round(2), rng.uniform(-math.pi / 4, 3 * math.pi / 4, (count, 1)),
    )  # fmt: skip
    return torch.tensor(np.concatenate(columns, 1), dtype=torch.float32)[None]


@pytest.mark.parametrize("agnostic", [False, True])
def test_suppression_equals_brute_force(agnostic: bool) -> None:
    rows = predictions(np.random.default_rng(4), 400, 2, 120.0)
    (found,) = rotated_nms(rows, 0.3, 0.5, agnostic=agnostic, max_det=60)
    scores, classes = rows[0, :, 5:7].max(1)
    kept: list[int] = []
    geometry = rows[0, :, [0, 1, 2, 3, 7]]
    overlap = prob_iou(geometry[:, None], geometry[None])
    for i in torch.argsort(scores, descending=True, stable=True).tolist():
        rivals = [j for j in kept if agnostic or classes[j] == classes[i]]
        if scores[i] > 0.3 and not (overlap[i, rivals] > 0.5).any():
            kept.append(i)
    kept = kept[:60]
    assert len(kept) > 20
    torch.testing.assert_close(found[:, :5], geometry[kept], atol=1e-4, rtol=0)
    assert found[:, 5].tolist() == scores[kept].tolist()
    assert found[:, 6].tolist() == classes[kept].tolist()


def test_suppression_looks_at_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from arclight.vision import prob_iou as module

    seen: list[int] = []
    real = module.overlap_rotated
    monkeypatch.setattr(
        module, "overlap_rotated", lambda a, *rest: seen.append(len(a) * len(rest[1])) or real(a, *rest)
    )
    rows = predictions(np.random.default_rng(5), 9000, 3, 640.0)
    rows[0, 7, 2] = float("nan")
    (found,) = rotated_nms(rows, 0.001, 0.6, multi_label=True)
    assert len(found) == 300
    assert sum(seen) <= TOP_K * (TOP_K + 256)


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0 0.5 0.5 0.2 0.2", "a box of 5 numbers, which has no angle, and this task learns oriented boxes"),
        ("0 0.1 0.1 0.4 0.1 0.4 0.4", "7 numbers, and this task learns oriented boxes"),
        ("0 0.1 0.1 0.4 0.4 0.4 0.1 0.1 0.4", "its sides cross: list the corners in turn"),
        ("0 0.1 0.1 0.5 0.1 0.2 0.2 0.1 0.5", "not convex"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.3 0.4 0.4", "lie on one line: it has no area"),
        ("0 0.1 0.1 0.1 0.1 0.1 0.1 0.1 0.1", "the box has no area"),
        ("0 0.1 0.1 0.4 0.1 0.4 1.4 0.1 0.4", r"coordinate 1.4 is outside \[0, 1\]"),
        ("0 0.1 0.1 0.4 nan 0.4 0.4 0.1 0.4", "nan is not a coordinate"),
        ("7 0.1 0.1 0.4 0.1 0.4 0.4 0.1 0.4", "unknown class 7"),
    ],
)
def test_rows_that_are_no_oriented_boxes_are_named(row: str, reason: str) -> None:
    good = "1 0.3 0.1 0.5 0.3 0.3 0.5 0.1 0.3"
    found = parse_labels(f"{good}\n{row}\n", "a.txt", 2, "oriented")
    assert [str(problem).startswith("a.txt:2: ") for problem in found.problems] == [True]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.problems[0].reason)
    np.testing.assert_allclose(found.rows, [[1, 0.3, 0.3, 0.4, 0.4]], atol=1e-6)
    assert found.outlines[0].shape == (4, 2)


def test_lint_names_rows_without_angles_and_splits_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = draw_objects(tmp_path / "set", corner_row)
    labels = tmp_path / "set" / "labels"
    for label in (labels / "val").iterdir():
        label.write_text("0 0.2 0.2 0.6 0.2 0.6 0.5 0.2 0.5\n")
    turned = (labels / "train" / "0.txt").read_text()
    # the hull of a diamond's turned inside is the diamond's: near equal as boxes, not as rotated ones
    (labels / "train" / "0.txt").write_text(
        turned + "0 0.5 0.5 0.2 0.2\n0 0.5 0.1 0.9 0.5 0.5 0.9 0.1 0.5\n0 0.1 0.12 0.9 0.1 0.9 0.88 0.1 0.9\n"
    )
    spec = read_data_yaml(data)
    found = {
        (finding.check, finding.path, finding.line) for finding in lint(spec, rows="oriented", hashes="none").findings
    }
    assert ("malformed-row", str(labels / "train" / "0.txt"), 2) in found
    assert ("upright-box", str(data), 0) in found
    assert not [finding for finding in found if finding[0] in ("near-equal-box", "disputed-box")]
    upright = [finding for finding in found if finding[0] == "upright-box"]
    assert len(upright) == 1, "of val alone"
    assert main(["data", "lint", str(data), "--obb", "--no-hashes", "--no-cache"]) == 1
    assert "all 6 boxes of val are upright" in capsys.readouterr().out
    (tmp_path / "set" / "data.yaml").write_text(data.read_text() + "kpt_shape: [4, 2]\n")
    with pytest.raises(DatasetError, match="this task learns oriented boxes"):
        read_data_yaml(data).geometry("oriented")


AUGMENTS = {
    "everything": Augment(mosaic=0.5, mosaic9=0.3, degrees=40, fliplr=0.5, flipud=0.5, copy_paste=0.5),
    "turned": Augment(mosaic=0, degrees=180, translate=0.1, scale=0.3),
}


@pytest.mark.parametrize("name", AUGMENTS)
def test_rotated_boxes_follow_the_pixels_through_every_augmentation(tmp_path: Path, name: str) -> None:
    """The drawn rectangles are the only saturated pixels: filled boxes of the targets cover them, and nothing else."""
    data = draw_objects(tmp_path / "set", corner_row)
    augment = dataclasses.replace(AUGMENTS[name], hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
    dataset = DetectionDataset.open(read_data_yaml(data), "train", image_size=128, augment=augment, geometry="oriented")
    random.seed(0)
    agreed = filled = total = angles = 0
    for _ in range(3):
        batch = collate(dataset.__getitems__(range(6)))
        targets = batch["targets"].double().numpy()
        assert targets.shape[1] == 7
        assert "masks" not in batch
        for number, image in enumerate(batch["images"].int()):
            own = targets[targets[:, 0] == number, 2:]
            own[:, :4] *= 128
            assert (own[:, 2] >= own[:, 3]).all()
            canvas = np.zeros((128, 128), np.uint8)
            for corners in corners_of(own):
                cv2.fillPoly(canvas, [((corners - 0.5) * 16).round().astype(np.int32)], 1, shift=4)
            coloured = ((image.amax(0) - image.amin(0)) > 90).numpy()
            agreed += np.count_nonzero((canvas > 0) & coloured)
            filled += np.count_nonzero(canvas)
            total += np.count_nonzero((canvas > 0) | coloured)
            angles += np.count_nonzero(np.abs(np.sin(2 * own[:, 4])) > 0.2)
    assert agreed / filled > 0.98
    assert agreed / total > 0.8, "drawn edges are a blurred pixel wider"
    assert angles > 10


def test_validation_targets_are_the_labels(tmp_path: Path) -> None:
    rows = "1 0.5 0.2 0.9 0.5 0.6 0.8 0.2 0.5\n"
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    cv2.imwrite(str(tmp_path / "images" / "a.png"), np.zeros((60, 120, 3), np.uint8))
    (tmp_path / "labels" / "a.txt").write_text(rows)
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [a, b]\n")
    dataset = DetectionDataset.open(read_data_yaml(tmp_path), "val", image_size=240, geometry="oriented")
    (row,) = collate([dataset[0]])["targets"].double().numpy()
    corners = np.array(rows.split()[1:], float).reshape(4, 2) * (120, 60) * 2 + (0, 60)
    np.testing.assert_allclose(row[2:] * ([240] * 4 + [1]), smallest_rectangles(corners[None])[0], atol=1e-3)
    np.testing.assert_array_equal(row[:2], [0, 1])


def test_the_loss_of_exact_answers_is_nothing() -> None:
    """Logits that decode to the very boxes leave neither a box error nor a gradient of it."""
    model = build_model("yolov5n-obb", 2).double().train()
    targets = torch.tensor([[0, 1, 0.5, 0.5, 0.25, 0.125, 0.6]], dtype=torch.float64)
    raw = [torch.zeros(1, 3, 64 // s, 64 // s, 8, dtype=torch.float64) for s in (8, 16, 32)]
    for level, anchors, stride in zip(raw, model.anchors, model.stride):
        cells = 64 // stride
        y, x = torch.meshgrid(torch.arange(cells), torch.arange(cells), indexing="ij")
        inside = torch.stack((0.5 * cells - x, 0.5 * cells - y), -1)
        level[..., :2] = ((inside + 0.5) / 2).clamp(1e-6, 1 - 1e-6).logit()
        share = (torch.tensor([0.25, 0.125]) * cells / anchors).sqrt() / 2
        level[..., 2:4] = share.clamp(1e-6, 1 - 1e-6).logit()[:, None, None]
        level[..., -1] = torch.tensor(0.6 / math.pi + 0.25).logit()
    decoded = model.head.decode([level.clone() for level in raw])
    near = (decoded[0, :, :4] - torch.tensor([32.0, 32, 16, 8])).abs().amax(1) < 1e-3
    assert near.any()
    torch.testing.assert_close(decoded[0, :, -1], torch.full_like(decoded[0, :, -1], 0.6))
    _, parts = yolo_loss(raw, targets, model.anchors, Gains(1.0, 1.0, 1.0), oriented=True)
    assert parts["box"] < 2e-3
    targets[0, -1] = 0.9
    _, worse = yolo_loss(raw, targets, model.anchors, Gains(1.0, 1.0, 1.0), oriented=True)
    assert worse["box"] > 0.1


# ---------------------------------------------------------------- score and results


def test_scores_of_upright_boxes_are_those_of_a_detector() -> None:
    rng = np.random.default_rng(6)
    oriented, upright = OrientedMetrics(2), DetectionMetrics(2)
    for _ in range(8):
        true = np.concatenate((rng.uniform(20, 80, (5, 2)), rng.uniform(8, 30, (5, 2)), np.zeros((5, 1))), 1)
        guess = np.repeat(true, 2, 0) + rng.normal(0, 2, (10, 5)) * [1, 1, 1, 1, 0]
        labels, called, conf = rng.integers(2, size=5), rng.integers(2, size=10), rng.random(10)
        half_turn = rng.integers(0, 4, (10, 1)) * math.pi / 2
        swapped = np.where(np.abs(np.sin(half_turn)) > 0.5, guess[:, [0, 1, 3, 2, 4]], guess) + half_turn * [
            0,
            0,
            0,
            0,
            1,
        ]
        oriented.update_rotated(swapped, conf, called, labels, true)
        upright.update(
            [np.concatenate((hulls_of(guess), conf[:, None], called[:, None]), 1)],
            [np.concatenate((labels[:, None], hulls_of(true)), 1)],
        )
    merged = OrientedMetrics(2)
    merged.merge(oriented.state_dict())
    np.testing.assert_allclose(merged.compute().average_precision, upright.compute().average_precision, atol=1e-9)
    crossed = OrientedMetrics(1)
    crossed.update_rotated([[50, 50, 40, 10, 0.0]], [0.9], [0], [0], [[50, 50, 40, 10, math.pi / 2]])
    assert crossed.compute().map50 == 0, "their hulls' middle is the same, they are not"


def test_detections_carry_rotated_boxes() -> None:
    obb = OrientedBoxes(np.array([[30, 25, 10, 24, 0.5], [70, 30, 30, 8, 0.2], [200, 30, 9, 9, 0]]))
    photo = np.full((60, 80, 3), 200, np.uint8)
    hulls = hulls_of(obb.xywhr).clip(0, [80, 60, 80, 60])
    found = Detections.from_arrays(hulls, [0.5, 0.9, 0.1], [0, 1, 1], names=["a", "b"], image=photo, obb=obb)
    assert found.obb is not None
    assert found.labels == ["b", "a", "b"]
    np.testing.assert_array_equal(found.obb.xywhr, obb.xywhr[[1, 0, 2]])
    np.testing.assert_array_equal(found.of("a").obb.xywhr, obb.xywhr[:1])
    assert found.obb.xywhr[1, 2] >= found.obb.xywhr[1, 3]
    row = found.to_json()[1]
    assert row["obb_xywhr"] == pytest.approx([30, 25, 24, 10, 0.5 + math.pi / 2], abs=1e-3)
    np.testing.assert_allclose(row["corners_xy_px"], corners_of([[30, 25, 24, 10, 0.5 + math.pi / 2]])[0], atol=0.06)
    lines = found.to_txt().splitlines()
    assert [len(line.split()) for line in lines] == [9, 9], "the third has nothing in the image"
    read = parse_labels(found.to_txt(), "x.txt", 2, "oriented")
    assert not read.problems
    inside = smallest_rectangles(np.array(read.outlines)[1:] * (80, 60))
    np.testing.assert_allclose(inside, found.obb.xywhr[1:2], atol=1e-2)
    tracked = dataclasses.replace(found, ids=np.array([4, 7, 9])).to_txt().splitlines()
    assert [line.split()[-1] for line in tracked] == ["4", "7"]
    drawn = found.plot()
    right, bottom = hulls[0, 2:].round().astype(int)
    assert (drawn[bottom - 2 : bottom + 3, right - 2 : right + 3] == 200).all(), "not the hull is drawn"
    for start, end in zip(found.obb.corners[1], np.roll(found.obb.corners[1], -1, 0), strict=True):
        x, y = ((start + end) / 2).round().astype(int)
        assert (drawn[y, x] != 200).any(), "the sides are"
    with pytest.raises(ValueError, match="rotated boxes must be as many as boxes"):
        Detections.from_arrays([[0, 0, 1, 1]], [1], [0], names=["a"], obb=obb)


def test_tracks_keep_rotated_boxes_and_looks_are_not_brought_together_without_angles() -> None:
    obb = OrientedBoxes(np.array([[5, 5, 6, 3, 0.4]]))
    found = Detections.from_arrays(hulls_of(obb.xywhr), [0.9], [0], names=["a"], obb=obb)
    tracker = ByteTrack()
    tracker.update(found)
    tracked = tracker.update(found)
    assert tracked.ids is not None
    assert tracked.obb is not None
    np.testing.assert_array_equal(tracked.obb.xywhr, obb.xywhr)
    looks = lambda images: [found] * len(images)  # noqa: E731
    for widened in (ensemble([looks] * 2), sliced(looks, 8), augmented(looks)):
        with pytest.raises(ValueError, match="without angles"):
            widened([np.zeros((10, 10, 3), np.uint8)])


TINY = """
anchors: [[20,20, 26,26]]
backbone: [[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]]]
head: [[[1], 1, OBB, [nc, anchors]]]
"""


def tiny(root: Path, **options: object) -> OrientedDetectionTask:
    (root / "tiny.yaml").write_text(TINY)
    fields = {"data": root / "set" / "data.yaml", "model": str(root / "tiny.yaml"), "image_size": 64, "workers": 0}
    return OrientedDetectionTask(**{**fields, "cache_labels": False, **options})


def test_boxes_come_back_from_the_square_to_the_photo(tmp_path: Path) -> None:
    module = OrientedDetector(tiny(tmp_path), ["a", "b"])
    photo = np.zeros((240, 480, 3), np.uint8)
    _, placed = letterbox(photo, 64)
    wanted = np.array([[300.0, 100, 90, 40, 0.7], [20, 30, 80, 30, 2.0]])
    scale, pad_x, pad_y = placed
    rows = np.zeros((1, 2, 8))
    rows[0, :, :4], rows[0, :, 7] = wanted[:, :4] * scale, wanted[:, 4]
    rows[0, :, :2] += (pad_x, pad_y)
    rows[0, :, 4], rows[0, 0, 5], rows[0, 1, 6] = 1, 0.9, 0.8
    (found,) = module.processing.postprocess(rows, Context([photo], [placed]))
    assert found.obb is not None
    np.testing.assert_allclose(found.obb.xywhr, wanted, atol=1e-3)
    assert found.labels == ["a", "b"]
    np.testing.assert_allclose(found.boxes.xyxy, hulls_of(wanted).clip(0, [480, 240, 480, 240]), atol=1e-3)


def test_anchors_are_fitted_to_the_turned_sides(tmp_path: Path) -> None:
    draw_objects(tmp_path / "set", corner_row)
    data = tiny(tmp_path, anchors="fitted", augment=Augment(mosaic=0)).build()[1]
    data.setup("fit")
    hulls = np.concatenate([rows[:, 3:5] for rows in data.train.labels])
    sizes = data.train.box_sizes_px() / data.settings.image_size
    assert sizes.shape == hulls.shape
    np.testing.assert_allclose(sizes[:, 1] / sizes[:, 0], 0.5 / 0.95, atol=1e-3)
    assert (sizes.prod(1) < 0.99 * hulls.prod(1)).any()


@pytest.mark.slow
def test_programs_of_boxes_that_stand_upright_are_judged_by_directions(tmp_path: Path) -> None:
    draw_objects(tmp_path / "set", corner_row)
    torch.manual_seed(0)
    module, images = tiny(tmp_path).build()
    with torch.no_grad():
        for conv in module.model.head.m:  # nearly no angle, as of a network that saw upright boxes alone
            conv.weight.view(-1, 8, conv.in_channels)[:, -1] *= 1e-6
    rows = module.model.eval()(torch.rand(1, 3, 64, 64)).detach()
    assert rows[..., -1].abs().max() < 1e-4
    export_module(module, tmp_path / "obb.onnx", images.calibration_dataset())
    assert Program.load(tmp_path / "obb.onnx").metadata["parity"]["outputs"]["angles"]["largest"] == pytest.approx(1)
    turned = rows.clone()
    turned[..., -1] += math.pi
    for same, part in zip(module.output_parts(turned).values(), module.output_parts(rows).values(), strict=True):
        torch.testing.assert_close(same, part, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_program_finds_the_rotated_boxes_of_its_model(tmp_path: Path) -> None:
    draw_objects(tmp_path / "set", corner_row)
    torch.manual_seed(0)
    module, images = tiny(tmp_path, conf_threshold=0.0).build()
    export_module(module, tmp_path / "obb.onnx", images.calibration_dataset())
    program = Program.load(tmp_path / "obb.onnx")
    batch = torch.rand(2, 3, 64, 64)
    own = module.output_parts(module.model.eval()(batch).detach())
    assert own.keys() == {"boxes", "scores", "angles"}
    for name, part in module.output_parts(torch.as_tensor(program(batch))).items():
        torch.testing.assert_close(part, own[name], atol=1e-3, rtol=1e-4)
    (found,) = program.predict([np.full((48, 80, 3), 90, np.uint8)])
    assert found.obb is not None
    assert len(found.obb) == len(found) > 0
    data = images.open("val")
    scores = evaluate_program(program, data)
    metrics = OrientedMetrics(2)
    samples = collate([data[i] for i in range(6)])
    metrics.update_output(module.model(samples["images"].float() / 255).detach(), samples)
    assert scores.images == 6
    np.testing.assert_allclose(scores.average_precision, metrics.compute().average_precision, atol=0.02)
    with pytest.raises(ValueError, match="keep_records is for a Detector"):
        module.keep_records()
