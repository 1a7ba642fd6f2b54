"""Corners of codes: the head places them from the box's own, the loss is the distance in sides, and boxes stay around them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import cv2
import numpy as np
import pytest
import segno
import torch
from safetensors.torch import save_file
from tests.vision.drawn import cornered_row, draw_objects, keypoint_row
from tests.vision.keypoint_program import check_keypoint_program

from arclight import seed_everything
from arclight.cli.commands.scan import scan
from arclight.deploy import ProgramError
from arclight.optim.schedule_settings import Cosine
from arclight.optim.settings import AdamW
from arclight.trainer import Trainer
from arclight.vision.data.augment import warp_boxes
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate
from arclight.vision.data.images import decode_image
from arclight.vision.data.labels import DatasetError
from arclight.vision.keypoints import keypoint_similarity
from arclight.vision.models.heads import CornersHead
from arclight.vision.models.loss import KeypointOptions, assign, assign_levels, keypoint_loss
from arclight.vision.models.yolov5 import build_model
from arclight.vision.tasks.detection import CornerDetector, Detector, PoseEstimator
from arclight.vision.tasks.processing import load_detector_program
from arclight.vision.tasks.settings import CornersTask, DetectionTask, PoseTask

NAN = float("nan")
OWN = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))
"""A box's corners, clockwise from its top left, from its centre in its sides."""
TARGETS = torch.tensor(
    [
        [0, 0, 0.4, 0.5, 0.5, 0.4, 0.2, 0.3, 0.6, 0.4, 0.65, 0.7, 0.15, 0.6],
        [0, 1, 0.7, 0.6, 0.3, 0.5, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN],
        [1, 1, 0.5, 0.5, 0.6, 0.6, 0.2, 0.9, NAN, NAN, 0.9, 0.1, 0.3, 0.2],
    ],
    dtype=torch.float64,
)
"""Four corners each: all labelled, none, all but one."""
STILL = {"mosaic": 0.0, "translate": 0.0, "scale": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
TINY = """
anchors: [[20,20, 26,26]]
backbone: [[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]]]
head: [[[1], 1, Corners, [nc, anchors]]]
"""

SMALL = """
anchors: [[20,20, 26,26], [30,30, 40,40]]
backbone: [[-1, 1, Conv, [16, 3, 2]], [-1, 1, Conv, [24, 3, 2]], [-1, 1, C3, [24]], [-1, 1, Conv, [32, 3, 2]], [-1, 1, C3, [32]]]
head: [[-1, 1, Conv, [48, 3, 2]], [[4, 5], 1, Corners, [nc, anchors]]]
"""


def network(dims: int, *, moved: bool = True) -> torch.nn.Module:
    """A network of two classes; with ``moved`` its corners are somewhere else than those of the box."""
    torch.manual_seed(0)
    model = build_model("yolov5n-corners", 2, keypoints=(4, dims)).double()
    if moved:
        for conv in model.head.m:
            torch.nn.init.normal_(conv.weight, std=0.05)
            torch.nn.init.normal_(conv.bias, std=0.3)
    return model


@pytest.mark.parametrize("dims", [2, 3])
def test_corners_start_as_those_of_the_box(dims: int) -> None:
    model = network(dims, moved=False).eval()
    rows = model(torch.rand(1, 3, 64, 96, dtype=torch.float64))[0].detach()
    points = rows[:, 7:].reshape(-1, 4, dims)
    for corner, (x, y) in enumerate(OWN):
        torch.testing.assert_close(points[:, corner, 0], rows[:, 0] + x * rows[:, 2])
        torch.testing.assert_close(points[:, corner, 1], rows[:, 1] + y * rows[:, 3])
    assert dims == 2 or (points[..., 2] == 0.5).all()


@pytest.mark.parametrize("dims", [2, 3])
def test_corners_are_measured_from_the_box_in_its_sides(dims: int) -> None:
    model = network(dims).eval()
    images = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    rows, row = model(images).detach(), 0
    with torch.no_grad():
        levels = model.train(False).raw(images)
    for level in levels:
        for logits in level.flatten(1, 3).unbind(1):
            answers = logits[:, 7:].reshape(2, 4, dims)
            for image in range(2):
                x, y, width, height = rows[image, row, :4].tolist()
                for corner, (across, down) in enumerate(OWN):
                    found = rows[image, row, 7 + corner * dims :][:dims].tolist()
                    dx, dy, *sure = answers[image, corner].tolist()
                    assert found[0] == pytest.approx(x + (across + dx) * width, abs=1e-9)
                    assert found[1] == pytest.approx(y + (down + dy) * height, abs=1e-9)
                    assert found[2:] == pytest.approx([1 / (1 + math.exp(-value)) for value in sure])
            row += 1
    assert row == rows.shape[1]
    spread = rows[:, :, 7:].reshape(2, row, 4, dims)[..., :2] - rows[:, :, None, :2]
    assert (spread.abs() / rows[:, :, None, 2:4] - 0.5).abs().max() > 0.02, "not where they start"


def sigmoid(value: torch.Tensor) -> float:
    return 1 / (1 + math.exp(-float(value)))


def l1_by_hand(levels: list[torch.Tensor], anchors: torch.Tensor, dims: int, *, from_box: bool, cyclic: bool) -> float:
    """Match by match, shift by shift, corner by corner: the distance along both axes in sides of the true box."""
    total = 0.0
    for level, own in zip(levels, anchors, strict=True):
        side = level.shape[2]
        match, places = assign(TARGETS, own, (side, side)), []
        for k in torch.nonzero(match.mask).flatten().tolist():
            target = [value * side for value in TARGETS[k // 9, 2:].tolist()]
            answer = level[match.image[k], match.anchor[k], match.row[k], match.column[k]]
            points = answer[7:].view(4, dims)
            column, row = int(match.column[k]), int(match.row[k])
            anchor = own[match.anchor[k]].tolist()
            centre = (column + 2 * sigmoid(answer[0]) - 0.5, row + 2 * sigmoid(answer[1]) - 0.5)
            size = ((2 * sigmoid(answer[2])) ** 2 * anchor[0], (2 * sigmoid(answer[3])) ** 2 * anchor[1])
            tried = []
            for shift in range(4 if cyclic else 1):
                errors = []
                for corner, offset in enumerate(OWN):
                    true = target[4 + 2 * ((corner + shift) % 4) :][:2]
                    if math.isnan(true[0]):
                        continue
                    if from_box:
                        found = [centre[a] + (offset[a] + float(points[corner, a])) * size[a] for a in (0, 1)]
                    else:
                        found = [(column, row)[a] + 0.5 + float(points[corner, a]) * anchor[a] for a in (0, 1)]
                    errors.append(sum(abs(found[a] - true[a]) / target[2 + a] for a in (0, 1)))
                if errors:
                    tried.append(sum(errors) / len(errors))
            if tried:
                places.append(min(tried))
        total += sum(places) / max(len(places), 1)
    return total


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("from_box", [True, False])
@pytest.mark.parametrize("cyclic", [True, False])
def test_the_loss_is_the_distance_in_sides_of_the_box(dims: int, from_box: bool, cyclic: bool) -> None:
    model = network(dims).train()
    levels = [level.detach().requires_grad_() for level in model.raw(torch.rand(2, 3, 64, 64, dtype=torch.float64))]
    matches = assign_levels(levels, TARGETS, model.anchors)
    options = KeypointOptions(cyclic, "l1", from_box)
    place, _ = keypoint_loss(levels, TARGETS, matches, 2, (4, dims), (0.05,) * 4, options)
    expected = l1_by_hand([level.detach() for level in levels], model.anchors, dims, from_box=from_box, cyclic=cyclic)
    assert place.item() == pytest.approx(expected)
    assert expected > 0.1
    place.backward()
    for level in levels:
        assert level.grad is not None
        assert level.grad.isfinite().all()
        assert not level.grad[..., :7].any(), "corners do not move the box"
    assert any(level.grad[..., 7:].any() for level in levels if level.grad is not None)


def test_the_box_of_a_turned_code_is_around_its_corners() -> None:
    diamond = np.array([[50, 30], [70, 50], [50, 70], [30, 50]], np.float32)
    cut = np.array([[10, 40], [30, 40], [30, 60], [np.nan, np.nan]], np.float32)
    rows = np.array([[0, 30, 30, 70, 70, *diamond.flatten()], [0, 10, 40, 30, 60, *cut.flatten()]], np.float32)
    cos = math.sqrt(0.5)
    turn = np.array([[cos, -cos, 50], [cos, cos, 50 - 100 * cos], [0, 0, 1]])  # by 45 degrees about (50, 50)
    found = warp_boxes(rows, turn, 100, keypoints="corners")
    reach = 20 * cos
    np.testing.assert_allclose(found[0, 1:5], [50 - reach, 50 - reach, 50 + reach, 50 + reach], atol=1e-4)
    loose = warp_boxes(rows, turn, 100, keypoints=True)
    np.testing.assert_allclose(
        loose[0, 1:5], [50 - 2 * reach, 50 - 2 * reach, 50 + 2 * reach, 50 + 2 * reach], atol=1e-4
    )
    np.testing.assert_array_equal(found[1], loose[1])  # one of its corners is not known
    np.testing.assert_array_equal(found[:, 5:], loose[:, 5:])
    assert np.isnan(found[1, -2:]).all()
    half = warp_boxes(rows[:1], np.array([[1, 0, -50], [0, 1, 0], [0, 0, 1.0]]), 100, keypoints="corners")
    np.testing.assert_allclose(half[0, 1:5], [0, 30, 20, 70])
    assert np.isnan(half[0, -2:]).all(), "the corner at the left is outside"


@pytest.mark.parametrize("geometry", ["corners", "keypoints"])
def test_boxes_stay_around_corners_for_corners_alone(tmp_path: Path, geometry: str) -> None:
    spec = read_data_yaml(draw_objects(tmp_path, cornered_row, head="kpt_shape: [4, 3]\n"))
    augment = Augment(mosaic=0.5, degrees=180, copy_paste=0.5)
    data = DetectionDataset.open(spec, "train", image_size=64, augment=augment, geometry=geometry, cache_labels=False)
    random.seed(0)
    rows = np.concatenate([collate(data.__getitems__(range(6)))["targets"].numpy() for _ in range(8)])
    corners = rows[:, 6:].reshape(-1, 4, 2)
    whole = np.isfinite(corners).all((1, 2))
    assert whole.sum() > 20
    hulls = np.concatenate((corners[whole].min(1), corners[whole].max(1)), 1)
    boxes = np.concatenate((rows[:, 2:4] - rows[:, 4:6] / 2, rows[:, 2:4] + rows[:, 4:6] / 2), 1)[whole]
    looser = (boxes[:, 2:] - boxes[:, :2]).prod(1) / (hulls[:, 2:] - hulls[:, :2]).prod(1)
    if geometry == "corners":
        np.testing.assert_allclose(boxes, hulls, atol=1e-4)
    else:
        assert np.median(looser) > 1.2


def test_corners_are_strict_and_of_any_numbering_by_default() -> None:
    task = CornersTask(data=Path("none"), image_size=64)
    module = CornerDetector(task, ["code"])
    assert module.sigmas == (0.05,) * 4
    assert module.processing.cyclic
    assert isinstance(module.model.head, CornersHead)
    box = np.array([[0, 0, 100, 100]], float)
    true = np.array([[[0, 0], [100, 0], [100, 100], [0, 100]]], float)
    near, far = (keypoint_similarity(true + (by, 0), true, box, [5300], module.sigmas)[0, 0] for by in (8, 9))
    assert near > 0.5 > far, "half the similarity is lost between 8 and 9 hundredths of a side"


def test_a_trunk_is_taken_from_a_detector_and_the_corners_start_as_those_of_the_box(tmp_path: Path) -> None:
    data = draw_objects(tmp_path, cornered_row, head="kpt_shape: [4, 3]\n")
    detector = Detector(DetectionTask(data=data, image_size=64), ["disc", "square"])
    save_file(
        {name: value.contiguous() for name, value in detector.model.state_dict().items()}, tmp_path / "w.safetensors"
    )
    task = CornersTask(data=data, image_size=64, weights=tmp_path / "w.safetensors", cache_labels=False)
    module, _ = task.build()
    module.configure_model()
    own, taken = module.model.state_dict(), detector.model.state_dict()
    trunk = [name for name in taken if not name.startswith("model.24.") and "head" not in name]
    assert len(trunk) > 300
    assert all(torch.equal(own[name], taken[name]) for name in trunk)
    for conv in module.model.head.m:
        assert not conv.weight.view(3, -1, conv.in_channels)[:, 7:].any()


def test_data_without_four_corners_are_refused(tmp_path: Path) -> None:
    data = draw_objects(tmp_path, keypoint_row, head="kpt_shape: [3, 3]\n")
    with pytest.raises(
        DatasetError, match=r"has 3 keypoints of 3 numbers, and this task learns four corners: write kpt_shape"
    ):
        CornersTask(data=data, cache_labels=False).build()
    with pytest.raises(ValueError, match="gives each box 4 keypoints, not 3"):
        build_model("yolov5n-corners", 1, keypoints=(3, 2))
    with pytest.raises(ValueError, match="ends with a corners head"):
        PoseEstimator(PoseTask(data=data, model="yolov5n-corners"), ["x"], keypoints=(4, 3))


@pytest.mark.slow
def test_corners_of_shapes_that_were_not_seen_are_learned(tmp_path: Path) -> None:
    """Turned rectangles of any angle: the mean error, in sides of the box, against that of the box that is found, and of parts of it."""
    (tmp_path / "small.yaml").write_text(SMALL)
    data = draw_objects(tmp_path, cornered_row, train=400, val=60, same=False, head="kpt_shape: [4, 3]\n")
    settings = CornersTask(
        data=data, model=str(tmp_path / "small.yaml"), image_size=64, batch_size=16, workers=0, cache=True, cache_labels=False,
        memory_format="contiguous", obj_gain=10.0, cls_gain=20.0, keypoint_gain=1.0, augment=Augment(degrees=180, **STILL),
        optimizer=AdamW(lr=5e-3), schedule=Cosine(warmup=0.05, final=0.02),
    )  # fmt: skip
    seed_everything(0, workers=True)
    module, images = settings.build()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=400,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **quiet,
    ).fit(module, datamodule=images)
    images.setup("validate")
    answers, truths = [], []
    for path, labels, outlines in zip(images.val.images, images.val.labels, images.val.outlines, strict=True):
        found = module.predict([decode_image(path)])[0]
        if len(found):
            x1, y1, x2, y2 = found.boxes.xyxy[0] / 64
            box = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])
            side = math.sqrt(labels[0, 3] * labels[0, 4])
            shrunk = [box.mean(0) + share * (box - box.mean(0)) for share in np.linspace(0.4, 1, 13)]
            answers.append(np.array([found.keypoints[0, :, :2] / 64, *shrunk]) / side)
            truths.append(outlines[0] / side)
    shifts = np.array([np.roll(np.arange(4), by) for by in range(4)])
    each = np.array(
        [np.linalg.norm(found[:, shifts] - true, axis=-1) for found, true in zip(answers, truths, strict=True)]
    )
    own, *of_boxes = each.mean(-1).min(-1).mean(0)
    assert len(answers) > 50
    assert own < 0.75 * of_boxes[-1], "better than the corners of the box"
    assert own < min(of_boxes), "no place fixed within the box is as good"


@pytest.mark.slow
def test_a_program_finds_the_corners_of_its_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "tiny.yaml").write_text(TINY)
    data = draw_objects(tmp_path, cornered_row, head="kpt_shape: [4, 3]\n")
    settings = CornersTask(
        data=data, model=str(tmp_path / "tiny.yaml"), image_size=64, workers=0, cache_labels=False, conf_threshold=0.0
    )
    module, images = settings.build()
    torch.nn.init.normal_(module.model.head.m[0].weight, std=0.1)
    check_keypoint_program(module, images, tmp_path / "corners.onnx", 4)
    with pytest.raises(ProgramError, match=r"is not a detector \(its task is 'corners'\)"):
        load_detector_program(tmp_path / "corners.onnx")
    photo = tmp_path / "set" / "code.png"
    photo.parent.mkdir()
    cv2.imwrite(str(photo), np.kron(np.array(segno.make("A", micro=False).matrix) == 0, np.ones((4, 4))) * 255)
    assert scan([str(photo), "--program", str(tmp_path / "corners.onnx"), "--json", str(tmp_path / "codes.json")]) == 0
    (codes,) = json.loads((tmp_path / "codes.json").read_text()).values()
    assert codes, "boxes with corners are boxes to a reader"
