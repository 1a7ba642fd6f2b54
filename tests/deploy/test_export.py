"""Export: a program is written only if it computes what the model computes, and says what it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.deploy import executorch_site
from tests.exports import compare_here
from torch import Tensor, nn

from arclight.deploy import (
    DynamicInt8,
    ExportError,
    Int8,
    Program,
    ProgramError,
    QuantizedModel,
    QuantizeError,
    export,
    quantize,
)
from arclight.deploy.capture import trial_run
from arclight.deploy.formats import export as exporting
from arclight.deploy.formats.formats import Format
from arclight.deploy.settings import Target
from arclight.fabric.signing import SigningKey


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch)  # those of the fixtures are compared in a fresh one


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@pytest.fixture
def affine() -> nn.Module:
    return Affine()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_program_equals_model_at_any_batch_size(model: nn.Module, fp32_program: Program, images: Tensor) -> None:
    for batch in (1, 2, 5):
        with torch.no_grad():
            torch.testing.assert_close(fp32_program(images[:batch]), model(images[:batch]), rtol=1e-4, atol=1e-3)


def test_recorded_parity_is_what_one_measures(model: nn.Module, fp32_program: Program, images: Tensor) -> None:
    parity = fp32_program.metadata["parity"]
    with torch.no_grad():
        measured = max(float((fp32_program(images[:n]) - model(images[:n])).abs().max()) for n in (1, 2, 3))
    assert parity["batch_sizes"] == [1, 2, 3]
    assert parity["max_difference"] == pytest.approx(measured, rel=1e-6)


def test_a_program_beyond_the_bound_is_refused_and_nothing_is_left(affine: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no program was written"):
        export(affine, tmp_path / "p.onnx", example_inputs=torch.randn(64, 4), max_difference=1e-12)
    assert leftovers(tmp_path) == []


class Boxes(nn.Module):
    """Boxes in pixels and scores, as two outputs or as columns of one; ``broken`` is what a faulty conversion makes of it."""

    def __init__(self, *, joined: bool, broken: bool) -> None:
        super().__init__()
        self.joined, self.scale = joined, 0.0 if broken else 1.0

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        boxes, scores = x[..., :4] * 640, x[..., 4:] * self.scale
        return torch.cat([boxes, scores], -1) if self.joined else (boxes, scores)


@pytest.fixture
def broken_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter forgets the scores of ``Boxes``, everything else is as it is."""
    whole = exporting.capture

    def capture(model: nn.Module, example: tuple[Tensor, ...], **options: bool) -> object:
        return whole(Boxes(joined=model.joined, broken=True), example, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "capture", capture)


def columns(predictions: Tensor) -> dict[str, Tensor]:
    return {"boxes": predictions[..., :4], "scores": predictions[..., 4:]}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.usefixtures("broken_conversion")
def test_large_outputs_do_not_hide_small_ones(joined: bool, tmp_path: Path) -> None:
    model, x = Boxes(joined=joined, broken=False), torch.rand(3, 50, 6) * torch.tensor([1, 1, 1, 1, 1e-3, 1e-3])
    assert (model(x)[..., 4:] if joined else model(x)[1]).max() < 1e-4 * 640  # within the bound of the largest box
    options = {"parts": columns} if joined else {"output_names": ["boxes", "scores"]}
    with pytest.raises(ExportError, match="output scores of the program differs"):
        export(model, tmp_path / "p.onnx", example_inputs=x, **options)  # type: ignore[arg-type]
    assert leftovers(tmp_path) == []


class Ids(nn.Module):
    """Scores, and ids of 50,000 and more; ``shift`` is what a faulty conversion adds to them."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.ids = 50_000 + shift

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.argmax(-1) + self.ids


@pytest.mark.parametrize("bound", [None, 10.0])
def test_ids_that_differ_are_refused(bound: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than a share of the largest value, or than a bound for the pixels beside them."""
    whole, x, named = exporting.capture, torch.rand(3, 5), {"output_names": ["scores", "ids"]}
    compare_here(monkeypatch)
    program = export(Ids(0), tmp_path / "right.onnx", example_inputs=x, max_difference=bound, **named)
    assert program.metadata["parity"]["outputs"]["ids"].items() >= {"integers": 6, "differing": 0}.items()
    monkeypatch.setattr(exporting, "capture", lambda model, *given, **options: whole(Ids(1), *given, **options))
    with pytest.raises(
        ExportError, match=r"ids of the program differs .* in 6 of 6 elements, .* integers must be equal"
    ):
        export(Ids(0), tmp_path / "wrong.onnx", example_inputs=x, max_difference=bound, **named)
    assert leftovers(tmp_path) == ["right.onnx"]


