"""Run ExecuTorch's programs, and count the kernels in the parts that XNNPACK runs.

`program` opens an `ExecuTorchSession` for runtime ``executorch``; arrays in, arrays out, as `session` documents. ``formats.export`` reads
`INTEGER_KERNELS`. The runtime is imported as the one library that it is (``_C``), since executorch's own module imports the lowering around it, in
four seconds; what is read of a file is private to executorch, so a new release may need changes here.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import Array, TensorSpec, dtype_name
from arclight.deploy.programs.torch_runtime import as_tensor
from arclight.fabric.extras import require

LAYERS = ("XNNConv2d", "XNNDepthwiseConv2d", "XNNConvTranspose2d", "XNNFullyConnected")
"""Operators of XNNPACK with weights, as its graphs in a program call them."""
INTEGER_KERNELS = {f"{layer} {types}" for layer in LAYERS for types in ("qs8", "qs8_qc8w")}
"""Layers whose input, weights and output are 8-bit integers, weights with one scale or one for each channel."""
_TYPES: Mapping[str, str] = {
    "fp32": "f32", "fp16": "f16", "qint8": "qs8", "quint8": "qu8", "qcint8": "qc8w", "qcint4": "qc4w", "qdint8": "qd8",
}  # fmt: skip
"""Maps a type of an XNNPACK graph to its name in XNNPACK's kernels."""
_NOT_FINITE = re.compile(r"(?<=: )-?(?:inf|nan)\b")
"""Numbers of a decompiled graph, such as bounds of an activation, that JSON does not have."""


class ExecuTorchSession:
    """A .pte file in ExecuTorch, whose calls in one process take turns.

    ``threads``: size of the process's one thread pool during a call; None: what it is by default, all cores. Where it has another size, kernels are made
    anew: give all programs of a process the same number. A call takes at most the sizes of free dimensions that the exporter has planned memory for.
    Raises MissingExtraError without executorch, and ProgramError for a file that is damaged, for another version, or of other inputs and outputs.
    """

    device: Literal["cpu", "cuda"] = "cpu"

    def __init__(
        self, path: Path, *, threads: int | None, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
    ) -> None:
        self.runtime, version = _runtime()
        _check_kind(path)
        self._path, self.threads, self.inputs, self.outputs = path, threads, inputs, outputs
        consistent = self.runtime.Verification.InternalConsistency
        self._method: Any = None
        try:
            self._program = self.runtime._load_program(str(path), program_verification=consistent)
            with _POOL.taken(self):
                found = self.loaded().method_meta()
                taken = [_held(found.input_tensor_meta(place)) for place in range(found.num_inputs())]
                given = [_held(found.output_tensor_meta(place)) for place in range(found.num_outputs())]
        except RuntimeError as error:
            raise ProgramError(f"{path} is not a program that executorch {version} can run: {error}") from error
        if not (_fit(inputs, taken) and _fit(outputs, given)):
            sizes = (", ".join(f"{dtype} {shape}" for dtype, shape in tensors) for tensors in (taken, given))
            raise ProgramError(
                f"{path} takes {next(sizes)} and gives {next(sizes)}, which is not what its program.json describes: export it again"
            )
        self._largest = [shape for _, shape in taken]

    def run(self, values: Sequence[Array]) -> list[Array]:
        for spec, value, largest in zip(self.inputs, values, self._largest, strict=True):
            if not value.size:
                raise ProgramError(
                    f"{spec.name} has shape {value.shape} and holds no value, over which executorch ends the process: leave it out"
                )
            if any(size > most for size, most in zip(value.shape, largest)):
                raise ProgramError(
                    f"{spec.name} has shape {value.shape}, and memory is planned for at most {largest}: give fewer at a time, or export it with "
                    "comparisons= of the largest sizes"
                )
        tensors = [as_tensor(value) for value in values]
        with _POOL.taken(self):
            outputs = self.loaded()(tensors)
        return [output.numpy() for output in outputs]

    def loaded(self) -> Any:
        """Return the method that a call runs; it is loaded if it was dropped."""
        if self._method is None:
            self._method = self._program.load_method("forward")
        return self._method

    def drop(self) -> None:
        """Drop the method, which holds the thread pool that it was loaded with."""
        self._method = None

    def kernels(self) -> Counter[str]:
        """Count operators of XNNPACK, with their types, and executorch's own outside of it.

        They are read from the file: its graphs for XNNPACK are what that makes kernels of.
        """
        deserialize = require("executorch.exir._serialize", extra="executorch")._deserialize_pte_binary
        program = deserialize(self._path.read_bytes()).program
        (plan,) = program.execution_plan
        calls = [call.instr_args for chain in plan.chains for call in chain.instructions]
        found = Counter(plan.operators[call.op_index].name for call in calls if hasattr(call, "op_index"))
        for delegate in plan.delegates:
            payload = bytes(program.backend_delegate_data[delegate.processed.index].data)
            found.update(_xnnpack_kernels(payload))
        return found

    def stored(self, key: str) -> str | None:
        return None


