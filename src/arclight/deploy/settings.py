"""Settings of quantization (no torch here: a recipe is read without it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arclight._intervals import Checked, FiniteFloat, PositiveInt

Observer = Literal["minmax", "histogram"]


@dataclass(frozen=True, kw_only=True)
class Int8(Checked):
    """Post-training quantization: unsigned 8-bit activations, signed 8-bit weights, one scale per channel."""

    observer: Observer = "histogram"
    """How ranges of activations are chosen: the extremes, or from a histogram, where rounding costs least."""
    calibration_batches: PositiveInt = 16
    """Most calibration batches that are run; the data may hold fewer."""
    reduce_range: bool = False
    """Weights of 7 bits: x86 processors without VNNI (before 2019) add 8-bit products in 16 bits, which overflow."""
    skip: tuple[str, ...] = ()
    """Modules kept in float32, by name: `head` keeps `head` and everything inside it."""
    min_sqnr_db: FiniteFloat = 15.0
    """Refuse a model one of whose quantized outputs has a smaller signal-to-noise ratio than this, decibels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observer not in ("minmax", "histogram"):
            raise ValueError(f"observer must be 'minmax' or 'histogram', got {self.observer!r}")
