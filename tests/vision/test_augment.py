"""Boxes follow the pixels they were drawn around, whatever happens to the image."""

from __future__ import annotations

import colorsys

import cv2
import numpy as np
import pytest

from arclight.vision.data import augment as changes
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.letterbox import GREY, letterbox

SIZE = 320
STILL = Augment(mosaic=0, translate=0, scale=0, hsv_h=0, hsv_s=0, hsv_v=0)
BENT = {"degrees": 20.0, "shear": 8.0}
TRANSFORMS = {
    "default": Augment(),
    "turned": Augment(**BENT),
    "perspective": Augment(perspective=0.001),
    "everything": Augment(perspective=0.0006, **BENT),
}
COLOURS = [tuple(int(255 * c) for c in colorsys.hsv_to_rgb(hue / 12, 1, 1)) for hue in range(12)]


def tile(first: int, count: int, height: int, width: int, rng: np.random.Generator) -> changes.LabelledImage:
    """A grey image with ``count`` solid rectangles in colours ``first, first + 1, ...``; the class is the colour."""
    image = np.full((height, width, 3), 60, np.uint8)
    boxes = np.zeros((count, 5), np.float32)
    for place in range(count):
        # Side by side, so that none hides another.
        x1 = round(width * (place + 0.1 + 0.2 * rng.random()) / count)
        x2 = round(width * (place + 0.9) / count)
        y1, y2 = round(height * rng.uniform(0.05, 0.4)), round(height * rng.uniform(0.6, 0.95))
        image[y1:y2, x1:x2] = COLOURS[first + place]
        boxes[place] = first + place, x1, y1, x2, y2
    return image, boxes


def hull(image: np.ndarray, colour: tuple[int, int, int]) -> tuple[np.ndarray, int]:
    """x1, y1, x2, y2 around the pixels that are mostly of ``colour``, and how many they are."""
    near = np.array(colour)
    ys, xs = np.nonzero(cv2.inRange(image, (near - 50).clip(0), (near + 50).clip(max=255)))
    return (np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]), len(xs)) if len(xs) else (np.zeros(4), 0)


def check_boxes_against_pixels(image: np.ndarray, boxes: np.ndarray, *, upright: bool) -> int:
    """Every box lies around its colour and every colour well in view has a box; how many boxes there were."""
    for label, *corners in boxes:
        found, seen = hull(image, COLOURS[int(label)])
        assert seen > 0
        if upright or (min(corners) > 0 and max(corners) < SIZE):
            np.testing.assert_allclose(corners, found, atol=1.6)
        else:  # of a slanted box that is cut, the corners that made it wide may be outside
            assert (corners[:2] <= found[:2] + 1.6).all()
            assert (corners[2:] >= found[2:] - 1.6).all()
    labelled = {int(label) for label in boxes[:, 0]}
    for label, colour in enumerate(COLOURS):
        (x1, y1, x2, y2), seen = hull(image, colour)
        inside = x1 > 0 and y1 > 0 and x2 < image.shape[1] and y2 < image.shape[0]
        if inside and min(x2 - x1, y2 - y1) > 5:
            assert label in labelled, f"colour {label} is in view and has no box"
    assert (boxes[:, 1:] >= 0).all()
    assert (boxes[:, 1:] <= SIZE).all()
    return len(boxes)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_boxes_of_a_mosaic_follow_the_pixels(name: str) -> None:
    rng = np.random.default_rng(3)
    boxes_seen = 0
    for _ in range(25):
        tiles = [
            tile(3 * q, 3, *sides, rng) for q, sides in enumerate([(320, 320), (240, 320), (320, 200), (180, 320)])
        ]
        image, boxes = changes.mosaic(tiles, rng, TRANSFORMS[name], SIZE)
        assert image.shape == (SIZE, SIZE, 3)
        boxes_seen += check_boxes_against_pixels(image, boxes, upright=name == "default")
    assert boxes_seen > 80


