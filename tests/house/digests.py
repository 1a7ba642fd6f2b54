"""Write and compare seeded digests of what small runs compute: SHA-256 over their bytes.

    python -m tests.house.digests --check tests/house/digests.json     # names what differs; status 1 where something does
    python -m tests.house.digests --write FILE [--only trainer,text]   # what this checkout computes

A refactoring leaves all of them as they are. Kernels differ among processors and versions: a file holds for the machine that it names, and on another
one nothing is compared, with status 0. Each section runs in a process of its own, so that none sees what another has left behind. A new section is a
module of ``digested`` with a function ``values(folder)``, and its name in SECTIONS. The slow test of ``test_digests`` runs the check.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

SECTIONS = ("trainer", "ranks", "plans", "text", "vision", "deploy", "federated", "checkpoints", "data")
EXPECTED = Path(__file__).with_name("digests.json")
THREADS = 1
PATIENCE_S = 600.0
"""Seconds after which a section is killed."""


def machine() -> dict[str, str]:
    """Return what decides the last bits: processor, vector instructions, threads, versions of packages."""
    cpu = Path("/proc/cpuinfo")
    found = dict(
        re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", cpu.read_text() if cpu.exists() else "", re.M)
    )
    packages = ("torch", "numpy", "onnxruntime", "opencv-python-headless", "torchao", "onnx")
    return {
        "cpu": " / ".join(found.values()) or platform.processor() or platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(THREADS),
    } | {name: version(name) for name in packages}


def digest(value: Any) -> str:
    """Return the SHA-256 of a tree's names, types, shapes and bytes; dicts are read in the order of their sorted keys."""
    state = hashlib.sha256()
    _feed(state, value)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        state.update(f"{value.dtype} {tuple(value.shape)}:".encode())
        state.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype} {value.shape}:".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            state.update(f"{key}=".encode())
            _feed(state, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        state.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, float):
        state.update(b"nan" if math.isnan(value) else value.hex().encode())
    elif isinstance(value, bytes):
        state.update(value)
    elif value is None or isinstance(value, (str, bool, int)):
        state.update(repr(value).encode())
    else:
        raise TypeError(
            f"no digest is defined of a {type(value).__name__}: give tensors, arrays, numbers, text and their containers"
        )


def section(name: str) -> dict[str, str]:
    """Run one section in a forked process; returns its digests by name."""
    folder = tempfile.mkdtemp(prefix=f"digests-{name}-")  # ranks forked below must not remove it when they end
    try:
        process = multiprocessing.get_context("fork").Process(target=_child, args=(name, folder))
        process.start()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
        answer, failed = Path(folder, "digests.json"), Path(folder, "failed.txt")
        if not answer.exists():
            said = (
                failed.read_text() if failed.exists() else f"status {process.exitcode} after {PATIENCE_S:g} s at most"
            )
            raise RuntimeError(f"section {name} did not come to its end: {said}")
        found: dict[str, str] = json.loads(answer.read_text())
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(name: str, folder: str) -> None:
    try:
        torch.set_num_threads(THREADS)
        os.environ["OMP_NUM_THREADS"] = str(THREADS)
        os.chdir(folder)
        warnings.simplefilter("ignore")
        values = importlib.import_module(f"tests.house.digested.{name}").values(Path(folder))
        found = {f"{name}/{key}": digest(value) for key, value in values.items()}
        Path("writing.json").write_text(json.dumps(found))
        Path("writing.json").rename("digests.json")
    except BaseException:
        Path(folder, "failed.txt").write_text(traceback.format_exc())
        raise


def compute(names: Sequence[str] = SECTIONS) -> dict[str, str]:
    """Run sections one after another; returns all digests."""
    found: dict[str, str] = {}
    for name in names:
        begun = time.monotonic()
        found |= section(name)
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return found


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Name what differs, is missing or is new."""
    lines = [f"{key}: differs" for key in sorted(expected.keys() & found) if expected[key] != found[key]]
    lines += [f"{key}: is no longer computed" for key in sorted(expected.keys() - found.keys())]
    return lines + [f"{key}: is not in the file" for key in sorted(found.keys() - expected.keys())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, divided by commas")
    options = parser.parse_args()
    names = options.only.split(",")
    here = machine()
    if options.check is not None:
        kept = json.loads(options.check.read_text())
        if kept["machine"] != here:
            print(
                f"{options.check} is of another machine and says nothing about this one: {kept['machine']}, here {here}"
            )
            return 0
        wanted = {key: value for key, value in kept["digests"].items() if key.partition("/")[0] in names}
        differences = compare(wanted, compute(names))
        print("\n".join(differences) or f"all {len(wanted)} digests are equal")
        return int(bool(differences))
    found = compute(names)
    options.write.write_text(json.dumps({"machine": here, "digests": dict(sorted(found.items()))}, indent=1) + "\n")
    print(f"{len(found)} digests are in {options.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
