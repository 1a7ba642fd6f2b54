"""The detection loss against a plain loop in float64, and the cases that batches really have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from arclight.vision import build_model
from arclight.vision.boxes import nms, xyxy_to_xywh
from arclight.vision.models import loss as loss_module
from arclight.vision.models.loss import Gains, LossOptions, assign, scaled_gains, update_balance, yolo_loss

GAINS = Gains(box=0.05, obj=1.0, cls=0.5)
ANCHORS = build_model("yolov5n").anchors


def raw_levels(n=3, height=96, width=128, num_classes=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, 3, height // s, width // s, 5 + num_classes, generator=generator).to(dtype).requires_grad_()
        for s in (8, 16, 32)
    ]


def random_targets(m=20, n=3, num_classes=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(n, (m, 1), generator=generator)
    label = torch.randint(num_classes, (m, 1), generator=generator)
    xy = torch.rand(m, 2, generator=generator)
    wh = torch.rand(m, 2, generator=generator) ** 2 * 0.8 + 0.01
    return torch.cat((image, label, xy, wh), dim=1)


# -- an independent reference: one object, anchor and cell at a time, in float64 -----------------------------------


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def cross_entropy(logit, target):
    return -(target * math.log(sigmoid(logit)) + (1 - target) * math.log(1 - sigmoid(logit)))


def reference_ciou(a, b):
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    inter = max(min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2), 0) * max(
        min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2), 0
    )
    iou = inter / (aw * ah + bw * bh - inter)
    cw = max(ax + aw / 2, bx + bw / 2) - min(ax - aw / 2, bx - bw / 2)
    ch = max(ay + ah / 2, by + bh / 2) - min(ay - ah / 2, by - bh / 2)
    v = 4 / math.pi**2 * (math.atan(aw / ah) - math.atan(bw / bh)) ** 2
    alpha = v / (1 - iou + v)
    return iou - ((ax - bx) ** 2 + (ay - by) ** 2) / (cw**2 + ch**2) - alpha * v


def reference_loss(raw, targets, anchors):
    box = obj = cls = 0.0
    for level, level_anchors, balance in zip(raw, anchors.double().numpy(), (4.0, 1.0, 0.4)):
        p = level.detach().double().numpy()
        n, a, height, width, outputs = p.shape
        wanted = np.zeros((n, a, height, width))
        ious, class_terms = [], []
        for image, label, cx, cy, bw, bh in targets.double().tolist():
            x, y, w, h = cx * width, cy * height, bw * width, bh * height
            cells = [(math.floor(x), math.floor(y))]
            fx, fy = x - cells[0][0], y - cells[0][1]
            cells.append((cells[0][0] + (1 if fx > 0.5 else -1), cells[0][1]))
            cells.append((cells[0][0], cells[0][1] + (1 if fy > 0.5 else -1)))
            for k, (anchor_w, anchor_h) in enumerate(level_anchors):
                if max(w / anchor_w, anchor_w / w, h / anchor_h, anchor_h / h) >= 4:
                    continue
                for gx, gy in cells:
                    if not (0 <= gx < width and 0 <= gy < height):
                        continue
                    answer = p[int(image), k, gy, gx]
                    sx, sy, sw, sh = (sigmoid(v) for v in answer[:4])
                    predicted = (2 * sx - 0.5, 2 * sy - 0.5, (2 * sw) ** 2 * anchor_w, (2 * sh) ** 2 * anchor_h)
                    iou = reference_ciou(predicted, (x - gx, y - gy, w, h))
                    ious.append(iou)
                    wanted[int(image), k, gy, gx] = max(wanted[int(image), k, gy, gx], iou, 0)
                    class_terms += [cross_entropy(answer[5 + c], float(c == int(label))) for c in range(outputs - 5)]
        box += np.mean([1 - iou for iou in ious]) if ious else 0
        cls += np.mean(class_terms) if class_terms else 0
        obj += balance * np.mean([cross_entropy(lo, t) for lo, t in zip(p[..., 4].ravel(), wanted.ravel())])
    return GAINS.box * box, GAINS.obj * obj, GAINS.cls * cls


def test_agrees_with_the_plain_loop():
    raw, targets = raw_levels(), random_targets()
    total, parts = yolo_loss(raw, targets, ANCHORS, GAINS)
    expected = reference_loss(raw, targets, ANCHORS)
    assert [float(parts[k]) for k in ("box", "obj", "cls")] == pytest.approx(expected, rel=2e-5)
    assert float(total.detach()) == pytest.approx(3 * sum(expected), rel=2e-5)
    assert not any(part.requires_grad for part in parts.values())


def focal_reference(logit, target, gamma, pos_weight, quality):
    p = sigmoid(logit)
    entropy = -(pos_weight * target * math.log(p) + (1 - target) * math.log(1 - p))
    alpha = 0.25 * target + 0.75 * (1 - target)
    error = abs(target - p) if quality else 1 - (target * p + (1 - target) * (1 - p))
    return entropy * alpha * error**gamma


@pytest.mark.parametrize(("quality", "gamma"), [(False, 1.5), (True, 2.0)])
def test_focal_losses_agree_with_their_formulas(quality, gamma):
    options = LossOptions(focal_gamma=gamma, quality=quality, obj_pos_weight=0.7)
    raw = [level.detach() for level in raw_levels(dtype=torch.float64)]
    _, parts = yolo_loss(raw, torch.zeros(0, 6), ANCHORS, GAINS, options)
    expected = sum(
        weight * np.mean([focal_reference(x, 0.0, gamma, 0.7, quality) for x in level[..., 4].flatten().tolist()])
        for weight, level in zip((4.0, 1.0, 0.4), raw)
    )
    assert parts["obj"].item() == pytest.approx(expected, rel=1e-9)
    targets = random_targets()
    plain, focal = (yolo_loss(raw, targets, ANCHORS, GAINS, o)[1]["cls"] for o in (LossOptions(), options))
    assert 0 < focal < plain


def test_smoothed_labels_are_least_at_less_than_certain():
    raw, target = raw_levels(n=1), torch.tensor([[0, 1, 0.5, 0.5, 0.3, 0.3]])
    losses = {}
    for logit in (2.0, 3.0, 9.0):
        levels = [level.detach().clone() for level in raw]
        for level in levels:
            level[..., 5:] = -logit
            level[..., 6] = logit
        for share in (0.0, 0.1):
            losses[logit, share] = yolo_loss(levels, target, ANCHORS, GAINS, LossOptions(label_smoothing=share))[1][
                "cls"
            ]
    assert losses[9.0, 0.0] < losses[3.0, 0.0] < losses[2.0, 0.0]
    assert losses[3.0, 0.1] < losses[9.0, 0.1]  # sigmoid(2.94) = 0.95 is what is wanted
    assert losses[3.0, 0.1] < losses[2.0, 0.1]


def test_positive_weights_count_wanted_classes_more():
    raw, targets = [level.detach() for level in raw_levels()], random_targets()
    one, two, four = (
        yolo_loss(raw, targets, ANCHORS, GAINS, LossOptions(cls_pos_weight=weight))[1]["cls"]
        for weight in (1.0, 2.0, 4.0)
    )
    assert two - one == pytest.approx((four - two).item() / 2, rel=1e-4)
    assert two > one


def test_a_wider_match_answers_for_more_anchors():
    targets = random_targets(m=40)
    grid = (12, 16)
    counts = [int(assign(targets, ANCHORS[0], grid, t).mask.sum()) for t in (1.5, 4.0, 20.0)]
    assert counts[0] < counts[1] < counts[2]
    raw = [level.detach() for level in raw_levels()]
    narrow, wide = (yolo_loss(raw, targets, ANCHORS, GAINS, LossOptions(anchor_t=t))[0] for t in (1.5, 4.0))
    assert narrow != wide


def test_balance_moves_to_where_levels_count_alike(monkeypatch):
    raw, targets = [level.detach() for level in raw_levels()], random_targets()
    balance = torch.tensor([4.0, 1.0, 0.4])
    fixed, _ = yolo_loss(raw, targets, ANCHORS, GAINS)
    same, _ = yolo_loss(raw, targets, ANCHORS, GAINS, balance=balance)
    assert torch.equal(fixed, same)
    assert balance.tolist() == pytest.approx([4.0, 1.0, 0.4])
    yolo_loss(raw, targets, ANCHORS, GAINS, balance=balance, learns_balance=True)
    assert balance[1] == 1
    assert balance.tolist() != pytest.approx([4.0, 1.0, 0.4], abs=1e-7)
    losses = [torch.tensor(value) for value in (0.1, 0.4, 0.8)]
    monkeypatch.setattr(loss_module, "AUTOBALANCE_RATE", 0.01)
    for _ in range(1500):
        update_balance(balance, losses)
    assert balance.tolist() == pytest.approx([4.0, 1.0, 0.5], rel=1e-2)


def test_the_order_of_objects_does_not_matter():
    raw, targets = raw_levels(), random_targets(m=60)
    same_place = torch.cat((targets, targets + torch.tensor([0, 0, 0, 0, 0.01, 0.01])))  # two objects per position
    shuffled = same_place[torch.randperm(len(same_place), generator=torch.Generator().manual_seed(2))]
    total, other = (yolo_loss(raw, t, ANCHORS, GAINS)[0] for t in (same_place, shuffled))
    torch.testing.assert_close(total, other)


def test_a_batch_without_objects_teaches_only_objectness():
    raw = raw_levels()
    total, parts = yolo_loss(raw, torch.zeros(0, 6), ANCHORS, GAINS)
    total.backward()
    assert parts["box"] == 0
    assert parts["cls"] == 0
    assert total > 0
    for level in raw:
        assert (level.grad[..., 4] > 0).all()
        assert (level.grad[..., :4] == 0).all()
        assert (level.grad[..., 5:] == 0).all()


def test_a_single_class_has_no_class_loss():
    raw, targets = raw_levels(num_classes=1), random_targets(num_classes=1)
    total, parts = yolo_loss(raw, targets, ANCHORS, GAINS)
    total.backward()
    assert parts["cls"] == 0
    assert parts["box"] > 0
    assert all((level.grad[..., 5] == 0).all() for level in raw)


def test_is_float32_under_autocast():
    raw, targets = raw_levels(dtype=torch.bfloat16), random_targets()
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = yolo_loss(raw, targets, ANCHORS, GAINS)
    exact, _ = yolo_loss([level.float() for level in raw], targets, ANCHORS, GAINS)
    assert mixed.dtype == torch.float32
    assert mixed == exact


@pytest.mark.parametrize("wh", [(0.0, 0.0), (1e-9, 0.5), (1.0, 1.0), (1e-6, 1e-6)])
@pytest.mark.parametrize("xy", [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_extreme_boxes_give_finite_gradients(xy, wh):
    raw = raw_levels()
    total, _ = yolo_loss(raw, torch.tensor([[0, 1, *xy, *wh]]), ANCHORS, GAINS)
    total.backward()
    assert torch.isfinite(total)
    assert all(torch.isfinite(level.grad).all() for level in raw)


def chosen(targets, anchors, grid):
    match = assign(torch.tensor(targets), torch.tensor(anchors), grid)
    rows = zip(match.anchor, match.row, match.column, match.mask)
    return sorted((int(a), int(r), int(c)) for a, r, c, counts in rows if counts)


def test_an_object_is_given_to_its_cell_and_the_two_nearest():
    # centre at column 2.2, row 1.9 of a 4 x 6 grid: left and lower neighbours; size 2 x 2 cells
    target = [[0.0, 0, 2.2 / 6, 1.9 / 4, 2 / 6, 2 / 4]]
    assert chosen(target, [[2.0, 2.0]], (4, 6)) == [(0, 1, 1), (0, 1, 2), (0, 2, 2)]


def test_neighbours_outside_the_image_are_left_out():
    assert chosen([[0.0, 0, 0.2 / 4, 3.9 / 4, 0.5, 0.5]], [[2.0, 2.0]], (4, 4)) == [(0, 3, 0)]


def test_anchors_four_times_too_large_are_left_out():
    target = [[0.0, 0, 2.5 / 5, 2.5 / 5, 0.2, 0.2]]  # 1 x 1 cell, in the very middle of a cell
    anchors = [[3.9, 1.0], [4.1, 1.0], [1.0, 0.26], [1.0, 0.24]]
    assert chosen(target, anchors, (5, 5)) == [(0, 2, 2), (2, 2, 2)]


def test_gains_scale_with_classes_and_image_size():
    assert scaled_gains(GAINS, num_classes=8, image_size=320) == pytest.approx((0.05, 0.25, 0.05))
    assert scaled_gains(GAINS, num_classes=80, image_size=320, levels=4) == pytest.approx((0.0375, 0.1875, 0.375))


def test_descending_the_loss_finds_the_boxes():
    targets = torch.tensor([[0, 0, 0.3, 0.4, 0.3, 0.2], [0, 1, 0.7, 0.6, 0.15, 0.4], [1, 1, 0.5, 0.5, 0.8, 0.9]])
    model = build_model("yolov5n", 2)
    gains = scaled_gains(GAINS, num_classes=2, image_size=128)
    raw = [level.detach().requires_grad_() for level in raw_levels(n=2, height=128, width=128, num_classes=2)]
    optimizer = torch.optim.Adam(raw, lr=0.2)
    for _ in range(120):
        optimizer.zero_grad()
        total, _ = yolo_loss(raw, targets, model.anchors, gains)
        total.backward()
        optimizer.step()
    first, second = nms(model.decode(raw).detach(), conf_threshold=0.5)
    found = {(0, int(row[5])): row for row in first} | {(1, int(row[5])): row for row in second}
    assert len(first) == 2
    assert len(second) == 1
    for image, label, *box in targets.tolist():
        box_px = xyxy_to_xywh(found[image, label][:4])
        assert box_px.tolist() == pytest.approx([v * 128 for v in box], abs=4)
