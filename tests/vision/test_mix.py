"""Epochs that mix further data sets: which images they have, the same for any worker count and after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.vision.drawn import draw_objects, polygon_row
from torch.utils.data import DataLoader

from arclight import checkpoint, recipe, seed_everything
from arclight.cli.schema import Recipe
from arclight.data import ResumableLoader
from arclight.trainer import Callback, Trainer
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.dataset import DatasetError, DetectionDataset, collate, read_data_yaml
from arclight.vision.data.mix import EpochMix, MixedData
from arclight.vision.tasks.detection import SegmentationData
from arclight.vision.tasks.settings import DetectionTask, SegmentationTask

Write = Callable[..., Path]


@pytest.fixture
def two(tmp_path: Path, write_dataset: Write) -> tuple[Path, Path]:
    """Four images of a task, and eleven of other classes' names."""
    own, other = write_dataset(tmp_path / "own", 4), write_dataset(tmp_path / "other", 11)
    other.write_text("train: images/train\nnames: [sign, code]\n")
    return own, other


def mixed(own: Path, other: Path, weight: float = 1.5, **settings: Any) -> DetectionDataset:
    source = MixedData(data=other, weight=weight, classes={"sign": "text"})
    return DetectionDataset.open(
        read_data_yaml(own), "train", cache_labels=False, mix=[source], image_size=64,
        augment=settings.pop("augment", Augment()), **settings,
    )  # fmt: skip


def test_an_epoch_has_all_own_images_and_others_in_turn() -> None:
    mix = EpochMix([4, 11, 3], [1.5, 1.0])
    assert len(mix) == 4 + 6 + 4
    epochs = [[mix.image(place, epoch) for place in range(len(mix))] for epoch in range(11)]
    assert all(epoch[:4] == [0, 1, 2, 3] for epoch in epochs)
    first = [image for epoch in epochs for image in epoch[4:10]]
    assert [Counter(first[turn * 11 : turn * 11 + 11]) for turn in range(6)] == [Counter(range(4, 15))] * 6
    assert len({tuple(first[turn * 11 : turn * 11 + 11]) for turn in range(6)}) == 6  # each time around in a new order
    assert Counter(image for epoch in epochs[:3] for image in epoch[10:]) == Counter({15: 4, 16: 4, 17: 4})
    assert epochs[5] == [EpochMix([4, 11, 3], [1.5, 1.0]).image(place, 5) for place in range(14)]  # no history


def test_a_weight_however_small_draws_an_image() -> None:
    assert EpochMix([10, 5], [0.001]).counts == (10, 1)


def test_unreadable_rows_of_a_mixed_set_are_reported(two: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    (two[1].parent / "labels/train/003.txt").write_text("0 320 240 64 64\n")
    mixed(*two)
    assert "003.txt:1: coordinate 320 is outside" in caplog.text
    assert str(two[1]) in caplog.text


def test_classes_are_matched_by_name_and_by_the_table(two: tuple[Path, Path]) -> None:
    opened = mixed(*two)
    plain = DetectionDataset.open(read_data_yaml(two[1]), "train", cache_labels=False)
    assert len(opened) == 4 + 6
    assert len(opened.images) == 4 + 11
    swapped = {0: 1, 1: 0}  # sign is text, code is code
    for rows, original in zip(opened.labels[4:], plain.labels, strict=True):
        np.testing.assert_array_equal(rows[:, 1:], original[:, 1:])
        assert rows[:, 0].tolist() == [swapped[int(number)] for number in original[:, 0]]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, r"class 'sign' of .*data.yaml is not one of code, text: say which it is, classes = \{sign = \"code\"\}"),
        ({"sign": "words"}, "class 'sign' of .* is not one of code, text"),
        ({"sing": "text"}, "has no class 'sing'; it has sign, code"),
    ],
)
def test_unknown_classes_are_named(two: tuple[Path, Path], classes: dict[str, str], message: str) -> None:
    source = MixedData(data=two[1], classes=classes)
    with pytest.raises(DatasetError, match=message):
        DetectionDataset.open(read_data_yaml(two[0]), "train", cache_labels=False, mix=[source], augment=Augment())


def test_mix_of_untrained_splits_is_refused(two: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="mix is for training images"):
        DetectionDataset.open(
            read_data_yaml(two[0]), "train", cache_labels=False, mix=[MixedData(data=two[1], classes={"sign": "text"})]
        )
    with pytest.raises(ValueError, match="weight"):
        MixedData(data=two[1], weight=0)


def paths(batches: list[dict[str, Any]]) -> Counter[str]:
    return Counter(path for batch in batches for path in batch["paths"])


