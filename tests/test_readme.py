"""What the README and the guides say is what happens: their code runs, in order, in an empty folder."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
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
    for run_of in ("detect-qris", "lm-debug", "fed-lm"):
        assert (tmp_path / "runs" / run_of / "1" / "report.html").exists()
    assert (tmp_path / "runs" / "lm-hf" / "model.safetensors").exists()


def test_pipelines(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the guide cuts a model of transformers")
    example = block("python", "docs/pipelines.md")
    (tmp_path / "example.py").write_text(example + "print(len(tokens), len(micro_batch['input_ids']))\n")
    *rest, sizes = run([sys.executable, "example.py"], tmp_path).strip().splitlines()
    samples, of_one = map(int, sizes.split())
    assert f"micro_batches={samples // of_one}, loss" in example  # the example is of the size that is run
    cuts, names = rest
    assert cuts.endswith("{'transformer.wte.weight': (0, 3)}")
    assert "transformer.h." in names
    assert "https://" not in (tmp_path / "predicted.html").read_text()


def test_federated_across_processes(tmp_path: Path) -> None:
    """The commands of the guide, with a recipe that is small and a port that is free."""
    recipe = (ROOT / "recipes/fed-lm.toml").read_text()
    small = {
        "rounds = 8": "rounds = 2",
        "local_steps = 25": "local_steps = 2",
        "limit_val_batches = 20": "limit_val_batches = 2",
    }
    for before, after in small.items():
        assert before in recipe
        recipe = recipe.replace(before, after)
    recipe = recipe.replace('model = "llama3-debug"', 'model = "llama3-debug"\noverrides = {layers = 1}')
    recipe = recipe.replace('data = "stdlib"', 'data = "texts"\ntokenizer = "bytes"')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/fed-lm.toml").write_text(recipe)
    for source in range(5):
        (tmp_path / f"texts/{source}").mkdir(parents=True)
        for number in range(12):
            (tmp_path / f"texts/{source}/{number}.txt").write_text(f"source {source} tells story {number}. " * 40)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = block("sh", "docs/federated.md").replace("8470", str(port))
    said = run(["bash", "-ec", script], tmp_path)
    assert "node site-b is done: all 2 rounds are done" in said
    assert (tmp_path / "runs/fed-lm/1/report.html").exists()


def test_federated_in_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/federated.md"))
    weights, *simulated = run([sys.executable, "example.py"], tmp_path).strip().splitlines()
    found = ast.literal_eval(weights)
    assert abs(found["layer.weight"] - 2) < 0.3
    assert abs(found["layer.bias"] - 1) < 0.3
    assert simulated


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named <= targets
    assert {"setup", "demo", "test", "test-all", "check", "bench"} <= targets


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