class Ends(nn.Module):
    """Outputs of a convolution that is only decoded, and of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.decoded, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(images).relu()
        return self.decoded(features), self.head(features.mean((2, 3)))


@pytest.mark.parametrize(
    ("target", "form"),
    [("onnxruntime", "onnx"), ("openvino", "openvino"), pytest.param("executorch", "executorch", marks=executorch_site.NEEDED)],
)  # fmt: skip
def test_outputs_without_names_are_called_alike_in_every_format(
    target: Target, form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch, rounds=2)
    monkeypatch.setattr(
        exporting, "_measured", lambda *_: {}
    )  # the model is too small for integer kernels in every runtime
    model, images = Ends().eval(), torch.rand(4, 3, 8, 8)
    quantized = quantize(model, [images], target=target)
    for exported in (model, quantized):
        program = export(exported, tmp_path / f"{type(exported).__name__}", example_inputs=images, format=form)
        assert [spec.name for spec in program.outputs] == ["conv2d_1", "linear"]
        assert list(program.metadata["parity"]["outputs"]) == ["conv2d_1", "linear"]


def test_every_output_is_recorded(tmp_path: Path) -> None:
    x = torch.rand(3, 50, 6)
    two = export(Boxes(joined=False, broken=False), tmp_path / "2.onnx", example_inputs=x, output_names=["b", "s"])
    one = export(Boxes(joined=True, broken=False), tmp_path / "1.onnx", example_inputs=x, parts=columns)
    assert list(two.metadata["parity"]["outputs"]) == ["b", "s"]
    assert list(one.metadata["parity"]["outputs"]) == ["boxes", "scores"]
    boxes, scores = one.metadata["parity"]["outputs"].values()
    assert boxes["largest"] == pytest.approx(640 * float(x[..., :4].max()))
    assert scores["largest"] == pytest.approx(float(x[..., 4:].max()))
    assert scores["sqnr_db"] is None  # equal bits


def test_quantization_judges_every_output() -> None:
    class Beside(nn.Module):
        """A network, and an output so large that noise in the network is nothing beside it."""

        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1e6, self.network(x)

    with pytest.raises(QuantizeError, match="leaves output 1 a signal-to-noise ratio"):
        quantize(Beside(), [torch.rand(4, 8)], recipe=Int8(min_sqnr_db=90.0))


def test_a_refused_export_does_not_touch_the_program_before_it(affine: nn.Module, tmp_path: Path) -> None:
    path, x = tmp_path / "p.onnx", torch.randn(3, 4)
    export(affine, path, example_inputs=x)
    before = path.read_bytes()
    for bad in ({"max_difference": -1.0}, {"metadata": {"precision": "fp16"}}, {"format": "tflite"}):
        with pytest.raises(ExportError):
            export(affine, path, example_inputs=x, **bad)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert leftovers(tmp_path) == ["p.onnx"]


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(3, 4) * torch.arange(3.0).view(3, 1)


def test_a_fixed_batch_is_refused_unless_declared(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match="dynamic_batch=False"):
        export(FixedBatch(), tmp_path / "p.onnx", example_inputs=x)
    assert leftovers(tmp_path) == []
    program = export(FixedBatch(), tmp_path / "p.onnx", example_inputs=x, dynamic_batch=False)
    assert program.inputs[0].shape == (3, 4)
    assert torch.equal(program(x), FixedBatch()(x))


def test_a_program_of_one_batch_size_computes_any_number_of_samples(affine: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(7, 4)
    program = export(affine, tmp_path / "p.onnx", example_inputs=x[:3], dynamic_batch=False)
    assert program.batch_size == 3
    with torch.no_grad():
        torch.testing.assert_close(program.in_batches(x), affine(x))
    np.testing.assert_array_equal(program.in_batches(x.numpy()), program.in_batches(x).numpy())
    for given in (x, x[:0]):
        with pytest.raises(ProgramError, match=rf"the program expects .* \(3, 4\), got float32 \({len(given)}, 4\)"):
            program(given)
    with pytest.raises(ProgramError, match=r"got float32 \(0, 4\)"):
        program.in_batches(x[:0])

    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(0, keepdim=True)

    summed = export(Summed(), tmp_path / "s.onnx", example_inputs=x[:3], dynamic_batch=False, output_names=["total"])
    with pytest.raises(ProgramError, match=r"takes 3 samples at a time, and its output total has shape \(1, 4\)"):
        summed.in_batches(x)


@pytest.mark.parametrize("table_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fixed_batch_leaves_tables_as_they_are(table_first: bool, tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            table, x, factor = inputs if table_first else (inputs[1], inputs[0], inputs[2])
            return x @ table * factor

    x, table, factor = torch.randn(3, 4), torch.randn(4, 5), torch.tensor(2.0)
    inputs = (table, x, factor) if table_first else (x, table, factor)
    program = export(Lookup(), tmp_path / "p.onnx", example_inputs=inputs, dynamic_batch=False)
    torch.testing.assert_close(program(*inputs), x @ table * 2)


def test_a_fixed_batch_may_follow_a_number(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, factor: Tensor, x: Tensor) -> Tensor:
            return x * factor

    inputs = (torch.tensor(2.0), torch.randn(3, 4))
    program = export(Scaled(), tmp_path / "p.onnx", example_inputs=inputs, dynamic_batch=False)
    assert program.metadata["parity"]["batch_sizes"] == [3]
    assert torch.equal(program(*inputs), inputs[1] * 2)


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_inputs_without_a_sample_are_refused(affine: nn.Module, dynamic_batch: bool, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"shapes \[\(0, 4\)\] and hold no sample"):
        export(affine, tmp_path / "p.onnx", example_inputs=torch.rand(0, 4), dynamic_batch=dynamic_batch)
    assert leftovers(tmp_path) == []


def test_metadata_comes_back(fp32_program: Program) -> None:
    metadata = Program.load(fp32_program.path).metadata
    assert metadata["names"] == ["código", "二维码"]
    assert metadata["image_size"] == 64
    assert metadata["format"] == 2
    assert metadata["precision"] == "fp32"
    stored = {p.key: p.value for p in onnx.load(fp32_program.path).metadata_props}
    assert json.loads(stored["arclight"]) == metadata


@pytest.mark.parametrize(
    "metadata", [{"sha256": "0"}, {"parity": {}}, {"a": {1, 2}}, {"a": float("nan")}, {"a": "\udcff"}], ids=ascii
)
def test_metadata_that_cannot_be_stored_is_refused(affine: nn.Module, metadata: dict, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="metadata"):
        export(affine, tmp_path / "p.onnx", example_inputs=torch.randn(3, 4), metadata=metadata)
    assert leftovers(tmp_path) == []


def test_the_file_is_valid_onnx_and_tells_nothing_about_this_machine(fp32_program: Program) -> None:
    onnx.checker.check_model(onnx.load(fp32_program.path), full_check=True)
    content = fp32_program.path.read_bytes()
    for private in (Path(__file__).parent, Path.home(), Path(torch.__file__).parent):
        assert str(private).encode() not in content
    assert b"stack_trace" not in content
    assert fp32_program.inputs[0].shape == ("batch", 3, 64, 64)
    assert fp32_program.outputs[0].shape == ("batch", 320, 7)


def test_int8_runs_on_integer_kernels(int8_program: Program, quantized: QuantizedModel, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(int8_program.path), options)
    operators = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert len(quantized.quantized_layers) == 12
    assert operators["QLinearConv"] == operators["QLinearMul"] == 10  # every SiLU but that of the stem
    assert operators["MatMulIntegerToFloat"] == 2  # the heads, which write float32
    assert operators["Conv"] == 1  # the stem
    assert operators["DequantizeLinear"] == 2  # biases of the heads
    assert int8_program.metadata["quantization"]["integer_kernels"] == {"QLinearConv": 10, "MatMulIntegerToFloat": 2}


def test_int8_says_how_far_it_is_from_float(int8_program: Program, model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        reference = model(images).double().numpy()
    noise = int8_program(images.numpy()).astype(np.float64) - reference
    measured = 10 * np.log10((reference**2).sum() / (noise**2).sum())
    report = int8_program.metadata["quantization"]
    assert int8_program.precision == "int8"
    assert measured >= 30
    assert report["against_float"]["sqnr_db"] == pytest.approx(measured, abs=0.01)
    assert report["calibration_batches"] == 4
    assert report["observer"] == "histogram"


def test_int8_without_integer_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 4, 16, 16)
    quantized = quantize(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), [x])
    optimization = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

    class NoFusion(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.graph_optimization_level = optimization

    monkeypatch.setattr(onnxruntime, "SessionOptions", NoFusion)
    with pytest.raises(ExportError, match="only 0 of 2 quantized layers"):
        export(quantized, tmp_path / "p.onnx", example_inputs=x)
    assert leftovers(tmp_path) == []


class Blocks(nn.Module):
    """Linear layers whose clipped results are read by sums, cuts and other operators in float."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = (layer(value).relu() for layer, value in zip(self.layers, (x, y)))
        x = left + right
        x = x + self.layers[2](x).relu()
        x = torch.cat([nn.functional.relu6(self.layers[3](x))[:, :16], x[:, 16:]], 1)
        return self.layers[5](self.layers[4](x).clamp(min=-0.1).tanh())


