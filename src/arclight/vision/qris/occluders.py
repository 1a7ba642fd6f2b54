"""Things that get in the way: fingers and hands, cables, straps."""

from __future__ import annotations

import numpy as np

from arclight.vision.qris.drawing import Item, any_colour, cv2
from arclight.vision.qris.symbols import Colour, Image

_SKIN: tuple[Colour, ...] = (
    (244, 208, 177),
    (231, 180, 143),
    (210, 157, 124),
    (186, 120, 81),
    (140, 85, 50),
    (96, 58, 38),
)


def _shaded(rng: np.random.Generator, mask: Image, colour: Colour) -> Item:
    """A rounded thing of one colour: bright in the middle, dark towards its edge."""
    depth = cv2.GaussianBlur(mask, (0, 0), max(1.0, mask.shape[0] / 22))
    shade = (0.45 + 0.55 * depth.astype(np.float32) / 255) * np.float32(rng.uniform(0.75, 1.05))
    image = shade[..., None] * np.array(colour, np.float32)
    return Item(np.clip(image, 0, 255).astype(np.uint8), mask)


def fingers(rng: np.random.Generator, side: float) -> Item:
    """One to four fingers that point up, ``side`` pixels high, with nails now and then."""
    count = int(rng.integers(1, 5))
    height = max(12, round(side))
    thick = max(3, round(height * rng.uniform(0.2, 0.3)))
    width = round(thick * (count * 1.08 + 0.4))
    mask = np.zeros((height, width), np.uint8)
    tips = []
    for finger in range(count):
        x = round(thick * (0.7 + finger * 1.08))
        top = round(thick * 0.6 + rng.uniform(0, 0.25) * height)
        lean = round(rng.normal(0, 0.12) * thick)
        cv2.line(mask, (x, top), (x + lean, height), 255, thick, cv2.LINE_AA)
        tips.append((x, top))
    colour = _SKIN[int(rng.integers(len(_SKIN)))]
    item = _shaded(rng, mask, colour)
    if rng.random() < 0.6:
        nail = tuple(min(255, int(v * 1.08) + 8) for v in colour)
        for x, y in tips:
            cv2.ellipse(item.image, (x, y), (max(1, thick // 4), max(1, thick // 3)), 0, 0, 360, nail, -1, cv2.LINE_AA)
    return item


def hand(rng: np.random.Generator, side: float) -> Item:
    """A fist or open hand from the side: a palm with fingers and an arm, ``side`` pixels high."""
    height = max(24, round(side))
    width = round(height * 0.8)
    mask = np.zeros((height, width), np.uint8)
    palm = (width // 2, round(height * 0.5))
    cv2.ellipse(mask, palm, (round(width * 0.27), round(height * 0.2)), float(rng.uniform(-30, 30)), 0, 360, 255, -1)
    cv2.line(mask, palm, (round(width * rng.uniform(0.3, 0.7)), height), 255, round(width * 0.32))
    thick = max(2, round(width * 0.13))
    for finger in range(4):
        start = (round(width * (0.3 + 0.13 * finger)), round(height * 0.42))
        end = (start[0] + round(rng.normal(0, width * 0.08)), round(height * rng.uniform(0.08, 0.3)))
        cv2.line(mask, start, end, 255, thick, cv2.LINE_AA)
    cv2.line(mask, palm, (round(width * 0.12), round(height * rng.uniform(0.25, 0.45))), 255, thick, cv2.LINE_AA)
    return _shaded(rng, mask, _SKIN[int(rng.integers(len(_SKIN)))])


def strap(rng: np.random.Generator, side: float) -> Item:
    """A cable, rubber band or strip of tape."""
    length, thick = max(8, round(side)), max(2, round(side * rng.uniform(0.02, 0.09)))
    mask = np.zeros((max(8, round(length * 0.5)), length), np.uint8)
    x = np.linspace(0, length, 24)
    y = mask.shape[0] / 2 + rng.normal(0, 0.13) * length * np.sin(x / length * rng.uniform(1, 7))
    cv2.polylines(mask, [np.stack([x, y], 1).astype(np.int32)], False, 255, thick, cv2.LINE_AA)
    return _shaded(rng, mask, any_colour(rng))
