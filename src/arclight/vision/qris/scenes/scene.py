"""Draw a whole scene: background, carriers of codes, distractors, occluders, and the camera.

`generate` draws each scene by `draw_scene`; `fraud` and `motion` reuse its `Canvas`. A new carrier goes into `_CARRIERS`, and
``merchants.CARRIER_KINDS`` counts it. Another order of random draws changes every generated data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes import posters, prints
from arclight.vision.qris.scenes.backgrounds import background, plain, soften, studio
from arclight.vision.qris.scenes.camera import (
    Bend,
    Matrix,
    PlacedSprite,
    bend_sprite,
    outline,
    photograph,
    project,
    scaled_to,
    surface_light,
    view,
)
from arclight.vision.qris.scenes.contents import Content, choose
from arclight.vision.qris.scenes.distractors import distractor, fingers, hand, strap
from arclight.vision.qris.scenes.drawing import Sprite, cv2
from arclight.vision.qris.scenes.merchants import MerchantStyle
from arclight.vision.qris.scenes.symbols import PrintedCode

COARSE = 160
"""Side of the map on which overlaps are judged, cells."""
MAX_OCCLUSION = 0.4
"""Largest share of a code that an occluder may cover; one that would cover more is left out."""

_CARRIERS: tuple[tuple[posters.Draw, float], ...] = (
    (posters.official_poster, 3), (posters.own_poster, 2), (posters.table_stand, 2), (posters.sticker, 3),
    (posters.phone_screen, 2), (posters.receipt, 1), (posters.wallet_card, 2), (posters.bare_code, 3),
    (prints.document, 3), (prints.product_box, 3), (prints.code_sheet, 0.7), (prints.screen, 1),
)  # fmt: skip
_PACKS: tuple[posters.Draw, ...] = (prints.blister_pack, prints.small_pack, prints.small_label, posters.sticker)


@dataclass(frozen=True)
class SceneCode:
    """Code in a scene, in pixels: ``corners`` (4, 2) and ``box`` xyxy inside the image.

    Corners go clockwise from the code's own top left.
    """

    corners: npt.NDArray[np.float64]
    box: tuple[float, float, float, float]
    content: Content
    modules: int


@dataclass(frozen=True)
class Scene:
    """A drawn photograph, (size, size, 3) RGB, and every code in it."""

    image: Image
    codes: list[SceneCode]


@dataclass
class Canvas:
    """Scene being drawn: the picture, its codes, and the places taken on a coarse map."""

    canvas: Image
    codes: list[SceneCode] = field(default_factory=list)
    taken: list[Image] = field(default_factory=list)

    @property
    def size(self) -> int:
        return int(self.canvas.shape[0])

    def cells(self, polygon: npt.NDArray[np.float64]) -> Image:
        """Return the coarse map of a polygon in scene pixels: 1 where it covers."""
        area = np.zeros((COARSE, COARSE), np.uint8)
        points = np.clip(polygon * (COARSE / self.size), -4 * COARSE, 5 * COARSE)
        cv2.fillPoly(area, [points.round().astype(np.int32)], 1)
        return area

    def hides(self, area: Image) -> float:
        """Return the largest share of any code so far that ``area`` covers."""
        shares = [float((code & area).sum() / max(1, int(code.sum()))) for code in self.taken]
        return max(shares, default=0.0)


def draw_scene(rng: np.random.Generator, size: int, merchant: MerchantStyle | None = None) -> Scene:
    """Draw one scene of ``size`` x ``size`` pixels, from ``rng`` and the merchant's style alone."""
    story = float(rng.random())
    if merchant is not None:
        return _at(merchant, rng, size, story)
    packs = story < 0.13
    surroundings = choose(rng, (plain, studio, plain, background)) if packs else background
    stage = Canvas(np.ascontiguousarray(surroundings(rng, size)))
    _add_distractors(rng, stage, int(rng.integers(0, 4)))
    if rng.random() < 0.15:
        stage.canvas = soften(stage.canvas, float(rng.uniform(1, 6)))
    if packs:
        _add_packs(rng, stage)
    elif story < 0.62:
        add_carrier(rng, stage, float(np.exp(rng.uniform(np.log(0.13), np.log(0.85)))) * size)
    elif story < 0.94:
        share = float(np.exp(rng.uniform(np.log(0.08), np.log(0.36))))
        for _ in range(int(rng.integers(2, 5))):
            add_carrier(rng, stage, share * float(rng.uniform(0.7, 1.4)) * size)
    else:
        _add_distractors(rng, stage, int(rng.integers(3, 9)))  # a scene without codes
    _add_distractors(rng, stage, int(rng.integers(0, 3)))
    if rng.random() < 0.22:
        _add_occluder(rng, stage)
    return Scene(photograph(rng, stage.canvas, finest_module(stage.codes)), stage.codes)


