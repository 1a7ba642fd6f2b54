"""Options of training a detector: each changes what it says, and none of them changes a run that leaves it alone."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from arclight.optim.schedule_settings import WSD
from arclight.optim.settings import SGD, AdamW
from arclight.trainer import Callback, Trainer
from arclight.trainer.callbacks import BatchSizeFinder, ModelCheckpoint
from arclight.vision import Detector
from arclight.vision.data.augment_settings import Augment, NoAugment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DatasetError, DetectionDataset
from arclight.vision.data.mix import MixedData
from arclight.vision.data.progressive_resizing import ProgressiveResizing
from arclight.vision.models.anchors import best_possible_recall, evolve_anchors, fit_anchors
from arclight.vision.models.loss import update_balance
from arclight.vision.tasks import module as vision_module
from arclight.vision.tasks.detection import DetectionData, SegmentationData
from arclight.vision.tasks.settings import DetectionTask, SegmentationTask

TARGETS = torch.tensor([[0, 1, 0.5, 0.5, 0.3, 0.3], [1, 0, 0.2, 0.7, 0.1, 0.2], [1, 2, 0.6, 0.4, 0.5, 0.1]])


def detector(**settings: Any) -> Detector:
    torch.manual_seed(0)
    return Detector(DetectionTask(data=Path("none"), image_size=64, **settings), names=["a", "b", "c"])


def loss(**settings: Any) -> dict[str, float]:
    made = detector(**settings).train()
    total, parts = made.loss(
        made.model.raw(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))), {"targets": TARGETS}
    )
    return {"total": total.item(), **{name: value.item() for name, value in parts.items()}}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"label_smoothing": 0.1}, {"cls"}),
        ({"cls_pos_weight": 2.0}, {"cls"}),
        ({"obj_pos_weight": 2.0}, {"obj"}),
        ({"focal_gamma": 1.5}, {"obj", "cls"}),
        ({"anchor_t": 2.0}, {"box", "obj", "cls"}),
    ],
)
def test_an_option_changes_the_parts_of_the_loss_that_it_is_about(settings: dict[str, Any], changed: set[str]) -> None:
    assert changed_parts(loss(), loss(**settings)) == changed


def changed_parts(one: dict[str, float], other: dict[str, float]) -> set[str]:
    """Name the parts that differ by more than float32's rounding."""
    return {name for name in ("box", "obj", "cls") if one[name] != pytest.approx(other[name], rel=1e-5)}


def test_quality_focal_loss_differs_where_targets_are_between_0_and_1() -> None:
    plain, quality = loss(focal_gamma=1.5), loss(focal_gamma=1.5, focal_loss="quality")
    assert changed_parts(plain, quality) == {"obj"}


def test_the_learned_balance_moves_in_training_alone_and_is_saved(tmp_path: Path) -> None:
    made = detector(autobalance=True)
    assert "level_weights" not in detector().state_dict()
    before = made.level_weights.clone()
    raw = made.model.raw(torch.rand(2, 3, 64, 64))
    made.eval().loss(raw, {"targets": TARGETS})
    assert torch.equal(made.level_weights, before)
    made.train().loss(raw, {"targets": TARGETS})
    assert not torch.equal(made.level_weights, before)
    again = detector(autobalance=True)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again.level_weights, made.level_weights)


def test_all_ranks_train_in_the_memory_format_that_the_first_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = detector()
    monkeypatch.setattr(vision_module, "fastest_memory_format", lambda *arguments: torch.contiguous_format)
    strategy = SimpleNamespace(in_stages=False, broadcast=lambda own: torch.channels_last)
    found: dict[str, str] = {}
    trainer = SimpleNamespace(
        strategy=strategy, precision_plugin=SimpleNamespace(forward_context=None), record_measured=found.__setitem__
    )
    monkeypatch.setattr(Detector, "trainer", trainer)
    made.on_fit_start()
    assert made.memory_format is torch.channels_last
    assert found == {"memory_format": "channels_last"}


