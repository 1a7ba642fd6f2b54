"""Draw carriers of payment codes: posters, table stands, stickers, phone screens, receipts.

Every ``draw`` takes the random generator and ``side``, the pixels that the code's modules should span, and
returns a `Sprite`. The official poster follows the proportions of the real print (portrait, code about half of the width at mid height, red
triangles left and bottom right) with invented words and no logo files.

`scene` chooses a carrier, `fraud` draws stands. Another order of random draws changes every generated data set.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.contents import (
    Content,
    any_content,
    choose,
    digits,
    other_content,
    qris_content,
    words,
)
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
from arclight.vision.qris.scenes.symbols import Colour, Look, random_look, stamp

Draw = Callable[[np.random.Generator, float], Sprite]


def _triangle(canvas: Image, points: list[tuple[float, float]], colour: Colour) -> None:
    height, width = canvas.shape[:2]
    corners = np.array([[round(x * width), round(y * height)] for x, y in points], np.int32)
    cv2.fillPoly(canvas, [corners], colour, cv2.LINE_AA)


def official_poster(rng: np.random.Generator, side: float) -> Sprite:
    """Draw an official QRIS poster: word-mark, merchant, NMID, terminal, code, slogan."""
    content = qris_content(rng)
    width = side / rng.uniform(0.48, 0.6)
    canvas = blank(width, width * rng.uniform(1.29, 1.6), (255, 255, 255))
    high, wide = canvas.shape[:2]
    red: Colour = (int(rng.integers(190, 245)), int(rng.integers(20, 60)), int(rng.integers(30, 70)))
    accent = red if rng.random() < 0.85 else vivid(rng)
    edge = rng.uniform(0.3, 0.45)
    _triangle(canvas, [(0, edge), (rng.uniform(0.1, 0.22), edge + 0.12), (0, edge + 0.26)], accent)
    low = rng.uniform(0.6, 0.75)
    _triangle(canvas, [(1, low), (1, 1), (rng.uniform(0.35, 0.6), 1)], accent)
    ink: Colour = (15, 15, 15)
    write(canvas, "QRIS", (wide * 0.06, high * 0.09), wide * 0.075, ink, bold=True)
    for row, line in enumerate(("QR Code Standar", "Pembayaran Nasional")):
        write(canvas, line, (wide * 0.34, high * (0.065 + 0.025 * row)), wide * 0.026, ink)
    _triangle(canvas, [(0.84, 0.04), (0.95, 0.06), (0.88, 0.1)], red)
    write_centred(canvas, content.merchant or "", high * 0.17, wide * 0.05, ink, bold=True)
    write_centred(canvas, f"NMID : {content.nmid}", high * 0.205, wide * 0.03, ink)
    write_centred(canvas, "A01", high * 0.235, wide * 0.03, ink)
    look = Look(quiet=float(rng.uniform(0.5, 2.5)), logo=bool(rng.random() < 0.15))
    code = stamp(rng, canvas, (wide / 2, high * 0.5), side, content, look=look)
    write_centred(canvas, "SATU QRIS UNTUK SEMUA", high * 0.79, wide * 0.04, ink, bold=True)
    write_centred(canvas, "Cek aplikasi penyelenggara", high * 0.825, wide * 0.026, ink)
    write(canvas, f"Dicetak oleh: 9360{digits(rng, 4)}", (wide * 0.05, high * 0.93), wide * 0.022, ink)
    write(canvas, "Versi Cetak: 1.0-2024.05.12", (wide * 0.05, high * 0.955), wide * 0.022, ink)
    for step in range(3):
        centre = (round(wide * (0.66 + 0.11 * step)), round(high * 0.95))
        cv2.circle(canvas, centre, max(1, round(wide * 0.035)), (250, 250, 250), -1, cv2.LINE_AA)
    if rng.random() < 0.3:
        cv2.rectangle(canvas, (0, 0), (wide - 1, high - 1), (170, 170, 170), max(1, wide // 150))
    return Sprite(canvas, solid(canvas), [code])


def _decorate(rng: np.random.Generator, canvas: Image, count: int) -> None:
    """Draw bands, discs and triangles in loud colours."""
    high, wide = canvas.shape[:2]
    for _ in range(count):
        colour, shape = any_colour(rng), int(rng.integers(3))
        if shape == 0:
            top = int(rng.integers(high))
            cv2.rectangle(canvas, (0, top), (wide, top + int(rng.integers(1, high // 5 + 2))), colour, -1)
        elif shape == 1:
            centre = (int(rng.integers(wide)), int(rng.integers(high)))
            cv2.circle(canvas, centre, int(rng.integers(1, wide // 3 + 2)), colour, -1, cv2.LINE_AA)
        else:
            corners = (rng.random((3, 2)) * [wide, high]).astype(np.int32)
            cv2.fillPoly(canvas, [corners], colour, cv2.LINE_AA)


def own_poster(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a shop's own poster: any colours and shapes, a headline, a code near the middle."""
    ground = any_colour(rng)
    wide = around(side, rng.uniform(0.3, 0.75))
    canvas = blank(wide, max(side * 1.15, wide * rng.uniform(0.6, 1.7)), ground)
    height, width = canvas.shape[:2]
    _decorate(rng, canvas, int(rng.integers(0, 6)))
    place = (width * rng.uniform(0.45, 0.55), height * rng.uniform(0.45, 0.6))
    ink = contrasting(ground)
    font = choose(rng, FONTS)
    size = width * rng.uniform(0.05, 0.1)
    above = place[1] - side * 0.62
    if above > size * 1.3:
        write_centred(
            canvas, words(rng, int(rng.integers(1, 4))).upper(), above * 0.75, size, ink, font=font, bold=True
        )
    code = stamp(rng, canvas, place, side, any_content(rng, 0.6), look=random_look(rng))
    below = place[1] + side * 0.7
    if below < height:
        box = (width * 0.1, below, width * 0.9, height * 0.97)
        paragraph(rng, canvas, box, width * rng.uniform(0.02, 0.045), ink)
    return Sprite(canvas, solid(canvas), [code])


