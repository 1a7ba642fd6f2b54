"""Name this processor's instruction sets, and check that a program finds those it needs.

``formats.export`` stores the names in programs, as Linux has them: they must stay. `ptq` asks `overflows` to choose 7 or 8 bits, and refuses signed
activations that are slow here; `program` calls `check_processor` before a runtime reads the file.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from arclight.deploy.errors import ProgramError

_RECORDED = {
    "avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "avx_vnni_int8", "amx_tile", "amx_int8", "amx_bf16",
    "amx_fp16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
}  # fmt: skip
"""Instruction sets that are recorded: they decide how fast, and how exactly, a program computes."""
_VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}


@cache
def instruction_sets() -> frozenset[str]:
    """Return this processor's instruction sets by Linux's names; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(_RECORDED.intersection(flags.partition(":")[2].split()))


_WIDENED = ("executorch",)
"""Targets whose kernels widen 8-bit values before they multiply (XNNPACK's), so that no sum overflows on any processor."""


def overflows(target: str | None = None) -> bool:
    """Return True for an x86 processor that adds 8-bit products in 16 bits, where two overflow.

    Such are those with AVX2 and without VNNI. ``target``: what a program was quantized for, if that is known.
    """
    present = instruction_sets()
    return target not in _WIDENED and "avx2" in present and not _VNNI & present


def check_processor(description: Mapping[str, Any]) -> None:
    """Raise ProgramError for a program that needs another machine or other instructions.

    Warns of one whose 8-bit sums may overflow here.
    """
    present = instruction_sets()
    required = description.get("requires", [])
    if description.get("requires_machine", platform.machine()) != platform.machine():
        raise ProgramError(
            f"the program was compiled for {description['requires_machine']}, this machine is {platform.machine()}: compile it here"
        )
    if present and (missing := sorted(set(required) - present)):
        raise ProgramError(
            f"the program was compiled for {', '.join(missing)}, which this processor lacks: compile it here, or take an onnx "
            "or openvino program"
        )
    quantization = description.get("quantization", {})
    rounded = description.get("precision") in ("int8", "dynamic int8")
    if rounded and not quantization.get("reduce_range") and overflows(str(quantization.get("target"))):
        warnings.warn(
            "this processor has no VNNI: it adds 8-bit products in 16 bits, which overflow with weights of 8 bits; quantize with "
            "reduce_range=True for it",
            stacklevel=4,
        )
