"""Lay out a printable A4 sheet with a payment code, and write it as SVG, PDF or PNG.

The layout is a list of shapes in millimetres; each format draws the same list. Text is set in Helvetica (PDF), its likes (SVG) or
OpenCV's own face (PNG).

``arclight data poster`` calls `write_poster`. The layout is free; a new format goes into `_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from arclight.fabric.extras import require
from arclight.vision.qris.payload.codec import Payload, Tip, parse

WIDTH_MM, HEIGHT_MM = 210.0, 297.0
CODE_MM = 118.0
"""Side of the code without its quiet zone: large enough for a phone two metres away that needs three pixels per module."""
QUIET_MODULES = 4
DPI = 300
_MM_PER_INCH = 25.4
_PT_PER_MM = 72 / _MM_PER_INCH
INK, SOFT, RED = "#17181c", "#5c5f67", "#d6323a"

_WIDTHS = (
    278, 333, 474, 556, 556, 889, 722, 238, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556, 556, 556, 556,
    556, 556, 333, 333, 584, 584, 584, 611, 975, 722, 722, 722, 722, 667, 611, 778, 722, 278, 556, 722, 611, 833, 722, 778,
    667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 333, 278, 333, 584, 556, 333, 556, 611, 556, 611, 556, 333, 611,
    611, 278, 278, 556, 278, 889, 611, 611, 611, 611, 389, 556, 333, 611, 556, 778, 556, 556, 500, 389, 280, 389, 584,
)  # fmt: skip
"""Advance widths of Helvetica-Bold from blank to tilde, thousandths of the size (Adobe's font metrics of the 14 standard fonts)."""


class PosterError(ValueError):
    """Error of a poster that cannot be made."""


@dataclass(frozen=True)
class Text:
    """One centred line; ``y`` is its baseline, ``size`` the font's, all in millimetres."""

    text: str
    y: float
    size: float
    colour: str = INK


@dataclass(frozen=True)
class Polygon:
    """A filled shape, its corners (x, y) in millimetres."""

    points: tuple[tuple[float, float], ...]
    colour: str = INK


Shape = Text | Polygon


def poster(text: str) -> list[Shape]:
    """Lay out the printable sheet of a payment code: merchant, amount and code.

    Raises QrisError for an invalid payload.
    """
    payload = parse(text)
    shapes: list[Shape] = [
        Polygon(((0, 96), (26, 122), (0, 148)), RED),
        Polygon(((210, 232), (210, 297), (118, 297)), RED),
        Text("QRIS" if payload.is_qris else "QR", 30, 20),
        Text("QR Code Standar Pembayaran Nasional" if payload.is_qris else "EMVCo", 38, 5, SOFT),
        Text(payload.merchant_name, 56, 10),
    ]
    terminal = payload.additional.get("terminal_label")
    facts = [f"NMID : {payload.nmid}" if payload.nmid else "", terminal or "", payload.city]
    shapes += [Text(" - ".join(filter(None, facts)), 66, 5.5)]
    shapes += _code(text, 76.0)
    y = 76 + CODE_MM + 16
    for line, size in amounts(payload):
        shapes.append(Text(line, y, size))
        y += size * 1.35
    if payload.is_qris and not payload.is_dynamic:
        shapes.append(Text("SATU QRIS UNTUK SEMUA", y, 8))
    shapes.append(Text("Periksa nama sebelum membayar", 262, 5, SOFT))
    return shapes


def amounts(payload: Payload) -> list[tuple[str, float]]:
    """Return the lines of amount, tip and bill on a sheet, with their sizes in millimetres."""
    lines = []
    if payload.amount is not None:
        lines.append((money(payload.amount, payload.currency), 11.0))
    if payload.tip is not None:
        lines.append((_tip(payload.tip, payload.currency), 5.5))
    bill = payload.additional.get("bill_number")
    return lines + ([(f"Tagihan {bill}", 5.5)] if bill else [])


def money(value: Decimal, currency: str) -> str:
    """Write an amount as Indonesia does; other currencies than rupiah by their ISO 4217 number."""
    whole, _, part = format(value, "f").partition(".")
    grouped = f"{int(whole):,}".replace(",", ".") + (f",{part}" if part.strip("0") else "")
    return f"Rp {grouped}" if currency == "360" else f"{grouped} ({currency})"


def _tip(tip: Tip, currency: str) -> str:
    if tip.value is None:
        return "Tip sukarela"
    return f"+ tip {tip.value} %" if tip.kind == "percentage" else f"+ tip {money(tip.value, currency)}"


def _code(text: str, top: float) -> list[Shape]:
    """Draw the code's modules as one rectangle per run in a row, with the quiet zone."""
    segno = require("segno", extra="vision")
    symbol = segno.make(text, error="m", micro=False, boost_error=True)
    modules = np.array(symbol.matrix, np.int8)
    module = CODE_MM / len(modules)
    left = (WIDTH_MM - CODE_MM) / 2

    def box(x: float, y: float, wide: float, high: float, colour: str) -> Polygon:
        return Polygon(((x, y), (x + wide, y), (x + wide, y + high), (x, y + high)), colour)

    quiet = QUIET_MODULES * module
    shapes: list[Shape] = [box(left - quiet, top - quiet, CODE_MM + 2 * quiet, CODE_MM + 2 * quiet, "#ffffff")]
    for row, line in enumerate(modules):
        ends = np.flatnonzero(np.diff(np.pad(line, 1)))
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            shapes.append(box(left + start * module, top + row * module, (end - start) * module, module, "#000000"))
    return shapes


def write_poster(text: str, file: Path | str) -> Path:
    """Write the sheet of a payment code to a ``.svg``, ``.pdf`` or ``.png`` (300 dpi).

    Raises PosterError for other endings.
    """
    path = Path(file)
    drawn = _FORMATS.get(path.suffix.lower())
    if drawn is None:
        raise PosterError(f"{path.name}: a poster is a {', '.join(_FORMATS)} file")
    content = drawn(poster(text))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _fitting(text: Text) -> float:
    """Return the size at which a line fits in nine tenths of the sheet."""
    width = _width(text.text) * text.size
    return text.size * min(1.0, 0.9 * WIDTH_MM / max(width, 1e-6))


def _width(text: str) -> float:
    """Return the width of a line in Helvetica-Bold of size 1.

    Letters that the font lacks count as wide ones.
    """
    return sum(_WIDTHS[ord(c) - 32] if 32 <= ord(c) < 127 else 800 for c in text) / 1000


def to_svg(shapes: Sequence[Shape]) -> bytes:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_MM:g}mm" height="{HEIGHT_MM:g}mm" viewBox="0 0 {WIDTH_MM:g} {HEIGHT_MM:g}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Text):
            lines.append(
                f'<text x="{WIDTH_MM / 2:g}" y="{shape.y:g}" font-size="{_fitting(shape):.3f}" fill="{shape.colour}" text-anchor="middle" '
                f'font-family="Helvetica, Arial, sans-serif" font-weight="bold">{escape(shape.text)}</text>'
            )
        else:
            corners = " ".join(f"{x:.4f},{y:.4f}" for x, y in shape.points)
            crisp = ' shape-rendering="crispEdges"' if shape.colour == "#000000" else ""
            lines.append(f'<polygon points="{corners}" fill="{shape.colour}"{crisp}/>')
    return "\n".join([*lines, "</svg>\n"]).encode()


