"""The guide's example runs as it stands."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest
from tests import warm
from tests.test_readme import ROOT, SMALL_DETECTOR, SMALL_MODEL, block, smaller

from arclight.cli.schema import Recipe
from arclight.deploy import Program
from arclight.deploy.quantizing.training_settings import Int8Training
from arclight.recipe import read

PLACES = {
    "python": 0,
    "targets": 1,
    "recipes": 2,
    "several": 3,
    "formats": 4,
    "runtimes": 5,
    "comparing": 7,
    "verifying": 8,
}
RUN_ALL = """
import os, runpy, sys, traceback
import onnxscript, torchao
from arclight.deploy import Program, convert, export, prepare_qat, quantize, verify_quantizer

for name in sys.argv[1:]:
    if not (pid := os.fork()):
        os.chdir(name)
        os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT), 1)
        try:
            runpy.run_path("example.py", run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each example, with what it has printed: all run in forks of a process that has imported what they need."""
    folder = tmp_path_factory.mktemp("guide")
    for name, place in PLACES.items():
        (folder / name).mkdir()
        (folder / name / "example.py").write_text(block("python", "docs/deploy.md", place))
    (folder / "all.py").write_text(RUN_ALL)
    warm.run("all.py", *PLACES, cwd=folder, timeout=600, check=True)
    return folder


@pytest.mark.slow
def test_python(ran: Path) -> None:
    lines = (ran / "python" / "said.txt").read_text().splitlines()
    assert any(line.startswith("('0', '3', '7') ()") for line in lines), lines
    assert any(line.startswith("torch.Size([5, 2]) {") for line in lines), lines
    kernels = [
        Program.load(ran / "python" / name).metadata["quantization"]["integer_kernels"]
        for name in ("int8.onnx", "qat.onnx")
    ]
    assert [sum(counts.values()) for counts in kernels] == [3, 3]


@pytest.mark.slow
def test_targets(ran: Path) -> None:
    printed = (ran / "targets" / "said.txt").read_text()
    assert printed.startswith("openvino openvino {'Convolution': 3} {'over_fp32': "), printed


@pytest.mark.slow
def test_recipes(ran: Path) -> None:
    first, second, third = (ran / "recipes" / "said.txt").read_text().splitlines()
    assert first.startswith("{'MatMulNBits': 2} {'float': "), first
    assert second.endswith(" dB"), second
    assert third.startswith("('0',) (Evaluation(float_layers=0"), third
    assert Program.load(ran / "recipes" / "w4.onnx").metadata["quantization"]["metric"]["max_drop"] == 0.05


@pytest.mark.slow
def test_several_formats(ran: Path) -> None:
    first, second = (ran / "several" / "said.txt").read_text().splitlines()
    assert first == "programs/onnx programs/openvino"
    kept = Program.load(ran / "several" / "program")
    assert second == f"{kept.format} {kept.metadata['fastest']['wall_ms']}"


@pytest.mark.slow
def test_formats(ran: Path) -> None:
    printed = (ran / "formats" / "said.txt").read_text()
    assert printed.startswith("openvino Counter({"), printed
    assert printed.strip().endswith("torch.Size([5, 8])"), printed


@pytest.mark.slow
def test_runtimes(ran: Path) -> None:
    first, second = (ran / "runtimes" / "said.txt").read_text().splitlines()
    assert first.startswith(
        "It runs in OpenVINO, and agrees with itself in ONNX Runtime, which it was exported for, to "
    )
    assert second.split(" ", 1)[0] in ("onnxruntime", "openvino")
    assert "'openvino': " in second
    assert "'onnxruntime': " in second


def test_a_module_ships(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 6))
    printed = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout
    assert printed.startswith("torch.Size([3, 7, 5]) {'example': {'batch': 8, 'time': 20}, 'batch 1, time 1'"), printed


@pytest.mark.slow
def test_comparing(ran: Path) -> None:
    printed = (ran / "comparing" / "said.txt").read_text()
    assert "accuracy  " in printed
    assert "worst sample sample " in printed
    assert printed.strip().endswith(", ())"), printed


@pytest.mark.slow
def test_verifying(ran: Path) -> None:
    printed = (ran / "verifying" / "said.txt").read_text()
    assert printed.startswith("static: 3 integer layers, "), printed
    assert "integer_share: onnxruntime runs " in printed


SMALLER = {
    'model = "yolov5n"': 'model = "detector.yaml"',
    "image_size = 320": "image_size = 64",
    "workers = 2": "workers = 0",
}
SHORT = {
    "sequence_length = 256": "sequence_length = 64",
    "max_steps = 300": "max_steps = 2",
    "val_check_interval = 100": "val_check_interval = 2",
}
SIZES = {
    "detect-qris.toml": {**SMALLER, "max_epochs = 12": "max_epochs = 3"},
    "detect-qris-int8.toml": {**SMALLER, "max_epochs = 3": "max_epochs = 1"},
    "lm-debug.toml": SMALL_MODEL | SHORT,
}  # fmt: skip


@pytest.mark.slow
def test_runs_with_rounding(tmp_path: Path) -> None:
    """The commands run one after the other, on recipes and pictures that are small."""
    pytest.importorskip("cv2", reason="needs the vision extra")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "detector.yaml").write_text(SMALL_DETECTOR)
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / f"texts/{number}.txt").write_text(f"a source tells story {number}. " * 40)
    for name, sizes in SIZES.items():
        text = smaller((ROOT / "recipes" / name).read_text(), sizes)
        (tmp_path / "recipes" / name).write_text(text.replace("[qat]", "[qat]\nmin_sqnr_db = -50"))
    warm.run(
        "-m", "arclight.cli", "data", "qris", "--out", "runs/data/qris", "--count", "10", "--size", "128", cwd=tmp_path, timeout=300, check=True
    )  # fmt: skip
    lines = [shlex.split(line, comments=True) for line in block("sh", "docs/deploy.md").splitlines()]
    assert [words[:2] for words in lines[:3]] == [
        ["arclight", "train"],
        ["arclight", "train"],
        ["arclight", "validate"],
    ]
    for _, *words in lines:
        added = ["--qat.min_sqnr_db", "-50"] if "--qat.kind" in words else []  # nothing is learned in so few steps
        warm.run("-m", "arclight.cli", *words, *added, cwd=tmp_path, timeout=600, check=True)
    reports = {name: Program.load(tmp_path / name).metadata["quantization"] for name in ("int8.onnx", "w4.onnx")}
    assert all(report["trained"] for report in reports.values())
    assert sum(reports["int8.onnx"]["integer_kernels"].values()) >= 0.9 * reports["int8.onnx"]["quantized_layers"] > 0
    assert reports["w4.onnx"]["bits"] == 4


def test_the_table_of_runs_with_rounding() -> None:
    shown = tomllib.loads(block("toml", "docs/deploy.md", 0))
    task = {"kind": "detection", "data": "data.yaml"}
    made = read(Recipe, {"task": task, **shown}).qat
    assert made == Int8Training(
        target="onnxruntime", skip=("model.24",), freeze_observers_at=600, freeze_batch_norm_at=600
    )  # fmt: skip
