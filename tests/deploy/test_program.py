"""Programs: what runs them, what they refuse, and what they never do."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.deploy.conftest import warmed
from tests.exports import compare_here
from torch import Tensor, nn

from arclight.deploy import ExportError, Program, ProgramError, export, quantize
from arclight.deploy.programs import metadata
from arclight.deploy.programs.metadata import seal, unseal


class Largest:
    """Takes numbers, answers how often the program's best score exceeds each."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset, self.batches = offset, []

    def preprocess(self, inputs: Sequence[float]) -> tuple[np.ndarray, list[float]]:
        self.batches.append(len(inputs))
        return np.stack([np.full((3, 64, 64), value, dtype=np.float32) for value in inputs]), list(inputs)

    def postprocess(self, outputs: np.ndarray, context: list[float]) -> list[tuple[float, float]]:
        return [(value, float(output.max()) + self.offset) for value, output in zip(context, outputs)]


def plain_onnx(program: Program, path: Path) -> Path:
    """The same model without a word about arclight."""
    model = onnx.load(program.path)
    del model.metadata_props[:]
    onnx.save(model, path)
    return path


def test_numpy_gives_numpy_and_tensors_give_tensors(fp32_program: Program, images: Tensor) -> None:
    array, tensor = fp32_program(images.numpy()), fp32_program(images)
    assert isinstance(array, np.ndarray)
    assert isinstance(tensor, Tensor)
    assert np.array_equal(array, tensor.numpy())
    assert np.array_equal(fp32_program(images.numpy()[:, :, ::-1, ::-1]), fp32_program(images.flip(2, 3).numpy()))


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (np.zeros((1, 3, 32, 64), np.float32), r"float32 \(1, 3, 32, 64\)"),
        (np.zeros((3, 64, 64), np.float32), r"float32 \(3, 64, 64\)"),
        (np.zeros((1, 3, 64, 64), np.uint8), r"uint8 \(1, 3, 64, 64\)"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.bfloat16), r"bfloat16 \(1, 3, 64, 64\)"),
        ([[1.0]], r"float64 \(1, 1\)"),
    ],
)
def test_a_wrong_input_is_named_with_what_was_expected(fp32_program: Program, value: Any, given: str) -> None:
    with pytest.raises(ProgramError, match=rf"images: float32 \(batch, 3, 64, 64\), got {given}"):
        fp32_program(value)


def test_a_wrong_number_of_inputs_is_refused(fp32_program: Program, images: Tensor) -> None:
    with pytest.raises(ProgramError, match=r"takes 1 inputs .*images.* got 2"):
        fp32_program(images, images)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 0.99, 0.9999])
def test_a_truncated_file_is_refused(copied: Path, share: float) -> None:
    content = copied.read_bytes()
    copied.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ProgramError, match=r"copy\.onnx"):
        Program.load(copied)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" * 100, b"\x00" * 64])
def test_files_that_are_not_onnx_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.onnx"
    path.write_bytes(content)
    with pytest.raises(ProgramError, match=r"p\.onnx"):
        Program.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="there is no program at"):
        Program.load(tmp_path / "nothing.onnx")
    with pytest.raises(ProgramError, match="there is no program at"):
        Program.load(tmp_path)


