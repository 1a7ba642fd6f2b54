"""The detector without anchors and suppression: its assignment against plain loops, its loss in float64, and what it learns."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from arclight import seed_everything
from arclight.deploy import Program
from arclight.deploy.parity import compare
from arclight.deploy.settings import Int8
from arclight.optim.settings import AdamW
from arclight.trainer import Trainer
from arclight.vision import build_model, fuse
from arclight.vision.boxes import box_iou, nms, xywh_to_xyxy
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.images import decode_image
from arclight.vision.models import one_to_one
from arclight.vision.models.architectures import parse_architecture
from arclight.vision.models.one_to_one import (
    TOP_K,
    Candidates,
    join_levels,
    match_one,
    one_to_one_loss,
    rank_candidates,
    reachable,
    settle,
    widened_overlap,
)
from arclight.vision.models.yolov5 import Yolo
from arclight.vision.qris.scenes.generate import generate
from arclight.vision.tasks.deployment import evaluate_program, export_module
from arclight.vision.tasks.detection import DetectionData, Detector
from arclight.vision.tasks.settings import DetectionTask


def arc(num_classes: int = 3, seed: int = 0) -> Yolo:
    torch.manual_seed(seed)
    return build_model("arc-n", num_classes)


def quick_statistics(model: Yolo) -> Yolo:
    """Let averages of batch norms follow within tens of steps; 0.03 is for thousands."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return model


