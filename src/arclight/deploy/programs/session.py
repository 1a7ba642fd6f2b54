"""Define the interface of runtimes: typed inputs and outputs, a thread-safe call, kernels.

``onnx_runtime``, ``openvino``, ``torch_runtime`` and ``executorch_runtime`` implement `Session`, and a `Program` holds one. A new runtime needs a name in
`NAMES`.
`TensorSpec` is written as JSON in ``program.json``: its keys must stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from arclight.deploy.errors import ProgramError

Array = np.ndarray[Any, Any]
NAMES: Mapping[str, str] = {
    "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "openvino-bf16": "OpenVINO", "torch": "torch", "inductor": "AOTInductor",
    "executorch": "ExecuTorch",
}  # fmt: skip
"""Names of the runtimes in messages and reports."""


@lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """Return NumPy's name of a type of NumPy or torch, such as float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a program."""

    name: str
    dtype: str
    """A NumPy name, such as float32."""
    shape: tuple[int | str, ...]
    """Sizes; a text names a dynamic dimension."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(map(str, self.shape))})"

    @classmethod
    def from_json(cls, value: Any) -> TensorSpec:
        """Read the output of `to_json`. Raises ValueError for anything else."""
        name, dtype, shape = (value[key] for key in ("name", "dtype", "shape"))
        sizes = all(isinstance(size, str) or (type(size) is int and 0 <= size < 1 << 31) for size in shape)
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list) or not sizes:
            raise ValueError(f"{value!r} describes no tensor: it needs name, dtype and shape")
        return cls(name, dtype, tuple(shape))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    def fits(self, other: TensorSpec, *, named: bool) -> bool:
        """Return True if ``other`` may describe the same tensor.

        A dynamic dimension fits any size. ``named``: names of the tensors must be equal, too.
        """
        sizes = len(self.shape) == len(other.shape) and all(
            isinstance(mine, str) or isinstance(theirs, str) or mine == theirs
            for mine, theirs in zip(self.shape, other.shape)
        )
        return self.dtype == other.dtype and sizes and (not named or self.name == other.name)

    def check(self, value: Any) -> None:
        """Raise ProgramError if ``value``, an array or a tensor, has another dtype or shape."""
        dtype, shape = dtype_name(value.dtype), value.shape
        fits = dtype == self.dtype and len(shape) == len(self.shape)
        for wanted, given in zip(self.shape, shape):
            fits = fits and (wanted == given or isinstance(wanted, str))
        if not fits:
            raise ProgramError(f"the program expects {self}, got {dtype} ({', '.join(map(str, shape))})")


class Session(Protocol):
    """A program loaded in one runtime; ``run`` is thread-safe."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    device: Literal["cpu", "cuda"]

    def run(self, values: Sequence[Array]) -> list[Array]:
        """Compute the outputs for ``values``, in the order of ``inputs``.

        Raises whatever the runtime raises.
        """

    def kernels(self) -> Counter[str]:
        """Count the kernels that the runtime executes, by its names for them."""

    def stored(self, key: str) -> str | None:
        """Return the metadata that the file itself holds under ``key``, as the runtime reads it."""
