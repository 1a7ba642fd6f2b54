"""Keypoints: their labels follow the pixels, their loss and score are by the book, and results carry them."""

from __future__ import annotations

import random
from pathlib import Path

import cv2
import numpy as np
import pytest

from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate
from arclight.vision.data.labels import DatasetError
from arclight.vision.data.mix import MixedData

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
    assert caplog.text.count("there is no flip_idx") == 1
    plain = DetectionDataset.open(spec, "train", image_size=96, geometry="keypoints")
    random.seed(0)
    batches = [collate(one.__getitems__(range(6))) for one in (data, plain)]
    assert (batches[0]["images"] == batches[1]["images"]).all()
    np.testing.assert_allclose(batches[0]["targets"], batches[1]["targets"], atol=1e-5)
    assert batches[1]["targets"].isnan().sum() == 2 * 2


def test_keypoints_must_be_there_and_alike(tmp_path: Path) -> None:
    spec = read_data_yaml(write_dots(tmp_path / "dots"))
    other = write_dots(tmp_path / "other")
    other.write_text(
        other.read_text().replace("[3, 3]", "[9, 1]").replace("kpt_shape", "flat").replace("flip_idx", "f")
    )
    with pytest.raises(DatasetError, match=r"other.data\.yaml has no kpt_shape, and this task learns keypoints"):
        DetectionDataset.open(read_data_yaml(other), "train", geometry="keypoints")
    other.write_text(other.read_text().replace("flat: [9, 1]", "kpt_shape: [4, 2]"))
    with pytest.raises(DatasetError, match=r"mix: .* has 4 keypoints of 2 numbers, .* 3 keypoints of 3 numbers"):
        DetectionDataset.open(
            spec, "train", geometry="keypoints", augment=Augment(), mix=[MixedData(data=other)], cache_labels=False
        )
