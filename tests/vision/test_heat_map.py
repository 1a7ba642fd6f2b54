"""Heat maps: each cell's heat is what the answers lose by it, measured without a gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from arclight.vision import Classifier, Detector
from arclight.vision.inference.heat_map import activation_map, deep_layer, heat_map, heated
from arclight.vision.models.yolov5 import Yolo, build_model
from arclight.vision.tasks.settings import ClassificationTask, DetectionTask


def network(name: str) -> Yolo:
    torch.manual_seed(0)
    model = build_model(name, num_classes=3).double()
    for (
        part
    ) in model.modules():  # of a fresh network batch norms change nothing, and its maps fade: with these they do not
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 1.0
    with torch.no_grad():
        model.train().raw(torch.rand(4, 3, 96, 96, dtype=torch.float64))
        for parameter in model.head.parameters():
            parameter.mul_(0.3)  # scores that are neither 0 nor 1
    return model.eval()


def evidence(model: Yolo, images: torch.Tensor, threshold: float, cell: tuple[int, int], change: float) -> float:
    """The logits of what is found where one cell of the deep layer is ``change`` stronger, or weaker."""

    def scaled(layer: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed[..., cell[0], cell[1]] *= 1 + change
        return changed

    handle = model.model[deep_layer(model)].register_forward_hook(scaled)
    with torch.no_grad():
        raw = model.raw(images)
    handle.remove()
    if model.head.__class__.__name__ == "ClassifyHead":
        return float(raw.max())
    rows = model.decode(raw)[0]
    scores = rows[:, 4] * rows[:, 5:8].amax(-1)
    return float(torch.logit(scores[scores >= threshold]).sum())


@pytest.mark.parametrize("name", ["arc-n", "yolov5n-cls", pytest.param("yolov5n", marks=pytest.mark.slow)])
def test_heat_is_what_a_stronger_cell_adds(name: str) -> None:
    model = network(name)
    images = torch.rand(1, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        decoded = model(images)[0]
    threshold = 0.0 if name.endswith("cls") else float((decoded[:, 4] * decoded[:, 5:8].amax(-1)).topk(8).values.mean())
    heat = activation_map(model, images, threshold)
    step = 1e-5
    wanted = np.zeros(tuple(heat.shape))
    for cell in np.ndindex(wanted.shape):
        wanted[cell] = evidence(model, images, threshold, cell, step) - evidence(model, images, threshold, cell, -step)
    wanted = wanted.clip(0)
    assert wanted.max() > 0
    np.testing.assert_allclose(heat.numpy(), wanted / wanted.max(), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "layer"), [("yolov5n", 10), ("yolov5n6", 12), ("yolov5n-cls", 8), ("yolov3-tiny", None), ("arc-n", 10)]
)
def test_the_deep_layer_is_one_that_all_maps_of_the_head_depend_on(name: str, layer: int | None) -> None:
    model = build_model(name, num_classes=2)
    found = deep_layer(model)
    assert layer in (None, found)
    reached = {found}
    for i, source in enumerate(model.sources):
        if reached & set(source):
            reached.add(i)
    assert set(model.sources[-1]) <= reached


def test_a_photo_keeps_its_shape_and_the_module_its_state() -> None:
    torch.manual_seed(0)
    module = Detector(DetectionTask(data=Path("none"), image_size=64), ["a", "b"])
    module.train()
    module.model.model[3].eval()  # frozen layers stay so
    before = {name: value.clone() for name, value in module.state_dict().items()}
    photo = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    heat = heat_map(module, photo, conf_threshold=0.0)
    assert heat.shape == (40, 90)
    assert heat.min() >= 0
    assert 0 < heat.max() <= 1
    assert heated(photo, heat).shape == photo.shape
    assert module.model.training
    assert not module.model.model[3].training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_heat_map_without_detections_is_zero() -> None:
    module = Detector(DetectionTask(data=Path("none"), image_size=64), ["a", "b"])
    assert heat_map(module, np.zeros((64, 64, 3), np.uint8), conf_threshold=1.0).max() == 0


def test_a_classifier_sees_the_middle_square_alone() -> None:
    torch.manual_seed(0)
    module = Classifier(ClassificationTask(data=Path("none"), image_size=64), ["a", "b"])
    photo = np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    heat = heat_map(module, photo)
    assert heat[:, :20].max() == heat[:, 70:].max() == 0
    assert heat[:, 20:70].max() > 0
