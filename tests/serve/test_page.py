"""The page in a real browser, against a real server."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
import segno
from draw_samples import field, payload
from tests.serve.conftest import LOOPBACK
from tests.serve.test_reload import bare
from tests.serve.test_tensors import SERVE

from arclight.deploy.programs.other_runtime import RuntimeChoice
from arclight.serve.models import ServedModel, proof

ENTER, TAB = "\ue007", "\ue004"
DONE = "document.body.dataset.state === 'done'"


@pytest.fixture
def page(chrome, server):
    """The start of the page in a desktop window, with nothing in the console."""
    chrome.resize(1280, 900)
    chrome.theme("light")
    chrome.console()
    chrome.open(server.url)
    chrome.wait("document.getElementById('health').dataset.ready === 'true'")
    yield chrome
    complaints = [line for line in chrome.console() if "status of 4" not in line]
    assert complaints == []  # neither a script error nor a breach of the content security policy


@pytest.fixture
def code_photo(tmp_path):
    """A picture file of a QR code with a given text."""

    def draw(text: str) -> str:
        path = tmp_path / "code.png"
        segno.make(text, error="m", micro=False).save(str(path), scale=6, border=8)
        return str(path)

    return draw


def test_a_click_on_a_sample_shows_who_is_paid_and_where_the_code_is(page):
    page.click("[data-sample='samples/receipt.jpg']")
    page.wait(DONE)
    assert page.text("#summary") == "1 code found"
    assert page.text(".card .merchant") == "Toko Buku Pelita"
    assert page.text(".card .place") == "Yogyakarta 55271"
    assert page.text(".card .amount b") == "Rp\u00a087.500"
    assert page.text(".card .nmid") == "ID1122334455667"
    assert page.text(".card .flow") == "Dynamic"
    assert page.text(".card .verdict") == "Read without errors"
    assert "pasted over the shop's own" in page.text(".card .compare")
    assert page.text("#advice").startswith("Compare the name with the shop")
    assert page.run("return getComputedStyle(document.querySelector('.verdict')).color") != page.run(
        "return getComputedStyle(document.querySelector('.health .dot')).backgroundColor"
    ), "no green verdict on a payment: a pasted code reads without errors too"
    assert "720 × 960 px" in page.text("#timing")


@pytest.mark.parametrize("scale", [1, 2])
def test_the_mark_lies_on_the_code_at_every_pixel_density(page, scale):
    page.resize(1280, 900, scale=scale)
    page.click("[data-sample='samples/receipt.jpg']")
    page.wait(DONE)
    left, top, right, bottom, drawn, width, shown = page.run("""
        const canvas = document.getElementById("overlay"), photo = document.getElementById("photo");
        const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const box = [Infinity, Infinity, -Infinity, -Infinity];
        let drawn = 0;
        for (let i = 3; i < data.length; i += 4) if (data[i] > 128) {
          const x = ((i - 3) / 4) % width, y = Math.floor((i - 3) / 4 / width);
          box[0] = Math.min(box[0], x); box[1] = Math.min(box[1], y);
          box[2] = Math.max(box[2], x); box[3] = Math.max(box[3], y); drawn += 1;
        }
        const pixels = width / canvas.getBoundingClientRect().width;
        const perImagePixel = pixels * photo.getBoundingClientRect().width / photo.naturalWidth;
        return [...box.map((v) => v / perImagePixel), drawn, width, canvas.clientWidth];
    """)
    assert drawn > 1000
    assert width == pytest.approx(shown * scale, abs=1)
    # The code of the scene, found by zxing-cpp, spans x 210 to 484 and y 380 to 654; the mark adds its line and number.
    assert (left, top, right, bottom) == pytest.approx((210, 380, 484, 654), abs=32)


def test_two_codes_get_two_cards_and_only_the_payment_is_called_one(page):
    page.click("[data-sample='samples/board.jpg']")
    page.wait(DONE)
    assert page.text("#summary") == "2 codes found"
    verdicts = page.run("return [...document.querySelectorAll('.verdict')].map((v) => v.innerText)")
    assert sorted(verdicts) == ["Not a payment code", "Read without errors"]
    assert page.text(".card:not(:has(.merchant)) .said") == "WIFI:T:WPA;S:Tamu Pasar Lama;P:selamat-datang;;"
    assert page.text(".card:has(.merchant) .amount b") == "The payer types it"


def test_a_file_that_is_no_photo_gives_the_servers_sentence(page, tmp_path):
    bad = tmp_path / "photo.jpg"
    bad.write_text("I am a text")
    page.type("#file", str(bad))
    page.wait("document.body.dataset.state === 'error'")
    assert page.text("#summary") == "This photo was not read"
    assert page.text("#advice").startswith("Not an image")
    page.click("[data-sample='samples/counter.jpg']")
    page.wait(DONE)
    assert page.text(".merchant") == "Kopi Lereng Senja"


@pytest.mark.parametrize(
    "text",
    ["<img src=x onerror=\"document.title='owned'\">", "https://example.com/?<script>document.title='owned'</script>"],
)
def test_a_code_cannot_put_markup_or_links_on_the_page(page, code_photo, text):
    page.type("#file", code_photo(text))
    page.wait(DONE)
    assert page.text(".said") == text
    assert page.run("return document.querySelectorAll('#cards img, #cards script, #cards a').length") == 0
    assert page.run("return document.title") == "Arclight: read a payment code"


def test_a_merchant_cannot_put_markup_on_the_page(page, code_photo):
    name = "<b onmouseover=alert(1)>x"
    text = payload(name, "<u>Bogor</u>", "16111", "ID1020304050607", "5814", extra=field(7, "A01"))
    page.type("#file", code_photo(text))
    page.wait(DONE)
    assert page.text(".merchant") == name
    assert page.run("return document.querySelectorAll('.merchant *, .place *').length") == 0


def test_text_cannot_disguise_itself_with_invisible_characters(page, code_photo):
    page.type("#file", code_photo("safe\u202egpj.exe\u200b"))
    page.wait(DONE)
    assert page.text(".said") == "safe⟨U+202E⟩gpj.exe⟨U+200B⟩"


def test_a_damaged_payment_code_is_warned_about_with_its_problems(page, code_photo):
    text = payload("Kopi Lereng Senja", "Bandung", "40132", "ID1020304050607", "5814", extra=field(7, "A01"))
    page.type("#file", code_photo(text.replace("Senja", "Fajar")))
    page.wait(DONE)
    assert page.text(".card h3") == "Do not pay with this code"
    assert "63" in page.text(".problems")
    assert page.run("return document.querySelectorAll('.merchant').length") == 0


def test_a_code_that_is_detected_but_not_read_is_reported(page, code_photo, serve_with):
    server = serve_with("--imagine")
    page.open(server.url)
    page.click("[data-sample='samples/counter.jpg']")
    page.wait(DONE)
    assert page.text("#summary") == "2 codes found, 1 not readable"
    assert page.text("[data-number='2'] h3") == "Found, but not readable"
    assert page.text("[data-number='2'] .verdict") == "Not read"


def test_a_photo_without_codes_gets_advice(page, tmp_path):
    import cv2
    import numpy as np

    cv2.imwrite(str(tmp_path / "wall.png"), np.full((300, 400, 3), 180, np.uint8))
    page.type("#file", str(tmp_path / "wall.png"))
    page.wait(DONE)
    assert page.text("#summary") == "No code found"
    assert "closer" in page.text("#advice")


def test_the_text_of_a_code_opens_and_is_copied_by_keyboard_alone(page):
    page.run("document.getElementById('choose').focus()")
    buttons = page.run("return ['camera', 'live'].filter((id) => !document.getElementById(id).hidden).length")
    page.press(TAB * (buttons + 1) + ENTER)
    page.wait(DONE)
    assert page.text(".merchant") == "Kopi Lereng Senja"
    assert page.run("return document.activeElement.id") == "summary"  # a screen reader reads the result next
    page.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.press(TAB + ENTER)
    assert page.run("return document.querySelector('.raw').open")
    text = page.text(".raw .said")
    page.press(TAB + ENTER)
    page.wait("document.querySelector('.copy').textContent === 'Copied'")
    assert page.run("return navigator.clipboard.readText()") == text


def test_the_camera_takes_a_photo(page):
    page.click("#camera")
    page.wait("!document.getElementById('shutter').disabled")
    page.click("#shutter")
    page.wait(DONE)
    assert page.text("#summary") == "No code found"  # the browser's test picture has none
    assert page.run("return document.getElementById('viewfinder').srcObject") is None


CAMERA = """
    const canvas = document.createElement("canvas"), photo = await createImageBitmap(await (await fetch(arguments[0])).blob());
    [canvas.width, canvas.height] = [photo.width, photo.height];
    const pen = canvas.getContext("2d");
    setInterval(() => pen.drawImage(photo, 0, 0), 50);
    navigator.mediaDevices.getUserMedia = async () => (window.stream = canvas.captureStream(20));
