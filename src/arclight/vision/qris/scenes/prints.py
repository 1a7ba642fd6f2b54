"""Draw other printed carriers of codes: text pages, product boxes, packs, sheets, screens.

`scene` chooses among these carriers (`_CARRIERS`, `_PACKS`); each ``draw`` is as in `posters`. Another order of random draws changes every
generated data set.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.contents import any_content, choose, digits, other_content, words
from arclight.vision.qris.scenes.distractors import barcode
from arclight.vision.qris.scenes.drawing import (
    FONTS,
    Sprite,
    any_colour,
    around,
    blank,
    contrasting,
    cv2,
    muted,
    pale,
    paragraph,
    rounded,
    solid,
    vivid,
    write,
    write_centred,
)
from arclight.vision.qris.scenes.symbols import Look, PrintedCode, random_look, stamp


def document(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a page of running text around one or two codes."""
    paper = pale(rng)
    wide = around(side, rng.uniform(0.18, 0.6))
    canvas = blank(wide, wide * rng.uniform(0.9, 1.45), paper)
    height, width = canvas.shape[:2]
    look = Look(paper=paper, quiet=float(rng.uniform(0.5, 4)))
    taken: list[tuple[float, float, float, float]] = []
    codes: list[PrintedCode] = []
    for _ in range(1 if rng.random() < 0.8 else 2):
        half = side * rng.uniform(0.55, 0.65)
        if 2 * half > min(width, height):
            continue
        x, y = rng.uniform(half, width - half), rng.uniform(half, height - half)
        box = (x - half, y - half, x + half, y + half)
        if any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
            continue
        taken.append(box)
        codes.append(stamp(rng, canvas, (x, y), side, any_content(rng, 0.3), look=look))
    margin = width * rng.uniform(0.02, 0.1)
    size = max(3.0, width * rng.uniform(0.011, 0.03))
    ink = contrasting(paper)
    paragraph(rng, canvas, (margin, margin, width - margin, height - margin), size, ink, around=taken)
    return Sprite(canvas, solid(canvas), codes)


