"""ExecuTorch's format: integers placed for XNNPACK, the kernels that it makes of them, and its runtime."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.deploy import executorch_site
from tests.exports import compare_here
from torch import Tensor, nn
from torch.fx import Node

from arclight.deploy import ExportError, Program, ProgramError, QuantizedModel, WeightOnly, export, quantize
from arclight.deploy.capture import capture
from arclight.deploy.formats import formats
from arclight.deploy.formats.formats import planned_size
from arclight.deploy.programs import folder
from arclight.deploy.programs.executorch_runtime import INTEGER_KERNELS, ExecuTorchSession
from arclight.fabric import MissingExtraError

aten, decomposed = torch.ops.aten, torch.ops.quantized_decomposed
IMAGES = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Mixed(nn.Module):
    """A SiLU, a ReLU, a sum, a concatenation, a convolution that is only read in float, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.decoded, self.head = nn.Conv2d(16, 4, 1), nn.Linear(16, 5)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # as nn.Sequential calls it: copies of graphs rename it
        features = nn.functional.silu(self.stem(input))
        both = torch.cat([features + self.left(features).relu(), self.right(features).relu()], 1)
        return self.decoded(both).sigmoid(), self.head(both.mean((2, 3)))


@pytest.fixture(scope="module")
def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().eval()


@pytest.fixture(scope="module")
def quantized(mixed: nn.Module) -> QuantizedModel:
    return quantize(mixed, [IMAGES], target="executorch")


@pytest.fixture(scope="module")
def program(quantized: QuantizedModel, tmp_path_factory: pytest.TempPathFactory) -> Program:
    handlers = list(logging.root.handlers)
    with pytest.MonkeyPatch.context() as patched:
        compare_here(patched, rounds=2)
        made = export(quantized, tmp_path_factory.mktemp("programs") / "int8", example_inputs=IMAGES)
    assert logging.root.handlers == handlers  # executorch configures logging as it is imported
    return made


def layers(quantized: QuantizedModel) -> list[Node]:
    kinds = (aten.conv2d.default, aten.linear.default)
    return [node for node in quantized.graph.graph.nodes if node.target in kinds]


# -- placement, without executorch ---------------------------------------------------------------------------------


def test_every_integer_layer_writes_integers(quantized: QuantizedModel) -> None:
    """XNNPACK has no kernel that reads integers and writes float, so a linear layer is rounded even where only an output reads it."""
    assert quantized.quantized_layers == ("stem", "left", "right", "head")
    assert quantized.float_layers == ("decoded",)
    for node in layers(quantized):
        (reader,) = node.users
        reader = next(iter(reader.users)) if reader.target is aten.relu.default else reader
        rounded = reader.target is decomposed.quantize_per_tensor.default
        assert rounded == (node.args[0].target is decomposed.dequantize_per_tensor.default)
        if rounded:
            assert reader.args[3:] == (-128, 127, torch.int8)
    (silu,) = (node for node in quantized.graph.graph.nodes if node.target is aten.silu.default)
    assert silu.args[0].target is decomposed.dequantize_per_tensor.default  # it is computed in float, between integers


def test_biases_are_lowered_in_float_and_mean_the_same(quantized: QuantizedModel) -> None:
    exported = capture(quantized.graph, (IMAGES,))

    def integer_biases() -> int:
        nodes = exported.graph.find_nodes(op="call_function", target=decomposed.dequantize_per_channel.default)
        return sum(node.args[-1] == torch.int32 for node in nodes)

    assert integer_biases() == 4
    formats._write_float_biases(exported)
    assert integer_biases() == 0
    for given, wanted in zip(exported.module()(IMAGES), quantized(IMAGES)):
        torch.testing.assert_close(given, wanted, rtol=0, atol=0)


def test_memory_is_planned_for_more_than_was_compared() -> None:
    assert [planned_size(largest) for largest in (1, 8, 15, 16, 40)] == [15, 15, 15, 32, 80]


