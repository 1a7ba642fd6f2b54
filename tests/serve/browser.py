"""A real headless Chromium, driven through ChromeDriver's W3C WebDriver protocol with plain HTTP requests."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",  # CI runs as root in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--use-fake-device-for-media-stream",  # a camera that shows a test card
    "--use-fake-ui-for-media-stream",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window of one Chromium; every method is one WebDriver or DevTools command."""

    def __init__(self, session: httpx.Client) -> None:
        self.session = session

    def _post(self, path: str, **body: Any) -> Any:
        answer = self.session.post(path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{path}: {answer['error']}: {answer['message']}")
        return answer

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """Return the result of the JavaScript function body ``script``."""
        return self._post("execute/sync", script=script, args=list(args))

    def wait(self, condition: str, *, seconds: float = 60.0) -> Any:
        """The first true value of a JavaScript expression."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {condition}; the page says: {self.text('body')!r}")
            time.sleep(0.05)
        return value

    def find(self, selector: str) -> str:
        return self._post("element", using="css selector", value=selector)[ELEMENT]

    def click(self, selector: str) -> None:
        self._post(f"element/{self.find(selector)}/click")

    def type(self, selector: str, keys: str) -> None:
        self._post(f"element/{self.find(selector)}/value", text=keys)

    def press(self, keys: str) -> None:
        """Keys to whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def devtools(self, command: str, **params: Any) -> Any:
        return self._post("goog/cdp/execute", cmd=command, params=params)

    def resize(self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def theme(self, name: str) -> None:
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        picture = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)["data"]
        path.write_bytes(base64.b64decode(picture))

    def console(self) -> list[str]:
        """Warnings and errors of the page since the last call, those of the security policy among them."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A fresh browser with an empty profile; the test is skipped where Chromium is not installed."""
    driver, program = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("chromium-browser")
    if driver is None or program is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            port = next(line.rsplit("port ", 1)[1].strip(". \n") for line in process.stdout if "successfully" in line)
            options = {"binary": program, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, verify=False
            ) as driver_http:
                answer = driver_http.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()
                session = f"http://127.0.0.1:{port}/session/{answer['value']['sessionId']}/"
                driver_http.base_url = session
                try:
                    yield Browser(driver_http)
                finally:
                    driver_http.delete(session.rstrip("/"))
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()
