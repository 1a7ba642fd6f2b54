"""Overlap and non-maximum suppression against plain loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.vision.boxes import TOP_K, box_iou, complete_iou, greedy_nms, nms, xywh_to_xyxy, xyxy_to_xywh
from arclight.vision.results.metrics import DetectionMetrics
from arclight.vision.tasks.processing import Context, DetectionProcessing, OrientedProcessing

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def reference_iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    common = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union > 0 else 0.0


def reference_nms(prediction, conf, iou, max_det=300, multi_label=False):
    """One image, one box at a time, in float64; ties rank by position, then class."""
    num_classes = prediction.shape[1] - 5
    candidates = []
    for position, row in enumerate(prediction.astype(np.float32)):
        scores = row[5:] * row[4]  # in float32, as the model's own arithmetic
        labels = range(num_classes) if multi_label else [int(np.argmax(scores))]
        candidates += [(-scores[c], position, c) for c in labels if scores[c] > conf]
    boxes = prediction[:, :4].astype(np.float32)
    boxes = np.concatenate((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), axis=1).astype(
        np.float64
    )
    kept = []
    for score, position, label in sorted(candidates):
        box = boxes[position]
        if all(other[5] != label or reference_iou(other, box) <= iou for other in kept):
            kept.append([*box, -score, label])
        if len(kept) == max_det:
            break
    return np.array(kept).reshape(-1, 6)


def predictions(seed, positions=400, num_classes=3, grid=None, crowd=6):
    """Boxes in crowds, so that much is suppressed."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(50, 400, (crowd, 4))
    boxes = centres[rng.integers(crowd, size=positions)] + rng.normal(0, 15, (positions, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:]) + 2
    scores = rng.random((positions, 1 + num_classes))
    if grid:
        boxes, scores = np.round(boxes / grid) * grid, np.round(scores, 1)
    return np.concatenate((boxes, scores), axis=1).astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("grid", [None, 16])
@pytest.mark.parametrize("num_classes", [1, 3])
def test_nms_is_the_plain_loop(device, multi_label, grid, num_classes):
    batch = np.stack([predictions(seed, num_classes=num_classes, grid=grid) for seed in range(3)])
    found = nms(torch.from_numpy(batch).to(device), 0.1, 0.5, top_k=None, multi_label=multi_label)
    assert len(found) == 3
    for image, rows in zip(batch, found):
        expected = reference_nms(image, 0.1, 0.5, multi_label=multi_label)
        assert 10 < len(expected) < 300
        np.testing.assert_array_equal(rows.cpu().numpy(), expected.astype(np.float32))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 700), st.sampled_from([1, 5, 300]), st.booleans())