def test_a_changed_weight_is_noticed(copied: Path) -> None:
    content = bytearray(copied.read_bytes())
    weights = max(onnx.load(copied).graph.initializer, key=lambda tensor: len(tensor.raw_data)).raw_data
    content[content.index(weights) + len(weights) // 2] ^= 1
    copied.write_bytes(content)
    with pytest.raises(ProgramError, match="checksum"):
        Program.load(copied)


@pytest.fixture
def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that reads the file fails the test."""

    def parses(*_: object, **__: object) -> None:
        raise AssertionError("the runtime was given a file that was not checked")

    monkeypatch.setattr(onnxruntime, "InferenceSession", parses)


@pytest.mark.usefixtures("no_runtime")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"image_size": 64', b'"image_size": 65'),
        (b'"task": "detect"', b'"task": "defect"'),
        ("código".encode(), "códiga".encode()),
        (b'"format": 2', b'"format":2 '),
        (b'"precision": "fp32"', b'"precision": "int8"'),
    ],
)
def test_a_changed_description_is_refused(copied: Path, before: bytes, after: bytes) -> None:
    content = copied.read_bytes()
    assert content.count(before) == 1
    copied.write_bytes(content.replace(before, after))
    with pytest.raises(ProgramError, match="checksum does not fit"):
        Program.load(copied)


@pytest.mark.usefixtures("no_runtime")
def test_a_changed_program_is_refused_before_a_runtime_reads_it(copied: Path) -> None:
    content = bytearray(copied.read_bytes())
    content[len(content) // 2] ^= 1
    copied.write_bytes(content)
    with pytest.raises(ProgramError, match="checksum does not fit"):
        Program.load(copied)


def test_a_program_is_checked_piece_by_piece(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} was read whole"))
    Program.load(copied)
    for chunk in (7, 1000):
        monkeypatch.setattr(metadata, "CHUNK", chunk)
        assert Program.load(copied).metadata["image_size"] == 64


@pytest.mark.filterwarnings("error")
def test_saving_a_sealed_program_again_breaks_the_seal(copied: Path) -> None:
    model = onnx.load(copied)
    model.producer_name = "somebody"
    onnx.save(model, copied)
    with pytest.raises(ProgramError, match="checksum does not fit"):
        Program.load(copied)


@pytest.mark.parametrize(
    "before", [b"", b"r", b"rr", b"\x80r\x80", b"\n\x08arclight\x12", b"r\x0b\n\x08arclight\x12\x00"]
)
@pytest.mark.parametrize("length", [0, 16, 17, 18, 19, 20, 21, 300, 70_000])
def test_a_description_is_found_after_any_bytes(tmp_path: Path, before: bytes, length: int) -> None:
    path = tmp_path / "p.onnx"
    path.write_bytes(before)
    described = {"x": "r" * length, "y": "\n\x08arclight\x12"}
    seal(path, described)
    assert unseal(path)[0].items() >= described.items()
    path.write_bytes(path.read_bytes() + before)
    assert unseal(path) == ({}, None) or not before


@pytest.fixture
def beside(bare: bytes, tmp_path: Path) -> Path:
    """A program whose weights lie in a file of their own."""
    path = tmp_path / "beside.onnx"
    onnx.save(
        onnx.load_from_string(bare), path, save_as_external_data=True, location="beside.weights", size_threshold=256
    )
    return path


def change_weights(path: Path) -> None:
    weights = np.fromfile(path, np.float32) * 7
    weights.tofile(path)


@pytest.mark.parametrize("chunk", [11, 1 << 20])
def test_weights_beside_a_program_are_sealed(
    beside: Path, images: Tensor, fp32_program: Program, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "CHUNK", chunk)
    seal(beside, {"task": "detect"})
    program = Program.load(beside)
    assert list(program.metadata["files"]) == ["beside.weights"]
    assert program.nbytes > (beside.parent / "beside.weights").stat().st_size
    assert torch.equal(program(images), fp32_program(images))
    change_weights(beside.parent / "beside.weights")
    with pytest.raises(ProgramError, match=r"beside\.weights, .*was changed after the export"):
        Program.load(beside)
    (beside.parent / "beside.weights").unlink()
    with pytest.raises(ProgramError, match=r"beside\.weights, .*is missing"):
        Program.load(beside)


def test_the_name_of_a_file_beside_a_program_may_begin_with_a_piece(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = b"\n\x08location\x12"
    content = beside.read_bytes()
    assert key in content
    monkeypatch.setattr(metadata, "CHUNK", content.index(key) + len(key))
    seal(beside, {"task": "detect"})
    assert list(Program.load(beside).metadata["files"]) == ["beside.weights"]


def test_weights_outside_the_folder_of_a_program_are_not_sealed(beside: Path, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    moved = tmp_path / "below" / "p.onnx"
    moved.write_bytes(beside.read_bytes().replace(b"beside.weights", b"../e.weights"[:14].ljust(14, b"x")))
    with pytest.raises(ExportError, match="which is not a file beside it"):
        seal(moved, {})


def seal_as_before(path: Path, described: dict[str, Any]) -> None:
    """Append the description as the release before did: its checksum covers the model alone."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    text = json.dumps({"format": 1, **described, "sha256": digest}, ensure_ascii=False)
    with path.open("ab") as file:
        model = onnx.ModelProto()
        model.metadata_props.add(key="arclight", value=text)
        file.write(model.SerializeToString())


def test_a_program_of_the_release_before_loads_with_a_warning(bare: bytes, beside: Path, images: Tensor) -> None:
    path = beside.parent / "old.onnx"
    path.write_bytes(bare)
    seal_as_before(path, {"image_size": 64, "names": ["código"]})
    with pytest.warns(UserWarning, match="export it again"):
        program = Program.load(path)
    assert program.metadata["image_size"] == 64
    assert program(images).shape == (8, 320, 7)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ProgramError, match="checksum"):
        Program.load(path)
    seal_as_before(beside, {})
    with pytest.raises(ProgramError, match=r"beside\.weights, which its checksum does not cover"):
        Program.load(beside)


def test_a_description_of_any_length_is_found(bare: bytes, tmp_path: Path) -> None:
    path = tmp_path / "long.onnx"
    for length in (0, 100, *range(65_420, 65_460, 3), 300_000):
        path.write_bytes(bare)
        seal(path, {"names": ["x" * length]})
        assert len(Program.load(path).metadata["names"][0]) == length


