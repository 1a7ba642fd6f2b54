"""Keypoints: their labels follow the pixels, their loss and score are by the book, and results carry them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.vision.keypoint_program import check_keypoint_program

from arclight.trainer import Trainer
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate
from arclight.vision.data.labels import DatasetError, KeypointShape, parse_labels
from arclight.vision.data.mix import MixedData
from arclight.vision.inference.fusion import ensemble
from arclight.vision.inference.slicing import sliced
from arclight.vision.inference.test_time import augmented
from arclight.vision.keypoints import sigmas_of
from arclight.vision.models.loss import assign, assign_levels, keypoint_loss
from arclight.vision.models.yolov5 import build_model
from arclight.vision.results.detections import Detections
from arclight.vision.results.pose_metrics import PoseMetrics
from arclight.vision.tasks.deployment import evaluation_of
from arclight.vision.tasks.detection import PoseData, PoseEstimator
from arclight.vision.tasks.settings import CornersTask, PoseTask

COLOURS = ((255, 0, 0), (0, 0, 255), (0, 255, 0))
"""Of the left, the right and the upper dot of each object."""
STILL = {"mosaic": 0.0, "translate": 0.0, "scale": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}


def write_dots(root: Path, flip: str = "flip_idx: [1, 0, 2]", count: int = 6) -> Path:
    """Images of one object each, with three dots; the upper one of every other object is not labelled. The last has none."""
    rng = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (root / folder / "train").mkdir(parents=True)
    for number in range(count):
        image = np.full((96, 96, 3), 70, np.uint8)
        centre = rng.uniform(34, 62, 2)
        dots = centre + np.array([[-14, 4], [14, 4], [0, -12]])
        row = [0, *(centre / 96), 44 / 96, 40 / 96]
        for index, (dot, colour) in enumerate(zip(dots, COLOURS, strict=True)):
            cv2.circle(image, tuple((dot * 16).round().astype(int).tolist()), 6 * 16, colour, cv2.FILLED, shift=4)
            labelled = index < 2 or number % 2 == 0
            row += [*((dot + 0.5) / 96), 2] if labelled else [0, 0, 0]
        empty = number == count - 1
        image[:] = 70 if empty else image
        assert cv2.imwrite(str(root / "images" / "train" / f"{number}.png"), image[:, :, ::-1])
        text = "" if empty else " ".join(f"{value:.6g}" for value in row) + "\n"
        (root / "labels" / "train" / f"{number}.txt").write_text(text)
    yaml = root / "data.yaml"
    yaml.write_text(f"train: images/train\nval: images/train\nnames: [face]\nkpt_shape: [3, 3]\n{flip}\n")
    return yaml


AUGMENTS = {
    "whole": Augment(**STILL),
    "mosaic": Augment(**STILL | {"mosaic": 1.0, "scale": 0.3}),
    "nine": Augment(**STILL | {"mosaic": 1.0, "mosaic9": 1.0}),
    "turned": Augment(**STILL | {"degrees": 180.0, "shear": 8.0, "perspective": 0.001, "scale": 0.3, "translate": 0.5}),
    "pasted": Augment(**STILL | {"copy_paste": 1.0}),
    "mirrored": Augment(**STILL | {"fliplr": 1.0}),
    "upside down": Augment(**STILL | {"flipud": 1.0}),
    "both": Augment(**STILL | {"fliplr": 1.0, "flipud": 1.0}),
}


@pytest.mark.parametrize("name", AUGMENTS)
def test_keypoints_follow_the_pixels_through_every_augmentation(tmp_path: Path, name: str) -> None:
    spec = read_data_yaml(write_dots(tmp_path))
    data = DetectionDataset.open(spec, "train", image_size=96, augment=AUGMENTS[name], geometry="keypoints")
    random.seed(0)
    seen, outside, hidden = [0, 0, 0], 0, 0
    swapped = name in ("mirrored", "upside down")  # left is what lies left in the mirror
    for _ in range(3):
        batch = collate(data.__getitems__(range(6)))
        assert batch["targets"].shape[1] == 6 + 2 * 3
        for row in batch["targets"].numpy():
            image = batch["images"][int(row[0])].numpy()
            points = row[6:].reshape(3, 2)
            labelled = np.isfinite(points).all(1)
            outside += int((~labelled[:2]).sum())
            assert ((points[labelled] >= 0) & (points[labelled] <= 1)).all()
            for index in np.flatnonzero(labelled):
                x, y = (points[index] * 96).astype(int).clip(0, 95)
                place = (1 - index if index < 2 else index) if swapped else index
                colour = image[:, y, x].astype(int)
                agrees = colour.argmax() == np.argmax(COLOURS[place]) and colour.max() - np.sort(colour)[1] > 60
                assert agrees or name == "pasted", (index, points[index])  # what is pasted may hide a dot of another
                seen[index] += 1
                hidden += not agrees
    assert min(seen) >= 3
    assert hidden <= 0.2 * sum(seen)
    assert seen[2] < seen[0], "those that are not labelled stay so"
    assert (outside > 0) == (name in ("mosaic", "nine", "turned")), "a dot out of the image is not labelled"


def test_images_without_flip_idx_are_not_mirrored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = read_data_yaml(write_dots(tmp_path, flip=""))
    mirrored = Augment(**STILL | {"fliplr": 1.0, "flipud": 1.0})
    data = DetectionDataset.open(spec, "train", image_size=96, augment=mirrored, geometry="keypoints")
    assert caplog.text.count("the data set has no flip_idx") == 1
    plain = DetectionDataset.open(spec, "train", image_size=96, geometry="keypoints")
    random.seed(0)
    batches = [collate(one.__getitems__(range(6))) for one in (data, plain)]
    assert (batches[0]["images"] == batches[1]["images"]).all()
    np.testing.assert_allclose(batches[0]["targets"], batches[1]["targets"], atol=1e-5)
    assert batches[1]["targets"].isnan().sum() == 2 * 2


def test_images_of_more_poses_than_average_precision_counts_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_dots(tmp_path)
    (tmp_path / "labels" / "train" / "0.txt").write_text(
        "\n".join(f"0 {0.1 + number / 30:.3f} 0.5 0.1 0.1 0.5 0.5 2 0.5 0.5 2 0.5 0.5 2" for number in range(21))
    )
    PoseData(PoseTask(data=data, image_size=64, cache_labels=False)).open_for_validation("val")
    assert "val: 1 images have more than 20 objects of a class" in caplog.text


def test_keypoints_must_be_there_and_alike(tmp_path: Path) -> None:
    spec = read_data_yaml(write_dots(tmp_path / "dots"))
    other = write_dots(tmp_path / "other")
    other.write_text(
        other.read_text().replace("[3, 3]", "[9, 1]").replace("kpt_shape", "flat").replace("flip_idx", "f")
    )
    with pytest.raises(DatasetError, match=r"other.data\.yaml has no kpt_shape, and this task learns keypoints"):
        DetectionDataset.open(read_data_yaml(other), "train", geometry="keypoints")
    for task in (PoseTask, CornersTask):
        with pytest.raises(DatasetError, match=r"other.data\.yaml has no kpt_shape, and this task learns keypoints"):
            task(data=other).check_data()
    other.write_text(other.read_text().replace("flat: [9, 1]", "kpt_shape: [4, 2]"))
    with pytest.raises(DatasetError, match=r"mix: .* has 4 keypoints of 2 numbers, .* 3 keypoints of 3 numbers"):
        DetectionDataset.open(
            spec, "train", geometry="keypoints", augment=Augment(), mix=[MixedData(data=other)], cache_labels=False
        )


def test_a_keypoint_is_decoded_from_the_middle_of_its_cell_in_sides_of_the_anchor() -> None:
    model = build_model("yolov5n-pose", 2, keypoints=(4, 3)).eval()
    levels = [torch.zeros(1, 3, 64 // s, 64 // s, 7 + 12) for s in model.stride]
    levels[1][0, 2, 1, 3, 7:10] = torch.tensor([0.5, -1.0, 2.0])  # anchor 59 x 119 of stride 16, row 1, column 3
    rows = model.decode(levels)
    assert rows.shape == (1, 3 * (64 + 16 + 4), 7 + 12)
    row = rows[0, 3 * 64 + 2 * 16 + 1 * 4 + 3]
    expected = torch.tensor([3.5 * 16 + 0.5 * 59, 1.5 * 16 - 119, torch.tensor(2.0).sigmoid()])
    torch.testing.assert_close(row[7:10], expected)
    torch.testing.assert_close(row[10:13], torch.tensor([56.0, 24.0, 0.5]))


@pytest.mark.parametrize("dims", [2, 3])
def test_keypoint_loss_is_the_mean_over_matches_of_what_their_labelled_points_lack(dims: int) -> None:
    """By hand, match by match."""
    torch.manual_seed(0)
    model = build_model("yolov5n-pose", 2, keypoints=(3, dims)).double().train()
    levels = model.raw(torch.rand(2, 3, 64, 64, dtype=torch.float64))
    nan, sigmas = float("nan"), (0.1, 0.2, 0.3)
    targets = torch.tensor(
        [
            [0, 0, 0.4, 0.5, 0.5, 0.4, 0.3, 0.4, 0.5, 0.6, nan, nan],
            [0, 1, 0.7, 0.6, 0.3, 0.5, nan, nan, nan, nan, nan, nan],
            [1, 1, 0.5, 0.5, 0.6, 0.6, 0.2, 0.9, 0.5, 0.5, 0.9, 0.1],
        ],
        dtype=torch.float64,
    )
    place = presence = torch.zeros((), dtype=torch.float64)
    for level, anchors in zip(levels, model.anchors):
        side = level.shape[2]
        match = assign(targets, anchors, (side, side))
        places, presences = [], []
        for k in torch.nonzero(match.mask).flatten().tolist():
            target = targets[k // 9]
            answer = level[match.image[k], match.anchor[k], match.row[k], match.column[k], 7:].view(3, dims)
            area = 0.53 * target[4] * target[5] * side**2
            errors = []
            for point in range(3):
                x, y = (target[6 + 2 * point : 8 + 2 * point] * side).tolist()
                if x == x:
                    dx = match.column[k] + 0.5 + answer[point, 0] * anchors[match.anchor[k], 0] - x
                    dy = match.row[k] + 0.5 + answer[point, 1] * anchors[match.anchor[k], 1] - y
                    similarity = torch.exp(-(dx**2 + dy**2) / (2 * (2 * sigmas[point]) ** 2 * area))
                    errors.append(1 - similarity + 0.25 * (dx.abs() + dy.abs()) / area.sqrt())
            if errors:
                places.append(torch.stack(errors).mean())
            if dims == 3:
                there = target[6::2].isfinite().double()
                presences.append(F.binary_cross_entropy_with_logits(answer[:, 2], there))
        place = place + torch.stack(places).mean() if places else place
        presence = presence + torch.stack(presences).mean() if presences else presence
    found = keypoint_loss(levels, targets, assign_levels(levels, targets, model.anchors), 2, (3, dims), sigmas)
    torch.testing.assert_close(found, (place, presence), check_dtype=False)
    assert place > 0.1
    (found[0] + found[1]).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    nothing = assign_levels(levels, targets[:0], model.anchors)
    assert keypoint_loss(levels, targets[:0], nothing, 2, (3, dims), sigmas)[0] == 0


def test_keypoint_average_precision_equals_pycocotools() -> None:
    coco, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    rng, count, classes = np.random.default_rng(0), 17, 2
    metrics = PoseMetrics(classes, (count, 3), sigmas_of(count))
    annotations, detections = [], []
    for image in range(14):
        m = int(rng.integers(0, 6))
        centres, sizes = rng.uniform(60, 140, (m, 2)), rng.uniform(20, 60, m)
        true = centres[:, None] + rng.normal(0, 0.4, (m, count, 2)) * sizes[:, None, None]
        true[rng.random((m, count)) < 0.3] = np.nan
        true[rng.random(m) < 0.25] = np.nan  # a few objects without any keypoint
        boxes = np.concatenate((centres - sizes[:, None] / 2, centres + sizes[:, None] / 2), 1)
        labels, areas = rng.integers(classes, size=m), sizes**2 * rng.uniform(0.3, 1, m)
        copies = rng.integers(m, size=5 * m) if m else np.zeros(0, int)
        noise = rng.normal(0, 1, (5 * m, count, 2)) * (rng.uniform(0.005, 0.3, 5 * m) * sizes[copies])[:, None, None]
        filled = np.where(np.isfinite(true), true, centres[:, None])
        found = np.concatenate((filled[copies] + noise, rng.uniform(0, 200, (3, count, 2))))
        called = np.concatenate((labels[copies], rng.integers(classes, size=3))).astype(int)
        scores = rng.permutation(len(found)) / 100 + 0.01
        metrics.update(scores, called, found, labels, true, boxes, areas)
        for box, label, area, points in zip(boxes, labels.tolist(), areas.tolist(), true):
            there = np.isfinite(points).all(1)
            flat = np.concatenate((np.nan_to_num(points), 2.0 * there[:, None]), 1).ravel().tolist()
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": label, "iscrowd": 0, "area": area,
                 "bbox": [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()], "keypoints": flat, "num_keypoints": int(there.sum())}
            )  # fmt: skip
        for points, label, score in zip(found, called.tolist(), scores.tolist()):
            flat = np.concatenate((points, np.ones((count, 1))), 1).ravel().tolist()
            detections.append({"image_id": image, "category_id": label, "keypoints": flat, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = {
            "info": {}, "images": [{"id": i, "height": 200, "width": 200} for i in range(14)],
            "categories": [{"id": c} for c in range(classes)], "annotations": annotations,
        }  # fmt: skip
        truth.createIndex()
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(detections), "keypoints")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 0].mean(axis=1).T
    merged = PoseMetrics(classes, (count, 3), sigmas_of(count))
    merged.merge(metrics.state_dict())
    results = merged.compute()
    np.testing.assert_allclose(results.keypoints.average_precision, precision, atol=1e-9)
    assert 0.05 < results.keypoints.map50_95 < 0.95
    assert results.keypoints.labels.sum() < len(annotations), "objects without keypoints are not counted"
    assert results.summary()["keypoint_map50"] == results.keypoints.map50


def test_sigmas_are_checked() -> None:
    assert sigmas_of(17)[0] == 0.026
    assert sigmas_of(4) == (0.25,) * 4
    with pytest.raises(ValueError, match="keypoint_sigmas has 2 numbers, there are 4 keypoints"):
        sigmas_of(4, (0.1, 0.1))


def test_detections_carry_keypoints() -> None:
    points = np.array([[[20, 25, 0.9], [34, 25, 0.2]], [[60, 50, 0.8], [-5, 30, 0.9]]], np.float32)
    photo = np.full((60, 80, 3), 200, np.uint8)
    made = {"names": ["a", "b"], "image": photo}
    found = Detections.from_arrays([[10, 10, 40, 30], [50, 20, 60, 40]], [0.5, 0.9], [0, 1], keypoints=points, **made)
    assert found.keypoints is not None
    np.testing.assert_array_equal(found.keypoints, points[::-1])
    np.testing.assert_array_equal(found.of("a").keypoints, points[:1])
    rows = found.to_json()
    assert rows[1]["keypoints_xy_px"] == [[20, 25], [34, 25]]
    assert rows[1]["keypoint_confidence"] == [0.9, 0.2]
    assert found.to_coco(3)[0]["keypoints"][:3] == pytest.approx([60, 50, 0.8])
    read = parse_labels(found.to_txt(), "x.txt", 2, KeypointShape(2, 3))
    assert not read.problems
    np.testing.assert_allclose(read.outlines[1] * (80, 60), [[20, 25], [np.nan, np.nan]], atol=1e-3)
    np.testing.assert_allclose(read.outlines[0] * (80, 60), [[60, 50], [np.nan, np.nan]], atol=1e-3)
    flat = Detections.from_arrays([[10, 10, 40, 30]], [0.5], [0], keypoints=points[1:, :, :2], **made)
    read = parse_labels(flat.to_txt(), "x.txt", 2, KeypointShape(2, 2))
    np.testing.assert_allclose(read.outlines[0] * (80, 60), [[60, 50], [0, 30]], atol=1e-3)
    assert "keypoint_confidence" not in flat.to_json()[0]
    drawn, plain = found.plot(), dataclasses.replace(found, keypoints=None).plot()
    assert (drawn[25, 20] != plain[25, 20]).any()
    assert (drawn[25, 34] == plain[25, 34]).all(), "what is not there is not drawn"
    with pytest.raises(ValueError, match=r"keypoints must be \(1, K, 2 or 3\)"):
        Detections.from_arrays([[0, 0, 1, 1]], [1], [0], names=["a"], keypoints=points)


def test_looks_are_not_brought_together_without_their_keypoints() -> None:
    found = Detections.from_arrays([[1, 1, 8, 8]], [0.9], [0], names=["a"], keypoints=np.zeros((1, 4, 2)))
    photo = np.zeros((10, 10, 3), np.uint8)
    looks = lambda images: [found] * len(images)  # noqa: E731
    for widened in (ensemble([looks] * 2), sliced(looks, 8), augmented(looks)):
        with pytest.raises(ValueError, match="without keypoints"):
            widened([photo])


def test_data_of_other_keypoints_are_refused(tmp_path: Path) -> None:
    data = write_dots(tmp_path)
    settings = PoseTask(data=data, model="yolov5n-pose", image_size=64, workers=0, cache_labels=False, batch_size=2)
    module = PoseEstimator(settings, ["face"], keypoints=(4, 2))
    with pytest.raises(DatasetError, match="has 3 keypoints of 3 numbers, this network finds 4 keypoints of 2"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(
            module, datamodule=PoseData(settings)
        )


def test_programs_are_compared_by_the_deviations_they_were_trained_with(tmp_path: Path) -> None:
    """Keypoints 3 pixels off, and renumbered: right by loose deviations of cyclic ones, wrong by the defaults."""
    yaml = write_dots(tmp_path, count=1)
    (tmp_path / "labels/train/0.txt").write_text("0 0.5 0.5 0.5 0.5 0.3 0.5 2 0.7 0.5 2 0.5 0.3 2\n")
    settings = PoseTask(data=yaml, image_size=96, keypoint_sigmas=(0.9, 0.9, 0.9), cyclic=True, cache_labels=False)
    module, data = settings.build()
    assert isinstance(module, PoseEstimator)
    assert isinstance(data, PoseData)

    def network(images: torch.Tensor) -> torch.Tensor:
        points = np.array([[0.7, 0.5], [0.5, 0.3], [0.3, 0.5]]) * 96 + 3
        marks = np.concatenate((points, np.ones((3, 1))), 1).ravel()
        return torch.tensor([[[48, 48, 48, 48, 0.9, 0.9, *marks]]] * len(images))

    own = module.evaluation(data).scores(network)
    described = {"task": "pose", "names": ["face"], "model": settings.model, "image_size": 96}
    program: Any = SimpleNamespace(metadata=described, processing=module.processing, path=Path("pose.onnx"))
    assert own["keypoint_map50"] == pytest.approx(1)
    assert evaluation_of(program, yaml).scores(network) == own
    plain, _ = dataclasses.replace(settings, keypoint_sigmas=(), cyclic=False).build()
    assert isinstance(plain, PoseEstimator)
    assert plain.evaluation(data).scores(network)["keypoint_map50"] < 0.9


@pytest.mark.slow
def test_a_program_finds_the_keypoints_of_its_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = "backbone: [[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]]]\nhead: [[[1], 1, Pose, [nc, anchors]]]\n"
    (tmp_path / "tiny.yaml").write_text(f"anchors: [[20,20, 26,26]]\n{rows}")
    data = write_dots(tmp_path)
    settings = PoseTask(
        data=data, model=str(tmp_path / "tiny.yaml"), image_size=64, workers=0, cache_labels=False, conf_threshold=0.0
    )
    module, images = settings.build()
    assert isinstance(module, PoseEstimator)
    assert module.keypoints == (3, 3)
    check_keypoint_program(module, images, tmp_path / "pose.onnx", 3)
