"""``arclight data`` on image data sets: lint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cv2")

from arclight.cli.command import main

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "scenes"
    assert main(["data", "qris", "--out", str(folder), "--count", "8", "--seed", "5", "--size", "160"]) == 0
    return folder


@pytest.fixture
def scenes(drawn: Path, folder: Path) -> Path:
    """A sound data set of eight scenes in the current folder; returns its folder."""
    shutil.copytree(drawn, folder / "scenes")
    return Path("scenes")


def test_lint_reports_draws_and_mends(typed: Typed, scenes: Path) -> None:
    assert typed("data lint scenes --no-cache")[0] == 0
    assert not list(scenes.rglob("*.npz"))
    image = next((scenes / "images/train").iterdir())
    shutil.copy(image, scenes / "images/val/copy.jpg")
    label = scenes / "labels/train" / f"{image.stem}.txt"
    label.write_text(label.read_text() + "0 0.5 0.5 nonsense 0.1\n")
    status, out, _ = typed("data lint scenes --json l.json --sheet s.html --fix new --image-size 320")
    assert status == 1
    assert "error: 1 x leak" in out
    assert f"{label.name}:" in out
    assert "mended copy: new/data.yaml, 2 changes" in out
    found = json.loads(Path("l.json").read_text())
    assert found["errors"] == 3
    assert {one["check"] for one in found["findings"]} >= {"leak", "contradiction", "malformed-row", "missing-label"}
    assert Path("s.html").stat().st_size > 1000
    assert len(list(scenes.rglob("*.hashes.npz"))) == 2
    assert typed("data lint new/data.yaml")[0] == 0
    new = Path("new/labels/train")
    next(new.glob("*.txt")).write_text("0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0.2 0.2\n")
    assert typed("data lint new --no-hashes")[0] == 0
    assert typed("data lint new --no-hashes --strict")[0] == 1
    assert typed("data lint new --model yolov9z")[2].startswith("arclight: --model: 'yolov9z' is not a known")
    assert typed("data lint new --image-size 4")[0] == 2


def test_labels_travel_to_coco_and_back(typed: Typed, scenes: Path) -> None:
    status, out, _ = typed("data export scenes --to annotations")
    assert status == 0
    assert "wrote annotations/instances_train.json" in out
    assert typed("data export scenes --to annotations")[0] == 2
    status, out, _ = typed("data import annotations/instances_train.json --images scenes/images/train --to back")
    assert status == 0
    assert "wrote back/data.yaml: 1 classes" in out
    names = sorted(path.name for path in (scenes / "labels/train").iterdir())
    assert sorted(path.name for path in Path("back/labels/train").iterdir()) == names
    for name in names:
        before, after = ((folder / "labels/train" / name).read_text().split() for folder in (scenes, Path("back")))
        assert [float(value) for value in after] == pytest.approx([float(value) for value in before], abs=2e-5)
    assert typed("data import nowhere --to x")[2].startswith("arclight: nowhere: No such file")
    assert typed("data import scenes/images --to x")[2].endswith("makes a classification data set\n")
    assert typed("data import scenes/images --names code --symlink --to x")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("annotations/instances_train.json --names code", "--names does nothing for COCO's json, which annotations/"),
        ("annotations --difficult", "--difficult does nothing for COCO's json"),
        ("scenes/images --names code --keypoints", "--keypoints does nothing for images without labels"),
        ("scenes/images --names code,code", "--names code,code: a class is named twice"),
    ],
)
def test_import_refuses_options_that_would_do_nothing(typed: Typed, scenes: Path, words: str, message: str) -> None:
    typed("data export scenes --to annotations")
    status, _, err = typed(f"data import {words} --to imported")
    assert status == 2
    assert message in err
    assert not Path("imported").exists()


def test_splits_are_lists_beside_a_data_yaml(typed: Typed, scenes: Path) -> None:
    status, out, _ = typed("data split scenes --to lists --fractions 0.5 0.25 0.25 --seed 3")
    assert status == 0
    assert "train: 4 images\nval: 2 images\ntest: 2 images" in out
    assert typed("data check lists")[0] == 0
    assert typed("data split scenes --to other --fractions 1")[0] == 2
    assert typed("data split scenes --to other --group nothing")[2].startswith("arclight: 'nothing' matches no path")


def test_folders_of_classes_are_divided_class_by_class(typed: Typed, scenes: Path) -> None:
    images = sorted((scenes / "images").rglob("*.jpg"))
    for place, image in enumerate(images):
        target = Path("classes") / ("many" if place < 6 else "few") / image.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)
    status, out, _ = typed("data split classes --to divided --fractions 0.5 0.5")
    assert (status, "wrote divided" in out) == (0, True)
    counts = {str(folder): len(list(folder.iterdir())) for folder in sorted(Path("divided").glob("*/*"))}
    assert counts == {"divided/train/few": 1, "divided/train/many": 3, "divided/val/few": 1, "divided/val/many": 3}
    assert typed("data split classes --to divided")[2].startswith("arclight: divided holds something already")


def test_public_sets_are_described_and_never_fetched(typed: Typed) -> None:
    status, out, _ = typed("data sets")
    assert (status, len(out.splitlines())) == (0, 20)
    status, out, _ = typed("data sets coco --data-yaml coco")
    assert status == 0
    assert "Nothing is fetched" in out
    assert "echo 'cced6f7f71b7629ddf16f17bbcfab6b2  train2017.zip' | md5sum -c" in out
    assert "the checksum of coco2017labels.zip is not known" in out
    assert [path.name for path in Path("coco").iterdir()] == ["data.yaml"]
    assert typed("data sets cocoo")[0] == 2
