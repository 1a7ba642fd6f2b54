"""Ways to a program that fail without an error, or at once, are never taken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from arclight.deploy import DynamicInt8, Int8, Program, WeightOnly, convert, export, prepare_qat, quantize
from arclight.deploy.settings import Quantization, Target


class Watch:
    """Record the options of torch.onnx.export and torch.compile, and imports of NNCF's modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dynamo: list[Any] = []
        self.backends: list[Any] = []
        self.imports: list[str] = []
        monkeypatch.setattr(sys, "meta_path", [self, *sys.meta_path])
        exporter, compiler = torch.onnx.export, torch.compile

        def exported(*args: Any, **options: Any) -> Any:
            self.dynamo.append(options.get("dynamo", "torch's default"))
            return exporter(*args, **options)

        def compiled(*args: Any, **options: Any) -> Any:
            self.backends.append(options.get("backend", "torch's default"))
            return compiler(*args, **options)

        monkeypatch.setattr(torch.onnx, "export", exported)
        monkeypatch.setattr(torch, "compile", compiled)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Note an import of NNCF; it is left to whoever finds it."""
        if name.partition(".")[0] == "nncf":
            self.imports.append(name)
        return None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_the_watch_sees_each_of_them(watch: Watch, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(ImportError):
        import nncf.torch  # type: ignore[import-not-found] # noqa: F401
    torch.compile(nn.Identity(), backend="openvino")
    torch.onnx.export(nn.ReLU(), (torch.rand(2),), tmp_path / "relu.onnx", dynamo=True)
    assert (watch.imports, watch.backends, watch.dynamo) == (["nncf"], ["openvino"], [True])


@pytest.mark.parametrize(
    ("recipe", "target", "name"),
    [
        (None, None, "fp32.onnx"),
        (None, None, "fp32"),
        (Int8(), "onnxruntime", "int8.onnx"),
        (Int8(), "openvino", "int8"),
        (DynamicInt8(), None, "dynamic.onnx"),
        (WeightOnly(bits=4), None, "w4.onnx"),
        ("qat", "openvino", "qat.onnx"),
    ],
)
def test_openvino_in_torch_compile_the_legacy_exporter_and_nncf_are_never_taken(
    recipe: Quantization | str | None, target: Target | None, name: str, watch: Watch, tmp_path: Path
) -> None:  # fmt: skip
    x = torch.rand(4, 32)
    model: nn.Module = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)
    ).eval()
    if isinstance(recipe, str):
        prepared = prepare_qat(model, x, target=target)
        prepared(x)
        model = convert(prepared)
    elif isinstance(recipe, Int8):
        model = quantize(model, [x], recipe=recipe, target=target)
    elif recipe is not None:
        model = quantize(model, recipe=recipe, example=x)
    program = export(model, tmp_path / name, example_inputs=x)
    Program.load(program.path, runtime="openvino")(x)
    assert watch.dynamo, "nothing was exported"
    assert set(watch.dynamo) == {True}
    assert watch.backends == []
    assert watch.imports == []