"""
PICTURES = "Number(document.getElementById('timing').textContent.split(' ')[0])"
DRAWN = """
    const canvas = document.getElementById("overlay");
    return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.filter((v, i) => i % 4 === 3 && v > 128).length;
"""


def test_a_camera_is_watched_at_the_pace_of_answers(page):
    page.run("return (async () => {" + CAMERA + "})()", "samples/receipt.jpg")
    page.run(
        "window.asked = 0; const f = fetch; window.fetch = (u, o) => { window.asked += u === '/detect'; return f(u, o); }"
    )
    page.click("#live")
    page.wait(f"{PICTURES} >= 3")
    assert page.run("return document.body.dataset.state") == "live"
    assert page.text("#summary") == "1 code in sight"
    assert page.text(".card .merchant") == "Toko Buku Pelita"
    assert (
        page.run("return document.getElementById('overlay').getAttribute('aria-label')") == "1 code marked on the photo"
    )
    asked, answered = page.run(f"return [window.asked, {PICTURES}]")
    assert asked - answered in (0, 1)  # one picture is on its way at most
    page.run("window.card = document.querySelector('.card')")
    page.wait(f"{PICTURES} >= {answered + 2}")
    assert page.run("return window.card.isConnected"), "a card stays as long as the same codes are seen"
    page.click("#stop")
    page.wait(DONE)
    assert page.text("#summary") == "No longer watching"
    assert page.run("return window.stream.getTracks().every((track) => track.readyState === 'ended')")
    page.wait("!document.getElementById('photo').hidden && document.getElementById('photo').naturalWidth === 720")
    assert page.run(DRAWN) > 500
    assert page.text(".card .merchant") == "Toko Buku Pelita"


def test_the_browsers_own_camera_is_watched_and_a_photo_ends_that(page):
    page.click("#live")
    page.wait(f"{PICTURES} >= 2")
    assert page.text("#summary") == "Watching"
    page.click("[data-sample='samples/counter.jpg']")
    page.wait(DONE)
    assert page.text(".merchant") == "Kopi Lereng Senja"
    assert page.run("return document.getElementById('moving').srcObject") is None
    assert page.run("return document.getElementById('stop').hidden")


def test_a_photo_that_is_chosen_while_the_browser_asks_keeps_the_camera_off(page):
    page.run(
        "navigator.mediaDevices.getUserMedia = () => new Promise((allow) => { window.allow = () => allow(window.stream = "
        "document.createElement('canvas').captureStream(20)); })"
    )
    page.click("#live")
    page.wait("typeof window.allow === 'function'")
    page.click("[data-sample='samples/counter.jpg']")
    page.wait(DONE)
    page.run("window.allow()")
    page.wait("window.stream.getTracks().every((track) => track.readyState === 'ended')")
    assert page.text(".merchant") == "Kopi Lereng Senja"
    assert page.run("return document.getElementById('moving').srcObject") is None
    assert page.run("return [document.getElementById('stop').hidden, document.getElementById('live').hidden]") == [
        True,
        False,
    ]


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_watching_that_is_stopped_ends_once_also_while_the_browser_asks(page, runs, asks):
    ends = page.run(
        """
        return (async ([runs, asks]) => {
          const { Live } = await import("/live.js");
          const ends = [];
          const live = new Live({ video: document.createElement("video"), onEnd: (...end) => ends.push(end) });
          if (runs) live.run = new AbortController();
          if (asks) live.asked = {};
          live.last = "picture";
          live.stop();
          live.stop();
          return ends;
        })(arguments)
        """,
        runs,
        asks,
    )
    assert ends == ([["stopped", "picture"]] if runs else [["stopped", None]] if asks else [])


def test_a_camera_without_permission_is_reported(page):
    page.run("navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError'); }")
    page.click("#live")
    page.wait("document.body.dataset.state === 'error'")
    assert page.text("#advice").startswith("The browser was not allowed to use the camera")


def test_a_video_is_played_and_watched_to_its_end(page, tmp_path, sample):
    import cv2
    import numpy as np

    photo = cv2.imdecode(np.frombuffer(sample("counter"), np.uint8), cv2.IMREAD_COLOR)
    video = cv2.VideoWriter(str(tmp_path / "a.webm"), cv2.VideoWriter_fourcc(*"VP80"), 10, (360, 480))
    for _ in range(20):
        video.write(cv2.resize(photo, (360, 480), interpolation=cv2.INTER_AREA))
    video.release()
    page.type("#file", str(tmp_path / "a.webm"))
    page.wait(f"{PICTURES} >= 1")
    page.wait(DONE)
    assert page.text("#summary") == "The video has ended"
    assert page.text(".merchant") == "Kopi Lereng Senja"
    assert "360 × 480 px" in page.text("#timing")


def test_the_page_reports_a_file_that_is_not_a_video(page, tmp_path):
    (tmp_path / "a.webm").write_text("I am a text")
    page.type("#file", str(tmp_path / "a.webm"))
    page.wait("document.body.dataset.state === 'error'")
    assert page.text("#advice") == "This browser cannot play this video."


def test_a_full_server_is_asked_again_while_watching(page):
    page.run("""
        const f = fetch;
        window.busy = 2;
        window.fetch = (u, o) => (u === "/detect" && window.busy-- > 0
          ? Promise.resolve(new Response('{"error": "x"}', { status: 429, headers: { "Retry-After": "0.05" } })) : f(u, o));
    """)
    page.click("#live")
    page.wait(f"{PICTURES} >= 1")
    page.click("#stop")
    page.wait(DONE)
    assert page.run("return window.busy") < 0, "it was refused twice before"


GATED = """
import itertools, time
from pathlib import Path
from arclight.deploy import Program
calls, call = itertools.count(), Program.__call__
def gated(program, *inputs):
    while next(calls) >= 40 and not Path({gate!r}).exists():
        time.sleep(0.01)
    return call(program, *inputs)
