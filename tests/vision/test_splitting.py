"""Splits by fraction, with groups and look-alikes kept together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.labels import DatasetError
from arclight.vision.data.lint.checks import lint
from arclight.vision.data.splitting import split_images, write_split_lists

Write = Callable[..., Path]


def draw(path: Path, seed: int, quality: int = 95) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = cv2.resize(small, (80, 60), interpolation=cv2.INTER_CUBIC)
    assert cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return path


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Forty different photos of eight shops."""
    return [draw(tmp_path / f"images/shop{index % 8}_{index:02d}.jpg", index) for index in range(40)]


def where(splits: dict[str, list[Path]]) -> dict[Path, str]:
    return {image: split for split, images in splits.items() for image in images}


def test_fractions_are_met_and_the_seed_decides(photos: list[Path]) -> None:
    fractions = {"train": 0.7, "val": 0.2, "test": 0.1}
    found = split_images(photos, fractions, seed=1).images
    assert {split: len(images) for split, images in found.items()} == {"train": 28, "val": 8, "test": 4}
    assert sorted(image for images in found.values() for image in images) == sorted(photos)
    assert split_images(photos[::-1], fractions, seed=1).images.keys() == found.keys()
    assert where(split_images(photos[::-1], fractions, seed=1).images) == where(found)
    assert where(split_images(photos, fractions, seed=2).images) != where(found)


def test_groups_stay_together(photos: list[Path]) -> None:
    for seed in range(4):
        place = where(split_images(photos, {"train": 0.75, "val": 0.25}, seed=seed, group=r"(shop\d+)_").images)
        homes = {image.name[:5]: split for image, split in place.items()}
        assert all(place[image] == homes[image.name[:5]] for image in photos)
        assert sorted(homes.values()) == ["train"] * 6 + ["val"] * 2


def test_look_alikes_stay_together_by_default(photos: list[Path], tmp_path: Path) -> None:
    copies = [draw(tmp_path / f"images/copy_{index:02d}.jpg", index, quality=60) for index in range(40)]
    found = split_images([*photos, *copies], {"train": 0.5, "val": 0.5})
    place = where(found.images)
    assert found.groups == 40
    assert all(place[photo] == place[copy] for photo, copy in zip(photos, copies))
    alone = split_images([*photos, *copies], {"train": 0.5, "val": 0.5}, look_alikes=False)
    apart = where(alone.images)
    assert alone.groups == 0
    assert any(apart[photo] != apart[copy] for photo, copy in zip(photos, copies))


def test_damaged_images_are_in_no_split(photos: list[Path]) -> None:
    photos[3].write_bytes(photos[3].read_bytes()[:300])
    found = split_images(photos, {"train": 0.5, "val": 0.5})
    assert list(found.damaged) == [photos[3]]
    assert photos[3] not in where(found.images)


@pytest.mark.parametrize(
    ("fractions", "options", "message"),
    [
        ({"train": 0.8, "val": 0.1}, {}, "add up to 1"),
        ({"train": 1.5, "val": -0.5}, {}, "each is above 0"),
        ({"train": 0.5, "val": 0.5}, {"group": "("}, "not a regular expression"),
        ({"train": 0.5, "val": 0.5}, {"group": "plant"}, "matches no path, for example"),
        ({"train": 0.5, "val": 0.5}, {"group": "shop"}, "val would stay empty: 40 images form 1 groups"),
    ],
)
def test_invalid_splits_are_refused_with_the_reason(
    photos: list[Path], fractions: dict[str, float], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        split_images(photos, fractions, look_alikes=False, **options)


def test_lists_are_a_data_set_with_the_labels_that_were_there(tmp_path: Path, write_dataset: Write) -> None:
    spec = read_data_yaml(write_dataset(tmp_path / "set", 10))
    found = split_images(spec.images("train"), {"train": 0.6, "val": 0.4}).images
    yaml = write_split_lists(spec, found, tmp_path / "lists")
    report = lint(read_data_yaml(yaml), cache=False)
    assert {split: len(labelled.images) for split, labelled in report.splits.items()} == {"train": 6, "val": 4}
    assert report.errors == 0
    assert sum(labelled.report.boxes for labelled in report.splits.values()) == 19
    with pytest.raises(DatasetError, match=r"train\.txt exists already"):
        write_split_lists(spec, found, tmp_path / "lists")
    inside = write_split_lists(spec, found, tmp_path / "set/images")
    assert (inside.parent / "val.txt").read_text().startswith("train/")
    assert read_data_yaml(inside).images("val") == [
        tmp_path / "set/images" / image.relative_to(tmp_path / "set/images") for image in found["val"]
    ]


@pytest.mark.slow
def test_no_leak_is_left_in_real_photos(shared_data: Path, tmp_path: Path) -> None:
    spec = read_data_yaml(shared_data / "qr_photos")
    images = [image for split in ("train", "val", "test") for image in spec.images(split)]
    found = split_images(images, {"train": 0.5, "val": 0.25, "test": 0.25}, seed=3)
    assert found.groups == 3
    report = lint(read_data_yaml(write_split_lists(spec, found.images, tmp_path)), cache=False)
    assert not [finding for finding in report.findings if finding.check == "leak"]
