"""Run programs: files that compute what models compute, without the model's code.

`Program` is public: `export` returns it; ``arclight predict``, ``scan``, ``serve``, ``benchmark`` and ``compare`` load it. Checks of the files
(`folder`, `metadata`, `processor`) come before a runtime reads one: keep that order. Programs of earlier releases must load. A new runtime implements
`Session`, and is opened in `_session`. Only formats ``pt2``, ``aoti`` and
``executorch``, and the comparison of runtimes, need PyTorch.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs import folder
from arclight.deploy.programs.executorch_runtime import ExecuTorchSession
from arclight.deploy.programs.folder import Trusted
from arclight.deploy.programs.metadata import KEY, changed, check_weights, unseal
from arclight.deploy.programs.onnx_runtime import Device, OnnxRuntimeSession
from arclight.deploy.programs.openvino import OpenVinoSession
from arclight.deploy.programs.other_runtime import RuntimeChoice, chosen, fastest
from arclight.deploy.programs.processing import Processing, check_name, resolve
from arclight.deploy.programs.processor import check_processor
from arclight.deploy.programs.session import NAMES, Session
from arclight.deploy.programs.torch_runtime import TorchSession
from arclight.deploy.settings import FastestRuntime, Runtime
from arclight.fabric.extras import require

TIMED: tuple[Runtime, ...] = ("onnxruntime", "openvino")
"""Runtimes that "fastest" times, as far as they run the format, beside the one that the program names."""


class Program:
    """An exported model in its runtime; ``Program.load(path)`` makes one.

    ``program(x)`` takes and returns NumPy arrays or tensors, whichever it is given; a model with one output returns
    it alone, another a tuple. Any number of threads may call it at once.
    """

    def __init__(
        self,
        path: Path,
        session: Session,
        metadata: dict[str, Any],
        processing: Processing | None,
        runtime: Runtime = "onnxruntime",
        *,
        contents: folder.Contents | None = None,
        threads: int | None = None,
        stamps: Mapping[Path, folder.FileStamp] | None = None,
        digest: str = "",
        choice: RuntimeChoice | None = None,
        requests: int | None = None,
    ) -> None:
        self.path = path
        self.runtime = runtime
        self.threads = threads
        """CPU threads that a call runs on; None: the runtime's default, all cores."""
        self.requests = requests
        """Most calls that are computed at once; None: any number, in OpenVINO one."""
        self._slots = None if requests is None else threading.Semaphore(requests)
        self.metadata = metadata
        """What the exporter wrote into the program; empty for an ONNX file from elsewhere."""
        self.inputs = session.inputs if contents is None else contents.inputs
        self.outputs = session.outputs if contents is None else contents.outputs
        self.stamps = stamps or {}
        """Marks of its files as they were checked: if they differ from those at its path, it was replaced."""
        self.digest = digest
        """SHA-256 that identifies the program, hexadecimal: of all that was exported, or of an .onnx file from elsewhere."""
        self.choice = choice or RuntimeChoice(exported_for=metadata.get("runtime", "onnxruntime"))
        """Record of why it runs in this runtime."""
        self._session, self._contents = session, contents
        self._given_processing = processing

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        processing: Processing | None = None,
        threads: int | Callable[[Runtime, dict[str, Any]], int | None] | None = None,
        device: Device = "auto",
        runtime: Runtime | FastestRuntime | None = None,
        trusted: Trusted | None = None,
        *,
        parity: bool = True,
        requests: int | Callable[[Runtime, dict[str, Any]], int | None] | None = None,
    ) -> Program:
        """Load the program at ``path``, a folder or an .onnx file.

        ``threads``: CPU threads of a call (default: all cores). ``requests``: most calls that are computed at once, each on ``threads``, while others wait
        (default: any number; in OpenVINO one). Both may be functions that give them for the program's runtime and metadata.
        ``processing`` replaces what the program names. ``device``: cuda needs onnxruntime-gpu; auto takes it if it is,
        except for quantized programs, whose kernels are those of the CPU. ``runtime`` replaces what the program
        names (default: ONNX Runtime): a program of our export is compared with itself in that one on drawn inputs, and ProgramError raised if an
        output differs by more than its precision allows, unless ``parity`` is False; "fastest" times ONNX Runtime and OpenVINO, as far as they
        run the format, beside the one that is named, and takes the fastest. `choice` has what was found.
        ``trusted``: load it only if one of these public keys signed it, which formats that run
        what their file says (pt2, aoti) always need. Raises ProgramError if the program is
        missing, damaged, changed since its export, not signed as asked, or names a processing outside this package, before a runtime reads it; also
        if the runtime finds other inputs or outputs than the program describes.
        """
        files = _Files.checked(Path(path), trusted)
        device = "cpu" if device == "auto" and "quantization" in files.metadata else device

        def opened(runtime: Runtime) -> Program:
            count = threads(runtime, files.metadata) if callable(threads) else threads
            most = requests(runtime, files.metadata) if callable(requests) else requests
            return cls(
                files.path, files.session(runtime, count, device, most), files.metadata, processing, runtime,
                contents=files.contents, threads=count, stamps=files.stamps, digest=files.digest, requests=most,
            )  # fmt: skip

        exported_for: Runtime = files.metadata.get("runtime", "onnxruntime")
        if runtime is None:
            return opened(exported_for)
        if runtime == "fastest":
            tried = [one for one in TIMED if one in folder.RUNTIMES[files.format]]
            program, choice = fastest(tried, exported_for, opened)
        elif not parity or runtime == exported_for or "parity" not in files.metadata:
            return opened(runtime)
        else:
            _check_runtime(files.main, files.format, runtime, device)  # before the other one is opened
            program, choice = chosen(runtime, exported_for, opened)
        program.choice = choice
        return program

    def with_processing(self, processing: Processing) -> Program:
        """Return the same program with other processing around it; nothing is read again."""
        found = copy.copy(self)
        found._given_processing = processing
        found.__dict__.pop("processing", None)  # it was computed of what was given before
        return found

    def with_requests(self, requests: int) -> Program:
        """Return the same program, limited to ``requests`` calls at once; it is not reopened."""
        found = copy.copy(self)
        found.requests, found._slots = requests, threading.Semaphore(requests)
        return found

    @property
    def format(self) -> str:
        """onnx, openvino, pt2, aoti or executorch."""
        return "onnx" if self._contents is None else self._contents.format

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Name the device that it runs on: cpu or cuda."""
        return self._session.device

    @property
    def signer(self) -> str | None:
        """Public key of the trusted signer, base64; None if `load` was not asked for a signature."""
        return None if self._contents is None else self._contents.signer

    @property
    def precision(self) -> str:
        """Precision: fp32, int8, dynamic int8, 8-bit weights, 4-bit weights, bf16 or w4a8.

        "unknown" for an ONNX file from elsewhere.
        """
        return str(self.metadata.get("precision", "unknown"))

    @property
    def rounds_together(self) -> bool:
        """Return True if one range serves all samples of a call, which then depend on each other."""
        return self.precision == "dynamic int8"

    @property
    def nbytes(self) -> int:
        """Size of the program's files in bytes, including external weights of an .onnx file."""
        if self._contents is not None:
            return sum(record.bytes for record in self._contents.files.values())
        files = (self.path, *(self.path.parent / name for name in self.metadata.get("files", {})))
        return sum(file.stat().st_size for file in files)

    @cached_property
    def processing(self) -> Processing:
        """Processing around ``predict``.

        Raises ProgramError if neither file nor caller names one.
        """
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
        try:
            with self._slots or nullcontext():
                outputs = self._session.run([_as_numpy(value) for value in values])
        except Exception as error:  # ONNX Runtime's errors share no class below Exception
            raise ProgramError(f"{NAMES[self.runtime]} could not run {self.path.name}: {error}") from error
        tensor = next((value for value in values if _is_tensor(value)), None)
        if tensor is not None:
            outputs = [_as_tensor(output, like=tensor) for output in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @property
    def batch_size(self) -> int | None:
        """Fixed number of samples of a call; None if any, or if first sizes of inputs differ."""
        sizes = {spec.shape[0] for spec in self.inputs if spec.shape}
        size = sizes.pop() if len(sizes) == 1 else None
        return size if isinstance(size, int) else None

    @property
    def largest_batch(self) -> int | None:
        """Most samples of a call: `batch_size`, or those that memory is planned for; None if any."""
        names = {spec.shape[0] for spec in self.inputs if spec.shape}
        planned = self.metadata.get("largest_sizes", {}).get(next(iter(names))) if len(names) == 1 else None
        return self.batch_size or planned

    def in_batches(self, *inputs: Any) -> Any:
        """Compute outputs for any number of samples, in calls of `largest_batch`.

        The last call is filled up with samples again. ProgramError as in a call, and for an output that has another
        first size, which cannot be joined.
        """
        values = [value if _is_tensor(value) else np.asarray(value) for value in inputs]
        size, counts = self.largest_batch, {len(value) for value in values if value.ndim}
        alone = self.batch_size is None and max(counts, default=0) < (size or 0)
        if not size or len(counts) != 1 or counts <= {0, size} or alone:
            return self(*values)
        count = counts.pop()
        calls = []
        for start in range(0, count, size):
            rows = [place % count for place in range(start, start + size)]
            outputs = self(*(value[rows] if value.ndim else value for value in values))
            calls.append(outputs if isinstance(outputs, tuple) else (outputs,))
        joined = []
        for spec, outputs in zip(self.outputs, zip(*calls, strict=True)):
            if any(not output.ndim or len(output) != size for output in outputs):
                raise ProgramError(
                    f"{self.path} takes {size} samples at a time, and its output {spec.name} has shape {tuple(outputs[0].shape)}, which is "
                    f"no batch: give {size} samples alone"
                )
            joined.append(_joined(outputs)[:count])
        return joined[0] if len(joined) == 1 else tuple(joined)

    def predict(self, inputs: Iterable[Any], batch_size: int = 8) -> list[Any]:
        """Return one result for each of ``inputs``, ``batch_size`` at a time, by `processing`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        results: list[Any] = []
        remaining = iter(inputs)
        while batch := list(islice(remaining, batch_size)):
            arrays, context = self.processing.preprocess(batch)
            outputs = self.in_batches(*arrays) if isinstance(arrays, tuple) else self.in_batches(arrays)
            answers = self.processing.postprocess(outputs, context)
            if len(answers) != len(batch):
                raise ProgramError(f"postprocess gave {len(answers)} results for {len(batch)} inputs")
            results.extend(answers)
        return results

    def predict_one(self, item: Any) -> Any:
        """Return the result for a single input; see `predict`."""
        return self.predict([item])[0]

    @property
    def is_free(self) -> bool:
        """Return True if a call would be computed at once, as far as `requests` says."""
        if self._slots is None:
            return True
        if free := self._slots.acquire(blocking=False):
            self._slots.release()
        return free

    def with_threads(self, threads: int, requests: int | None = None) -> Program:
        """Open the same program on ``threads`` CPU threads, for ``requests`` calls at once.

        The device stays.

        Raises ProgramError if its files were replaced since it was loaded.
        """
        file = self.path if self._contents is None else self.path / self._contents.main
        with folder.unchanged(self.stamps):
            session = _session(file, threads, self.device, self.runtime, self._contents, requests)
        return Program(
            self.path, session, self.metadata, self._given_processing, self.runtime,
            contents=self._contents, threads=threads, stamps=self.stamps, digest=self.digest, choice=self.choice, requests=requests,
        )  # fmt: skip

    def kernels(self) -> Counter[str]:
        """Count the kernels of the runtime, by its names: QLinearConv, qconv_pointwise.

        OpenVINO's are such as "Convolution u8".
        """
        return self._session.kernels()

    def openvino_kernels(self) -> Counter[tuple[str, str]]:
        """Count the operators that OpenVINO runs, by kind and precision: ("Convolution", "bf16")."""
        if not isinstance(self._session, OpenVinoSession):
            raise ProgramError(f"{self.path} runs in {NAMES[self.runtime]}: load it with runtime='openvino'")
        return self._session.by_precision()

    def __repr__(self) -> str:
        described = [str(spec) for spec in self.inputs], [str(spec) for spec in self.outputs]
        return f"Program({str(self.path)!r}, {self.precision}, {', '.join(described[0])} -> {', '.join(described[1])})"


def import_runtime(runtime: Runtime) -> None:
    """Import the package that ``runtime`` is in; MissingExtraError if it is not installed."""
    if runtime == "executorch":
        require("executorch.version", extra="executorch")
    package = {"onnxruntime": "onnxruntime"}.get(runtime, "openvino" if runtime.startswith("openvino") else "torch")
    require(package, extra="deploy")


@dataclass(frozen=True, kw_only=True)
class _Files:
    """Files of a program that were checked before a runtime reads one."""

    path: Path
    main: Path
    """The file that its runtime opens."""
    contents: folder.Contents | None
    """None for a lone file."""
    metadata: dict[str, Any]
    text: str | None
    """Description in a lone file, as it stands there."""
    stamps: Mapping[Path, folder.FileStamp]
    digest: str

    @classmethod
    def checked(cls, path: Path, trusted: Trusted | None) -> _Files:
        """Check the program at ``path`` and read its description; ProgramError as in `Program.load`."""
        if path.is_dir():
            contents = folder.read(path, trusted)
            metadata, text, main, stamps = contents.description, None, path / contents.main, contents.stamps
            digest = contents.digest
            if contents.format == "onnx":
                check_weights(main, contents.files)
        else:
            _check_file(path, trusted)
            contents, main, stamps = None, path, {path: folder.stamp_of(path)}
            metadata, text = unseal(path)
            digest = metadata["sha256"] if metadata else folder.file_digest(path)
        _check_types(path, metadata)
        if "processing" in metadata:
            check_name(metadata["processing"])
        check_processor(metadata)
        return cls(path=path, main=main, contents=contents, metadata=metadata, text=text, stamps=stamps, digest=digest)

    @property
    def format(self) -> str:
        return "onnx" if self.contents is None else self.contents.format

    def session(self, runtime: Runtime, threads: int | None, device: Device, requests: int | None) -> Session:
        """Open the main file; ProgramError if it is not what was checked."""
        with folder.unchanged(self.stamps):
            session = _session(self.main, threads, device, runtime, self.contents, requests)
        if self.contents is None and session.stored(KEY) != self.text:  # the runtime must read what was checked
            raise changed(self.path)
        if self.contents is not None:
            _check_described(self.path, self.contents, session)
        return session


def _check_file(path: Path, trusted: Trusted | None) -> None:
    if not path.is_file():
        raise ProgramError(f"there is no program at {path}")
    if path.stat().st_size == 0:
        raise ProgramError(f"{path} is empty")
    if trusted is not None:
        raise ProgramError(f"{path} is one file, and only a program's folder is signed: export a folder with sign=")


_TYPES: Mapping[str, type] = {
    "runtime": str, "precision": str, "requires": list, "requires_machine": str, "quantization": dict, "processing_args": dict, "build_s": dict,
    "largest_sizes": dict,
}  # fmt: skip
"""Maps a field of the description that is read when a program is loaded, or timed, to its type."""


def _check_types(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ProgramError for a description whose fields have other types than expected."""
    for name, kind in _TYPES.items():
        if name in metadata and not isinstance(metadata[name], kind):
            raise ProgramError(
                f"{path} describes its {name} as {str(metadata[name])[:60]!r}, which is not of type {kind.__name__}"
            )
    if not all(isinstance(name, str) for name in metadata.get("requires", [])):
        raise ProgramError(f"{path} requires {str(metadata['requires'])[:60]}, and instruction sets have names")
    _check_measured(path, metadata)
    if not all(type(size) is int and size > 0 for size in metadata.get("largest_sizes", {}).values()):
        raise ProgramError(
            f"{path} describes its largest_sizes as {str(metadata['largest_sizes'])[:60]}, and sizes are numbers from 1"
        )
    if not all(isinstance(seconds, int | float) for seconds in metadata.get("build_s", {}).values()):
        raise ProgramError(f"{path} describes its build_s as {str(metadata['build_s'])[:60]}, and seconds are numbers")


_QUANTIZATION_NUMBERS = {"metric": ("program", "float"), "speed": ("over_fp32", "low", "high", "size_over_fp32")}
"""Measurements of a quantized program that its description holds."""


def _check_measured(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ProgramError for measurements of the exporter that cannot be shown.

    Those of an edited description may be anything.
    """
    found: list[tuple[str, Any, Sequence[str]]] = []
    if "parity" in metadata:
        parity = metadata["parity"]
        outputs = parity.get("outputs", {}) if isinstance(parity, dict) else {}
        found.append(("parity", parity, ("sqnr_db",)))
        found += [
            ("parity of an output", one, ("max_difference", "largest"))
            for one in (outputs.values() if isinstance(outputs, dict) else [outputs])
        ]
    quantization = metadata.get("quantization", {})
    for key, needed in _QUANTIZATION_NUMBERS.items():
        if quantization.get(key) is not None:
            found.append((f"{key} of quantization", quantization[key], needed))
    for name, one, numbers in found:
        if not isinstance(one, dict) or not _are_numbers(one, numbers):
            raise ProgramError(
                f"{path} describes its {name} as {str(one)[:60]}, which lacks the numbers {', '.join(numbers)}: export it again"
            )


def _are_numbers(found: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return True if ``found`` has a number for each of ``names``.

    The ratio of equal outputs is None.
    """
    return all(
        type(found.get(name)) in (int, float) or (name == "sqnr_db" and name in found and found[name] is None)
        for name in names
    )


def _check_described(path: Path, contents: folder.Contents, session: Session) -> None:
    """Raise ProgramError if the opened model has other inputs or outputs than are described."""
    for kind, described, held in (
        ("inputs", contents.inputs, session.inputs), ("outputs", contents.outputs, session.outputs),
    ):  # fmt: skip
        named = kind == "inputs"  # exporters and runtimes call an output by another name where nobody named it
        if len(described) != len(held) or not all(
            one.fits(other, named=named) for one, other in zip(described, held, strict=True)
        ):
            expected, found = (", ".join(map(str, specs)) for specs in (described, held))
            raise ProgramError(
                f"{path / folder.NAME} describes the {kind} {expected}, and the model has {found}: export it again"
            )


def _session(
    file: Path,
    threads: int | None,
    device: Device,
    runtime: Runtime,
    contents: folder.Contents | None,
    requests: int | None = None,
) -> Session:
    """Open ``file`` in ``runtime``; ProgramError if it cannot run it."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if requests is not None and requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    _check_runtime(file, "onnx" if contents is None else contents.format, runtime, device)
    if runtime == "onnxruntime":
        return OnnxRuntimeSession(file, threads=threads, device=device)
    if runtime in ("openvino", "openvino-bf16"):
        return OpenVinoSession(file, threads=threads, bfloat16=runtime == "openvino-bf16", requests=requests or 1)
    assert contents is not None  # an .onnx file runs in none of torch's runtimes
    if runtime == "executorch":
        return ExecuTorchSession(file, threads=threads, inputs=contents.inputs, outputs=contents.outputs)
    compiled = runtime == "inductor"
    return TorchSession(file, threads=threads, compiled=compiled, inputs=contents.inputs, outputs=contents.outputs)


def _check_runtime(file: Path, form: str, runtime: str, device: Device) -> None:
    """Raise ProgramError for a runtime that is unknown or does not run format or device."""
    if runtime not in get_args(Runtime):
        raise ProgramError(
            f"{file} runs in {runtime!r}, which this arclight does not know: there are {', '.join(get_args(Runtime))}"
        )
    if runtime not in folder.RUNTIMES[form]:
        known = ", ".join(sorted(folder.RUNTIMES[form]))
        raise ProgramError(f"{file} is of format {form}, which {NAMES[runtime]} does not run: take {known}")
    if device == "cuda" and runtime != "onnxruntime":
        raise ProgramError(f"{file} runs in {NAMES[runtime]}, on the CPU: take device='cpu'")


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported torch; a program does not need it
    return torch is not None and isinstance(value, torch.Tensor)


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    array = value.detach().cpu().numpy() if _is_tensor(value) else value
    return np.asarray(array, order="C")  # ascontiguousarray would give a scalar a dimension


def _joined(parts: Sequence[Any]) -> Any:
    """Join arrays, or tensors, along the batch."""
    if not _is_tensor(parts[0]):
        return np.concatenate(parts)
    import torch

    return torch.cat(tuple(parts))


def _as_tensor(array: np.ndarray[Any, Any], *, like: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(like.device)
