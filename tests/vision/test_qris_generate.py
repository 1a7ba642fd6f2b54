"""Drawn scenes: the same bytes for a seed, true labels, payloads that readers agree with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

cv2 = pytest.importorskip("cv2")
pytest.importorskip("segno")

from arclight.vision.data.data_yaml import read_data_yaml  # noqa: E402
from arclight.vision.data.labels import KeypointShape, check_labels  # noqa: E402
from arclight.vision.qris import classify, parse  # noqa: E402
from arclight.vision.qris.reading.decode import read_zxing  # noqa: E402
from arclight.vision.qris.scenes.generate import GenerateError, generate  # noqa: E402
from arclight.vision.qris.scenes.scene import MAX_OCCLUSION, draw_scene  # noqa: E402

COUNT = 24


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "set"
    assert generate(folder, COUNT, 5, size=320, val_share=0.25, workers=1) == folder / "data.yaml"
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_data_set_in_yolo_format(drawn: Path) -> None:
    described = yaml.safe_load((drawn / "data.yaml").read_text())
    assert described["names"] == ["qr_code"]
    codes = json.loads((drawn / "codes.json").read_text())
    assert len(codes) == COUNT
    assert sum(name.startswith("images/val/") for name in codes) == 6
    for name, found in codes.items():
        image = cv2.imread(str(drawn / name))
        assert image.shape == (320, 320, 3)
        rows = (drawn / name.replace("images", "labels").replace(".jpg", ".txt")).read_text().splitlines()
        assert len(rows) == len(found)
        for row, code in zip(rows, found, strict=True):
            category, x, y, width, height = map(float, row.split())
            assert category == 0
            box = np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2]) * 320
            assert np.allclose(box, code["box_xyxy_px"], atol=0.02)
            corners = np.array(code["corners_px"]).clip(0, 320)
            assert (corners.min(0) >= box[:2] - 0.02).all()
            assert (corners.max(0) <= box[2:] + 0.02).all()
            # Only a bent edge reaches beyond the corners, and not far.
            assert np.abs(np.concatenate([corners.min(0), corners.max(0)]) - box).max() < 0.35 * (width + height) * 320


def test_payment_codes_are_valid_and_the_others_are_not_payment_codes(drawn: Path) -> None:
    kinds = set()
    for found in json.loads((drawn / "codes.json").read_text()).values():
        for code in found:
            kinds.add(code["kind"])
            assert classify(code["payload"]) == code["kind"]
            if code["kind"] == "qris":
                payload = parse(code["payload"])
                assert (payload.merchant_name, payload.nmid) == (code["merchant"], code["nmid"])
    assert kinds == {"qris", "other"}


def test_the_same_seed_gives_the_same_bytes_with_any_number_of_workers(drawn: Path, tmp_path: Path) -> None:
    generate(tmp_path / "again", COUNT, 5, size=320, val_share=0.25, workers=2)
    assert digests(tmp_path / "again") == digests(drawn)


def test_a_scene_depends_on_its_number_alone(drawn: Path, tmp_path: Path) -> None:
    generate(tmp_path / "fewer", 9, 5, size=320, val_share=0, workers=1)
    generate(tmp_path / "other", 9, 6, size=320, val_share=0, workers=1)
    fewer, other, all_of_them = digests(tmp_path / "fewer"), digests(tmp_path / "other"), digests(drawn)
    for index in range(9):
        name = f"images/train/{index:06d}.jpg"
        assert fewer[name] == all_of_them[name]
        assert other[name] != all_of_them[name]


@pytest.mark.parametrize("scenes", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_readers_agree_with_payload_and_corners(scenes: int) -> None:
    """zxing-cpp, which had no part in drawing, reads many codes, none falsely, and finds them where the labels say."""
    read = labelled = 0
    for index in range(scenes):
        scene = draw_scene(np.random.default_rng([11, index]), 640)
        labelled += len(scene.codes)
        for code in read_zxing(scene.image):
            same = [drawn for drawn in scene.codes if drawn.content.text == code.text]
            assert same, f"scene {index} has an unlabelled code: {code.text!r}"
            diagonal = float(np.hypot(*(code.corners[2] - code.corners[0])))
            nearest = min(float(np.abs(drawn.corners - code.corners).max()) for drawn in same)
            assert nearest < 0.06 * diagonal
            read += 1
    assert read > 0.3 * labelled


def test_scenes_differ_in_what_matters() -> None:
    scenes = [draw_scene(np.random.default_rng([3, index]), 256) for index in range(40)]
    counts = [len(scene.codes) for scene in scenes]
    sides = [max(c.box[2] - c.box[0], c.box[3] - c.box[1]) / 256 for scene in scenes for c in scene.codes]
    brightness = [scene.image.mean() for scene in scenes]
    assert min(counts) == 0
    assert max(counts) >= 5
    assert min(sides) < 0.09
    assert max(sides) > 0.6
    assert np.std(brightness) > 20
    assert MAX_OCCLUSION < 0.5


def test_invalid_requests_are_refused_and_keep_existing_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(GenerateError, match="holds something"):
        generate(tmp_path / "mine", 3)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    for count, size, share in ((0, 640, 0.2), (5, 32, 0.2), (5, 640, 1.0)):
        with pytest.raises(GenerateError, match="count >= 1"):
            generate(tmp_path / "bad", count, size=size, val_share=share)
    with pytest.raises(GenerateError, match="seed = -4: give 0 or more"):
        generate(tmp_path / "bad", 3, seed=-4)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, workers: int) -> None:
    def stop(done: int, total: int) -> None:
        assert total == 40
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "out", 40, size=128, workers=workers, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_be_filled_and_progress_is_reported(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    (tmp_path / "out").mkdir()
    generate(tmp_path / "out", 3, size=128, workers=1, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert (tmp_path / "out" / "data.yaml").is_file()


@pytest.fixture(scope="module")
def of_merchants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "set"
    generate(folder, 32, 5, size=128, val_share=0.25, merchants=4, workers=1)
    return folder


def test_every_scene_names_its_merchant(of_merchants: Path) -> None:
    whose = json.loads((of_merchants / "merchants.json").read_text())
    codes = json.loads((of_merchants / "codes.json").read_text())
    assert set(whose) == set(codes)
    assert len(set(whose.values())) == 4
    for split in ("train", "val"):
        counts = [
            sum(name == merchant for place, name in whose.items() if split in place) for merchant in set(whose.values())
        ]
        assert min(counts) == max(counts)


def test_merchants_look_different(of_merchants: Path) -> None:
    """Photos of one merchant are more alike, in colour and in the size of codes, than groups drawn by lot are."""
    whose = json.loads((of_merchants / "merchants.json").read_text())
    codes = json.loads((of_merchants / "codes.json").read_text())
    looks = []
    for place in whose:
        blue, green, red = cv2.imread(str(of_merchants / place)).mean((0, 1))
        widths = [code["box_xyxy_px"][2] - code["box_xyxy_px"][0] for code in codes[place]] or [32.0]
        looks.append([np.log(red / blue), np.log(red + green + blue), np.log(np.median(widths))])
    features = (np.array(looks) - np.mean(looks, 0)) / np.std(looks, 0)
    groups = np.array([sorted(set(whose.values())).index(name) for name in whose.values()])

    def apart(groups: np.ndarray) -> float:
        return float(np.mean([features[groups == g].mean(0) ** 2 for g in range(4)]))

    lots = np.random.default_rng(0)
    by_chance = sorted(apart(lots.permutation(groups)) for _ in range(200))
    assert apart(groups) > by_chance[-1]


@pytest.mark.slow
def test_merchants_draw_the_same_bytes_for_a_seed(tmp_path: Path, of_merchants: Path) -> None:
    generate(tmp_path / "again", 32, 5, size=128, val_share=0.25, merchants=4, workers=1)
    assert digests(tmp_path / "again") == digests(of_merchants)
    with pytest.raises(GenerateError, match="a scene for each"):
        generate(tmp_path / "few", 3, merchants=4)


def test_labels_may_have_the_corners_of_codes_as_keypoints(tmp_path: Path) -> None:
    file = generate(tmp_path / "set", 6, seed=3, size=96, corners=True, workers=1)
    spec, codes = read_data_yaml(file), json.loads((file.parent / "codes.json").read_text())
    assert spec.keypoints == KeypointShape(4, 3)
    seen = 0
    for split in ("train", "val"):
        found = check_labels(spec.images(split), 1, name=split, cache=False, geometry=spec.pose_shape())
        assert not found.report.malformed
        assert found.outlines is not None
        for image, rows in zip(found.images, found.outlines, strict=True):
            drawn = [code["corners_px"] for code in codes[f"images/{split}/{image.name}"]]
            for points, corners in zip(rows, drawn, strict=True):
                inside = np.isfinite(points).all(1)
                np.testing.assert_allclose(points[inside] * 96, np.array(corners)[inside], atol=0.01)
                outside = np.array(corners)[~inside]
                assert ((outside < 0) | (outside > 96)).any(1).all()
                seen += int(inside.sum())
    assert seen >= 8


def test_labels_may_be_the_corners_of_codes_for_rotated_boxes(tmp_path: Path) -> None:
    file = generate(tmp_path / "set", 6, seed=3, size=96, rotated=True, workers=1)
    spec, codes = read_data_yaml(file), json.loads((file.parent / "codes.json").read_text())
    assert spec.keypoints is None
    found = check_labels(spec.images("train"), 1, name="train", cache=False, geometry="oriented")
    assert not found.report.malformed
    assert found.outlines is not None
    for image, rows in zip(found.images, found.outlines, strict=True):
        drawn = [np.array(code["corners_px"]).clip(0, 96) for code in codes[f"images/train/{image.name}"]]
        np.testing.assert_allclose(np.array(rows).reshape(-1, 4, 2) * 96, np.array(drawn).reshape(-1, 4, 2), atol=0.01)
    with pytest.raises(GenerateError, match="corners and rotated are two kinds of labels"):
        generate(tmp_path / "both", 6, corners=True, rotated=True)


def test_a_folder_that_another_process_fills_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    def fill(done: int, count: int) -> None:
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / "theirs").write_text("1")

    with pytest.raises(
        GenerateError, match="set was filled by another process while its scenes were drawn, and is left"
    ):
        generate(tmp_path / "set", 1, 5, size=320, val_share=0, workers=1, progress=fill)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["theirs"]
