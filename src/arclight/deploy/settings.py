"""Define the settings of quantization, without torch, so that a recipe is read quickly.

``arclight quantize``, ``vision``, ``text`` and users make these; `deployment`, `quantizing` and `formats` read them, `programs` and ``serve`` the
runtimes. Kinds (`kind_of`), field names, targets and runtimes are in recipes, programs and checkpoints of trained rounding: they must stay. A new
target also needs an entry in `PLACEMENTS` and in ``formats.formats``; a new placement one in ``placement.PROFILES``. A changed default changes the
bits of new programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeGuard

from arclight._intervals import Checked, FiniteFloat, PositiveInt, kind_of

if TYPE_CHECKING:
    from arclight.parallel.plan import Plan

Observer = Literal["minmax", "histogram"]
Target = Literal["onnxruntime", "openvino", "inductor", "executorch", "tensorrt"]
"""The runtime that an int8 model is placed for."""
Placement = Literal["onnxruntime", "onednn", "xnnpack", "symmetric"]
PLACEMENTS: Mapping[Target, Placement] = {
    "onnxruntime": "onnxruntime", "openvino": "onednn", "inductor": "onednn", "executorch": "xnnpack", "tensorrt": "symmetric",
}  # fmt: skip
"""Maps a target to its placement, which says what tensors become integers: a profile in `quantizing.placement`."""


Runtime = Literal["onnxruntime", "openvino", "openvino-bf16", "torch", "inductor", "executorch"]
"""Runtime of a program: ONNX Runtime, OpenVINO in float32 or in bfloat16, torch's operators, code that AOTInductor compiled, or ExecuTorch."""
FastestRuntime = Literal["fastest"]
"""Choice in place of a runtime: the fastest on this machine."""


@dataclass(frozen=True, kw_only=True)
class Int8(Checked):
    """Settings of calibrated quantization: activations and weights in 8 bits.

    Weights are signed, with a scale for each output channel. Activations have one scale for each tensor; they are unsigned, but for the
    targets executorch and tensorrt.
    """

    needs_calibration: ClassVar[bool] = True
    observer: Observer = "histogram"
    """Range of an activation: its extremes (minmax), or that of least rounding error by a histogram."""
    calibration_batches: PositiveInt = 16
    """Most calibration batches that are run; the data may hold fewer."""
    reduce_range: bool | None = None
    """Weights of 7 bits: x86 processors without VNNI (most before 2019) overflow in sums of 8-bit products. None: if this one does, for targets on x86."""
    skip: tuple[str, ...] = ()
    """Modules kept in float32, by name: `head` keeps `head` and everything inside it."""
    min_sqnr_db: FiniteFloat = 15.0
    """Refuse a model one of whose quantized outputs has a smaller signal-to-noise ratio than this, decibels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observer not in ("minmax", "histogram"):
            raise ValueError(f"observer must be 'minmax' or 'histogram', got {self.observer!r}")


@dataclass(frozen=True, kw_only=True)
class DynamicInt8(Checked):
    """Settings of dynamic quantization: 8-bit linear layers without calibration.

    Each call takes the range of its own activations. One range serves a whole batch, so a sample's result depends on
    those beside it. Convolutions stay in float.
    """

    needs_calibration: ClassVar[bool] = False
    reduce_range: bool | None = None
    """Weights of 7 bits, for x86 processors without VNNI, as in Int8."""
    skip: tuple[str, ...] = ()
    """Modules kept in float32, by name: `head` keeps `head` and everything inside it."""
    min_sqnr_db: FiniteFloat = 15.0
    """Refuse a model one of whose quantized outputs has a smaller signal-to-noise ratio than this, decibels."""


def _check_group_size(size: int) -> None:
    if size not in WeightOnly.GROUP_SIZES:
        sizes = ", ".join(map(str, WeightOnly.GROUP_SIZES))
        raise ValueError(f"group_size must be one of {sizes}, which the kernels have, got {size!r}")


@dataclass(frozen=True, kw_only=True)
class WeightOnly(Checked):
    """Settings of weights of linear layers in 8 or 4 bits, a scale for each group of inputs.

    For models whose time goes into reading weights, such as language models that generate. With 4 bits activations stay in float32; the
    kernel for 8 bits rounds them to 8 bits, group by group, since the one that does not is slower than float32.
    """

    needs_calibration: ClassVar[bool] = False
    in_place_of: ClassVar[Mapping[str, str]] = {
        "int4": "torchao's int4 needs a package for NVIDIA's GPUs; take weightonly with bits = 4 (--recipe weightonly --recipe.bits 4), or int8",
    }
    """Kinds that are refused in a recipe, with the reason and what to take."""
    GROUP_SIZES: ClassVar[tuple[int, ...]] = (16, 32, 64, 128, 256)
    bits: int = 8
    """Bits of a weight, 8 or 4."""
    group_size: int = 32
    """Inputs that share a scale: 16, 32, 64, 128 or 256. More are faster and smaller, fewer are closer to the model."""
    skip: tuple[str, ...] = ()
    """Modules kept in float32, by name: `head` keeps `head` and everything inside it."""
    min_sqnr_db: FiniteFloat = 15.0
    """Refuse a model one of whose quantized outputs has a smaller signal-to-noise ratio than this, decibels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, for which there are kernels, got {self.bits!r}")
        _check_group_size(self.group_size)