def random_targets(m: int = 20, n: int = 3, num_classes: int = 3, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(n, (m, 1), generator=generator)
    label = torch.randint(num_classes, (m, 1), generator=generator)
    wh = torch.rand(m, 2, generator=generator) ** 2 * 0.8 + 0.01
    return torch.cat((image, label, torch.rand(m, 2, generator=generator), wh), dim=1)


def random_levels(n: int = 3, num_classes: int = 3, height: int = 96, width: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, height // s, width // s, 4 + 2 * num_classes, generator=generator).requires_grad_()
        for s in (8, 16, 32)
    ]


# ---------------------------------------------------------------- network


@pytest.mark.parametrize(
    ("height", "width"), [(32, 32), (64, 96), (160, 128), pytest.param(320, 320, marks=pytest.mark.slow)]
)
def test_outputs_at_many_sizes(height: int, width: int) -> None:
    model = arc()
    images = torch.rand(2, 3, height, width)
    raw = model.train()(images)
    assert [tuple(level.shape) for level in raw] == [(2, height // s, width // s, 4 + 2 * 3) for s in (8, 16, 32)]
    decoded = model.eval()(images)
    assert decoded.shape == (2, height * width * 21 // 1024, 5 + 3)
    assert (decoded[..., 4] == 1).all()
    assert ((decoded[..., 5:] >= 0) & (decoded[..., 5:] <= 1)).all()


@pytest.mark.parametrize("name", ["arc-n", *(pytest.param(f"arc-{size}", marks=pytest.mark.slow) for size in "smlx")])
def test_sizes_of_the_family(name: str) -> None:
    """As trained and as deployed, 80 classes; those of YOLOv5 of the same letter are within a tenth."""
    with torch.device("meta"):
        model, peer = build_model(name), build_model(f"yolov5{name[-1]}")
        sizes = [sum(p.numel() for p in m.parameters()) for m in (model, fuse(model), peer)]
    assert sizes[1] < sizes[0]
    assert sizes[1] == pytest.approx(sizes[2], rel=0.1)


def test_boxes_are_decoded_by_the_stated_formula() -> None:
    model = arc(num_classes=2)
    raw = [torch.randn(1, 64 // s, 96 // s, 8, generator=torch.Generator().manual_seed(s)) for s in (8, 16, 32)]
    rows = []
    for level, stride in zip(raw, (8, 16, 32)):
        for gy, gx in itertools.product(range(64 // stride), range(96 // stride)):
            x, y, w, h, *scores = level[0, gy, gx].double().tolist()
            centre = [(gx + 0.5 + x) * stride, (gy + 0.5 + y) * stride]
            size = [math.exp(w) * stride, math.exp(h) * stride]
            rows.append([*centre, *size, 1.0, *(1 / (1 + math.exp(-score)) for score in scores[:2])])
    np.testing.assert_allclose(model.head.decode(raw)[0].numpy(), rows, rtol=1e-5, atol=1e-5)


def test_fusing_drops_the_training_branch_and_keeps_the_boxes() -> None:
    model = arc()
    for _ in range(2):
        model.train()(torch.rand(2, 3, 64, 64))  # statistics of batch norms that are not 0 and 1
    fused = fuse(model)
    assert any("many" in name for name in model.state_dict())
    assert not any("many" in name or "bn" in name for name in fused.state_dict())
    images = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model.eval()(images), rtol=1e-4, atol=1e-4)
        assert fused.raw(images)[0].shape[-1] == 4 + 3
        torch.testing.assert_close(fuse(fused)(images), fused(images))
        with pytest.raises(ValueError, match="no training branch any more"):
            one_to_one_loss(fused.raw(images), random_targets(n=2), fused.head)  # type: ignore[arg-type]


def test_a_table_of_ones_own_may_end_with_this_head() -> None:
    table = (
        "depth_multiple: 1\nwidth_multiple: 1\nbackbone:\n- [-1, 1, Conv, [16, 3, 2]]\n- [-1, 1, Conv, [16, 3, 2]]\n"
        "head:\n- [-1, 1, Conv, [16, 3, 2]]\n- [[1, 2], 1, DetectOneToOne, [nc]]\n"
    )
    assert parse_architecture(table, "a.yaml").strides == (4, 8)
    model = build_model("a.yaml", 2, table=table).eval()
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 64 + 16, 7)
    with pytest.raises(ValueError, match="has no anchors"):
        build_model("arc-n", 2, anchors_px=torch.ones(9, 2))


# ---------------------------------------------------------------- assignment


def candidates_of(alignment: torch.Tensor) -> Candidates:
    """All cells of one image as candidates, best first."""
    best, cell = alignment.topk(alignment.shape[1], dim=1)
    return Candidates(best, cell, best)


def greedy(alignment: np.ndarray) -> set[tuple[int, int]]:
    """The best pair of object and cell, again and again."""
    pairs, left = set(), alignment.copy()
    while left.size and left.max() > 0:
        row, cell = np.unravel_index(left.argmax(), left.shape)
        pairs.add((int(row), int(cell)))
        left[row], left[:, cell] = 0, 0
    return pairs


@pytest.mark.parametrize("seed", range(8))
def test_one_to_one_matching_is_greedy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    objects, cells = 12, 15
    alignment = torch.rand(objects, cells, generator=generator)
    alignment = torch.where(torch.rand(objects, cells, generator=generator) < 0.3, alignment, 0.0)
    found = candidates_of(alignment)
    matched = match_one(found, cells, rounds=objects)
    pairs = {(int(row), int(found.cell[row, place])) for row, place in matched.nonzero()}
    assert pairs == greedy(alignment.double().numpy())
    few = match_one(found, cells)  # what fewer rounds match is a part of it
    assert {(int(row), int(found.cell[row, place])) for row, place in few.nonzero()} <= pairs


def test_equal_objects_get_different_cells() -> None:
    alignment = torch.tensor([[0.5, 0.4, 0.0]]).repeat(3, 1)
    found = candidates_of(alignment)
    matched = match_one(found, 3)
    assert [found.cell[row][matched[row]].tolist() for row in range(3)] == [[0], [1], []]  # the third has nothing left
    assert settle(found.alignment, found.cell, 3).sum(0).tolist() == [1, 1, 0]
    assert settle(found.alignment, found.cell, 3)[0].tolist() == [True, True, False]  # of equal ones the first


def test_every_cell_of_many_belongs_to_the_object_it_answers_best() -> None:
    generator = torch.Generator().manual_seed(0)
    found = candidates_of(torch.rand(6, 30, generator=generator))
    found = Candidates(*(value[:, :TOP_K] for value in found))
    wins = settle(found.alignment, found.cell, 30)
    for cell in range(30):
        wanting = [
            (float(a), row) for row in range(6) for a, c in zip(found.alignment[row], found.cell[row]) if c == cell
        ]
        owners = [row for row in range(6) if wins[row][found.cell[row] == cell].any()]
        assert owners == ([max(wanting)[1]] if wanting else [])


def test_reachable_cells_are_those_whose_middle_lies_inside() -> None:
    rows = join_levels([torch.zeros(1, 64 // s, 96 // s, 6) for s in (8, 16, 32)], (8, 16, 32))
    boxes = torch.cat((torch.rand(40, 2) * torch.tensor([96.0, 64.0]), torch.rand(40, 2) * 60 + 0.5), dim=1)
    reach = reachable(boxes, rows.centres, rows.strides)
    for box, row in zip(boxes.tolist(), reach):
        for (x, y), stride, counts in zip(rows.centres.tolist(), rows.strides[:, 0].tolist(), row.tolist()):
            half = [max(side / 2, 8.0) if stride == 8 else side / 2 for side in box[2:]]
            assert counts == (abs(x - box[0]) < half[0] and abs(y - box[1]) < half[1])


@pytest.mark.parametrize("size", [0.5, 1.0, 3.0, 6.0])
def test_tiny_objects_are_answered_for_wherever_they_lie(size: float) -> None:
    """Objects smaller than a cell, on corners and edges of cells and of the image, before anything is learnt."""
    side = 96
    places = torch.cartesian_prod(*[torch.tensor([0.0, 0.3, 4.0, 8.0, 31.9, 48.0, 95.7, 96.0])] * 2)
    head = arc(num_classes=1).head
    with torch.no_grad():
        rows = join_levels(
            head([torch.zeros(1, c, side // s, side // s) for c, s in ((64, 8), (128, 16), (256, 32))]), (8, 16, 32)
        )
    for place in places:
        box = torch.tensor([[*place.tolist(), size, size]])
        reach = reachable(box, rows.centres, rows.strides)
        overlap = widened_overlap(rows.boxes()[torch.zeros(1, dtype=torch.long)], box, 2.0)
        (found,) = rank_candidates([rows.values[..., 4].sigmoid()], overlap, reach, torch.zeros(1, dtype=torch.long))
        matched = match_one(found, reach.shape[1])
        assert matched.sum() == 1
        cell = int(found.cell[0][matched[0]])
        assert (rows.centres[cell] - place).abs().max() < 8
        assert rows.strides[cell] == 8
        assert float(found.overlap[0][matched[0]]) > 0


def test_widened_overlap_is_that_of_wider_boxes_and_ranks_those_that_do_not_meet() -> None:
    a, b = torch.rand(5, 7, 4) * 20 + 1, torch.rand(5, 4) * 20 + 1
    wide = torch.tensor([0.0, 0.0, 4.0, 4.0])
    for row in range(5):
        expected = box_iou(xywh_to_xyxy(b[row : row + 1] + wide), xywh_to_xyxy(a[row] + wide))[0]
        torch.testing.assert_close(widened_overlap(a, b, 2.0)[row], expected)
    near, far = widened_overlap(torch.tensor([[[4.0, 0, 2, 2], [5.0, 0, 2, 2]]]), torch.tensor([[0.0, 0, 2, 2]]), 2.0)[
        0
    ]
    assert near > far > 0
    large = torch.tensor([[[100.0, 100, 200, 200]]]), torch.tensor([[120.0, 100, 200, 200]])
    assert float(widened_overlap(*large, 2.0)) == pytest.approx(float(widened_overlap(*large, 0.0)), abs=0.005)


# ---------------------------------------------------------------- loss


def reference_loss(levels: list[torch.Tensor], targets: torch.Tensor, num_classes: int) -> tuple[float, float, float]:
    """One object and cell at a time, in float64."""
    answers = [
        (
            image,
            (gx + 0.5 + v[0]) * s,
            (gy + 0.5 + v[1]) * s,
            math.exp(v[2]) * s,
            math.exp(v[3]) * s,
            v[4:],
            (gx, gy, s),
        )
        for image in range(len(levels[0]))
        for level, s in zip(levels, (8, 16, 32))
        for gy, gx in itertools.product(range(level.shape[1]), range(level.shape[2]))
        for v in [level[image, gy, gx].detach().double().tolist()]
    ]
    height, width = levels[0].shape[1] * 8, levels[0].shape[2] * 8
    objects = [
        (int(i), int(c), x * width, y * height, w * width, h * height) for i, c, x, y, w, h in targets.double().tolist()
    ]

    def iou(a: tuple[float, ...], b: tuple[float, ...], margin: float = 0.0) -> float:
        (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
        aw, ah, bw, bh = (v + 2 * margin for v in (aw, ah, bw, bh))
        common = max(min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2), 0) * max(
            min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2), 0
        )
        return common / (aw * ah + bw * bh - common)

    def complete(a: tuple[float, ...], b: tuple[float, ...]) -> float:
        (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
        cw = max(ax + aw / 2, bx + bw / 2) - min(ax - aw / 2, bx - bw / 2)
        ch = max(ay + ah / 2, by + bh / 2) - min(ay - ah / 2, by - bh / 2)
        v = 4 / math.pi**2 * (math.atan(aw / ah) - math.atan(bw / bh)) ** 2
        overlap = iou(a, b)
        return overlap - ((ax - bx) ** 2 + (ay - by) ** 2) / (cw**2 + ch**2) - v * v / (1 - overlap + v)

    def branch(first: int) -> tuple[list[list[tuple[float, int, float]]], np.ndarray]:
        """Each object's ten best cells, and the alignment of all."""
        table = np.zeros((len(objects), len(answers)))
        overlaps = np.zeros_like(table)
        for o, (image, label, x, y, w, h) in enumerate(objects):
            for a, (at, ax, ay, aw, ah, logits, (gx, gy, s)) in enumerate(answers):
                half = (max(w / 2, 8), max(h / 2, 8)) if s == 8 else (w / 2, h / 2)
                if at == image and abs((gx + 0.5) * s - x) < half[0] and abs((gy + 0.5) * s - y) < half[1]:
                    overlaps[o, a] = iou((ax, ay, aw, ah), (x, y, w, h), margin=2)
                    score = 1 / (1 + math.exp(-logits[first + label]))
                    table[o, a] = score**0.5 * (overlaps[o, a] + 1e-3) ** 6
            table[o, np.argsort(-table[o], kind="stable")[10:]] = 0
        return overlaps, table  # type: ignore[return-value]

    overlaps, table = branch(num_classes)
    wanted = {}
    for o, row in enumerate(table):
        own = [a for a in range(len(answers)) if row[a] > 0 and row[a] == table[:, a].max()]
        if own:
            best = max(row[a] for a in own)
            for a in own:
                wanted[a] = (o, row[a] / best * max(overlaps[o, b] for b in own))
    overlaps_one, table_one = branch(0)
    wanted_one = {a: (o, overlaps_one[o, a]) for o, a in greedy(table_one)}

    def entropy(first: int, targets: dict[int, tuple[int, float]]) -> float:
        total = 0.0
        for a, answer in enumerate(answers):
            for c in range(num_classes):
                p = 1 / (1 + math.exp(-answer[5][first + c]))
                t = targets[a][1] if a in targets and objects[targets[a][0]][1] == c else 0.0
                total -= t * math.log(p) + (1 - t) * math.log(1 - p)
        return 0.5 * total / max(1, sum(t for _, t in targets.values()))

    box = sum((1 - complete(answers[a][1:5], objects[o][2:])) * t for a, (o, t) in wanted.items())
    return 7.5 * box / max(1, sum(t for _, t in wanted.values())), entropy(0, wanted_one), entropy(num_classes, wanted)


def test_the_loss_agrees_with_plain_loops() -> None:
    levels, targets = random_levels(n=2, num_classes=2), random_targets(m=9, n=2, num_classes=2)
    total, parts = one_to_one_loss(levels, targets, arc(num_classes=2).head)  # type: ignore[arg-type]
    expected = reference_loss(levels, targets, 2)
    assert [float(parts[name]) for name in ("box", "one", "many")] == pytest.approx(expected, rel=1e-4)
    assert float(total.detach()) == pytest.approx(sum(expected), rel=1e-4)
    assert not any(part.requires_grad for part in parts.values())


def test_the_order_of_objects_does_not_matter() -> None:
    levels, targets, head = random_levels(), random_targets(m=60), arc().head
    shuffled = targets[torch.randperm(60, generator=torch.Generator().manual_seed(2))]
    total, other = (one_to_one_loss(levels, t, head)[0] for t in (targets, shuffled))  # type: ignore[arg-type]
    torch.testing.assert_close(total, other)


def test_the_loss_is_the_same_for_any_number_of_objects_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of thousands of objects are compared with the cells in parts."""
    head, targets = arc().head, random_targets(m=60)
    seen: list[int] = []
    widened = one_to_one.widened_overlap

    def counted(predicted: torch.Tensor, boxes: torch.Tensor, margin: float) -> torch.Tensor:
        seen.append(len(boxes))
        return widened(predicted, boxes, margin)

    monkeypatch.setattr(one_to_one, "widened_overlap", counted)
    found = []
    for pairs in (one_to_one.PAIRS_AT_ONCE, 7 * sum(level[0, ..., 0].numel() for level in random_levels()), 1):
        monkeypatch.setattr(one_to_one, "PAIRS_AT_ONCE", pairs)
        levels = random_levels()
        total, _ = one_to_one_loss(levels, targets, head)  # type: ignore[arg-type]
        total.backward()
        found.append([total.detach(), *(level.grad for level in levels)])
    assert seen == [60, *[7] * 8, 4, *[1] * 60]
    torch.testing.assert_close(found[1:], [found[0], found[0]])  # powers of a few numbers round differently


def test_images_without_objects_teach_only_scores() -> None:
    levels = random_levels()
    total, parts = one_to_one_loss(levels, torch.zeros(0, 6), arc().head)  # type: ignore[arg-type]
    total.backward()
    assert parts["box"] == 0
    for level in levels:
        assert (level.grad[..., :4] == 0).all()
        assert (level.grad[..., 4:] > 0).all()
    one_empty = random_targets(n=1)
    total, _ = one_to_one_loss(random_levels(), one_empty, arc().head)  # type: ignore[arg-type]
    assert torch.isfinite(total)


def test_is_float32_under_autocast() -> None:
    levels, targets, head = [level.detach().bfloat16() for level in random_levels()], random_targets(), arc().head
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = one_to_one_loss(levels, targets, head)  # type: ignore[arg-type]
    exact, _ = one_to_one_loss([level.float() for level in levels], targets, head)  # type: ignore[arg-type]
    assert mixed.dtype == torch.float32
    assert mixed == exact


@pytest.mark.parametrize("wh", [(0.0, 0.0), (1e-9, 0.5), (1.0, 1.0), (1e-6, 1e-6)])
@pytest.mark.parametrize("xy", [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_extreme_boxes_and_answers_give_finite_gradients(xy: tuple[float, float], wh: tuple[float, float]) -> None:
    levels = [(level.detach() * 30).requires_grad_() for level in random_levels()]
    total, _ = one_to_one_loss(levels, torch.tensor([[0, 1, *xy, *wh]]), arc().head)  # type: ignore[arg-type]
    total.backward()
    assert torch.isfinite(total)
    assert all(torch.isfinite(level.grad).all() for level in levels)


def test_one_to_one_head_learns_boxes_without_nms() -> None:
    """Squares of two classes, two of them neighbours: as many boxes come out as there are squares."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 96, 96, generator=generator) * 0.2
    squares = [
        (0, 0, 8, 8, 30),
        (0, 1, 50, 40, 36),
        (1, 0, 20, 30, 24),
        (1, 0, 45, 30, 24),
        (2, 1, 60, 60, 20),
    ]  # image 3: none
    for image, label, x, y, side in squares:
        images[image, label, y : y + side, x : x + side] = 1
    targets = torch.tensor(
        [[i, label, (x + side / 2) / 96, (y + side / 2) / 96, side / 96, side / 96] for i, label, x, y, side in squares]
    )
    torch.manual_seed(0)
    table = (
        "depth_multiple: 1\nwidth_multiple: 1\nbackbone:\n- [-1, 1, Conv, [16, 3, 2]]\n- [-1, 1, Conv, [24, 3, 2]]\n"
        "- [-1, 1, Conv, [48, 3, 2]]\n- [-1, 1, Conv, [64, 3, 2]]\n- [-1, 1, C3, [64]]\nhead:\n- [-1, 1, Conv, [64, 3, 1]]\n"
        "- [[2, 5], 1, DetectOneToOne, [nc]]\n"
    )  # what is shown is the loss: this learns in a fifth of the time of arc-n, and test_distillation teaches that
    model = quick_statistics(build_model("small.yaml", 2, table=table).train())
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    losses = []
    for _ in range(75):
        loss, _ = one_to_one_loss(model.raw(images), targets, model.head)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.25 * losses[0]
    with torch.no_grad():
        found = nms(model.eval()(images), conf_threshold=0.3, iou_threshold=None)
    assert [len(boxes) for boxes in found] == [2, 2, 1, 0]
    for image, label, x, y, side in squares:
        truth = torch.tensor([[x, y, x + side, y + side]], dtype=torch.float32)
        overlap = box_iou(truth, found[image][:, :4])[0]
        assert overlap.max() > 0.6
        assert found[image][overlap.argmax(), 5] == label


# ---------------------------------------------------------------- as users run it


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("scenes") / "set", 20, 0, size=128, val_share=0.2, workers=1)


@pytest.fixture(scope="module")
def trained(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few epochs under bf16-mixed, validated on the images that were learnt."""
    seed_everything(0)
    folder = tmp_path_factory.mktemp("trained")
    scenes.write_text(scenes.read_text().replace("images/val", "images/train"))
    task = DetectionTask(
        data=scenes, model="arc-n", image_size=128, batch_size=4, workers=0, cache=True, optimizer=AdamW(lr=3e-3),
        memory_format="channels_last", augment=Augment(mosaic=0.0, translate=0.0, scale=0.0), cache_labels=False,
    )  # fmt: skip
    module, data = task.build()
    quick_statistics(module.model)  # type: ignore[arg-type]
    trainer = Trainer(
        max_epochs=30, precision="bf16-mixed", default_root_dir=folder, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, check_val_every_n_epoch=30,
        gradient_clip_val=10.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert module.results.map50 > 0.5  # type: ignore[union-attr]
    trainer.save_checkpoint(folder / "end.ckpt")
    return folder / "end.ckpt"


@pytest.mark.slow
def test_a_checkpoint_finds_each_code_once(trained: Path, scenes: Path) -> None:
    detector = Detector.load(trained)
    assert detector.processing.iou_threshold is None
    data = DetectionData(detector.settings)
    photos = [decode_image(path) for path in data.spec.images("train")]
    found = detector.detect(photos)
    assert sum(len(one.boxes.conf) for one in found) > len(photos) / 2
    suppressed = detector.detect(photos, dataclasses.replace(detector.processing, iou_threshold=0.6))
    counts = [sum(len(one.boxes.conf) for one in boxes) for boxes in (suppressed, found)]
    assert counts[0] > 0.75 * counts[1]  # after a few epochs few boxes are doubles already
    fresh = Detector(detector.settings, names=detector.names)
    fresh.load_state_dict(detector.state_dict())
    assert torch.equal(fresh.eval()(torch.ones(1, 3, 64, 64)), detector.eval()(torch.ones(1, 3, 64, 64)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_programs_agree_with_the_model(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    detector = Detector.load(trained)
    data = DetectionData(detector.settings)
    plain = export_module(detector, tmp_path / "fp32.onnx", data.calibration_dataset())
    eight = export_module(detector, tmp_path / "int8.onnx", data.calibration_dataset(), Int8(calibration_batches=2))
    images = torch.rand(3, 3, 128, 128)
    with torch.no_grad():
        np.testing.assert_allclose(plain(images), detector.eval()(images), rtol=1e-3, atol=2e-3)
    assert eight.precision == "int8"
    assert Program.load(tmp_path / "int8.onnx").processing.iou_threshold is None  # type: ignore[attr-defined]
    scores = [evaluate_program(program, data.calibration_dataset()).map50 for program in (plain, eight)]
    assert scores[0] > 0.5
    assert scores[1] == pytest.approx(scores[0], abs=0.1)


@pytest.mark.parametrize(("model", "shown"), [("arc-n", 3), ("yolov5n", 4)])
def test_programs_are_judged_by_scores_without_the_ones_beside_them(model: str, shown: int) -> None:
    """Wrong scores of rare objects are seen: objectness that is always 1 would drown them."""
    detector = Detector(DetectionTask(data=Path("x"), model=model), names=["a", "b", "c"])
    rows = torch.cat((torch.full((1, 50, 4), 30.0), torch.ones(1, 50, 1), torch.full((1, 50, 3), 1e-3)), dim=-1)
    wrong = rows.clone()
    wrong[..., 5:] = 0
    found = compare([rows], [wrong], detector.output_parts)
    assert detector.output_parts(rows)["scores"].shape[-1] == shown
    beyond = torch.cat((rows[..., :2], rows[..., 2:4] * 400, rows[..., 4:]), dim=-1)  # 12,000 pixels, where nothing is
    size = detector.output_parts(beyond)["boxes"][..., 2:]
    assert size.max() == (detector.settings.image_size if model == "arc-n" else 12_000)
    assert (found["scores"].sqnr_db < 10) == (model == "arc-n")
    assert found["boxes"].sqnr_db == math.inf


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchors": "fitted"}, "anchors = 'fitted': arc-n has no anchors"),
        ({"obj_gain": 2.0}, "leave obj_gain at 1.0"),
        ({"focal_gamma": 2.0}, "leave focal_gamma at 0.0"),
        ({"autobalance": True}, "leave autobalance at False"),
        ({"image_size": 48}, "multiple of 32"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Detector(DetectionTask(data=Path("x"), model="arc-n", **settings), names=["a"])  # type: ignore[arg-type]


def test_gains_weigh_the_parts() -> None:
    levels, targets = random_levels(), random_targets()
    losses = [
        Detector(DetectionTask(data=Path("x"), model="arc-n", box_gain=box, cls_gain=cls), names=["a", "b", "c"]).loss(
            levels, {"targets": targets}
        )[1]
        for box, cls in ((0.05, 0.5), (0.1, 0.5), (0.05, 0.0))
    ]
    assert float(losses[1]["box"]) == pytest.approx(2 * float(losses[0]["box"]), rel=1e-5)
    assert losses[1]["one"] == losses[0]["one"]
    assert losses[2]["one"] == losses[2]["many"] == 0
