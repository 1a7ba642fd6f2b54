"""Folders of images: what is read of them, how their views are drawn, and what a classification says and scores."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.vision.drawn import draw_folders

from arclight.cli.command import main
from arclight.deploy import Program
from arclight.vision import Classifier, build_model
from arclight.vision.data import image_folder
from arclight.vision.data.augment_settings import CropAugment
from arclight.vision.data.image_folder import ImageFolder, class_names, collate, random_view
from arclight.vision.data.labels import DatasetError
from arclight.vision.models.heads import IMAGENET_MEAN, IMAGENET_STD
from arclight.vision.results.image_class import Classification
from arclight.vision.results.metrics import ClassificationMetrics
from arclight.vision.tasks.classification import ClassificationData
from arclight.vision.tasks.deployment import export_module
from arclight.vision.tasks.settings import ClassificationTask


def test_classes_are_the_folders_of_train_in_order(tmp_path: Path) -> None:
    root = draw_folders(tmp_path / "set")
    assert class_names(root) == ["disc", "square"]
    data = ImageFolder.open(root, "val", ["disc", "square"], image_size=32)
    batch = collate(data.__getitems__(range(6)))
    assert batch["images"].shape == (6, 3, 32, 32)
    assert batch["targets"].tolist() == [0, 0, 0, 1, 1, 1]
    assert [Path(path).parent.name for path in batch["paths"]] == ["disc"] * 3 + ["square"] * 3


def test_faulty_folders_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = draw_folders(tmp_path / "set")
    (root / "val" / "disc" / "0.png").write_bytes(b"")
    (root / "val" / "disc" / "2.png").write_bytes((root / "val" / "disc" / "2.png").read_bytes()[:200])
    with caplog.at_level(logging.WARNING):
        data = ClassificationData(ClassificationTask(data=root, image_size=32)).open("val")
    assert len(data) + len(data.report.corrupt if data.report else ()) == 6
    assert str(root / "val" / "disc" / "0.png") in caplog.text
    (root / "val" / "circle").mkdir()
    with pytest.raises(DatasetError, match="'circle' is not a class; there are disc, square"):
        ImageFolder.open(root, "val", ["disc", "square"])
    with pytest.raises(DatasetError, match="has no 'test' split"):
        ImageFolder.open(root, "test", ["disc", "square"])
    with pytest.raises(DatasetError, match="is not a folder; did you mean set"):
        class_names(tmp_path / "sett")
    with pytest.raises(DatasetError, match="has no folder train"):
        class_names(tmp_path)


def test_an_image_damaged_since_is_replaced_in_training_and_left_out_of_metrics(tmp_path: Path) -> None:
    root = draw_folders(tmp_path / "set")
    for split, augment in (("train", CropAugment()), ("val", None)):
        data = ImageFolder.open(root, split, ["disc", "square"], image_size=32, augment=augment)
        data.images[0].write_bytes(b"no image")
        batch = collate(data.__getitems__([0, 1, 5]))
        kept = [Path(path).name for path in batch["paths"]]
        assert kept == (["2.png", "2.png", "5.png"] if augment else ["2.png", "5.png"])
        assert data.damaged == 1
        if augment is None:
            assert collate(data.__getitems__([0]))["images"].shape[0] == 0
            with pytest.raises(DatasetError, match="cannot be decoded"):
                data[0]


def test_training_decodes_each_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ImageFolder.open(
        draw_folders(tmp_path), "train", class_names(tmp_path), image_size=32, augment=CropAugment()
    )
    read: list[Path] = []
    decode = image_folder.decode_reduced
    monkeypatch.setattr(image_folder, "decode_reduced", lambda path, size: read.append(path) or decode(path, size))
    data.__getitems__([0, 2, 1])
    assert read == [data.images[0], data.images[2], data.images[1]]


def test_views_are_drawn_from_the_seed_alone(tmp_path: Path) -> None:
    root = draw_folders(tmp_path / "set")
    batches = []
    for cache in (False, True):
        data = ImageFolder.open(root, "train", ["disc", "square"], image_size=32, augment=CropAugment(), cache=cache)
        random.seed(1)
        batches.append(collate(data.__getitems__(range(6)))["images"])
        assert not torch.equal(batches[-1], collate(data.__getitems__(range(6)))["images"])
    assert torch.equal(*batches)


def test_a_view_has_at_least_the_area_asked_for() -> None:
    rng = np.random.default_rng(0)
    ramp = np.zeros((80, 120, 3), np.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = np.arange(120), np.arange(80)[:, None]
    still = {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "fliplr": 0.0}
    for _ in range(30):
        view = random_view(ramp, 40, rng, CropAugment(min_area=0.5, **still)).astype(int)
        width, height = np.ptp(view[:, :, 0]) + 1, np.ptp(view[:, :, 1]) + 1
        assert width * height > 0.42 * 80 * 120
    mirrored = random_view(ramp, 40, rng, CropAugment(**{**still, "fliplr": 1.0})).astype(int)
    assert mirrored[0, 0, 0] > mirrored[0, -1, 0]


def test_the_network_takes_images_as_published_weights_do() -> None:
    torch.manual_seed(0)
    model = build_model("yolov5n-cls", 5).eval()
    image = torch.rand(1, 3, 64, 64)
    x = (image - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)) / torch.tensor(IMAGENET_STD).view(3, 1, 1)
    with torch.no_grad():
        for layer in list(model.model)[:-1]:
            x = layer(x)
        expected = model.head([x]).softmax(1)
        torch.testing.assert_close(model(image), expected)
    assert not any("mean" in name.split(".")[-1] == "mean" for name in model.state_dict())
    assert {"model.9.conv.conv.weight", "model.9.linear.bias"} <= model.state_dict().keys()


def test_label_smoothing_and_dropout_are_used(tmp_path: Path) -> None:
    settings = ClassificationTask(data=tmp_path, image_size=32, label_smoothing=0.2, dropout=0.5)
    module = Classifier(settings, ["a", "b", "c"])
    logits = torch.randn(4, 3)
    batch: dict[str, Any] = {"targets": torch.tensor([0, 1, 2, 0])}
    smooth = torch.full((4, 3), 0.2 / 3)
    smooth[torch.arange(4), batch["targets"]] += 0.8
    expected = -(smooth * F.log_softmax(logits, 1)).sum(1).mean()
    torch.testing.assert_close(module.loss(logits, batch)[0], expected)
    assert [layer.p for layer in module.modules() if isinstance(layer, torch.nn.Dropout)] == [0.5]


def test_scores_count_first_and_first_five() -> None:
    probs = np.eye(8)[[0, 1, 2, 3]] * 0.5 + np.linspace(0.3, 0.01, 8)
    metrics, other = ClassificationMetrics(8), ClassificationMetrics(8)
    metrics.update(probs[:2], [0, 0])  # right; right among five
    other.update(probs[2:], [2, 7])  # right; wrong altogether
    metrics.merge(other.state_dict())
    results = metrics.compute()
    assert (results.top1, results.top5, results.images) == (0.5, 0.75, 4)
    assert results.accuracy[0] == 0.5
    assert np.isnan(results.accuracy[1])
    assert results.confusion[1, 0] == 1
    assert np.isnan(ClassificationMetrics(3).compute().top1)
    with pytest.raises(ValueError, match="an image has class 8"):
        metrics.update(probs[:1], [8])
    with pytest.raises(ValueError, match="cannot merge"):
        metrics.merge(ClassificationMetrics(3).state_dict())


def test_a_classification_gives_its_classes_in_every_form(tmp_path: Path) -> None:
    photo = np.full((60, 90, 3), 120, np.uint8)
    found = Classification(np.array([0.1, 0.7, 0.2]), ("a", "b", "c"), photo)
    assert (found.label, found.top1, found.top5, found.labels) == ("b", 1, [1, 2, 0], ["b"])
    assert found.summary() == "b 0.70, c 0.20, a 0.10"
    assert found.to_json()[0] == {"label": "b", "confidence": 0.7}
    assert found.to_txt() == "0.7000 b\n0.2000 c\n0.1000 a\n"
    assert (found.plot() != photo).any()
    assert found.save(tmp_path / "x.png").stat().st_size
    with pytest.raises(ValueError, match="a number for each of 2 classes"):
        Classification(np.zeros(3), ("a", "b"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Classifier, Path]:
    """A classifier that has learned nothing, and its program."""
    folder = tmp_path_factory.mktemp("shipped")
    root = draw_folders(folder / "set")
    torch.manual_seed(0)
    module = Classifier(ClassificationTask(data=root, image_size=32), ["disc", "square"])
    data = ImageFolder.open(root, "train", module.names, image_size=32)
    return module, export_module(module, folder / "classifier.onnx", data).path


@pytest.mark.slow
def test_a_program_matches_the_classifier(shipped: tuple[Classifier, Path]) -> None:
    module, path = shipped
    photos = [np.random.default_rng(i).integers(0, 255, (50 + i, 70, 3), np.uint8) for i in range(3)]
    opened = Program.load(path)
    assert opened.metadata["task"] == "classify"
    for ours, theirs in zip(module.predict(photos), opened.predict(photos), strict=True):
        np.testing.assert_allclose(ours.probs, theirs.probs, atol=2e-2)
    assert opened.precision == "fp32"


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Compare on two rounds; the status, and all that was said."""
    status = main(["compare", *map(str, words), "--rounds", "2"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.slow
def test_programs_of_another_task_are_compared_by_their_own_description(
    shipped: tuple[Classifier, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, program = shipped
    root = module.settings.data
    numbers = tmp_path / "numbers.json"
    both = (program, program)
    status, out = compared(capsys, *both, "--data", root, "--max-drop", 0, "--min-sqnr", 60, "--json", numbers)
    assert (status, "equal in every bit" in out) == (0, True)
    found = json.loads(numbers.read_text())
    assert list(found["scores"]) == ["top1", "top5", "class disc", "class square"]
    assert found["scores"]["class disc"]["class"]
    assert found["samples"] == 6
    status, out = compared(capsys, *both, "--data", root, "--max-size", 0.9)
    assert (status, out.strip().splitlines()[-1]) == (1, "B has 1.00 times the size of A: more than max_size 0.9")
    assert "name some with --data" in compared(capsys, *both)[1]
    assert (
        "a page is written for detectors" in compared(capsys, *both, "--data", root, "--report", tmp_path / "x.html")[1]
    )
    draw_folders(tmp_path / "other")
    for split in ("train", "val"):
        (tmp_path / "other" / split / "disc").rename(tmp_path / "other" / split / "circle")
    status, out = compared(capsys, *both, "--data", tmp_path / "other")
    assert (status, "has the classes circle, square" in out) == (2, True)
