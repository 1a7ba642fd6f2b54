"""Recipes beside static int8: what becomes integers, what the program computes, and what is refused."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.exports import compare_here
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.deploy import (
    BFloat16,
    DynamicInt8,
    ExportError,
    Int8,
    LowBit,
    Program,
    ProgramError,
    QuantizationAwareTraining,
    QuantizeError,
    WeightOnly,
    convert,
    export,
    prepare_qat,
    quantize,
)
from arclight.deploy.capture import as_outputs
from arclight.deploy.formats.formats import Format
from arclight.deploy.quantizing.linear import linear_dynamic, pack, unpack
from arclight.deploy.settings import Quantization
from arclight.fabric.signing import SigningKey


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=3)


class Language(nn.Module):
    """A tied embedding, a layer without a bias, a layer that is applied twice, and a convolution."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.mix = nn.Conv1d(32, 32, 1)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for _ in range(2):
            x = x + self.down(F.silu(self.up(x)))
        logits: Tensor = self.head(x)
        return logits


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def language() -> Language:
    torch.manual_seed(0)
    return Language().eval()


PROGRAMS: dict[str, tuple[Quantization, float, dict[str, int]]] = {
    "dynamic int8": (DynamicInt8(), 30.0, {"DynamicQuantizeMatMul": 4}),
    "4-bit weights": (WeightOnly(bits=4), 15.0, {"MatMulNBits": 4}),
    "w4a8": (LowBit(), 15.0, {"MatMulNBits": 4}),
}


@pytest.mark.parametrize(
    "precision",
    ["dynamic int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("4-bit weights", "w4a8"))],
)
def test_programs_compute_what_is_simulated(
    language: Language, tokens: Tensor, tmp_path: Path, precision: str
) -> None:  # fmt: skip
    recipe, least_db, kernels = PROGRAMS[precision]
    quantized = quantize(language, recipe=recipe, example=tokens, metric=lambda model: float(model(tokens).std()))
    assert quantized.quantized_layers == ("up", "down")
    assert quantized.float_layers == ("embedding", "mix", "head")  # the head is tied to the embedding
    assert quantized.sqnr_db > least_db
    state = quantized.state_dict()
    assert state["up.weight"].dtype in (torch.uint8, torch.int8)
    assert torch.equal(state["head.weight"], language.head.weight)
    program = export(quantized, tmp_path / "p.onnx", example_inputs=tokens)
    assert program.precision == precision
    assert program.metadata["parity"]["sqnr_db"] > 60  # the kernel's own arithmetic, not merely near it
    assert torch.allclose(program(tokens[:2]), quantized(tokens[:2]), atol=1e-4)
    report = Program.load(program.path).metadata["quantization"]
    assert report["kernels"] == kernels
    assert report["metric"]["program"] == pytest.approx(report["metric"]["simulated"], rel=1e-3)
    assert report["speed"]["low"] <= report["speed"]["over_fp32"] <= report["speed"]["high"]
    assert report["speed"]["size_over_fp32"] < 1


@pytest.mark.slow
def test_8_bit_weights_run_on_integers(language: Language, tokens: Tensor, tmp_path: Path) -> None:
    quantized = quantize(language, recipe=WeightOnly(), example=tokens)
    program = export(quantized, tmp_path / "p.onnx", example_inputs=tokens)
    assert program.metadata["parity"]["sqnr_db"] > 60
    assert quantized.sqnr_db > 35


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_in_groups_run_packed_in_openvino(
    language: Language, tokens: Tensor, tmp_path: Path, bits: int
) -> None:
    quantized = quantize(language, recipe=WeightOnly(bits=bits), example=tokens)
    program = export(quantized, tmp_path / "p", example_inputs=tokens, format="openvino")
    assert (program.format, program.runtime, program.precision) == ("openvino", "openvino", f"{bits}-bit weights")
    assert program.metadata["quantization"]["kernels"] == {"FullyConnected": 4}  # each layer is applied twice
    packed = {name for name in program.kernels() if name.startswith("FullyConnected") and name[-2:] in ("u8", "u4")}
    assert packed == {f"FullyConnected u{bits}"}
    assert program.metadata["quantization"]["speed"]["size_over_fp32"] < 1
    assert 10 * torch.log10(quantized(tokens).var() / (program(tokens) - quantized(tokens)).var()) > 30
    assert export(quantized, tmp_path / "fastest", example_inputs=tokens, format="fastest").format in (
        "onnx",
        "openvino",
    )


@pytest.mark.parametrize(
    ("recipe", "form", "message"),
    [
        (
            DynamicInt8(),
            "openvino",
            r"no dynamic int8 program of format openvino: .* take WeightOnly\(\), or format onnx",
        ),
        (LowBit(), "openvino", r"no w4a8 program of format openvino: .* take WeightOnly\(bits=4\)"),
        (WeightOnly(), "aoti", r"no 8-bit weights program of format aoti: take format onnx, openvino, or Int8\(\)"),
    ],
)
def test_formats_without_kernels_for_a_recipe_name_the_reason(
    language: Language, tokens: Tensor, tmp_path: Path, recipe: Quantization, form: Format, message: str
) -> None:
    quantized = quantize(language, recipe=recipe, example=tokens)
    with pytest.raises(ExportError, match=message):
        export(
            quantized, tmp_path / "p", example_inputs=tokens, format=form, sign=SigningKey.make(tmp_path / "key.pem")
        )
    assert not (tmp_path / "p").exists()


def test_bfloat16_runs_in_openvino(tokens: Tensor, tmp_path: Path) -> None:
    if "BF16" not in pytest.importorskip("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bfloat16 instructions")
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Embedding(40, 128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 40)).eval()
    quantized = quantize(wide, recipe=BFloat16(), example=tokens)
    assert (quantized.quantized_layers, quantized.float_layers) == (("1", "3"), ("0",))
    assert 35 < quantized.sqnr_db < 70
    assert quantized.state_dict()["1.weight"].dtype == torch.bfloat16
    program = export(quantized, tmp_path / "p.onnx", example_inputs=tokens)
    assert (program.precision, program.runtime) == ("bf16", "openvino-bf16")
    report = program.metadata["quantization"]
    assert report["kernels"] == {"FullyConnected": 2}
    assert 35 < report["against_float"]["sqnr_db"] < 70
    assert report["speed"]["size_over_fp32"] < 0.8  # the embedding, and weights of few values, stay as they are
    assert program.metadata["versions"]["openvino"]
    assert torch.allclose(program(tokens[:1]), quantized(tokens[:1]), atol=0.02)