def _at(merchant: MerchantStyle, rng: np.random.Generator, size: int, story: float) -> Scene:
    """Draw a scene in one merchant's style: background, carriers, sizes, sign and light."""
    stage = Canvas(np.ascontiguousarray(background(rng, size, merchant.surroundings)))
    _add_distractors(rng, stage, int(rng.integers(0, 3)))
    if rng.random() < merchant.sign_share:
        sign = merchant.sign(rng, size * float(rng.uniform(0.15, 0.45)))
        _add_loose(rng, stage, sign, rng.uniform(0.1 * size, 0.9 * size, 2), most=0.0)
    if story < merchant.empty_share:
        _add_distractors(rng, stage, int(rng.integers(2, 6)))
    else:
        for _ in range(1 if story < 0.7 else int(rng.integers(2, 4))):
            add_carrier(rng, stage, merchant.side(rng) * size, merchant.carriers)
    _add_distractors(rng, stage, int(rng.integers(0, 2)))
    if rng.random() < 0.22:
        _add_occluder(rng, stage)
    stage.canvas = merchant.lit(stage.canvas)
    return Scene(photograph(rng, stage.canvas, finest_module(stage.codes)), stage.codes)


def finest_module(codes: Sequence[SceneCode]) -> float | None:
    """Return the pixels per module of the smallest code, or None."""
    return min((_side(code.corners) / code.modules for code in codes), default=None)


def _side(corners: npt.NDArray[np.float64]) -> float:
    """Return the side of the square of equal area to a quadrilateral."""
    x, y = corners.T
    return float(np.sqrt(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2))


def add_carrier(rng: np.random.Generator, stage: Canvas, side: float, weights: Sequence[float] | None = None) -> None:
    draws, usual = zip(*_CARRIERS, strict=True)
    weights = usual if weights is None else weights
    draw = draws[int(rng.choice(len(draws), p=np.array(weights) / sum(weights)))]
    steep = 1.0 if rng.random() < 0.8 else 1.8
    placed = _add(rng, stage, draw, side, steep=steep, bent=rng.random() < 0.1)
    if placed and draw in (posters.phone_screen, posters.wallet_card) and rng.random() < 0.5:
        _add_holding_hand(rng, stage, placed)


def _add_packs(rng: np.random.Generator, stage: Canvas) -> None:
    """Add a group of small packs on a table, each with a small label."""
    share = float(np.exp(rng.uniform(np.log(0.045), np.log(0.12))))
    kinds = [choose(rng, _PACKS) for _ in range(2)]
    for _ in range(int(rng.integers(2, 10))):
        side = share * float(rng.uniform(0.8, 1.25)) * stage.size
        _add(rng, stage, choose(rng, kinds), side, steep=0.6, bent=rng.random() < 0.12)


def _add(
    rng: np.random.Generator, stage: Canvas, draw: posters.Draw, side: float, *, steep: float, bent: bool
) -> PlacedSprite | None:
    """Draw a carrier whose code spans about ``side`` pixels, hiding no other; None without room."""
    item = draw(rng, max(side * 1.15, 48.0))
    if not item.codes:
        return None
    bend: Bend | None = None
    if bent:
        item, bend = bend_sprite(rng, item)
    return add_sprite(rng, stage, item, side, steep=steep, bend=bend)


