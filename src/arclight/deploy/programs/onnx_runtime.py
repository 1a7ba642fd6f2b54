"""Run an ONNX file in ONNX Runtime, and count the kernels that it makes of the file.

`program` opens an `OnnxRuntimeSession` for runtime ``onnxruntime``; arrays in, arrays out, as `session` documents. ``formats.export`` and
``verifying.verify`` count its kernels by the tables here, to prove that integers are multiplied. The tables are ONNX Runtime's own names.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import Array, TensorSpec
from arclight.fabric.extras import require

Device = Literal["auto", "cpu", "cuda"]

INTEGER_KERNELS = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger"}
"""Kernels of layers with weights that multiply 8-bit integers."""
LINEAR_KERNELS = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits"}
"""Kernels of linear layers of `DynamicInt8`, `WeightOnly` and W4A8, whose activations have no calibrated range."""
_DTYPES = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int16)": "int16", "tensor(int8)": "int8", "tensor(uint64)": "uint64", "tensor(uint32)": "uint32",
    "tensor(uint16)": "uint16", "tensor(uint8)": "uint8", "tensor(bool)": "bool",
}  # fmt: skip


class OnnxRuntimeSession:
    """One file in ONNX Runtime, on ``threads`` CPU threads (None: all cores), or on a GPU.

    Raises ProgramError for a file that is not ONNX or needs what this machine lacks.
    """

    def __init__(self, path: Path, *, threads: int | None, device: Device = "cpu") -> None:
        runtime = require("onnxruntime", extra="deploy")
        runtime.disable_telemetry_events()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised, there is no need to print them too
        providers = _providers(device)
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # ONNX Runtime's errors share no class below Exception
            detail = str(error).rpartition("failed:")[2].strip() or str(error)
            raise ProgramError(f"{path} is not a complete ONNX program that this machine can run: {detail}") from error
        if self._session.get_providers()[0] != providers[0]:  # ONNX Runtime only warns about it
            raise ProgramError(f"ONNX Runtime could not start {providers[0]} on this machine: take device='cpu'")
        self._path = path
        self.device: Literal["cpu", "cuda"] = "cuda" if providers[0] == "CUDAExecutionProvider" else "cpu"
        self.inputs = tuple(_spec(value) for value in self._session.get_inputs())
        self.outputs = tuple(_spec(value) for value in self._session.get_outputs())

    def run(self, values: Sequence[Array]) -> list[Array]:
        feed = {spec.name: value for spec, value in zip(self.inputs, values)}
        outputs: list[Array] = self._session.run(None, feed)
        return outputs

    def kernels(self) -> Counter[str]:
        return kernels(self._path)

    def stored(self, key: str) -> str | None:
        found: str | None = self._session.get_modelmeta().custom_metadata_map.get(key)
        return found


def kernels(path: Path) -> Counter[str]:
    """Count the operators of the graph that ONNX Runtime really runs on this CPU for a file.

    The file is opened again, also if its session is on a GPU.
    """
    runtime, onnx = require("onnxruntime", extra="deploy"), require("onnx", extra="deploy")
    with tempfile.TemporaryDirectory(prefix="kernels-") as scratch:
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(scratch) / "optimized.onnx")
        runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def _providers(device: Device) -> list[str]:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not _cuda_available():
        raise ProgramError("this ONNX Runtime has no CUDA: install onnxruntime-gpu, or take device='cpu'")
    cuda = device == "cuda" or (device == "auto" and _cuda_available())
    return ["CUDAExecutionProvider", "CPUExecutionProvider"] if cuda else ["CPUExecutionProvider"]


def _cuda_available() -> bool:
    return "CUDAExecutionProvider" in require("onnxruntime", extra="deploy").get_available_providers()


def _spec(value: Any) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else str(size or "any") for size in value.shape)
    return TensorSpec(value.name, _DTYPES.get(value.type, value.type), shape)