def batches_of(opened: DetectionDataset, workers: int, **options: Any) -> list[dict[str, Any]]:
    loader = DataLoader(opened, 3, shuffle=True, num_workers=workers, collate_fn=collate, **options)
    resumable = ResumableLoader(loader, seed=11)
    return [batch for epoch in range(3) for batch in resumable.batches(epoch)]


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_do_not_depend_on_workers(two: tuple[Path, Path], workers: int) -> None:
    one = batches_of(mixed(*two), 0)
    assert len(one) == 3 * 4
    other = batches_of(mixed(*two), workers, persistent_workers=workers > 1)
    for batch, same in zip(one, other, strict=True):
        assert torch.equal(batch["images"], same["images"])
        assert torch.equal(batch["targets"], same["targets"])
    seen = Counter(path for batch in one for path in batch["paths"])
    own = str(two[0].parent)
    assert {count for path, count in seen.items() if path.startswith(own)} == {3}  # each epoch
    assert sorted(count for path, count in seen.items() if not path.startswith(own)) == [1] * 4 + [2] * 7  # 18 of 11


def test_outlines_of_a_mixed_set_are_learnt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its classes are numbered anew, each mask is the one of its image, and rows that cannot be used are told of."""
    own, other = draw_objects(tmp_path / "own", polygon_row), draw_objects(tmp_path / "other", polygon_row, train=5)
    other.write_text(other.read_text().replace("disc, square", "square, disc"))
    task = SegmentationTask(
        data=own, mix=(MixedData(data=other, weight=5 / 6),), model="yolov5n-seg", image_size=64, workers=0,
        cache_labels=False, augment=Augment(mosaic=0, translate=0, scale=0, hsv_h=0, hsv_s=0, hsv_v=0, fliplr=0),
    )  # fmt: skip
    opened = SegmentationData(task).open_for_training()
    assert [rows[:, 0].tolist() for rows in opened.labels] == [[0], [1], [0], [1], [0], [1], [1], [0], [1], [0], [1]]
    assert opened.outlines is not None
    assert [len(points) for (points,) in opened.outlines] == [24, 4, 24, 4, 24, 4, 24, 4, 24, 4, 24]
    batch = collate(opened.__getitems__(range(11)))
    for image, mask in zip(batch["images"], batch["masks"], strict=True):
        sampled = image[:, 2::4, 2::4].int()
        assert ((mask > 0) == ((sampled.amax(0) - sampled.amin(0)) > 60)).float().mean() > 0.95
    assert "malformed" not in caplog.text
    labels = other.parent / "labels" / "train"
    (labels / "1.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    SegmentationData(task).open_for_training()
    assert f"{labels / '1.txt'}:1: a box, and this task learns outlines" in caplog.text
    for label in labels.iterdir():
        label.write_text("0 0.5 0.5 0.2 0.2\n")
    with pytest.raises(DatasetError, match="a box, and this task learns outlines"):
        SegmentationData(task).open_for_training()


class SaveAtStep(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_sees_the_same_images(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Taken up within the second epoch, by a fresh data set that never saw the first one."""
    own, other = two
    own.write_text(own.read_text().replace("images/val", "images/train"))
    task = DetectionTask(
        data=own, mix=(MixedData(data=other, weight=1.5, classes={"sign": "text"}),), image_size=32, batch_size=5,
        workers=0, cache_labels=False, memory_format="contiguous",
    )  # fmt: skip

    def fit(name: str, *callbacks: Callback, resume: Path | None = None) -> dict[str, torch.Tensor]:
        seed_everything(1)
        module, data = task.build()
        trainer = Trainer(
            max_epochs=3, default_root_dir=tmp_path / name, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        assert trainer.global_step == 6
        trainer.save_checkpoint(tmp_path / name / "end.ckpt")
        weights: dict[str, torch.Tensor] = checkpoint.load(tmp_path / name / "end.ckpt")["model"]
        return weights

    whole = fit("whole", SaveAtStep(3, tmp_path / "3.ckpt"))
    resumed = fit("resumed", resume=tmp_path / "3.ckpt")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([[]], r"task.mix\[0\]: need a table"),
        ([{"weight": 1}], r"task.mix\[0\].data"),
        ([{"data": "x", "weight": 0}], r"task.mix\[0\].weight"),
        ([{"data": "x", "wait": 1}], r"task.mix\[0\].wait.*did you mean"),
    ],
)
def test_a_wrong_mix_is_named(mix: list[Any], message: str) -> None:
    with pytest.raises(recipe.RecipeError, match=message):
        recipe.read(Recipe, {"task": {"kind": "detection", "data": "x", "mix": mix}})


def test_a_recipe_names_its_mix(two: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        f'[task]\nkind = "detection"\ndata = "{two[0]}"\n[[task.mix]]\ndata = "{two[1]}"\nweight = 0.5\n'
        'classes = {sign = "text"}\n'
    )
    read = recipe.read(Recipe, path)
    assert read.task.mix == (MixedData(data=two[1], weight=0.5, classes={"sign": "text"}),)
    path.write_text(recipe.write(read))
    assert recipe.read(Recipe, path) == read
