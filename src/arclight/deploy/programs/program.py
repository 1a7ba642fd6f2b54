"""Run a program: a file that computes what a model computes, without the model and without PyTorch."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.metadata import KEY, changed, unseal
from arclight.deploy.programs.openvino import OpenVinoSession
from arclight.deploy.programs.processing import Processing, check_name, resolve
from arclight.fabric.extras import require

Device = Literal["auto", "cpu", "cuda"]
Runtime = Literal["onnxruntime", "openvino", "openvino-bf16"]
"""What runs a program: ONNX Runtime, or OpenVINO in float32 or in bfloat16."""

_NAMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "openvino-bf16": "OpenVINO"}
_DTYPES = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int8)": "int8", "tensor(uint8)": "uint8", "tensor(bool)": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a program."""

    name: str
    dtype: str
    """A NumPy name, such as float32."""
    shape: tuple[int | str, ...]
    """Sizes; a text stands for any size."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(map(str, self.shape))})"

    def check(self, value: Any) -> None:
        """ProgramError where ``value``, an array or a tensor, is not what this input takes."""
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        fits = len(shape) == len(self.shape) and all(
            isinstance(wanted, str) or wanted == given for wanted, given in zip(self.shape, shape)
        )
        if dtype != self.dtype or not fits:
            raise ProgramError(f"the program expects {self}, got {dtype} ({', '.join(map(str, shape))})")


class Program:
    """An exported model in ONNX Runtime; ``Program.load(path)`` makes one.

    ``program(x)`` takes and returns NumPy arrays or tensors, whichever it is given; a model with one output returns
    it alone, another a tuple. Any number of threads may call it at once.
    """

    def __init__(
        self,
        path: Path,
        session: Any,
        metadata: dict[str, Any],
        processing: Processing | None,
        runtime: Runtime = "onnxruntime",
    ) -> None:
        self.path = path
        self.runtime = runtime
        self.metadata = metadata
        """What the exporter wrote into the file; empty for an ONNX file from elsewhere."""
        self.inputs = tuple(_spec(value) for value in session.get_inputs())
        self.outputs = tuple(_spec(value) for value in session.get_outputs())
        self._session = session
        self._given_processing = processing

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        processing: Processing | None = None,
        threads: int | None = None,
        device: Device = "auto",
        runtime: Runtime | None = None,
    ) -> Program:
        """Load the program at ``path`` on ``threads`` CPU threads (default: all cores).

        ``processing`` replaces what the file names. ``device``: cuda needs onnxruntime-gpu; auto takes it where it is,
        except for quantized programs, whose kernels are those of the CPU. ``runtime`` replaces what the file
        names (default: ONNX Runtime). Raises ProgramError where the file is
        missing, damaged, not ONNX, changed since its export, or names a processing outside this package.
        """
        path = Path(path)
        _check_file(path)
        metadata, text = unseal(path)
        if "processing" in metadata:
            check_name(metadata["processing"])
        runtime = runtime or metadata.get("runtime", "onnxruntime")
        session = _session(path, threads, "cpu" if device == "auto" and "quantization" in metadata else device, runtime)
        if session.get_modelmeta().custom_metadata_map.get(KEY) != text:  # the runtime must read what was checked
            raise changed(path)
        return cls(path, session, metadata, processing, runtime)

    def with_processing(self, processing: Processing) -> Program:
        """Return the same program with other processing around it; nothing is read again."""
        return type(self)(self.path, self._session, self.metadata, processing, self.runtime)

    @property
    def precision(self) -> str:
        """fp32, int8, dynamic int8, 8-bit weights, 4-bit weights, bf16 or w4a8; "unknown" for an ONNX file from elsewhere."""
        return str(self.metadata.get("precision", "unknown"))

    @property
    def nbytes(self) -> int:
        """Size of the file, and of those beside it that hold its weights."""
        files = (self.path, *(self.path.parent / name for name in self.metadata.get("files", {})))
        return sum(file.stat().st_size for file in files)

    @cached_property
    def processing(self) -> Processing:
        """Return the processing around ``predict``; ProgramError if neither file nor caller names one."""
        if self._given_processing is not None:
            return self._given_processing
        if "processing" not in self.metadata:
            raise ProgramError(
                f"{self.path} does not say how its inputs and outputs are made: call program(x) with tensors, or give "
                "Program.load(path, processing=...) an object with preprocess and postprocess"
            )
        return resolve(self.metadata["processing"], self.metadata.get("processing_args", {}))

    def __call__(self, *inputs: Any) -> Any:
        """Compute the outputs for ``inputs``, in the order of ``program.inputs``.

        ProgramError names an input that does not fit.
        """
        if len(inputs) != len(self.inputs):
            wanted = ", ".join(map(str, self.inputs))
            raise ProgramError(f"the program takes {len(self.inputs)} inputs ({wanted}), got {len(inputs)}")
        values = [value if _is_tensor(value) else np.asarray(value) for value in inputs]
        for spec, value in zip(self.inputs, values):
            spec.check(value)
        feed = {spec.name: _as_numpy(value) for spec, value in zip(self.inputs, values)}
        try:
            outputs = self._session.run(None, feed)
        except Exception as error:  # ONNX Runtime's errors share no class below Exception
            raise ProgramError(f"{_NAMES[self.runtime]} could not run {self.path.name}: {error}") from error
        tensor = next((value for value in values if _is_tensor(value)), None)
        if tensor is not None:
            outputs = [_as_tensor(output, like=tensor) for output in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def predict(self, inputs: Iterable[Any], batch_size: int = 8) -> list[Any]:
        """Return one result for each of ``inputs``, ``batch_size`` at a time, with the file's processing."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        results: list[Any] = []
        remaining = iter(inputs)
        while batch := list(islice(remaining, batch_size)):
            arrays, context = self.processing.preprocess(batch)
            outputs = self(*arrays) if isinstance(arrays, tuple) else self(arrays)
            answers = self.processing.postprocess(outputs, context)
            if len(answers) != len(batch):
                raise ProgramError(f"postprocess gave {len(answers)} results for {len(batch)} inputs")
            results.extend(answers)
        return results

    def predict_one(self, item: Any) -> Any:
        """Return the result for a single input; see `predict`."""
        return self.predict([item])[0]

    def with_threads(self, threads: int) -> Program:
        """Open the same program on ``threads`` CPU threads."""
        session = _session(self.path, threads, "cpu", self.runtime)
        return Program(self.path, session, self.metadata, self._given_processing, self.runtime)

    def openvino_kernels(self) -> Counter[tuple[str, str]]:
        """Count the operators that OpenVINO runs for this program, by kind and precision: ("Convolution", "bf16")."""
        if not isinstance(self._session, OpenVinoSession):
            raise ProgramError(f"{self.path} runs in ONNX Runtime: load it with runtime='openvino'")
        return self._session.kernels()

    def __repr__(self) -> str:
        described = [str(spec) for spec in self.inputs], [str(spec) for spec in self.outputs]
        return f"Program({str(self.path)!r}, {self.precision}, {', '.join(described[0])} -> {', '.join(described[1])})"


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ProgramError(f"there is no program at {path}")
    if path.stat().st_size == 0:
        raise ProgramError(f"{path} is empty")