@dataclass(frozen=True, kw_only=True)
class LowBit(Checked):
    """Settings of weights of 4 bits with activations of 8 (W4A8) or of 4 (W4A4).

    W4A8 multiplies integers in linear layers, without calibration. W4A4 also rounds convolutions, needs calibration, and is for
    simulation and training: no processor has kernels for it, so `export` refuses it.
    """

    activation_bits: int = 8
    """Bits of an activation, 8 or 4."""
    group_size: int = 32
    """Inputs that share a scale of their weights and activations in W4A8, as in WeightOnly; W4A4 has one scale per output."""
    calibration_batches: PositiveInt = 16
    """Most calibration batches that are run for W4A4; the data may hold fewer."""
    skip: tuple[str, ...] = ()
    """Modules kept in float32, by name: `head` keeps `head` and everything inside it."""
    min_sqnr_db: FiniteFloat = 5.0
    """Refuse a model one of whose quantized outputs has a smaller signal-to-noise ratio than this, decibels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_bits not in (4, 8):
            raise ValueError(f"activation_bits must be 8 (W4A8) or 4 (W4A4), got {self.activation_bits!r}")
        _check_group_size(self.group_size)

    @property
    def needs_calibration(self) -> bool:
        """Return True for W4A4, whose activations have fixed ranges."""
        return self.activation_bits == 4


def calibration_batches(recipe: Quantization | None) -> int:
    """Return the number of batches to read: to calibrate on, or 1 to compare on."""
    return recipe.calibration_batches if recipe is not None and is_calibrated(recipe) else 1


def is_calibrated(recipe: Quantization) -> TypeGuard[Int8 | LowBit]:
    """Return True for a recipe that takes ranges of activations from calibration batches."""
    return recipe.needs_calibration


@dataclass(frozen=True, kw_only=True)
class BFloat16(Checked):
    """Settings of linear layers and convolutions in bfloat16: half the file, and no calibration.

    OpenVINO runs the program, on processors with bfloat16 instructions.
    """

    needs_calibration: ClassVar[bool] = False
    in_place_of: ClassVar[Mapping[str, str]] = {
        "float8": "float8 has no kernels for CPUs here, where torchao's took 12 times as long as float32; take bfloat16, or int8",
    }
    """Kinds that are refused in a recipe, with the reason and what to take."""
    min_sqnr_db: FiniteFloat = 25.0
    """Refuse a model one of whose outputs has a smaller signal-to-noise ratio than this, decibels."""


Quantization = Int8 | DynamicInt8 | WeightOnly | BFloat16 | LowBit


_CUTS: Mapping[str, str] = {
    "cp": "cuts sequences, whose activations would be rounded in other ranges than the program's",
    "tp": "cuts matrices, whose outputs and groups share a scale",
    "pp": "cuts the model into stages, and a program is made of all layers",
    "ep": "cuts stacks of experts",
}
"""Maps a field of a plan that cuts a tensor with one range or scale to the reason why that is refused."""


def check_plan(recipe: Quantization, plan: Plan) -> None:
    """Raise ValueError for a plan under which training rounds otherwise than ``recipe``.

    A recipe without calibration may have data-parallel replicas and shards, since each layer is gathered whole before it rounds. ``cli.schema`` calls
    this for a recipe with [qat], and `QuantizationAwareTraining` for a strategy with a plan.
    """
    if recipe.needs_calibration:
        raise ValueError(
            f"a [plan] gathers blocks one by one, and [qat] kind = {kind_of(type(recipe))!r} trains one graph that reads the weights of all layers: leave "
            'out one of the two; trainer.strategy = "ddp" or "fsdp" trains with rounding on several devices'
        )
    for name, reason in _CUTS.items():
        if getattr(plan, name) > 1:
            raise ValueError(
                f"[plan] {name} = {getattr(plan, name)} {reason}, and [qat] rounds whole layers: take dp_shard and dp_replicate alone, or leave [qat] out"
            )
    if plan.float8 != "none":
        raise ValueError(
            f"[plan] float8 = {plan.float8!r} replaces the layers that [qat] rounds: leave out one of the two"
        )
