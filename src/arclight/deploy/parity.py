"""How far two runs of the same model are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One set of outputs beside its reference."""

    max_difference: float
    """Largest absolute difference of any element, in the unit of the outputs."""
    largest: float
    """Largest absolute value in the reference, in the same unit."""
    sqnr_db: float
    """Signal-to-noise ratio, decibels: 20 log10(|reference| / |difference|), infinite for equal outputs."""


def compare(reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> Parity:
    """Every output taken together; ValueError where shapes differ or a finite value has no finite counterpart."""
    shapes, expected = [tuple(o.shape) for o in outputs], [tuple(r.shape) for r in reference]
    if shapes != expected:
        raise ValueError(f"outputs have shapes {shapes}, the reference has {expected}")
    wanted = torch.cat([r.detach().double().flatten() for r in reference])
    given = torch.cat([o.detach().double().flatten() for o in outputs])
    finite = wanted.isfinite()
    if not torch.equal(finite, given.isfinite()):
        raise ValueError("outputs and reference are infinite or NaN in different places")
    wanted, given = wanted[finite], given[finite]
    difference = given - wanted
    signal, noise = wanted.square().sum(), difference.square().sum()
    return Parity(
        max_difference=float(difference.abs().max()) if len(wanted) else 0.0,
        largest=float(wanted.abs().max()) if len(wanted) else 0.0,
        sqnr_db=float(10 * torch.log10(signal / noise)) if noise > 0 else float("inf"),
    )
