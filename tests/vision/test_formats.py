"""Import and export: COCO against pycocotools, VOC's xml, and hostile files of both."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.formats import coco
from arclight.vision.data.formats.annotations import AnnotatedSet, joined_outline, read_images, read_yolo, write_yolo
from arclight.vision.data.formats.coco import is_coco, mask_polygons, read_coco, split_of, write_coco
from arclight.vision.data.formats.run_lengths import decode_mask, encode_mask
from arclight.vision.data.formats.voc import is_voc, read_voc
from arclight.vision.data.images import MAX_PIXELS
from arclight.vision.data.labels import DatasetError, check_labels

masks = pytest.importorskip("pycocotools.mask")
coco_tools = pytest.importorskip("pycocotools.coco")
Write = Callable[..., Path]


def write_image(path: Path, width: int = 100, height: int = 80) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((height, width, 3), 90, np.uint8))


def coco_set(root: Path, annotations: list[dict[str, Any]], *, count: int = 1, **changes: Any) -> Path:
    """A COCO data set of grey images of 100 x 80 pixels and classes 3 and 7; returns its json file."""
    for number in range(count):
        write_image(root / f"val2017/{number}.jpg")
    document: dict[str, Any] = {
        "images": [{"id": 40 + n, "file_name": f"{n}.jpg", "width": 100, "height": 80} for n in range(count)],
        "annotations": [
            {"image_id": 40, "category_id": 3, "iscrowd": 0, "id": n} | one for n, one in enumerate(annotations)
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
    }
    file = root / "annotations/instances_val2017.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document | changes))
    return file


def rows_of(yaml: Path, split: str) -> list[list[list[float]]]:
    spec = read_data_yaml(yaml)
    return [rows.round(4).tolist() for rows in check_labels(spec.images(split), len(spec.names), cache=False).labels]


# ---------------------------------------------------------------- COCO


def test_boxes_come_with_classes_numbered_without_gaps_and_images_without_boxes(tmp_path: Path) -> None:
    file = coco_set(tmp_path, [{"bbox": [10, 8, 20, 40]}, {"bbox": [50, 0, 90, 8], "category_id": 7}], count=2)
    assert is_coco(file)
    assert is_coco(tmp_path)
    found = read_coco(tmp_path)
    assert (found.names, list(found.splits)) == (["cat", "dog"], ["val"])
    yaml = write_yolo(found, tmp_path / "out")
    assert read_data_yaml(yaml).names == ("cat", "dog")
    # The second box reached out of its image.
    assert rows_of(yaml, "val") == [
        [pytest.approx([0, 0.2, 0.35, 0.2, 0.5]), pytest.approx([1, 0.75, 0.05, 0.5, 0.1])],
        [],
    ]
    assert (tmp_path / "out/labels/val/1.txt").read_text() == ""


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_those_of_pycocotools(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        width, height = (int(side) for side in rng.integers(5, 80, 2))
        mask = (cv2.resize(rng.random((6, 6)), (width, height)) > rng.uniform(0, 1)).astype(np.uint8)
        text = masks.encode(np.asfortranarray(mask))["counts"].decode()
        decoded = decode_mask({"size": [height, width], "counts": text}, width, height, MAX_PIXELS)
        np.testing.assert_array_equal(decoded, mask)
        left, top = (int(side) for side in rng.integers(0, (width, height)))  # of the part that holds the mask
        mask[:top], mask[:, :left] = 0, 0
        encoded = encode_mask(mask[top:, left:].astype(np.bool_), left, top, (height, width))
        assert encoded["counts"] == masks.encode(np.asfortranarray(mask))["counts"].decode()
        np.testing.assert_array_equal(decode_mask(encoded, width, height, MAX_PIXELS), mask)
        runs = np.diff(np.flatnonzero(np.diff(np.concatenate(([2], mask.T.ravel(), [2])))))
        plain = [int(run) for run in ([0, *runs] if mask.T.ravel()[0] else runs)]
        np.testing.assert_array_equal(
            decode_mask({"size": [height, width], "counts": plain}, width, height, MAX_PIXELS), mask
        )


def test_outlines_of_masks_cover_what_the_masks_cover() -> None:
    mask = np.zeros((80, 100), np.uint8)
    cv2.ellipse(mask, (30, 40), (20, 12), 30, 0, 360, 1, -1)
    cv2.rectangle(mask, (70, 10), (90, 30), 1, -1)
    parts = mask_polygons(mask)
    assert len(parts) == 2
    outline = [part.ravel().tolist() for part in parts]
    drawn = masks.decode(masks.merge(masks.frPyObjects(outline, 80, 100)))
    assert (drawn & mask).sum() / (drawn | mask).sum() > 0.98
    joined = joined_outline(parts)
    together = masks.decode(masks.frPyObjects([joined.ravel().tolist()], 80, 100))[..., 0]
    assert (together & mask).sum() / (together | mask).sum() > 0.97
    assert mask_polygons(np.zeros((4, 4), np.uint8)) == ()


def test_outlines_of_many_corners_are_joined_in_little_memory() -> None:
    left, right = np.random.default_rng(0).random((2, 3000, 2))
    right += (2, 0)
    tracemalloc.start()
    try:
        joined = joined_outline([left, right])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64_000_000, "distances between all pairs take 144 MB"
    bridge = min(np.hypot(*(right - corner).T).min() for corner in left)
    assert len(joined) == 6002
    assert (np.hypot(*np.diff(joined, axis=0).T)[np.diff(joined[:, 0] > 1)] == bridge).all()


def test_outlines_of_too_many_corners_are_skipped(tmp_path: Path) -> None:
    dots = np.zeros((80, 100), np.uint8)
    dots[::2, ::2] = 1
    packed = masks.encode(np.asfortranarray(dots))["counts"].decode()
    outlines = [[[0, 0, 50, 0, 0, 40]] * 40_000, {"size": [80, 100], "counts": packed}]
    file = coco_set(tmp_path, [{"segmentation": outline} for outline in outlines])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coco, "MAX_POINTS", 2000)
        found = read_coco(file, masks=True)
    assert [problem.reason.rpartition(": ")[0].rpartition(": ")[2] for problem in found.skipped] == [
        "an outline of 120,000 corners is too large", "an outline of 8,000 corners is too large"
    ]  # fmt: skip


def test_polygons_and_masks_become_rows(tmp_path: Path) -> None:
    mask = np.zeros((80, 100), np.uint8)
    mask[20:60, 10:50] = 1
    packed = masks.encode(np.asfortranarray(mask))["counts"].decode()
    triangle = [0.0, 0.0, 50.0, 0.0, 0.0, 40.0]
    file = coco_set(
        tmp_path,
        [
            {"segmentation": [triangle]},
            {"segmentation": {"size": [80, 100], "counts": packed}},
            {"bbox": [10, 20, 40, 40], "segmentation": {"size": [80, 100], "counts": packed}},
            {"bbox": [10, 20, 40, 40], "segmentation": []},
        ],
    )
    found = read_coco(file, masks=True)
    assert not found.skipped
    boxes = [annotation.box_xyxy_px for annotation in found.splits["val"][0].annotations]
    np.testing.assert_allclose(boxes, [[0, 0, 50, 40], *[[10, 20, 50, 60]] * 3], atol=0.2)
    yaml = write_yolo(found, tmp_path / "out", polygons=True)
    lines = (yaml.parent / "labels/val/0.txt").read_text().splitlines()
    assert lines[0] == "0 0 0 0.5 0 0 0.5"
    assert [len(line.split()) for line in lines] == [7, *[len(line.split()) for line in lines[1:3]], 9]
    np.testing.assert_allclose(rows_of(yaml, "val")[0][1], [0, 0.3, 0.5, 0.4, 0.5], atol=0.004)


def test_crowds_are_passed_over_and_counted_unless_wanted(tmp_path: Path) -> None:
    file = coco_set(tmp_path, [{"bbox": [1, 1, 9, 9]}, {"bbox": [1, 1, 50, 50], "iscrowd": 1}])
    found = read_coco(file)
    assert found.passed_over == {"crowds": 1}
    assert "passed over: 1 crowds" in str(found)
    assert len(read_coco(file, keep_crowds=True).splits["val"][0].annotations) == 2


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ({"bbox": [1, 2, float("nan"), 4]}, "NaN or infinite"),
        ({"bbox": [1, 2, -3, 4]}, "has no area"),
        ({"bbox": [200, 2, 3, 4]}, "outside of its image, 100 x 80"),
        ({"bbox": [1, 2, 3]}, "not four numbers"),
        ({"bbox": [1, 2, 10**400, 4]}, "not four numbers"),
        ({"segmentation": [[1, 2, 3, 4, 5, 10**400]]}, "3 corners or more"),
        ({"bbox": [1, 2, 3, "4"]}, "not four numbers"),
        ({}, "neither a bbox nor a segmentation"),
        ({"bbox": [1, 2, 3, 4], "category_id": 5}, "there is no category 5"),
        ({"bbox": [1, 2, 3, 4], "category_id": True}, "there is no category True"),
        ({"bbox": [1, 2, 3, 4], "image_id": 99}, "there is no image 99"),
        ({"segmentation": [[1, 2, 3, 4]]}, "3 corners or more"),
        ({"segmentation": [[1, 2, 3, 4, 5, float("inf")]]}, "NaN or infinite"),
        ({"segmentation": "RLE"}, "segmentation is str"),
        ({"segmentation": {"size": [80, 100], "counts": [8000, 1]}}, "add up to 8,001 pixels, its image has 8,000"),
        ({"segmentation": {"size": [80, 100], "counts": [-1, 8001]}}, "not run lengths"),
        ({"segmentation": {"size": [10**9, 10**9], "counts": [10**18]}}, "its image is 80 high and 100 wide"),
        ({"segmentation": {"size": [80, 100], "counts": "PPPPPPPPPPPPPPPPPP"}}, "more than 32 bits"),
        ({"segmentation": {"size": [80, 100], "counts": "1\u00e9"}}, "which is not valid in a run length"),
        ({"segmentation": {"size": [80, 100], "counts": "1P"}}, "end inside a run length"),
        ({"segmentation": {"size": [80, 100], "counts": 3}}, "not a list or a text"),
    ],
)
def test_an_annotation_that_cannot_be_read_is_named_and_the_others_kept(
    tmp_path: Path, annotation: dict[str, Any], reason: str
) -> None:
    found = read_coco(coco_set(tmp_path, [{"bbox": [1, 2, 3, 4]}, annotation]))
    assert len(found.splits["val"][0].annotations) == 1
    (problem,) = found.skipped
    assert "annotations[1]" in problem.reason
    assert reason in problem.reason


@pytest.mark.parametrize("outline", [[[]], [], [[1, 2, 3, 4]], None])
def test_a_box_is_read_whatever_its_outline_is(tmp_path: Path, outline: Any) -> None:
    found = read_coco(coco_set(tmp_path, [{"bbox": [1, 2, 3, 4], "segmentation": outline}]))
    assert [one.box_xyxy_px for one in found.splits["val"][0].annotations] == [(1, 2, 4, 6)]
    assert not found.skipped


def test_ids_of_one_name_are_one_class_in_all_files(tmp_path: Path) -> None:
    """Files may number a class differently, and some tools list it as its own superclass, too."""
    box = {"bbox": [10, 8, 20, 40]}
    coco_set(tmp_path, [box | {"category_id": 2}], categories=[{"id": 0, "name": "code"}, {"id": 2, "name": "code"}])
    train = coco_set(
        tmp_path / "other", [box | {"category_id": 5}], categories=[{"id": 1, "name": "cat"}, {"id": 5, "name": "code"}]
    )
    train.rename(tmp_path / "annotations/instances_train2017.json")
    (tmp_path / "train2017").mkdir()
    (tmp_path / "other/val2017/0.jpg").rename(tmp_path / "train2017/0.jpg")
    found = read_coco(tmp_path)
    assert found.names == ["code", "cat"]
    assert {split: images[0].annotations[0].label for split, images in found.splits.items()} == {"train": 0, "val": 0}


def test_keypoints_are_counted_or_become_rows(tmp_path: Path) -> None:
    marks = [10, 8, 2, 30, 48, 1, 0, 0, 0, 99, 90, 2]  # the last one lies below the image
    file = coco_set(
        tmp_path,
        [{"bbox": [10, 8, 20, 40], "keypoints": marks, "num_keypoints": 3}, {"bbox": [50, 8, 20, 40]}],
        categories=[{"id": 3, "name": "cat", "keypoints": ["nose", "tail", "ear", "paw"]}],
    )
    boxes = read_coco(file)
    assert boxes.passed_over == {"objects' keypoints (--keypoints imports them)": 1}
    assert boxes.keypoints is None
    found = read_coco(file, keypoints=True)
    assert (found.passed_over, found.skipped) == ({}, [])
    spec = read_data_yaml(write_yolo(found, tmp_path / "out"))
    assert spec.pose_shape().count == 4
    assert (tmp_path / "out/labels/val/0.txt").read_text().splitlines() == [
        "0 0.2 0.35 0.2 0.5 0.1 0.1 2 0.3 0.6 1 0 0 0 0 0 0",
        "0 0.6 0.35 0.2 0.5 0 0 0 0 0 0 0 0 0 0 0 0",
    ]
    again = read_coco(
        write_coco(read_yolo(spec), tmp_path / "again")[0], images=tmp_path / "out/images/val", keypoints=True
    )
    assert [image.annotations for image in again.splits["val"]] == [image.annotations for image in found.splits["val"]]
    with pytest.raises(DatasetError, match="rows have outlines or 4 keypoints of 3 numbers, not both"):
        write_yolo(found, tmp_path / "outlines", polygons=True)


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ([10, 8, 2], "its keypoints are [10, 8, 2], not x, y and visibility of each of 2"),
        ([10, 8, 2, "x", 8, 2], "its keypoints are [10, 8, 2, 'x', 8, 2], not x, y and visibility of each of 2"),
        ([10, 8, 3, 10, 8, 2], "a keypoint has visibility 3: it is 0, 1 or 2"),
        ([10, 8, 2, float("nan"), 8, 2], "a keypoint has a coordinate that is NaN or infinite"),
    ],
)
def test_keypoints_that_cannot_be_read_are_named(tmp_path: Path, marks: list[Any], reason: str) -> None:
    objects = [{"bbox": [10, 8, 20, 40], "keypoints": marks}, {"bbox": [10, 8, 20, 40]}]
    categories = [{"id": 3, "name": "cat", "keypoints": ["nose", "tail"]}]
    found = read_coco(coco_set(tmp_path, objects, categories=categories), keypoints=True)
    assert [problem.reason for problem in found.skipped] == [f"annotations[0] of 0.jpg: {reason}"]
    assert len(found.splits["val"][0].annotations) == 1


@pytest.mark.parametrize(
    ("lists", "objects", "found"),
    [
        ([["nose"], ["nose", "tail"]], [], "objects of 1 and of 2 keypoints"),
        ([None, None], [{"bbox": [1, 1, 9, 9]}], "no keypoints"),
    ],
)
def test_keypoints_that_no_row_can_have_are_refused(tmp_path: Path, lists: Any, objects: Any, found: str) -> None:
    categories = [{"id": n, "name": str(n), "keypoints": names} for n, names in enumerate(lists, 3)]
    with pytest.raises(DatasetError, match=f"there are {found}, and rows of YOLO have one number of them"):
        read_coco(coco_set(tmp_path, objects, categories=categories), keypoints=True)


def test_an_image_without_an_ending_gets_one_by_which_it_is_found(tmp_path: Path) -> None:
    image = {"id": 40, "file_name": "photo.v2", "width": 100, "height": 80}
    file = coco_set(tmp_path, [{"bbox": [10, 8, 20, 40]}], images=[image])
    (tmp_path / "val2017/0.jpg").rename(tmp_path / "val2017/photo.v2")
    yaml = write_yolo(read_coco(file), tmp_path / "out")
    assert [image.name for image in read_data_yaml(yaml).images("val")] == ["photo.v2.jpeg"]
    assert rows_of(yaml, "val") == [[pytest.approx([0, 0.2, 0.35, 0.2, 0.5])]]


def test_a_mask_of_a_huge_image_is_refused_before_it_is_allocated() -> None:
    side = 100_000
    with pytest.raises(ValueError, match=r"100000 x 100000 pixels is too large: at most 50 million are read"):
        decode_mask({"size": [side, side], "counts": [side * side]}, side, side, MAX_PIXELS)
    with pytest.raises(ValueError, match="not run lengths"):
        decode_mask({"size": [2, 2], "counts": [0] * 100}, 2, 2, MAX_PIXELS)
    with pytest.raises(ValueError, match="its image 4"):
        decode_mask({"size": [2, 2], "counts": "0" * 1000 + "4"}, 2, 2, MAX_PIXELS)


@pytest.mark.parametrize(
    "name", ["../x.jpg", "/etc/x.jpg", "a/../../x.jpg", "..\\x.jpg", "C:\\x.jpg", "", 7, "a\0b", ".", "./"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: Any) -> None:
    file = coco_set(tmp_path, [])
    document = json.loads(file.read_text())
    document["images"][0]["file_name"] = name
    file.write_text(json.dumps(document))
    with pytest.raises(DatasetError, match=r"instances_val2017\.json: images\[0\]"):
        read_coco(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 3}, "it has no list 'images'"),
        ({"categories": [3]}, r"categories\[0\] is int"),
        ({"categories": [{"id": "3", "name": "cat"}]}, "needs a whole number as id"),
        ({"categories": [{"id": 3, "name": "cat"}, {"id": 3, "name": "dog"}]}, "category 3 is 'dog', and 'cat'"),
        ({"images": [{"id": 1, "file_name": "0.jpg"}, {"id": 1, "file_name": "0.jpg"}]}, "once each"),
        (
            {"images": [{"id": 1, "file_name": "gone.jpg"}]},
            "none of its 1 images can be used.*gone.jpg is not in.*--images",
        ),
    ],
)
def test_files_that_are_not_coco_are_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        read_coco(coco_set(tmp_path, [], **changes))


def test_nested_json_and_text_are_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "{", "[1]"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DatasetError, match=r"a\.json is not"):
            read_coco(tmp_path / "a.json")


def test_an_image_of_another_size_than_its_annotations_is_left_out(tmp_path: Path) -> None:
    file = coco_set(tmp_path, [{"bbox": [1, 2, 3, 4]}], count=2)
    write_image(tmp_path / "val2017/0.jpg", 80, 100)
    found = read_coco(file)
    assert [image.name.name for image in found.splits["val"]] == ["1.jpg"]
    assert "says 100 x 80 pixels, the image has 80 x 100" in found.skipped[0].reason


def test_one_folder_of_images_serves_the_files_of_several_splits(tmp_path: Path) -> None:
    """As the layout of COCO itself is: train2017 and val2017, each with images of the same names."""
    for split, width in (("train", 60), ("val", 90)):
        write_image(tmp_path / f"pictures/{split}2017/0.jpg", width, 80)
        document = {
            "images": [{"id": 1, "file_name": "0.jpg", "width": width, "height": 80}],
            "annotations": [{"image_id": 1, "category_id": 0, "bbox": [1, 1, 8, 8]}],
            "categories": [{"id": 0, "name": "thing"}],
        }
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / f"annotations/instances_{split}2017.json").write_text(json.dumps(document))
    found = read_coco(tmp_path / "annotations", images=tmp_path / "pictures")
    assert {split: [image.width for image in images] for split, images in found.splits.items()} == {
        "train": [60],
        "val": [90],
    }
    assert not found.skipped


def test_splits_are_found_by_names_of_files_and_folders(tmp_path: Path) -> None:
    names = {
        "instances_train2017.json": "train",
        "val.json": "val",
        "valid/_annotations.coco.json": "val",
        "a/labels.json": None,
    }
    assert {name: split_of(Path(name)) for name in names} == names
    for split in ("train", "valid", "test"):
        write_image(tmp_path / split / f"{split}.jpg")
        document = {
            "images": [{"id": 1, "file_name": f"{split}.jpg"}],
            "annotations": [{"image_id": 1, "category_id": 0, "bbox": [1, 1, 8, 8]}],
            "categories": [{"id": 0, "name": "thing"}],
        }
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(document))
    found = read_coco(tmp_path)
    assert {split: len(images[0].annotations) for split, images in found.splits.items()} == {
        "train": 1,
        "val": 1,
        "test": 1,
    }
    (tmp_path / "train.json").write_text(json.dumps(document))
    with pytest.raises(DatasetError, match="are both train by their names"):
        read_coco(tmp_path)


def polygon_rows(yaml: Path) -> dict[str, list[list[float]]]:
    return {
        file.name: [[float(value) for value in line.split()] for line in file.read_text().splitlines()]
        for file in sorted((yaml.parent / "labels").rglob("*.txt"))
    }


def test_a_round_trip_over_coco_keeps_boxes_and_polygons(shared_data: Path, tmp_path: Path) -> None:
    spec = read_data_yaml(shared_data / "qr_photos")
    before = read_yolo(spec)
    files = write_coco(before, tmp_path / "annotations")
    assert [file.name for file in files] == ["instances_train.json", "instances_val.json", "instances_test.json"]
    loaded = coco_tools.COCO(str(files[0]))
    rows = loaded.loadAnns(loaded.getAnnIds())
    expected = [annotation for image in before.splits["train"] for annotation in image.annotations]
    assert len(rows) == len(expected)
    for row, annotation in zip(rows, expected):
        left, top, right, bottom = annotation.box_xyxy_px
        assert row["bbox"] == pytest.approx([left, top, right - left, bottom - top], abs=1e-3)
        if row["segmentation"]:
            assert loaded.annToMask(row).sum() == pytest.approx(row["area"], rel=0.1, abs=30)
    after = read_coco(files[0], images=shared_data / "qr_photos/images/train")
    yaml = write_yolo(after, tmp_path / "out", polygons=True, symlink=True)
    again = read_yolo(read_data_yaml(yaml))
    for first, second in zip(before.splits["train"], again.splits["train"], strict=True):
        assert (first.name, first.width, first.height) == (second.name, second.width, second.height)
        for one, other in zip(first.annotations, second.annotations, strict=True):
            np.testing.assert_allclose(one.box_xyxy_px, other.box_xyxy_px, atol=2e-3)
            if one.polygons:
                np.testing.assert_allclose(one.polygons[0], other.polygons[0], atol=2e-3)
    with pytest.raises(DatasetError, match="exists already"):
        write_coco(before, tmp_path / "annotations")


@pytest.mark.slow
def test_a_round_trip_of_photos_of_coco_keeps_every_row(shared_data: Path, tmp_path: Path) -> None:
    names = "\n".join(f"  {number}: c{number}" for number in range(80))
    root = shared_data / "coco128/images"
    (tmp_path / "data.yaml").write_text(f"train: {root}/train2017\nval: {root}/val2017\nnames:\n{names}\n")
    before = read_yolo(read_data_yaml(tmp_path))
    write_coco(before, tmp_path)
    after = read_coco(tmp_path / "instances_val.json", images=root / "val2017")
    yaml = write_yolo(after, tmp_path / "out", symlink=True)
    own = rows_of(yaml, "val")
    assert sum(map(len, own)) == sum(len(image.annotations) for image in before.splits["val"]) > 500
    original = check_labels(sorted((root / "val2017").iterdir()), 80, cache=False)
    for rows, expected in zip(own, original.labels, strict=True):
        np.testing.assert_allclose(np.array(rows).reshape(-1, 5), expected, atol=2e-4)


# ---------------------------------------------------------------- VOC


def voc_xml(name: str, objects: str, size: str = "<width>100</width><height>80</height>") -> str:
    return f"<annotation>\n<filename>{name}</filename>\n<size>{size}</size>\n{objects}\n</annotation>\n"


def voc_object(box: tuple[Any, ...], name: str = "cat", more: str = "") -> str:
    edges = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box))
    return f"<object><name>{name}</name>{more}\n<bndbox>{edges}</bndbox></object>"


def voc_set(root: Path, files: dict[str, str]) -> Path:
    for stem, text in files.items():
        (root / "Annotations").mkdir(parents=True, exist_ok=True)
        (root / f"Annotations/{stem}.xml").write_text(text)
        write_image(root / f"JPEGImages/{stem}.jpg")
    return root


def test_pixel_numbers_of_voc_count_from_one(tmp_path: Path) -> None:
    root = voc_set(tmp_path, {"a": voc_xml("a.jpg", voc_object((1, 1, 100, 80)) + voc_object((11, 21, 20, 40), "dog"))})
    assert is_voc(root)
    assert not is_coco(root)
    found = read_voc(root)
    assert found.names == ["cat", "dog"]
    boxes = [annotation.box_xyxy_px for annotation in found.splits["train"][0].annotations]
    assert boxes == [(0, 0, 100, 80), (10, 20, 20, 40)]


@pytest.mark.parametrize("box", [(0, 1, 50, 40), (1.5, 1, 50, 40)])
def test_edges_of_other_tools_are_taken_as_they_are(tmp_path: Path, box: tuple[float, ...]) -> None:
    root = voc_set(tmp_path, {"a": voc_xml("a.jpg", voc_object(box) + voc_object((10, 20, 30, 40)))})
    assert [a.box_xyxy_px for a in read_voc(root).splits["train"][0].annotations] == [box, (10, 20, 30, 40)]


def test_lists_of_voc_are_splits_and_difficult_objects_are_counted(tmp_path: Path) -> None:
    hard = voc_object((2, 2, 9, 9), more="<difficult>1</difficult>")
    root = voc_set(tmp_path, {stem: voc_xml(f"{stem}.jpg", voc_object((1, 1, 50, 40)) + hard) for stem in "abc"})
    lists = root / "ImageSets/Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\nb 1\n")
    (lists / "val.txt").write_text("c\nlost\n")
    found = read_voc(root)
    assert {split: [image.name.stem for image in images] for split, images in found.splits.items()} == {
        "train": ["a", "b"],
        "val": ["c"],
    }
    assert found.passed_over == {"difficult objects": 3}
    assert "val.txt: 1 images of it cannot be used, lost first" in str(found.skipped[0])
    assert len(read_voc(root, keep_difficult=True).splits["val"][0].annotations) == 2
    assert rows_of(write_yolo(found, tmp_path / "out"), "val") == [[pytest.approx([0, 0.25, 0.25, 0.5, 0.5])]]
    chosen = read_voc(root, names=["dog"])
    assert "a.xml:4: there is no class 'cat'" in str(chosen.skipped[0])


@pytest.mark.parametrize(
    ("lists", "splits"),
    [
        ({"trainval": "a b", "test": "c"}, {"train": "ab", "test": "c"}),
        ({"train": "a", "trainval": "a b", "test": "c"}, {"train": "a", "test": "c"}),
        ({"test": "c"}, {"test": "c"}),
        ({"train": "a", "val": "b", "valid": "c"}, {"train": "a", "val": "bc"}),
    ],
)
def test_images_in_no_list_of_voc_are_counted(tmp_path: Path, lists: dict[str, str], splits: dict[str, str]) -> None:
    """A data set with trainval and test alone lost all images to train with."""
    root = voc_set(tmp_path, {stem: voc_xml(f"{stem}.jpg", voc_object((1, 1, 50, 40))) for stem in "abc"})
    (root / "ImageSets/Main").mkdir(parents=True)
    for name, stems in lists.items():
        (root / f"ImageSets/Main/{name}.txt").write_text("\n".join(stems.split()))
    found = read_voc(root)
    assert {split: "".join(image.name.stem for image in images) for split, images in found.splits.items()} == splits
    left = 3 - sum(map(len, splits.values()))
    assert found.passed_over == ({"images in no list of ImageSets/Main": left} if left else {})


BILLION = "<!DOCTYPE a [<!ENTITY b 'bbbbbbbbbb'><!ENTITY c '&b;&b;&b;&b;&b;&b;'>]><annotation>&c;</annotation>"
EXTERNAL = "<?xml version='1.0'?>\n<!DOCTYPE a SYSTEM 'file:///etc/passwd'><annotation/>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BILLION, "line 1: a document type (DOCTYPE) is not read"),
        (EXTERNAL, "line 2: a document type (DOCTYPE) is not read"),
        ("<annotation>\n&lol;</annotation>", "line 2: not XML: undefined entity"),
        ("<annotation>\n<a></annotation>", "line 2: not XML: mismatched tag"),
        ("", "line 1: not XML"),
        ("<a>" * 100, "elements lie more than 32 deep"),
        ('<?xml version="1.0" encoding="none-such"?><annotation/>', "unknown encoding"),
        (voc_xml("bad.jpg", voc_object(("\N{SUPERSCRIPT TWO}", 1, 9, 9))), "not a number"),
        (voc_xml("bad.jpg", voc_object((50, 1, 20, 9)), f"<width>{'9' * 5000}</width><height>1</height>"), "no area"),
        ("<html/>", "<html> is not an <annotation>"),
        (voc_xml("bad.jpg", "\n" + voc_object((1, 1, "wide", 9))), "xmax is 'wide', not a number"),
        (voc_xml("bad.jpg", voc_object((1, 1, "nan", 9))), "NaN or infinite"),
        (voc_xml("bad.jpg", voc_object((50, 1, 20, 9))), "has no area"),
        (voc_xml("bad.jpg", "<object><name>cat</name></object>"), "the cat has no bndbox"),
        (
            voc_xml("bad.jpg", "", "<width>80</width><height>100</height>"),
            "says 80 x 100 pixels, the image has 100 x 80",
        ),
    ],
)
def test_hostile_and_damaged_xml_is_named_by_line(tmp_path: Path, text: str, reason: str) -> None:
    root = voc_set(tmp_path, {"good": voc_xml("good.jpg", voc_object((1, 1, 50, 40))), "bad": text})
    found = read_voc(root)
    assert reason in "\n".join(map(str, found.skipped))
    assert "good" in [image.name.stem for image in found.splits["train"]]


def test_xml_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    root = voc_set(tmp_path, {"a": voc_xml("../../etc/x.jpg", "")})
    with pytest.raises(DatasetError, match=r"a\.xml:2: '../../etc/x\.jpg' leaves the folder"):
        read_voc(root)
    (root / "Annotations/a.xml").write_text(EXTERNAL)
    with pytest.raises(DatasetError, match="no xml file of VOC's can be read, for example"):
        read_voc(root)


# ---------------------------------------------------------------- folders, and writing


def test_a_folder_of_images_waits_for_its_labels(tmp_path: Path) -> None:
    write_image(tmp_path / "in/train/a.jpg")
    write_image(tmp_path / "in/val/deep/b.png")
    (tmp_path / "in/val/c.jpg").write_text("no image")
    with pytest.raises(DatasetError, match="--names A,B"):
        read_images(tmp_path / "in", [])
    found = read_images(tmp_path / "in", ["code"])
    assert [problem.path for problem in found.skipped] == [str(tmp_path / "in/val/c.jpg")]
    yaml = write_yolo(found, tmp_path / "out")
    assert [path.name for path in read_data_yaml(yaml).images("val")] == ["b.png"]
    assert (tmp_path / "out/labels/val/deep/b.txt").read_text() == ""
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="no json of COCO's, no xml of VOC's"):
        read_images(tmp_path / "empty", ["code"])


def test_a_data_set_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_image(tmp_path / "in/a.jpg")
    write_image(tmp_path / "in/a.png")
    with pytest.raises(DatasetError, match=r"a\.jpg and a\.png would share the label file a\.txt"):
        write_yolo(read_images(tmp_path / "in", ["code"]), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    with pytest.raises(DatasetError, match="holds something already"):
        write_yolo(read_images(tmp_path / "in", ["code"]), tmp_path / "in")
    with pytest.raises(DatasetError, match="0 classes and no image"):
        write_yolo(AnnotatedSet([], {"train": []}), tmp_path / "out")


def test_images_are_copied_or_linked(tmp_path: Path) -> None:
    write_image(tmp_path / "in/a.jpg")
    found = read_images(tmp_path / "in", ["code"])
    write_yolo(found, tmp_path / "copied")
    write_yolo(found, tmp_path / "linked", symlink=True)
    assert not (tmp_path / "copied/images/train/a.jpg").is_symlink()
    assert (tmp_path / "linked/images/train/a.jpg").resolve() == tmp_path / "in/a.jpg"