def test_int8_keeps_linear_layers_on_integers_whose_clipped_results_are_read_in_float(tmp_path: Path) -> None:
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    quantized = quantize(Blocks(), [(x, y)])
    program = export(quantized, tmp_path / "p.onnx", example_inputs=(x, y))
    assert program.metadata["quantization"]["integer_kernels"] == {"QGemm": 6}
    torch.testing.assert_close(program(x, y), quantized(x, y), rtol=0, atol=0.02)


def test_int8_stores_integers(int8_program: Program, fp32_program: Program) -> None:
    stored = [sum(len(t.raw_data) for t in onnx.load(p.path).graph.initializer) for p in (int8_program, fp32_program)]
    assert stored[0] < 0.4 * stored[1]
    assert int8_program.nbytes < fp32_program.nbytes


def test_training_mode_and_device_of_the_model_do_not_matter(affine: nn.Module, tmp_path: Path) -> None:
    affine.train().double()
    program = export(affine, tmp_path / "deep" / "er" / "p.onnx", example_inputs=torch.randn(3, 4))
    assert affine.training
    assert affine.layer.weight.dtype == torch.float64
    assert program.inputs[0].dtype == "float32"


class Untranslatable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


def test_operators_without_onnx_translation_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="bessel_j0"):
        export(Untranslatable(), tmp_path / "p.onnx", example_inputs=torch.randn(3, 4))
    assert leftovers(tmp_path) == []


