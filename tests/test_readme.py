"""The code of the README and the guides runs, in order, in an empty folder."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests import warm
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]


def block(language: str, page: str = "README.md", place: int = 0) -> str:
    """The block of a page marked as tested, in one language; the first, or that at ``place``."""
    found = re.findall(rf"<!-- tested -->\n```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(found) > place, f"{page} has {len(found)} tested blocks in {language}"
    return str(found[place])


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python"))
    folder = tmp_path / warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.strip().splitlines()[-1]
    assert (folder / "metrics.csv").exists()
    assert any((folder / "checkpoints").iterdir())


COMMANDS = {  # those that need what one before them has left are in one group
    "federate": "federate ",
    "plan": "plan ",
    "doctor": "doctor",
    "detector": "qris|detector",
    "language": "lm-",
}


def commands() -> dict[str, list[str]]:
    """The README's commands in their groups and order; every one is in a group."""
    found: dict[str, list[str]] = {name: [] for name in COMMANDS}
    for line in block("sh").strip().splitlines():
        words = shlex.join(shlex.split(line, comments=True))
        found[next(name for name, pattern in COMMANDS.items() if re.search(pattern, words))].append(words)
    return found


def smaller(text: str, sizes: dict[str, str]) -> str:
    for before, after in sizes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


SMALL_MODEL = {
    'model = "llama3-debug"': 'model = "llama3-debug"\noverrides = {layers = 1, dim = 64, heads = 2, kv_heads = 1, hidden = 96}',
    'data = "stdlib"': 'data = "texts"\ntokenizer = "bytes"',
    "limit_val_batches = 20": "limit_val_batches = 2",
}
SMALL_DETECTOR = """
anchors: [[20,20, 26,26], [30,30, 40,40]]
backbone: [[-1, 1, Conv, [16, 3, 2]], [-1, 1, Conv, [24, 3, 2]], [-1, 1, Conv, [32, 3, 2]], [-1, 1, Conv, [32]]]
head: [[-1, 1, Conv, [48, 3, 2]], [[3, 4], 1, Detect, [nc, anchors]]]
"""
SMALL_RECIPES = {
    "detect-qris.toml": {
        'model = "yolov5n"': 'model = "recipes/detector.yaml"',
        "image_size = 320": "image_size = 64",
        "workers = 2": "workers = 0",
    },
    "lm-debug.toml": SMALL_MODEL | {"sequence_length = 256": "sequence_length = 64"},
    "fed-lm.toml": SMALL_MODEL | {"sequence_length = 256": "sequence_length = 64"},
}


def small_recipes(folder: Path) -> None:
    """The recipes under their names, on little models and texts."""
    (folder / "recipes").mkdir()
    (folder / "recipes/detector.yaml").write_text(SMALL_DETECTOR)
    for name, sizes in SMALL_RECIPES.items():
        (folder / "recipes" / name).write_text(smaller((ROOT / "recipes" / name).read_text(), sizes))
    for source in range(5):
        (folder / f"texts/{source}").mkdir(parents=True)
        for number in range(12):
            (folder / f"texts/{source}/{number}.txt").write_text(f"source {source} tells story {number}. " * 40)


LEFT = {
    "detector": ("codes.json", "detect-qris/1/report.html"),
    "language": ("lm-debug/1/report.html", "lm-hf/model.safetensors"),
    "federate": ("fed-lm/1/report.html",),
}


@pytest.mark.parametrize("group", COMMANDS)
def test_commands(group: str, tmp_path: Path) -> None:
    """As they are typed, on recipes and pictures that are small."""
    pytest.importorskip("cv2", reason="needs the vision extra")
    small_recipes(tmp_path)
    assert commands()[group]
    for line in commands()[group]:
        if " data qris " in line:
            line = smaller(line, {"--count 60": "--count 10 --size 128"})
        program, *words = shlex.split(line)
        assert program == "arclight"
        warm.run("-m", "arclight.cli", *words, cwd=tmp_path, timeout=300, check=True)
    assert all((tmp_path / "runs" / name).exists() for name in LEFT.get(group, ()))
    if group == "detector":
        runs_on_integers(tmp_path / "runs/detector-int8.onnx", 6)


def runs_on_integers(program: Path, layers: int) -> None:
    """All of a detector's layers but the one that reads the image do, to nearly the numbers that its float model gives."""
    from arclight.deploy import Program

    found = Program.load(program).metadata["quantization"]
    assert sum(found["integer_kernels"].values()) >= 0.95 * found["quantized_layers"] >= 0.95 * layers
    assert found["float_layers"] == ["model.0.conv"]
    assert found["against_float"]["sqnr_db"] >= 30


