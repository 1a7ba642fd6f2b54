"""The guide's programs, command and client run as they stand, on a free port."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import warm
from tests.ports import free_port
from tests.serve.conftest import started
from tests.test_readme import block

GUIDE = "docs/serve.md"
CLI = "from arclight.cli import main\nraise SystemExit(main())\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_box_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with the guide's programs, and the port of the server that its command has started there."""
    path = tmp_path_factory.mktemp("guide")
    shutil.copy(one_box_path, path / "detector.onnx")
    (path / "export.py").write_text(block("python", GUIDE))
    warm.run("export.py", cwd=path, timeout=600, check=True)
    (path / "cli.py").write_text(CLI)
    port = free_port()
    words = shlex.split(block("sh", GUIDE).replace("8000", str(port)))
    assert words[0] == "arclight"
    with started(["cli.py", *words[1:]], port, cwd=path):
        yield path, port


@pytest.mark.slow
def test_the_client_gets_boxes_and_tensors(folder, sample):
    path, port = folder
    (path / "photo.jpg").write_bytes(sample("counter"))
    (path / "client.py").write_text(block("python", GUIDE, 1).replace("8000", str(port)))
    box, records, tensor, binary = warm.run("client.py", cwd=path, timeout=600, check=True).stdout.splitlines()
    assert box == "qr_code 0.9 [150.0, 330.0, 330.0, 630.0]"
    assert records == "[('qr_code', 150.0)]"
    assert (tensor, binary) == ("[1.0, 3.0, 5.0]", "[1. 3. 5.]")
