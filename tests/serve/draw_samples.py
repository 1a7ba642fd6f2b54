"""Draws the page's sample photos: `python tests/serve/draw_samples.py` writes src/arclight/serve/page/samples/*.jpg.

Each is a small scene set in HTML (scenes/), photographed by headless Chromium, then given a camera's softness, grain
and vignette. Merchants, acquirers and numbers are invented.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import segno

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, chromium

SCENES = Path(__file__).parent / "scenes"
OUT = Path(__file__).resolve().parents[2] / "src/arclight/serve/page/samples"
WIDTH, HEIGHT = 900, 1200


def field(tag: int, value: str) -> str:
    return f"{tag:02d}{len(value):02d}{value}"


def crc16(text: str) -> str:
    crc = 0xFFFF
    for byte in text.encode():
        crc ^= byte << 8
        for _ in range(8):
            crc = ((crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return f"{crc:04X}"


def payload(name: str, city: str, postal: str, nmid: str, category: str, *, amount: str = "", extra: str) -> str:
    """An EMVCo merchant payload as QRIS uses it, spelled out here so that the samples check the parser too."""
    acquirer = field(0, "ID.CO.CONTOH.WWW") + field(1, "936009990012345678") + field(2, "KTR00012345") + field(3, "UMI")
    switch = field(0, "ID.CO.QRIS.WWW") + field(2, nmid) + field(3, "UMI")
    text = field(0, "01") + field(1, "12" if amount else "11") + field(26, acquirer) + field(51, switch)
    text += field(52, category) + field(53, "360") + (field(54, amount) if amount else "")
    text += field(58, "ID") + field(59, name) + field(60, city) + field(61, postal) + field(62, extra) + "6304"
    return text + crc16(text)


def code(text: str, error: str = "m") -> str:
    """The QR code as an inline SVG that fills its parent."""
    return segno.make(text, error=error, boost_error=False, micro=False).svg_inline(
        omitsize=True, border=2, dark="#15161a", light="#ffffff"
    )


def codes() -> dict[str, str]:
    """Return the texts of the scenes' codes, by placeholder."""
    return {
        "coffee": payload("Kopi Lereng Senja", "Bandung", "40132", "ID1020304050607", "5814", extra=field(7, "A01")),
        "books": payload(
            "Toko Buku Pelita",
            "Yogyakarta",
            "55271",
            "ID1122334455667",
            "5942",
            amount="87500",
            extra=field(1, "INV-20481") + field(7, "K02"),
        ),
        "parking": payload("Parkir Pasar Lama", "Semarang", "50137", "ID1090807060504", "7523", extra=field(7, "A03")),
        "wifi": "WIFI:T:WPA;S:Tamu Pasar Lama;P:selamat-datang;;",
    }


def scene(name: str) -> str:
    """HTML of a scene with its codes in place."""
    html = (SCENES / f"{name}.html").read_text()
    for placeholder, text in codes().items():
        html = html.replace("{{" + placeholder + "}}", code(text))
    return html


def photograph(browser: Browser, html: str, seed: int) -> np.ndarray:
    """The scene through a plain camera: soft focus, vignette, grain; BGR uint8."""
    draft = OUT / "scene.png"
    browser.open("about:blank")
    browser.run("document.open(); document.write(arguments[0]); document.close()", html)
    browser.screenshot(draft)
    image = cv2.imread(str(draft)).astype(np.float32)
    draft.unlink()
    image = cv2.GaussianBlur(image, (0, 0), 0.7)
    y, x = np.mgrid[-1 : 1 : HEIGHT * 1j, -1 : 1 : WIDTH * 1j]
    image *= (1 - 0.22 * (x**2 + y**2) / 2)[..., None] * np.array([0.94, 0.99, 1.03])
    grain = np.random.default_rng(seed).normal(0, 3.0, (HEIGHT, WIDTH, 1))
    image = np.clip(image + cv2.GaussianBlur(grain, (0, 0), 0.8)[..., None], 0, 255).astype(np.uint8)
    return cv2.resize(image, None, fx=0.8, fy=0.8, interpolation=cv2.INTER_AREA)


def jpeg(image: np.ndarray, *, most_bytes: int) -> bytes:
    """The best JPEG of at most ``most_bytes``."""
    for quality in range(90, 30, -2):
        data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, 1])[1]
        if data.size <= most_bytes:
            return data.tobytes()
    raise ValueError(f"the scene does not fit {most_bytes} bytes")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        browser.resize(WIDTH, HEIGHT)
        for seed, name in enumerate(("counter", "receipt", "board")):
            image = photograph(browser, scene(name), seed)
            (OUT / f"{name}.jpg").write_bytes(jpeg(image, most_bytes=55_000))


if __name__ == "__main__":
    main()
