"""Draws the page's sample photos: `python tests/serve/draw_samples.py` writes src/arclight/serve/page/samples/*.jpg.

Each is a small scene set in HTML, photographed by headless Chromium, then given a camera's softness, grain and
vignette. Merchants, acquirers and numbers are invented.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import segno

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, chromium

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


STYLE = """
* { box-sizing: border-box; margin: 0 }
body { width: 900px; height: 1200px; overflow: hidden; font-family: "Liberation Sans", sans-serif; color: #15161a;
       perspective: 1900px; position: relative }
svg { display: block; width: 100%; height: auto }
"""

COUNTER = """
body { background: linear-gradient(#3c4a46 0, #52655d 46%, #7a5a3c 46.2%, #a67c52 52%, #8a6340 100%) }
.lamp { position: absolute; border-radius: 50%; filter: blur(26px) }
.cup { position: absolute; left: 640px; top: 690px; width: 250px; height: 270px; border-radius: 18px 18px 90px 90px;
       background: linear-gradient(90deg, #e9e2d4, #fffaf0 35%, #b9ae9b); filter: blur(5px) }
.cup i { position: absolute; left: 14px; right: 14px; top: -26px; height: 54px; border-radius: 50%;
         background: radial-gradient(#3a2213 55%, #e9dfcd 58%) }
.poster { position: absolute; left: 150px; top: 150px; width: 540px; background: #fff; border-radius: 10px;
          transform: rotateY(-13deg) rotateX(5deg) rotateZ(-2.2deg); overflow: hidden;
          box-shadow: 0 50px 60px -20px rgb(0 0 0 / .55), 0 0 0 7px rgb(255 255 255 / .35) }
.band { background: #b3202c; color: #fff; padding: 26px 36px; display: flex; justify-content: space-between;
        align-items: baseline }
.band b { font-size: 50px; letter-spacing: .02em }
.band span { font-size: 18px; text-align: right; line-height: 1.25 }
.name { text-align: center; font-weight: bold; font-size: 38px; margin-top: 34px }
.nmid { text-align: center; font-size: 20px; margin: 8px 0 16px; color: #333 }
.code { width: 372px; margin: 0 auto }
.foot { padding: 20px 36px 30px; text-align: center; font-size: 20px; color: #333; line-height: 1.5 }
.foot b { color: #b3202c; font-size: 24px }
.glare { position: absolute; inset: 0; background: linear-gradient(118deg, transparent 58%, rgb(255 255 255 / .30) 66%,
         rgb(255 255 255 / .07) 74%, transparent 76%) }
"""

RECEIPT = """
body { background: #6b4a2f; background-image: repeating-linear-gradient(93deg, rgb(0 0 0 / .10) 0 2px, transparent 2px 34px,
       rgb(255 220 170 / .06) 34px 61px), linear-gradient(160deg, #8d6844, #4c321f) }
.shadow { position: absolute; left: 215px; top: 56px; width: 470px; filter: drop-shadow(20px 30px 18px rgb(20 8 0 / .55));
          perspective: 1900px }
.paper { padding: 44px 42px 60px; background: linear-gradient(94deg,
         #f4f2ec, #fffefb 30%, #f1eee6 78%, #dcd7cc); transform: rotateX(9deg) rotateZ(5.5deg);
         font-family: "Liberation Mono", monospace; font-size: 21px;
         line-height: 1.42; clip-path: polygon(0 0, 100% 0, 100% 99%, 92% 100%, 80% 99%, 66% 100%, 50% 99%, 34% 100%, 18% 99%, 7% 100%, 0 99%) }
h1 { font-size: 32px; text-align: center; letter-spacing: .02em } p { text-align: center }
.row { display: flex; justify-content: space-between } hr { border: 0; border-top: 3px dashed #55524b; margin: 16px 0 }
.total { font-weight: bold; font-size: 27px } .code { width: 330px; margin: 12px auto 4px }
.pen { position: absolute; left: 724px; top: 380px; width: 26px; height: 700px; border-radius: 13px; transform: rotate(14deg);
       background: linear-gradient(90deg, #14233d, #36568d 45%, #0c1626); box-shadow: 20px 24px 22px rgb(0 0 0 / .4); filter: blur(1px) }
"""

BOARD = """
body { background: #b98c5a; background-image: radial-gradient(rgb(80 50 20 / .35) 1.5px, transparent 2.5px), radial-gradient(rgb(255 235 200 / .3) 1px, transparent 2px),
       linear-gradient(140deg, transparent 55%, rgb(40 20 0 / .45)); background-size: 23px 19px, 17px 29px, 100% 100% }
.sheet { position: absolute; background: #fff; box-shadow: 8px 16px 22px rgb(50 25 0 / .45); text-align: center }
.sheet::before { content: ""; position: absolute; left: 50%; top: 14px; width: 26px; height: 26px; margin-left: -13px; border-radius: 50%;
                 background: radial-gradient(circle at 35% 30%, #ff9c8a, #b3261e 60%, #6d120c); box-shadow: 4px 7px 6px rgb(0 0 0 / .35) }
.pay { left: 70px; top: 90px; width: 480px; padding: 62px 40px 32px; transform: rotateZ(-3deg) rotateY(6deg) }
.pay h1 { font-size: 35px } .pay p { font-size: 20px; margin: 6px 0 12px; color: #333 } .pay .code { width: 390px; margin: 0 auto }
.pay small { display: block; font-size: 22px; font-weight: bold; color: #0d4f8b; margin-top: 10px }
.wifi { left: 500px; top: 730px; width: 330px; padding: 56px 40px 30px; transform: rotateZ(4.5deg); background: #fdf3c4 }
.wifi h2 { font-size: 28px; margin-bottom: 12px } .wifi .code { width: 220px; margin: 0 auto } .wifi p { font-size: 19px; margin-top: 10px }
.note { left: 110px; top: 830px; width: 300px; height: 210px; padding: 54px 26px; transform: rotateZ(-6deg); background: #cfe6d4;
        font: italic 27px/1.35 "Liberation Serif", serif }
.note::before, .wifi::before { filter: hue-rotate(200deg) }
"""


def scenes() -> dict[str, str]:
    """HTML of every scene by file name."""
    coffee = payload(
        "Kopi Lereng Senja", "Bandung", "40132", "ID1020304050607", "5814", extra=field(7, "A01")
    )
    books = payload(
        "Toko Buku Pelita", "Yogyakarta", "55271", "ID1122334455667", "5942", amount="87500",
        extra=field(1, "INV-20481") + field(7, "K02"),
    )  # fmt: skip
    parking = payload(
        "Parkir Pasar Lama", "Semarang", "50137", "ID1090807060504", "7523", extra=field(7, "A03")
    )
    wifi = "WIFI:T:WPA;S:Tamu Pasar Lama;P:selamat-datang;;"
    return {
        "counter": f"""<style>{STYLE}{COUNTER}</style>
            <i class=lamp style="left:-60px;top:40px;width:240px;height:240px;background:#ffd99a99"></i>
            <i class=lamp style="left:720px;top:120px;width:190px;height:190px;background:#ffe7bd77"></i>
            <i class=lamp style="left:480px;top:-30px;width:120px;height:120px;background:#ffd28a66"></i>
            <div class=cup><i></i></div>
            <div class=poster><div class=band><b>QRIS</b><span>Satu kode untuk<br>semua pembayaran</span></div>
            <div class=name>Kopi Lereng Senja</div><div class=nmid>NMID : ID1020304050607 &nbsp; A01</div>
            <div class=code>{code(coffee)}</div>
            <div class=foot><b>Pindai, periksa nama, bayar</b><br>Dicetak oleh: 93600999</div><div class=glare></div></div>""",
        "receipt": f"""<style>{STYLE}{RECEIPT}</style><div class=pen></div>
            <div class=shadow><div class=paper><h1>TOKO BUKU PELITA</h1><p>Jl. Melati 14, Yogyakarta</p><p>INV-20481 &nbsp; 14:32</p><hr>
            <div class=row><span>Atlas Nusantara</span><span>62.000</span></div>
            <div class=row><span>Buku tulis A5 x3</span><span>18.000</span></div>
            <div class=row><span>Pensil 2B x2</span><span>7.500</span></div><hr>
            <div class="row total"><span>TOTAL</span><span>Rp87.500</span></div><hr>
            <p>Bayar dengan QRIS</p><div class=code>{code(books)}</div>
            <p>NMID ID1122334455667 K02</p><p>Terima kasih</p></div></div>""",
        "board": f"""<style>{STYLE}{BOARD}</style>
            <div class="sheet pay"><h1>Parkir Pasar Lama</h1><p>NMID : ID1090807060504 &nbsp; A03</p>
            <div class=code>{code(parking)}</div><small>QRIS · motor 2.000 · mobil 5.000</small></div>
            <div class="sheet note">Pasar tutup pukul 17.00.<br>Mohon jaga kebersihan.</div>
            <div class="sheet wifi"><h2>Wi-Fi tamu</h2><div class=code>{code(wifi)}</div><p>Gratis, 1 jam</p></div>""",
    }


def photograph(browser: Browser, html: str, seed: int) -> np.ndarray:
    """The scene through a plain camera: soft focus, vignette, grain; BGR uint8."""
    draft = OUT / "scene.png"
    browser.open("about:blank")
    browser.run("document.open(); document.write(arguments[0]); document.close()", "<!doctype html>" + html)
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
        for seed, (name, html) in enumerate(scenes().items()):
            image = photograph(browser, html, seed)
            (OUT / f"{name}.jpg").write_bytes(jpeg(image, most_bytes=55_000))


if __name__ == "__main__":
    main()
