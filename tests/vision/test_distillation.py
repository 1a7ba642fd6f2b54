"""Distillation: the losses against plain references, and a teacher that is no part of its student's run."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vision.conftest import SMALL
from tests.vision.drawn import NAMES, box_row, draw_folders, draw_objects
from torch.distributions import Bernoulli, Categorical, kl_divergence

from arclight.checkpoint import load as load_checkpoint
from arclight.checkpoint import save as save_checkpoint
from arclight.trainer import Callback, Trainer
from arclight.vision import Classifier, Detector
from arclight.vision.boxes import complete_iou
from arclight.vision.models.loss import Gains, level_balance
from arclight.vision.models.one_to_one import BOX_WEIGHT, CLASS_WEIGHT
from arclight.vision.tasks.classification import ClassificationData
from arclight.vision.tasks.detection import DetectionData
from arclight.vision.tasks.distillation import (
    TeacherError,
    anchored_distillation,
    class_distillation,
    divergence,
    one_to_one_distillation,
)
from arclight.vision.tasks.settings import ClassificationTask, DetectionTask, PoseTask, SegmentationTask

GAINS = Gains(box=0.05, obj=1.0, cls=0.5)


def trainer(steps: int, folder: Path, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_steps=steps, limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **settings,
    )  # fmt: skip


def task(data: Path, **settings: Any) -> DetectionTask:
    fixed: dict[str, Any] = {
        "model": str(data.with_name("small.yaml")),
        "image_size": 64,
        "memory_format": "contiguous",
    }
    return DetectionTask(data=data, batch_size=3, workers=0, cache_labels=False, **{**fixed, **settings})


def detector(data: Path, seed: int = 1, names: tuple[str, ...] = NAMES, **settings: Any) -> Detector:
    torch.manual_seed(seed)
    return Detector(task(data, **settings), names)


def fit(student: Detector, folder: Path, steps: int = 2, resume: Path | None = None) -> Trainer:
    made = trainer(steps, folder)
    torch.manual_seed(2)
    made.fit(student, datamodule=DetectionData(student.settings), ckpt_path=resume)
    return made


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    data = draw_objects(tmp_path / "shapes", box_row)
    data.with_name("small.yaml").write_text(SMALL)
    return data


@pytest.fixture
def teacher(shapes: Path, tmp_path: Path) -> Path:
    """The checkpoint of a detector whose weights no student begins with."""
    made = trainer(1, tmp_path)
    made.fit(detector(shapes, seed=7), datamodule=DetectionData(task(shapes)))
    made.save_checkpoint(tmp_path / "teacher.ckpt")
    return tmp_path / "teacher.ckpt"


# -- losses ----------------------------------------------------------------------------------------------------------------


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_divergence_is_that_of_bernoulli_distributions() -> None:
    own, known = logits(50), 3 * logits(50, seed=1)
    wanted = kl_divergence(Bernoulli(logits=known), Bernoulli(logits=own))
    torch.testing.assert_close(divergence(own, known), wanted)
    assert divergence(known, known).abs().max() == 0


@pytest.mark.parametrize("classes", [1, 3])
def test_the_loss_of_anchors_is_its_definition_position_by_position(classes: int) -> None:
    anchors = torch.tensor([[[1.0, 2.0], [3.0, 1.5]], [[2.0, 2.0], [4.0, 1.0]]], dtype=torch.float64)
    shapes = [(2, 2, 4, 3, 5 + classes), (2, 2, 2, 2, 5 + classes)]
    raw = [logits(*shape) for shape in shapes]
    taught = [logits(*shape, seed=1) for shape in shapes]
    box = obj = cls = 0.0
    for level, (own, known) in enumerate(zip(raw, taught, strict=True)):
        errors, sure, places = [0.0, 0.0], 0.0, 0
        for n, k, y, x in torch.cartesian_prod(*(torch.arange(size) for size in own.shape[:4])).tolist():
            boxes = []
            for values in (own[n, k, y, x], known[n, k, y, x]):
                answers = 1 / (1 + (-values[:4]).exp())
                boxes.append(torch.cat((2 * answers[:2] - 0.5, (2 * answers[2:]) ** 2 * anchors[level, k])))
            p, q = Bernoulli(logits=known[n, k, y, x, 4:]), Bernoulli(logits=own[n, k, y, x, 4:])
            apart = kl_divergence(p, q)
            certain = p.probs[0].item()
            sure, places = sure + certain, places + 1
            obj += level_balance(2)[level] * apart[0].item() / (own[..., 4].numel())
            errors[0] += certain * (1 - complete_iou(*boxes).item())
            errors[1] += certain * apart[1:].mean().item()
        box, cls = box + errors[0] / max(sure, 1), cls + (errors[1] / max(sure, 1) if classes > 1 else 0)
    total, part = anchored_distillation(raw, taught, anchors, GAINS)
    assert part.item() == pytest.approx(0.05 * box + obj + 0.5 * cls, rel=1e-9)
    assert total.item() == pytest.approx(2 * part.item())
    assert anchored_distillation(taught, taught, anchors, GAINS)[1].item() == pytest.approx(0, abs=1e-6)


def test_the_loss_of_one_to_one_heads_is_its_definition(shapes: Path) -> None:
    head = detector(shapes, model="arc-n").model.head
    sides, classes = (8, 4, 2), 2
    raw = [logits(1, side, side, 4 + 2 * classes) for side in sides]
    taught = [logits(1, side, side, 4 + 2 * classes, seed=1) for side in sides]
    boxes = scores = sure = 0.0
    for own, known, stride in zip(raw, taught, (8, 16, 32), strict=True):
        for y in range(own.shape[1]):
            for x in range(own.shape[2]):
                places = []
                for values in (own[0, y, x], known[0, y, x]):
                    centre = (torch.tensor([x + 0.5, y + 0.5]) + values[:2]) * stride
                    places.append(torch.cat((centre, values[2:4].exp() * stride)))
                p, q = Bernoulli(logits=known[0, y, x, 4 + classes :]), Bernoulli(logits=own[0, y, x, 4 + classes :])
                certain = p.probs.max().item()
                sure += certain
                boxes += certain * (1 - complete_iou(*places).item())
                scores += kl_divergence(p, q).sum().item()
    total, part = one_to_one_distillation(raw, taught, head, 2.0, 3.0)
    assert total.item() == part.item() == pytest.approx((BOX_WEIGHT * 2 * boxes + CLASS_WEIGHT * 3 * scores) / sure)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_loss_of_classes_is_the_divergence_at_a_temperature(temperature: float) -> None:
    own, known = logits(6, 5), 4 * logits(6, 5, seed=1)
    at = (Categorical(logits=values / temperature) for values in (known, own))
    wanted = kl_divergence(*at).mean() * temperature**2
    assert class_distillation(own, known, temperature)[0].item() == pytest.approx(wanted.item())


# -- training --------------------------------------------------------------------------------------------------------------


def test_a_teacher_changes_training_and_is_not_in_checkpoints(shapes: Path, teacher: Path, tmp_path: Path) -> None:
    plain, student = detector(shapes), detector(shapes, teacher=teacher)
    before = torch.get_rng_state()
    assert student.teacher().network.training is False
    assert torch.equal(torch.get_rng_state(), before)
    fit(plain, tmp_path)
    run = fit(student, tmp_path)
    assert run.logged_metrics["train/teacher"] > 0
    assert not torch.equal(plain.model.head.m[0].weight, student.model.head.m[0].weight)
    run.save_checkpoint(tmp_path / "student.ckpt")
    saved = load_checkpoint(tmp_path / "student.ckpt")
    assert saved["model"].keys() == plain.state_dict().keys()
    (optimizer,) = run.optimizers
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in student.parameters()}
    teacher.rename(tmp_path / "elsewhere")  # whoever predicts or exports needs no teacher
    assert Detector.load(tmp_path / "student.ckpt").settings.teacher == teacher


def test_the_teacher_stays_as_it_is_while_its_student_learns(shapes: Path, teacher: Path, tmp_path: Path) -> None:
    student = detector(shapes, teacher=teacher)
    known = student.teacher()
    assert known is student.teacher()
    before = {name: value.clone() for name, value in known.network.state_dict().items()}

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Detector, *arguments: Any) -> None:
            used = module.teacher().network
            assert module.training
            assert not any(part.training for part in used.modules())
            assert not any(parameter.requires_grad for parameter in used.parameters())
            assert all(torch.equal(value, before[name]) for name, value in used.state_dict().items())

    made = trainer(2, tmp_path, callbacks=[Look()])
    made.fit(student, datamodule=DetectionData(student.settings))
    assert made.global_step == 2
    for copied in (
        pickle.loads(pickle.dumps(student)),
        copy.deepcopy(student),
    ):  # what spawned workers and averages get
        assert copied._teacher is None
        assert copied.teacher().digest == known.digest


def test_a_resumed_run_with_a_teacher_has_the_bits_of_one_that_was_never_stopped(
    shapes: Path, teacher: Path, tmp_path: Path
) -> None:
    whole = detector(shapes, teacher=teacher)
    fit(whole, tmp_path, steps=4)
    first = detector(shapes, teacher=teacher)
    # the schedule is that of four steps in both
    made = trainer(4, tmp_path, callbacks=[stop_after(2)])
    torch.manual_seed(2)
    made.fit(first, datamodule=DetectionData(first.settings))
    assert made.global_step == 2
    made.save_checkpoint(tmp_path / "half.ckpt")
    second = detector(shapes, seed=5, teacher=teacher)
    fit(second, tmp_path, steps=4, resume=tmp_path / "half.ckpt")
    for (name, one), other in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def stop_after(steps: int) -> Any:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            trainer.should_stop = trainer.global_step >= steps

    return Stop()


@pytest.mark.parametrize("model", ["yolov5n", pytest.param("arc-n", marks=pytest.mark.slow)])
def test_student_learns_the_output_of_the_teacher(shapes: Path, tmp_path: Path, model: str) -> None:
    made = trainer(1, tmp_path)
    made.fit(detector(shapes, seed=7, model=model), datamodule=DetectionData(task(shapes, model=model)))
    made.save_checkpoint(tmp_path / "other.ckpt")
    student = detector(shapes, model=model, teacher=tmp_path / "other.ckpt")
    known, images = student.teacher(), torch.rand(2, 3, 64, 64)
    optimizer = torch.optim.Adam(student.model.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        loss, part = student.distillation_loss(student.model.raw(images), known(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(part.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0] / 2


def test_a_classifier_learns_from_a_run(tmp_path: Path) -> None:
    folders = draw_folders(tmp_path / "folders")

    def made(seed: int, **settings: Any) -> tuple[Classifier, ClassificationData]:
        own = ClassificationTask(
            data=folders, image_size=64, batch_size=3, workers=0, memory_format="contiguous", **settings
        )
        torch.manual_seed(seed)
        return Classifier(own, list(NAMES)), ClassificationData(own)

    run = trainer(1, tmp_path)
    classifier, data = made(7)
    run.fit(classifier, datamodule=data)
    run.save_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    student, data = made(1, teacher=tmp_path / "run", teacher_temperature=2.0)
    second = trainer(2, tmp_path)
    second.fit(student, datamodule=data)
    assert second.logged_metrics["train/teacher"] > 0


# -- what does not fit ---------------------------------------------------------------------------------------------------------


Change = Callable[[Path, Path], Detector]

MISFITS: dict[str, Change] = {
    r"has the classes \['disc', 'square'\], this network has \['square', 'disc'\]": lambda data, teacher: detector(
        data, names=NAMES[::-1], teacher=teacher
    ),
    "has image_size 64, this network has 96": lambda data, teacher: detector(data, image_size=96, teacher=teacher),
    "has the head DetectHead, this network has OneToOneHead": lambda data, teacher: detector(
        data, model="arc-n", teacher=teacher
    ),
    r"has the strides \(8, 16\), this network has \(8, 16, 32, 64\)": lambda data, teacher: detector(
        data, model="yolov5n6", teacher=teacher
    ),
    "there is nothing of that name": lambda data, teacher: detector(data, teacher=teacher.parent / "none"),
}


@pytest.mark.parametrize("says", MISFITS)
def test_a_teacher_that_does_not_fit_is_named(shapes: Path, teacher: Path, says: str) -> None:
    with pytest.raises(TeacherError, match=f"^teacher = .*{says}"):
        MISFITS[says](shapes, teacher).teacher()


def test_a_teacher_of_other_anchors_and_one_of_nan_are_named(shapes: Path, teacher: Path, tmp_path: Path) -> None:
    student = detector(shapes, teacher=teacher)
    student.model.anchors.mul_(1.5)
    with pytest.raises(TeacherError, match="has the anchors"):
        fit(student, tmp_path)
    content = load_checkpoint(teacher)
    content["model"]["model.model.5.m.1.bias"][3] = math.nan
    save_checkpoint(tmp_path / "nan.ckpt", content)
    with pytest.raises(TeacherError, match=r"model.5.m.1.bias is NaN or infinite"):
        detector(shapes, teacher=tmp_path / "nan.ckpt").teacher()


def test_a_run_goes_on_with_its_own_teacher_alone(shapes: Path, teacher: Path, tmp_path: Path) -> None:
    run = fit(detector(shapes, teacher=teacher), tmp_path, steps=1)
    run.save_checkpoint(tmp_path / "half.ckpt")
    other = trainer(2, tmp_path)
    other.fit(detector(shapes, seed=8), datamodule=DetectionData(task(shapes)))
    other.save_checkpoint(tmp_path / "other.ckpt")
    student = detector(shapes, teacher=tmp_path / "other.ckpt")
    with pytest.raises(TeacherError, match="other weights than the teacher of the run that is resumed"):
        fit(student, tmp_path, resume=tmp_path / "half.ckpt")
    fit(student, tmp_path)  # from the start it may have any teacher


@pytest.mark.parametrize("kind", [SegmentationTask, PoseTask])
def test_tasks_that_learn_from_no_teacher_refuse_one(kind: type[DetectionTask]) -> None:
    with pytest.raises(ValueError, match=f"teacher = runs/x/1: a {kind.__name__} does not learn from one"):
        kind(data=Path("data.yaml"), teacher=Path("runs/x/1"))
