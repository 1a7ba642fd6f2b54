"""Formats: one contract for all of them, and what each refuses."""

from __future__ import annotations

import dataclasses
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.deploy import executorch_site
from tests.exports import compare_here
from torch import Tensor, nn

from arclight.deploy import ExportError, Program, ProgramError, QuantizedModel, benchmark, export, quantize
from arclight.deploy.capture import capture, without_absent_outputs
from arclight.deploy.formats import formats, onnx_graph
from arclight.deploy.formats.formats import destination, write_graph
from arclight.deploy.programs import processor
from arclight.deploy.programs.fresh import run_fresh
from arclight.deploy.programs.torch_runtime import _THREADS, TorchSession
from arclight.deploy.settings import Target
from arclight.fabric.signing import SigningKey


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch)  # those of the fixtures are compared in a fresh one


class TwoHeads(nn.Module):
    """A convolution with batch norm, and two outputs of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.conv(images)).relu()
        return self.head(features.mean((2, 3))), features.amax(1)


@pytest.fixture(scope="module")
def two_heads() -> nn.Module:
    torch.manual_seed(0)
    model = TwoHeads()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(4, 3, 8, 8) * 3)
    return model.eval()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return SigningKey.make(tmp_path_factory.mktemp("keys") / "key.pem")


FORMATS = [
    "onnx",
    "openvino",
    pytest.param("pt2", marks=pytest.mark.slow),
    pytest.param("aoti", marks=pytest.mark.slow),
    pytest.param("executorch", marks=executorch_site.NEEDED),
]


@pytest.fixture(scope="module", params=FORMATS)
def program(
    request: pytest.FixtureRequest, two_heads: nn.Module, key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> Program:  # fmt: skip
    return export(
        two_heads, tmp_path_factory.mktemp("programs") / request.param, example_inputs=torch.randn(4, 3, 8, 8), format=request.param,
        input_names=["images"], output_names=["logits", "map"], metadata={"names": ["código"]}, sign=key,
    )  # fmt: skip


class TestContract:
    """Check the contract of every format."""

    def test_it_computes_what_the_model_computes(self, program: Program, two_heads: nn.Module) -> None:
        for batch in (1, 3, 5):
            images = torch.randn(batch, 3, 8, 8)
            with torch.no_grad():
                expected = two_heads(images)
            for given, wanted in zip(program(images), expected):
                torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        assert all(isinstance(output, np.ndarray) for output in program(images.numpy()))

    def test_it_describes_itself(self, program: Program) -> None:
        assert [str(spec) for spec in (*program.inputs, *program.outputs)] == [
            "images: float32 (batch, 3, 8, 8)",
            "logits: float32 (batch, 4)",
            "map: float32 (batch, 6, 6)",
        ]
        assert program.format == program.path.name
        assert program.precision == "fp32"
        assert program.metadata["names"] == ["código"]
        assert list(program.metadata["parity"]["outputs"]) == ["logits", "map"]
        assert program.metadata["parity"]["batch_sizes"] == [1, 2, 3]
        assert program.metadata["instruction_sets"] or not Path("/proc/cpuinfo").exists()
        assert program.metadata["versions"]["torch"] == torch.__version__
        assert ("freezing" in program.metadata.get("passes", ())) == (program.format == "aoti")
        assert program.nbytes > sum(value.nbytes for value in TwoHeads().parameters())

    def test_threads_change_nothing(self, program: Program) -> None:
        images, before = torch.randn(2, 3, 8, 8), torch.get_num_threads()
        two = program.with_threads(2)
        assert two.threads == 2
        for given, wanted in zip(two(images), program.with_threads(1)(images)):
            torch.testing.assert_close(given, wanted)
        assert torch.get_num_threads() == before

    @pytest.mark.filterwarnings("error:The given NumPy array is not writable")
    def test_it_takes_read_only_arrays(self, program: Program) -> None:
        images = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
        wanted = program(images)
        images.flags.writeable = False
        for given, output in zip(program(images), wanted, strict=True):
            np.testing.assert_array_equal(given, output)

    def test_it_names_its_kernels(self, program: Program) -> None:
        assert any("conv" in name.lower() for name in program.kernels())

    def test_it_runs_in_a_fresh_process(self, program: Program) -> None:
        images = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
        run = run_fresh(program, [[images]])
        for given, wanted in zip(run.outputs[0], program(images)):
            np.testing.assert_array_equal(given, wanted)
        assert run.peak_bytes > program.nbytes
        assert run.load_s > 0

    def test_it_names_a_wrong_input(self, program: Program) -> None:
        with pytest.raises(ProgramError, match=r"expects images: float32 \(batch, 3, 8, 8\), got float64 \(3, 8, 8\)"):
            program(np.zeros((3, 8, 8)))

    def test_it_is_loaded_only_unchanged(self, program: Program, key: SigningKey) -> None:
        files = [file for file in program.path.iterdir() if file.name != "program.json"]
        main = max(files, key=lambda file: file.stat().st_size)
        whole = main.read_bytes()
        try:
            main.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
            with pytest.raises(ProgramError, match="its digest does not fit"):
                Program.load(program.path, trusted=[key.public])
        finally:
            main.write_bytes(whole)


def test_formats_are_chosen_by_argument_and_suffix(two_heads: nn.Module, tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    assert export(two_heads, tmp_path / "folder", example_inputs=images).format == "openvino"
    for path, options, message in [
        ("p.pte", {}, "a program of format executorch is a folder: call it .*p, format='executorch'"),
        ("p.engine", {}, "nothing here runs tensorrt programs, whatever is installed, .* trtexec on the .onnx file"),
        (
            "p",
            {"format": "coreml"},
            "nothing here runs coreml programs, whatever is installed, .* convert format 'pt2' with coremltools",
        ),
        (
            "p.tflite",
            {},
            "nothing here runs litert programs, whatever is installed, .* convert format 'pt2' with litert-torch",
        ),
        ("p", {"format": "torchscript"}, "TorchScript is deprecated"),
        ("p", {"format": "caffe"}, "'caffe' is not known; there are onnx, openvino, pt2, aoti, executorch"),
        ("p.xml", {}, "a program of format openvino is a folder: call it .*p, format='openvino'"),
        ("p.onnx", {"format": "openvino"}, "names an ONNX file, and the format is 'openvino'"),
    ]:
        with pytest.raises(ExportError, match=message):
            export(two_heads, tmp_path / path, example_inputs=images, **options)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_is_no_program_is_not_replaced(two_heads: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"precious")
    with pytest.raises(
        ExportError, match=r"photos exists and is not a program, or .* program\.json does not list a\.jpg"
    ):
        export(two_heads, tmp_path / "photos", example_inputs=torch.randn(2, 3, 8, 8))
    assert (tmp_path / "photos" / "a.jpg").read_bytes() == b"precious"


def test_unlisted_files_beside_a_program_are_never_deleted(tmp_path: Path) -> None:
    model, values, path = nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "p"
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "program.json").write_text('{"name": "of another tool"}')
    with pytest.raises(ExportError, match=r"does not list program\.json"):
        export(model, tmp_path / "tool", example_inputs=values, format="onnx")
    export(model, path, example_inputs=values, format="onnx")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"does not list notes\.txt"):
        export(model, path, example_inputs=values, format="onnx")
    assert (path / "notes.txt").read_text() == "mine"
    (tmp_path / "q.onnx").mkdir()
    with pytest.raises(ExportError, match=r"q\.onnx is a folder"):
        export(model, tmp_path / "q.onnx", example_inputs=values)


def test_a_folder_that_was_filled_during_the_export_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p"

    def slow(*_: Any) -> dict[str, Any]:
        path.mkdir()
        (path / "notes.txt").write_text("mine")
        return {}

    monkeypatch.setattr("arclight.deploy.formats.export._parity", lambda *_, **__: {})
    monkeypatch.setattr("arclight.deploy.formats.export._described", slow)
    with pytest.raises(ExportError, match=r"does not list notes\.txt"):
        export(nn.Linear(4, 4), path, example_inputs=torch.randn(2, 4), format="onnx")
    assert [file.name for file in path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_program_is_replaced_in_one_step_or_not_at_all(tmp_path: Path) -> None:
    model, values, path = nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "p"
    before = export(model, path, example_inputs=values, dynamic_batch=False)
    with pytest.raises(ExportError, match="no program was written"):
        export(model, path, example_inputs=values, dynamic_batch=False, format="onnx", max_difference=-1.0)
    assert Program.load(path).metadata == before.metadata
    export(model, path, example_inputs=values, dynamic_batch=False, format="onnx")
    assert Program.load(path).format == "onnx"
    assert sorted(file.name for file in path.iterdir()) == ["model.onnx", "program.json"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize(
    ("target", "form"),
    [
        (None, "openvino"),
        ("openvino", "openvino"),
        ("onnxruntime", "onnx"),
        ("tensorrt", "onnx"),
        ("inductor", "aoti"),
        ("executorch", "executorch"),
    ],
)
def test_the_default_format_of_a_folder_is_that_of_the_target(target: Target | None, form: str, tmp_path: Path) -> None:
    assert destination(tmp_path / "p", None, target) == (tmp_path / "p", form)
    assert destination(tmp_path / "p.onnx", None, target) == (tmp_path / "p.onnx", "onnx")


@pytest.mark.parametrize("name", ["int8.onnx", "int8"])
def test_programs_that_openvino_runs_record_what_it_computes_in(
    name: str, two_heads: nn.Module, tmp_path: Path
) -> None:  # fmt: skip
    images = torch.randn(4, 3, 8, 8)
    quantized = quantize(two_heads, [images], target="openvino")
    program = export(quantized, tmp_path / name, format="onnx", example_inputs=images)
    assert (program.runtime, program.metadata["precision_hint"]) == ("openvino", "f32")
    steps = program.metadata["build_s"]
    assert steps.keys() == {"capture", "quantization", "writing"}
    assert steps["quantization"] == quantized.seconds
    assert min(steps.values()) > 0


def test_programs_of_onnx_runtime_record_no_hint(two_heads: nn.Module, tmp_path: Path) -> None:
    started = time.perf_counter()
    program = export(two_heads, tmp_path / "p.onnx", example_inputs=torch.randn(4, 3, 8, 8))
    steps = program.metadata["build_s"]
    assert steps.keys() == {"capture", "writing"}
    assert 0 < sum(steps.values()) < time.perf_counter() - started
    assert "precision_hint" not in program.metadata


@pytest.mark.slow
def test_int8_is_written_in_the_format_of_its_target(two_heads: nn.Module, tmp_path: Path) -> None:
    images = torch.randn(4, 3, 8, 8)
    quantized = quantize(two_heads, [images], target="openvino")
    program = export(quantized, tmp_path / "int8", example_inputs=images)
    assert (program.format, program.runtime) == ("openvino", "openvino")
    report = program.metadata["quantization"]
    assert report["target"] == "openvino"
    assert sum(report["integer_kernels"].values()) == len(quantized.quantized_layers) == 2
    assert program.metadata["precision_hint"] == "f32"
    with torch.no_grad():
        for given, wanted in zip(program(images), quantized(images)):
            assert 10 * torch.log10(wanted.square().sum() / (given - wanted).square().sum()) > 30


def test_a_format_that_its_target_does_not_run_is_refused(
    quantized: QuantizedModel, two_heads: nn.Module, images: Tensor, key: SigningKey, tmp_path: Path
) -> None:
    for form, message in [
        ("pt2", r"runs an int8 graph in float, with rounding simulated.*: take format onnx"),
        (
            "openvino",
            "quantized for onnxruntime, which does not run openvino programs: quantize it with target='openvino'",
        ),
        ("aoti", "which does not run aoti programs: quantize it with target='inductor', or take format onnx"),
    ]:
        with pytest.raises(ExportError, match=message):
            export(quantized, tmp_path / "p", example_inputs=images, format=form, sign=key)  # type: ignore[arg-type]
    compiled = quantize(two_heads, [torch.randn(4, 3, 8, 8)], target="inductor")
    with pytest.raises(ExportError, match="for fixed shapes only: export with dynamic_batch=False"):
        export(compiled, tmp_path / "p", example_inputs=torch.randn(4, 3, 8, 8), sign=key)
    assert list(tmp_path.iterdir()) == []


def test_large_weights_lie_beside_one_file_and_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(onnx_graph, "LARGEST_FILE", 1)
    model, values = nn.Linear(64, 64), torch.randn(3, 64)
    for path, pattern in [
        (tmp_path / "p.onnx", "p-*.data"),
        (tmp_path / "p", "p/model-*.data"),
    ]:
        program = export(model, path, example_inputs=values, format="onnx")
        (weights,) = tmp_path.glob(pattern)
        torch.testing.assert_close(program(values), model(values).detach())
        assert program.nbytes > weights.stat().st_size > 64 * 64 * 4 - 1
        stored = weights.read_bytes()
        weights.write_bytes(bytes([stored[0] ^ 1]) + stored[1:])
        with pytest.raises(ProgramError):
            Program.load(path)


def test_aoti_needs_a_compiler(two_heads: nn.Module, key: SigningKey, tmp_path: Path) -> None:
    from torch._inductor import config

    # pytest's monkeypatch would leave the setting hidden for the tests after this one
    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ExportError, match="install g\\+\\+ or clang\\+\\+"):
        export(two_heads, tmp_path / "p", example_inputs=torch.randn(2, 3, 8, 8), format="aoti", sign=key)
    assert list(tmp_path.iterdir()) == []


def test_graphs_are_saved_without_pickles_and_example_inputs(two_heads: nn.Module, tmp_path: Path) -> None:
    exported = torch.export.export(two_heads, (torch.randn(2, 3, 8, 8),))
    write_graph(exported, tmp_path / "m.pt2")
    assert exported.example_inputs is not None
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        samples = [name for name in archive.namelist() if "sample_inputs" in name]
        assert [archive.read(name) for name in samples] == [b""]
        assert not any(b'"use_pickle": true' in archive.read(name) for name in archive.namelist())


def test_reading_a_pt2_is_running_it(two_heads: nn.Module, tmp_path: Path) -> None:
    """torch evaluates the sizes in a graph as Python, which is why a pt2 is opened only if it is signed."""
    exported = torch.export.export(
        two_heads, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
    )
    write_graph(exported, tmp_path / "m.pt2")
    told = tmp_path / "told"
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive, zipfile.ZipFile(tmp_path / "evil.pt2", "w") as evil:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("models/model.json"):
                place = content.index(b'"expr_str": "') + len(b'"expr_str": "')
                end = content.index(b'", "hint"', place)
                content = content[:place] + f"open('{told}', 'w').close() or 2".encode() + content[end:]
            evil.writestr(name.replace("m/", "evil/", 1), content)
    TorchSession(tmp_path / "evil.pt2", threads=None, compiled=False, inputs=(), outputs=())
    assert told.exists()


def test_numbers_of_threads_are_put_back_by_calls_that_overlap() -> None:
    before = torch.get_num_threads()
    inside, leave, found = threading.Barrier(2), threading.Event(), []

    def first() -> None:
        with _THREADS.of(before + 2):
            inside.wait(20)
            leave.wait(20)

    def second() -> None:  # torch runs for the first time in this thread while the other has set its number
        with _THREADS.of(before + 1):
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    one, other = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    inside.wait(20)
    other.start()
    other.join()
    leave.set()
    one.join()
    last = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    last.start()
    last.join()
    assert found == [before + 1, before, before]
    assert torch.get_num_threads() == before


def test_instruction_sets_that_libraries_need_are_recorded() -> None:
    """A library of a processor with AMX was refused on it."""
    from torch._inductor import cpu_vec_isa

    others = {"zvector", "vsx"}  # of processors whose instruction sets Linux does not list
    names = {name for isa in cpu_vec_isa.supported_vec_isa_list for name in str(isa).split()} - others
    assert {formats._ISA.get(name, name) for name in names} <= processor._RECORDED


class InPlace(nn.Module):
    """Ends in operators in place, one of them on a part; ``absent``: its first output is None."""

    def __init__(self, absent: bool) -> None:
        super().__init__()
        self.absent = absent

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        part, whole = x * 2, x + 1
        part[:, :2].relu_()
        x.add_(1)
        return (None if self.absent else x.sigmoid()), part, whole.relu_()


@pytest.mark.parametrize("absent", [False, True])
def test_outputs_have_the_same_names_in_all_formats(absent: bool) -> None:
    """Those of pt2 and aoti have operators in place replaced, others do so as they are converted."""
    model, x = InPlace(absent), torch.randn(2, 3)
    captured = [without_absent_outputs(capture(model, (x,), functional=functional)) for functional in (False, True)]
    inputs, outputs = zip(*(formats.Captured(one, [{0: "batch"}], None, None).names() for one in captured))
    assert inputs[0] == inputs[1] == ["x"]
    assert outputs[0] == outputs[1] == ([] if absent else ["sigmoid"]) + ["mul", "relu__1"]


def test_conversions_share_torch_s_tables(two_heads: nn.Module) -> None:
    """A second conversion writes the same bytes, what is torch's stays torch's, and operators that come later are seen."""
    from torch.onnx._internal.exporter import _decomp, _registration

    captured = capture(two_heads, (torch.randn(2, 3, 8, 8),))
    before = _registration.ONNXRegistry.from_torchlib, _decomp.create_onnx_friendly_decomposition_table
    first, second = (onnx_graph.convert(captured, input_names=None, output_names=None) for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert (_registration.ONNXRegistry.from_torchlib, _decomp.create_onnx_friendly_decomposition_table) == before
    known = onnx_graph._operators()
    library = torch.library.Library("arclight_later", "DEF")
    try:
        library.define("double(Tensor x) -> Tensor")
        assert onnx_graph._operators() > known
    finally:
        library._destroy()


# -- several formats, and the fastest ------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """List for each capture, in their order, whether it is functional."""
    calls: list[bool] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options["functional"])
        return capture(*arguments, **options)

    monkeypatch.setattr("arclight.deploy.formats.export.capture", counted)
    return calls


def test_several_formats_are_written_of_one_capture(two_heads: nn.Module, tmp_path: Path, captures: list[bool]) -> None:
    images = torch.randn(4, 3, 8, 8)
    found = export(two_heads, tmp_path / "all", example_inputs=images, format=["onnx", "openvino"])
    assert (list(found), captures) == (["onnx", "openvino"], [False])
    with torch.no_grad():
        wanted = two_heads(images)
    for form, program in found.items():
        assert (program.format, program.path) == (form, tmp_path / "all" / form)
        for given, expected in zip(program(images), wanted):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert sorted(entry.name for entry in (tmp_path / "all").iterdir()) == ["onnx", "openvino"]
    # again, over what is there
    again = export(two_heads, tmp_path / "all", example_inputs=images, format=("openvino",))
    assert list(again) == ["openvino"]


@pytest.mark.slow
def test_every_format_is_written_of_one_capture(
    two_heads: nn.Module, key: SigningKey, tmp_path: Path, captures: list[bool]
) -> None:
    images = torch.randn(4, 3, 8, 8)
    forms: Any = ["aoti", "pt2", "onnx", "openvino"]
    found = export(two_heads, tmp_path / "all", example_inputs=images, format=forms, sign=key)
    assert (list(found), captures) == (forms, [True])
    for program in found.values():
        for given, expected in zip(program(images), two_heads(images)):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "forms", "message"),
    [
        ("p", [], "format names nothing: name each format once, and one at least"),
        ("p", ["onnx", "onnx"], "format names onnx, onnx: name each format once"),
        ("p", ["onnx", "caffe"], "'caffe' is not known; there are onnx"),
        ("p", ["onnx", "aoti"], "aoti programs are loaded only if somebody who is trusted signed them"),
        ("p.onnx", ["onnx", "openvino"], "p.onnx names a file, and several formats are folders in one: call it .*p$"),
        ("program", ["onnx"], "program is a program itself, and would hold others"),
    ],
)
def test_several_formats_are_written_all_or_none(
    two_heads: nn.Module, tmp_path: Path, path: str, forms: Any, message: str
) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "program.json").write_text("{}")
    with pytest.raises(ExportError, match=message):
        export(two_heads, tmp_path / path, example_inputs=torch.randn(2, 3, 8, 8), format=forms)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["program", "program.json"]


def test_one_format_that_fails_leaves_the_others_unwritten(
    two_heads: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise ExportError("OpenVINO cannot convert the model: no")

    monkeypatch.setitem(formats._WRITERS, "openvino", refused)
    with pytest.raises(ExportError, match="OpenVINO cannot convert"):
        export(two_heads, tmp_path / "all", example_inputs=torch.randn(2, 3, 8, 8), format=["onnx", "openvino"])
    assert not list((tmp_path / "all").glob("*"))


def wall_ms(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    """Let timing give ``times`` of programs by name."""
    real = benchmark

    def timed(programs: Any, inputs: Any, **options: Any) -> Any:
        table = real(programs, inputs, **options)
        return dataclasses.replace(
            table, rows=tuple(dataclasses.replace(row, wall_ms=times[row.name]) for row in table.rows)
        )

    monkeypatch.setattr("arclight.deploy.formats.export.benchmark", timed)


@pytest.mark.parametrize(("onnx_ms", "kept"), [(1.0, "onnx"), (3.0, "openvino")])
def test_the_fastest_format_is_kept(
    two_heads: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnx_ms: float, kept: str
) -> None:
    compare_here(monkeypatch, rounds=2)
    wall_ms(monkeypatch, {"onnx": onnx_ms, "openvino": 2.0})
    program = export(two_heads, tmp_path / "p", example_inputs=torch.randn(4, 3, 8, 8), format="fastest")
    assert (program.format, program.path) == (kept, tmp_path / "p")
    assert program.metadata["fastest"] == {
        "wall_ms": {"openvino": 2.0, "onnx": onnx_ms}, "threads": 1, "shapes": [[1, 3, 8, 8]], "left_out": {},
    }  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]


def test_the_fastest_format_is_measured(two_heads: nn.Module, tmp_path: Path) -> None:
    program = export(two_heads, tmp_path / "p", example_inputs=torch.randn(4, 3, 8, 8), format="fastest")
    times = program.metadata["fastest"]["wall_ms"]
    assert times[program.format] == min(times.values()) > 0
    assert list(times) == ["openvino", "onnx"]


def test_a_format_that_cannot_be_written_is_left_out_of_the_fastest(
    two_heads: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = torch.randn(2, 3, 8, 8)
    program = export(
        two_heads, tmp_path / "p", example_inputs=images, format="fastest", candidates=["aoti", "onnx"]
    )  # fmt: skip
    assert program.format == "onnx"
    assert "aoti programs are loaded only if" in program.metadata["fastest"]["left_out"]["aoti"]
    assert "format aoti is not timed: aoti programs" in caplog.text
    with pytest.raises(ExportError, match="aoti programs are loaded only if"):
        export(two_heads, tmp_path / "q", example_inputs=images, format="fastest", candidates=["aoti"])
    for path, options, message in [
        ("q.onnx", {"format": "fastest"}, "names an ONNX file, and the fastest format is known afterwards"),
        (
            "q",
            {"format": "onnx", "candidates": ["onnx"]},
            "candidates are of format='fastest', and the format is 'onnx'",
        ),
        ("q", {"format": "fastest", "candidates": ["onnx", "onnx"]}, "format names onnx, onnx: name each format once"),
    ]:
        with pytest.raises(ExportError, match=message):
            export(two_heads, tmp_path / path, example_inputs=images, **options)  # type: ignore[call-overload]


def test_a_quantized_model_has_no_fastest_format(tmp_path: Path) -> None:
    model, images = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.rand(4, 4, 8, 8)
    quantized = quantize(model, [images])
    with pytest.raises(ExportError, match=r"was quantized for onnxruntime, .* `arclight quantize --format fastest`"):
        export(quantized, tmp_path / "p", example_inputs=images, format="fastest")


@pytest.mark.parametrize(
    "candidates, message",
    [(["onnx", "opnvino"], "candidates name 'opnvino': there is onnx"), ([], "candidates are empty")],
)
def test_candidates_are_formats(two_heads: nn.Module, tmp_path: Path, candidates: list[Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(
            two_heads, tmp_path / "p", example_inputs=torch.randn(4, 3, 8, 8), format="fastest", candidates=candidates
        )