def table_stand(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a poster in an acrylic or wooden frame with a foot."""
    inner = official_poster(rng, side) if rng.random() < 0.5 else own_poster(rng, side)
    high, wide = inner.image.shape[:2]
    rim, foot = max(1, round(wide * rng.uniform(0.01, 0.06))), round(wide * rng.uniform(0.05, 0.2))
    frame = muted(rng) if rng.random() < 0.6 else pale(rng)
    canvas = blank(wide + 2 * rim, high + 2 * rim + foot, frame)
    canvas[rim : rim + high, rim : rim + wide] = inner.image
    cv2.line(canvas, (0, high + 2 * rim), (canvas.shape[1], high + 2 * rim), contrasting(frame), max(1, rim // 4))
    codes = [code.moved(rim, rim) for code in inner.codes]
    return Sprite(canvas, rounded(canvas, rim * rng.uniform(0, 3)), codes)


def sticker(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a small label with round corners: the code, a line above or below it."""
    look = random_look(rng)
    extra = rng.uniform(0.0, 0.35)
    margin = side * rng.uniform(1.06, 1.5)
    paper = look.paper if rng.random() < 0.75 else vivid(rng)
    canvas = blank(margin, margin * (1 + extra), paper)
    height, width = canvas.shape[:2]
    on_top = rng.random() < 0.5
    centre = height - width / 2 if on_top else width / 2
    code = stamp(rng, canvas, (width / 2, centre), side, any_content(rng), look=look)
    size = width * extra * rng.uniform(0.25, 0.45)
    text = choose(rng, ("SCAN ME", "SCAN HERE", "BAYAR DI SINI", "MENU", "INFO", "PAY"))
    baseline = height * extra * 0.6 if on_top else height - (height - width) * 0.35
    if extra > 0.08:
        write_centred(canvas, text, baseline, size, contrasting(paper), font=choose(rng, FONTS), bold=True)
    mask = rounded(canvas, width * rng.uniform(0, 0.12)) if rng.random() < 0.6 else solid(canvas)
    return Sprite(canvas, mask, [code])


def phone_screen(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a phone that shows a code: light or dark theme, bars, a button."""
    dark = rng.random() < 0.4
    ground: Colour = (int(rng.integers(8, 40)),) * 3 if dark else pale(rng)
    if rng.random() < 0.3:
        ground = vivid(rng)
    screen = side / rng.uniform(0.45, 0.85)
    rim = screen * rng.uniform(0.02, 0.06)
    canvas = blank(screen + 2 * rim, screen * rng.uniform(1.7, 2.15) + 2 * rim, (18, 18, 20))
    high, wide = canvas.shape[:2]
    edge = round(rim)
    canvas[edge : high - edge, edge : wide - edge] = ground
    bar = vivid(rng)
    if rng.random() < 0.7:
        cv2.rectangle(canvas, (edge, edge), (wide - edge, round(high * rng.uniform(0.06, 0.15))), bar, -1)
    ink = contrasting(ground)
    write_centred(
        canvas, choose(rng, ("Scan to pay", "Bayar", "My QR", "Ticket", "Boarding pass")), high * 0.22, wide * 0.05, ink
    )
    y = high * rng.uniform(0.42, 0.55)
    card = rng.random() < 0.5
    if card:
        half = side * 0.62
        cv2.rectangle(
            canvas,
            (round(wide / 2 - half), round(y - half)),
            (round(wide / 2 + half), round(y + half)),
            (255, 255, 255),
            -1,
        )
    look = random_look(rng, plain=0.75)
    if dark and not card and rng.random() < 0.25:
        look = Look((235, 235, 235), ground, 1.0)
    code = stamp(rng, canvas, (wide / 2, y), side, any_content(rng), look=look)
    paragraph(rng, canvas, (wide * 0.15, y + side * 0.75, wide * 0.85, high * 0.85), wide * 0.03, ink)
    cv2.rectangle(canvas, (round(wide * 0.2), round(high * 0.87)), (round(wide * 0.8), round(high * 0.93)), bar, -1)
    return Sprite(canvas, rounded(canvas, wide * 0.09), [code])


def receipt(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a narrow till receipt: lines of prices, the code near its end."""
    wide = side / rng.uniform(0.4, 0.75)
    canvas = blank(wide, wide * rng.uniform(1.5, 2.6), pale(rng))
    height, width = canvas.shape[:2]
    ink: Colour = (int(rng.integers(20, 110)),) * 3
    size = width * rng.uniform(0.028, 0.04)
    y = height - side * rng.uniform(0.65, 0.9)
    row = size * 2
    write_centred(canvas, words(rng, 2).upper(), row * 1.5, size * 1.6, ink, bold=True)
    for line in np.arange(row * 3, y - side * 0.65, row):
        write(canvas, words(rng, int(rng.integers(1, 3)))[:18], (width * 0.06, line), size, ink)
        write(canvas, f"{digits(rng, 2)}.000", (width * 0.72, line), size, ink)
    grey = int(rng.integers(20, 80))
    look = Look((grey, grey, grey), tuple(int(v) for v in canvas[0, 0]), 1.0)  # type: ignore[arg-type]
    code = stamp(rng, canvas, (width / 2, y), side, any_content(rng, 0.7), look=look)
    return Sprite(canvas, solid(canvas), [code])


def wallet_card(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a business or membership card with a code at one end."""
    ground = any_colour(rng)
    canvas = blank(side / rng.uniform(0.3, 0.55), side * rng.uniform(1.15, 1.9), ground)
    height, width = canvas.shape[:2]
    _decorate(rng, canvas, int(rng.integers(0, 3)))
    right = rng.random() < 0.5
    reach = side * rng.uniform(0.58, 0.7)
    x = width - reach if right else reach
    code = stamp(rng, canvas, (x, height / 2), side, other_content(rng), look=random_look(rng, plain=0.5))
    left = width * 0.05 if right else reach + side * 0.62
    box = (left, height * 0.15, left + width - reach - side * 0.7, height * 0.95)
    paragraph(rng, canvas, box, height * rng.uniform(0.04, 0.09), contrasting(ground))
    return Sprite(canvas, rounded(canvas, width * rng.uniform(0, 0.05)), [code])


def bare_code(rng: np.random.Generator, side: float, content: Content | None = None) -> Sprite:
    """Draw only a code on its own paper."""
    look = random_look(rng)
    canvas = blank(side * rng.uniform(1.03, 1.35), side * rng.uniform(1.03, 1.35), look.paper)
    height, width = canvas.shape[:2]
    code = stamp(rng, canvas, (width / 2, height / 2), side, content or any_content(rng), look=look)
    return Sprite(canvas, solid(canvas), [code])