def test_bfloat16_that_would_be_emulated_is_refused(
    language: Language, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32", "INT8"]

    quantized = quantize(language, recipe=BFloat16(), example=tokens)
    assert quantized.quantized_layers == ("mix", "up", "down", "head")
    tied = quantized.state_dict()["head.weight"]
    assert torch.equal(tied, language.embedding.weight.bfloat16())  # one tensor, which the embedding reads as well
    assert "embedding.weight" not in quantized.state_dict()
    monkeypatch.setattr("arclight.deploy.programs.openvino._core", Old)
    with pytest.raises(ProgramError, match=r"no bfloat16 instructions .*finds FP32, INT8\): take WeightOnly"):
        export(quantized, tmp_path / "p.onnx", example_inputs=tokens)


def test_a_head_of_its_own_is_quantized(tokens: Tensor) -> None:
    quantized = quantize(Language(tied=False), recipe=WeightOnly(), example=tokens)
    assert quantized.quantized_layers == ("up", "down", "head")
    assert quantized.float_layers == ("embedding", "mix")


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_within_a_step(bits: int) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    integers, scale = pack(weight, bits, 16)
    assert integers.shape == (6, 4, 16 * bits // 8)
    step = scale.abs().repeat_interleave(16, 1)
    error = (unpack(integers, scale, bits) - weight).abs()
    assert (error <= step * (1 if bits == 8 else 2.7) + 1e-6).all()  # extremes of 4-bit groups may be cut off
    assert torch.equal(unpack(integers, scale, bits)[2], torch.zeros(64))
    widest = pack_widest(weight, bits)
    assert error.square().sum() <= (widest - weight).square().sum()


def pack_widest(weight: Tensor, bits: int) -> Tensor:
    """Round with the widest range of each group, as a runtime's own packer does."""
    largest = 2 ** (bits - 1)
    groups = weight.unflatten(1, (-1, 16))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = torch.where(extreme == 0, 1.0, extreme / -largest)
    rounded: Tensor = (groups / scale).round().clamp(-largest, largest - 1) * scale
    return rounded.flatten(1)


@pytest.mark.parametrize("recipe", [DynamicInt8(), Int8()])
def test_no_samples_give_no_outputs(recipe: Quantization) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 32)
    prepared = prepare_qat(model, x, recipe=recipe)
    before = copy.deepcopy(prepared.state_dict())
    assert prepared(x[:0]).shape == (0, 8)
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
    assert convert(prepared, example_inputs=x)(x[:0]).shape == (0, 8)


def test_dynamic_activations_of_zeros() -> None:
    product = linear_dynamic(torch.zeros(2, 3), torch.ones(4, 3, dtype=torch.int8), torch.ones(4), torch.arange(4.0))
    assert torch.equal(product, torch.arange(4.0).expand(2, 4))


def test_a_metric_that_drops_too_far_is_refused(language: Language, tokens: Tensor) -> None:
    def closeness(model: object) -> float:
        assert callable(model)
        return -float((model(tokens) - language(tokens)).abs().max().detach())

    with pytest.raises(QuantizeError, match=r"metric of the quantized model is -.* drops by more than max_drop=1e-06"):
        quantize(language, recipe=WeightOnly(bits=4), example=tokens, metric=closeness, max_drop=1e-6)
    with pytest.raises(QuantizeError, match="metric of the float model is nan"):
        quantize(language, recipe=WeightOnly(), example=tokens, metric=lambda _: float("nan"))
    with pytest.raises(ValueError, match=r"max_drop=0\.1 bounds a metric"):
        quantize(language, recipe=WeightOnly(), example=tokens, max_drop=0.1)


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        (WeightOnly(group_size=64), r"group_size=64 does not divide the inputs of up \(32\): take group_size=32"),
        (
            WeightOnly(skip=("up", "down")),
            r"WeightOnly is for linear layers, .*\['embedding', 'mix', 'up', 'down', 'head'\]",
        ),
        (DynamicInt8(skip=("upp",)), "skip names 'upp', .* did you mean 'up'"),
        (WeightOnly(bits=4, min_sqnr_db=90), r"leaves output 0 a signal-to-noise ratio of .* the recipe asks for 90"),
    ],
)
def test_invalid_quantization_recipes_are_refused(
    language: Language, tokens: Tensor, recipe: Quantization, wrong: str
) -> None:  # fmt: skip
    with pytest.raises(QuantizeError, match=wrong):
        quantize(language, recipe=recipe, example=tokens)


