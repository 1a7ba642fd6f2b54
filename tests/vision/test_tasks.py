"""The contract of every vision task: learn, measure, save, open, resume, name faulty labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vision.drawn import box_row, corner_row, cornered_row, draw_folders, draw_objects, keypoint_row, polygon_row
from torch import nn

from arclight import seed_everything
from arclight.checkpoint import CheckpointError
from arclight.cli.command import main
from arclight.deploy import Int8, QuantizationAwareTraining, convert, export
from arclight.fabric.errors import MisconfigurationError
from arclight.optim.schedule_settings import Cosine
from arclight.optim.settings import AdamW
from arclight.trainer import Trainer
from arclight.trainer.callbacks import ModelCheckpoint
from arclight.trainer.loggers import CSVLogger
from arclight.vision.data.augment_settings import Augment, CropAugment
from arclight.vision.data.dataset import DatasetError
from arclight.vision.data.images import decode_image
from arclight.vision.tasks.module import VisionModule
from arclight.vision.tasks.settings import (
    ClassificationTask,
    CornersTask,
    DetectionTask,
    OrientedDetectionTask,
    PoseTask,
    SegmentationTask,
    VisionTask,
)

TABLE = """
anchors: [[20,20, 26,26], [30,30, 40,40]]
backbone: [[-1, 1, Conv, [16, 3, 2]], [-1, 1, Conv, [24, 3, 2]], [-1, 1, C3, [24]], [-1, 1, Conv, [32, 3, 2]], [-1, 1, C3, [32]]]
head: [[-1, 1, Conv, [48, 3, 2]], HEAD]
"""
SHALLOW = TABLE.replace("C3, [24]", "Conv, [24]").replace("C3, [32]", "Conv, [32]")
"""The same rows with half of the convolutions, for tests that write programs: what a network is converted by grows with its layers."""
STILL = Augment(mosaic=0, translate=0, scale=0, hsv_h=0, hsv_s=0, hsv_v=0)


@dataclass(frozen=True)
class Case:
    """A task: how its data set is drawn, its settings, and what it must reach."""

    task: type[VisionTask]
    head: str
    draw: Callable[..., Path]
    score: str
    """The value that is watched."""
    options: dict[str, Any] = field(default_factory=dict)
    hostile: str = ""
    """A label row that cannot be used, if labels have rows, and ..."""
    reason: str = ""
    """... what is said of it."""
    steps: int = 75
    """In how many it learns all by heart."""

    def settings(self, root: Path, data: Path, **options: Any) -> Any:
        (root / "tiny.yaml").write_text(TABLE.replace("HEAD", self.head))
        fields: dict[str, Any] = {
            "data": data, "model": str(root / "tiny.yaml"), "image_size": 64, "batch_size": 6, "workers": 0, "memory_format": "contiguous",
            "optimizer": AdamW(lr=1e-2), "schedule": Cosine(warmup=0.05, final=0.02),
        }  # fmt: skip
        return self.task(**{**fields, **self.options, **options})


GAINS = {"augment": STILL, "obj_gain": 10.0, "cls_gain": 20.0}  # at this size empty cells weigh little by themselves
CASES = {
    "detection": Case(
        DetectionTask, "[[4, 5], 1, Detect, [nc, anchors]]", lambda root, **how: draw_objects(root, box_row, **how), "val/map50",
        GAINS, "0 0.5 0.5 nan 0.2", "nan is not a coordinate",
    ),
    "segmentation": Case(
        SegmentationTask, "[[4, 5], 1, Segment, [nc, anchors, 8, 32]]", lambda root, **how: draw_objects(root, polygon_row, **how),
        "val/mask_map50", GAINS, "0 0.5 0.5 0.2 0.2", "a box, and this task learns outlines",
    ),
    "pose": Case(
        PoseTask, "[[4, 5], 1, Pose, [nc, anchors]]",
        lambda root, **how: draw_objects(root, keypoint_row, head="kpt_shape: [3, 3]\n", **how), "val/keypoint_map50",
        GAINS | {"keypoint_sigmas": (0.1, 0.1, 0.1), "keypoint_gain": 0.3}, "0 0.5 0.5 0.2 0.2", "5 numbers: with kpt_shape [3, 3] a row has 14",
    ),
    "corners": Case(
        CornersTask, "[[4, 5], 1, Corners, [nc, anchors]]",
        lambda root, **how: draw_objects(root, cornered_row, head="kpt_shape: [4, 3]\n", **how), "val/keypoint_map50",
        GAINS | {"keypoint_gain": 0.3}, "0 0.5 0.5 0.2 0.2", "5 numbers: with kpt_shape [4, 3] a row has 17", 100,
    ),
    "obb": Case(
        OrientedDetectionTask, "[[4, 5], 1, OBB, [nc, anchors]]", lambda root, **how: draw_objects(root, corner_row, **how), "val/map50",
        GAINS, "0 0.5 0.5 0.2 0.2", "a box of 5 numbers, which has no angle, and this task learns oriented boxes",
    ),
    "classification": Case(
        ClassificationTask, "[-1, 1, Classify, [nc]]", draw_folders, "val/top1",
        {"augment": CropAugment(min_area=1, hsv_h=0, hsv_s=0, hsv_v=0, fliplr=0)},
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


SOME = [
    name if name in ("detection", "classification") else pytest.param(name, marks=pytest.mark.slow) for name in CASES
]
"""All tasks, of which two are quick: one with rows of labels for each image, and one with a folder for each class."""


@pytest.fixture(params=[name for name, case in CASES.items() if case.hostile])
def labelled(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def trainer(folder: Path, **options: Any) -> Trainer:
    fixed = {"enable_checkpointing": "callbacks" in options, "num_sanity_val_steps": 0, "accelerator": "cpu"}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, **{**fixed, **quiet, **options})


def built(settings: Any) -> tuple[Any, Any]:
    seed_everything(1, workers=True)
    return settings.build()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("case", SOME, indirect=True)
def test_it_learns_a_few_images_by_heart_and_opens_again(case: Case, tmp_path: Path) -> None:
    settings = case.settings(tmp_path, case.draw(tmp_path / "set"))
    module, data = built(settings)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.1  # statistics that follow tens of steps
    run = trainer(tmp_path, max_steps=case.steps, limit_val_batches=0)
    (before,) = trainer(tmp_path).validate(module, datamodule=data)
    run.fit(module, datamodule=data)
    (after,) = trainer(tmp_path).validate(module, datamodule=data)
    assert before[case.score] < 0.7
    assert after[case.score] > 0.9
    assert after["val/loss"] < before["val/loss"]
    run.save_checkpoint(tmp_path / "end.ckpt")
    for cls in (type(module), VisionModule):
        opened = cls.load(tmp_path / "end.ckpt")
        assert type(opened) is type(module)
        assert equal(opened.state_dict(), module.state_dict())
    own = type("Own", (type(module),), {})
    assert type(own.load(tmp_path / "end.ckpt")) is own, "a class of one's own opens what its parent wrote"
    photos = [decode_image(path) for path in data.val.images]
    found, again = module.predict(photos), opened.predict(photos)
    assert [one.to_json() for one in found] == [one.to_json() for one in again]
    assert all(one.labels for one in found), "each image has an object"
    assert opened.predict([]) == []
    charts = module.write_charts(tmp_path / "charts")
    assert charts
    assert all((tmp_path / "charts" / name).stat().st_size for name in charts)
    for other in {one.task.module_class() for one in CASES.values()} - {type(module)}:
        with pytest.raises(CheckpointError, match=f"open it with {type(module).__name__}"):
            other.load(tmp_path / "end.ckpt")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=() if name == "detection" else pytest.mark.slow) for name in CASES],
)  # the guide's commands, in test_guide, train all and predict with all
def test_from_the_command_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[kind]
    settings = case.settings(tmp_path, case.draw(tmp_path / "set"))
    flags = {
        "--task.data": settings.data, "--task.image_size": 64, "--task.batch_size": 6, "--task.workers": 0,
        "--task.memory_format": "contiguous", "--trainer.max_steps": 2, "--trainer.accelerator": "cpu", "--checkpoint.monitor": case.score,
        "--task.model": settings.model, "--trainer.enable_progress_bar": "false",
    }  # fmt: skip
    Path("recipe.toml").write_text(f'name = "small"\n[task]\nkind = "{kind}"\ndata = "none"\n')
    assert not main(["train", "recipe.toml", *(str(word) for pair in flags.items() for word in pair)])
    assert not main(["validate", "runs/small/1", "--json", "scores.json"])
    assert case.score in json.loads(Path("scores.json").read_text())[0]
    photos = settings.data.parent if settings.data.is_file() else settings.data
    assert not main(["predict", "runs/small/1", str(photos), "--json", "found.json", "--out", "marked"])
    assert len(json.loads(Path("found.json").read_text())) == 12
    assert len(list(Path("marked").iterdir())) == 12
    assert "12 images" in capsys.readouterr().out


@pytest.mark.parametrize("case", SOME, indirect=True)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(case: Case, tmp_path: Path) -> None:
    augment = type(case.options["augment"])()  # as it is by itself: random
    settings = case.settings(tmp_path, case.draw(tmp_path / "set"), batch_size=2, augment=augment)
    ends = []
    for checkpoint in (None, tmp_path / "kept" / "at.ckpt"):
        module, data = built(settings)
        keep = ModelCheckpoint(
            dirpath=tmp_path / "kept", filename="at", every_n_train_steps=4, save_top_k=1, monitor=None
        )
        run = trainer(tmp_path, max_steps=7, limit_val_batches=0, callbacks=[] if checkpoint else [keep])
        run.fit(module, datamodule=data, ckpt_path=checkpoint)
        assert run.global_step == 7
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    assert equal(*ends)


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        ("classification", False),
        *(
            pytest.param(name, name == "detection", marks=pytest.mark.slow)
            for name in CASES
            if name != "classification"
        ),
    ],
)  # programs of what was trained so are quick in deploy, and int8 programs of every task in matrix
def test_training_with_rounding_scores_the_integer_network(name: str, exported: bool, tmp_path: Path) -> None:
    case = CASES[name]
    module, data = built(case.settings(tmp_path, case.draw(tmp_path / "set")))
    rounding = QuantizationAwareTraining(Int8(min_sqnr_db=-50), example_inputs=torch.rand(2, 3, 64, 64))
    run = trainer(tmp_path, max_steps=2, callbacks=[rounding], logger=CSVLogger(tmp_path / "run"))
    scored: list[Any] = []
    measure = module.metrics.update_output
    module.metrics.update_output = lambda output, batch: (scored.append((output, batch)), measure(output, batch))
    run.fit(module, datamodule=data)
    assert module.model.called, "the loss is of the rounded network"
    assert case.score in run.callback_metrics
    assert (run.run_folder.plots / "predictions.jpg").stat().st_size
    photos = [decode_image(path) for path in data.val.images]
    module.train()
    module.model.model[1].eval()
    modes = [part.training for part in module.modules()]
    assert len(module.predict(photos)) == len(photos)
    assert [part.training for part in module.modules()] == modes
    in_training, batch = scored[-1]
    with torch.no_grad():
        unrounded = module.model.float_model.eval()(module.prepare(batch["images"]))
    module.model = convert(module.model)
    trainer(tmp_path).validate(module, datamodule=data)
    at_end = scored[-1][0]
    assert distance(in_training, at_end) < 0.2 * distance(unrounded, at_end)
    assert module.deployment(data.calibration_dataset()).model is module.model
    found = module.predict(photos)
    if name == "detection":
        module.stage_times(data.val.images[:2])
    if not exported:
        return
    program = export(
        module.model, tmp_path / "int8.onnx", example_inputs=torch.rand(2, 3, 64, 64), output_names=module.output_names,
        parts=module.output_parts,
    ).with_processing(module.processing)  # fmt: skip
    assert [one.names for one in program.predict(photos)] == [one.names for one in found]
    assert sum(program.metadata["quantization"]["integer_kernels"].values())


@pytest.mark.slow
def test_frozen_layers_stay_while_a_graph_is_trained(tmp_path: Path) -> None:
    case = CASES["detection"]
    module, data = built(case.settings(tmp_path, case.draw(tmp_path / "set"), freeze=2))
    frozen, before = module.model.model[:2], {name: value.clone() for name, value in module.model.state_dict().items()}
    example = torch.rand(2, 3, 64, 64)

    def fit(**options: Any) -> None:
        rounding = QuantizationAwareTraining(Int8(min_sqnr_db=-50), example_inputs=example, **options)
        trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[rounding]).fit(module, datamodule=data)

    with pytest.raises(MisconfigurationError, match=r"freeze = 2: .*give it freeze_batch_norm_at=0"):
        fit()
    after = module.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "no step was taken"
    fit(freeze_batch_norm_at=0)
    assert all(torch.equal(value, before[f"model.{name}"]) for name, value in frozen.state_dict().items())
    assert not torch.equal(module.model.model[2].state_dict()["cv1.conv.weight"], before["model.2.cv1.conv.weight"])


def distance(one: Any, other: Any) -> float:
    """Root mean square of the difference of the first outputs."""
    first, second = (output if isinstance(output, torch.Tensor) else output[0] for output in (one, other))
    return float((first - second).square().mean().sqrt())


def test_mixed_precision_and_a_smaller_last_batch(case: Case, tmp_path: Path) -> None:
    settings = case.settings(tmp_path, case.draw(tmp_path / "set", train=5, val=5), batch_size=4)
    module, data = built(settings)
    run = trainer(tmp_path, max_steps=2, precision="bf16-mixed")
    run.fit(module, datamodule=data)
    assert run.callback_metrics["train/loss"].isfinite()
    assert run.callback_metrics["val/loss"].isfinite()
    assert module.results.images == 5


def test_parts_of_a_batch_have_the_loss_of_the_whole(case: Case, tmp_path: Path) -> None:
    settings = case.settings(tmp_path, case.draw(tmp_path / "set"))
    module, data = built(settings)
    data.setup("validate")
    batch = data.collate(data.val.__getitems__(range(6)))
    parts = [module.part_of_batch(batch, start, stop) for start, stop in ((0, 2), (2, 6))]
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and name != "targets":
            assert torch.equal(torch.cat([part[name] for part in parts]), value)
    assert sum(len(part["targets"]) for part in parts) == len(batch["targets"])
    module.eval()
    for part in parts:
        images = module.prepare(part["images"])
        assert torch.isfinite(module.loss(module.model.raw(images), part)[0])


def test_images_without_objects_and_hostile_rows(
    labelled: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = labelled.settings(tmp_path, labelled.draw(tmp_path / "set"), batch_size=3)
    labels = sorted((tmp_path / "set" / "labels" / "train").iterdir())
    for empty in labels[:3]:
        empty.write_text("")
    labels[3].write_text(labels[3].read_text() + labelled.hostile + "\n")
    module, data = built(settings)
    trainer(tmp_path, max_steps=4, limit_val_batches=0).fit(module, datamodule=data)
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert f"{labels[3]}:2: {labelled.reason}" in caplog.text
    for label in labels:
        label.write_text(labelled.hostile + "\n")
    shutil.rmtree(tmp_path / "set" / "labels" / "val")
    for split, message in (("fit", f"{labels[0]}:1: {labelled.reason}"), ("validate", "has a label file")):
        with pytest.raises(DatasetError, match=message.replace("[", r"\[")):
            data.setup(split)


def test_a_model_of_another_task_is_named(case: Case, tmp_path: Path) -> None:
    other = "yolov5n-cls" if case.task is DetectionTask else "yolov5n"
    settings = replace(case.settings(tmp_path, Path("none")), model=other)
    with pytest.raises(ValueError, match=f"model = {other} ends with a .* head"):
        settings.module_class()(settings, names=["a"])
