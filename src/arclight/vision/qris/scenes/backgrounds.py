"""Draw backgrounds: surfaces, rooms, shelves, streets and clutter, like photographs.

No photograph is needed. Overlapping shapes of every size ("dead leaves") and noise at every scale have
the edges and spectra of natural images (Lee, Mumford and Huang 2001), which is what a detector must learn to ignore.

`scene`, `fraud` and `motion` draw a `background`, `camera` takes noise and blur, and a merchant has weights of its own for `BACKGROUNDS`. Another
order of random draws, or of `BACKGROUNDS`, changes every generated data set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.contents import choose
from arclight.vision.qris.scenes.drawing import (
    any_colour,
    blank,
    contrasting,
    cv2,
    muted,
    pale,
    paragraph,
    vivid,
    write,
)
from arclight.vision.qris.scenes.symbols import Colour

Field = npt.NDArray[np.float32]


@cache
def noise_bank() -> Field:
    """Draw one square of white noise (standard normal) that every scene cuts pieces from."""
    return np.random.default_rng(20).standard_normal((1024, 1024), dtype=np.float32)


def white_noise(rng: np.random.Generator, height: int, width: int) -> Field:
    """Draw standard normal noise (height, width): a piece of `noise_bank` if it is large enough."""
    bank = noise_bank()
    if height > bank.shape[0] or width > bank.shape[1]:
        return rng.standard_normal((height, width), dtype=np.float32)
    y = int(rng.integers(bank.shape[0] - height + 1))
    x = int(rng.integers(bank.shape[1] - width + 1))
    return bank[y : y + height, x : x + width]


def clouds(rng: np.random.Generator, size: int, *, roughness: float = 1.0, stretch: tuple[int, int] = (1, 1)) -> Field:
    """Draw noise summed over octaves, (size, size) in [0, 1].

    ``stretch`` lengthens it along y and x.
    """
    half = size // 2
    total = np.zeros((half, half), np.float32)
    cells, weight = 3, 1.0
    while cells < half:
        rows, columns = max(2, cells // stretch[0]), max(2, cells // stretch[1])
        octave = white_noise(rng, rows, columns)
        total += weight * cv2.resize(octave, (half, half), interpolation=cv2.INTER_LINEAR)
        cells, weight = cells * 2, weight * 0.5 * roughness
    total = cv2.normalize(total, None, 0.0, 1.0, cv2.NORM_MINMAX)
    return np.asarray(cv2.resize(total, (size, size), interpolation=cv2.INTER_LINEAR), np.float32)


def _coloured(field: Field, colours: list[Colour]) -> Image:
    """Return ``field`` in [0, 1] as RGB along the line through ``colours``."""
    places = np.linspace(0, 255, len(colours))
    table = np.stack([np.interp(np.arange(256), places, [c[i] for c in colours]) for i in (2, 1, 0)], -1)
    levels = cv2.convertScaleAbs(field, alpha=255)
    return np.asarray(cv2.applyColorMap(levels, table.round().astype(np.uint8)[:, None])[..., ::-1])


def _near(rng: np.random.Generator, colour: Colour, spread: int) -> Colour:
    shifted = np.clip(np.array(colour) + rng.integers(-spread, spread + 1, 3), 0, 255)
    return int(shifted[0]), int(shifted[1]), int(shifted[2])


def plain(rng: np.random.Generator, size: int) -> Image:
    """Draw a table, wall or floor of nearly one colour."""
    base = choose(rng, (muted, pale, any_colour))(rng)
    return _coloured(clouds(rng, size, roughness=rng.uniform(0.3, 1.4)), [base, _near(rng, base, 30)])


def studio(rng: np.random.Generator, size: int) -> Image:
    """Draw the white or dark seamless ground of product pictures."""
    light = int(rng.integers(225, 256)) if rng.random() < 0.7 else int(rng.integers(5, 60))
    ramp = np.linspace(0, 1, size, dtype=np.float32)[:, None] * np.ones((1, size), np.float32)
    other = max(0, light - int(rng.integers(0, 50)))
    return _coloured(ramp, [(light, light, light), (other, other, other)])


def marble(rng: np.random.Generator, size: int) -> Image:
    """Draw strongly coloured noise at every scale: stone, rust, foliage out of focus."""
    return _coloured(
        clouds(rng, size, roughness=rng.uniform(0.8, 1.6)), [any_colour(rng) for _ in range(int(rng.integers(2, 5)))]
    )


def wood(rng: np.random.Generator, size: int) -> Image:
    """Draw planks with grain."""
    brown: Colour = (int(rng.integers(70, 215)), int(rng.integers(50, 160)), int(rng.integers(25, 110)))
    dark = tuple(int(v * rng.uniform(0.55, 0.85)) for v in brown)
    field = clouds(rng, size, roughness=1.3, stretch=(12, 1) if rng.random() < 0.5 else (1, 12))
    rings = 0.5 + 0.5 * np.sin(field * rng.uniform(15, 60))
    picture = _coloured((0.6 * field + 0.4 * rings).astype(np.float32), [brown, (dark[0], dark[1], dark[2])])
    picture = np.ascontiguousarray(picture)
    if rng.random() < 0.5:
        pitch = int(rng.integers(size // 8, size // 2))
        for at in range(int(rng.integers(pitch)), size, pitch):
            cv2.line(picture, (0, at), (size, at), (dark[0] // 2, dark[1] // 2, dark[2] // 2), int(rng.integers(1, 5)))
    return picture


def cloth(rng: np.random.Generator, size: int) -> Image:
    """Draw cloth: weave, stripes or checks."""
    y, x = np.mgrid[0:size, 0:size].astype(np.float32)
    period = rng.uniform(4, 60)
    wave = np.sin(x * (6.2832 / period)) + rng.choice([0.0, 1.0, -1.0]) * np.sin(
        y * (6.2832 / (period * rng.uniform(0.5, 2)))
    )
    hard = np.sign(wave) * 0.25 + 0.5 if rng.random() < 0.5 else wave * 0.2 + 0.5
    field = np.clip(hard + 0.3 * (clouds(rng, size) - 0.5), 0, 1)
    base = any_colour(rng)
    return _coloured(field.astype(np.float32), [base, _near(rng, base, 90)])


def masonry(rng: np.random.Generator, size: int) -> Image:
    """Draw bricks, tiles or paving: cells of slightly different colours between joints."""
    rows, columns = int(rng.integers(4, 26)), int(rng.integers(3, 16))
    base, joint = any_colour(rng), muted(rng)
    picture = blank(size, size, joint)
    gap = max(1, round(size / rows * rng.uniform(0.04, 0.16)))
    spread = int(rng.integers(4, 45))
    high, wide = size / rows, size / columns
    shift = wide / 2 if rng.random() < 0.6 else 0.0
    for row in range(rows):
        for column in range(-1, columns + 1):
            left, top = column * wide + shift * (row % 2), row * high
            low, high_corner = (round(left) + gap, round(top) + gap), (round(left + wide), round(top + high))
            cv2.rectangle(picture, low, high_corner, _near(rng, base, spread), -1)
    return picture


def clutter(rng: np.random.Generator, size: int) -> Image:
    """Draw overlapping ellipses, boxes, sticks and polygons whose sizes follow a power law."""
    palette = [any_colour(rng) for _ in range(int(rng.integers(3, 9)))]
    picture = blank(size, size, palette[0])
    count = int(rng.integers(60, 260))
    sizes = size * 0.02 / (1 - rng.random(count) * 0.96)
    places = rng.integers(-20, size + 20, (count, 2))
    shapes = rng.integers(0, 4 if rng.random() < 0.7 else 1, count)
    turns = rng.uniform(0, 360, count)
    ratios = rng.uniform(0.2, 1.0, count)
    for (x, y), reach, shape, turn, ratio in zip(places.tolist(), sizes, shapes, turns, ratios, strict=True):
        colour = _near(rng, choose(rng, palette), 35)
        axes = (max(1, round(reach)), max(1, round(reach * ratio)))
        if shape == 0:
            cv2.ellipse(picture, (x, y), axes, turn, 0, 360, colour, -1)
        elif shape == 1:
            box = cv2.boxPoints(((x, y), (2 * reach, 2 * reach * ratio), turn))
            cv2.fillPoly(picture, [box.astype(np.int32)], colour)
        elif shape == 2:
            end = (round(x + 3 * reach * np.cos(turn)), round(y + 3 * reach * np.sin(turn)))
            cv2.line(picture, (x, y), end, colour, max(1, round(reach * 0.15)), cv2.LINE_AA)
        else:
            corners = np.array([x, y]) + rng.normal(0, reach, (int(rng.integers(3, 6)), 2))
            cv2.fillPoly(picture, [corners.astype(np.int32)], colour)
    return picture


def shelves(rng: np.random.Generator, size: int) -> Image:
    """Draw shelves with rows of boxes, bottles and books, most with a few words."""
    picture = blank(size, size, muted(rng))
    rows = int(rng.integers(2, 6))
    high = size / rows
    board = any_colour(rng)
    for row in range(rows):
        floor = (row + 1) * high
        x = -rng.uniform(0, 30)
        while x < size:
            wide, tall = rng.uniform(0.08, 0.9) * high, rng.uniform(0.45, 0.9) * high
            colour = any_colour(rng)
            low, top = (round(x + wide), round(floor)), (round(x), round(floor - tall))
            cv2.rectangle(picture, top, low, colour, -1)
            band = round(floor - tall * rng.uniform(0.3, 0.8))
            cv2.rectangle(picture, (top[0], band), (low[0], round(band + tall * 0.2)), any_colour(rng), -1)
            if wide > 25:
                write(
                    picture,
                    choose(rng, ("kopi", "TEH", "Susu", "SALE", "mie", "Roti")),
                    (x + 3, band),
                    tall * 0.09,
                    contrasting(colour),
                )
            x += wide * rng.uniform(1.0, 1.15)
        cv2.rectangle(picture, (0, round(floor - high * 0.06)), (size, round(floor)), board, -1)
    return picture


def room(rng: np.random.Generator, size: int) -> Image:
    """Draw a room: wall, floor or table, and a few doors, windows, monitors or pictures."""
    wall = _coloured(clouds(rng, size, roughness=0.5), [c := muted(rng), _near(rng, c, 25)])
    picture = np.ascontiguousarray(wall)
    for _ in range(int(rng.integers(1, 7))):
        x, y = rng.integers(-size // 5, size, 2)
        wide, tall = rng.integers(size // 12, size // 2, 2)
        corners = np.array([[x, y], [x + wide, y], [x + wide, y + tall], [x, y + tall]]) + rng.normal(
            0, size * 0.02, (4, 2)
        )
        cv2.fillPoly(picture, [corners.astype(np.int32)], any_colour(rng), cv2.LINE_AA)
        if rng.random() < 0.6:
            cv2.polylines(
                picture, [corners.astype(np.int32)], True, any_colour(rng), int(rng.integers(1, 9)), cv2.LINE_AA
            )
    if rng.random() < 0.7:
        level = int(rng.uniform(0.45, 0.9) * size)
        tilt = int(rng.normal(0, size * 0.04))
        floor = np.array([[0, level], [size, level + tilt], [size, size], [0, size]], np.int32)
        cv2.fillPoly(picture, [floor], muted(rng), cv2.LINE_AA)
    return picture


def street(rng: np.random.Generator, size: int) -> Image:
    """Draw a street: sky, green blobs, house fronts and ground."""
    sky: Colour = (int(rng.integers(130, 240)), int(rng.integers(160, 240)), int(rng.integers(190, 256)))
    picture = blank(size, size, sky)
    horizon = int(size * rng.uniform(0.35, 0.7))
    x = 0
    while x < size:
        wide, top = int(rng.integers(size // 8, size // 2)), int(rng.uniform(0.0, 0.9) * horizon)
        colour = muted(rng)
        cv2.rectangle(picture, (x, top), (x + wide, horizon), colour, -1)
        pane = max(4, wide // int(rng.integers(4, 10)))
        glass = any_colour(rng)
        for left in range(x + pane // 2, x + wide - pane // 2, pane * 2):
            for up in range(top + pane // 2, horizon - pane, pane * 2):
                cv2.rectangle(picture, (left, up), (left + pane, up + pane), glass, -1)
        x += wide
    cv2.rectangle(picture, (0, horizon), (size, size), muted(rng), -1)
    for x, y in (
        (rng.normal([size * rng.random(), horizon], size * 0.12, (int(rng.integers(0, 120)), 2))).astype(int).tolist()
    ):
        green: Colour = (int(rng.integers(20, 110)), int(rng.integers(60, 160)), int(rng.integers(10, 80)))
        cv2.ellipse(
            picture,
            (x, y),
            (int(rng.integers(4, 22)), int(rng.integers(3, 14))),
            float(rng.uniform(0, 180)),
            0,
            360,
            green,
            -1,
        )
    return picture


def bokeh(rng: np.random.Generator, size: int) -> Image:
    """Draw lights out of focus."""
    picture = marble(rng, size)
    picture = np.ascontiguousarray(cv2.convertScaleAbs(picture, alpha=rng.uniform(0.2, 0.8)))
    glow = np.zeros_like(picture)
    for x, y in rng.integers(0, size, (int(rng.integers(4, 40)), 2)).tolist():
        cv2.circle(glow, (x, y), int(rng.integers(size // 60, size // 12)), any_colour(rng), -1, cv2.LINE_AA)
    return np.asarray(cv2.addWeighted(picture, 1.0, glow, rng.uniform(0.3, 0.8), 0))


def print_page(rng: np.random.Generator, size: int) -> Image:
    """Draw a page, board or newspaper that fills the view."""
    paper = choose(rng, (pale, pale, vivid, muted))(rng)
    picture = blank(size, size, paper)
    height = size * rng.uniform(0.008, 0.03)
    paragraph(rng, picture, (0, 0, size, size), max(5.0, height), contrasting(paper))
    return picture


BACKGROUNDS: tuple[tuple[Callable[[np.random.Generator, int], Image], float], ...] = (
    (plain, 0.24), (studio, 0.05), (marble, 0.06), (wood, 0.1), (cloth, 0.06), (masonry, 0.07), (clutter, 0.12),
    (shelves, 0.06), (room, 0.12), (street, 0.06), (bokeh, 0.03), (print_page, 0.03),
)  # fmt: skip


def background(rng: np.random.Generator, size: int, shares: Sequence[float] | None = None) -> Image:
    """Draw a random background (size, size, 3) RGB, seen from some angle, in or out of focus.

    shares: probabilities of BACKGROUNDS, in their order; their own if not given.
    """
    draws, usual = zip(*BACKGROUNDS, strict=True)
    shares = usual if shares is None else shares
    picture = draws[int(rng.choice(len(draws), p=shares))](rng, size)
    if rng.random() < 0.5:
        corners = np.array([[0, 0], [size, 0], [size, size], [0, size]], np.float32)
        turned = cv2.getRotationMatrix2D(
            (size / 2, size / 2), float(rng.uniform(-180, 180)), float(rng.uniform(1.4, 2.2))
        )
        moved = corners @ turned[:, :2].T + turned[:, 2] + rng.normal(0, size * 0.06, (4, 2))
        matrix = cv2.getPerspectiveTransform(corners, moved.astype(np.float32))
        picture = cv2.warpPerspective(picture, matrix, (size, size), borderMode=cv2.BORDER_REFLECT)
    if rng.random() < 0.45:
        picture = soften(picture, float(rng.uniform(0.5, 8)))
    return np.ascontiguousarray(picture)


def soften(picture: Image, sigma: float) -> Image:
    """Blur by a Gaussian; wide ones at a reduced size, which is cheaper and looks the same."""
    shrink = 4 if sigma > 6 else 2 if sigma > 2.5 else 1
    if shrink == 1:
        return np.asarray(cv2.GaussianBlur(picture, (0, 0), sigma), np.uint8)
    height, width = picture.shape[:2]
    small = cv2.resize(picture, (width // shrink, height // shrink), interpolation=cv2.INTER_AREA)
    small = cv2.GaussianBlur(small, (0, 0), sigma / shrink)
    return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR), np.uint8)
