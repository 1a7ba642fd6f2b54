"""Draw pairs of photos of one stand: with its own code, and with a fraudulent sticker.

Both photos of a pair share sheet, view, light and the camera's random draws, so that little but the sticker tells them apart (blur is
bounded by the smallest code of each).

``arclight demo`` draws pairs to verify; ``benchmarks/qr_photos.py`` measures verification on others, and fits ``verification.tampering`` on
them. Another order of random draws changes these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.qris.payload.codec import parse
from arclight.vision.qris.scenes import posters
from arclight.vision.qris.scenes.backgrounds import background
from arclight.vision.qris.scenes.camera import Matrix, bend_sprite, photograph
from arclight.vision.qris.scenes.contents import Content, qris_content
from arclight.vision.qris.scenes.drawing import (
    Sprite,
    blank,
    contrasting,
    cv2,
    pale,
    rounded,
    solid,
    write_centred,
)  # fmt: skip
from arclight.vision.qris.scenes.scene import Canvas, Scene, add_sprite, finest_module
from arclight.vision.qris.scenes.symbols import Look, PrintedCode, stamp

Placement = Literal["over", "beside"]
BESIDE_SHARE = 0.1
"""Share of stickers that are put next to the code instead of over it."""
NAMESAKE_SHARE = 0.5
"""Share of stickers that name the shop that they steal from."""

_STANDS: tuple[tuple[posters.Draw, float], ...] = (
    (posters.official_poster, 0.55),
    (posters.own_poster, 0.2),
    (posters.table_stand, 0.25),
)


@dataclass(frozen=True)
class Pair:
    """Two photos of one stand, and what its own code and the sticker's say."""

    clean: Scene
    forged: Scene
    poster: Image
    """The sheet itself, from the front: what a registry would hold of it."""
    own: Content
    sticker: Content
    placement: Placement


def draw_pair(rng: np.random.Generator, size: int = 960) -> Pair:
    """Draw a stand twice, without and with a sticker, as (size, size, 3) photos.

    They show its code at reading distance.
    """
    side = size * float(rng.uniform(0.24, 0.5))
    own = _stand(rng, side)
    content = own.codes[0].content
    placement: Placement = "beside" if rng.random() < BESIDE_SHARE else "over"
    forged, sticker = pasted(rng, own, placement)
    seed = int(rng.integers(2**32))
    framed = [*own.codes, *forged.codes]
    clean, stuck = (_photo(np.random.default_rng(seed), item, size, side, framed) for item in (own, forged))
    return Pair(clean, stuck, own.image, content, sticker, placement)


def _stand(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a sheet that carries one static payment code."""
    draws, shares = zip(*_STANDS, strict=True)
    while True:
        item: Sprite = draws[int(rng.choice(len(draws), p=shares))](rng, side * 1.15)
        codes = item.codes
        if len(codes) == 1 and codes[0].content.kind == "qris" and not parse(codes[0].content.text).is_dynamic:
            return item


def _photo(rng: np.random.Generator, item: Sprite, size: int, side: float, framed: list[PrintedCode]) -> Scene:
    stage = Canvas(np.ascontiguousarray(background(rng, size)))
    item, bend = bend_sprite(rng, item) if rng.random() < 0.05 else (item, None)
    add_sprite(rng, stage, item, side, steep=0.6, bend=bend, framed=framed)
    return Scene(photograph(rng, stage.canvas, finest_module(stage.codes)), stage.codes)


def pasted(rng: np.random.Generator, item: Sprite, placement: Placement = "over") -> tuple[Sprite, Content]:
    """Return a sheet with a sticker over or beside its code, and the sticker's content."""
    code = item.codes[0]
    side = float(np.linalg.norm(code.corners[1] - code.corners[0]))
    content = qris_content(rng, dynamic_share=0.1)
    if rng.random() < NAMESAKE_SHARE:
        content = qris_content(
            rng, merchant=code.content.merchant, city=parse(code.content.text).city, dynamic_share=0.1
        )
    scale = float(rng.uniform(0.85, 1.2)) if placement == "over" else float(rng.uniform(0.6, 0.9))
    sticker = paper_sticker(rng, content, side * scale)
    height, width = sticker.image.shape[:2]
    centre = code.corners.mean(0) + rng.normal(0, 0.04, 2) * side
    if placement == "beside":
        way = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], float)[int(rng.integers(4))]
        centre = centre + way * (side / 2 + max(height, width) / 2) * float(rng.uniform(1.0, 1.15))
        centre = np.clip(
            centre, [width / 2, height / 2], [item.image.shape[1] - width / 2, item.image.shape[0] - height / 2]
        )
    middle = sticker.codes[0].corners.mean(0)
    matrix = cv2.getRotationMatrix2D((float(middle[0]), float(middle[1])), float(rng.normal(0, 2.5)), 1.0)
    matrix[:, 2] += centre - middle
    image = _laid(rng, item.image, sticker, matrix)
    corners = sticker.codes[0].corners @ matrix[:, :2].T + matrix[:, 2]
    printed = PrintedCode(corners.astype(np.float32), content, sticker.codes[0].modules)
    covered = cv2.pointPolygonTest(corners.astype(np.float32), tuple(map(float, code.corners.mean(0))), False) >= 0
    return Sprite(image, item.mask, [printed] if covered else [printed, code]), content