def product_box(rng: np.random.Generator, side: float) -> Sprite:
    """Draw the face of a carton: brand, bands, small print, a code, sometimes a bar code."""
    ground = vivid(rng) if rng.random() < 0.5 else any_colour(rng)
    canvas = blank(around(side, rng.uniform(0.15, 0.5)), around(side, rng.uniform(0.2, 0.6)), ground)
    height, width = canvas.shape[:2]
    side = min(side, 0.8 * height, 0.8 * width)
    for _ in range(int(rng.integers(0, 3))):
        top = int(rng.integers(height))
        cv2.rectangle(canvas, (0, top), (width, top + int(rng.integers(2, height // 3 + 3))), any_colour(rng), -1)
    ink = contrasting(ground)
    write(
        canvas,
        words(rng, 1).title(),
        (width * 0.05, height * 0.3),
        height * rng.uniform(0.08, 0.2),
        ink,
        font=choose(rng, FONTS),
        bold=True,
    )
    box = (width * 0.05, height * 0.4, width * rng.uniform(0.4, 0.9), height * 0.95)
    paragraph(rng, canvas, box, max(3.0, height * rng.uniform(0.02, 0.05)), ink)
    if rng.random() < 0.4:
        bars = barcode(rng, side * rng.uniform(0.7, 1.5)).image[:height, :width]
        top, left = height - bars.shape[0], int(rng.integers(width - bars.shape[1] + 1))
        canvas[top:, left : left + bars.shape[1]] = bars
    reach = side * 0.6
    place = (rng.uniform(reach, max(reach, width - reach)), rng.uniform(reach, max(reach, height - reach)))
    code = stamp(rng, canvas, place, side, other_content(rng), look=random_look(rng, plain=0.75))
    return Sprite(canvas, solid(canvas), [code])


def small_label(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a white pharmacy label: a code, and a few lines of print beside or below it."""
    paper = int(rng.integers(215, 256))
    beside = rng.random() < 0.6
    size = (
        (side * rng.uniform(1.8, 2.8), side * rng.uniform(1.2, 1.5))
        if beside
        else (side * rng.uniform(1.2, 1.7), side * rng.uniform(1.5, 2.1))
    )
    canvas = blank(*size, (paper, paper, paper))
    height, width = canvas.shape[:2]
    look = Look((int(rng.integers(60)),) * 3, (paper, paper, paper), 1.0)
    reach = side * 0.58
    code = stamp(rng, canvas, (reach, reach if not beside else height / 2), side, other_content(rng), look=look)
    box = (
        (side * 1.25, side * 0.1, width * 0.97, height) if beside else (width * 0.05, side * 1.22, width * 0.95, height)
    )
    paragraph(rng, canvas, box, side * rng.uniform(0.09, 0.16), (30, 30, 30))
    return Sprite(canvas, solid(canvas), [code])


def _paste(canvas: Image, item: Sprite, left: float, top: float) -> list[PrintedCode]:
    """Draw ``item`` onto ``canvas``; its codes move along. What would fall outside moves inside."""
    high, wide = item.image.shape[:2]
    x = round(min(max(left, 0), canvas.shape[1] - wide))
    y = round(min(max(top, 0), canvas.shape[0] - high))
    canvas[y : y + high, x : x + wide] = item.image
    return [code.moved(x, y) for code in item.codes]


def _quarter_turn(item: Sprite, turns: int) -> Sprite:
    """Rotate the item by ``turns`` times 90 degrees, clockwise; codes keep their own corners."""
    for _ in range(turns % 4):
        high = item.image.shape[0]
        codes = [
            replace(code, corners=np.stack([high - code.corners[:, 1], code.corners[:, 0]], 1).astype(np.float32))
            for code in item.codes
        ]
        item = Sprite(np.rot90(item.image, -1).copy(), np.rot90(item.mask, -1).copy(), codes)
    return item


def blister_pack(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a strip of tablets in foil or plastic with a small label stuck on it."""
    label = _quarter_turn(small_label(rng, side), int(rng.integers(4)))
    high, wide = label.image.shape[:2]
    foil = choose(rng, ((190, 192, 195), (60, 35, 30), (225, 225, 228), (70, 120, 190), muted(rng)))
    canvas = blank(wide * rng.uniform(1.1, 2.2), high * rng.uniform(1.3, 3.2), foil)
    height, width = canvas.shape[:2]
    pill = side * rng.uniform(0.25, 0.5)
    colour = choose(rng, (vivid, pale, muted))(rng)
    rim = contrasting(foil)
    stretch = rng.uniform(1.0, 1.9)
    for y in np.arange(pill, height - pill * 0.5, pill * 2.3 * stretch):
        for x in np.arange(pill * 1.2, width - pill * 0.5, pill * 2.4):
            centre = (round(x), round(y))
            axes = (max(1, round(pill)), max(1, round(pill * stretch)))
            cv2.ellipse(canvas, centre, axes, 0, 0, 360, rim, 1, cv2.LINE_AA)
            cv2.ellipse(
                canvas,
                centre,
                (max(1, round(pill * 0.8)), max(1, round(pill * stretch * 0.8))),
                0,
                0,
                360,
                colour,
                -1,
                cv2.LINE_AA,
            )
            glint = (round(x - pill * 0.3), round(y - pill * 0.4))
            cv2.circle(canvas, glint, max(1, round(pill * 0.15)), (250, 250, 250), -1, cv2.LINE_AA)
    codes = _paste(canvas, label, rng.uniform(0, width - wide), rng.uniform(0, height - high))
    return Sprite(canvas, rounded(canvas, side * 0.2), codes)


def small_pack(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a long carton or tube with large print and a small label stuck on it."""
    label = _quarter_turn(small_label(rng, side), int(rng.integers(4)))
    high, wide = label.image.shape[:2]
    ground = choose(rng, (vivid, pale, any_colour))(rng)
    canvas = blank(wide * rng.uniform(1.3, 3.0), high * rng.uniform(1.05, 2.2), ground)
    height, width = canvas.shape[:2]
    split = int(rng.uniform(0.1, 0.9) * width)
    cv2.rectangle(canvas, (0, 0), (split, height), any_colour(rng), -1)
    size = height * rng.uniform(0.1, 0.2)
    for row in (0.3, 0.7):
        write(
            canvas,
            words(rng, 2).title(),
            (width * 0.04, height * row),
            size,
            contrasting(ground),
            font=choose(rng, FONTS),
            bold=True,
        )
    write(canvas, f"{digits(rng, 3)} mg", (width * 0.04, height * 0.92), size * 0.6, contrasting(ground))
    codes = _paste(canvas, label, rng.uniform(0, width - wide), rng.uniform(0, height - high))
    return Sprite(canvas, rounded(canvas, side * rng.uniform(0, 0.3)), codes)


def code_sheet(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a sheet of codes in rows, as test charts, tickets and label rolls have."""
    rows, columns = int(rng.integers(1, 3)), int(rng.integers(2, 4))
    pitch = side * rng.uniform(1.2, 1.8)
    paper = pale(rng)
    canvas = blank(columns * pitch, rows * pitch, paper)
    look = random_look(rng, plain=0.8)
    codes = []
    for row in range(rows):
        for column in range(columns):
            place = ((column + 0.5) * pitch, (row + 0.5) * pitch)
            codes.append(stamp(rng, canvas, place, side, any_content(rng), look=look))
    return Sprite(canvas, solid(canvas), codes)


def screen(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a monitor or television that shows a code among windows and text."""
    ground = choose(rng, (vivid, pale, muted))(rng)
    canvas = blank(around(side, rng.uniform(0.2, 0.5)), around(side, rng.uniform(0.35, 0.75)), (25, 25, 27))
    height, width = canvas.shape[:2]
    rim = max(1, round(width * 0.02))
    canvas[rim : height - rim, rim : width - rim] = ground
    write_centred(canvas, words(rng, 2).upper(), height * 0.13, height * 0.05, contrasting(ground), bold=True)
    box = (width * 0.05, height * 0.2, width * 0.95, height * 0.95)
    paragraph(rng, canvas, box, height * rng.uniform(0.02, 0.04), contrasting(ground))
    place = (rng.uniform(side * 0.6, width - side * 0.6), height * 0.55)
    code = stamp(rng, canvas, place, side, any_content(rng), look=random_look(rng, plain=0.7))
    return Sprite(canvas, solid(canvas), [code])