def test_nms_of_any_size_is_the_plain_loop(seed, positions, max_det, multi_label):
    # whole multiples of 8 make equal scores and overlaps of exactly the threshold common
    image = predictions(seed, positions, num_classes=2, grid=8)
    (found,) = nms(torch.from_numpy(image)[None], 0.3, 0.5, max_det=max_det, multi_label=multi_label)
    expected = reference_nms(image, 0.3, 0.5, max_det=max_det, multi_label=multi_label)
    np.testing.assert_array_equal(found.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_cap_takes_the_first_candidates_also_among_equals(multi_label):
    image = predictions(3, positions=500, num_classes=4, grid=4)
    top_k = 60
    (found,) = nms(torch.from_numpy(image)[None], 0.05, 0.5, top_k=top_k, multi_label=multi_label)
    best = np.full_like(image[:, 5:], -1)
    scores = image[:, 5:] * image[:, 4:5]
    if not multi_label:
        scores = np.where(np.arange(4) == scores.argmax(1)[:, None], scores, -1)
    first = sorted((-score, i) for i, score in enumerate(scores.ravel()))[:top_k]
    for _, i in first:
        best.ravel()[i] = image[i // 4, 5 + i % 4]
    assert first[-1][0] == sorted(-scores.ravel())[top_k]  # the cap cuts through equal scores
    capped = np.concatenate((image[:, :5], best), axis=1)
    np.testing.assert_array_equal(
        found.numpy(), reference_nms(capped, 0.05, 0.5, multi_label=multi_label).astype(np.float32)
    )


def test_nms_without_detections_returns_empty_tables():
    for rows in nms(torch.zeros(2, 100, 7)) + nms(torch.zeros(2, 0, 7)):
        assert rows.shape == (0, 6)
    assert nms(torch.zeros(0, 100, 7)) == []
    assert greedy_nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []


def test_classes_do_not_suppress_each_other_and_broken_scores_are_dropped():
    box = [50.0, 50, 20, 20, 0.9]
    image = torch.tensor([[*box, 1, 0], [*box, 0, 0.9], [*box, 0.8, 0], [*box[:4], float("nan"), 1, 1]])
    (found,) = nms(image[None], 0.25, 0.45)
    assert found[:, 5].tolist() == [0, 1]
    assert found[:, 4].tolist() == pytest.approx([0.9, 0.81])


def test_half_precision_predictions_are_taken():
    image = torch.from_numpy(predictions(0))[None]
    (found,) = nms(image.bfloat16())
    (expected,) = nms(image.bfloat16().float())
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


# -- what the cap costs in mAP -------------------------------------------------------------------------------------


def trained_detector_output(rng, boxes, certainty, num_classes=2, size=640):
    """25,200 predictions as a detector makes them: positions on its grids, sure near true boxes, doubtful elsewhere."""
    anchors = [[(10, 13), (16, 30), (33, 23)], [(30, 61), (62, 45), (59, 119)], [(116, 90), (156, 198), (373, 326)]]
    centres, sizes = [], []
    for stride, level in zip((8, 16, 32), anchors):
        side = size // stride
        y, x = np.mgrid[:side, :side]
        for anchor in level:
            centres.append(np.stack((x, y), axis=-1).reshape(-1, 2) * stride + stride / 2)
            sizes.append(np.full((side * side, 2), anchor))
    xywh = np.concatenate((np.concatenate(centres), np.concatenate(sizes)), axis=1).astype(float)
    xywh[:, :2] += rng.normal(0, 3, xywh[:, :2].shape)
    xywh[:, 2:] *= np.exp(rng.normal(0, 0.4, xywh[:, 2:].shape))
    objectness = np.exp(rng.normal(-7.5, 1.5, len(xywh)))  # half of all positions lie below conf 0.001
    classes = rng.uniform(0.2, 0.8, (len(xywh), num_classes))
    for label, *box in boxes:
        true = np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]])
        near = np.abs((xywh[:, :2] - true[:2]) / np.maximum(true[2:], 16)).max(1) < 0.5
        fits = np.abs(np.log(xywh[:, 2:] / true[2:])).max(1) < np.log(4)
        claimed = np.flatnonzero(near & fits)
        off = rng.normal(0, 0.5 * (1 - certainty), (len(claimed), 4)) * np.array([*true[2:], 1, 1])
        xywh[claimed] = np.concatenate((true[:2] + off[:, :2], true[2:] * np.exp(off[:, 2:])), axis=1)
        objectness[claimed] = certainty * rng.beta(2, 3, len(claimed))
        classes[claimed] = 0.15
        classes[claimed, int(label)] = 0.9
    return np.concatenate((xywh, objectness[:, None].clip(0, 1), classes), axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("certainty", "crowd"), [(0.9, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, 8), (0.8, 60)))]
)
def test_the_cap_moves_average_precision_by_less_than_a_thousandth(certainty, crowd):
    rng = np.random.default_rng(0)
    capped, uncapped = DetectionMetrics(2), DetectionMetrics(2)
    most = 0
    for _ in range(10):
        m = rng.integers(1, crowd + 1)
        xy, wh = rng.uniform(0, 560, (m, 2)), rng.uniform(10, 160 if crowd < 20 else 60, (m, 2))
        truths = np.concatenate((rng.integers(2, size=(m, 1)), xy, xy + wh), axis=1)
        output = torch.from_numpy(trained_detector_output(rng, truths, certainty))[None]
        most = max(most, int((output[0, :, 5:] * output[0, :, 4:5] > 0.001).sum()))
        for metrics, top_k in ((capped, TOP_K), (uncapped, None)):
            metrics.update(nms(output, 0.001, 0.6, top_k=top_k, multi_label=True), [truths])
    with_cap, without = capped.compute(), uncapped.compute()
    assert most > 2 * TOP_K  # or there would be nothing to cap
    assert 0.05 < without.map50_95 < 0.95
    assert abs(with_cap.map50_95 - without.map50_95) <= 0.001
    assert abs(with_cap.map50 - without.map50) <= 0.001


# -- formats and overlap -------------------------------------------------------------------------------------------


def random_boxes(n, seed):
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    return torch.cat((low, low + torch.rand(n, 2, generator=generator, dtype=torch.float64)), dim=1)


def test_formats_are_inverse():
    boxes = random_boxes(20, 0)
    torch.testing.assert_close(xywh_to_xyxy(xyxy_to_xywh(boxes)), boxes)
    assert xyxy_to_xywh(torch.tensor([10.0, 20, 30, 60])).tolist() == [20, 40, 20, 40]


def test_iou_is_the_plain_formula():
    a, b = random_boxes(9, 0), random_boxes(7, 1)
    expected = [[reference_iou(x, y) for y in b.tolist()] for x in a.tolist()]
    np.testing.assert_allclose(box_iou(a, b).numpy(), expected, atol=1e-12)
    point = torch.zeros(1, 4)
    assert box_iou(point, point).tolist() == [[0]]


