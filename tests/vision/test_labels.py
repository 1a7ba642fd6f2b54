"""YOLO labels: what is read, what is refused and why, and a cache that never says anything else than the files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from arclight.vision.data.dataset import DatasetError, DetectionDataset, read_data_yaml
from arclight.vision.data.labels import check_labels, label_path, parse_labels

Write = Callable[..., Path]


def test_labels_are_in_the_last_folder_called_images_replaced() -> None:
    assert label_path(Path("/images/set/images/train/a.b.jpg")) == Path("/images/set/labels/train/a.b.txt")
    assert label_path(Path("photos/a.png")) == Path("photos/a.txt")


# ---------------------------------------------------------------- rows


def test_boxes_and_polygons() -> None:
    found = parse_labels("1 0.5 0.5 0.2 0.4\n\n  0\t0.1 0.2 0.5 0.1 0.4 0.9 0.2 0.6 \r\n", "f", 2)
    np.testing.assert_allclose(found.rows, [[1, 0.5, 0.5, 0.2, 0.4], [0, 0.3, 0.5, 0.4, 0.8]], rtol=1e-6)
    assert found.rows.dtype == np.float32
    assert not found.problems


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0 0.5 0.5 0.2", "4 numbers: a box has 5"),
        ("0 0.5 0.5 0.2 0.2 0.9", "6 numbers"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.1 0.5", "8 numbers"),
        ("0 0.5 0.5 0.2 wide", "'wide' is not a number"),
        ("qr 0.5 0.5 0.2 0.2", "'qr' is not a number"),
        ("2 0.5 0.5 0.2 0.2", "unknown class 2: the data set has classes 0 to 1"),
        ("-1 0.5 0.5 0.2 0.2", "unknown class -1"),
        ("0.5 0.5 0.5 0.2 0.2", "unknown class 0.5"),
        ("nan 0.5 0.5 0.2 0.2", "unknown class nan"),
        ("0 nan 0.5 0.2 0.2", "nan is not a coordinate"),
        ("0 0.5 inf 0.2 0.2", "inf is not a coordinate"),
        ("0 0.5 0.5 -0.2 0.2", "negative size -0.2"),
        ("0 0.5 0.5 0 0.2", "no area"),
        ("0 0.1 0.1 0.2 0.1 0.3 0.1", "no area"),
        ("0 320 240 64 64", "coordinate 320 is outside"),
        ("0 0.5 1.002 0.2 0.2", "coordinate 1.002 is outside"),
        ("0 -0.5 0.5 0.2 0.2", "coordinate -0.5 is outside"),
    ],
)
def test_malformed_rows_are_named_by_line_and_the_others_kept(row: str, reason: str) -> None:
    found = parse_labels(f"0 0.5 0.5 0.2 0.2\n{row}\n1 0.5 0.5 0.1 0.1\n", "labels/a.txt", 2)
    assert len(found.rows) == 2
    (problem,) = found.problems
    assert str(problem).startswith("labels/a.txt:2: ")
    assert reason in problem.reason
    assert found.out_of_range == ("outside" in reason)


def test_rounding_is_clipped_silently_and_more_with_a_count() -> None:
    found = parse_labels("0 0.9 0.5 0.2009 1.0009\n0 0.95 0.5 0.5 0.2", "f", 1)
    np.testing.assert_allclose(found.rows, [[0, 0.89978, 0.5, 0.20045, 1.0], [0, 0.85, 0.5, 0.3, 0.2]], atol=1e-4)
    assert found.clipped == 1
    assert not found.problems
    edges = np.concatenate((found.rows[:, 1:3] - found.rows[:, 3:] / 2, found.rows[:, 1:3] + found.rows[:, 3:] / 2))
    assert edges.min() >= -1e-7
    assert edges.max() <= 1 + 1e-6


# ---------------------------------------------------------------- a whole split


def spoil(root: Path) -> None:
    """One of each fault in a data set of eight images."""
    images, labels = root / "images" / "train", root / "labels" / "train"
    (images / "000.jpg").write_bytes((images / "000.jpg").read_bytes()[:-100])
    (images / "001.jpg").write_text("not a photo")
    (labels / "002.txt").unlink()
    (labels / "003.txt").write_text("\n")
    (labels / "004.txt").write_text("0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0.2 0.2\nbad row here\n0 5 5 2 2\n")
    (labels / "005.txt").write_bytes(b"\xff\xfe\x00binary")


def test_a_report_counts_and_names_every_fault(data: Path) -> None:
    spoil(data.parent)
    images = read_data_yaml(data).images("train")
    found = check_labels([*images, images[7]], 2, name="train", cache=False)
    report = found.report
    assert (report.images, report.boxes) == (6, 1 + 1 + 2)
    assert [path.name for path in found.images] == [f"{index:03d}.jpg" for index in range(2, 8)]
    assert [len(rows) for rows in found.labels] == [0, 0, 1, 0, 1, 2]
    assert (report.missing_labels, report.empty_labels) == (1, 1)
    assert (report.duplicate_rows, report.duplicate_images, report.out_of_range) == (1, 1, 1)
    assert [(Path(p.path).name, p.line) for p in report.corrupt] == [("000.jpg", 0), ("001.jpg", 0)]
    assert "truncated" in report.corrupt[0].reason
    assert [(Path(p.path).name, p.line) for p in report.malformed] == [("004.txt", 3), ("004.txt", 4), ("005.txt", 0)]
    text = str(report)
    for line in (
        "train: 6 images, 4 boxes",
        "skipped: 2 corrupt images",
        "skipped: 3 malformed label rows",
        "004.txt:3: ",
    ):
        assert line in text
    assert report.as_dict()["corrupt"][1]["reason"].startswith("not an image")


def test_a_long_report_is_cut_but_complete_as_data(tmp_path: Path, write_dataset: Write) -> None:
    yaml = write_dataset(tmp_path, 1)
    label_path(tmp_path / "images/train/000.jpg").write_text("0 0.5 0.5 0.2 0.2\n" + "x\n" * 40)
    report = check_labels(read_data_yaml(yaml).images("train"), 2, cache=False).report
    assert len(report.malformed) == 40
    assert "and 35 more" in str(report)
    assert len(str(report).splitlines()) < 12


def test_shapes_follow_orientation_and_images_need_not_be_jpeg(tmp_path: Path, write_dataset: Write) -> None:
    yaml = write_dataset(tmp_path, 3, suffix=".png")
    found = check_labels(read_data_yaml(yaml).images("train"), 2, cache=False)
    assert found.shapes.tolist() == [list(cv2.imread(str(path)).shape[:2]) for path in found.images]


@pytest.mark.parametrize(
    ("spoil_all", "message"),
    [
        (lambda image, label: image.write_text("x"), r"none of 3 images can be read, for example .*000\.jpg"),
        (lambda image, label: label.unlink(), r"none of 3 images has a label file; .*labels/train/000\.txt"),
        (lambda image, label: label.write_text("9 1 1 1 1"), r"malformed, for example .*000\.txt:1: unknown class 9"),
    ],
)
def test_datasets_without_usable_images_raise_with_the_reason(
    tmp_path: Path, spoil_all: Callable[[Path, Path], Any], message: str, write_dataset: Write
) -> None:
    spec = read_data_yaml(write_dataset(tmp_path, 3))
    assert read_data_yaml(spec.file.parent) == spec
    for image in spec.images("train"):
        spoil_all(image, label_path(image))
    with pytest.raises(DatasetError, match=message):
        DetectionDataset.open(spec, "train", cache_labels=False)


# ---------------------------------------------------------------- cache of labels


def test_the_cache_matches_the_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(data.parent)
    images = read_data_yaml(data).images("train")
    fresh = check_labels(images, 2, name="train")
    assert (data.parent / "labels" / "train.cache.npz").is_file()
    monkeypatch.setattr("arclight.vision.data.labels._scan", None)  # from here on nothing is read anew
    cached = check_labels(images, 2, name="train")
    assert cached.images == fresh.images
    assert cached.report == fresh.report
    np.testing.assert_array_equal(cached.shapes, fresh.shapes)
    assert [rows.tolist() for rows in cached.labels] == [rows.tolist() for rows in fresh.labels]
    assert [path.name for path in (data.parent / "labels").iterdir() if path.is_file()] == ["train.cache.npz"]


def test_the_cache_is_rebuilt_when_files_change(data: Path) -> None:
    spec = read_data_yaml(data)
    images, label = spec.images("train"), label_path(spec.images("train")[0])
    boxes = check_labels(images, 2, name="train").report.boxes
    label.write_text("0 0.5 0.5 0.2 0.2\n" * 1 + "1 0.2 0.2 0.1 0.1\n0 0.7 0.7 0.1 0.1\n")
    assert check_labels(images, 2, name="train").report.boxes == boxes + 2

    same_size = label.read_text().replace("0.7 0.7 0.1", "x.7 0.7 0.1")
    stat = label.stat()
    label.write_text(same_size)
    os.utime(label, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert check_labels(images, 2, name="train").report.boxes == boxes + 1

    images[1].write_bytes(images[1].read_bytes()[:-50])
    assert len(check_labels(images, 2, name="train").report.corrupt) == 1
    label_path(images[2]).unlink()
    assert check_labels(images, 2, name="train").report.missing_labels == 1
    assert len(check_labels(images[3:], 2, name="train").images) == 5
    assert len(check_labels(images, 1, name="train").report.malformed) > 1  # fewer classes: other rows are wrong


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"PK\x03\x04 but not an archive"])
def test_a_damaged_cache_is_rebuilt_silently(data: Path, garbage: bytes) -> None:
    images = read_data_yaml(data).images("train")
    fresh = check_labels(images, 2, name="train")
    (data.parent / "labels" / "train.cache.npz").write_bytes(garbage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_labels(images, 2, name="train").report == fresh.report
    assert (data.parent / "labels" / "train.cache.npz").stat().st_size > 500


def test_a_pickle_in_place_of_the_cache_is_not_opened(data: Path) -> None:
    images = read_data_yaml(data).images("train")
    fresh = check_labels(images, 2, name="train")
    file = data.parent / "labels" / "train.cache.npz"
    with np.load(file) as stored:
        arrays = dict(stored)
    with file.open("wb") as stream:
        np.savez(stream, **arrays | {"rows": np.array([{"an": "object"}], dtype=object)})
    assert check_labels(images, 2, name="train").report == fresh.report


def test_unwritable_label_cache_warns_once(data: Path) -> None:
    (data.parent / "labels" / "train.cache.npz").mkdir()  # also root cannot replace a folder by a file
    spec = read_data_yaml(data)
    with pytest.warns(UserWarning, match="labels are not cached") as caught:
        opened = DetectionDataset.open(spec, "train", image_size=64)
    assert len(caught) == 1
    assert len(opened) == 8
    assert sorted(path.name for path in (data.parent / "labels").iterdir()) == ["train", "train.cache.npz"]


def test_no_cache_is_written_unless_wanted(data: Path) -> None:
    DetectionDataset.open(read_data_yaml(data), "train", image_size=64, cache_labels=False)
    assert [path.name for path in (data.parent / "labels").iterdir()] == ["train"]


def test_images_that_share_a_label_file_are_named(data: Path) -> None:
    images = data.parent / "images" / "train"
    twin = images / "000.png"
    cv2.imwrite(str(twin), cv2.imread(str(images / "000.jpg")))
    for _ in range(2):  # read, and from the cache
        found = check_labels(sorted(images.iterdir()), 2, name="train")
        (problem,) = found.report.shared_labels
        assert problem.path.endswith("000.txt")
        assert problem.reason == "is the label file of 000.jpg, 000.png"
        assert "shared: 1 label file of several images" in str(found.report)


def test_a_flat_data_set_keeps_its_cache_to_itself(data: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat" / "set"
    flat.mkdir(parents=True)
    for image in (data.parent / "images" / "train").iterdir():
        image.rename(flat / image.name)
    for label in (data.parent / "labels" / "train").iterdir():
        label.rename(flat / label.name)
    check_labels(sorted(flat.glob("*.jpg")), 2, name="train")
    assert (flat / "train.cache.npz").is_file()
    assert [path.name for path in flat.parent.iterdir()] == ["set"]


def test_background_alone_is_a_data_set_but_files_without_labels_are_none(data: Path) -> None:
    images = sorted((data.parent / "images" / "train").iterdir())
    labels = [label_path(image) for image in images]
    for label in labels:
        label.write_text("")
    found = check_labels(images, 2, cache=False)
    assert (found.report.boxes, found.report.empty_labels) == (0, len(images))
    for label in labels:
        label.unlink()
    with pytest.raises(DatasetError, match="has a label file"):
        check_labels(images, 2, cache=False)
    labels[0].write_text("0 2 2 9 9")
    with pytest.raises(DatasetError, match="malformed"):
        check_labels(images, 2, cache=False)