@pytest.mark.parametrize("recipe", [DynamicInt8(), WeightOnly(), BFloat16(), LowBit()])
def test_calibration_data_that_would_be_ignored_is_refused(
    language: Language, tokens: Tensor, recipe: Quantization
) -> None:  # fmt: skip
    with pytest.raises(QuantizeError, match=f"{type(recipe).__name__} takes no calibration data"):
        quantize(language, [tokens], recipe=recipe)
    with pytest.raises(QuantizeError, match="needs example="):
        quantize(language, recipe=recipe)


def test_bfloat16_is_not_trained_with_rounding(language: Language, tokens: Tensor) -> None:
    with pytest.raises(QuantizeError, match="no ranges of activations that training could learn"):
        prepare_qat(language, tokens, recipe=BFloat16())
    with pytest.raises(QuantizeError, match="BFloat16 needs no training with rounding"):
        QuantizationAwareTraining(BFloat16())


@pytest.mark.parametrize("recipe", [DynamicInt8(reduce_range=False), WeightOnly(), WeightOnly(bits=4), LowBit()])
def test_rounded_layers_compute_what_the_recipe_does_after_training(
    language: Language, tokens: Tensor, recipe: Quantization
) -> None:  # fmt: skip
    prepared = prepare_qat(language, tokens, recipe=recipe).eval()
    assert prepared.state_dict().keys() == language.state_dict().keys()
    quantized, converted = quantize(language, recipe=recipe, example=tokens), convert(prepared, example_inputs=tokens)
    assert (converted.quantized_layers, converted.float_layers) == (quantized.quantized_layers, quantized.float_layers)
    assert (converted.trained, quantized.trained) == (True, False)
    with torch.no_grad():
        for one, other in zip(as_outputs(quantized(tokens)), as_outputs(converted(tokens)), strict=True):
            assert torch.equal(one, other)
    for name, value in quantized.state_dict().items():
        assert torch.equal(value, converted.state_dict()[name]), name
    with pytest.raises(QuantizeError, match="is captured to be converted: give example_inputs"):
        convert(prepared)


