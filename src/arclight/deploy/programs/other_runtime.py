"""Run a program in another runtime than the one it was exported for, and compare the two.

A program is an exported folder, and its probe is the record of inputs that it takes: shapes, least and greatest values. The exporter writes it
(`described_probe`) in place of inputs, which are users' data; `drawn` draws random ones from it. `Program.load` calls `chosen` for a runtime that the
caller names, and `fastest`, which also times; ``serve.tasks.pool`` times on `drawn` inputs.

Keys of a probe are in programs and stay. Numbers of calls and `BUDGET_S` may be tuned freely; higher bounds refuse more programs in other
runtimes, and a smaller `LARGEST_PROBE` refuses programs that are written already.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import NAMES, Array, TensorSpec
from arclight.deploy.settings import Runtime
from arclight.fabric.extras import MissingExtraError

if TYPE_CHECKING:
    from torch import Tensor

    from arclight.deploy.parity import Parity

log = logging.getLogger(__name__)

WARM_UP, ROUNDS = 2, 15
"""Warm-up calls of each runtime, and the most timed calls of each, in turns."""
BUDGET_S = 2.0
"""Seconds after which no further round of timing begins; the first always does."""
MAX_CHANNELS = 256
"""Longest last dimension, of outputs with three or more, whose channels are also compared one by one."""
FLOAT_CHANNEL_SQNR_DB, CHANNEL_SQNR_DB = 30.0, 6.0
"""Least signal-to-noise ratio of a channel in float32 and in other programs; a lower one means another value, such as a score of 0 beside
boxes in pixels."""
LARGEST_PROBE = 1 << 27
"""Most elements of all drawn inputs (a gigabyte of 8-byte values): no larger probe is written, and one in a file is refused."""


class LoadedProgram(Protocol):
    """A program loaded into one runtime, as `Program` is."""

    path: Path
    runtime: Runtime
    metadata: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def precision(self) -> str:
        """Return what it computes in, such as fp32 or 4-bit weights."""

    def __call__(self, *inputs: Any) -> Any:
        """Compute the outputs."""


P = TypeVar("P", bound=LoadedProgram)


@dataclass(frozen=True, kw_only=True)
class RuntimeChoice:
    """Record of why a program runs in its runtime, and how close that is to the exporter's."""

    exported_for: Runtime
    """Runtime of the exporter, in which parity, speed and kernels of the description were measured."""
    parity: Mapping[str, Parity] = field(default_factory=dict)
    """Outputs against those in that runtime; empty if it runs in the same, or was not compared."""
    wall_ms: Mapping[Runtime, float] = field(default_factory=dict)
    """Median milliseconds of a call of each runtime that was timed."""

    @property
    def sqnr_db(self) -> float | None:
        """Return the least signal-to-noise ratio of the outputs, or None if none were compared.

        Infinite for equal ones.
        """
        return min((one.sqnr_db for one in self.parity.values()), default=None)

    def summary(self, runtime: Runtime) -> str:
        """Return a sentence on the program, which runs in ``runtime``."""
        known, ratio = NAMES[self.exported_for], self.sqnr_db
        text = f"It runs in {NAMES[runtime]}{' in bfloat16' if runtime.endswith('bf16') else ''}"
        if runtime != self.exported_for and ratio is not None:
            closeness = "every bit" if ratio == math.inf else f"{ratio:.0f} dB"
            text += f", and agrees with itself in {known}, which it was exported for, to {closeness}"
        elif runtime != self.exported_for:
            text += f", not compared with {known}, which it was exported for"
        if self.wall_ms:
            times = sorted(self.wall_ms.items(), key=lambda one: one[1])
            text += f"; measured: {', '.join(f'{NAMES[name]} {wall:.3g} ms' for name, wall in times)}"
        return f"{text}."


# -- inputs --------------------------------------------------------------------------------------------------------


