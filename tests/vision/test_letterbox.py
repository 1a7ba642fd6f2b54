"""An image goes into its square and boxes come back out of it."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arclight.vision.data.letterbox import GREY, letterbox, unletterbox
from arclight.vision.tasks.processing import as_batch

SIDES = st.integers(1, 900)


@given(height=SIDES, width=SIDES, size=st.sampled_from([32, 320, 640]))
def test_image_keeps_its_shape_and_is_centred(height: int, width: int, size: int) -> None:
    square, (scale, pad_x, pad_y) = letterbox(np.zeros((height, width, 3), np.uint8), size)
    assert square.shape == (size, size, 3)
    assert square.dtype == np.uint8
    inside = (square == 0).all(2)
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    assert (rows[0], columns[0]) == (pad_y, pad_x)
    assert len(rows) == max(round(height * scale), 1)
    assert len(columns) == max(round(width * scale), 1)
    assert max(len(rows), len(columns)) == size
    assert abs((size - len(rows)) - 2 * pad_y) <= 1
    assert abs((size - len(columns)) - 2 * pad_x) <= 1
    assert (square[~inside] == GREY).all()


@given(height=SIDES, width=SIDES, size=st.sampled_from([320, 640]), data=st.data())
def test_boxes_come_back(height: int, width: int, size: int, data: st.DataObject) -> None:
    _, placed = letterbox(np.zeros((height, width, 3), np.uint8), size)
    x = sorted(data.draw(st.tuples(*[st.floats(0, width)] * 2)))
    y = sorted(data.draw(st.tuples(*[st.floats(0, height)] * 2)))
    original = np.array([[x[0], y[0], x[1], y[1]]])
    scale, pad_x, pad_y = placed
    inside_square = original * scale + (pad_x, pad_y, pad_x, pad_y)
    back = unletterbox(inside_square, placed, (height, width))
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, original, rtol=1e-6, atol=1e-4)


def test_boxes_in_the_padding_are_clipped_to_the_image() -> None:
    _, placed = letterbox(np.zeros((100, 200, 3), np.uint8), 640)
    np.testing.assert_array_equal(unletterbox([[-5, 0, 700, 640]], placed, (100, 200)), [[0, 0, 200, 100]])


def test_boxes_may_be_a_tensor_and_there_may_be_none() -> None:
    placed = (2.0, 10, 0)
    np.testing.assert_array_equal(unletterbox(torch.tensor([[10.0, 2, 30, 8]]), placed, (50, 50)), [[0, 1, 10, 4]])
    assert unletterbox(np.zeros((0, 4)), placed, (50, 50)).shape == (0, 4)


@pytest.mark.parametrize(("height", "width"), [(480, 640), (333, 500), (200, 150), (640, 427)])
def test_a_drawn_rectangle_matches_its_box(height: int, width: int) -> None:
    box = np.array([[width // 5, height // 4, width // 2, height // 2]])
    image = np.zeros((height, width, 3), np.uint8)
    x1, y1, x2, y2 = box[0]
    image[y1:y2, x1:x2] = 255
    square, (scale, pad_x, pad_y) = letterbox(image, 320)
    ys, xs = np.nonzero(square[..., 0] > 127 + (square[..., 0] == GREY))
    found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
    np.testing.assert_allclose(found, (box * scale + (pad_x, pad_y, pad_x, pad_y))[0], atol=1.0)


def test_an_image_of_the_right_size_is_not_touched() -> None:
    image = np.random.default_rng(0).integers(0, 256, (320, 240, 3), dtype=np.uint8)
    square, placed = letterbox(image, 320)
    assert placed == (1.0, 40, 0)
    np.testing.assert_array_equal(square[:, 40:280], image)


def test_large_images_are_averaged_not_sampled() -> None:
    stripes = np.zeros((1280, 1280, 3), np.uint8)
    stripes[:, ::2] = 200
    square, _ = letterbox(stripes, 320)
    assert np.ptp(square) <= 1
    assert cv2.mean(square)[0] == pytest.approx(100, abs=1)


def test_a_batch_has_the_values_of_its_squares_in_the_order_that_networks_compute_in() -> None:
    squares = [np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8) for seed in range(2)]
    batch = as_batch(squares)
    assert batch.dtype == np.float32
    for planes, square in zip(batch, squares):
        np.testing.assert_array_equal(planes, square.transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    assert torch.from_numpy(batch).is_contiguous(memory_format=torch.channels_last)