IN_A_SHELL = {"data", "plan", "doctor"}
"""Verbs that a shell starts, with the script that an installation puts in its path: those that train nothing."""


@pytest.mark.slow
def test_shell(tmp_path: Path) -> None:
    """The commands as they are, on recipes as they are but for the size of data; some in a shell, the others without importing torch again."""
    pytest.importorskip("cv2", reason="needs the vision extra")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for line in block("sh").strip().splitlines():
        if " data qris " in line:
            line = smaller(line, {"--count 60": "--count 24"})
        program, *words = shlex.split(line, comments=True)
        if words[0] in IN_A_SHELL:
            run(["bash", "-c", line], tmp_path)
        else:
            assert program == "arclight"
            few = ["--trainer.limit_val_batches", "2"] if words[0] in ("train", "federate") else []
            warm.run("-m", "arclight.cli", *words, *few, cwd=tmp_path, timeout=600, check=True)
    assert all((tmp_path / "runs" / name).exists() for names in LEFT.values() for name in names)
    runs_on_integers(tmp_path / "runs/detector-int8.onnx", 59)
    takes_less_time(tmp_path / "runs/detector-int8.onnx")


def takes_less_time(path: Path) -> None:
    """A detector's program, of processor time, than the network it is made of."""
    from arclight.deploy import Program, benchmark
    from arclight.vision import build_model

    program = Program.load(path, threads=1)
    network = build_model("yolov5n", len(program.metadata["names"])).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table = benchmark({"torch": network, "int8": program}, torch.rand(1, 3, 320, 320), rounds=5)
    torch.set_num_threads(threads)
    assert table["int8"].cpu_ms < table["torch"].cpu_ms


@pytest.mark.slow
def test_pipelines(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the guide cuts a model of transformers")
    example = block("python", "docs/pipelines.md")
    (tmp_path / "example.py").write_text(example + "print(len(tokens), len(micro_batch['input_ids']))\n")
    *rest, sizes = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.strip().splitlines()
    samples, of_one = map(int, sizes.split())
    assert f"micro_batches={samples // of_one}, loss" in example  # the example is of the size that is run
    cuts, names = rest
    assert cuts.endswith("{'transformer.wte.weight': (0, 3)}")
    assert "transformer.h." in names
    assert "https://" not in (tmp_path / "predicted.html").read_text()


def carried_out(script: str, folder: Path) -> str:
    """Run simple shell lines, some in the background, without a Python process for each; return the output."""
    with ExitStack() as stack:
        behind, said = [], ""
        for line in script.strip().splitlines():
            program, *words = shlex.split(line, comments=True) or [""]
            assert program in ("", "arclight", "wait"), line
            if words and words[-1] == "&":
                behind.append(stack.enter_context(warm.Program("-m", "arclight.cli", *words[:-1], cwd=folder)))
            elif words:
                said += warm.run("-m", "arclight.cli", *words, cwd=folder, timeout=300, check=True).stdout
        for one in behind:
            assert one.wait(300) == 0, one.said()[1]
            said += one.said()[0]
    return said


@pytest.mark.parametrize("by", ["warm", pytest.param("shell", marks=pytest.mark.slow)])
def test_federated_across_processes(by: str, tmp_path: Path) -> None:
    """The commands of the guide, with a recipe that is small and a port that is free."""
    small_recipes(tmp_path)
    recipe = tmp_path / "recipes/fed-lm.toml"
    recipe.write_text(smaller(recipe.read_text(), {"rounds = 8": "rounds = 2", "local_steps = 25": "local_steps = 2"}))
    port = free_port()
    script = block("sh", "docs/federated.md").replace("8470", str(port))
    said = run(["bash", "-ec", script], tmp_path) if by == "shell" else carried_out(script, tmp_path)
    assert "node site-b is done: all 2 rounds are done" in said
    assert (tmp_path / "runs/fed-lm/1/report.html").exists()


@pytest.mark.parametrize("clients", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_federated_in_python(clients: int, tmp_path: Path) -> None:
    """The guide's example, which simulates a thousand clients, or a tenth of them."""
    sizes = {} if clients == 1000 else {"clients=1_000": f"clients={clients}", "per_round=100": "per_round=10"}
    (tmp_path / "example.py").write_text(smaller(block("python", "docs/federated.md"), sizes))
    weights, *simulated = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.strip().splitlines()
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