def test_complete_iou_by_hand():
    same = torch.tensor([5.0, 5, 4, 2])
    assert float(complete_iou(same, same)) == pytest.approx(1)
    # two unit squares whose centres are 3 apart: no overlap, hull 4 x 1
    apart = complete_iou(torch.tensor([0.0, 0, 1, 1]), torch.tensor([3.0, 0, 1, 1]))
    assert float(apart) == pytest.approx(-9 / 17)
    # concentric, 2 x 2 inside 4 x 2: IoU 1/2, no distance, unlike aspect
    v = 4 / np.pi**2 * (np.arctan(2) - np.arctan(1)) ** 2
    inside = complete_iou(torch.tensor([0.0, 0, 4, 2]), torch.tensor([0.0, 0, 2, 2]))
    assert float(inside) == pytest.approx(0.5 - v * v / (1 - 0.5 + v), rel=1e-5)


def test_complete_iou_of_tiny_boxes_stays_in_its_range():
    a, b = torch.tensor([[0.0, 0, 5e-5, 5e-5], [1.5e-4, 0, 5e-5, 5e-5]], dtype=torch.float64)  # hull 2e-4 x 5e-5
    assert float(complete_iou(a, b)) == pytest.approx(-2.25e-8 / (4.25e-8 + 1e-7), rel=1e-6)


def test_the_cap_takes_nothing_below_the_threshold():
    image = torch.tensor([[50.0 * k, 50, 20, 20, 1, score] for k, score in enumerate((0.9, 0.2, 0.15, 0.1))])
    (found,) = nms(image[None], 0.25, 0.45, top_k=3)
    assert found[:, 4].tolist() == pytest.approx([0.9])


def test_many_classes_lose_no_candidate_however_scores_lie() -> None:
    """Positions are left out by their objectness before classes are looked at: as if all had been."""
    generator = torch.Generator().manual_seed(5)
    for objectness in (
        torch.rand(600, generator=generator),
        torch.full((600,), 0.5),
        torch.linspace(0, 1, 600).round(decimals=1),
    ):
        prediction = torch.rand(1, 600, 5 + 12, generator=generator)
        prediction[..., :2] *= 400
        prediction[..., 2:4] *= 40
        prediction[..., 4] = objectness
        prediction[..., 5:] = prediction[..., 5:].round(decimals=1)  # many equal confidences
        for multi_label in (False, True):
            best = (prediction[0, :, 4] * prediction[0, :, 5:].amax(1)).sort(descending=True, stable=True).indices[:50]
            few = prediction[:, best.sort().values]  # the candidates by definition
            expected = nms(few, 0.001, 0.6, top_k=50, multi_label=multi_label)
            found = nms(prediction, 0.001, 0.6, top_k=50, multi_label=multi_label)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_score_that_is_no_number_costs_only_its_own_position() -> None:
    prediction = torch.rand(1, 600, 5 + 12, generator=torch.Generator().manual_seed(6))
    prediction[..., :4] = prediction[..., :4] * 40 + torch.arange(600)[:, None] % 25 * 30
    spoilt = prediction.clone()
    spoilt[0, 3, 4], spoilt[0, 8, 9] = torch.nan, torch.nan
    left = torch.cat((prediction[:, :3], prediction[:, 4:8], prediction[:, 9:]), dim=1)
    for multi_label in (False, True):
        found, expected = (nms(p, 0.001, 0.6, top_k=50, multi_label=multi_label) for p in (spoilt, left))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("length", [3, 300, 1000])
def test_a_chain_of_boxes_loses_every_second_one(length: int) -> None:
    boxes = torch.zeros(length, 4)
    boxes[:, 0] = torch.arange(length) * 6.0
    boxes[:, 2], boxes[:, 3] = boxes[:, 0] + 10, 10  # overlaps its neighbours by a quarter
    kept = greedy_nms(boxes, torch.zeros(length), 0.2)
    assert kept.tolist() == list(range(0, length, 2))


def crowd(copies: int) -> torch.Tensor:
    """Decoded rows (1, 3000 * copies, 6) of 3,000 objects that stand apart, each found by several positions, the surest of the first objects first."""
    x, y = np.meshgrid(np.arange(60) * 10 + 5, np.arange(50) * 10 + 5)
    rows = np.stack((x.ravel(), y.ravel(), *np.full((2, 3000), 6.0), np.linspace(0.9, 0.5, 3000), np.ones(3000)), 1)
    return torch.from_numpy(np.repeat(rows, copies, axis=0).astype(np.float32))[None]


@pytest.mark.parametrize("max_det", [300, 3000])
def test_as_many_boxes_are_found_as_are_asked_for(max_det: int) -> None:
    """Candidates are bounded before the overlap test: 2,000 of them are 500 objects that four positions find."""
    settings = {"names": ["a"], "image_size": 640, "max_det": max_det}
    photos = Context([np.zeros((640, 640, 3), np.uint8)], [(1.0, 0, 0)])
    for kind, copies in (
        (DetectionProcessing(**settings), 4),
        (DetectionProcessing(**settings, iou_threshold=None), 1),
    ):
        assert len(kind.postprocess(crowd(copies), photos)[0]) == max_det
    turned = torch.cat((crowd(4), torch.zeros(1, 12_000, 1)), dim=-1)
    assert len(OrientedProcessing(**settings).postprocess(turned, photos)[0]) == max_det
