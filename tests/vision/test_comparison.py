"""Two detectors on the same images: intervals against metrics of images drawn again, the images that differ, the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from tests.vision.test_metrics import scene

from arclight.vision.results.comparison import (
    Evaluated,
    Interval,
    _class_scores,
    _resampled,
    as_json,
    compare,
    differing_images,
    write_comparison,
)
from arclight.vision.results.metrics import DetectionMetrics, DetectionResults, ImageRecord

NAMES = ["<b>a</b>", "b", "c"]


def records_of(seed: int, images: int = 12, grid: int | None = None, folder: Path = Path()) -> list[ImageRecord]:
    """Images with the same true boxes for every seed, and other predictions."""
    records = []
    for i in range(images):
        rng = np.random.default_rng([i])
        _, true = scene(rng, 3, 1 + i % 5, 0, grid)
        found, _ = scene(np.random.default_rng([i, 1 + seed]), 3, 0, 4, grid)
        near = np.concatenate((true[:, 1:], np.full((len(true), 1), 0.5), true[:, :1]), axis=1)
        rng = np.random.default_rng([i, seed, 7])
        near[:, :4] += rng.normal(0, 2 + 16 * seed, (len(true), 4))
        # equal confidences in many images, but not within one: an image drawn twice ranks them one image after the other
        near[:, 4] = rng.permutation(10)[: len(true)] / 10 + 0.05
        found[:, 4] = rng.permutation(10)[: len(found)] / 10
        rows = np.concatenate((found, near)).astype(np.float64)
        rows = rows[np.argsort(-rows[:, 4], kind="stable")]
        records.append(ImageRecord(str(folder / f"{i:02d}.png"), (700, 700), rows, true.astype(np.float64)))
    return records


def scored(records: list[ImageRecord]) -> DetectionResults:
    metrics = DetectionMetrics(3)
    metrics.update([one.predicted for one in records], [one.true for one in records])
    results = metrics.compute()
    return DetectionResults(**{**vars(results), "records": tuple(records)})


@pytest.mark.parametrize("grid", [None, 20])
def test_a_resample_scores_like_its_images(grid: int | None) -> None:
    records = records_of(1, grid=grid)
    weights = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=20)
    by_class = np.stack([_resampled(_class_scores(records, c), weights) for c in range(3)], axis=1)
    for row, drawn in zip(weights, by_class, strict=True):
        again = [record for record, count in zip(records, row, strict=True) for _ in range(count)]
        np.testing.assert_allclose(drawn, scored(again).average_precision, atol=1e-12)
    assert 0.02 < np.nanmean(by_class) < 0.98


def test_scores_and_intervals() -> None:
    a, b = records_of(0), records_of(1)
    found = compare(a, b, 3, resamples=200, seed=3)
    whole = found.metrics["map50_95"]
    assert whole.a == pytest.approx(scored(a).map50_95)
    assert whole.b == pytest.approx(scored(b).map50_95)
    assert found.metrics["map50"].b == pytest.approx(scored(b).map50)
    assert whole.low < whole.difference < whole.high
    assert whole.certain, "boxes three times as far off are worse"
    assert found.labels.tolist() == scored(a).labels.tolist()
    for c, one in enumerate(found.classes):
        assert one is not None
        assert one.a == pytest.approx(scored(a).average_precision[c].mean())
    assert compare(a, b, 3, resamples=200, seed=3).metrics == found.metrics
    assert compare(a, b, 3, resamples=200, seed=4).metrics != found.metrics
    same = compare(a, a, 3, resamples=50).metrics["map50"]
    assert (same.difference, same.low, same.high, same.certain) == (0, 0, 0, False)


def test_classes_without_boxes_and_other_images() -> None:
    a = records_of(0)
    assert compare(a, a, 4, resamples=5).classes[3] is None
    with pytest.raises(ValueError, match="different images"):
        compare(a, a[1:], 3)
    none = [record._replace(true=np.empty((0, 5))) for record in a]
    assert math.isnan(compare(none, none, 3, resamples=5).metrics["map50"].difference)


def test_images_that_differ() -> None:
    a, b = scored(records_of(0)), scored(records_of(1))
    shown = differing_images(a, b, count=2)
    more = [[pair.mistakes[1] - pair.mistakes[0] for pair in shown[kind]] for kind in ("worse", "better", "both")]
    assert more[0] == sorted(more[0], reverse=True)
    assert len(more[0]) == 2
    assert min(more[0]) > 0
    assert all(one < 0 for one in more[1])
    assert all(min(pair.mistakes) > 0 for pair in shown["both"])
    paths = [pair.record_a.path for kind in shown.values() for pair in kind]
    assert len(paths) == len(set(paths))


def test_the_page_is_one_file(tmp_path: Path) -> None:
    for i in range(12):
        cv2.imwrite(str(tmp_path / f"{i:02d}.png"), np.full((700, 700, 3), 90, np.uint8))
    (tmp_path / "00.png").unlink()  # gone since it was measured
    a, b = (
        Evaluated(
            name=f"runs/<{seed}>", results=scored(records_of(seed, folder=tmp_path)), stage_ms={"network": [2.0, 4.0 * (1 + seed)]},
            size_bytes=1000 * (1 + seed), image_size=640,
        )
        for seed in (0, 1)
    )  # fmt: skip
    found = compare(a.results.records, b.results.records, 3, resamples=50)
    page = tmp_path / "new" / "page.html"
    write_comparison(page, found, a, b, NAMES, facts={"data": "x.yaml"})
    html = page.read_text("utf-8")
    assert [file.name for file in page.parent.iterdir()] == ["page.html"]
    assert not re.search(r'(?:src|href)="(?!data:|#)', html), "nothing is loaded from elsewhere"
    assert "<b>a</b>" not in html
    assert "runs/&lt;1&gt;" in html
    for title in ("Scores", "Classes", "Errors", "Speed and size", "B does worse"):
        assert f"<h2>{title}</h2>" in html
    assert html.count("data:image/jpeg") % 2 == 0
    assert html.count("data:image/jpeg") >= 6
    assert "B is worse" in html
    assert "1.67 x" in html, "medians of 3 and 5 ms"
    numbers = as_json(found, a, b, NAMES)
    json.dumps(numbers, allow_nan=False)
    assert numbers["metrics"]["map50"]["difference"] == pytest.approx(b.results.map50 - a.results.map50)
    assert numbers["b"] == {"name": "runs/<1>", "size_bytes": 2000, "image_size": 640, "stage_ms": {"network": 5.0}}


def test_an_interval_is_certain_where_it_leaves_out_zero() -> None:
    assert Interval(0.5, 0.6, 0.05, 0.15).certain
    assert Interval(0.5, 0.4, -0.15, -0.05).certain
    assert not Interval(0.5, 0.6, -0.01, 0.2).certain
