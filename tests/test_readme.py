"""What the README and the guides say is what happens: their code runs, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def block(language: str, page: str = "README.md") -> str:
    """The block of a page marked as tested, in one language."""
    found = re.search(rf"<!-- tested -->\n```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found, f"{page} has no tested block in {language}"
    return found.group(1)


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python"))
    folder = tmp_path / run([sys.executable, "example.py"], tmp_path).strip().splitlines()[-1]
    assert (folder / "metrics.csv").exists()
    assert any((folder / "checkpoints").iterdir())


def test_shell(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="needs the vision extra")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for line in block("sh").strip().splitlines():
        run(["bash", "-c", line], tmp_path)
    assert (tmp_path / "runs" / "codes.json").exists()
    for run_of in ("detect-qris", "lm-debug"):
        assert (tmp_path / "runs" / run_of / "1" / "report.html").exists()
    assert (tmp_path / "runs" / "lm-hf" / "model.safetensors").exists()


def test_pipelines(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the guide cuts a model of transformers")
    (tmp_path / "example.py").write_text(block("python", "docs/pipelines.md"))
    cuts, names = run([sys.executable, "example.py"], tmp_path).strip().splitlines()
    assert cuts.endswith("{'transformer.wte.weight': (0, 3)}")
    assert "transformer.h." in names
    assert "https://" not in (tmp_path / "predicted.html").read_text()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named <= targets
    assert {"setup", "demo", "test", "test-all", "check", "bench"} <= targets


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
