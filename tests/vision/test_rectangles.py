"""Training in rectangles: batches of like aspect ratios, the same for any number of workers and ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from arclight.checkpoint import CheckpointError
from arclight.data import ResumableLoader
from arclight.trainer import Callback, Trainer
from arclight.vision.data.augment_settings import Augment, NoAugment
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.data.image_headers import file_header
from arclight.vision.data.labels import label_path
from arclight.vision.data.letterbox import scaled_shape
from arclight.vision.data.mix import EpochMix
from arclight.vision.data.rectangles import AspectOrder, ResumedEpoch, scaled_sides, smallest_frame
from arclight.vision.data.site_split import SiteShare, SiteSplit
from arclight.vision.tasks.detection import DetectionData, Detector, SegmentationData
from arclight.vision.tasks.settings import DetectionTask, SegmentationTask

SHAPES = [(72, 128), (128, 72), (128, 128), (60, 128)]
FRAMES = {(96, 128), (128, 96), (128, 128), (64, 128)}


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of four shapes, each with one solid box that fills its middle."""
    root, numbers = tmp_path_factory.mktemp("set"), np.random.default_rng(0)
    for index in range(24):
        height, width = SHAPES[index % 4]
        pixels = numbers.integers(90, 130, (height, width, 3), dtype=np.uint8)
        pixels[height // 4 : height - height // 4, width // 4 : width - width // 4] = (20, 20, 250)
        image = root / "images/train" / f"{index:03d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(image), pixels)
        label_path(image).parent.mkdir(parents=True, exist_ok=True)
        label_path(image).write_text(f"{index % 2} 0.5 0.5 0.5 0.5\n")
    (root / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [code, text]\n")
    return root / "data.yaml"


def open_train(yaml: Path, **settings: Any) -> DetectionDataset:
    plain = {"image_size": 128, "cache_labels": False, "augment": Augment(), "rect": True}
    return DetectionDataset.open(read_data_yaml(yaml), "train", **plain | settings)


def loader(
    opened: DetectionDataset,
    batch: int = 4,
    *,
    rank: int = 0,
    ranks: int = 1,
    group: int | None = None,
    workers: int = 0,
) -> ResumableLoader:
    order = opened.aspect_order(batch * ranks, None if group is None else ResumedEpoch(0, group))
    loaded = DataLoader(opened, batch, sampler=order, num_workers=workers, collate_fn=collate, drop_last=True)
    return ResumableLoader(loaded, seed=11, rank=rank, world_size=ranks)


def assert_equal(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert len(one) == len(two)
    for first, second in zip(one, two):
        assert first["paths"] == second["paths"]
        assert torch.equal(first["images"], second["images"])
        assert torch.equal(first["targets"], second["targets"])


@pytest.mark.parametrize("cached", [False, True])
def test_headers_are_read_once_with_the_labels(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """By one rank, where the labels are cached: the others take the shapes from there."""
    yaml = shutil.copytree(yaml.parent, tmp_path / "set") / "data.yaml"
    if cached:
        open_train(yaml, cache_labels=True)
    read = list[Path]()
    for module in ("dataset", "labels"):
        monkeypatch.setattr(
            f"arclight.vision.data.{module}.file_header", lambda path: read.append(path) or file_header(path)
        )
    opened = {
        "order": open_train(yaml, cache_labels=cached),
        "sorted": open_train(yaml, cache_labels=cached, augment=None),
        "site": open_train(
            yaml, cache_labels=cached, selection=SiteSplit(read_data_yaml(yaml), SiteShare(number=1, count=2))
        ),
    }
    assert len(read) == (0 if cached else 3 * 24)
    for kind, found in opened.items():
        given = {"augment": None if kind == "sorted" else Augment(), "rect": True, "image_size": 128}
        alone = DetectionDataset(found.images, found.labels, **given)  # type: ignore[arg-type]
        assert found._shapes == alone._shapes
        assert found.images == alone.images


def test_sides_are_those_of_a_letterbox() -> None:
    shapes = np.random.default_rng(0).integers(1, 4000, (500, 2))
    expected = [scaled_shape((int(h), int(w)), 416)[1:] for h, w in shapes]
    assert scaled_sides(shapes, 416).tolist() == [list(pair) for pair in expected]
    assert smallest_frame([(72, 128), (60, 128)], 128, 32) == (96, 128)
    assert smallest_frame([(1, 5000)], 128, 64) == (64, 128)


def test_each_batch_is_the_smallest_rectangle_and_boxes_lie_on_their_pixels(yaml: Path) -> None:
    opened = open_train(yaml, augment=NoAugment())
    batches = list(loader(opened).batches(0))
    assert {tuple(batch["images"].shape[2:]) for batch in batches} <= FRAMES
    assert sum(batch["images"].shape[2:].numel() for batch in batches) < 0.85 * 128**2 * len(batches)
    seen = []
    for batch in batches:
        height, width = batch["images"].shape[2:]
        seen += batch["paths"]
        shapes = [SHAPES[int(Path(path).stem) % 4] for path in batch["paths"]]
        assert (height, width) == smallest_frame(shapes, 128, 32)
        for place, image in enumerate(batch["images"]):
            (row,) = batch["targets"][batch["targets"][:, 0] == place][:, 2:].numpy() * (width, height, width, height)
            red = (image[0] > 200) & (image[2] < 60)
            ys, xs = np.nonzero(red.numpy())
            found = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
            np.testing.assert_allclose((*row[:2] - row[2:] / 2, *row[:2] + row[2:] / 2), found, atol=1.1)
    assert len(set(seen)) == 24


@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_batches_do_not_depend_on_workers_or_on_where_an_epoch_is_resumed(yaml: Path, scale: float) -> None:
    augment = Augment(mixup=0.5, copy_paste=0.5, degrees=10, perspective=0.0005, fliplr=0.5, close_mosaic=0)
    opened = open_train(yaml, augment=augment, multi_scale=scale)
    one = [batch for epoch in range(2) for batch in loader(opened).batches(epoch)]
    two = loader(open_train(yaml, augment=augment, multi_scale=scale), workers=2)
    assert_equal(one, [batch for epoch in range(2) for batch in two.batches(epoch)])
    assert_equal(one[6 + 3 :], list(loader(opened).batches(1, start=3)))
    assert [batch["paths"] for batch in one[:6]] != [batch["paths"] for batch in one[6:]]
    sides = {max(batch["images"].shape[2:]) for batch in one}
    assert sides == {128} if not scale else len(sides) > 2
    for batch in one:
        rows = batch["targets"][:, 2:]
        assert len(rows)
        assert (rows[:, :2] - rows[:, 2:] / 2).min() > -1e-6
        assert (rows[:, :2] + rows[:, 2:] / 2).max() < 1 + 1e-6


def test_ranks_see_the_same_shapes_and_together_what_one_sees(yaml: Path) -> None:
    opened = open_train(yaml, multi_scale=0.5)
    whole = list(loader(opened, 4).batches(0))
    shares = [list(loader(opened, 2, rank=rank, ranks=2).batches(0)) for rank in range(2)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert batch["images"].shape[2:] == first["images"].shape[2:] == second["images"].shape[2:]
        assert sorted(batch["paths"]) == sorted(first["paths"] + second["paths"])


def test_a_world_of_another_size_goes_on_in_the_order_that_there_was(yaml: Path) -> None:
    opened = open_train(yaml, augment=NoAugment())
    whole, fewer = loader(opened, 4, ranks=2), loader(opened, 4, group=8)
    first, rest = list(whole.batches(0))[:1], fewer.batches(0, start=fewer.seek(0, whole.samples_before(0, 1)))
    other = list(loader(opened, 4, ranks=2, rank=1).batches(0))[:1]
    paths = [path for batch in [*first, *other, *rest] for path in batch["paths"]]
    assert len(paths) == len(set(paths)) == 24


def test_incomplete_last_batch_is_drawn_at_random() -> None:
    order = AspectOrder(lambda epoch: [(64, 128)] * 6 + [(128, 64)] * 5, 4, sides=[128], stride=32)
    left_out = set()
    for seed in range(40):
        torch.manual_seed(seed)
        indices = list(order)
        assert sorted(index.sample for index in indices) == list(range(11))
        left_out |= {index.sample for index in indices[8:]}
    assert left_out == set(range(11))


def test_mixed_data_is_grouped_by_the_images_of_each_epoch(yaml: Path) -> None:
    opened = open_train(yaml, augment=NoAugment())
    opened.mix = EpochMix([12, 12], [0.5])
    for epoch in range(3):
        batches = list(loader(opened, 6).batches(epoch))
        for batch in batches:
            shapes = [SHAPES[int(Path(path).stem) % 4] for path in batch["paths"]]
            assert tuple(batch["images"].shape[2:]) == smallest_frame(shapes, 128, 32)


class Batches(Callback):
    """Keep the paths and shapes of the batches that are trained on; save the run after the first one."""

    def __init__(self, save: Path | None = None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.save = save

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((*batch["paths"], *batch["images"].shape[2:]))
        if self.save is not None and trainer.global_step == 1:
            trainer.save_checkpoint(self.save)


@pytest.mark.slow
def test_a_run_is_resumed_in_the_middle_of_an_epoch(yaml: Path, tmp_path: Path) -> None:
    task = DetectionTask(
        data=yaml, image_size=128, batch_size=4, workers=0, memory_format="contiguous", cache_labels=False, rect_train=True
    )  # fmt: skip

    def fit(batches: Batches, ckpt_path: Path | None = None) -> Detector:
        torch.manual_seed(0)
        data = DetectionData(task)
        made = Detector(task, names=data.names)
        trainer = Trainer(
            accelerator="cpu", max_steps=3, limit_val_batches=0, logger=False, enable_checkpointing=False, callbacks=[batches],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(made, datamodule=data, ckpt_path=ckpt_path)
        return made

    whole, rest = Batches(tmp_path / "first.ckpt"), Batches()
    one = fit(whole)
    other = fit(rest, tmp_path / "first.ckpt")
    assert rest.seen == whole.seen[1:]
    assert {seen[-2:] for seen in whole.seen} - {(128, 128)}
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_another_run_with_resumed_data_has_groups_of_its_own(yaml: Path, tmp_path: Path) -> None:
    """Those of the run that was resumed are kept where its trainer goes on."""

    def made(batch_size: int) -> DetectionData:
        return DetectionData(
            DetectionTask(
                data=yaml, image_size=128, batch_size=batch_size, workers=0, memory_format="contiguous", cache_labels=False, rect_train=True
            )
        )  # fmt: skip

    def trainer(batches: Batches, steps: int) -> Trainer:
        return Trainer(
            accelerator="cpu", max_steps=steps, limit_val_batches=0, logger=False, enable_checkpointing=False, callbacks=[batches],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip

    def fit(one: Trainer, data: DetectionData, ckpt_path: Path | None = None) -> None:
        torch.manual_seed(0)
        one.fit(Detector(data.settings, names=data.names), datamodule=data, ckpt_path=ckpt_path)

    fit(trainer(Batches(tmp_path / "first.ckpt"), 1), made(8))
    data = made(4)
    resumed = trainer(Batches(), 3)
    fit(resumed, data, tmp_path / "first.ckpt")
    order = data.training_order()
    assert order is not None
    assert order.group == 8
    own, again = Batches(), Batches()
    fit(trainer(own, 3), made(4))
    fit(trainer(again, 3), data)
    assert again.seen == own.seen
    data.trainer = resumed
    data.load_state_dict({})
    assert data.training_order().group == 4, "a checkpoint without an order has none"


def test_a_resumed_run_keeps_the_groups_of_the_epoch_that_was_begun(yaml: Path) -> None:
    task = DetectionTask(
        data=yaml,
        image_size=128,
        batch_size=8,
        workers=0,
        memory_format="contiguous",
        cache_labels=False,
        rect_train=True,
    )
    first, second = DetectionData(task), DetectionData(task)
    for data in (first, second):
        data.setup("fit")
    first.training_order().set_epoch(3)
    second.batch_size = 4
    second.load_state_dict(first.state_dict())
    order = second.training_order()
    assert (order.epoch, order.group) == (3, 8)
    assert second.state_dict() == first.state_dict(), "saved again before it has gone on"
    order.set_epoch(4)
    assert order.group == 4, "no batch has images of several groups, or of a half"
    second.load_state_dict(first.state_dict())
    assert order.group == 8, "whichever comes first"
    assert DetectionData(task).state_dict() == {}


@pytest.mark.parametrize(
    "state",
    [
        {"order_group": 0}, {"order_group": True}, {"order_group": "8"}, {"order_group": 10**30}, {"order_epoch": -1},
        {"order_epoch": 10**30},
    ],
)  # fmt: skip
def test_an_invalid_saved_order_is_refused(yaml: Path, state: dict[str, Any]) -> None:
    data = DetectionData(DetectionTask(data=yaml, image_size=128, rect_train=True))
    ((name, value),) = state.items()
    with pytest.raises(CheckpointError, match=rf"the checkpoint has {name} = {value!r} .* whole number from [01] to"):
        data.load_state_dict({"order_group": 8, "order_epoch": 0} | state)


def test_the_largest_order_is_one(yaml: Path) -> None:
    data = DetectionData(
        DetectionTask(data=yaml, image_size=128, rect_train=True, batch_size=4, workers=0, cache_labels=False)
    )
    data.setup("fit")
    data.load_state_dict({"order_group": 2**31 - 1, "order_epoch": 2**31 - 1})
    order = data.training_order()
    assert len(list(order)) == 24


def test_unsupported_rectangular_training_is_refused(
    yaml: Path, write_dataset: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="rect_train and image_weights both say"):
        DetectionTask(data=yaml, rect_train=True, image_weights=True)
    task = SegmentationTask(data=write_dataset(tmp_path, 2), image_size=64, rect_train=True)
    with pytest.raises(ValueError, match="rect_train = true is for detection, a segmentation task reads squares"):
        SegmentationData(task).open_for_training()
    caplog.set_level("INFO", "arclight")
    DetectionData(DetectionTask(data=yaml, image_size=128, cache_labels=False, rect_train=True)).open_for_training()
    assert "not composed to mosaics" in caplog.text
