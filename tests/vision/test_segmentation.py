"""Outlines from label file to mask: through every augmentation, into the loss, and against pycocotools."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.vision.drawn import draw_objects, polygon_row

from arclight.vision import Detections
from arclight.vision.data.augment import clip_outline
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate, draw_masks
from arclight.vision.data.labels import check_labels, parse_labels
from arclight.vision.inference.fusion import ensemble
from arclight.vision.inference.slicing import sliced
from arclight.vision.models.loss import assign_levels, mask_loss
from arclight.vision.models.yolov5 import build_model
from arclight.vision.results.masks import Masks, mask_iou
from arclight.vision.results.metrics import SegmentationMetrics


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    return draw_objects(tmp_path / "set", polygon_row, train=8)


AUGMENTS = {
    "mosaic": Augment(mosaic=1),
    "everything": Augment(mosaic=0.5, mixup=0.5, degrees=40, shear=10, perspective=0.001, fliplr=0.5, flipud=0.5),
    "affine": Augment(mosaic=0, degrees=90, translate=0.3, scale=0.6),
    "mirrored": Augment(mosaic=0, fliplr=1, flipud=1, translate=0, scale=0),
    "nine": Augment(mosaic=1, mosaic9=1),
    "pasted": Augment(mosaic=0, copy_paste=1),
}


@pytest.mark.parametrize("name", AUGMENTS)
def test_outlines_follow_the_pixels_through_every_augmentation(shapes: Path, name: str) -> None:
    """The shapes are the only saturated pixels: where a mask says that one is, its colour is, and nowhere else."""
    still = {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
    augment = Augment(**{**vars(AUGMENTS[name]), **still})
    data = DetectionDataset.open(read_data_yaml(shapes), "train", image_size=128, augment=augment, geometry="polygons")
    random.seed(0)
    agreed = seen = 0
    for _ in range(4):
        batch = collate(data.__getitems__(range(8)))
        assert batch["masks"].shape == (8, 32, 32)
        assert "outlines" not in batch
        for number, (image, mask) in enumerate(zip(batch["images"], batch["masks"])):
            sampled = image[:, 2::4, 2::4].int()
            coloured = (sampled.amax(0) - sampled.amin(0)) > 60
            if not augment.mixup:  # where two images are blended, half of a colour is left
                agreed += int(((mask > 0) == coloured).sum())
                seen += mask.numel()
            targets = batch["targets"][batch["targets"][:, 0] == number]
            assert mask.max() <= len(targets)
            for row, (_, label, x, y, w, h) in enumerate(targets.tolist(), 1):
                ys, xs = torch.nonzero(mask == row, as_tuple=True)
                if len(xs) > 12:  # whole enough: its own colour inside, and its box around it
                    red = bool(sampled[0][ys, xs].float().mean() > sampled[2][ys, xs].float().mean())
                    assert augment.mixup or red == (label == 0)
                    assert xs.min() * 4 >= (x - w / 2) * 128 - 4
                    assert xs.max() * 4 <= (x + w / 2) * 128 + 4
                    assert ys.min() * 4 >= (y - h / 2) * 128 - 4
                    assert ys.max() * 4 <= (y + h / 2) * 128 + 4
    assert augment.mixup or agreed / seen > 0.98


def test_the_same_seed_gives_the_same_masks(shapes: Path) -> None:
    batches = []
    for _ in range(2):
        data = DetectionDataset.open(
            read_data_yaml(shapes), "train", image_size=64, augment=AUGMENTS["everything"], geometry="polygons"
        )
        random.seed(3)
        batches.append(collate(data.__getitems__(range(8))))
    assert torch.equal(batches[0]["masks"], batches[1]["masks"])
    assert torch.equal(batches[0]["targets"], batches[1]["targets"])


def test_outlines_come_back_from_the_cache(shapes: Path) -> None:
    images = read_data_yaml(shapes).images("train")
    first, again = (check_labels(images, 2, name="train", geometry="polygons") for _ in range(2))
    assert (shapes.parent / "labels" / "train.polygons.cache.npz").exists()
    assert first.outlines is not None
    assert again.outlines is not None
    assert [len(points) for of in first.outlines for points in of] == [24, 4] * 4
    for one, other in zip(first.outlines, again.outlines, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert check_labels(images, 2, name="train").outlines is None


def test_crossing_and_repeated_polygons() -> None:
    bowtie, square = "0 0.1 0.1 0.9 0.9 0.9 0.1 0.1 0.9", "1 0.2 0.2 0.4 0.2 0.4 0.4 0.2 0.4"
    found = parse_labels("\n".join([bowtie, square, square]), "a.txt", 2, "polygons")
    assert [len(points) for points in found.outlines] == [4, 4]
    assert [problem.line for problem in found.repeated] == [3]
    assert not found.problems
    masks = Masks.from_outlines([points * 100 for points in found.outlines], (100, 100))
    assert masks.areas[0] == pytest.approx(2 * 0.5 * 80 * 40, rel=0.06)
    assert masks.areas[1] == pytest.approx(400, rel=0.12)


def test_an_outline_is_cut_at_the_square() -> None:
    diamond = np.array([[50.0, -50], [150, 50], [50, 150], [-50, 50]])
    inside = clip_outline(diamond, 100)
    assert inside.min() == 0
    assert inside.max() == 100
    assert cv2.contourArea(inside.astype(np.float32)) == pytest.approx(100 * 100)
    corner = np.array([[-10.0, 20], [20, -10], [-40, -40]])
    cut = clip_outline(corner, 100)
    assert cv2.contourArea(cut.astype(np.float32)) == pytest.approx(10 * 10 / 2)
    assert len(clip_outline(diamond + 500, 100)) == 0


def test_of_two_objects_the_smaller_one_is_seen() -> None:
    big, small = (np.array([[a, a], [b, a], [b, b], [a, b]], np.float32) for a, b in ((0, 64), (16, 32)))
    for order in ([big, small], [small, big]):
        drawn = draw_masks(order, 64)
        assert drawn.dtype == torch.int16
        first = 1 if order[0] is small else 2
        assert (drawn == first).sum() == 16
        assert (drawn > 0).all()
    assert not draw_masks([], 64).any()


def test_mask_loss_is_the_mean_over_matches_of_the_error_inside_their_boxes() -> None:
    """By hand, match by match, as YOLOv5 defines it."""
    from arclight.vision.models.loss import assign

    torch.manual_seed(0)
    model = build_model("yolov5n-seg", 2).double().train()
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    levels, prototypes = model.raw(images)
    targets = torch.tensor(
        [[0, 0, 0.4, 0.5, 0.5, 0.4], [0, 1, 0.7, 0.6, 0.3, 0.5], [1, 1, 0.5, 0.5, 0.6, 0.6]], dtype=torch.float64
    )
    masks = torch.randint(0, 3, (2, 16, 16), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    expected = torch.zeros((), dtype=torch.float64)
    numbers = [1, 2, 1]
    for level, anchors in zip(levels, model.anchors):
        match = assign(targets, anchors, (level.shape[2], level.shape[3]))
        for image in range(2):
            parts = []
            for k in torch.nonzero(match.mask & (match.image == image)).flatten().tolist():
                target = k // 9
                row = level[match.image[k], match.anchor[k], match.row[k], match.column[k]]
                logit = (row[7:].view(-1, 1, 1) * prototypes[image]).sum(0)
                error = F.binary_cross_entropy_with_logits(
                    logit, (masks[image] == numbers[target]).double(), reduction="none"
                )
                _, _, x, y, w, h = targets[target].tolist()
                inside = torch.zeros(16, 16, dtype=torch.float64)
                for r in range(16):
                    for c in range(16):
                        inside[r, c] = abs((c + 0.5) / 16 - x) <= w / 2 and abs((r + 0.5) / 16 - y) <= h / 2
                parts.append((error * inside).mean() / (w * h))
            if parts:
                expected = expected + torch.stack(parts).mean() / 2
    found = mask_loss(levels, prototypes, masks, targets, assign_levels(levels, targets, model.anchors), 2)
    assert expected > 0.1
    torch.testing.assert_close(found, expected)
    nothing = mask_loss(levels, prototypes, masks, targets[:0], assign_levels(levels, targets[:0], model.anchors), 2)
    assert nothing == 0
    nothing.backward()


def test_prototypes_become_masks_where_the_photo_has_them() -> None:
    """A prototype that is a disc, seen through a letterbox, is the disc of the photo."""
    y, x = np.mgrid[0:40, 0:40] * 4 + 2.0
    disc = (30 - np.hypot(x - 80, y - 70)).astype(np.float32)  # in the square of 160 pixels
    placed = (0.5, 0, 20)  # a photo of 320 x 240
    found = Masks.from_prototypes(
        [[1.0], [1.0]], disc[None], [[60, 0, 260, 200], [160, 100, 320, 240]], (240, 320), placed=placed
    )
    rows, columns = np.mgrid[0:240, 0:320] + 0.5
    wanted = np.hypot(columns - 160, rows - 100) < 60
    whole, part = found
    assert np.count_nonzero(whole != wanted) < 0.01 * wanted.sum()
    quarter = wanted & (columns >= 160) & (rows >= 100)
    assert np.count_nonzero(part != quarter) < 0.02 * quarter.sum()
    np.testing.assert_array_equal(found.data[0], whole)
    outline = found.xy[0]
    assert cv2.contourArea(outline) == pytest.approx(wanted.sum(), rel=0.05)
    assert np.abs(np.hypot(*(outline - (160, 100)).T) - 60).max() < 2
    assert found.xyn[0].max() <= 1
    assert len(found[[1]]) == 1


def test_masks_compare_as_their_pixels_do() -> None:
    rng = np.random.default_rng(0)
    boxes = [np.array([[x, y], [x + w, y], [x + w, y + h], [x, y + h]]) for x, y, w, h in rng.integers(2, 40, (12, 4))]
    a, b = Masks.from_outlines(boxes[:6], (60, 70)), Masks.from_outlines(boxes[6:], (60, 70))
    flat_a, flat_b = a.data.reshape(6, -1).astype(int), b.data.reshape(6, -1).astype(int)
    common = flat_a @ flat_b.T
    union = flat_a.sum(1)[:, None] + flat_b.sum(1) - common
    np.testing.assert_allclose(mask_iou(a, b), common / np.maximum(union, 1))
    np.testing.assert_array_equal(a.areas, flat_a.sum(1))


def blob(rng: np.random.Generator, centre: np.ndarray, size: float) -> np.ndarray:
    angles = np.sort(rng.uniform(0, 2 * np.pi, 9))
    return centre + size * rng.uniform(0.5, 1.0, (9, 1)) * np.stack((np.cos(angles), np.sin(angles)), 1)


def test_mask_average_precision_equals_pycocotools() -> None:
    coco, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    encode = pytest.importorskip("pycocotools.mask").encode
    rng, side, classes = np.random.default_rng(0), 96, 3
    metrics = SegmentationMetrics(classes)
    annotations, detections = [], []
    for image in range(12):
        outlines = [blob(rng, rng.uniform(10, 86, 2), rng.uniform(6, 30)) for _ in range(rng.integers(0, 7))]
        labels = rng.integers(classes, size=len(outlines))
        true = Masks.from_outlines(outlines, (side, side))
        copies = rng.integers(len(outlines), size=2 * len(outlines)) if outlines else []
        guesses = [outlines[i] + rng.normal(0, 2, (1, 2)) for i in copies] + [
            blob(rng, rng.uniform(10, 86, 2), 15) for _ in range(5)
        ]
        called = np.concatenate((labels[copies] if outlines else [], rng.integers(classes, size=5))).astype(int)
        found = Masks.from_outlines(guesses, (side, side))
        scores = rng.random(len(guesses)).round(2)
        metrics.update(scores, called, found, labels, true)
        for label, bits, area in zip(labels.tolist(), true.data, true.areas.tolist()):
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": label, "iscrowd": 0, "area": area,
                 "segmentation": encode(np.asfortranarray(bits, np.uint8))}
            )  # fmt: skip
        for label, bits, score in zip(called.tolist(), found.data, scores.tolist()):
            code = encode(np.asfortranarray(bits, np.uint8))
            detections.append({"image_id": image, "category_id": label, "segmentation": code, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = {
            "info": {}, "images": [{"id": i, "height": side, "width": side} for i in range(12)],
            "categories": [{"id": c} for c in range(classes)], "annotations": annotations,
        }  # fmt: skip
        truth.createIndex()
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(detections), "segm")
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 2].mean(axis=1).T
    merged = SegmentationMetrics(classes)
    merged.merge(metrics.state_dict())
    results = merged.compute()
    np.testing.assert_allclose(results.masks.average_precision, precision, atol=1e-9)
    assert 0.05 < results.masks.map50_95 < 0.95
    assert results.summary()["mask_map50"] == results.masks.map50


def test_detections_carry_masks() -> None:
    masks = Masks.from_outlines([[[10, 10], [40, 10], [40, 30], [10, 30]], [[50, 20], [60, 20], [55, 40]]], (60, 80))
    photo = np.full((60, 80, 3), 200, np.uint8)
    found = Detections.from_arrays(
        [[10, 10, 40, 30], [50, 20, 60, 40]], [0.5, 0.9], [0, 1], names=["a", "b"], image=photo, masks=masks
    )
    assert found.labels == ["b", "a"]
    assert found.masks is not None
    assert found.masks.areas[1] == masks.areas[0]
    assert len(found.of("a").masks or ()) == 1
    rows = found.to_json()
    assert np.abs(np.array(rows[1]["outline_xy_px"]) - 25).max() <= 16
    lines = found.to_txt().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "0"]
    read = parse_labels(found.to_txt(), "x.txt", 2, "polygons")
    assert not read.problems
    assert read.rows[1] == pytest.approx([0, 25 / 80, 20 / 60, 30 / 80, 20 / 60], abs=0.03)
    shaded = found.plot()
    assert (shaded[20, 25] != photo[20, 25]).any()
    assert (shaded[50, 40] == photo[50, 40]).all()
    with pytest.raises(ValueError, match="masks must be as many as boxes"):
        Detections.from_arrays([[0, 0, 1, 1]], [1], [0], names=["a"], masks=masks)


def test_looks_are_not_brought_together_without_their_masks() -> None:
    masks = Masks.from_outlines([[[1, 1], [8, 1], [8, 8]]], (10, 10))
    found = Detections.from_arrays([[1, 1, 8, 8]], [0.9], [0], names=["a"], masks=masks)
    photo = np.zeros((10, 10, 3), np.uint8)
    for widened in (ensemble([lambda _: [found]] * 2), sliced(lambda images: [found] * len(images), 8)):
        with pytest.raises(ValueError, match="without masks"):
            widened([photo])
