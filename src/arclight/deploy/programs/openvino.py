"""Run programs in OpenVINO: its own representation (.xml) or an ONNX file, on the CPU.

`program` opens an `OpenVinoSession` for runtime ``openvino`` or ``openvino-bf16``; arrays in, arrays out, as `session` documents. ``formats.export``
and ``verifying.verify`` read back which kernels ran in which precision (`by_precision`, as `Program.openvino_kernels`). The tables are OpenVINO's own
names, as the version of the extra ``deploy`` has them.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import Array, TensorSpec
from arclight.fabric.extras import require

LAYERS = {"FullyConnected", "Convolution", "Deconvolution", "MatMul"}
"""OpenVINO's kernels of layers with weights."""
INTEGERS = {"i8", "u8"}
"""OpenVINO's names of the precisions that multiply 8-bit integers."""
PACKED = INTEGERS | {"i4", "u4"}
"""OpenVINO's names of the precisions of weights that a layer unpacks as it multiplies."""
PRECISION_HINTS: Mapping[str, str] = {"openvino": "f32", "openvino-bf16": "bf16"}
"""Maps a runtime to the precision hint for OpenVINO, which would otherwise choose by itself."""
_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u64": "uint64",
    "u32": "uint32", "u16": "uint16", "u8": "uint8", "boolean": "bool",
}  # fmt: skip
"""Maps OpenVINO's names of types to NumPy's."""


def check_bfloat16() -> None:
    """Raise ProgramError if this processor has no bfloat16 arithmetic.

    OpenVINO would emulate it in float32.
    """
    capabilities = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if "BF16" not in capabilities:
        raise ProgramError(
            "this processor has no bfloat16 instructions (AVX512-BF16 or AMX on x86, BF16 on ARM; OpenVINO finds "
            f"{', '.join(capabilities)}): take WeightOnly() or DynamicInt8(), or the float32 model"
        )


class OpenVinoSession:
    """Model that OpenVINO has compiled for the CPU.

    ``bfloat16``: whether float32 operators compute in bfloat16; without this argument OpenVINO would choose by itself. ``requests`` calls are
    computed at once, each on ``threads`` CPU threads (None: all cores for all of them); others wait for their turn. Raises ProgramError for a file
    that OpenVINO cannot run, and with ``bfloat16`` on a processor without such instructions.
    """

    device: Literal["cpu", "cuda"] = "cpu"

    def __init__(self, path: Path, *, threads: int | None, bfloat16: bool, requests: int = 1) -> None:
        if bfloat16:
            check_bfloat16()
        hint = PRECISION_HINTS["openvino-bf16" if bfloat16 else "openvino"]
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "NUM_STREAMS": requests}
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads * requests
        core = _core()
        self._tensor = require("openvino", extra="deploy").Tensor
        try:
            self._model = core.read_model(path)
            self._compiled = core.compile_model(self._model, "CPU", options)
        except RuntimeError as error:
            kind = "OpenVINO" if path.suffix == ".xml" else "ONNX"
            raise ProgramError(f"{path} is not an {kind} program that OpenVINO can run: {error}") from error
        # a compiled input has the names of casts behind it, too, which OpenVINO leaves out: any of them would be found
        names = [port.get_node().get_friendly_name() for port in self._model.inputs]
        self.inputs = tuple(_spec(port, name) for port, name in zip(self._compiled.inputs, names, strict=True))
        self.outputs = tuple(_spec(port, port.get_any_name()) for port in self._compiled.outputs)
        self._requests = threading.local()  # a request serves one thread
        self._output_layouts = _layouts(self.outputs)

    def run(self, values: Sequence[Array]) -> list[Array]:
        if not hasattr(self._requests, "mine"):
            self._requests.mine = self._compiled.create_infer_request()
        request, inputs = self._requests.mine, dict(enumerate(values))
        if self._output_layouts is None:
            return list(request.infer(inputs).to_tuple())
        given = [np.empty(shape, dtype) for shape, dtype in self._output_layouts]  # written in place, not copied
        for place, array in enumerate(given):
            request.set_output_tensor(place, self._tensor(array, shared_memory=True))
        request.infer(inputs, share_outputs=True)
        return given

    def kernels(self) -> Counter[str]:
        return Counter({f"{kind} {precision}": count for (kind, precision), count in self.by_precision().items()})

    def by_precision(self) -> Counter[tuple[str, str]]:
        """Count the operators that run, by kind and precision: ("Convolution", "bf16")."""
        found: Counter[tuple[str, str]] = Counter()
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            found[str(info["layerType"].value), str(info["runtimePrecision"].value)] += 1
        return found

    def stored(self, key: str) -> str | None:
        held = self._model.get_rt_info()
        if "framework" not in held or key not in held["framework"]:
            return None
        return str(held["framework"][key].value)


@functools.cache
def _core() -> Any:
    """Return the one OpenVINO core of this process.

    A core that compiles sets the thread's alternate signal stack, and restores the one before when it is destroyed. If two cores are destroyed in
    the order of their creation, the second restores the stack of the first, which is unmapped by then, and the next signal ends the process.
    """
    return require("openvino", extra="deploy").Core()


def _layouts(outputs: Sequence[TensorSpec]) -> list[tuple[Any, Any]] | None:
    """Return shape and dtype of each output.

    None if a size is free, or a type is not one of NumPy's.
    """
    known = set(_DTYPES.values())
    if not all(spec.dtype in known and all(isinstance(size, int) for size in spec.shape) for spec in outputs):
        return None
    return [(spec.shape, np.dtype(spec.dtype)) for spec in outputs]


def _spec(port: Any, name: str) -> TensorSpec:
    kind = port.get_element_type().get_type_name()
    shape = tuple("any" if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
    return TensorSpec(name, _DTYPES.get(kind, kind), shape)