def test_a_description_of_another_arclight_is_refused(copied: Path) -> None:
    copied.write_bytes(copied.read_bytes().replace(b'"format": 2', b'"format": 9'))
    with pytest.raises(ProgramError, match="format 9"):
        Program.load(copied)
    copied.write_bytes(copied.read_bytes().replace(b'{"format"', b'{{"forma"'))
    with pytest.raises(ProgramError, match="malformed"):
        Program.load(copied)


def test_onnx_from_elsewhere_runs_raw(fp32_program: Program, images: Tensor, tmp_path: Path) -> None:
    program = Program.load(plain_onnx(fp32_program, tmp_path / "plain.onnx"))
    assert torch.equal(program(images), fp32_program(images))
    assert program.metadata == {}
    assert program.precision == "unknown"
    with pytest.raises(ProgramError, match="processing="):
        program.predict([0.5])


def test_predict_keeps_order_and_batch_size(fp32_program: Program) -> None:
    processing = Largest()
    program = Program.load(fp32_program.path, processing=processing)
    values = [i / 7 for i in range(7)]
    results = program.predict(iter(values), batch_size=3)
    assert processing.batches == [3, 3, 1]
    assert [value for value, _ in results] == values
    singles = [program.predict([value])[0][1] for value in values]
    assert [score for _, score in results] == pytest.approx(singles, rel=1e-5)
    assert program.predict([]) == []
    with pytest.raises(ValueError, match="batch_size"):
        program.predict(values, batch_size=0)


def test_postprocessing_that_loses_results_is_noticed(fp32_program: Program) -> None:
    class Lossy(Largest):
        def postprocess(self, outputs: np.ndarray, context: list[float]) -> list[tuple[float, float]]:
            return super().postprocess(outputs, context)[1:]

    with pytest.raises(ProgramError, match="1 results for 2 inputs"):
        Program.load(fp32_program.path, processing=Lossy()).predict([0.1, 0.2])


