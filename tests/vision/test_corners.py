"""Keypoints any of which may be the first, such as the four corners of a code: their loss, their score, and what is learned."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate
from arclight.vision.keypoints import keypoint_similarity, numberings, sigmas_of
from arclight.vision.models.loss import KeypointOptions, assign, assign_levels, keypoint_loss
from arclight.vision.models.yolov5 import build_model
from arclight.vision.results.pose_metrics import PoseMetrics
from arclight.vision.tasks.detection import PoseEstimator
from arclight.vision.tasks.settings import PoseTask

NAN = float("nan")
CYCLIC = KeypointOptions(cyclic=True)
STILL = {"mosaic": 0.0, "translate": 0.0, "scale": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
TARGETS = torch.tensor(
    [
        [0, 0, 0.4, 0.5, 0.5, 0.4, 0.2, 0.3, 0.6, 0.4, 0.65, 0.7, 0.15, 0.6],
        [0, 1, 0.7, 0.6, 0.3, 0.5, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN],
        [1, 1, 0.5, 0.5, 0.6, 0.6, 0.2, 0.9, NAN, NAN, 0.9, 0.1, 0.3, 0.2],
    ],
    dtype=torch.float64,
)
"""Four keypoints each: all labelled, none, all but one."""


def shifted(targets: torch.Tensor, by: int, count: int = 4) -> torch.Tensor:
    """The same objects, their keypoints numbered from another one on."""
    points = [targets[:, 6 + 2 * ((i + by) % count) : 8 + 2 * ((i + by) % count)] for i in range(count)]
    return torch.cat([targets[:, :6], *points], 1)


def outputs(dims: int, count: int = 4) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = build_model("yolov5n-pose", 2, keypoints=(count, dims)).double().train()
    return model, model.raw(torch.rand(2, 3, 64, 64, dtype=torch.float64))


def cyclic_loss_by_hand(
    levels: list[torch.Tensor], anchors: torch.Tensor, targets: torch.Tensor, dims: int, sigma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Match by match, shift by shift, keypoint by keypoint, without a tensor of more than one number."""
    place, presence = torch.zeros(()), torch.zeros(())
    for level, own in zip(levels, anchors):
        side = level.shape[2]
        match = assign(targets, own, (side, side))
        places, presences = [], []
        for k in torch.nonzero(match.mask).flatten().tolist():
            target = targets[k // 9]
            answer = level[match.image[k], match.anchor[k], match.row[k], match.column[k], 7:].view(4, dims)
            area = 0.53 * float(target[4] * target[5]) * side**2
            tried = []
            for shift in range(4):
                errors, there = [], []
                for point in range(4):
                    x, y = (float(v) * side for v in target[6 + 2 * ((point + shift) % 4) :][:2])
                    there.append(0.0 if math.isnan(x) else 1.0)
                    if there[-1]:
                        dx = match.column[k] + 0.5 + answer[point, 0] * own[match.anchor[k], 0] - x
                        dy = match.row[k] + 0.5 + answer[point, 1] * own[match.anchor[k], 1] - y
                        similarity = torch.exp(-(dx**2 + dy**2) / (2 * (2 * sigma) ** 2 * area))
                        errors.append(1 - similarity + 0.25 * (dx.abs() + dy.abs()) / math.sqrt(area))
                tried.append((torch.stack(errors).mean() if errors else torch.zeros(()), there))
            best, there = min(tried, key=lambda one: one[0].item())
            if any(there):
                places.append(best)
            if dims == 3:
                wanted = torch.tensor(there, dtype=torch.float64)
                presences.append(F.binary_cross_entropy_with_logits(answer[:, 2], wanted))
        place = place + torch.stack(places).mean() if places else place
        presence = presence + torch.stack(presences).mean() if presences else presence
    return place, presence


@pytest.mark.parametrize("dims", [2, 3])
def test_cyclic_loss_is_that_of_the_best_of_all_shifts(dims: int) -> None:
    model, levels = outputs(dims)
    matches = assign_levels(levels, TARGETS, model.anchors)
    found = keypoint_loss(levels, TARGETS, matches, 2, (4, dims), (0.25,) * 4, CYCLIC)
    expected = cyclic_loss_by_hand(levels, model.anchors, TARGETS, dims, 0.25)
    torch.testing.assert_close(found, expected, check_dtype=False)
    for shift in range(1, 4):
        again = keypoint_loss(levels, shifted(TARGETS, shift), matches, 2, (4, dims), (0.25,) * 4, CYCLIC)
        torch.testing.assert_close(again, found)
    places = [
        keypoint_loss(levels, shifted(TARGETS, shift), matches, 2, (4, dims), (0.25,) * 4)[0] for shift in range(4)
    ]
    assert max(places) > min(places) > found[0], (
        "each match has a best shift of its own; by default there is one for all"
    )
    sum(found).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def similarity_by_hand(found: np.ndarray, true: np.ndarray, box: np.ndarray, area: float, sigma: float) -> float:
    """Object keypoint similarity of one object found with a true one, highest over all shifts, as COCO writes it."""
    best = 0.0
    for shift in range(len(found)):
        each = []
        for point, (x, y) in enumerate(true):
            fx, fy = found[(point + shift) % len(found)]
            if np.isfinite(true).all(1).any():
                if math.isnan(x):
                    continue
                dx, dy = fx - x, fy - y
            else:
                wide, high = box[2] - box[0], box[3] - box[1]
                dx = max(0.0, box[0] - wide - fx) + max(0.0, fx - box[2] - wide)
                dy = max(0.0, box[1] - high - fy) + max(0.0, fy - box[3] - high)
            each.append(math.exp(-(dx * dx + dy * dy) / (2 * sigma) ** 2 / area / 2))
        best = max(best, sum(each) / len(each))
    return best


def test_cyclic_similarity_is_that_of_the_best_of_all_shifts() -> None:
    rng = np.random.default_rng(0)
    true = rng.uniform(0, 100, (6, 4, 2))
    true[1, 2] = true[2, :3] = true[3] = np.nan  # hidden or outside: one, three, all
    found = np.concatenate([np.roll(np.nan_to_num(true, nan=50.0), shift, axis=1) for shift in range(4)])
    found += rng.normal(0, 6, found.shape)
    boxes = np.concatenate((rng.uniform(0, 40, (6, 2)), rng.uniform(60, 100, (6, 2))), 1)
    areas = rng.uniform(500, 4000, 6)
    expected = [
        [similarity_by_hand(one, points, box, area, 0.1) for points, box, area in zip(true, boxes, areas, strict=True)]
        for one in found
    ]
    np.testing.assert_allclose(keypoint_similarity(found, true, boxes, areas, (0.1,) * 4, cyclic=True), expected)
    plain = keypoint_similarity(found, true, boxes, areas, (0.1,) * 4)
    assert (plain <= np.array(expected) + 1e-12).all()
    assert (plain[6:, 0] < np.array(expected)[6:, 0] - 0.1).any(), "not cyclic unless asked for"
    mirrored = found[:1, ::-1]  # the other way round is no shift
    assert keypoint_similarity(mirrored, true[:1], boxes[:1], areas[:1], (0.1,) * 4, cyclic=True) < 0.9
    assert keypoint_similarity(np.zeros((0, 4, 2)), true, boxes, areas, (0.1,) * 4, cyclic=True).shape == (0, 6)
    assert keypoint_similarity(found, true[:0], boxes[:0], areas[:0], (0.1,) * 4, cyclic=True).shape == (24, 0)
    assert numberings(3, True).tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert numberings(3, False).tolist() == [[0, 1, 2]]


def test_keypoint_average_precision_counts_from_any_keypoint_only_where_it_is_cyclic() -> None:
    true = np.array([[[10, 10], [40, 12], [42, 44], [8, 40]], [[60, 60], [90, 66], [84, 95], [np.nan, np.nan]]], float)
    boxes = np.array([[8, 10, 42, 44], [55, 60, 90, 95]], float)
    found = np.stack((np.roll(true[0], 1, axis=0), np.roll(np.nan_to_num(true[1], nan=70.0), 3, axis=0)))
    scores = {}
    for cyclic in (False, True):
        metrics = PoseMetrics(1, (4, 2), sigmas_of(4), cyclic)
        metrics.update([0.9, 0.8], [0, 0], found, [0, 0], true, boxes)
        merged = PoseMetrics(1, (4, 2), sigmas_of(4), cyclic)
        merged.merge(metrics.state_dict())
        scores[cyclic] = merged.compute().keypoints.map50_95
    assert scores[True] > 0.99
    assert scores[False] < 0.5


def test_a_task_is_cyclic_only_by_its_settings() -> None:
    plain = PoseTask(data=Path("none"), model="yolov5n-pose", image_size=64)
    assert not plain.cyclic
    estimators = [
        PoseEstimator(task, ["code"], keypoints=(4, 2))
        for task in (plain, PoseTask(data=Path("none"), image_size=64, cyclic=True))
    ]
    _, levels = outputs(2)
    levels = [level.detach() for level in levels]
    single = [torch.cat((level[..., :6], level[..., 7:]), -1) for level in levels]  # of one class
    found = {}
    for estimator, shift in itertools.product(estimators, range(4)):
        assert estimator.processing.cyclic == estimator.settings.cyclic
        assert estimator.metrics.cyclic == estimator.settings.cyclic
        targets = shifted(TARGETS, shift)
        targets[:, 1] = 0
        _, parts = estimator.loss(single, {"targets": targets})
        found.setdefault(estimator.settings.cyclic, []).append(float(parts["keypoint"]))
    assert np.ptp(found[True]) < 1e-9
    assert np.ptp(found[False]) > 1e-3


def test_cyclic_keypoints_have_one_deviation() -> None:
    with pytest.raises(ValueError, match="cyclic keypoints have no numbers of their own"):
        PoseTask(data=Path("none"), cyclic=True, keypoint_sigmas=(0.1, 0.2))
    many = PoseEstimator(PoseTask(data=Path("none"), image_size=64, cyclic=True), ["x"], keypoints=(17, 2))
    assert many.sigmas == (1 / 17,) * 17, "the deviations of a person's keypoints are not those of a ring of 17"


def write_squares(root: Path, flip: str) -> Path:
    """Images of one turned square each, its corners clockwise; one corner of every other is outside of the image."""
    rng = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (root / folder / "train").mkdir(parents=True)
    for number in range(6):
        image = np.full((96, 96, 3), 70, np.uint8)
        centre = rng.uniform(40, 56, 2) if number % 2 else np.array([16.0, 48.0])
        angle = rng.uniform(0, 2 * np.pi) if number % 2 else 0.0
        turns = angle + np.arange(4) * np.pi / 2
        corners = centre + 22 * np.stack((np.cos(turns), np.sin(turns)), 1)
        cv2.fillPoly(image, [((corners - 0.5) * 16).round().astype(np.int32)], (230, 230, 230), cv2.LINE_AA, shift=4)
        low, high = corners.min(0).clip(0, 96) / 96, corners.max(0).clip(0, 96) / 96
        row = [0, *((low + high) / 2), *(high - low)]
        for corner in corners / 96:
            row += [*corner, 2] if (corner >= 0).all() else [0, 0, 0]
        assert cv2.imwrite(str(root / "images" / "train" / f"{number}.png"), image)
        (root / "labels" / "train" / f"{number}.txt").write_text(" ".join(f"{value:.6g}" for value in row) + "\n")
    file = root / "data.yaml"
    file.write_text(f"train: images/train\nval: images/train\nnames: [square]\nkpt_shape: [4, 3]\n{flip}\n")
    return file


@pytest.mark.parametrize("mirror", ["fliplr", "flipud"])
def test_a_mirror_turns_the_corners_round_and_the_shift_does_not_matter(tmp_path: Path, mirror: str) -> None:
    """Both ways to renumber corners keep them clockwise, and differ by a shift, which costs nothing where keypoints are cyclic."""
    rows = {}
    for name, flip in (("pairs", "[1, 0, 3, 2]"), ("across", "[0, 3, 2, 1]")):
        spec = read_data_yaml(write_squares(tmp_path / name, f"flip_idx: {flip}"))
        augment = Augment(**STILL | {mirror: 1.0})
        data = DetectionDataset.open(spec, "train", image_size=96, augment=augment, geometry="keypoints")
        random.seed(0)
        batch = collate(data.__getitems__(range(6)))
        rows[name] = batch["targets"].double()
        for row in rows[name].numpy():
            corners = row[6:].reshape(4, 2)
            seen = corners[np.isfinite(corners).all(1)]
            assert len(seen) == (3 if int(row[0]) % 2 == 0 else 4)
            x, y = seen.T
            assert np.dot(x, np.roll(y, -1)) > np.dot(y, np.roll(x, -1)), "clockwise"
            image = batch["images"][int(row[0])].numpy()
            inside = seen + (row[2:4] - seen) * 0.15
            for px, py in (inside * 96).astype(int):
                assert image[:, py, px].min() > 150, "the corners are where the square is"
    torch.testing.assert_close(rows["pairs"][:, :6], rows["across"][:, :6])
    assert not torch.allclose(rows["pairs"], rows["across"], equal_nan=True)
    torch.manual_seed(0)
    model = build_model("yolov5n-pose", 1, keypoints=(4, 3)).double()
    levels = model.train().raw(torch.rand(6, 3, 96, 96, dtype=torch.float64))
    losses = {}
    for name, cyclic in itertools.product(rows, (True, False)):
        matches = assign_levels(levels, rows[name], model.anchors)
        losses[name, cyclic] = keypoint_loss(
            levels, rows[name], matches, 1, (4, 3), sigmas_of(4), KeypointOptions(cyclic)
        )
    torch.testing.assert_close(losses["pairs", True], losses["across", True])
    assert (losses["pairs", False][0] - losses["across", False][0]).abs() > 1e-4
