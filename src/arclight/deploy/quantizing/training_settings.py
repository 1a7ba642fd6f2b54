"""Define the settings of quantization-aware training, the table ``[qat]`` of a recipe.

``cli.schema`` reads them, and a run builds its callback by `build`. Kinds (``recipe_kind``) and field names are in recipes: they must stay. A new
kind is a class in `QAT`. No torch is imported here, so that a recipe is read quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import TYPE_CHECKING, ClassVar

from arclight._intervals import Checked, FiniteFloat, NonNegativeInt
from arclight.deploy.settings import DynamicInt8, Int8, LowBit, Quantization, Target, WeightOnly

if TYPE_CHECKING:
    from arclight.deploy.quantizing.callback import QuantizationAwareTraining


@dataclass(frozen=True, kw_only=True)
class Training(Checked):
    """Settings that all kinds share: the submodule, and the parts of it that stay in float."""

    attribute: str = "model"
    """Submodule of the module that is trained with rounding, and that is exported."""
    skip: tuple[str, ...] = ()
    """Modules of it kept in float32, by name: `head` keeps `head` and everything inside it."""
    min_sqnr_db: FiniteFloat = 15.0
    """Refuse a program one of whose outputs has a smaller signal-to-noise ratio against the trained float model than this, decibels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attribute.isidentifier() or iskeyword(self.attribute):
            raise ValueError(f"attribute must be the name of a submodule, such as model, got {self.attribute!r}")

    @property
    def recipe(self) -> Quantization:
        """Return the recipe of the program that is trained for."""
        raise NotImplementedError

    def build(self) -> QuantizationAwareTraining:
        """Make the callback that trains with this rounding."""
        from arclight.deploy.quantizing.callback import QuantizationAwareTraining

        return QuantizationAwareTraining(self.recipe, attribute=self.attribute)


@dataclass(frozen=True, kw_only=True)
class _FixedRanges(Training):
    """Settings of kinds with trained ranges of activations: runtime, and steps of freezing."""

    target: Target | None = None
    """Runtime that integers are placed for: onnxruntime (the default), openvino, inductor, executorch or tensorrt."""
    freeze_observers_at: NonNegativeInt | None = None
    """Optimizer step from which ranges of activations stay as they are; none for never."""
    freeze_batch_norm_at: NonNegativeInt | None = None
    """Optimizer step from which batch norms use their running statistics, as the program does; none for never."""

    def build(self) -> QuantizationAwareTraining:
        from arclight.deploy.quantizing.callback import QuantizationAwareTraining

        return QuantizationAwareTraining(
            self.recipe, target=self.target, attribute=self.attribute, freeze_observers_at=self.freeze_observers_at,
            freeze_batch_norm_at=self.freeze_batch_norm_at,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Int8Training(_FixedRanges):
    """Train with activations and weights in 8 bits, where the target multiplies integers.

    Training moves the ranges of activations; those of weights follow the weights.
    """

    recipe_kind: ClassVar[str] = "int8"
    in_place_of: ClassVar[Mapping[str, str]] = {
        "int4": "take weightonly with bits = 4 (--qat.kind weightonly --qat.bits 4), or lowbit",
        "bfloat16": "bfloat16 needs no training with rounding: leave [qat] out, and quantize with --recipe bfloat16",
        "float8": "float8 has no kernels for CPUs here: take int8",
    }
    """Kinds that are refused in a recipe, with the reason and what to take."""
    reduce_range: bool | None = None
    """Weights of 7 bits, for x86 processors without VNNI, where sums of 8-bit products overflow. None: if this one has none."""

    @property
    def recipe(self) -> Int8:
        return Int8(reduce_range=self.reduce_range, skip=self.skip, min_sqnr_db=self.min_sqnr_db)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyTraining(Training):
    """Train with weights of linear layers rounded to 8 or 4 bits in groups of inputs."""

    recipe_kind: ClassVar[str] = "weightonly"

    bits: int = 8
    """Bits of a weight, 8 or 4."""
    group_size: int = 32
    """Inputs that share a scale: 16, 32, 64, 128 or 256."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.recipe  # which refuses what it has no kernels for

    @property
    def recipe(self) -> WeightOnly:
        return WeightOnly(bits=self.bits, group_size=self.group_size, skip=self.skip, min_sqnr_db=self.min_sqnr_db)


@dataclass(frozen=True, kw_only=True)
class DynamicInt8Training(Training):
    """Train with linear layers in 8 bits, activations in the range of each call."""

    recipe_kind: ClassVar[str] = "dynamicint8"

    reduce_range: bool | None = None
    """Weights of 7 bits, for x86 processors without VNNI, where sums of 8-bit products overflow. None: if this one has none."""

    @property
    def recipe(self) -> DynamicInt8:
        return DynamicInt8(reduce_range=self.reduce_range, skip=self.skip, min_sqnr_db=self.min_sqnr_db)


@dataclass(frozen=True, kw_only=True)
class LowBitTraining(_FixedRanges):
    """Train with weights of 4 bits and activations of 8 or 4.

    W4A8 rounds linear layers; W4A4 also rounds convolutions, and no kernel computes it.
    """

    recipe_kind: ClassVar[str] = "lowbit"

    activation_bits: int = 8
    """Bits of an activation, 8 or 4."""
    group_size: int = 32
    """Inputs that share a scale of their weights and activations in W4A8; W4A4 has one scale per output."""
    min_sqnr_db: FiniteFloat = 5.0
    """Refuse a program one of whose outputs has a smaller signal-to-noise ratio against the trained float model than this, decibels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [
            name
            for name in ("freeze_observers_at", "freeze_batch_norm_at", "target")
            if getattr(self, name) is not None
        ]
        recipe = self.recipe  # which refuses what it has no kernels for
        if given and not recipe.needs_calibration:
            raise ValueError(
                f"{given[0]} is of ranges that stay, and with activation_bits = 8 each call has its own: leave it out, or set activation_bits = 4"
            )

    @property
    def recipe(self) -> LowBit:
        return LowBit(
            activation_bits=self.activation_bits, group_size=self.group_size, skip=self.skip, min_sqnr_db=self.min_sqnr_db
        )  # fmt: skip


QAT = Int8Training | WeightOnlyTraining | DynamicInt8Training | LowBitTraining
"""Any table ``[qat]`` of a recipe."""
