"""Choose the ranges in which tensors are quantized.

`placement` and `qat` hand these observers to PT2E. Calibration: `LeastErrorObserver` for activations (recipe field observer = histogram); torchao's
own take minimum and maximum, for observer = minmax, gates and weights. Training: `MovingRange` for activations, `LeastErrorMovingRange` under 8 bits;
`PerChannelWeightRange` for weights, `PerChannelLeastErrorRange` under 7. The buffers low, high and batches are in checkpoints: they must stay.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from arclight.deploy.errors import QuantizeError
from arclight.deploy.quantizing import pt2e

Reader = Literal["any", "silu"]
"""Operator that reads the tensor: any, or SiLU computed as x * sigmoid(x) on rounded values."""

SAMPLES = 16384
"""Most values of a batch that count; of a larger one so many are sampled."""
BINS = 2048
"""Bins of the histogram of a `LeastErrorObserver`."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Step of the sampling of `LeastErrorMovingRange`: its multiples modulo 1 are evenly spread, and have no period, such as an image's width."""
POWER = 2.4
"""Errors count by this power: large activations matter more than their share of the squared error (about 1 dB here)."""


class LeastErrorObserver(pt2e.ObserverBase):
    """Choose the range of least rounding error, as the operator that reads the tensor sees it.

    Few large values otherwise take most of the levels. Before a SiLU the negative side hardly matters, since silu(x)
    tends to 0 there. On a trained YOLOv5n both together leave 2.2 dB less noise in the objectness than the histogram
    observer of torchao. It keeps a histogram of random samples of the batches, drawn with a fixed seed.
    """

    def __init__(self, *, dtype: torch.dtype, eps: float, reader: Reader = "any", **spec: Any) -> None:
        super().__init__(dtype=dtype)
        self.qscheme, self.quant_min, self.quant_max = spec["qscheme"], spec["quant_min"], spec["quant_max"]
        self.eps, self.reader = eps, reader
        self._low = self._high = 0.0  # zero is always in the range: padding must be exact
        self._counts = torch.zeros(BINS)
        self._generator = torch.Generator().manual_seed(0)
        self._range: tuple[float, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        values = x.detach().flatten()
        low, high = min(self._low, float(values.min())), max(self._high, float(values.max()))
        if (low, high) != (self._low, self._high):
            self._counts = _rebinned(self._counts, (self._low, self._high), (low, high))
            self._low, self._high = low, high
        if len(values) > SAMPLES:  # at random: values at regular distances could all come from one column of the image
            values = values[torch.randint(len(values), (SAMPLES,), generator=self._generator)]
        if high > low:
            self._counts += torch.histc(values, BINS, low, high)
        self._range = None
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scale and zero point, one each for the whole tensor."""
        symmetric = self.qscheme == torch.per_tensor_symmetric
        steps = self.quant_max if symmetric else self.quant_max - self.quant_min
        if self._range is None:
            held = (
                _magnitudes(self._counts, self._low, self._high) if symmetric else (self._counts, self._low, self._high)
            )
            self._range = least_error_range(*held, self.reader, steps)
        low, high = self._range
        scale = max((high - low) / steps, self.eps)
        zero_point = 0 if symmetric else min(max(self.quant_min + round(-low / scale), self.quant_min), self.quant_max)
        return torch.tensor([scale], dtype=torch.float32), torch.tensor([zero_point], dtype=torch.int64)


def least_error_range(
    counts: Tensor, low: float, high: float, reader: Reader = "any", steps: int = 255
) -> tuple[float, float]:  # fmt: skip
    """Return the subrange of [low, high] with the least error of the output of ``reader``.

    It includes 0, and has ``steps`` + 1 levels.
    ``counts``: how many values lie in each of as many equal parts of [low, high].
    """
    if high - low <= 0:
        return low, high
    values = _centers(len(counts), low, high)
    exact = F.silu(values) if reader == "silu" else values
    shortest = 0.02 if reader == "silu" else 0.5  # shares of the negative side that are tried; of the positive 0.5
    bottoms = torch.linspace(shortest, 1, 32) * low if low < 0 else torch.zeros(1)
    tops = torch.linspace(0.5, 1, 26) * high if high > 0 else torch.zeros(1)
    best, least = (low, high), float("inf")
    for bottom in bottoms.tolist():
        rounded = _rounded(values, bottom, tops[:, None], steps)
        errors = ((_read(rounded, reader, steps) - exact).abs().pow(POWER) * counts).sum(1)
        error, at = errors.min(0)
        if float(error) < least:
            best, least = (bottom, float(tops[at])), float(error)
    return best


def _centers(bins: int, low: float | Tensor, high: float | Tensor) -> Tensor:
    device = low.device if isinstance(low, Tensor) else None
    return low + (torch.arange(bins, device=device) + 0.5) * ((high - low) / bins)


def _magnitudes(counts: Tensor, low: float, high: float) -> tuple[Tensor, float, float]:
    """Return the histogram of absolute values, and its range.

    A range around 0 is chosen from it.
    """
    largest = max(-low, high)
    at = (_centers(len(counts), low, high).abs() / max(largest, torch.finfo(torch.float32).tiny) * len(counts)).long()
    return torch.zeros_like(counts).index_add_(0, at.clamp(max=len(counts) - 1), counts), 0.0, largest


def _rebinned(counts: Tensor, old: tuple[float, float], new: tuple[float, float]) -> Tensor:
    """Return ``counts`` over the range ``old``, as counts over the wider range ``new``."""
    at = (_centers(len(counts), *old) - new[0]) / (new[1] - new[0]) * len(counts)
    return torch.zeros_like(counts).index_add_(0, at.long().clamp(0, len(counts) - 1), counts)


def _rounded(values: Tensor, low: float | Tensor, high: Tensor, steps: int) -> Tensor:
    """Round ``values`` to ``steps`` + 1 levels from ``low`` to each ``high``, a row each."""
    scale = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / steps
    zero_point = (-low / scale).round()
    return ((values / scale).round() + zero_point).clamp(0, steps).sub(zero_point) * scale


def _read(rounded: Tensor, reader: Reader, steps: int) -> Tensor:
    """Return what ``reader`` computes of rounded values, with a gate of ``steps`` + 1 levels."""
    return rounded * (torch.sigmoid(rounded) * steps).round() / steps if reader == "silu" else rounded


class MovingRange(pt2e.ObserverBase):
    """Fake-quantize an activation in the moving average of its ranges, which training updates.

    It observes in training mode while ``observing``; its state is in buffers of fixed shape, so a checkpoint has all of
    it. Values that are not finite, as in steps that gradient scaling skips, do not count. While ``synchronized``, a batch is that
    of all ranks, each of which has to call it as often.
    """

    RATE = 0.01
    """Weight of a batch in the average; the first batch sets it."""
    low: Tensor
    high: Tensor
    batches: Tensor

    def __init__(self, *, dtype: torch.dtype, eps: float, **spec: Any) -> None:
        super().__init__(dtype=dtype)
        self.qscheme, self.quant_min, self.quant_max = spec["qscheme"], spec["quant_min"], spec["quant_max"]
        self.eps = eps
        self.observing = self.rounding = True
        self.synchronized = False
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.observing:
            self.observe(x.detach())
        if not self.rounding:
            return x
        scale, zero_point = self.calculate_qparams()
        rounded: Tensor = torch.fake_quantize_per_tensor_affine(
            x.float(), scale, zero_point.int(), self.quant_min, self.quant_max
        )
        return rounded.to(x.dtype)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Average the range of one batch in, without waiting for the device."""
        low, high = (
            (value.float() for value in x.aminmax()) if x.numel() else (self.low + torch.inf, self.high - torch.inf)
        )
        if x.numel():
            low, high = low.clamp(max=0), high.clamp(min=0)  # padding must be exact
        if self.synchronized:
            # the largest of NaN and a number is not defined; what is infinite stays so, and then counts on no rank
            bounds = torch.stack([-low, high]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
            low, high = -bounds[0], bounds[1]
        counts = low.isfinite() & high.isfinite()
        low, high = self._range_between(x, low, high)
        rate = torch.where(self.batches == 0, 1.0, self.RATE)
        self.low.copy_(torch.where(counts, self.low + rate * (low - self.low), self.low))
        self.high.copy_(torch.where(counts, self.high + rate * (high - self.high), self.high))
        self.batches += counts

    def _range_between(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range to average in, for a batch whose values lie in [low, high]."""
        return low, high

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scale and zero point, one each for the whole tensor."""
        if self.qscheme == torch.per_tensor_symmetric:
            scale = (torch.maximum(-self.low, self.high) / self.quant_max).clamp(min=self.eps)
            return scale.reshape(1), torch.zeros_like(scale, dtype=torch.int64).reshape(1)
        scale = ((self.high - self.low) / (self.quant_max - self.quant_min)).clamp(min=self.eps)
        zero_point = (self.quant_min - (self.low / scale).round()).clamp(self.quant_min, self.quant_max)
        return scale.reshape(1), zero_point.long().reshape(1)


class LeastErrorMovingRange(MovingRange):
    """Fake quantization of activations of few bits, in the least-error range of the batch.

    With 16 levels the extremes of a batch would leave few of them to most of its values. The error is that of what ``reader`` computes, as in
    `LeastErrorObserver`: before a SiLU, levels far below 0 would all become nearly 0.
    """

    RATE = 0.05
    CANDIDATES = 16
    HISTOGRAM_BINS = 256

    def __init__(self, *, reader: Reader = "any", **spec: Any) -> None:
        super().__init__(**spec)
        self.reader = reader

    def _range_between(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the range by a histogram of values at quasi-random places.

        It is of all ranks together while ``synchronized``.
        """
        values = x.flatten()
        if len(values) > SAMPLES:
            places = torch.arange(SAMPLES, device=x.device, dtype=torch.float64) * GOLDEN_RATIO % 1 * len(values)
            values = values[places.long()]
        values = values.float()
        width = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / self.HISTOGRAM_BINS
        bins = ((values - low) / width).nan_to_num().long().clamp(0, self.HISTOGRAM_BINS - 1)
        counts = torch.zeros(self.HISTOGRAM_BINS, device=x.device).index_add_(0, bins, torch.ones_like(values))
        if self.synchronized:
            dist.all_reduce(counts)
        centers = _centers(self.HISTOGRAM_BINS, low, high)
        of_high = torch.linspace(0.3, 1, self.CANDIDATES, device=x.device)
        of_low = torch.linspace(0.05, 1, self.CANDIDATES, device=x.device) if self.reader == "silu" else of_high
        lows, highs = (one.flatten() for one in torch.meshgrid(low * of_low, high * of_high, indexing="ij"))
        steps = self.quant_max - self.quant_min
        rounded = _read(_rounded(centers, lows[:, None], highs[:, None], steps), self.reader, steps)
        exact = F.silu(centers) if self.reader == "silu" else centers
        best = ((rounded - exact).abs().pow(POWER) * counts).sum(1).argmin()
        return lows.gather(0, best[None])[0], highs.gather(0, best[None])[
            0
        ]  # no index, which would wait for the device


class PerChannelWeightRange(pt2e.ObserverBase):
    """Fake quantization of a weight in its present range, as conversion rounds it."""

    scale: Tensor

    def __init__(self, *, dtype: torch.dtype, eps: float, **spec: Any) -> None:
        super().__init__(dtype=dtype)
        self.qscheme, self.quant_min, self.quant_max = spec["qscheme"], spec["quant_min"], spec["quant_max"]
        self.ch_axis, self.eps = spec["ch_axis"], eps
        self.rounding = True
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        if weight.dtype in (torch.bfloat16, torch.float16):
            raise QuantizeError(
                f"weights to be rounded must be float32, these are {weight.dtype}: train with bf16-mixed"
            )
        with torch.no_grad():
            self.scale = self._scale_of(weight, [d for d in range(weight.dim()) if d != self.ch_axis])
        if not self.rounding:
            return weight
        zero_points = torch.zeros_like(self.scale, dtype=torch.int32)
        rounded: Tensor = torch.fake_quantize_per_channel_affine(
            weight, self.scale, zero_points, self.ch_axis, self.quant_min, self.quant_max
        )
        return rounded

    def _scale_of(self, weight: Tensor, others: list[int]) -> Tensor:
        """Return the scale of each channel; ``others``: the dimensions that are not of channels."""
        return (weight.abs().amax(others) / self.quant_max).clamp(min=self.eps)  # type: ignore[no-any-return]

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scale and zero point (0) of each channel."""
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int64)


class PerChannelLeastErrorRange(PerChannelWeightRange):
    """Fake quantization of weights of few bits, in the range of least squared error.

    The range may cut a weight's largest values.
    """

    SHARES = tuple(1 - step / 20 for step in range(13))
    """Shares of the largest value that are tried as the end of the range."""

    def _scale_of(self, weight: Tensor, others: list[int]) -> Tensor:
        largest = super()._scale_of(weight, others)
        shape = [-1 if dim == self.ch_axis else 1 for dim in range(weight.dim())]
        best, least = largest, torch.full_like(largest, torch.inf)
        for share in self.SHARES:
            scale = (share * largest).clamp(min=self.eps)
            steps = scale.view(shape)
            rounded = (weight / steps).round().clamp(self.quant_min, self.quant_max) * steps
            error = (rounded - weight).pow(2).sum(others)
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
        return best


class PerChannelBiasRange(pt2e.ObserverBase):
    """Observer of biases: int32 in units of (activation scale x weight scale).

    That is what an integer kernel adds to its sums.
    """

    def __init__(self, scale: Tensor) -> None:
        super().__init__(dtype=torch.int32)
        self.qscheme, self.ch_axis = torch.per_channel_symmetric, 0
        self.quant_min, self.quant_max = -(2**31), 2**31 - 1
        self.scale = scale

    def forward(self, bias: Tensor) -> Tensor:
        return bias

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scale and zero point (0) of each channel."""
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int64)