def add_sprite(
    rng: np.random.Generator,
    stage: Canvas,
    item: Sprite,
    side: float,
    *,
    steep: float,
    bend: Bend | None = None,
    framed: Sequence[PrintedCode] = (),
) -> PlacedSprite | None:
    """Place a sprite with codes where it hides hardly any other; None if there is no room.

    Its first code is about ``side`` pixels. If codes are ``framed``, they take the place of the thing's own in
    deciding where it lies.
    """
    height, width = item.image.shape[:2]
    for _ in range(5):
        matrix = view(rng, width, height, steep=steep)
        around = replace(item, codes=list(framed)) if framed else item
        placed = replace(_moved_inside(rng, stage.size, PlacedSprite(around, matrix, bend), side), item=item)
        quad = project([[0, 0], [width, 0], [width, height], [0, height]], placed.matrix)
        hulls = [placed.to_scene(outline(code.corners)) for code in item.codes]
        areas = [stage.cells(hull) for hull in hulls]
        if stage.hides(stage.cells(quad)) > 0.03 or any((a.sum() == 0) for a in areas):
            continue
        _composite(rng, stage, placed)
        for code, hull, area in zip(item.codes, hulls, areas, strict=True):
            stage.taken.append(area)
            stage.codes.append(seen_code(stage.size, placed.to_scene(code.corners), hull, code.content, code.modules))
        return placed
    return None


def seen_code(
    size: int, corners: npt.NDArray[np.float64], hull: npt.NDArray[np.float64], content: Content, modules: int
) -> SceneCode:
    low, high = hull.min(0).clip(0, size), hull.max(0).clip(0, size)
    return SceneCode(corners, (float(low[0]), float(low[1]), float(high[0]), float(high[1])), content, modules)


def _moved_inside(rng: np.random.Generator, size: int, placed: PlacedSprite, side: float) -> PlacedSprite:
    """Return the placement, scaled so that its first code spans ``side``, inside the picture.

    It is shifted so that all codes are in the picture.
    """
    codes = placed.item.codes
    factor = side / _side(placed.to_scene(codes[0].corners))
    points = np.concatenate([placed.to_scene(outline(code.corners)) for code in codes]) * factor
    extent = points.max(0) - points.min(0)
    room = size * 0.97
    if extent.max() > room:
        shrink = room / float(extent.max())
        factor, points, extent = factor * shrink, points * shrink, extent * shrink
    corner = rng.uniform(0.015 * size, np.maximum(size * 0.985 - extent, 0.015 * size + 1e-6))
    if rng.random() < 0.04:  # a code cut by the edge of the picture
        corner = corner + rng.choice([-1, 1], 2) * (rng.random(2) < 0.5) * extent * 0.2
    return replace(placed, matrix=scaled_to(placed.matrix, factor, corner - points.min(0)))


def _composite(rng: np.random.Generator, stage: Canvas, placed: PlacedSprite, *, shadow: float = 0.6) -> None:
    """Blend an item into the picture, with its light and, with probability ``shadow``, a shadow."""
    image, mask, matrix = _shrunk(placed.item, placed.matrix)
    height, width = image.shape[:2]
    quad = project([[0, 0], [width, 0], [width, height], [0, height]], matrix)
    size = stage.size
    margin = 12
    x0, y0 = (int(v) for v in np.floor(quad.min(0) - margin).clip(0, size))
    x1, y1 = (int(v) for v in np.ceil(quad.max(0) + margin).clip(0, size))
    if x1 - x0 < 2 or y1 - y0 < 2:
        return
    local = scaled_to(matrix, 1.0, (-x0, -y0))
    window = (x1 - x0, y1 - y0)
    front = cv2.warpPerspective(surface_light(rng, image), local, window, borderMode=cv2.BORDER_REPLICATE)
    alpha = cv2.warpPerspective(mask, local, window).astype(np.float32) / 255
    region = stage.canvas[y0:y1, x0:x1]
    if rng.random() < shadow:
        shift = np.array([[1, 0, rng.uniform(-6, 6)], [0, 1, rng.uniform(0, 8)]])
        dark = cv2.warpAffine(alpha, shift, window)
        dark = 1 - cv2.blur(dark, (int(rng.integers(2, 12)),) * 2) * float(rng.uniform(0.15, 0.6))
        region = cv2.multiply(region, cv2.merge([dark, dark, dark]), dtype=cv2.CV_8U)
    stage.canvas[y0:y1, x0:x1] = cv2.blendLinear(front, np.ascontiguousarray(region), alpha, 1 - alpha)


