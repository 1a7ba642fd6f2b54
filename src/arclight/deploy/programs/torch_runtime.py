"""Run archives of torch: graphs of torch.export, and libraries that AOTInductor compiled.

`program` opens a `TorchSession` for runtimes ``torch`` (format ``pt2``) and ``inductor`` (``aoti``); arrays in, arrays out, as `session` documents.
To open such a file runs code, so `folder` refuses it before, unless a trusted key signed it: keep that order. ``formats.export`` reads
`INTEGER_KERNELS`.
"""

from __future__ import annotations

import re
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import Array, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

INTEGER_KERNELS = {"qconv_pointwise", "qlinear_pointwise"}
"""oneDNN's kernels of layers with weights that multiply 8-bit integers, as AOTInductor calls them."""
_CALL = re.compile(
    r"\baoti_torch_cpu_(?:mkldnn)?_*((?:qconv|qlinear|convolution|linear)_\w*?pointwise|addmm|bmm|mm)\w*\("
)


class TorchSession:
    """A graph of torch.export, or with ``compiled`` a library of AOTInductor.

    Reading either runs what the file says (torch evaluates expressions in it): give none whose signature was not checked.
    ``threads``: torch's number of threads during a call, set in the calling thread, as OpenMP counts by thread; None leaves it. Raises ProgramError for a
    file that is damaged or for another torch.
    """

    device: Literal["cpu", "cuda"] = "cpu"

    def __init__(
        self,
        path: Path,
        *,
        threads: int | None,
        compiled: bool,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> None:
        import torch

        self._path, self._threads, self._compiled = path, threads, compiled
        self.inputs, self.outputs = inputs, outputs
        try:
            if compiled:
                self._call: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
            else:
                self._call = torch.export.load(path).module()
        except Exception as error:  # torch raises many kinds, all of them about the file
            raise ProgramError(f"{path} is not a program that torch {torch.__version__} can run: {error}") from error

    def run(self, values: Sequence[Array]) -> list[Array]:
        import torch
        from torch.utils._pytree import tree_leaves

        with torch.inference_mode(), _THREADS.of(self._threads):
            outputs = tree_leaves(self._call(*map(as_tensor, values)))
        return [output.numpy() for output in outputs]

    def kernels(self) -> Counter[str]:
        if self._compiled:
            return Counter(_CALL.findall(self._source()))
        graph: Any = self._call
        return Counter(
            str(node.target).removesuffix(".default") for node in graph.graph.nodes if node.op == "call_function"
        )

    def stored(self, key: str) -> str | None:
        return None

    def _source(self) -> str:
        """Return the C++ that the library was compiled from, which the archive holds."""
        with zipfile.ZipFile(self._path) as archive:
            names = [name for name in archive.namelist() if name.endswith("wrapper.cpp")]
            return "\n".join(archive.read(name).decode(errors="replace") for name in names)


def as_tensor(value: Array) -> Tensor:
    """Return ``value`` as a tensor on its memory, on a copy if it is read-only."""
    import torch

    return torch.from_numpy(value if value.flags.writeable else value.copy())


class _Threads:
    """Number of torch's threads, set for a call and restored after it, for concurrent calls.

    A thread in which torch runs for the first time takes the number that was set last in the process, even if that was for a call
    elsewhere. So the number that is restored is that from before the first of all calls in progress.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before = 0

    @contextmanager
    def of(self, count: int | None) -> Iterator[None]:
        """Set torch's threads to ``count`` until the block ends; None changes nothing."""
        import torch

        if count is None:
            yield
            return
        with self._lock:
            if not self._running:
                self._before = torch.get_num_threads()
            self._running += 1
            torch.set_num_threads(count)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                torch.set_num_threads(self._before)


_THREADS = _Threads()
