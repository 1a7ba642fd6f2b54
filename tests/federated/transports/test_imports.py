"""Packages of HTTP are imported on first use, and named if they are missing."""

import subprocess
import sys

from arclight._installed import pip_install

HEAVY = ("urllib3", "httptools", "starlette", "uvicorn", "cryptography", "fsspec", "flwr")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100).stdout


def test_optional_packages_are_imported_lazily() -> None:
    code = (
        "import sys, arclight.federated.transports.http_client, arclight.federated.transports.http_server\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(code) == "[]\n"


def test_transport_settings_are_imported_without_torch() -> None:
    code = "import sys, arclight.federated.transports.settings\nprint('torch' in sys.modules)"
    assert run(code) == "False\n"


def test_missing_packages_are_named_with_their_extra() -> None:
    code = (
        "import sys, tempfile\n"
        "from pathlib import Path\n"
        "sys.modules['urllib3'] = None\n"
        "from arclight.fabric.extras import MissingExtraError\n"
        "from arclight.federated.transports.http_client import HttpLink\n"
        "try:\n"
        "    HttpLink('http://127.0.0.1:1', Path(tempfile.mkdtemp()))\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    assert pip_install("federated") in run(code)