def test_a_memory_format_that_is_set_takes_precedence_over_that_of_the_checkpoint() -> None:
    for checkpoint in ({}, {"memory_format": "channels_last"}):
        made = detector(memory_format="contiguous")
        made.on_load_checkpoint(checkpoint)
        assert made.memory_format is torch.contiguous_format
    measured = detector(memory_format="auto")
    measured.on_load_checkpoint({"memory_format": "channels_last"})
    assert measured.memory_format is torch.channels_last


@pytest.mark.parametrize("name", ["auto", "contiguous", "channels_last"])
def test_images_are_floats_in_the_memory_format(name: str) -> None:
    made = detector(memory_format=name)
    images = torch.randint(0, 256, (2, 3, 64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    floats = made.prepare(images)
    assert torch.equal(floats, images.float() / 255)
    assert torch.equal(images, before)
    assert floats.is_contiguous(memory_format=made.memory_format or torch.contiguous_format)


def test_a_checkpoint_from_before_any_fit_leaves_the_memory_format_to_be_measured() -> None:
    for own, kept in (("auto", {}), ("contiguous", {"memory_format": "contiguous"})):
        checkpoint: dict[str, Any] = {}
        detector(memory_format=own).on_save_checkpoint(checkpoint)
        assert checkpoint == kept
    resumed = detector(memory_format="auto")
    resumed.on_load_checkpoint({})
    assert resumed.memory_format is None


def test_a_batch_without_a_finite_loss_leaves_the_learned_balance() -> None:
    balance = torch.tensor([4.0, 1.0, 0.4])
    update_balance(balance, [torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(1.0)])
    assert balance.tolist() == pytest.approx([4.0, 1.0, 0.4])


# ------------------------------------------------------------------------------------------------------------- anchors


def tall_boxes(count: int = 300) -> torch.Tensor:
    """Sizes far from the published anchors: slim, and twenty times as tall as wide."""
    rng = np.random.default_rng(0)
    widths = rng.uniform(2.0, 2.4, count)
    return torch.from_numpy(np.stack((widths, widths * rng.uniform(18, 22, count)), 1))


def test_evolved_anchors_fit_better_and_are_the_same_again() -> None:
    sizes = torch.from_numpy(np.exp(np.random.default_rng(1).normal(3.5, 0.8, (400, 2))))
    fitted = fit_anchors(sizes, 640)

    def fit(anchors: torch.Tensor) -> float:
        ratio = sizes[:, None].float() / anchors
        return float(torch.minimum(ratio, 1 / ratio).amin(-1).amax(1).mean())

    evolved = evolve_anchors(fitted, sizes, generations=300)
    assert fit(evolved) > fit(fitted) + 0.003
    assert torch.equal(evolved, evolve_anchors(fitted, sizes, generations=300))
    assert not torch.equal(evolved, evolve_anchors(fitted, sizes, generations=300, seed=1))
    assert (evolved.prod(1).diff() >= 0).all()
    assert torch.equal(evolve_anchors(fitted, torch.zeros(0, 2)), fitted)


def test_anchors_are_fitted_to_boxes_as_they_lie_in_the_input(tmp_path: Path) -> None:
    """A long photo is scaled by its longer side: its boxes are flatter in the square than as shares of the photo."""
    for split in ("train", "val"):
        for folder in ("images", "labels"):
            (tmp_path / folder / split).mkdir(parents=True)
        for name, shape in (("long", (60, 240)), ("tall", (200, 50))):
            cv2.imwrite(str(tmp_path / "images" / split / f"{name}.png"), np.zeros((*shape, 3), np.uint8))
            (tmp_path / "labels" / split / f"{name}.txt").write_text("0 0.5 0.5 0.5 0.5\n1 0.5 0.5 0.2 0.8\n")
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [a, b]\n")
    wanted = np.array([[320, 80], [128, 128], [80, 320], [32, 512]], np.float32)  # photos of 640 x 160, and 160 x 640
    task = DetectionTask(data=tmp_path / "data.yaml", workers=0, cache_labels=False, anchors="fitted")
    module, data = task.build()
    data.setup("fit")
    np.testing.assert_allclose(data.train.box_sizes_px(), wanted, rtol=1e-6)
    alone = DetectionDataset(data.train.images, data.train.labels, augment=NoAugment())
    np.testing.assert_allclose(alone.box_sizes_px(), wanted, rtol=1e-6)
    module.trainer = SimpleNamespace(datamodule=data)
    module.setup("fit")
    anchors = (module.model.anchors * torch.tensor(module.model.stride).view(-1, 1, 1)).view(-1, 2)
    assert best_possible_recall(torch.from_numpy(wanted), anchors, anchor_t=2.1) == 1


@pytest.mark.parametrize("kind", ["fitted", "evolved", "auto"])
def test_anchors_are_fitted_where_published_ones_miss(kind: str) -> None:
    made = detector(anchors=kind)
    strides = torch.tensor(made.model.stride).view(-1, 1, 1)
    before = (made.model.anchors * strides).view(-1, 2).clone()
    made._fit_anchors(tall_boxes())
    after = (made.model.anchors * strides).view(-1, 2)
    assert best_possible_recall(tall_boxes(), before) < 0.5
    assert best_possible_recall(tall_boxes(), after) > 0.99


def test_boxes_too_small_for_any_anchor_are_an_error_of_the_data(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    yaml = write_dataset(tmp_path / "set", 4)
    write_dataset(tmp_path / "set", 2, "val")
    for file in (tmp_path / "set/labels/train").glob("*.txt"):
        file.write_text("0 0.5 0.5 0.01 0.01\n")
    task = DetectionTask(data=yaml, image_size=64, workers=0, cache_labels=False, anchors="fitted")
    with pytest.raises(DatasetError, match=r"none of the 4 given is at image_size = 64: train with larger images"):
        fit(task, tmp_path, max_steps=1)


def test_anchors_that_answer_for_all_boxes_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    made = detector(anchors="auto")
    before = made.model.anchors.clone()
    made._fit_anchors(torch.tensor([[30.0, 40.0], [12.0, 15.0], [50.0, 50.0]]))
    assert torch.equal(made.model.anchors, before)
    with caplog.at_level(logging.WARNING, "arclight"):
        detector()._fit_anchors(tall_boxes())
    assert "no anchor matches" in caplog.text
    assert "task.anchors = auto" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- runs


def fit(task: DetectionTask, folder: Path, ckpt_path: Path | None = None, **settings: Any) -> Detector:
    data = DetectionData(task)
    torch.manual_seed(0)
    made = Detector(task, names=data.names)
    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"limit_val_batches": 0, "enable_checkpointing": False} | settings,
    )  # fmt: skip
    trainer.fit(made, datamodule=data, ckpt_path=ckpt_path)
    return made


def test_all_options_train_together(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    yaml = write_dataset(tmp_path / "set", 8)
    write_dataset(tmp_path / "set", 2, "val")
    task = DetectionTask(
        data=yaml, image_size=64, batch_size=4, workers=0, memory_format="contiguous", cache_labels=False, disk_cache=True,
        multi_scale=0.5, image_weights=True, single_class=True, anchors="auto", label_smoothing=0.1, focal_gamma=1.5,
        autobalance=True,
    )  # fmt: skip
    made = fit(task, tmp_path, max_steps=2)
    assert made.names == ["object"]
    assert len(list((tmp_path / "set/images.cache").glob("*.npy"))) > 3
    assert all(torch.isfinite(value).all() for value in made.state_dict().values())
    data = DetectionData(task)
    batches = data.open("train", augment=task.augment)
    assert {batches.__getitems__([0, 1]).images.shape[-1] for _ in range(20)} == {32, 64, 96}
    assert {int(row) for labels in batches.labels for row in labels[:, 0]} == {0}
    assert not (tmp_path / "set/train.cache.npz").exists()


def test_the_disk_cache_of_a_data_set_named_by_its_folder_is_in_it(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    folder = write_dataset(tmp_path / "set", 4).parent
    task = DetectionTask(data=folder, image_size=64, workers=0, cache_labels=False, disk_cache=True)
    DetectionData(task).open_for_training().__getitems__([0, 1])
    assert list((folder / "images.cache").glob("*.npy"))
    assert [one.name for one in tmp_path.iterdir()] == ["set"], "it lay beside the folder"


def test_a_single_class_is_one_in_kept_images_too(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    yaml = write_dataset(tmp_path, 6)
    task = DetectionTask(
        data=yaml,
        image_size=64,
        workers=0,
        cache_labels=False,
        cache=True,
        single_class=True,
        mix=(MixedData(data=yaml),),
    )
    samples = DetectionData(task).open_for_training().__getitems__(range(12))
    assert sum(len(sample.targets) for sample in samples) > 6
    assert {int(row[0]) for sample in samples for row in sample.targets} == {0}


@pytest.mark.parametrize(("names", "mirrored"), [("code, text", False), ("code, cat", True)])
def test_a_single_class_is_not_mirrored_if_one_of_its_classes_never_is(
    tmp_path: Path, write_dataset: Callable[..., Path], names: str, mirrored: bool
) -> None:
    yaml = write_dataset(tmp_path, 6)
    yaml.write_text(f"train: images/train\nnames: [{names}]\n")
    images = []
    for share in (0.0, 1.0):
        task = DetectionTask(
            data=yaml, image_size=64, cache_labels=False, single_class=True, augment=NoAugment(fliplr=share)
        )
        images.append([sample.image for sample in DetectionData(task).open_for_training().__getitems__(range(6))])
    assert all(torch.equal(one, other) != mirrored for one, other in zip(*images, strict=True))


@pytest.mark.parametrize("model", ["yolov5n", pytest.param("arc-n", marks=pytest.mark.slow)])
def test_rectangular_validation_leaves_training_alone(
    tmp_path: Path, write_dataset: Callable[..., Path], model: str
) -> None:
    yaml = write_dataset(tmp_path / "set", 4)
    write_dataset(tmp_path / "set", 8, "val")
    results, weights = {}, {}
    for rect in (False, True):
        task = DetectionTask(
            data=yaml, model=model, image_size=128, batch_size=2, workers=0, memory_format="contiguous",
            cache_labels=False, rect=rect,
        )  # fmt: skip
        made = fit(task, tmp_path, max_epochs=1, limit_val_batches=1.0)
        results[rect], weights[rect] = made.trainer.callback_metrics, made.state_dict()
        shapes = {tuple(batch["images"].shape[2:]) for batch in made.trainer.datamodule.val_dataloader()}
        assert (shapes == {(128, 128)}) != rect
    assert all(torch.equal(value, weights[True][name]) for name, value in weights[False].items())
    assert results[True]["val/loss"] == pytest.approx(float(results[False]["val/loss"]), rel=0.5)


@pytest.mark.parametrize(("objects", "said"), [(100, False), (101, True)])
def test_images_of_more_objects_than_average_precision_counts_are_named(
    tmp_path: Path, write_dataset: Callable[..., Path], caplog: pytest.LogCaptureFixture, objects: int, said: bool
) -> None:
    yaml = write_dataset(tmp_path, 3)
    rows = [f"0 {0.05 + 0.009 * number:.3f} 0.5 0.02 0.02" for number in range(objects)]
    (tmp_path / "labels" / "train" / "001.txt").write_text("\n".join([*rows, "1 0.5 0.5 0.1 0.1"]))
    DetectionData(DetectionTask(data=yaml, image_size=64, cache_labels=False)).open_for_validation("train")
    assert ("train: 1 images have more than 100 objects of a class" in caplog.text) == said


def test_rectangular_batches_are_for_boxes(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    task = SegmentationTask(data=write_dataset(tmp_path, 2), image_size=64, rect=True)
    with pytest.raises(ValueError, match="rect = true is for detection, a segmentation task reads squares"):
        SegmentationData(task).open_for_validation("train")


class RateRecorder(Callback):
    """Keeps the rate of each parameter in each step, as the optimizer uses it."""

    def __init__(self) -> None:
        self.rates: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.rates.append({name: float(group["lr"]) for name, _, group in optimizer.named()})


def test_a_warm_up_of_biases_by_steps_is_refused_over_seconds() -> None:
    with pytest.raises(ValueError, match="follows the steps of a schedule's warm-up"):
        DetectionTask(data=Path("none"), schedule=WSD(seconds=60.0), warmup_bias_lr=0.1)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.02), pytest.param(AdamW(lr=0.02), marks=pytest.mark.slow)])
def test_biases_fall_to_the_peak_while_others_rise(
    tmp_path: Path, write_dataset: Callable[..., Path], optimizer: SGD | AdamW
) -> None:
    task = DetectionTask(
        data=write_dataset(tmp_path / "set", 4), image_size=32, batch_size=2, workers=0, memory_format="contiguous",
        cache_labels=False, optimizer=optimizer, schedule=WSD(warmup=4, decay=2), warmup_bias_lr=0.1,
    )  # fmt: skip
    write_dataset(tmp_path / "set", 2, "val")
    recorder = RateRecorder()
    plain = {
        name: param.ndim
        for name, param in fit(task, tmp_path, max_steps=8, callbacks=[recorder]).model.named_parameters()
    }
    steps = recorder.rates[-8:]
    biases = {name for name in plain if name.endswith(".bias")}
    assert {"model.0.bn.bias", "model.24.m.0.bias"} <= biases
    for name in plain:
        rates = [rates[name] for rates in steps]
        warm = [0.1, 0.08, 0.06, 0.04] if name in biases else [0.004, 0.008, 0.012, 0.016]
        assert rates == pytest.approx([*warm, 0.02, 0.02, 0.02, 0.01]), name


class SaveInWarmup(Callback):
    """Saves the run after its second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *batch: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_bias_warmup(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    task = DetectionTask(
        data=write_dataset(tmp_path / "set", 4), image_size=32, batch_size=2, workers=0, memory_format="contiguous",
        cache_labels=False, optimizer=SGD(lr=0.02), schedule=WSD(warmup=4, decay=2), warmup_bias_lr=0.1,
    )  # fmt: skip
    write_dataset(tmp_path / "set", 2, "val")
    whole, rest, path = RateRecorder(), RateRecorder(), tmp_path / "second.ckpt"
    one = fit(task, tmp_path, max_steps=6, callbacks=[whole, SaveInWarmup(path)])
    other = fit(task, tmp_path, path, max_steps=6, callbacks=[rest])
    assert rest.rates[-4:] == whole.rates[-4:]
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_without_bias_warmup_groups_and_rates_are_as_before(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    task = DetectionTask(
        data=write_dataset(tmp_path / "set", 4), image_size=32, batch_size=2, workers=0, memory_format="contiguous",
        cache_labels=False,
    )  # fmt: skip
    write_dataset(tmp_path / "set", 2, "val")
    recorder = RateRecorder()
    made = fit(task, tmp_path, max_steps=2, callbacks=[recorder])
    assert len(made.trainer.optimizers[0].param_groups) == 2
    assert all(len(set(rates.values())) == 1 for rates in recorder.rates)


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found_and_trained_with(
    write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    write_dataset(tmp_path, 6, "val")
    task = DetectionTask(
        data=write_dataset(tmp_path, 24), model="yolov5n", image_size=32, batch_size=3, workers=0, memory_format="contiguous",
        cache_labels=False,
    )  # fmt: skip
    seen: list[int] = []

    class Small(Detector):
        """A detector on a device with room for eight images."""

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            seen.append(len(batch["images"]))
            if seen[-1] > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    def fit(**options: Any) -> DetectionData:
        data, finder = DetectionData(task), BatchSizeFinder(steps_per_trial=1, **options)
        trainer = Trainer(
            accelerator="cpu", max_steps=1, limit_val_batches=0, callbacks=[finder], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Small(task, ["code", "text"]), datamodule=data)
        return data

    assert (fit().batch_size, seen) == (8, [2, 4, 8, 16, 8])
    seen.clear()
    assert (fit(max_val=4).batch_size, seen) == (4, [2, 4, 4])
    assert task.batch_size == 3


# ------------------------------------------------------------------------------------------------------------ progressive resizing


def test_images_grow_with_the_epochs_and_a_resumed_run_goes_on_with_theirs(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    yaml = write_dataset(tmp_path / "set", 4)
    write_dataset(tmp_path / "set", 1, "val")
    growing = ProgressiveResizing(initial_scale=0.34, delay_fraction=0.4, finetune_fraction=0.2)
    task = DetectionTask(
        data=yaml, image_size=96, batch_size=2, workers=1, memory_format="contiguous", cache_labels=False,
        progressive_resizing=growing,
    )  # fmt: skip
    sides: list[int] = []

    class Sides(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            sides.append(batch["images"].shape[-1])

    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=-1)  # in the middle of an epoch
    whole = fit(task, tmp_path / "whole", max_epochs=5, callbacks=[Sides(), kept], enable_checkpointing=True)
    assert sides == [32, 32, 32, 32, 64, 64, 64, 64, 96, 96]
    sides.clear()
    (path,) = (tmp_path / "kept").glob("*step=5*")
    alone = dataclasses.replace(task, workers=0)
    resumed = fit(alone, tmp_path / "resumed", path, max_epochs=5, callbacks=[Sides()])
    assert sides == [64, 64, 64, 96, 96]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "epochs", "sides"),
    [
        ({}, 10, [160] * 5 + [192, 256, 288, 320, 320]),
        ({"delay_fraction": 0.5, "finetune_fraction": 0.5}, 4, [160, 160, 320, 320]),
        ({"delay_fraction": 1.0, "finetune_fraction": 0.0}, 3, [160, 160, 320]),  # the last epoch is whole
        ({"initial_scale": 0.01}, 2, [32, 320]),  # and none is smaller than the stride
        ({}, 1, [320]),
        ({}, 2.2, [160, 320, 320]),  # by max_steps: the last whole epoch is, too
        ({}, 0.3, [320]),
    ],
)
def test_sides_of_epochs(
    tmp_path: Path, write_dataset: Callable[..., Path], settings: dict[str, float], epochs: float, sides: list[int]
) -> None:
    opened = DetectionDataset.open(
        read_data_yaml(write_dataset(tmp_path, 1)), "train", image_size=320, augment=Augment(), epochs=epochs,
        resizing=ProgressiveResizing(**settings),
    )  # fmt: skip
    found = []
    for epoch in range(len(sides)):
        opened.set_epoch(epoch)
        found.append(opened.__getitems__([0]).images.shape[-1])
    assert found == sides
    opened.set_epoch(len(sides) + 3)  # of a run that goes on beyond its length
    assert opened.__getitems__([0]).images.shape[-1] == 320


def test_progressive_resizing_that_cannot_be_is_refused(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"delay_fraction = 0.7 and finetune_fraction = 0.4 are more than all epochs"):
        ProgressiveResizing(delay_fraction=0.7, finetune_fraction=0.4)
    growing = ProgressiveResizing()
    with pytest.raises(ValueError, match="rect_train and progressive_resizing both say which sides"):
        DetectionTask(data=tmp_path, rect_train=True, progressive_resizing=growing)
    yaml = write_dataset(tmp_path / "set", 2)
    write_dataset(tmp_path / "set", 1, "val")
    task = DetectionTask(
        data=yaml, image_size=64, workers=0, memory_format="contiguous", cache_labels=False,
        progressive_resizing=growing,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"their number is unknown: give trainer.max_epochs or max_steps"):
        fit(task, tmp_path, max_epochs=-1, max_time="00:00:00:10")
    data = DetectionData(task)
    data.setup("fit")
    data.train.epochs = 2
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(in_stages=True))
    with pytest.raises(ValueError, match="progressive_resizing: stages of a network take batches of one shape"):
        data.training_order()
