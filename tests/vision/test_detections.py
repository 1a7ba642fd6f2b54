"""Detections as an object, drawn on photos, and scores as charts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from arclight.fabric.extras import MissingExtraError
from arclight.vision import Detections
from arclight.vision.data.image_headers import ImageError
from arclight.vision.results.masks import Masks, Patch
from arclight.vision.results.metrics import DetectionMetrics, DetectionResults

cv2 = pytest.importorskip("cv2")

from arclight.vision.results import plots  # noqa: E402
from arclight.vision.results.draw import draw_boxes, grid  # noqa: E402

NAMES = ["qr_code", "bar code"]


def photo(height=240, width=320, value=90):
    return np.full((height, width, 3), value, np.uint8)


def example(**options):
    boxes = [[10, 20, 60, 90], [100, 100, 200, 180]]
    return Detections.from_arrays(boxes, [0.5, 0.75], [1, 0], names=NAMES, **options)


def test_holds_boxes_best_first():
    found = example(image=photo(), path="a.jpg")
    assert len(found) == 2
    assert found.boxes.xyxy.tolist() == [[100, 100, 200, 180], [10, 20, 60, 90]]
    assert found.boxes.conf.tolist() == [0.75, 0.5]
    assert found.boxes.cls.tolist() == [0, 1]
    assert found.boxes.xywh.tolist() == [[150, 140, 100, 80], [35, 55, 50, 70]]
    assert found.labels == ["qr_code", "bar code"]
    assert found.names == ("qr_code", "bar code")
    assert found.path == "a.jpg"
    assert {a.dtype for a in (found.boxes.xyxy, found.boxes.conf, found.boxes.cls)} == {np.dtype(np.float32)}


def test_cannot_be_changed():
    boxes = np.array([[0.0, 0, 1, 1]], np.float32)
    found = Detections.from_arrays(boxes, [0.5], [0], names=NAMES)
    with pytest.raises(ValueError, match="read-only"):
        found.boxes.xyxy[0, 0] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.path = "b.jpg"
    boxes[0, 0] = 5  # the caller's array is the caller's own
    assert found.boxes.xyxy[0, 0] == 0


def test_empty_detections_are_valid():
    found = Detections.from_arrays([], [], [], names=NAMES, image=photo())
    assert len(found) == 0
    assert found.boxes.xyxy.shape == (0, 4)
    assert found.to_coco(3) == []
    assert (found.plot() == photo()).all()


@pytest.mark.parametrize(
    ("conf", "labels", "message"),
    [([0.5], [0, 0], "they are 2, 1 and 2"), ([0.5, 0.5], [0, 2], r"0 to 1, there are \[0.0, 2.0\]")],
)
def test_boxes_that_do_not_fit_together_are_refused(conf, labels, message):
    with pytest.raises(ValueError, match=message):
        Detections.from_arrays([[0, 0, 1, 1], [0, 0, 2, 2]], conf, labels, names=NAMES)


def test_coco_rows():
    first, second = example().to_coco(7, category_ids=[1, 90])
    assert first == {"image_id": 7, "category_id": 1, "bbox": [100, 100, 100, 80], "score": 0.75}
    assert second["category_id"] == 90
    assert [row["category_id"] for row in example().to_coco(7)] == [0, 1]


def test_coco_rows_have_masks_as_pycocotools_reads_them():
    """Masks at every edge, one with a hole, one of all pixels and one of none, also as rows of a COCO evaluation."""
    rle = pytest.importorskip("pycocotools.mask")
    coco = pytest.importorskip("pycocotools.coco")
    height, width = 30, 40
    bits = np.zeros((6, height, width), np.bool_)
    bits[0, :7, :9], bits[1, 20:, 31:], bits[2, 5:25, 10:30] = True, True, True
    bits[2, 10:15, 15:20] = False
    bits[3], bits[5] = True, np.random.default_rng(0).random((height, width)) < 0.5
    boxes = [(0, 0, 9, 7), (31, 20, 40, 30), (10, 5, 30, 25), (0, 0, 40, 30), (3, 3, 3, 3), (0, 0, 40, 30)]
    patches = tuple(
        Patch(left, top, one[top:bottom, left:right])
        for one, (left, top, right, bottom) in zip(bits, boxes, strict=True)
    )
    found = Detections.from_arrays(
        boxes, np.linspace(0.9, 0.4, 6), [0, 1] * 3, names=NAMES, masks=Masks(patches, (height, width))
    )
    rows = found.to_coco(3)
    for row, one in zip(json.loads(json.dumps(rows)), bits, strict=True):
        np.testing.assert_array_equal(rle.decode(row["segmentation"]), one)
        assert row["segmentation"]["counts"] == rle.encode(np.asfortranarray(one.astype(np.uint8)))["counts"].decode()
    data = coco.COCO()
    data.dataset = {"images": [{"id": 3, "height": height, "width": width}], "categories": [{"id": 0}, {"id": 1}]}
    with contextlib.redirect_stdout(io.StringIO()):
        data.createIndex()
        loaded = data.loadRes(rows)
    np.testing.assert_array_equal(loaded.annToMask(loaded.anns[3]), bits[2])
    assert "segmentation" not in example().to_coco(3)[0]


def test_pandas_table_or_a_clear_word():
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(MissingExtraError, match="pip install pandas"):
            example().to_pandas()
    else:
        table = example().to_pandas()
        assert list(table.columns) == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
        assert table.iloc[0].tolist() == [100, 100, 200, 180, 0.75, 0, "qr_code"]


def test_plot_draws_each_box_in_its_place_and_leaves_the_photo_alone():
    image = photo()
    plotted = example(image=image).plot()
    assert (image == 90).all()
    assert plotted.shape == image.shape
    changed = (plotted != image).any(axis=2)
    for left, top, right, bottom in ((100, 100, 200, 180), (10, 20, 60, 90)):
        assert changed[bottom, (left + right) // 2]
        assert changed[(top + bottom) // 2, left]
        assert changed[(top + bottom) // 2, right]
        assert not changed[top + 20 : bottom - 5, left + 5 : right - 5].any()
    assert changed.mean() < 0.2
    with pytest.raises(ValueError, match="no image to draw on"):
        example().plot()


def test_labels_stay_inside_the_image():
    image = photo(60, 80)
    corners = [[-5, -5, 20, 20], [70, 50, 200, 200], [79, 0, 80, 1]]
    drawn = draw_boxes(image, corners, ["naïve and much longer than the image is wide"] * 3, [0, 1, 9])
    assert drawn.shape == image.shape
    blank = draw_boxes(image, corners[:1], [""], [0])
    labelled = draw_boxes(image, corners[:1], ["a"], [0])
    assert (blank != labelled).any()


def test_an_image_that_its_format_cannot_hold_is_named(tmp_path):
    tall = np.zeros((70_000, 8, 3), np.uint8)
    found = Detections.from_arrays([[0, 0, 8, 8]], [0.9], [0], names=["code"], image=tall)
    with pytest.raises(ImageError, match=r"found\.jpg: \.jpg does not hold an image of 8 x 70000 pixels; use \.png"):
        found.save(tmp_path / "found.jpg")
    assert found.save(tmp_path / "found.png").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["found.png"]


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_save_writes_what_plot_shows(tmp_path, suffix):
    found = example(image=np.random.default_rng(0).integers(60, 90, (240, 320, 3), dtype=np.uint8))
    path = found.save(tmp_path / "new folder" / f"found{suffix}")
    back = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    assert np.abs(back.astype(int) - found.plot()).mean() < (0.01 if suffix == ".png" else 12)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["found.txt", "found"])
def test_save_refuses_other_files(tmp_path, name):
    with pytest.raises(ValueError, match=r"use \.jpg or \.png"):
        example(image=photo()).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_grid_places_images_side_by_side():
    sheet = grid([photo(value=v) for v in (50, 100, 150, 200, 250)], columns=3, side=100, gap=10)
    assert sheet.shape == (2 * 85 + 10, 3 * 110 + 10, 3)  # all are wider than high
    centres = [sheet[47 + 85 * row, 60 + 110 * column, 0] for row, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    assert centres == [50, 100, 150, 200, 250]
    assert sheet[47 + 85, 60 + 220].tolist() == sheet[0, 0].tolist()
    named = grid([photo(), photo()], columns=2, side=100, gap=10, texts=["one.jpg", "a" * 60])
    assert named.shape == (85 + 20 + 10, 230, 3)
    assert min(named[85:105, 10:110].max(), named[85:105, 120:220].max()) > 150
    assert named[85:105, 220:].max() == named[0, 0].max()
    assert grid([photo()], columns=4, side=64).shape[1] == 64 + 16
    with pytest.raises(ValueError, match="at least one"):
        grid([])


# -- charts --------------------------------------------------------------------------------------------------------


def results(num_classes: int) -> DetectionResults:
    rng = np.random.default_rng(0)
    metrics = DetectionMetrics(num_classes)
    for _ in range(20):
        xy, wh = rng.uniform(0, 400, (num_classes, 2)), rng.uniform(40, 100, (num_classes, 2))
        boxes, labels = np.concatenate((xy, xy + wh), axis=1), np.arange(num_classes)[:, None]
        shifted = boxes + rng.normal(0, 8, boxes.shape)
        found = np.concatenate((shifted, rng.random((num_classes, 1)), labels), axis=1)
        metrics.update([found], [np.concatenate((labels, boxes), axis=1)])
    return metrics.compute()


def texts(svg: str) -> list[str]:
    return [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("num_classes", [1, 3, 30])
@pytest.mark.parametrize("draw", [plots.pr_curve, plots.confusion_matrix])
def test_charts_are_self_contained_svg_with_any_names(draw, num_classes):
    names = ['<script>"&', "naïve", *map(str, range(30))][:num_classes]
    svg = draw(results(num_classes), names)
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in svg
    assert "<script" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    width, height = (float(root.get(side)) for side in ("width", "height"))
    for element in root.iter():
        if element.get("x") and element.get("y"):
            assert 0 <= float(element.get("x")) <= width
            assert 0 <= float(element.get("y")) <= height


def test_pr_curve_shows_and_follows_the_scores():
    scored = results(2)
    svg = plots.pr_curve(scored, NAMES)
    for expected in ("qr_code", "bar code", f"{scored.map50:.3f}", f"best F1 {scored.f1:.3f}", "recall", "precision"):
        assert expected in texts(svg)
    curves = [e for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path") if "curve" in e.get("class")]
    assert len(curves) == 3
    first = [tuple(map(float, p.split())) for p in curves[0].get("d")[1:].split("L")]
    reached = int((scored.precision_at_recall[0] > 0).sum())
    assert len(first) == reached
    lows = [e for e in ET.fromstring(svg).iter() if e.get("class") == "grid" and e.get("y1") == e.get("y2")]
    zero, one = float(lows[0].get("y1")), float(lows[-1].get("y1"))
    drawn = [(zero - y) / (zero - one) for _, y in first]
    np.testing.assert_allclose(drawn, scored.precision_at_recall[0][:reached], atol=1e-3)


def test_confusion_matrix_shows_its_counts():
    scored = results(2)
    shown = texts(plots.confusion_matrix(scored, NAMES))
    for count in scored.confusion[scored.confusion > 0]:
        assert str(count) in shown
    assert "background" in shown


def test_charts_of_an_empty_validation_set():
    nothing = DetectionMetrics(2).compute()
    assert "no labelled boxes" in texts(plots.pr_curve(nothing, NAMES))
    ET.fromstring(plots.confusion_matrix(nothing, NAMES))


def test_some_of_the_boxes() -> None:
    image = np.arange(10 * 20 * 3, dtype=np.uint8).reshape(10, 20, 3)
    boxes = [[0, 0, 4, 5], [15, 6, 30, 9], [3, 2, 6, 4], [40, 40, 50, 50]]
    found = Detections.from_arrays(boxes, [0.9, 0.8, 0.7, 0.6], [0, 1, 0, 1], names=["cat", "dog"], image=image)
    assert found[0].labels == ["cat"]
    assert found[1:3].boxes.xyxy.tolist() == boxes[1:3]
    assert found[found.boxes.conf > 0.75].labels == ["cat", "dog"]
    assert found[[3, 0]].boxes.conf.tolist() == pytest.approx([0.6, 0.9])
    assert found.of("dog").boxes.xyxy.tolist() == [boxes[1], boxes[3]]
    assert len(found.of("cat", "dog")) == 4
    assert len(found[:0].of("dog")) == 0
    with pytest.raises(ValueError, match="'bird' is not a class; choose one of cat, dog"):
        found.of("bird")
    with pytest.raises(IndexError):
        found[4]
    crops = found.crops()
    assert [crop.shape for crop in crops] == [(5, 4, 3), (3, 5, 3), (2, 3, 3), (0, 0, 3)]
    np.testing.assert_array_equal(crops[2], image[2:4, 3:6])
    assert found.crops(margin=0.5)[2].shape == (4, 7, 3)
    crops[2][:] = 0
    assert image[2:4, 3:6].any(), "a crop is a copy"
    assert found.to_json()[1] == {"label": "dog", "confidence": 0.8, "box_xyxy_px": [15.0, 6.0, 30.0, 9.0]}
    with pytest.raises(ValueError, match="no image to cut from"):
        Detections(found.boxes, found.names).crops()