def to_pdf(shapes: Sequence[Shape]) -> bytes:
    """Write one page of PDF 1.4 with the standard font Helvetica-Bold.

    Letters beyond Latin-1 become question marks.
    """
    drawn = []
    for shape in shapes:
        drawn.append("{:.4f} {:.4f} {:.4f} rg".format(*(value / 255 for value in _rgb(shape.colour))))
        if isinstance(shape, Text):
            size = _fitting(shape) * _PT_PER_MM
            x = WIDTH_MM / 2 * _PT_PER_MM - _width(shape.text) * size / 2
            text = shape.text.encode("latin-1", "replace").decode("latin-1")
            for special in "\\()":
                text = text.replace(special, "\\" + special)
            drawn.append(f"BT /F1 {size:.3f} Tf {x:.3f} {(HEIGHT_MM - shape.y) * _PT_PER_MM:.3f} Td ({text}) Tj ET")
        else:
            corners = [(x * _PT_PER_MM, (HEIGHT_MM - y) * _PT_PER_MM) for x, y in shape.points]
            drawn.append(" ".join(f"{x:.3f} {y:.3f} {'l' if n else 'm'}" for n, (x, y) in enumerate(corners)) + " h f")
    stream = "\n".join(drawn).encode("latin-1")
    box = f"[0 0 {WIDTH_MM * _PT_PER_MM:.3f} {HEIGHT_MM * _PT_PER_MM:.3f}]"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox {box} /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>".encode(),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold /Encoding /WinAnsiEncoding >>",
    ]
    page, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(page))
        page += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(page))
    return page + b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table) + end


def to_png(shapes: Sequence[Shape]) -> bytes:
    cv2 = require("cv2", extra="vision")
    scale = DPI / _MM_PER_INCH
    canvas = np.full((round(HEIGHT_MM * scale), round(WIDTH_MM * scale), 3), 255, np.uint8)
    for shape in shapes:
        red, green, blue = _rgb(shape.colour)
        if isinstance(shape, Text):
            height = _fitting(shape) * scale
            factor, thick = (
                height / 30,
                max(1, round(height / 14)),
            )  # of OpenCV's face, whose capitals are 21 pixels high
            (width, _), _ = cv2.getTextSize(shape.text, cv2.FONT_HERSHEY_SIMPLEX, factor, thick)
            factor *= min(1.0, 0.9 * canvas.shape[1] / max(width, 1))
            (width, _), _ = cv2.getTextSize(shape.text, cv2.FONT_HERSHEY_SIMPLEX, factor, thick)
            place = (round((canvas.shape[1] - width) / 2), round(shape.y * scale))
            cv2.putText(
                canvas, shape.text, place, cv2.FONT_HERSHEY_SIMPLEX, factor, (blue, green, red), thick, cv2.LINE_AA
            )
        elif len(shape.points) == 4:
            (x0, y0), (x1, y1) = np.round(np.array([shape.points[0], shape.points[2]]) * scale).astype(int).tolist()
            canvas[y0:y1, x0:x1] = (blue, green, red)
        else:
            corners = np.round(np.array(shape.points) * scale).astype(np.int32)
            cv2.fillPoly(canvas, [corners], (blue, green, red), cv2.LINE_AA)
    return bytes(cv2.imencode(".png", canvas)[1].tobytes())


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


_FORMATS: dict[str, Callable[[Sequence[Shape]], bytes]] = {".svg": to_svg, ".pdf": to_pdf, ".png": to_png}