@pytest.mark.parametrize("recipe", [Int8(), LowBit(activation_bits=4)])
def test_calibration_data_that_are_missing_are_asked_for(language: Language, recipe: Quantization) -> None:
    with pytest.raises(QuantizeError, match=f"{type(recipe).__name__} takes ranges of activations"):
        quantize(language, recipe=recipe)


def test_dynamic_int8_of_convolutions_is_refused_and_int8_proposed() -> None:
    with pytest.raises(QuantizeError, match="Convolutions run on integers by Int8"):
        quantize(nn.Sequential(nn.Conv2d(4, 4, 1)), recipe=DynamicInt8(), example=torch.rand(2, 4, 4, 4))


def test_settings_name_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"bits must be 8 or 4, .* got 3"):
        WeightOnly(bits=3)
    with pytest.raises(ValueError, match=r"group_size must be one of 16, 32, 64, 128, 256, .* got 24"):
        WeightOnly(group_size=24)
    with pytest.raises(ValueError, match=r"activation_bits must be 8 \(W4A8\) or 4 \(W4A4\), got 2"):
        LowBit(activation_bits=2)


def test_w4a4_is_simulated_and_trained_but_has_no_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    images = torch.rand(4, 4, 8, 8)
    quantized = quantize(model, [images], recipe=LowBit(activation_bits=4))
    eight = quantize(model, [images])
    assert quantized.quantized_layers == eight.quantized_layers
    assert quantized.sqnr_db < eight.sqnr_db - 10
    assert int(quantized.state_dict()["2.weight"].abs().max()) == 7
    with pytest.raises(
        ExportError, match=r"no program of W4A4.*LowBit\(activation_bits=8\), WeightOnly\(bits=4\) or Int8"
    ):
        export(quantized, tmp_path / "p.onnx", example_inputs=images)
    prepared = prepare_qat(model, images, recipe=LowBit(activation_bits=4, min_sqnr_db=0))
    prepared(images).sum().backward()
    assert prepared.get_parameter("0.weight").grad is not None
    rounded = convert(prepared)
    assert int(rounded.state_dict()["2.weight"].abs().max()) == 7
    with pytest.raises(ExportError, match="no program of W4A4"):
        export(rounded, tmp_path / "p.onnx", example_inputs=images)


@pytest.mark.slow
def test_a_program_that_saves_no_time_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A layer this small has more to do in packing than in multiplying."""
    model = nn.Sequential(nn.Linear(16, 1, bias=False))
    x = torch.rand(4, 16)
    with caplog.at_level(logging.WARNING, "arclight"):
        program = export(
            quantize(model, recipe=LowBit(group_size=16), example=x), tmp_path / "p.onnx", example_inputs=x
        )
    assert ("saves memory, no time" in caplog.text) == (program.metadata["quantization"]["speed"]["high"] < 1)


@pytest.mark.slow
def test_each_name_can_be_the_first_import() -> None:
    """Operators that torchao registers are there, whichever module comes first; in forks of a process that has imported torch alone."""
    code = (
        "import os, sys, torch\n"
        "for name in ('export', 'quantize', 'prepare_qat', 'benchmark'):\n"
        "    if not (pid := os.fork()):\n"
        "        exec(f'from arclight.deploy import {name}')\n"
        "        sys.exit()\n"
        "    assert os.waitpid(pid, 0)[1] == 0, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
