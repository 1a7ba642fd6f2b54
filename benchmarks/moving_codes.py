"""Drawn moving scenes: cards with codes that drift over a background, pass behind each other and behind a pillar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np
import segno

from arclight.vision.qris.scenes.backgrounds import background
from arclight.vision.qris.scenes.contents import any_content

SIDE = 640
CARDS = 5
FRAMES = 120
HIDDEN = 0.5
"""Visible share of a code below which nobody is asked to find it."""


@dataclass(frozen=True)
class MovingFrame:
    """One picture, RGB (SIDE, SIDE, 3), and its codes."""

    image: np.ndarray
    ids: np.ndarray
    """(k,) number of each code that can be seen."""
    boxes: np.ndarray
    """(k, 4) xyxy of the parts of these that can be seen: a detector knows no more of them."""
    hidden: np.ndarray
    """(h, 4) xyxy of codes that are mostly hidden: finding them is no mistake, and no merit."""


def frames(seed: int, count: int = FRAMES, *, pillar: bool = True) -> Iterator[MovingFrame]:
    """Draw one scene, frame by frame; without a pillar the cards hide each other alone."""
    rng = np.random.default_rng(seed)
    ground = background(rng, SIDE)
    cards = [_card(rng, int(rng.integers(70, 115))) for _ in range(CARDS)]
    place = rng.uniform(0.15 * SIDE, 0.7 * SIDE, (CARDS, 2))
    speed = rng.uniform(1.5, 5, (CARDS, 2)) * rng.choice([-1, 1], (CARDS, 2)) * [1, 0.5]
    pillars = [(round(0.45 * SIDE), int(rng.integers(60, 90)), rng.integers(60, 200, 3))] if pillar else []
    for _ in range(count):
        place = place + speed
        sizes = np.array([[card.shape[1], card.shape[0]] for card, _ in cards])
        out = (place < 0) | (place + sizes > SIDE)
        speed = np.where(out, -speed, speed)
        place = place.clip(0, SIDE - sizes)
        yield _drawn(ground, cards, place, pillars, rng)


def _card(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray]:
    """A white card with a code, and the code's box on it."""
    cells = np.array(segno.make(any_content(rng).text, error="m").matrix)
    code = cv2.resize(np.where(cells, 20, 245).astype(np.uint8), (side, side), interpolation=cv2.INTER_AREA)
    margin = round(side * 0.14)
    card = np.full((side + 2 * margin, side + 2 * margin, 3), 245, np.uint8)
    card[margin : margin + side, margin : margin + side] = code[..., None]
    return card, np.array([margin, margin, margin + side, margin + side], float)


def _drawn(ground: np.ndarray, cards: list, place: np.ndarray, pillars: list, rng: np.random.Generator) -> MovingFrame:
    image, owner = ground.copy(), np.full((SIDE, SIDE), -1)
    boxes = np.empty((len(cards), 4))
    for number, ((card, box), (x, y)) in enumerate(zip(cards, place.round().astype(int))):
        height, width = card.shape[:2]
        image[y : y + height, x : x + width] = card
        owner[y : y + height, x : x + width] = number
        boxes[number] = box + np.tile([x, y], 2)
    for x, width, colour in pillars:
        image[:, x : x + width] = colour
        owner[:, x : x + width] = -2
    noisy = np.clip(image + rng.normal(0, 4, image.shape), 0, 255).astype(np.uint8)
    shares = []
    for number, (left, top, right, bottom) in enumerate(boxes.astype(int)):
        rows, columns = np.nonzero(owner[top:bottom, left:right] == number)
        shares.append(len(rows) / ((bottom - top) * (right - left)))
        if len(rows):
            boxes[number] = left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1
    seen = np.array(shares) >= HIDDEN
    return MovingFrame(cv2.GaussianBlur(noisy, (0, 0), 0.8), np.flatnonzero(seen), boxes[seen], boxes[~seen])