class Masked(nn.Module):
    """Logits; columns from ``first`` on are ``value``."""

    def __init__(self, first: int, value: float = float("-inf")) -> None:
        super().__init__()
        self.layer, self.value = nn.Linear(4, 4), value
        self.register_buffer("mask", torch.arange(4) >= first)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, self.layer(x).masked_fill(self.mask, self.value)


@pytest.mark.parametrize(
    ("first", "value", "kind"),
    [
        (3, float("nan"), "NaN in 1 of 4"),
        pytest.param(0, float("-inf"), "infinite in 4 of 4", marks=pytest.mark.slow),
    ],
)
def test_outputs_without_comparable_values_are_refused(first: int, value: float, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"output logits of the reference is {kind} values"):
        export(
            Masked(first, value), tmp_path / "p.onnx", example_inputs=torch.rand(3, 4), output_names=["shifted", "logits"]
        )  # fmt: skip
    assert leftovers(tmp_path) == []
    with pytest.raises(QuantizeError, match="output 1 of the reference"):
        quantize(Masked(first, value), recipe=DynamicInt8(min_sqnr_db=0), example=torch.rand(3, 4))


def test_infinite_masks_are_left_out_of_what_is_compared(tmp_path: Path) -> None:
    model, x = Masked(2), torch.rand(3, 4)
    program = export(model, tmp_path / "p.onnx", example_inputs=x, output_names=["shifted", "logits"])
    largest = program.metadata["parity"]["outputs"]["logits"]["largest"]
    assert largest == pytest.approx(float(model.layer(x)[:, :2].detach().abs().max()))


