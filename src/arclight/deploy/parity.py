"""Measure the distance between two runs of one model, output by output.

`formats.export`, `comparison`, `verifying`, `quantizing` and ``programs.other_runtime`` judge by it: two lists of tensors come in, a `Parity` for
each output goes out. Keys of `to_json` are in the metadata of programs and in ``arclight compare --json``: they must stay. ``arclight export`` and
the server show the summaries. Looser bounds would let worse programs pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FLOAT_TOLERANCE = 1e-4
"""Default bound for float32 programs: largest difference as a share of the largest value of the same output."""
INT8_SQNR_DB = 30.0
"""Default bound for programs of any precision but float32, decibels against the model's simulation: kernels and simulation round ties
differently, which must stay below the rounding noise of quantization itself."""
ROUNDED_INTEGERS = 0.01
"""Largest share of an output's integers that may differ in programs of any precision but float32, where rounding decides which of two nearly equal
scores is greater. Masks of 18,000 labels from a random network differ in 1 (int8) and 11 (bfloat16) of them in OpenVINO."""
LISTED = 4
"""Most outputs whose difference a summary shows."""
Parts = Callable[..., Mapping[str, Tensor]]
"""Takes a model's outputs and returns, by name, the parts that are compared separately, such as boxes and scores that share a tensor."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One output beside its reference."""

    max_difference: float
    """Largest absolute difference of any element, in the unit of the output."""
    largest: float
    """Largest absolute value in the reference, in the same unit."""
    sqnr_db: float
    """Signal-to-noise ratio, decibels: 20 log10(|reference| / |difference|), infinite for equal outputs.

    10 log10(integers / differing) for integers: 20 dB where one in a hundred differs.
    """
    integers: int = 0
    """Elements of an integer or bool output, 0 for any other: their differences mean nothing, as those of class and token ids."""
    differing: int = 0
    """How many of ``integers`` are not equal."""

    @property
    def difference(self) -> str:
        """Say how the output differs, as the rest of a sentence."""
        if self.integers:
            return f"in {self.differing} of {self.integers} elements, by up to {self.max_difference:.3g}"
        return f"by up to {self.max_difference:.3g} in values of up to {self.largest:.3g} ({self.sqnr_db:.1f} dB)"


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Sums from which a `Parity` is computed; sums of several samples are added."""

    max_difference: float = 0.0
    largest: float = 0.0
    signal: float = 0.0
    """Sum of squares of the reference."""
    noise: float = 0.0
    """Sum of squares of the difference."""
    integers: int = 0
    differing: int = 0

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            max_difference=max(self.max_difference, other.max_difference),
            largest=max(self.largest, other.largest),
            signal=self.signal + other.signal,
            noise=self.noise + other.noise,
            integers=self.integers + other.integers,
            differing=self.differing + other.differing,
        )

    @property
    def parity(self) -> Parity:
        signal, noise = (self.integers, self.differing) if self.integers else (self.signal, self.noise)
        ratio = signal / noise if noise > 0 else math.inf
        sqnr_db = 10 * math.log10(ratio) if ratio > 0 else -math.inf
        return Parity(
            max_difference=self.max_difference, largest=self.largest, sqnr_db=sqnr_db, integers=self.integers, differing=self.differing
        )  # fmt: skip


def compare(reference: Sequence[Tensor], outputs: Sequence[Tensor], parts: Parts | None = None) -> dict[str, Parity]:
    """Compare each output, or each of its ``parts``, with its reference.

    Compared together, a large one would hide a small one. Without ``parts`` the names are the places of the outputs: "0", "1". Equal infinite values,
    as in masks, are left out. Raises ValueError if shapes differ, if a value is NaN, or infinite on one side alone or with another sign, and if no
    value of a reference is finite.
    """
    shapes, expected = [tuple(o.shape) for o in outputs], [tuple(r.shape) for r in reference]
    if shapes != expected:
        raise ValueError(f"outputs have shapes {shapes}, the reference has {expected}")
    wanted, given = _named(reference, parts), _named(outputs, parts)
    return {name: distance(wanted[name], given[name], name).parity for name in wanted}


def worst(found: Sequence[Parity]) -> Parity:
    """Return the largest difference, the smallest ratio, and the sums of integers."""
    return Parity(
        max_difference=max(p.max_difference for p in found),
        largest=max(p.largest for p in found),
        sqnr_db=min(p.sqnr_db for p in found),
        integers=sum(p.integers for p in found),
        differing=sum(p.differing for p in found),
    )


def broken_bound(parity: Parity, precision: str, max_difference: float | None = None) -> str | None:
    """Return the bound that ``parity`` violates as a clause, or None.

    It is ``max_difference`` if that is given, else the default one of ``precision``, such as fp32 or int8. Integers must be equal with either, but for
    `ROUNDED_INTEGERS` of them in other precisions than fp32.
    """
    if parity.integers:
        share = 0.0 if precision == "fp32" else ROUNDED_INTEGERS
        fits = parity.differing <= share * parity.integers
        limit = (
            f"{precision} programs may differ in {share:.0%} of their integers" if share else "integers must be equal"
        )
    elif max_difference is not None:
        fits, limit = parity.max_difference <= max_difference, f"max_difference is {max_difference:.3g}"
    elif precision != "fp32":
        fits, limit = parity.sqnr_db >= INT8_SQNR_DB, f"{precision} programs need {INT8_SQNR_DB:.0f} dB"
    else:
        allowed = FLOAT_TOLERANCE * parity.largest
        fits = parity.max_difference <= allowed
        limit = f"{FLOAT_TOLERANCE:.0e} of its largest value is {allowed:.3g}"
    return None if fits else limit


def to_json(parity: Parity) -> dict[str, float | None]:
    """Write a Parity for JSON, which has no infinity: the ratio of equal outputs is null.

    Counts of integers are there if there are any.
    """
    ratio = None if parity.sqnr_db == math.inf else max(parity.sqnr_db, -999.0)  # noise beside a reference of zeros
    found = {**asdict(parity), "sqnr_db": ratio}
    return found if parity.integers else {name: found[name] for name in ("max_difference", "largest", "sqnr_db")}


def parity_summary(metadata: Mapping[str, Any]) -> str:
    """Summarise how closely a program agrees with its model, as measured at export."""
    parity = metadata["parity"]
    closest = "every bit" if parity["sqnr_db"] is None else f"{parity['sqnr_db']:.0f} dB"
    outputs = parity.get("outputs", {})  # programs of the release before have none
    differences = [
        f"{name} differ in {one.get('differing')} of {one['integers']} integers"
        if one.get("integers")
        else f"{name} differ by up to {one['max_difference']:.2g} of {one['largest']:.3g}"
        for name, one in list(outputs.items())[:LISTED]
    ]
    if len(outputs) > LISTED:
        differences.append(f"{len(outputs) - LISTED} more outputs")
    return f"agrees with its torch model to {closest}" + (f" ({', '.join(differences)})" if differences else "")


def speed_summary(metadata: Mapping[str, Any]) -> str:
    """Summarise speed and size of a quantized program against its float32 program.

    Empty if none was timed.
    """
    speed = metadata.get("quantization", {}).get("speed")
    if speed is None:
        return ""
    return (
        f", {speed['over_fp32']:.2f} x as fast as float32 ({speed['low']:.2f}-{speed['high']:.2f}, one sample, one thread) in "
        f"{speed['size_over_fp32']:.0%} of its size"
    )


def _named(outputs: Sequence[Tensor], parts: Parts | None) -> Mapping[str, Tensor]:
    return parts(*outputs) if parts is not None else {str(place): output for place, output in enumerate(outputs)}


def distance(reference: Tensor, output: Tensor, name: str) -> Distance:
    """Compare an output with its reference of the same shape.

    Raises ValueError as `compare` does, with ``name`` in the message.
    """
    wanted, given = _real_numbers(reference), _real_numbers(output)
    finite = wanted.isfinite()
    if len(wanted) and (wanted.isnan().any() or not finite.any()):
        kind = "NaN" if wanted.isnan().any() else "infinite"
        raise ValueError(
            f"output {name} of the reference is {kind} in {int((~finite).sum())} of {len(wanted)} values, so nothing can be told "
            "from it: give inputs on which the model computes finite values, or mend its weights"
        )
    if not torch.equal(finite, given.isfinite()) or not torch.equal(wanted[~finite], given[~finite]):
        raise ValueError(f"output {name} is NaN or infinite in other places than its reference")
    integers = _holds_integers(reference)
    wanted, difference = wanted[finite], (given - wanted)[finite]
    if integers and _holds_integers(output):  # float64 would round ids beyond 2 ** 53; a sum that overflows is not 0
        difference = (output.long() - reference.long()).flatten().double()
    if not len(wanted):
        return Distance()
    return Distance(
        max_difference=float(difference.abs().max()),
        largest=float(wanted.abs().max()),
        signal=float(wanted.square().sum()),
        noise=float(difference.square().sum()),
        integers=len(wanted) if integers else 0,
        differing=int(difference.count_nonzero()) if integers else 0,
    )


def _holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _real_numbers(tensor: Tensor) -> Tensor:
    """Return the values in float64, those of a complex tensor as real and imaginary parts."""
    held = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return held.double().flatten()