def described_probe(batches: Sequence[Sequence[Tensor]]) -> list[list[dict[str, Any]]]:
    """Describe inputs by shape, and the least and greatest of their finite values.

    The result is empty if they have more than `LARGEST_PROBE` elements; the program is then not compared later.
    """
    if sum(value.numel() for batch in batches for value in batch) > LARGEST_PROBE:
        return []
    found = []
    for batch in batches:
        inputs = []
        for value in batch:
            held = value.detach().cpu().double()
            held = held[held.isfinite()]
            low, high = (float(held.min()), float(held.max())) if len(held) else (0.0, 0.0)
            inputs.append({"shape": list(value.shape), "low": low, "high": high})
        found.append(inputs)
    return found


def drawn(program: LoadedProgram) -> list[list[Array]]:
    """Draw inputs of the recorded shapes and ranges, with a fixed seed; none without a record.

    Raises ProgramError for a description that does not fit the program.
    """
    random, calls, drawn_elements = np.random.default_rng(0), [], 0
    described = program.metadata.get("probe", [])
    try:
        for inputs in described:
            values = []
            for spec, one in zip(program.inputs, inputs, strict=True):
                shape, dtype = tuple(int(size) for size in one["shape"]), np.dtype(spec.dtype)
                low, high = float(one["low"]), float(one["high"])
                drawn_elements += math.prod(shape)
                if drawn_elements > LARGEST_PROBE or min(shape, default=0) < 0 or not math.isfinite(high - low):
                    raise ValueError(f"{shape}, {low} to {high}")
                whole = dtype.kind != "f"
                made = random.integers(int(low), int(high) + 1, shape) if whole else random.uniform(low, high, shape)
                values.append(np.asarray(made).astype(dtype))
                spec.check(values[-1])
            if not any(value.size for value in values):
                raise ValueError("all of its inputs are empty")
            calls.append(values)
    except (ProgramError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ProgramError(
            f"{program.path} describes a probe that its inputs do not take ({str(error)[:120]}): export it again"
        ) from error
    return calls


# -- choosing ------------------------------------------------------------------------------------------------------


def chosen(wanted: Runtime, exported_for: Runtime, opened: Callable[[Runtime], P]) -> tuple[P, RuntimeChoice]:
    """Open a program in the runtime ``wanted`` and compare it with ``exported_for``.

    The latter is opened and closed before. A program without a probe, as older ones are, is not compared, with a warning. Raises ProgramError if
    an output differs by more than the bound of its precision, and by more than quantization has changed it.
    """
    reference = opened(exported_for)
    calls = drawn(reference)
    if not calls:
        log.warning(
            "%s does not say what inputs it takes, as programs of this arclight do, so %s is not compared with %s: export it again",
            reference.path, NAMES[wanted], NAMES[exported_for],
        )  # fmt: skip
    expected = [_outputs(reference, call) for call in calls]
    del reference  # before the other takes as much memory
    program = opened(wanted)
    return program, RuntimeChoice(exported_for=exported_for, parity=_compared(program, calls, expected, exported_for))


def fastest(
    candidates: Sequence[Runtime],
    exported_for: Runtime,
    opened: Callable[[Runtime], P],
) -> tuple[P, RuntimeChoice]:
    """Open a program in the runtime that is fastest here, compared as by `chosen`.

    The first drawn inputs are timed in turns, also in ``exported_for``; other runtimes that cannot run the program, or compute something else, are left
    out with a warning. Raises ProgramError for a program without a probe.
    """
    reference = opened(exported_for)
    calls = drawn(reference)
    if not calls:
        raise ProgramError(
            f"{reference.path} does not say what inputs it takes, as programs of this arclight do, so nothing can be timed: name the runtime, "
            "or export it again"
        )
    expected = [_outputs(reference, call) for call in calls]
    programs, parity = {exported_for: reference}, {}
    for runtime in candidates:
        if runtime == exported_for:
            continue
        try:
            program = opened(runtime)
            parity[runtime] = _compared(program, calls, expected, exported_for)
        except (ProgramError, MissingExtraError) as error:
            log.warning("%s is not timed: %s", NAMES[runtime], error)
            continue
        programs[runtime] = program
    times = _timed(programs, calls[0])
    best = min(times, key=lambda runtime: times[runtime])
    return programs[best], RuntimeChoice(exported_for=exported_for, parity=parity.get(best, {}), wall_ms=times)


def _timed(programs: Mapping[Runtime, LoadedProgram], call: Sequence[Array]) -> dict[Runtime, float]:
    """Return the median milliseconds of a call, taken in turns."""
    clock = time.perf_counter
    for program in programs.values():
        for _ in range(WARM_UP):
            program(*call)
    started, times = clock(), {runtime: list[float]() for runtime in programs}
    while not all(times.values()) or (len(times[next(iter(times))]) < ROUNDS and clock() - started < BUDGET_S):
        for runtime, program in programs.items():
            before = clock()
            program(*call)
            times[runtime].append(clock() - before)
    return {runtime: statistics.median(found) * 1000 for runtime, found in times.items()}


def _outputs(program: LoadedProgram, call: Sequence[Array]) -> list[Array]:
    outputs = program(*call)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _compared(
    program: LoadedProgram, calls: Sequence[Sequence[Array]], expected: Sequence[Sequence[Array]], exported_for: Runtime
) -> dict[str, Parity]:
    """Compare outputs with those of the exporter's runtime.

    Raises ProgramError beyond the bound of the program's precision, unless quantization has changed the output more. Each channel of a last
    dimension of up to `MAX_CHANNELS` is compared by itself, too (`_broken_channel`): boxes in pixels would hide scores beside them.
    """
    from arclight.deploy.parity import broken_bound, distance, worst

    precision = program.precision
    if precision == "fp32" and program.runtime.endswith("bf16"):
        precision = "bf16"
    found: dict[str, list[Parity]] = {}
    for call, outputs in zip(calls, expected, strict=True):
        for spec, wanted, given in zip(program.outputs, outputs, _outputs(program, call), strict=True):
            where = f"{program.path}: output {spec.name} in {NAMES[program.runtime]}"
            try:
                reference, output = _pair(wanted, given)
                parity = distance(reference, output, spec.name).parity
            except ValueError as error:
                raise ProgramError(
                    f"{where} cannot be compared with {NAMES[exported_for]}, which it was exported for: {error}; leave the runtime out"
                ) from error
            found.setdefault(spec.name, []).append(parity)
            broken = broken_bound(parity, precision)
            if broken and _is_within_rounding(parity, program.metadata, spec.name):
                broken = None  # runtimes round activations in their own ways: not by more than quantization has changed
            if limit := broken or _broken_channel(reference, output, precision):
                raise ProgramError(
                    f"{where} differs from {NAMES[exported_for]}, which it was exported for, {parity.difference}, and {limit}: leave the runtime out"
                )
    return {name: worst(several) for name, several in found.items()}


def _is_within_rounding(parity: Parity, metadata: Mapping[str, Any], output: str) -> bool:
    """Return True if the exporter recorded that quantization changed an output as much."""
    try:
        recorded = metadata["quantization"]["against_float"]["outputs"][output]
        if parity.integers and "integers" in recorded:  # programs of before recorded the ratio alone
            return parity.differing / parity.integers <= float(recorded["differing"]) / float(recorded["integers"])
        return parity.sqnr_db >= float(recorded["sqnr_db"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return False


def _pair(wanted: Array, given: Array) -> tuple[Tensor, Tensor]:
    import torch

    if wanted.shape != given.shape:
        raise ValueError(f"its shape is {given.shape}, and {wanted.shape} there")
    return torch.from_numpy(np.ascontiguousarray(wanted)), torch.from_numpy(np.ascontiguousarray(given))


def _broken_channel(reference: Tensor, output: Tensor, precision: str) -> str | None:
    """Return the bound that a channel (position of the last dimension) violates, or None.

    Outputs of one or two dimensions are not judged so, nor integers, which are all counted.
    """
    if reference.dim() < 3 or reference.shape[-1] > MAX_CHANNELS or not reference.is_floating_point():
        return None
    from arclight.deploy.parity import distance

    least = FLOAT_CHANNEL_SQNR_DB if precision == "fp32" else CHANNEL_SQNR_DB
    for place in range(reference.shape[-1]):
        one = distance(reference[..., place], output[..., place], str(place))
        if one.signal and one.parity.sqnr_db < least:
            return f"place {place} of its last dimension ({one.parity.sqnr_db:.1f} dB) needs {least:.0f} dB"
    return None
