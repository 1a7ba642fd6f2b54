"""Slices, changed copies and ensembles of detectors whose answers are known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

cv2 = pytest.importorskip("cv2")


from arclight.vision import Detections  # noqa: E402
from arclight.vision.inference.fusion import concatenated, ensemble, suppressed, weighted_box_fusion  # noqa: E402
from arclight.vision.inference.slicing import sliced, slices  # noqa: E402
from arclight.vision.inference.test_time import augmented, multi_scale  # noqa: E402
from arclight.vision.tasks.detection import Detector  # noqa: E402
from arclight.vision.tasks.settings import DetectionTask  # noqa: E402

NAMES = ("dark", "bright")


def boxes_of(*rows, names=NAMES) -> Detections:
    """Each row: left, top, right, bottom, confidence, class."""
    array = np.array(rows, float).reshape(-1, 6)
    return Detections.from_arrays(array[:, :4], array[:, 4], array[:, 5], names=names)


def detector(images):
    """Find bright and dark rectangles on grey; larger ones with more confidence. Half ones are found as they are."""
    results = []
    for image in images:
        rows = []
        for label, mask in ((0, image[..., 0] < 60), (1, image[..., 0] > 200)):
            count, _, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=4)
            for x, y, w, h, area in stats[1:count]:
                rows.append([x, y, x + w, y + h, 0.3 + 0.6 * area / (area + 500), label])
        array = np.array(rows, float).reshape(-1, 6)
        results.append(Detections.from_arrays(array[:, :4], array[:, 4], array[:, 5], names=NAMES, image=image))
    return results


def scene(*boxes, size=(400, 600)) -> np.ndarray:
    image = np.full((*size, 3), 128, np.uint8)
    for left, top, right, bottom, level in boxes:
        image[top:bottom, left:right] = level
    return image


def sides(found: Detections) -> list[list[int]]:
    return sorted(found.boxes.xyxy.round().astype(int).tolist())


# -- slices --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 400), st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9]))
def test_slices_cover_every_pixel_and_overlap_as_asked(height: int, width: int, size: int, overlap: float) -> None:
    size = max(size, max(height, width) // 20)
    corners = slices(height, width, size, overlap)
    covered = np.zeros((height, width), bool)
    for x, y in corners:
        assert 0 <= x <= max(width - size, 0)
        assert 0 <= y <= max(height - size, 0)
        covered[y : y + size, x : x + size] = True
    assert covered.all()
    across = sorted({x for x, _ in corners})
    assert all(after - before <= max(round(size * (1 - overlap)), 1) for before, after in itertools.pairwise(across))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_seams_leave_no_trace(whole: bool, seed: int) -> None:
    """Rectangles that are cut by seams come out as they are, once each."""
    random = np.random.default_rng(seed)
    image = scene(size=(400, 640))
    truth = []
    for row in range(4):
        for column in range(5):
            w, h = random.integers(12, 90, 2)
            x, y = 128 * column + random.integers(2, 120 - w + 1), 100 * row + random.integers(2, 96 - h + 1)
            image[y : y + h, x : x + w] = random.choice([20, 240])
            truth.append([int(x), int(y), int(x + w), int(y + h)])
    (found,) = sliced(detector, 160, 0.2, whole=whole)([image])
    assert sides(found) == sorted(truth)
    assert found.image is image


def test_an_object_larger_than_slices_is_joined_or_seen_whole() -> None:
    image = scene((40, 100, 560, 160, 240))
    for whole in (False, True):
        (found,) = sliced(detector, 200, 0.2, whole=whole)([image])
        assert sides(found) == [[40, 100, 560, 160]]
    big = scene((30, 30, 570, 370, 20))
    (found,) = sliced(detector, 200, 0.2, whole=False)([big])
    assert sides(found)[0] == [30, 30, 570, 370]


def test_a_small_object_before_a_large_one_of_its_class_stays() -> None:
    """Whole boxes suppress each other by overlap alone: one inside another is another object."""

    small = iter([boxes_of([60, 60, 90, 90, 0.8, 0])])

    def fixed(images):
        if images[0].shape[:2] == (400, 600):
            return [boxes_of([50, 50, 350, 350, 0.9, 0])]
        return [next(small, boxes_of()) for _ in images]

    (found,) = sliced(fixed, 200)([scene()])
    assert sides(found) == [[50, 50, 350, 350], [60, 60, 90, 90]]


def test_neighbours_at_a_seam_are_not_joined() -> None:
    """Two objects that end near the seam on either side, at other heights."""
    image = scene((100, 50, 198, 90, 240), (205, 130, 300, 180, 240))
    (found,) = sliced(detector, 200, 0.0, whole=False)([image])
    assert sides(found) == [[100, 50, 198, 90], [205, 130, 300, 180]]


def test_slices_find_what_is_too_small_in_the_whole() -> None:
    """A detector with an input of 160 pixels, that sees nothing below 8."""

    def near_sighted(images):
        results = []
        for image in images:
            scale = 160 / max(image.shape[:2])
            (found,) = detector([image])
            results.append(found[(found.boxes.xywh[:, 2:] * scale >= 8).all(axis=1)])
        return results

    image = scene(
        *[(30 + 70 * n, 40 + 40 * n, 46 + 70 * n, 56 + 40 * n, 240) for n in range(8)], (300, 20, 420, 100, 20)
    )
    assert len(near_sighted([image])[0]) == 1
    assert len(sliced(near_sighted, 160)([image])[0]) == 9


def test_slices_are_looked_at_a_few_at_a_time_and_small_images_once() -> None:
    sizes = []

    def counting(images):
        sizes.append(len(images))
        return [boxes_of() for _ in images]

    sliced(counting, 100)([np.zeros((1000, 1000, 3), np.uint8)])
    assert max(sizes) <= 8
    assert sum(sizes) == 13 * 13 + 1
    sizes.clear()
    assert len(sliced(counting, 100)([np.zeros((1, 1, 3), np.uint8), np.zeros((100, 100, 3), np.uint8)])) == 2
    assert sizes == [1, 1]


@pytest.mark.parametrize(
    ("size", "overlap", "message"), [(0, 0.2, "1 pixel or more, got 0"), (9, 1.0, r"\[0, 1\), got 1.0")]
)
def test_invalid_slice_sizes_and_overlaps_are_refused(size: int, overlap: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sliced(detector, size, overlap)


# -- changed copies ------------------------------------------------------------------------------------------------


def test_every_variant_maps_back_to_the_image() -> None:
    image = scene((40, 60, 140, 120, 240), (400, 200, 431, 261, 20), size=(301, 533))
    for variant in ((1.0, False), (1.0, True), (0.83, True), (0.67, False), (0.5, True)):
        (found,) = augmented(detector, variants=[variant])([image])
        assert sides(found) == [[40, 60, 140, 120], [400, 200, 431, 261]], variant
        assert found.labels == ["bright", "dark"]
    (found,) = augmented(detector)([image])
    assert sides(found) == [[40, 60, 140, 120], [400, 200, 431, 261]]
    assert found.image is image


def test_a_smaller_look_makes_objects_smaller() -> None:
    seen = []

    def looking(images):
        seen.extend(image.shape[:2] for image in images)
        return [boxes_of() for _ in images]

    augmented(looking)([np.zeros((100, 200, 3), np.uint8)])
    assert seen == [(100, 200), (120, 241), (149, 299)]


def test_boxes_in_the_margin_are_left_out() -> None:
    def margins(images):
        return [boxes_of([0, 0, 5, 5, 0.9, 0], [70, 70, 90, 90, 0.5, 0]) for _ in images]

    (found,) = augmented(margins, variants=[(0.5, False)])([np.zeros((100, 100, 3), np.uint8)])
    assert sides(found) == [[20, 20, 40, 40]]


def test_multi_scale_passes_keep_the_best_of_equal_boxes() -> None:
    """An untrained detector: its boxes at two sizes are those of each size, without those that a better one covers."""
    torch.manual_seed(0)
    task = DetectionTask(data=Path("data.yaml"), model="yolov5n", image_size=64, conf_threshold=1e-3)
    network = Detector(task, ["code"]).eval()
    photo = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    processing = replace(network.processing, max_det=20)
    passes = [network.detect([photo], replace(processing, image_size=size))[0] for size in (64, 128)]
    (found,) = multi_scale(network, [64, 128, 64], processing)([photo])
    (alone,) = multi_scale(network, [128], processing)([photo])
    assert sides(alone) == sides(passes[1])
    merged = suppressed(concatenated(passes), 0.5)
    assert sides(found) == sides(merged)[:20]
    assert 0 < len(merged) < sum(map(len, passes))
    assert len(multi_scale(network, [64, 128], replace(processing, max_det=5))([photo])[0]) == 5
    assert multi_scale(network, [64])([]) == []


def test_multi_scale_passes_suppress_other_classes_as_their_processing_does() -> None:
    task = DetectionTask(data=Path("data.yaml"), model="yolov5n", image_size=64)

    class Alternating(Detector):
        def predict(self, images, processing=None):
            return [boxes_of([0, 0, 40, 40, 0.9, float(processing.image_size == 128)]) for _ in images]

    network = Alternating(task, ["code", "logo"])
    processing = replace(network.processing, agnostic=True)
    (found,) = multi_scale(network, [64, 128], processing)([np.zeros((64, 64, 3), np.uint8)])
    assert len(found) == 1


@pytest.mark.parametrize(("sizes", "message"), [([], "got none"), ([320, 100], "of 32 .*, got 100"), ([0], "got 0")])
def test_multi_scale_refuses_sizes_that_no_network_takes(sizes: list[int], message: str) -> None:
    network = Detector(DetectionTask(data=Path("data.yaml"), model="yolov5n", image_size=64), ["code"])
    with pytest.raises(ValueError, match=message):
        multi_scale(network, sizes)


def test_invalid_augmentation_variants_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\], got 1.3"):
        augmented(detector, variants=[(1.3, False)])
    with pytest.raises(ValueError, match="no variant"):
        augmented(detector, variants=[])


# -- fusion --------------------------------------------------------------------------------------------------------


def test_fused_boxes_are_the_hand_computed_ones() -> None:
    """Two models: one object found by both, one by the first alone, one of another class on the same place."""
    first = boxes_of([0, 0, 10, 10, 0.8, 0], [50, 50, 60, 60, 0.6, 0])
    second = boxes_of([0, 0, 10, 12, 0.4, 0], [50, 50, 60, 60, 0.5, 1])
    found = weighted_box_fusion([first, second])
    assert found.boxes.xyxy.tolist() == [
        [0, 0, 10, pytest.approx((0.8 * 10 + 0.4 * 12) / 1.2)],
        [50, 50, 60, 60],
        [50, 50, 60, 60],
    ]
    assert found.boxes.conf.tolist() == pytest.approx([(0.8 + 0.4) / 2, 0.6 / 2, 0.5 / 2])
    assert found.boxes.cls.tolist() == [0, 0, 1]


def test_weights_of_models() -> None:
    """Weights 3 and 1: scores count 1 and 1/3; who alone finds an object gets the share 1 / (4/3)."""
    first, second = boxes_of([0, 0, 10, 10, 0.6, 0]), boxes_of([0, 0, 10, 13, 0.6, 0], [90, 90, 99, 99, 0.9, 0])
    found = weighted_box_fusion([first, second], weights=[3, 1])
    assert found.boxes.xyxy[0].tolist() == pytest.approx([0, 0, 10, (10 * 3 + 13) / 4])
    assert found.boxes.conf.tolist() == pytest.approx([(0.6 + 0.2) / 2, 0.3 * 3 / 4])


def test_one_model_is_itself_and_an_empty_one_halves_confidence() -> None:
    found = boxes_of([0, 0, 10, 10, 0.8, 0], [50, 50, 60, 60, 0.6, 1])
    alone = weighted_box_fusion([found])
    np.testing.assert_allclose(alone.boxes.xyxy, found.boxes.xyxy)
    np.testing.assert_allclose(alone.boxes.conf, found.boxes.conf, rtol=1e-6)
    half = weighted_box_fusion([found, boxes_of()])
    np.testing.assert_allclose(half.boxes.conf, found.boxes.conf / 2, rtol=1e-6)
    assert len(weighted_box_fusion([boxes_of(), boxes_of()])) == 0


def test_an_ensemble_is_nearer_to_the_truth_than_its_members() -> None:
    truth = np.array([[20 + 60 * n, 30, 60 + 60 * n, 80] for n in range(8)], float)
    errors: list[list[float]] = [[], [], [], []]
    for seed in range(30):
        random = np.random.default_rng(seed)

        def noisy(images, random=random):
            return [
                boxes_of(*[[*(box + random.normal(0, 2, 4)), random.uniform(0.5, 0.9), 0] for box in truth])
                for _ in images
            ]

        members = [noisy([None]) for _ in range(3)]
        together = ensemble([lambda images, member=member: member for member in members])([None])
        for place, (found,) in zip(errors, [*members, together]):
            place.append(np.abs(np.sort(found.boxes.xyxy, axis=0) - np.sort(truth, axis=0)).mean())
    assert np.mean(errors[3]) < 0.75 * min(np.mean(error) for error in errors[:3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weighted_box_fusion([boxes_of()], weights=[1, 2]), r"a positive weight for each of 1 detectors is needed, got \[1.0, 2.0\]"),
        (lambda: weighted_box_fusion([boxes_of()], weights=[0]), "a positive weight"),
        (lambda: weighted_box_fusion([boxes_of()], weights=[float("nan")]), "a positive weight"),
        (lambda: concatenated([]), "no detections to fuse"),
        (lambda: concatenated([boxes_of(), boxes_of(names=("dark", "cat"))]), "find other classes: dark, bright and dark, cat"),
        (lambda: ensemble([]), "an ensemble needs one detector or more"),
    ],
)  # fmt: skip
def test_invalid_fusion_options_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_suppression_by_class_and_agnostic() -> None:
    found = boxes_of([0, 0, 10, 10, 0.8, 0], [0, 0, 10, 11, 0.7, 0], [0, 0, 10, 10, 0.6, 1])
    assert suppressed(found, 0.5).boxes.conf.tolist() == pytest.approx([0.8, 0.6])
    assert suppressed(found, 0.5, agnostic=True).boxes.conf.tolist() == pytest.approx([0.8])
    assert len(suppressed(found[:0], 0.5)) == 0


def test_agnostic_merging() -> None:
    image = np.full((300, 300, 3), 128, np.uint8)

    def two_classes(images):
        return [boxes_of([40, 40, 80, 80, 0.9, 0], [40, 40, 81, 80, 0.8, 1]) for _ in images]

    for widen in (
        lambda **o: augmented(two_classes, variants=[(1.0, False)], **o),
        lambda **o: sliced(two_classes, 300, **o),
    ):
        assert len(widen()([image])[0]) == 2
    assert len(augmented(two_classes, variants=[(1.0, False)], agnostic=True)([image])[0]) == 1
    whole_only = np.pad(image, ((0, 1), (0, 0), (0, 0)))
    assert len(sliced(two_classes, 300, agnostic=False)([whole_only])[0]) == 2
    assert len(sliced(two_classes, 300, agnostic=True)([whole_only])[0]) == 1


def test_they_can_be_nested() -> None:
    image = scene((40, 60, 140, 120, 240), (400, 200, 431, 261, 20))
    (found,) = sliced(augmented(ensemble([detector, detector])), 200)([image])
    assert sides(found) == [[40, 60, 140, 120], [400, 200, 431, 261]]