@pytest.mark.parametrize(
    ("first", "value"),
    [
        (2, float("nan")),
        (4, 0.0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, float("-inf")), (2, float("inf")))),
    ],
)
def test_a_program_with_other_infinities_than_its_model_is_refused(
    first: int, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    whole, model = exporting.capture, Masked(2)

    def capture(module: nn.Module, example: tuple[Tensor, ...], **options: bool) -> object:
        broken = Masked(first, value)
        broken.layer = module.layer
        return whole(broken, example, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "capture", capture)
    with pytest.raises(ExportError, match="output logits is NaN or infinite in other places"):
        export(model, tmp_path / "p.onnx", example_inputs=torch.rand(3, 4), output_names=["shifted", "logits"])
    assert leftovers(tmp_path) == []


def test_an_example_that_the_model_cannot_take_is_named(affine: nn.Module, tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (3, 4), dtype=torch.uint8)
    with pytest.raises(ExportError, match=r"cannot be run on the example inputs \(uint8 \(3, 4\)\): .*dtype"):
        export(affine, tmp_path / "p.onnx", example_inputs=pixels)
    with pytest.raises(ExportError, match=r"cannot be run on the example inputs \(float32 \(3, 5\)\): .*shapes"):
        export(affine, tmp_path / "p.onnx", example_inputs=torch.rand(3, 5))
    assert leftovers(tmp_path) == []


def test_a_trial_run_leaves_the_model_as_it_is() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    counter, x = Counter(), torch.rand(3, 4)
    assert torch.equal(trial_run(counter, (x,)), x)
    assert counter.calls == 0


class Stateful(nn.Module):
    """Counts its calls in one buffer and keeps a mean in another; ``reads`` says what its output is computed of."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.layer, self.out, self.reads = nn.Linear(4, 8), nn.Linear(8, 4), reads
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, _ = self.mean.split(1)
        first.mul_(0.9).add_(x.mean(0))
        y: Tensor = self.out(self.layer(x).relu())
        if self.reads == "calls":
            return y + self.calls
        return y + self.mean[0] if self.reads == "mean" else y


@pytest.mark.parametrize("reads", ["calls", "mean"])
@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_a_model_that_computes_with_the_call_before_is_refused(reads: str, dynamic_batch: bool, tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(ExportError, match=rf"what the call before has left in its buffers \({reads}\), and a program"):
        export(Stateful(reads), tmp_path / "p.onnx", example_inputs=x, dynamic_batch=dynamic_batch)
    with pytest.raises(ExportError, match=rf"left in its buffers \({reads}\)"):
        quantize(Stateful(reads), [x])
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("form", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_counts_that_a_model_keeps_for_itself_are_left_out(form: Format, tmp_path: Path) -> None:
    model, x = Stateful("nothing"), torch.randn(4, 4)
    key = SigningKey.make(tmp_path / "key.pem")
    program = export(model, tmp_path / "p", example_inputs=x, format=form, sign=key)
    assert len(program.outputs) == 1
    quantized = quantize(model, [x])
    quantized(x), quantized(x)
    assert model.calls == 0
    for _ in range(2):
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


class Overwriting(nn.Module):
    """Writes all or a part of a buffer before it reads that; ``wider``: it reads more."""

    def __init__(self, kind: str, wider: bool = False) -> None:
        super().__init__()
        self.kind, self.rows, self.layer = kind, 3 if wider else 2, nn.Linear(4, 4)
        self.register_buffer("kept", torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.kind == "zeroed":
            self.kept.zero_()
            self.kept[:2].add_(y)
        elif self.kind == "filled":
            self.kept.fill_(2).mul_(y[0, 0, 0])
        elif self.kind == "cache":
            self.kept[:2, 1:3] = y[:, 1:3]
            return self.kept[: self.rows, 1:3] + 1
        else:
            self.kept[1] = y[0]
            return self.kept[1 if self.rows == 2 else 2] + 1
        return self.kept + y.sum()


@pytest.mark.parametrize("kind", ["zeroed", "filled", "cache", "row"])
def test_buffers_that_are_written_before_they_are_read_are_no_state(kind: str, tmp_path: Path) -> None:
    model, x = Overwriting(kind), torch.randn(2, 4, 4)
    model(x)  # its buffer then has a graph
    program = export(model, tmp_path / "p.onnx", example_inputs=x, dynamic_batch=False)
    assert len(program.outputs) == 1
    for _ in range(2):
        other = torch.randn(2, 4, 4)
        torch.testing.assert_close(program(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["cache", "row"])
def test_reads_beyond_what_was_written_are_state(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"left in its buffers \(kept\)"):
        export(Overwriting(kind, wider=True), tmp_path / "p", example_inputs=torch.randn(2, 4, 4), dynamic_batch=False)


@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_inputs_stay_as_they_are_where_a_model_writes_into_them(dynamic_batch: bool, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x.mul_(2))
            return y

    model, x = Scaled(), torch.randn(4, 4)
    given = x.clone()
    program = export(model, tmp_path / "p.onnx", example_inputs=given, dynamic_batch=dynamic_batch)
    quantized = quantize(model, [given])
    assert quantized.sqnr_db > 25
    assert torch.equal(given, x)
    torch.testing.assert_close(program(x), model(x.clone()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float16))],
)
def test_models_in_other_types_are_exported_in_float32(dtype: torch.dtype, affine: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 4).to(dtype)
    affine.to(dtype)
    program = export(affine, tmp_path / "p.onnx", example_inputs=x, comparisons={"more": x.repeat(2, 1)})
    assert affine.layer.weight.dtype == dtype
    assert (program.inputs[0].dtype, program.outputs[0].dtype) == ("float32", "float32")
    wanted = np.tanh(
        x.double().numpy() @ affine.layer.weight.detach().double().numpy().T
        + affine.layer.bias.detach().double().numpy()
    )
    np.testing.assert_allclose(program(x.float().numpy()), wanted, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_quantized_models_are_exported_on_the_inputs_they_were_quantized_on(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(8, 32).to(dtype)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)
    program = export(quantize(model, recipe=DynamicInt8(), example=x), tmp_path / "p.onnx", example_inputs=x)
    assert program.inputs[0].dtype == "float32"


def test_a_float32_model_keeps_the_types_of_its_inputs(tmp_path: Path) -> None:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.layer(x) + time.frac().float()

    inputs = (torch.randn(3, 4), torch.full((3, 1), 1e9 + 0.25, dtype=torch.float64))
    program = export(Rounded(), tmp_path / "p.onnx", example_inputs=inputs)
    assert [spec.dtype for spec in program.inputs] == ["float32", "float64"]
    with pytest.raises(ExportError, match=r"example inputs \(float64 \(3, 4\), float64 \(3, 1\)\)"):
        export(Rounded(), tmp_path / "no.onnx", example_inputs=(inputs[0].double(), inputs[1]))


class Answer(nn.Module):
    """Outputs by name; ``past`` is what the model has where no cache was asked for."""

    def __init__(self, past: object) -> None:
        super().__init__()
        self.layer, self.past = nn.Linear(32, 4), past

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"past": self.past, "logits": self.layer(x), "hidden": (None, x * 2)}


@pytest.mark.parametrize(
    "form", ["onnx", *(pytest.param(form, marks=pytest.mark.slow) for form in ("openvino", "pt2"))]
)  # they are left out of what is captured, before any format
def test_outputs_that_are_none_are_left_out_by_name(form: Format, tmp_path: Path) -> None:
    model, x = Answer(None), torch.randn(3, 32)
    program = export(model, tmp_path / "p", example_inputs=x, format=form, sign=SigningKey.make(tmp_path / "key.pem"))
    logits, hidden = program(x)
    torch.testing.assert_close(logits, model.layer(x).detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden, x * 2)
    assert [output.name for output in program.outputs] == ["logits", "hidden.1"]
    assert program.metadata["absent_outputs"] == ["past", "hidden.0"]


class Keyed(nn.Module):
    def __init__(self, keys: tuple[object, ...]) -> None:
        super().__init__()
        self.keys = keys

    def forward(self, x: Tensor) -> dict[object, Tensor]:
        return {key: x + place for place, key in enumerate(self.keys)}


@pytest.mark.parametrize(
    ("keys", "given", "names"),
    [
        (("z", "boxes", "a"), None, ["z", "boxes", "a"]), (("x", "y"), None, ["x_1", "y"]), (("b", "a"), ["c", "d"], ["c", "d"]),
        ((1, 2), None, ["add", "add_1"]), (("", "a"), None, ["add", "add_1"]),
    ],
)  # fmt: skip
def test_outputs_in_a_dict_are_named_by_their_keys(
    keys: tuple[object, ...], given: list[str] | None, names: list[str], tmp_path: Path
) -> None:
    x = torch.randn(2, 3)
    program = export(Keyed(keys), tmp_path / "p.onnx", example_inputs=x, input_names=["x"], output_names=given)
    assert [output.name for output in program.outputs] == names
    for place, value in enumerate(program(x)):
        torch.testing.assert_close(value, x + place)


class InnerNames(nn.Module):
    """Outputs by keys that are also names of operators and weights inside of it, but of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        active = torch.relu(self.layer(x))
        return {"relu": self.layer(active), "linear": active * 2, "linear_1": active + 1, "layer.weight": active - 1}


@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_keys_of_outputs_may_be_names_inside_of_the_graph(form: Format, tmp_path: Path) -> None:
    model, x = InnerNames(), torch.randn(2, 3)
    program = export(model, tmp_path / "p", example_inputs=x, format=form)
    assert [output.name for output in program.outputs] == list(model(x))
    for given, expected in zip(program(x), model(x).values(), strict=True):
        torch.testing.assert_close(given, expected.detach())


def test_quantized_models_leave_out_outputs_that_are_none(tmp_path: Path) -> None:
    x = torch.randn(8, 32)
    quantized = quantize(Answer(None), recipe=DynamicInt8(), example=x)
    assert quantized(x)["past"] is None
    program = export(quantized, tmp_path / "p.onnx", example_inputs=x)
    assert program.metadata["absent_outputs"] == ["past", "hidden.0"]
    assert [output.name for output in program.outputs] == ["logits", "hidden.1"]
    torch.testing.assert_close(program(x)[0], quantized(x)["logits"], rtol=0, atol=0.05)


def test_outputs_that_are_no_tensors_are_refused_by_name(tmp_path: Path) -> None:
    x = torch.randn(8, 32)
    with pytest.raises(ExportError, match=r"output\['past'\] of the model is 3, of type int"):
        export(Answer(3), tmp_path / "p.onnx", example_inputs=x)
    with pytest.raises(ExportError, match=r"output\['past'\] of the model is 3, of type int"):
        quantize(Answer(3), recipe=DynamicInt8(), example=x)
    assert leftovers(tmp_path) == []


class Again(nn.Module):
    """Gives its input back, and one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        double = x * 2
        return x, double, double


@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_each_tensor_of_a_program_has_a_name_of_its_own(form: Format, tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    program = export(Again(), tmp_path / "p", example_inputs=x, format=form)
    assert [spec.name for spec in program.inputs] == ["x"]
    assert [spec.name for spec in program.outputs] == ["x_1", "mul", "mul_1"]
    for given, expected in zip(program(x), Again()(x), strict=True):
        torch.testing.assert_close(given, expected)


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    for names, message in (
        ({"output_names": ["a", "b"]}, r"the model has 3 outputs, and output_names are 2: a, b"),
        ({"input_names": ["a", "b"]}, r"the model has 1 inputs, and input_names are 2: a, b"),
        ({"output_names": ["a", "b", "a"]}, "give a to several tensors"),
        ({"output_names": ["a", "", "c"]}, "output_names are 'a', '', 'c': no name may be empty"),
        ({"input_names": ["a"], "output_names": ["a", "b", "c"]}, "give a to several tensors"),
        ({"output_names": ["x", "b", "c"]}, "output_names give x, and an input is called so"),
    ):
        with pytest.raises(ExportError, match=message):
            export(Again(), tmp_path / "p.onnx", example_inputs=x, **names)  # type: ignore[arg-type]
    for place in (".", tmp_path / ".."):
        with pytest.raises(ExportError, match=r"has no name of its own, .*: name a folder in it"):
            export(Again(), place, example_inputs=x)
    assert leftovers(tmp_path) == []


class Cut(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:, 4:]


def test_outputs_without_a_value_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"output 1 of the model has shape \(2, 0\) on the example and holds no value"
    ):
        export(Cut(), tmp_path / "p.onnx", example_inputs=torch.rand(2, 4))
    assert leftovers(tmp_path) == []


class Scaled(nn.Module):
    """Takes a number first, and gives one last."""

    def forward(self, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return scale * x, (scale * 2).clone()


@pytest.mark.parametrize(
    "form", ["onnx", *(pytest.param(form, marks=pytest.mark.slow) for form in ("openvino", "pt2"))]
)
def test_numbers_keep_their_shape_in_programs(form: Format, tmp_path: Path) -> None:
    scale, x = torch.tensor(3.0), torch.rand(2, 4)
    program = export(
        Scaled(), tmp_path / "p", example_inputs=(scale, x), format=form, sign=SigningKey.make(tmp_path / "key.pem")
    )
    assert program.inputs[0].shape == ()
    product, double = program(scale.numpy(), x.numpy())
    np.testing.assert_allclose(product, 3 * x.numpy(), rtol=1e-6)
    assert (np.shape(double), float(double)) == ((), 6.0)
    assert program(scale, x)[1].shape == ()


class Counted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.double().sum(-1)


@pytest.mark.parametrize("name", ["p", "p.onnx"])
def test_openvino_keeps_the_name_of_an_input_behind_which_a_cast_is(name: str, tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    export(Counted(), tmp_path / name, example_inputs=x, input_names=["numbers"], output_names=["double", "sum"])
    program = Program.load(tmp_path / name, runtime="openvino")
    assert [spec.name for spec in (*program.inputs, *program.outputs)] == ["numbers", "double", "sum"]
    torch.testing.assert_close(program(x)[1], x.double().sum(-1), rtol=1e-6, atol=0)


def test_one_file_names_its_free_dimensions(tmp_path: Path) -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, y], 1)

    inputs = (torch.rand(2, 3), torch.rand(2, 1))
    dynamic = {"x": {0: "rows", 1: "left"}, "y": {0: "rows", 1: "right"}}
    program = export(Joined(), tmp_path / "p.onnx", example_inputs=inputs, dynamic=dynamic)
    assert [spec.shape for spec in program.inputs] == [("rows", "left"), ("rows", "right")]
    assert program.outputs[0].shape == ("rows", "left + right")


class Typed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float(), x.to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_outputs_of_types_without_values_in_programs_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ExportError, match=rf"output 1 of the model is {kind}, which programs do not give: return "):
        export(Typed(dtype), tmp_path / "p.onnx", example_inputs=torch.rand(2, 4))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_integers_of_every_width_are_taken(form: Format, tmp_path: Path) -> None:
    x = torch.tensor([[-3, 300]], dtype=torch.int16)
    program = export(Typed(torch.int32), tmp_path / "p", example_inputs=x, format=form)
    assert [spec.dtype for spec in (*program.inputs, *program.outputs)] == ["int16", "float32", "int32"]
    assert program(x)[1].tolist() == [[-3, 300]]
