"""Run a program in a process of its own, without the model's code.

`formats.export` compares the outputs of this run with the model before it publishes a program; `benchmark` measures loading and memory with
``fresh``. The child imports only the program's runtime and `Program`; requests, inputs and outputs pass by files of a temporary folder.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.deploy.errors import ProgramError

if TYPE_CHECKING:
    from arclight.deploy.programs.program import Program

_DEADLINE_S = 900.0
"""Seconds until a run counts as stuck."""


@dataclass(frozen=True, kw_only=True)
class FreshRun:
    """Outputs and cost of a program in a process of its own."""

    outputs: list[list[np.ndarray[Any, Any]]]
    """Outputs of each call."""
    load_s: float
    """Seconds to check and load the program, without the imports of its runtime."""
    peak_bytes: int
    """Peak memory of the process, the runtime's libraries included."""


def run_fresh(program: Program, calls: Sequence[Sequence[np.ndarray[Any, Any]]]) -> FreshRun:
    """Load ``program`` in a new process, in the same runtime, and run it on ``calls``.

    Raises ProgramError if that fails or takes longer than 15 minutes.
    """
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        place = Path(folder)
        _save(place / "inputs.npz", calls)
        trusted = None if program.signer is None else [program.signer]
        request = {
            "path": str(program.path.absolute()), "runtime": program.runtime, "threads": program.threads, "trusted": trusted,
            "device": program.device,
            "calls": [len(call) for call in calls],
        }  # fmt: skip
        (place / "request.json").write_text(json.dumps(request))
        # -P: files of the current folder must not take the place of modules
        command = [sys.executable, "-P", "-m", "arclight.deploy.programs.fresh", folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ProgramError(
                f"{program.path} did not finish in a fresh process within {_DEADLINE_S:.0f} s: use smaller example inputs"
            ) from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ProgramError(f"{program.path} cannot be run in a fresh process: {last}")
        report = json.loads((place / "report.json").read_text())
        with np.load(place / "outputs.npz", allow_pickle=False) as held:
            outputs = [[held[f"{n}.{i}"] for i in range(count)] for n, count in enumerate(report["outputs"])]
    return FreshRun(outputs=outputs, load_s=report["load_s"], peak_bytes=report["peak_bytes"])


def _serve_request(place: Path) -> None:
    """Handle the request in the folder ``place``, for `run_fresh`."""
    from arclight.deploy.programs.program import Program, import_runtime

    request = json.loads((place / "request.json").read_text())
    import_runtime(request["runtime"])
    started = time.perf_counter()
    program = Program.load(
        request["path"],
        threads=request["threads"],
        device=request["device"],
        runtime=request["runtime"],
        trusted=request["trusted"],
        parity=False,  # it was compared where the other process loaded it
    )
    load_s = time.perf_counter() - started
    given: list[list[Any]] = []
    with np.load(place / "inputs.npz", allow_pickle=False) as held:
        for n, count in enumerate(request["calls"]):
            outputs = program(*(held[f"{n}.{i}"] for i in range(count)))
            given.append(list(outputs) if isinstance(outputs, tuple) else [outputs])
    _save(place / "outputs.npz", given)
    report = {"outputs": [len(call) for call in given], "load_s": load_s, "peak_bytes": _peak_bytes()}
    (place / "report.json").write_text(json.dumps(report))


def _save(path: Path, calls: Sequence[Sequence[Any]]) -> None:
    arrays: dict[str, Any] = {f"{n}.{i}": value for n, call in enumerate(calls) for i, value in enumerate(call)}
    np.savez(path, **arrays)


def _peak_bytes() -> int:
    """Return the most memory that this process held at once."""
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: it counts the process that started this one, too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    _serve_request(Path(sys.argv[1]))