Program.__call__ = gated
"""


def test_a_language_model_writes_on_the_page(chrome, serve_with, language_path, tmp_path):
    gate = tmp_path / "gate"
    (tmp_path / "serve.py").write_text(GATED.format(gate=str(gate)) + SERVE)
    server = serve_with(f"lm={language_path}", program=str(tmp_path / "serve.py"))
    chrome.open(server.url)
    chrome.wait("!document.getElementById('writer').hidden")
    assert chrome.run("return document.querySelector('.start').hidden"), "nothing here looks at photos"
    chrome.type("#prompt", "hello")
    chrome.click("#write")
    chrome.wait(
        "document.getElementById('written').textContent.length > 5"
    )  # as it is written: the rest waits for the gate
    begun = chrome.run("return document.getElementById('written').textContent")
    assert chrome.text("#writer-note") == "Writing"
    gate.touch()
    chrome.wait("document.getElementById('writer-note').textContent.startsWith('Stopped after 200 tokens')")
    whole = chrome.run("return document.getElementById('written').textContent")
    assert whole.startswith(begun)
    assert len(whole) > len(begun)
    chrome.run("document.getElementById('prompt').value = 'x'.repeat(300)")
    chrome.click("#write")
    chrome.wait("document.getElementById('writer-note').textContent.includes('positions')")
    assert chrome.run("return document.getElementById('writer-stop').hidden")
    assert [line for line in chrome.console() if "status of 400" not in line] == []


def test_a_photo_can_be_dropped_and_pasted(page):
    deliver = """
        const transfer = new DataTransfer();
        const photo = await (await fetch("samples/counter.jpg")).blob();
        transfer.items.add(new File([photo], "a.jpg", { type: "image/jpeg" }));
        const options = { bubbles: true, cancelable: true };
        document.body.dispatchEvent(%s);
    """
    for event in (
        'new DragEvent("drop", { ...options, dataTransfer: transfer })',
        'new ClipboardEvent("paste", { ...options, clipboardData: transfer })',
    ):
        page.run("document.body.dataset.state = 'start'; return (async () => {" + deliver % event + "})()")
        page.wait(DONE)
        assert page.text(".merchant") == "Kopi Lereng Senja"


def test_a_lost_server_is_reported_and_the_photo_can_be_sent_again(chrome, serve_with):
    server = serve_with()
    chrome.open(server.url)
    chrome.wait("document.getElementById('health').dataset.ready === 'true'")
    chrome.run(
        "window.gone = window.fetch; window.fetch = (u, o) => o ? Promise.reject(new TypeError('x')) : gone(u, o)"
    )
    chrome.click("[data-sample='samples/counter.jpg']")
    chrome.wait("document.body.dataset.state === 'error'")
    assert chrome.text("#summary") == "The server did not answer"
    chrome.run("window.fetch = window.gone")
    chrome.click("#retry")
    chrome.wait(DONE)
    assert chrome.text(".merchant") == "Kopi Lereng Senja"
    chrome.console()


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_is_never_wider_than_the_window(page, width):
    page.resize(width, 800, mobile=width < 500)
    for step in ("start", "board"):
        if step != "start":
            page.click(f"[data-sample='samples/{step}.jpg']")
            page.wait(DONE)
        assert page.run("return document.documentElement.scrollWidth") <= width


def test_the_dark_theme_is_dark(page):
    page.theme("dark")
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in background.strip("rgb()").split(",")) < 64


def test_the_page_loads_nothing_from_elsewhere(page, server):
    page.click("[data-sample='samples/counter.jpg']")
    page.wait(DONE)
    addresses = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(addresses) > 5
    assert {address for address in addresses if not address.startswith((server.url, "blob:"))} == set()


def test_each_model_has_a_card_with_its_proof(chrome, serve_with, one_box_path, tmp_path):
    (tmp_path / "serve.py").write_text(SERVE)
    bare(tmp_path / "other.onnx")
    words = [f"codes={one_box_path}", f"other={tmp_path / 'other.onnx'}"]
    server = serve_with(*words, program=str(tmp_path / "serve.py"))
    chrome.open(server.url)
    chrome.wait("document.querySelectorAll('.model').length === 2")
    [codes, other] = server.get("/models").json()
    assert codes["proof"][0].startswith("Agrees with its torch model to ")
    shown = chrome.text("#models-list")
    assert shown.startswith("codes\n")
    assert "finds objects in photos, fp32, in ONNX Runtime, version " + codes["version"] in shown
    assert codes["proof"][0] in shown
    assert other["proof"] == []
    assert "Nothing was recorded of this program when it was exported." in shown
    assert chrome.console() == []


def test_models_are_shown_once_the_key_is_given(chrome, serve_with):
    key = "correct-horse-battery"
    server = serve_with(f"--api-key={key}")
    assert httpx.get(f"{server.url}/models", **LOOPBACK).status_code == 401
    chrome.open(server.url)
    chrome.wait("document.getElementById('health').dataset.ready === 'true'")
    assert chrome.run("return document.getElementById('models').hidden")
    chrome.click("[data-sample='samples/receipt.jpg']")
    chrome.wait("document.getElementById('key-dialog').open")
    chrome.run("document.getElementById('key').value = arguments[0]", key)
    chrome.click("#key-send")
    chrome.wait("!document.getElementById('models').hidden")
    chrome.console()


def test_the_proof_of_a_quantized_program_has_metric_and_speed():
    metadata = {
        "parity": {"sqnr_db": 41.2, "outputs": {}},
        "quantization": {
            "metric": {"program": 0.912, "float": 0.917},
            "speed": {"over_fp32": 3.1, "low": 2.9, "high": 3.3, "size_over_fp32": 0.27},
        },
    }
    loaded = SimpleNamespace(metadata=metadata, runtime="onnxruntime", choice=RuntimeChoice(exported_for="onnxruntime"))
    sentences = [
        "Agrees with its torch model to 41 dB.",
        "Its metric is 0.912, that of the float model 0.917.",
        "It is 3.10 x as fast as float32 (2.90-3.30, one sample, one thread) in 27% of its size.",
    ]
    assert proof(ServedModel(name="m", loaded=loaded)) == sentences
    loaded.runtime = "openvino"
    assert proof(ServedModel(name="m", loaded=loaded)) == [
        *sentences[:2],
        sentences[2].removesuffix(".") + ", in ONNX Runtime.",
        "It runs in OpenVINO, not compared with ONNX Runtime, which it was exported for.",
    ]