def _session(path: Path, threads: int | None, device: Device, runtime: Runtime) -> Any:
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if runtime != "onnxruntime":
        return _openvino_session(path, threads, device, runtime)
    return _onnxruntime_session(path, threads, device)


def _openvino_session(path: Path, threads: int | None, device: Device, runtime: Runtime) -> Any:
    if runtime not in ("openvino", "openvino-bf16"):
        raise ProgramError(
            f"{path} runs in {runtime!r}, which this arclight does not know: there are {', '.join(get_args(Runtime))}"
        )
    if device == "cuda":
        raise ProgramError(f"{path} runs in OpenVINO, on the CPU: take device='cpu'")
    try:
        return OpenVinoSession(path, threads=threads, bfloat16=runtime == "openvino-bf16")
    except RuntimeError as error:
        raise ProgramError(f"{path} is not an ONNX program that OpenVINO can run: {error}") from error


def _onnxruntime_session(path: Path, threads: int | None, device: Device) -> Any:
    runtime = require("onnxruntime", extra="deploy")
    runtime.disable_telemetry_events()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, there is no need to print them too
    providers = _providers(device)
    try:
        session = runtime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime's errors share no class below Exception
        detail = str(error).rpartition("failed:")[2].strip() or str(error)
        raise ProgramError(f"{path} is not a complete ONNX program that this machine can run: {detail}") from error
    if session.get_providers()[0] != providers[0]:  # ONNX Runtime only warns about it
        raise ProgramError(f"ONNX Runtime could not start {providers[0]} on this machine: take device='cpu'")
    return session


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


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported torch; a program does not need it
    return torch is not None and isinstance(value, torch.Tensor)


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(value.detach().cpu().numpy() if _is_tensor(value) else value)


def _as_tensor(array: np.ndarray[Any, Any], *, like: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(like.device)