@pytest.mark.parametrize("name", TRANSFORMS)
def test_boxes_of_a_whole_image_follow_the_pixels_through_flips(name: str) -> None:
    rng = np.random.default_rng(4)
    mirrored = Augment(fliplr=0.5, flipud=0.5)
    boxes_seen = 0
    for _ in range(25):
        labelled = changes.random_affine(tile(0, 3, 240, 320, rng), rng, TRANSFORMS[name], SIZE)
        boxes_seen += check_boxes_against_pixels(*changes.flip(labelled, rng, mirrored), upright=name == "default")
    assert boxes_seen > 50


def test_without_any_change_an_image_is_letterboxed_exactly() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (240, 320, 3), dtype=np.uint8)
    boxes = np.array([[2, 10, 20, 200, 220]], np.float32)
    changed, moved = changes.random_affine((image, boxes), rng, STILL, SIZE)
    expected, (_, pad_x, pad_y) = letterbox(image, SIZE)
    np.testing.assert_array_equal(changed, expected)
    np.testing.assert_allclose(moved, boxes + np.float32([0, pad_x, pad_y, pad_x, pad_y]))


@pytest.mark.parametrize("size", [2 * SIZE, (2 * SIZE, 2 * SIZE)])
@pytest.mark.parametrize("fit", [False, True])
def test_an_image_is_enlarged_on_request(size: int | tuple[int, int], fit: bool) -> None:
    rng = np.random.default_rng(0)
    image, boxes = np.zeros((SIZE // 2, SIZE, 3), np.uint8), np.array([[2, 0, 0, SIZE, SIZE // 2]], np.float32)
    changed, moved = changes.random_affine((image, boxes), rng, STILL, size, fit=fit)
    width, height = (2 * SIZE, SIZE) if fit else (SIZE, SIZE // 2)
    assert (changed != GREY).any(-1).sum() == pytest.approx(width * height, rel=0.01)
    left, top = SIZE - width / 2, SIZE - height / 2
    np.testing.assert_allclose(moved, [[2, left, top, left + width, top + height]])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_boxes_of_nine_images_follow_the_pixels(name: str) -> None:
    rng = np.random.default_rng(3)
    boxes_seen = 0
    for _ in range(25):
        sides = [
            (320, 320),
            (240, 320),
            (320, 200),
            (180, 320),
            (320, 320),
            (320, 160),
            (200, 320),
            (320, 320),
            (320, 240),
        ]
        tiles = [tile(q, 1, *shape, rng) for q, shape in enumerate(sides)]
        image, boxes = changes.mosaic9(tiles, rng, TRANSFORMS[name], SIZE)
        assert image.shape == (SIZE, SIZE, 3)
        boxes_seen += check_boxes_against_pixels(image, boxes, upright=name == "default")
    assert boxes_seen > 60


def test_nine_images_are_smaller_than_four_and_fill_the_square() -> None:
    rng = np.random.default_rng(1)
    plain = [(np.full((320, 320, 3), 20 * q, np.uint8), np.zeros((0, 5), np.float32)) for q in range(9)]
    still = Augment(scale=0, translate=0)
    images = [changes.mosaic9(plain, rng, still, SIZE)[0] for _ in range(20)]
    assert not any((image == GREY).all(-1).any() for image in images)
    assert all((image == 0).all(-1).sum() == pytest.approx((320 * 2 / 3) ** 2, rel=0.02) for image in images)


def test_pasted_objects_are_whole_and_hide_little() -> None:
    rng = np.random.default_rng(6)
    gained = 0
    for _ in range(40):
        canvas = changes.random_affine(tile(0, 2, 240, 320, rng), rng, STILL, SIZE)
        source = tile(3, 3, 160, 160, rng)
        before, count = canvas[0].copy(), len(canvas[1])
        image, boxes = changes.copy_paste(canvas, source, rng)
        assert boxes.dtype == np.float32
        gained += len(boxes) - count
        for label, *corners in boxes[count:]:
            found, _ = hull(image, COLOURS[int(label)])
            np.testing.assert_array_equal(corners, found)
        for _, *corners in boxes[:count]:
            x1, y1, x2, y2 = map(round, corners)
            inside = (slice(y1, y2), slice(x1, x2))
            assert (image[inside] != before[inside]).any(-1).mean() <= 3 * changes.MAX_HIDDEN
    assert gained > 20


def test_outlined_objects_are_pasted_inside_their_outlines() -> None:
    rng = np.random.default_rng(2)
    source = np.full((80, 80, 3), 200, np.uint8)
    corner = np.array([[40, 10], [70, 70], [10, 70]], np.float32)
    cv2.fillPoly(source, [corner.astype(np.int32)], (255, 0, 0))
    row = np.array([[4, 10, 10, 70, 70, *corner.flatten()]], np.float32)
    empty = (np.zeros((SIZE, SIZE, 3), np.uint8), np.zeros((0, 11), np.float32))
    image, boxes = changes.copy_paste(empty, (source, row), rng)
    assert boxes.shape == (1, 11)
    np.testing.assert_allclose(boxes[0, 5:].reshape(-1, 2) - boxes[0, 1:3], corner - 10)
    changed = image.any(-1)
    assert changed.sum() == pytest.approx(60 * 60 / 2, rel=0.06)  # the triangle, and nothing of what was around it
    ys, xs = np.nonzero(changed)
    np.testing.assert_allclose((xs.min(), ys.min(), xs.max(), ys.max()), boxes[0, 1:5], atol=1.5)


def test_nine_outlined_images_keep_their_outlines() -> None:
    rng = np.random.default_rng(2)
    tiles = []
    for number in range(9):
        image, boxes = tile(number, 1, 320, 320, rng)
        x1, y1, x2, y2 = boxes[0, 1:]
        tiles.append((image, np.concatenate((boxes, [[x1, y1, x2, y1, x2, y2, x1, y2]]), 1, dtype=np.float32)))
    _, found = changes.mosaic9(tiles, rng, Augment(), SIZE)
    assert found.shape[1] == 13
    inside = [row for row in found if (row[5:] >= 0).all() and (row[5:] <= SIZE).all()]
    assert inside
    for row in inside:
        np.testing.assert_allclose(row[5:9:2], row[[1, 3]], atol=1e-3)


def test_classes_that_nobody_meets_mirrored_stay_as_they_are() -> None:
    assert changes.never_mirrored(["QR_code", "cat", "Barcode", "text line"], Augment()) == {0, 2, 3}
    assert changes.never_mirrored(["qr"], Augment(never_mirrored=())) == frozenset()
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    always = Augment(fliplr=1, flipud=1)
    for label, fixed, stays in ((0, {0}, True), (1, {0}, False), (0, set(), False)):
        boxes = np.array([[1, 5, 5, 50, 60], [label, 10, 20, 100, 120]], np.float32)
        turned, moved = changes.flip((image, boxes), rng, always, frozenset(fixed))
        assert np.array_equal(turned, image) == np.array_equal(moved, boxes) == stays


def test_tiles_of_an_upright_mosaic_meet_without_a_gap() -> None:
    rng = np.random.default_rng(1)
    plain = [(np.full((320, 320, 3), 10 * q, np.uint8), np.zeros((0, 5), np.float32)) for q in range(4)]
    for _ in range(20):
        image, _ = changes.mosaic(plain, rng, Augment(scale=0.2, translate=0.05), SIZE)
        ys, xs = np.nonzero(image[..., 0] != GREY)
        assert (image[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1, 0] != GREY).all()


def test_boxes_are_right_to_a_small_part_of_a_pixel() -> None:
    rng = np.random.default_rng(2)
    image = np.zeros((320, 320, 3), np.uint8)
    image[120:200, 100:180, 0] = 255  # no green: only the background has any
    checked = 0
    for _ in range(60):
        changed, boxes = changes.random_affine(
            (image, np.array([[0, 100, 120, 180, 200]], np.float32)), rng, Augment(), SIZE
        )
        (x1, y1, x2, y2) = boxes[0, 1:]
        if x2 - x1 < 80 or min(x1, y1) < 1 or max(x2, y2) > SIZE - 1:
            continue  # shrunk without averaging, or cut: the centre of its light is not that of the box
        light = np.where(changed[..., 1] == GREY, 0, changed[..., 0].astype(float))
        centre = [(light.sum(axis) * (np.arange(SIZE) + 0.5)).sum() / light.sum() for axis in (0, 1)]
        np.testing.assert_allclose(centre, [(x1 + x2) / 2, (y1 + y2) / 2], atol=0.06)
        checked += 1
    assert checked > 10


def test_boxes_hardly_in_view_are_dropped_and_others_are_clipped() -> None:
    shift = np.array([[1.0, 0, -100], [0, 1, 0], [0, 0, 1]])
    boxes = np.array(
        [[0, 50, 50, 108, 90], [1, 50, 50, 150, 150], [2, 0, 0, 99, 99], [3, 120, 120, 121, 160]], np.float32
    )
    kept = changes.warp_boxes(boxes, shift, SIZE)
    # 0: 8 of 58 pixels wide is 14 %, kept; 1: cut; 2: outside; 3: one pixel wide
    np.testing.assert_allclose(kept, [[0, 0, 50, 8, 90], [1, 0, 50, 50, 150]])
    assert len(changes.warp_boxes(np.array([[0, 50, 50, 104, 90]], np.float32), shift, SIZE)) == 0  # 7 % in view


def test_scale_stays_within_its_range() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        matrix = changes.random_transform(rng, Augment(scale=0.3, degrees=45), SIZE, reach=SIZE)
        assert 0.7**2 <= np.linalg.det(matrix[:2, :2]) <= 1.3**2
        assert (np.abs(matrix[:2, 2] - SIZE / 2) <= 0.1 * SIZE).all()


def test_strong_perspective_never_turns_an_image_inside_out() -> None:
    rng = np.random.default_rng(0)
    augment, size = Augment(perspective=0.001, degrees=45), 8192
    for reach in (0.5 * size, 1.5 * size):
        corners = np.array([[x, y, 1] for x in (-reach, reach) for y in (-reach, reach)])
        for _ in range(200):
            assert (corners @ changes.random_transform(rng, augment, size, reach=reach)[2] > 0.3).all()


def test_flips_happen_as_often_as_asked() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    image[0, 0] = 255
    boxes = np.array([[0, 0, 0, 1, 1]], np.float32)
    rng = np.random.default_rng(0)
    results = [changes.flip((image, boxes), rng, Augment(fliplr=0.25, flipud=0.0)) for _ in range(400)]
    mirrored = [after[0, 3, 0] == 255 for after, _ in results]
    assert 70 <= sum(mirrored) <= 130
    for was, (_, moved) in zip(mirrored, results):
        np.testing.assert_array_equal(moved, [[0, 3, 0, 4, 1]] if was else boxes)


def test_flips_are_off_by_default() -> None:
    assert Augment().fliplr == Augment().flipud == 0


def test_mixup_blends_and_keeps_all_boxes() -> None:
    rng = np.random.default_rng(0)
    dark, light = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 200, np.uint8)
    boxes = np.array([[0, 1, 1, 5, 5]], np.float32)
    blended, both = changes.mixup((dark, boxes), (light, boxes + 1), rng)
    assert 40 < blended.mean() < 160
    assert np.ptp(blended) == 0
    np.testing.assert_array_equal(both, np.concatenate((boxes, boxes + 1)))


def test_colours_change_within_their_ranges() -> None:
    rng = np.random.default_rng(0)
    image = np.full((4, 4, 3), (50, 100, 200), np.uint8)
    hue, saturation, value = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)[0, 0]
    seen = []
    for _ in range(100):
        changed = changes.hsv_jitter(image, rng, Augment(hsv_h=0.1, hsv_s=0.2, hsv_v=0.2))
        seen.append(cv2.cvtColor(changed, cv2.COLOR_RGB2HSV)[0, 0].astype(float))
    spread = np.array(seen) / (hue, saturation, value)
    assert (spread.min(0) >= (0.89, 0.78, 0.78)).all()
    assert (spread.max(0) <= (1.11, 1.22, 1.22)).all()
    assert (np.ptp(spread, axis=0) > 0.1).all()
    np.testing.assert_array_equal(changes.hsv_jitter(image, rng, STILL), image)


def test_same_generator_state_gives_the_same_bits() -> None:
    tiles = [tile(3 * q, 3, 300, 320, np.random.default_rng(q)) for q in range(4)]
    one, two = (changes.mosaic(tiles, np.random.default_rng(9), TRANSFORMS["everything"], SIZE) for _ in range(2))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])