def test_models_for_other_runtimes_are_refused(mixed: nn.Module, quantized: QuantizedModel, tmp_path: Path) -> None:
    weights = quantize(nn.Linear(16, 4), recipe=WeightOnly(group_size=16), example=torch.randn(2, 16))
    for model, name, form, message in [
        (quantize(mixed, [IMAGES]), "p", "executorch", "quantize it with target='executorch', or take format onnx"),
        (quantized, "p.onnx", None, "does not run ONNX files: .* or take format executorch"),
        (weights, "p", "executorch", "there is no 8-bit weights program of format executorch: take format onnx"),
    ]:
        with pytest.raises(ExportError, match=message):
            export(model, tmp_path / name, example_inputs=IMAGES, format=form)  # type: ignore[call-overload]
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_extra(
    mixed: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch.version", None)
    with pytest.raises(MissingExtraError, match=r"executorch.* is not installed.*\[executorch\]"):
        export(mixed, tmp_path / "p", example_inputs=IMAGES, format="executorch")
    (tmp_path / "m.pte").write_bytes(b"any")
    with pytest.raises(MissingExtraError, match=r"\[executorch\]"):
        ExecuTorchSession(tmp_path / "m.pte", threads=None, inputs=(), outputs=())


# -- programs ------------------------------------------------------------------------------------------------------


@executorch_site.NEEDED
def test_an_int8_program_has_the_bits_of_its_simulation(program: Program, quantized: QuantizedModel) -> None:
    assert (program.format, program.runtime, program.precision) == ("executorch", "executorch", "int8")
    assert program.metadata["largest_sizes"] == {"batch": 15}
    assert program.metadata["versions"]["executorch"]
    for batch in (1, 2, 15):
        images = torch.rand(batch, 3, 12, 12)
        decoded, logits = program(images)
        torch.testing.assert_close(decoded, quantized(images)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, quantized(images)[1], rtol=0, atol=0)


@executorch_site.NEEDED
def test_kernels_are_counted_in_the_file(program: Program) -> None:
    kernels = program.kernels()
    integers = Counter({name: kernels[name] for name in INTEGER_KERNELS if kernels[name]})
    assert integers == {"XNNConv2d qs8_qc8w": 3, "XNNFullyConnected qs8_qc8w": 1}
    assert program.metadata["quantization"]["integer_kernels"] == dict(integers)
    assert kernels["XNNConv2d f32"] == 1
    assert (kernels["XNNAdd f32"], kernels["aten::mean"]) == (
        1,
        1,
    )  # of a SiLU, which XNNPACK computes in float; and a mean that it does not take


@executorch_site.NEEDED
def test_outputs_outlive_the_next_call(program: Program) -> None:
    first = program(IMAGES.numpy())
    held = [output.copy() for output in first]
    program(1 - IMAGES.numpy())
    for output, kept in zip(first, held):
        np.testing.assert_array_equal(output, kept)


@executorch_site.NEEDED
def test_an_input_among_the_outputs_is_refused(tmp_path: Path) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.relu(), x

    with pytest.raises(ExportError, match="returns its input x as it is"):
        export(Both(), tmp_path / "p", example_inputs=torch.randn(2, 4), format="executorch")
    assert not list(tmp_path.iterdir())


@executorch_site.NEEDED
def test_threads_may_call_it_at_once(program: Program) -> None:
    """On pools of two sizes, one of which is made as the other's kernels are loaded: ExecuTorch would end the process."""
    one, two, found = program.with_threads(1), program.with_threads(2), dict[int, list[Any]]()
    batches = [torch.rand(1 + n, 3, 12, 12).numpy() for n in range(3)]
    wanted = [program(batch) for batch in batches]

    def call(number: int) -> None:
        found[number] = [(two if turn % 2 else one)(batches[number]) for turn in range(20)]

    workers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, calls in found.items():
        for outputs in calls:
            for given, expected in zip(outputs, wanted[number], strict=True):
                np.testing.assert_array_equal(given, expected)


@executorch_site.NEEDED
def test_more_samples_than_memory_is_planned_for_are_refused(program: Program) -> None:
    with pytest.raises(
        ProgramError, match=r"shape \(16, 3, 12, 12\), and memory is planned for at most \(15, 3, 12, 12\)"
    ):
        program(np.zeros((16, 3, 12, 12), np.float32))


@executorch_site.NEEDED
def test_any_number_of_samples_is_computed_in_batches(program: Program, quantized: QuantizedModel) -> None:
    assert (program.batch_size, program.largest_batch) == (None, 15)
    for count in (1, 15, 32):
        images = torch.rand(count, 3, 12, 12)
        torch.testing.assert_close(program.in_batches(images)[1], quantized(images)[1], rtol=0, atol=0)
    with pytest.raises(
        ProgramError, match=r"has shape \(0, 3, 12, 12\) and holds no value"
    ):  # it would end the process
        program.in_batches(IMAGES[:0])


@executorch_site.NEEDED
def test_foreign_and_damaged_files_are_refused(program: Program, tmp_path: Path) -> None:
    whole = (program.path / "model.pte").read_bytes()
    described = {"inputs": program.inputs, "outputs": program.outputs}
    for name, content, message in [
        ("random", np.random.default_rng(0).bytes(5000), "is not a program of executorch"),
        ("empty", b"", "is not a program of executorch"),
        ("half", whole[: len(whole) // 2], "is not a program that executorch 1.5.* can run"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ProgramError, match=message):
            ExecuTorchSession(tmp_path / name, threads=None, **described)
    with pytest.raises(
        ProgramError, match=r"takes float32 \(15, 3, 12, 12\) and gives .* not what its program.json describes"
    ):
        ExecuTorchSession(program.path / "model.pte", threads=None, inputs=program.outputs, outputs=program.outputs)
    body = json.loads((program.path / folder.NAME).read_text())
    assert body["main"] == "model.pte"
    assert list(body["files"]) == ["model.pte"]


@executorch_site.NEEDED
@pytest.mark.slow
def test_a_quantizer_of_torchao_is_lowered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    compare_here(monkeypatch, rounds=2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(128, 3)).eval()
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    quantized = quantize(model, [IMAGES], quantizer=quantizer)
    program = export(quantized, tmp_path / "p", example_inputs=IMAGES)
    assert program.metadata["quantization"]["integer_kernels"] == {
        "XNNConv2d qs8_qc8w": 2,
        "XNNFullyConnected qs8_qc8w": 1,
    }
    torch.testing.assert_close(program(IMAGES), quantized(IMAGES), rtol=0, atol=0)


@executorch_site.NEEDED
@pytest.mark.slow
def test_a_larger_example_plans_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    program = export(model, tmp_path / "p", example_inputs=torch.rand(16, 3, 8, 8), format="executorch")
    assert program.metadata["largest_sizes"] == {"batch": 32}
    for batch in (1, 15, 16, 32):
        images = torch.rand(batch, 3, 8, 8)
        torch.testing.assert_close(program(images), model(images).detach(), rtol=1e-4, atol=1e-5)


@executorch_site.NEEDED
@pytest.mark.slow
def test_a_detector_runs_on_integer_convolutions(tmp_path: Path) -> None:
    from arclight.vision import build_model

    torch.manual_seed(0)
    images = torch.rand(1, 3, 160, 160)
    quantized = quantize(build_model("yolov5n").eval(), [images], target="executorch")
    program = export(quantized, tmp_path / "yolov5n", example_inputs=images, dynamic_batch=False)
    assert program.metadata["quantization"]["integer_kernels"] == {"XNNConv2d qs8_qc8w": 57}
    assert list(quantized.float_layers) == [f"model.24.m.{level}" for level in range(3)]
    torch.testing.assert_close(program(images), quantized(images), rtol=1e-3, atol=1e-3)
