"""Show verified photos as one offline HTML page: marked codes, verdicts and evidence.

``arclight scan`` and ``arclight demo`` add each verified photo to a `VerificationReport` and write the page. It needs no network and no other
file. Its look (report.css) may change freely.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from arclight.fabric.atomic_replace import replace_text
from arclight.fabric.extras import require
from arclight.trainer.run.report import document, image_source
from arclight.vision.data.images import Image, encode_jpeg
from arclight.vision.qris.reading.scanner import Code
from arclight.vision.qris.verification.verifier import CheckedCode, Evidence, Verdict, Verification

cv2 = require("cv2", extra="vision")

STYLE = Path(__file__).with_name("report.css")
PICTURE_SIDE = 900
"""Longest side of a photo on the page, pixels."""
MAX_PICTURES = 400
"""Photos of each verdict that are shown with their picture; further ones are listed, so that the page of a large folder still opens."""
MAX_LISTED = 10_000
"""Photos of each verdict that are listed; further ones are counted, since cameras have no end."""

_WORDS: dict[Verdict, tuple[str, str]] = {
    "mismatch": ("Mismatch", "pays somebody else, or was pasted over"),
    "unknown": ("Unknown", "no registered place or account, or a code not read"),
    "match": ("Match", "pays the registered place"),
}


@dataclass(frozen=True)
class _Entry:
    name: str
    verification: Verification
    size: tuple[int, int]
    """Width and height of the photo, pixels."""
    jpeg: bytes | None


class VerificationReport:
    """Collect verified photos, and write the page that shows them, mismatches first."""

    def __init__(self, registry: str) -> None:
        """Initialise an empty report.

        ``registry``: name of the registry on the page.
        """
        self.registry = registry
        self._entries: dict[Verdict, list[_Entry]] = {verdict: [] for verdict in _WORDS}
        self._counts = Counter[Verdict]()

    def add(self, name: str, photo: Image, verification: Verification) -> None:
        """Add a photo under its name; the first ``MAX_PICTURES`` of its verdict are shown."""
        self._counts[verification.verdict] += 1
        if self._counts[verification.verdict] > MAX_LISTED:
            return
        height, width = photo.shape[:2]
        name = name.encode("utf-8", "backslashreplace").decode("utf-8")  # file names may hold bytes that are no text
        jpeg = _jpeg(photo) if self._counts[verification.verdict] <= MAX_PICTURES else None
        self._entries[verification.verdict].append(_Entry(name, verification, (width, height), jpeg))

    def write(self, file: Path | str) -> Path:
        """Write the page to ``file``, whole or not at all."""
        counts = self._counts
        tiles = "".join(
            f'<a class="tile {verdict}" href="#{verdict}"><b>{counts[verdict]}</b><span>{word}</span><small>{escape(what)}</small></a>'
            for verdict, (word, what) in _WORDS.items()
        )
        sections = "".join(
            f'<section id="{verdict}"><h2>{word}</h2>'
            + "".join(map(_article, sorted(self._entries[verdict], key=lambda entry: -entry.verification.score)))
            + _left_out(counts[verdict] - len(self._entries[verdict]))
            + "</section>"
            for verdict, (word, _) in _WORDS.items()
            if counts[verdict]
        )
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        photos = f"{counts.total()} photo{'s' * (counts.total() != 1)}"
        body = _BODY.format(
            tiles=tiles, sections=sections, footer=f"Written {now} by Arclight",
            facts=f"{photos} held against {escape(self.registry)}",
        )  # fmt: skip
        path = Path(file)
        replace_text(path, document("Payment codes", STYLE.read_text(encoding="utf-8"), body), durable=False)
        return path


def _jpeg(photo: Image) -> bytes:
    scale = min(1.0, PICTURE_SIDE / max(photo.shape[:2]))
    small = cv2.resize(photo, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA) if scale < 1 else photo
    return encode_jpeg(small, 82)


def _left_out(count: int) -> str:
    return f'<p class="none">And {count} more: the page lists the first {MAX_LISTED} of a verdict.</p>' if count else ""


def _article(entry: _Entry) -> str:
    found = entry.verification
    cards = "".join(_card(number, one) for number, one in enumerate(found.checked, 1))
    if not found.checked:
        cards = '<p class="none">No payment code was read in this photo.</p>'
    if found.others:
        kinds = Counter("not readable" if code.text is None else "no payment code" for code in found.others)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        cards += f'<p class="others">Other codes: {listed}.</p>'
    word = _WORDS[found.verdict][0]
    return (
        f'<article class="{found.verdict}"><div class="photo">{_picture(entry)}</div><div class="said">'
        f'<header><h3>{escape(entry.name)}</h3><span class="chip {found.verdict}">{word}</span></header>{cards}</div></article>'
    )


def _picture(entry: _Entry) -> str:
    width, height = entry.size
    if entry.jpeg is None:
        return (
            f'<p class="none">{width} × {height} px; the page shows the first {MAX_PICTURES} pictures of a verdict.</p>'
        )
    marks = "".join(
        _mark(one.code, width, one.verdict, number) for number, one in enumerate(entry.verification.checked, 1)
    )
    marks = "".join(_mark(code, width, "other") for code in entry.verification.others) + marks
    return (
        f'<img alt="" loading="lazy" src="{image_source(entry.jpeg, ".jpg")}">'
        f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{marks}</svg>'
    )


def _mark(code: Code, width: int, tone: str, number: int | None = None) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in code.corners_px)
    outline = f'<polygon class="{tone}" points="{points}" stroke-width="{width / 160:.1f}"/>'
    if number is None:
        return outline
    x, y = min(code.corners_px, key=lambda point: point[0] + point[1])
    radius = width / 32
    return (
        f'{outline}<circle class="{tone}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        f'<text x="{x:.1f}" y="{y:.1f}" dy=".36em" font-size="{radius * 1.15:.1f}">{number}</text>'
    )


def _card(number: int, one: CheckedCode) -> str:
    payload = one.code.payload
    name = payload.merchant_name if payload else "Damaged payment code"
    facts = [("NMID", payload.nmid), ("City", payload.city), ("Amount", str(payload.amount or ""))] if payload else []
    if one.place is not None and (payload is None or one.place.nmid != payload.nmid):
        facts.append(("Registered", f"{one.place.name}, {one.place.nmid}"))
    rows = "".join(f"<dt>{label}</dt><dd>{escape(value)}</dd>" for label, value in facts if value)
    evidence = "".join(map(_row, sorted(one.evidence, key=lambda item: -item.weight)))
    return (
        f'<div class="code"><p class="payee"><span class="number {one.verdict}">{number}</span><b>{escape(name)}</b>'
        f'<span class="score">{_percent(one.score)} suspicious</span></p><dl>{rows}</dl><ul>{evidence}</ul></div>'
    )


def _row(one: Evidence) -> str:
    tone, sign = ("against", "!") if one.weight >= 0.5 else ("for", "✓") if one.weight < 0 else ("neutral", "·")
    return f'<li class="{tone}"><i>{sign}</i><span class="check">{escape(one.check)}</span><span>{escape(one.message)}</span></li>'


def _percent(score: float) -> str:
    return "<1 %" if score < 0.01 else ">99 %" if score > 0.99 else f"{score:.0%}".replace("%", " %")


def listed(counts: Counter[Verdict]) -> str:
    """List numbers of photos by verdict, as in "2 mismatch, 1 unknown, 7 match"."""
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _WORDS)


_BODY = """<header><h1>Payment codes</h1><p class="facts">{facts}</p></header>
<div class="tiles">{tiles}</div>
{sections}
<footer>{footer}. A match says that a code pays the registered account; only the registry says whose that is.</footer>"""