def paper_sticker(rng: np.random.Generator, content: Content, side: float) -> Sprite:
    """Draw a label cut to its code, with or without a name and a number above it."""
    white = int(rng.integers(228, 256))
    paper = pale(rng) if rng.random() < 0.15 else (white, white, white)
    margin = float(rng.uniform(1.04, 1.35))
    lines = [line for line in ("QRIS", content.merchant, f"NMID : {content.nmid}") if rng.random() < 0.45]
    head = 0.11 * side * len(lines)
    canvas = blank(side * margin, side * margin + head, paper)
    height, width = canvas.shape[:2]
    for row, line in enumerate(lines):
        write_centred(canvas, line or "", 0.11 * side * (row + 0.9), 0.065 * side, contrasting(paper), bold=row == 0)
    grey = int(rng.integers(0, 50))
    look = Look((grey, grey, grey), paper, 0.0)
    code = stamp(rng, canvas, (width / 2, height - width / 2), side, content, look=look)
    mask = rounded(canvas, width * float(rng.uniform(0.02, 0.08))) if rng.random() < 0.4 else solid(canvas)
    return Sprite(canvas, mask, [code])


def _laid(rng: np.random.Generator, sheet: Image, sticker: Sprite, matrix: Matrix) -> Image:
    """Blend the sticker into the sheet, with its gloss, its shadow and the light on its rim."""
    size = sheet.shape[1::-1]
    gloss = cv2.convertScaleAbs(sticker.image, alpha=float(np.clip(rng.normal(0.98, 0.06), 0.8, 1.1)))
    front = cv2.warpAffine(gloss, matrix, size, flags=cv2.INTER_AREA, borderMode=cv2.BORDER_REPLICATE)
    alpha = cv2.warpAffine(sticker.mask, matrix, size).astype(np.float32) / 255
    reach = max(1.0, sticker.image.shape[1] * float(rng.uniform(0.003, 0.012)))
    way = rng.normal(0, 1, 2)
    way = way / max(float(np.linalg.norm(way)), 1e-6) * reach
    moved = cv2.warpAffine(alpha, np.array([[1, 0, way[0]], [0, 1, way[1]]]), size)
    shade = 1 - cv2.GaussianBlur(moved, (0, 0), reach * float(rng.uniform(0.4, 1.2))) * float(rng.uniform(0.1, 0.5))
    below = cv2.multiply(sheet, cv2.merge([shade.astype(np.float32)] * 3), dtype=cv2.CV_8U)
    rim = np.clip(alpha - cv2.warpAffine(alpha, np.array([[1, 0, way[0]], [0, 1, way[1]]]), size), 0, 1)
    light = 1 + rim * float(rng.uniform(-0.25, 0.2))
    front = cv2.multiply(front, cv2.merge([light.astype(np.float32)] * 3), dtype=cv2.CV_8U)
    return np.asarray(cv2.blendLinear(front, below, alpha, 1 - alpha), np.uint8)
