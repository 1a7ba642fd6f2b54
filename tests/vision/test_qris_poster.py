"""Printable sheets: the code on each reads as the payload, whatever the format, and says what it pays."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.cli.arguments import UsageError  # noqa: E402
from arclight.cli.commands.data import data  # noqa: E402
from arclight.vision.data.images import decode_image  # noqa: E402
from arclight.vision.qris import QrisError, Tip, build, parse, scan, to_dynamic  # noqa: E402
from arclight.vision.qris.poster import HEIGHT_MM, WIDTH_MM, Polygon, PosterError, Text, poster, write_poster  # noqa: E402

STATIC = build(
    merchant_name="KOPI & TEH (SENJA)", city="BANDUNG", mcc="5814", nmid="ID1020012345678", additional={"terminal_label": "A01"}
)  # fmt: skip
BILL = to_dynamic(STATIC, 52500, tip=Tip("percentage", Decimal(5)), bill="INV-7")


def drawn(polygons: list[tuple[str, list[tuple[float, float]]]], scale: float) -> np.ndarray:
    """An RGB picture of filled polygons, in order."""
    canvas = np.full((round(HEIGHT_MM * scale), round(WIDTH_MM * scale), 3), 255, np.uint8)
    for colour, points in polygons:
        rgb = tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
        cv2.fillPoly(canvas, [np.round(np.array(points) * scale * 16).astype(np.int32)], rgb, cv2.LINE_AA, 4)
    return canvas


def of_png(file: Path) -> np.ndarray:
    return cv2.resize(decode_image(file), None, fx=0.4, fy=0.4, interpolation=cv2.INTER_AREA)


def of_svg(file: Path) -> np.ndarray:
    root = ElementTree.fromstring(file.read_text())
    found = []
    for shape in root.iter("{http://www.w3.org/2000/svg}polygon"):
        pairs = [pair.split(",") for pair in shape.attrib["points"].split()]
        found.append((shape.attrib["fill"], [(float(x), float(y)) for x, y in pairs]))
    return drawn(found, 5)


def of_pdf(file: Path) -> np.ndarray:
    content = file.read_bytes()
    (start,) = re.findall(rb"startxref\n(\d+)\n", content)
    assert content[int(start) :].startswith(b"xref\n0 6\n")
    for number, place in enumerate(re.findall(rb"(\d{10}) 00000 n ", content), 1):
        assert content[int(place) :].startswith(b"%d 0 obj" % number), "offsets of the table are right"
    (length, stream) = re.findall(rb"/Length (\d+) >>\nstream\n(.*)\nendstream", content, re.DOTALL)[0]
    assert int(length) == len(stream)
    found, colour = [], "#000000"
    for line in stream.decode("latin-1").splitlines():
        if line.endswith(" rg"):
            colour = "#" + "".join(f"{round(float(value) * 255):02x}" for value in line.split()[:3])
        elif line.endswith(" h f"):
            numbers = [float(value) / 72 * 25.4 for value in re.findall(r"[\d.]+", line)]
            found.append((colour, [(x, HEIGHT_MM - y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]))
    return drawn(found, 5)


@pytest.mark.parametrize("text", [STATIC, BILL])
@pytest.mark.parametrize(("ending", "open_"), [("png", of_png), ("svg", of_svg), ("pdf", of_pdf)])
def test_the_code_of_every_format_reads_as_the_payload(tmp_path: Path, text: str, ending: str, open_: object) -> None:
    file = write_poster(text, tmp_path / "new" / f"sheet.{ending}")
    (code,) = scan(open_(file))  # type: ignore[operator]
    assert (code.text, code.kind) == (text, "qris")


def test_the_sheet_shows_payee_and_amount(tmp_path: Path) -> None:
    said = [shape.text for shape in poster(BILL) if isinstance(shape, Text)]
    assert {
        "KOPI & TEH (SENJA)",
        "NMID : ID1020012345678 - A01 - BANDUNG",
        "Rp 52.500",
        "+ tip 5 %",
        "Tagihan INV-7",
    } <= set(said)
    assert "SATU QRIS UNTUK SEMUA" not in said
    svg, pdf = (write_poster(BILL, tmp_path / name).read_bytes() for name in ("a.svg", "a.pdf"))
    assert b">KOPI &amp; TEH (SENJA)<" in svg
    assert rb"(KOPI & TEH \(SENJA\)) Tj" in pdf


def test_every_shape_lies_on_the_sheet_and_no_text_on_the_code() -> None:
    shapes = poster(build(merchant_name="W" * 25, city="W" * 15, mcc="5814", nmid="ID1020012345678"))
    points = np.concatenate([np.array(shape.points) for shape in shapes if isinstance(shape, Polygon)])
    assert points.min() >= 0
    assert (points.max(0) <= [WIDTH_MM, HEIGHT_MM]).all()
    modules = np.concatenate(
        [np.array(shape.points) for shape in shapes if isinstance(shape, Polygon) and shape.colour == "#000000"]
    )
    lines = [(shape.y - shape.size, shape.y) for shape in shapes if isinstance(shape, Text)]
    assert all(bottom < modules[:, 1].min() or top > modules[:, 1].max() for top, bottom in lines)


def test_invalid_posters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PosterError, match=r"sheet\.bmp: a poster is a \.svg, \.pdf, \.png file"):
        write_poster(STATIC, tmp_path / "sheet.bmp")
    with pytest.raises(QrisError, match="63"):
        write_poster(STATIC[:-1] + "Z", tmp_path / "sheet.svg")
    assert not list(tmp_path.iterdir())


def test_a_bill_keeps_the_fields_of_the_payload() -> None:
    found = parse(BILL)
    assert (found.amount, found.tip) == (Decimal(52500), Tip("percentage", Decimal(5)))
    assert found.additional == {"bill_number": "INV-7", "terminal_label": "A01"}
    again = parse(to_dynamic(BILL, 1000, tip=Tip("prompt"), reference="R1"))
    assert (again.tip, again.amount) == (Tip("prompt"), Decimal(1000))
    assert again.additional == {"bill_number": "INV-7", "reference_label": "R1", "terminal_label": "A01"}
    assert parse(to_dynamic(BILL, 1000)).tip == Tip("percentage", Decimal(5))
    for wrong in (Tip("fixed"), Tip("prompt", Decimal(5)), Tip("percentage", Decimal(0))):
        with pytest.raises(QrisError):
            to_dynamic(STATIC, 1000, tip=wrong)
    with pytest.raises(QrisError):
        to_dynamic(STATIC, 1000, bill="x" * 26)


def test_the_command_prints_the_dynamic_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bill.png"
    assert data(["poster", STATIC, "--out", str(file), "--amount", "52500", "--tip", "5%", "--bill", "INV-7"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == BILL
    assert file.exists()
    for words, said in ((["--bill", "X"], "--amount"), (["--amount", "5", "--tip", "much"], "--tip much")):
        with pytest.raises(UsageError, match=said):
            data(["poster", STATIC, "--out", str(file), *words])