def _check_kind(path: Path) -> None:
    """Raise ProgramError for a file of another kind; some would end the process."""
    with path.open("rb") as file:
        start = file.read(12)
    if not start[4:8].startswith(b"ET") or start[8:12] != b"eh00":
        raise ProgramError(f"{path} is not a program of executorch, whose files begin otherwise: export it again")


def _runtime() -> tuple[Any, str]:
    """Return executorch's runtime and version; MissingExtraError if it is not installed."""
    version = require("executorch.version", extra="executorch").__version__
    import torch  # noqa: F401 - the runtime finds torch's libraries in this process

    return require("executorch.extension.pybindings._C", extra="executorch"), str(version)


def _xnnpack_kernels(payload: bytes) -> Counter[str]:
    """Count the operators of one graph for XNNPACK, by kind and types."""
    serialization = require(
        "executorch.backends.xnnpack.serialization.xnnpack_graph_serialize", extra="executorch"
    )  # fmt: skip
    flatbuffer = require("executorch.exir._serialize._flatbuffer", extra="executorch")
    header = serialization.XNNHeader.from_bytes(payload[: serialization.XNNHeader.EXPECTED_LENGTH])
    with tempfile.TemporaryDirectory(prefix="xnnpack-") as folder:
        schema, graph = Path(folder) / "schema.fbs", Path(folder) / "graph.bin"
        schema.write_bytes(serialization._get_schema_bytes())
        graph.write_bytes(payload[header.flatbuffer_offset : header.flatbuffer_offset + header.flatbuffer_size])
        flatbuffer._flatc_decompile(folder, str(schema), str(graph))
        held = json.loads(_NOT_FINITE.sub("null", graph.with_suffix(".json").read_text()))
    types: dict[int, str] = {}
    for value in held["xvalues"]:
        one = value["xvalue_union"]
        one = one.get("tensor_value", one)
        types[one.get("id_out", 0)] = str(one.get("datatype", "invalid")).removeprefix("xnn_datatype_")
    found: Counter[str] = Counter()
    for node in held["xnodes"]:
        kind, edges = node["xnode_union_type"], node["xnode_union"]
        read = ("input1_id", "filter_id", "output_id") if kind in LAYERS else ("output_id",)
        names = [types[edges.get(edge, 0)] for edge in read]  # 0, a default, is left out of the text
        found[f"{kind} {'_'.join(dict.fromkeys(_TYPES.get(name, name) for name in names))}"] += 1
    return found


def _held(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return type and sizes of an input or output of the file."""
    return dtype_name(_dtype(tensor.dtype())), tuple(tensor.sizes())


def _fit(described: Sequence[TensorSpec], held: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    """Return True if tensors of the file are the described ones.

    Free dimensions have their largest size there.
    """
    return len(described) == len(held) and all(
        spec.dtype == dtype
        and len(spec.shape) == len(sizes)
        and all(isinstance(one, str) or one == size for one, size in zip(spec.shape, sizes))
        for spec, (dtype, sizes) in zip(described, held)
    )


def _dtype(number: int) -> Any:
    """Return torch's type of a number of ``ScalarType``, or the number if it has none here."""
    import torch

    known = {
        0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
        7: torch.float64, 11: torch.bool,
    }  # fmt: skip
    return known.get(number, number)


class _Pool:
    """ExecuTorch's one thread pool, whose users take turns.

    XNNPACK's kernels hold the pool that they were loaded with, so all loaded methods are dropped before it is replaced by one of another size; each is
    loaded again at its next call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: weakref.WeakSet[ExecuTorchSession] = weakref.WeakSet()
        self._default = 0

    @contextmanager
    def taken(self, session: ExecuTorchSession) -> Iterator[None]:
        """Give ``session`` its turn, until the block ends, on a pool of its number of threads."""
        with self._lock:
            size = session.runtime._threadpool_get_thread_count()
            self._default = self._default or size
            if (wanted := session.threads or self._default) != size:
                for other in self._loaded:
                    other.drop()
                self._loaded.clear()
                session.runtime._unsafe_reset_threadpool(wanted)
            self._loaded.add(session)
            yield


_POOL = _Pool()