@pytest.fixture(scope="module")
def bare(fp32_program: Program, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The float program without metadata."""
    return plain_onnx(fp32_program, tmp_path_factory.mktemp("bare") / "bare.onnx").read_bytes()


@pytest.fixture
def named(bare: bytes, tmp_path: Path) -> Callable[..., Path]:
    """Writes a program whose file names a processing."""

    def write(name: object, **arguments: object) -> Path:
        path = tmp_path / "named.onnx"
        path.write_bytes(bare)
        seal(path, {"processing": name, "processing_args": arguments})
        return path

    return write


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "arclightevil.mod:Class",
        "arclight:Trainer.fit",
        "arclight.deploy.programs.program:os.system",
        "x",
        7,
        None,
    ],
)
def test_processing_outside_the_package_is_refused(named: Callable[..., Path], tmp_path: Path, name: object) -> None:
    with pytest.raises(ProgramError, match="only classes of the arclight package"):
        Program.load(named(name))
    with pytest.raises(ProgramError, match="only classes of the arclight package"):
        export(nn.Identity(), tmp_path / "p.onnx", example_inputs=torch.zeros(1, 2), metadata={"processing": name})
    assert not (tmp_path / "p.onnx").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arclight.deploy.programs.program:os", "is not a class"),
        ("arclight.deploy.programs.program:Path", "is not a class"),
        ("arclight.deploy.programs.program:Program", "is not a class"),
        ("arclight.deploy.programs.program:Nothing", "is not a class"),
        ("arclight.deploy.nowhere:Class", "has no arclight.deploy.nowhere"),
    ],
)
def test_unknown_processing_classes_are_refused(
    named: Callable[..., Path], images: Tensor, name: str, message: str
) -> None:
    program = Program.load(named(name))
    with pytest.raises(ProgramError, match=message):
        program.predict([0.5])
    assert program(images).shape == (8, 320, 7)  # raw use needs none


def test_processing_is_made_with_the_arguments_in_the_file(
    named: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shipped(Largest):
        pass

    module = types.ModuleType("arclight.example_processing")
    Shipped.__module__ = module.__name__
    module.Shipped = Shipped  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "arclight.example_processing:Shipped"
    without = Program.load(named(name)).predict([0.5])[0][1]
    assert Program.load(named(name, offset=100.0)).predict([0.5])[0][1] == pytest.approx(without + 100)
    with pytest.raises(ProgramError, match="processing_args"):
        Program.load(named(name, colour="red")).predict([0.5])


@pytest.fixture(scope="module")
def small_int8(images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Program:
    layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)
    model = warmed(nn.Sequential(*layers), images)
    path = tmp_path_factory.mktemp("small") / "int8.onnx"
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch, rounds=1)
        return export(quantize(model, [images]), path, example_inputs=images)


def test_threads_may_share_a_program(small_int8: Program, images: Tensor) -> None:
    batches = [images[i : i + 1].numpy() for i in range(8)]
    expected = [small_int8(batch) for batch in batches]
    start = threading.Barrier(4)

    def run(_: int) -> list[np.ndarray]:
        start.wait(timeout=30)
        return [small_int8(batch) for batch in batches * 5]

    with ThreadPoolExecutor(4) as pool:
        for outputs in pool.map(run, range(4)):
            assert all(np.array_equal(a, b) for a, b in zip(outputs, expected * 5))


def test_number_of_threads_does_not_change_results(small_int8: Program, images: Tensor) -> None:
    two = Program.load(small_int8.path, threads=2)
    assert torch.equal(two(images), Program.load(small_int8.path, threads=1)(images))
    with pytest.raises(ValueError, match="threads"):
        Program.load(small_int8.path, threads=0)


def test_other_processing_reads_nothing_again(small_int8: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = types.SimpleNamespace(
        preprocess=lambda images: (np.stack(images), None), postprocess=lambda outputs, _: ["other"] * len(outputs)
    )
    monkeypatch.setattr("arclight.deploy.programs.program._session", lambda *_: pytest.fail("it was loaded again"))
    changed = small_int8.with_processing(other)
    assert changed.processing is other
    assert small_int8._given_processing is None
    assert changed.predict(np.zeros((2, 3, 64, 64), np.float32)) == ["other", "other"]


def test_a_program_runs_without_torch(small_int8: Program) -> None:
    code = (
        "import sys, numpy as np\n"
        "from arclight.deploy import Program\n"
        f"out = Program.load({str(small_int8.path)!r}, threads=1)(np.zeros((2, 3, 64, 64), np.float32))\n"
        "assert out.shape == (2, 4, 31, 31)\n"
        "assert 'torch' not in sys.modules and 'onnx' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_signals_are_handled_after_openvino_programs_were_let_go(fp32_program: Program, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    code = """
        import faulthandler, signal, sys
        faulthandler.enable()  # as pytest and the watchdog of ranks do
        from arclight.deploy import Program
        first, second = (Program.load(sys.argv[1], runtime="openvino") for _ in range(2))
        del first
        del second
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("handled")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(fp32_program.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_openvino_runs_a_program(fp32_program: Program, images: Tensor) -> None:
    pytest.importorskip("openvino")
    program = Program.load(fp32_program.path, runtime="openvino", threads=1)
    assert (program.runtime, program.metadata) == ("openvino", fp32_program.metadata)
    assert [spec.name for spec in program.inputs] == ["images"]
    assert (program.inputs[0].dtype, program.inputs[0].shape) == ("float32", ("any", 3, 64, 64))
    for batch in (1, 3):
        assert torch.allclose(program(images[:batch]), fp32_program(images[:batch]), atol=1e-3)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(program, [images[i : i + 1] for i in range(8)]))
    assert torch.allclose(torch.cat(outputs), fp32_program(images[:8]), atol=1e-3)
    assert program.openvino_kernels()["Convolution", "f32"] > 0
    assert program.with_threads(2).runtime == "openvino"
    with pytest.raises(ProgramError, match=r"runs in ONNX Runtime: load it with runtime='openvino'"):
        fp32_program.openvino_kernels()
    with pytest.raises(ProgramError, match="runs in OpenVINO, on the CPU"):
        Program.load(fp32_program.path, runtime="openvino", device="cuda")
    with pytest.raises(ProgramError, match=r"runs in 'tvm', .* there are onnxruntime, openvino, openvino-bf16"):
        Program.load(fp32_program.path, runtime="tvm")  # type: ignore[arg-type]


class Passing(nn.Module):
    """Gives what it is given, a constant, a number, one tensor twice, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        double = x * 2
        return x, self.table.clone(), double.sum(), double, double, x.argmax(1)


def test_outputs_of_openvino_are_the_callers_to_keep(tmp_path: Path) -> None:
    """Outputs of known size are written where the caller has them, call by call and thread by thread."""
    pytest.importorskip("openvino")
    inputs = [torch.randn(3, 5) for _ in range(8)]
    export(Passing(), tmp_path / "p.onnx", example_inputs=inputs[0], dynamic_batch=False)
    program = Program.load(tmp_path / "p.onnx", runtime="openvino")
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(program, inputs * 5))
    for x, given in zip(inputs * 5, found, strict=True):
        for expected, one in zip(Passing()(x), given, strict=True):
            assert one.shape == expected.shape
            torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


def test_openvino_refuses_what_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    (tmp_path / "p.onnx").write_bytes(b"no model")
    with pytest.raises(ProgramError, match="not an ONNX program that OpenVINO can run"):
        Program.load(tmp_path / "p.onnx", runtime="openvino")