def _shrunk(item: Sprite, matrix: Matrix) -> tuple[Image, Image, Matrix]:
    """Reduce the item by area averaging if the view would skip its pixels."""
    height, width = item.image.shape[:2]
    quad = project([[0, 0], [width, 0], [width, height], [0, height]], matrix)
    scale = _side(quad) / float(np.sqrt(width * height))
    if scale > 0.75:
        return item.image, item.mask, matrix
    reduced = (max(2, round(width * scale * 1.1)), max(2, round(height * scale * 1.1)))
    image = cv2.resize(item.image, reduced, interpolation=cv2.INTER_AREA)
    mask = cv2.resize(item.mask, reduced, interpolation=cv2.INTER_AREA)
    return image, mask, matrix @ np.diag([width / reduced[0], height / reduced[1], 1.0])


def _add_distractors(rng: np.random.Generator, stage: Canvas, count: int) -> None:
    for _ in range(count):
        _add_loose(rng, stage, distractor(rng, stage.size), rng.uniform(0, stage.size, 2), most=0.02)


def _add_loose(
    rng: np.random.Generator, stage: Canvas, item: Sprite, centre: npt.NDArray[np.float64], *, most: float
) -> bool:
    """Lay a thing without codes around ``centre`` unless it hides more than ``most`` of a code."""
    height, width = item.image.shape[:2]
    matrix = view(rng, width, height, steep=1.0)
    middle = project([[width / 2, height / 2]], matrix)[0]
    placed = PlacedSprite(item, scaled_to(matrix, 1.0, centre - middle))
    quad = project([[0, 0], [width, 0], [width, height], [0, height]], placed.matrix)
    if stage.hides(stage.cells(quad)) > most:
        return False
    _composite(rng, stage, placed, shadow=0.4)
    return True


def _add_holding_hand(rng: np.random.Generator, stage: Canvas, placed: PlacedSprite) -> None:
    """Add a hand at the lower edge of a phone or card."""
    height, width = placed.item.image.shape[:2]
    grip = project([[width * float(rng.uniform(0, 1)), height]], placed.matrix)[0]
    reach = _side(project([[0, 0], [width, 0], [width, height], [0, height]], placed.matrix))
    item = choose(rng, (hand, fingers))(rng, max(24.0, reach * float(rng.uniform(0.5, 0.9))))
    _add_loose(rng, stage, item, grip, most=0.05)


def _add_occluder(rng: np.random.Generator, stage: Canvas) -> None:
    """Add a finger, cable or strap over part of a code, or anywhere if there is none."""
    if not stage.codes:
        item = choose(rng, (hand, fingers, strap))(rng, stage.size * float(rng.uniform(0.15, 0.6)))
        _add_loose(rng, stage, item, rng.uniform(0, stage.size, 2), most=0.0)
        return
    code = stage.codes[int(rng.integers(len(stage.codes)))]
    side = _side(code.corners)
    item = choose(rng, (fingers, strap))(rng, max(12.0, side * float(rng.uniform(0.4, 1.2))))
    corner = code.corners[int(rng.integers(4))]
    away = (corner - code.corners.mean(0)) * float(rng.uniform(0.0, 0.6))
    _add_loose(rng, stage, item, corner + away, most=MAX_OCCLUSION)
