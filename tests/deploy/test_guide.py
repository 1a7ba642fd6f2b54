"""The guide's example runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import warm
from tests.test_readme import block

from arclight.deploy import Program


@pytest.mark.slow
def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md"))
    lines = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert any(line.startswith("('0', '3', '7') ()") for line in lines), lines
    assert any(line.startswith("torch.Size([5, 2]) {") for line in lines), lines
    kernels = [
        Program.load(tmp_path / name).metadata["quantization"]["integer_kernels"] for name in ("int8.onnx", "qat.onnx")
    ]
    assert [sum(counts.values()) for counts in kernels] == [3, 3]


@pytest.mark.slow
def test_targets(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 1))
    printed = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout
    assert printed.startswith("openvino openvino {'Convolution': 3} {'over_fp32': "), printed


@pytest.mark.slow
def test_recipes(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 2))
    first, second, third = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert first.startswith("{'MatMulNBits': 2} {'float': "), first
    assert second.endswith(" dB"), second
    assert third.startswith("('0',) (Evaluation(float_layers=0"), third
    assert Program.load(tmp_path / "w4.onnx").metadata["quantization"]["metric"]["max_drop"] == 0.05


@pytest.mark.slow
def test_formats(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 3))
    printed = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout
    assert printed.startswith("openvino Counter({"), printed
    assert printed.strip().endswith("torch.Size([5, 8])"), printed


def test_a_module_ships(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 4))
    printed = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout
    assert printed.startswith("torch.Size([3, 7, 5]) {'example': {'batch': 8, 'time': 20}, 'batch 1, time 1'"), printed


@pytest.mark.slow
def test_comparing(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 5))
    printed = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout
    assert "accuracy  " in printed
    assert "worst sample sample " in printed
    assert printed.strip().endswith(", ())"), printed


@pytest.mark.slow
def test_verifying(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/deploy.md", 6))
    printed = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout
    assert printed.startswith("static: 3 integer layers, "), printed
    assert "integer_share: onnxruntime runs " in printed
