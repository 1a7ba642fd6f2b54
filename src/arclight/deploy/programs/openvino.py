"""Run an ONNX file in OpenVINO, behind the methods of an ONNX Runtime session that a Program calls."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arclight.deploy.errors import ProgramError
from arclight.fabric.extras import require

LAYERS = {"FullyConnected", "Convolution", "Deconvolution", "MatMul"}
"""OpenVINO's kernels of layers with weights."""
INTEGERS = {"i8", "u8"}
"""OpenVINO's names of the precisions that multiply 8-bit integers."""
_ONNX_TYPES = {
    "f32": "float", "f64": "double", "i64": "int64", "i32": "int32", "i8": "int8", "u8": "uint8", "boolean": "bool",
}  # fmt: skip
"""OpenVINO's names of types: ONNX's."""


def check_bfloat16() -> None:
    """Raise ProgramError where this processor has no bfloat16 arithmetic, which would be emulated in float32."""
    capabilities = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if "BF16" not in capabilities:
        raise ProgramError(
            "this processor has no bfloat16 instructions (AVX512-BF16 or AMX on x86, BF16 on ARM; OpenVINO finds "
            f"{', '.join(capabilities)}): take WeightOnly() or DynamicInt8(), or the float32 model"
        )


class OpenVinoSession:
    """One compiled model; ``bfloat16`` says what float32 operators compute in, which OpenVINO would choose itself."""

    def __init__(self, path: Path, *, threads: int | None, bfloat16: bool) -> None:
        if bfloat16:
            check_bfloat16()
        options = {"INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32", "NUM_STREAMS": 1}
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads
        core = _core()
        self._model = core.read_model(path)
        self._compiled = core.compile_model(self._model, "CPU", options)
        self._requests = threading.local()  # a request serves one thread

    def get_inputs(self) -> list[SimpleNamespace]:
        return [_described(port) for port in self._compiled.inputs]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [_described(port) for port in self._compiled.outputs]

    def get_modelmeta(self) -> SimpleNamespace:
        """Return what the file says of itself, as it was read here."""
        held = self._model.get_rt_info()
        if "framework" not in held:
            return SimpleNamespace(custom_metadata_map={})
        read = held["framework"]
        return SimpleNamespace(custom_metadata_map={name: str(read[name].value) for name in read})

    def run(self, _names: None, feed: dict[str, Any]) -> list[Any]:
        if not hasattr(self._requests, "mine"):
            self._requests.mine = self._compiled.create_infer_request()
        return list(self._requests.mine.infer(feed).to_tuple())

    def kernels(self) -> Counter[tuple[str, str]]:
        """Count the operators that run, by kind and precision: ("Convolution", "bf16")."""
        found: Counter[tuple[str, str]] = Counter()
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            said = node.get_rt_info()
            found[str(said["layerType"].value), str(said["runtimePrecision"].value)] += 1
        return found


def _core() -> Any:
    return require("openvino", extra="deploy").Core()


def _described(port: Any) -> SimpleNamespace:
    kind = port.get_element_type().get_type_name()
    shape = [None if size.is_dynamic else size.get_length() for size in port.get_partial_shape()]
    text = f"tensor({_ONNX_TYPES.get(kind, kind)})"
    return SimpleNamespace(name=port.get_any_name(), type=text, shape=shape)
