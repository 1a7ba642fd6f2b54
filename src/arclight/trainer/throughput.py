"""Measure throughput over a moving window: batches, samples, items and FLOPs per second.

The callback `ThroughputMonitor` (``callbacks.monitoring``) measures with `Throughput`; users of Fabric call the `ThroughputMonitor` here.
Language models take peaks and types (`get_available_flops`, `compute_dtype`) for their own rates. Names of metrics are Lightning's. A new
GPU is a row of `_PEAKS`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from arclight.fabric.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from arclight.fabric.precision import Precision
    from arclight.trainer.fabric.fabric import Fabric


_TYPES: tuple[torch.dtype | str, ...] = (
    torch.float64,
    torch.float32,
    "tfloat32",
    torch.bfloat16,
    torch.float16,
    torch.int8,
    "int4",
)

_PEAKS: dict[str, tuple[float | None, ...]] = {
    # Dense TFLOP/s (TOP/s) in the order of _TYPES, from the makers' data sheets; None: the chip does not have it.
    # Blackwell, Hopper
    "b200": (37, 75, 1100, 2250, 2250, 4500, None),
    "h200 nvl": (30, 60, 420, 840, 840, 1680, None),
    "h200": (34, 67, 494.5, 989.5, 989.5, 1979, None),
    "h100 nvl": (30, 60, 417.5, 835.5, 835.5, 1670.5, None),
    "h100 pcie": (25.6, 51.2, 378, 756, 756, 1513, None),
    "h100": (34, 67, 494.5, 989.5, 989.5, 1979, None),
    # Ada
    "rtx 4090": (None, 82.6, 82.6, 82.6, 82.6, 660.6, 1321.2),
    "rtx 4080 super": (None, 52.2, 52.2, 52.2, 52.2, 417.6, 835.2),
    "rtx 4080": (None, 48.7, 48.7, 48.7, 48.7, 389.9, 779.8),
    "l40s": (None, 91.6, 183, 362, 362, 733, None),
    "l40": (None, 90.5, 90.5, 181, 181, 362, 724),
    "l4": (None, 30.3, 60, 121, 121, 242, 484),
    # Ampere
    "a100": (9.7, 19.5, 156, 312, 312, 624, None),
    "a6000": (None, 38.7, 77.4, 38.7, 38.7, 309.7, 619.3),
    "a40": (None, 37.4, 74.8, 149.7, 149.7, 299.3, 598.7),
    "a10g": (None, 31.2, 62.5, 125, 125, 250, 500),
    "a10": (None, 31.2, 62.5, 125, 125, 250, 500),
    "rtx 3090 ti": (None, 40, 40, 40, 40, 320, 640),
    "rtx 3090": (None, 35.6, 35.6, 35.6, 35.6, 284, 568),
    "rtx 3080 ti": (None, 34.1, 34.1, 34.1, 34.1, 272.8, 546.6),
    "rtx 3080": (None, 29.8, 29.8, 29.8, 29.8, 238, 476),
    "rtx 3070": (None, 20.3, 20.3, 20.3, 20.3, 162.6, 325.2),
    # Turing
    "t4": (None, 8.1, None, None, 65, 130, 260),
    "quadro rtx 5000": (None, 11.2, None, None, 89.2, None, None),
    "rtx 2080 super": (None, 11.2, None, None, 22.3, 178.4, 356.8),
    "rtx 2080 ti": (None, 14.2, None, None, 28.5, 227.7, 455.4),
    "rtx 2080": (None, 10.6, None, None, 21.2, 169.6, 339.1),
    "rtx 2070 super": (None, 9.1, None, None, 18.1, 145, 290),
    "titan rtx": (None, 16.3, None, None, 32.6, 261, 522),
    # Volta
    "v100s": (8.2, 16.4, None, None, 130, None, None),
    "v100 pcie": (7, 14, None, None, 112, None, None),
    "v100": (7.8, 15.7, None, None, 125, None, None),
}


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the dense peak FLOP/s of ``device`` in ``dtype``, or None.

    None, with a warning, for a GPU that is not known here.

    float32 means TF32 where ``torch.get_float32_matmul_precision()`` allows it and the chip has it. Other kinds of
    device have no published number: None.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    chip = _chip(name)
    if chip is None:
        rank_zero_warn(f"FLOPs not found for {name!r}; the share of its peak (MFU) is not reported")
        return None
    peaks = dict(zip(_TYPES, _PEAKS[chip], strict=True))
    if dtype is torch.float32 and peaks["tfloat32"] and torch.get_float32_matmul_precision() != "highest":
        dtype = "tfloat32"
    peak = peaks.get(dtype)
    if peak is None:
        rank_zero_warn(f"{name!r} does not support {dtype}")
        return None
    return round(peak * 1e12)


def _chip(name: str) -> str | None:
    """Return the row of the table of peaks for a device's name, or None.

    A variant (Ti, Super) that is not in the table is another chip.
    """
    words = re.split(r"[\s_-]+", name.lower())
    words = ["pcie" if word == "hbm2e" else re.sub(r"^(nvl|pcie).*", r"\1", word) for word in words]
    for row in sorted(_PEAKS, key=len, reverse=True):
        if not set(row.split()) <= set(words):
            continue
        other = {word for word in words if word in ("super", "ti")} - set(row.split())
        return None if other else row
    return None


Number = TypeVar("Number", bound=float)


class Throughput:
    """Rates over the newest ``window_size`` updates.

    ``available_flops``: peak of one device, for the model FLOPs utilisation (``device/mfu``); ``using_sparse_model``
    says whether the model uses structured sparsity, whose peak is ``sparse_cuda_acceleration_factor`` times that.
    ``world_size``: devices; with more than one, rates of all together are reported beside ``device/...`` ones.
    ``separator`` stands between ``device`` and the rate's name.

    Operations and items may include padding; if batches are padded, samples per second is the honest number.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
        using_sparse_model: bool | None = None,
        sparse_cuda_acceleration_factor: float = 2.0,
    ) -> None:
        assert sparse_cuda_acceleration_factor >= 1.0, "sparse acceleration factor cannot reduce the peak"
        assert world_size > 0, f"world_size must be at least 1, got {world_size}"
        assert window_size > 1, f"a rate needs a window of at least 2 updates, got {window_size}"
        if available_flops is not None and using_sparse_model is None:
            rank_zero_warn(
                "MFU assumes dense model FLOPs; say using_sparse_model=True for a model with structured sparsity, or False"
            )
        if available_flops is not None and using_sparse_model:
            available_flops *= sparse_cuda_acceleration_factor
        self.available_flops, self.world_size, self.separator = available_flops, world_size, separator
        self._time: _MonotonicWindow[float] = _MonotonicWindow(window_size)
        self._batches: _MonotonicWindow[int] = _MonotonicWindow(window_size)
        self._samples: _MonotonicWindow[int] = _MonotonicWindow(window_size)
        self._lengths: _MonotonicWindow[int] = _MonotonicWindow(window_size)
        self._flops: deque[int] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Record the counts at a point in time.

        ``time``: seconds since the start; ``batches``, ``samples``, ``lengths``: how many this device has seen since
        then; ``flops``: operations of this device since the last update. All but ``flops`` must grow with every call,
        else ValueError.
        """
        self._time.append(time)
        if samples < batches:
            raise ValueError(f"Expected samples ({samples}) to be greater or equal than batches ({batches})")
        self._batches.append(batches)
        self._samples.append(samples)
        if lengths is not None:
            if lengths < samples:
                raise ValueError(f"Expected lengths ({lengths}) to be greater or equal than samples ({samples})")
            self._lengths.append(lengths)
            if len(self._lengths) != len(self._samples):
                raise RuntimeError(
                    f"lengths were given {len(self._lengths)} times, yet there must be the same number of samples "
                    f"({len(self._samples)}): give them with every update or never"
                )
        if flops is not None:
            self._flops.append(flops * self.world_size)

    def compute(self) -> dict[str, float]:
        """Compute totals, and rates once the window is full."""
        metrics: dict[str, float] = {
            "time": self._time[-1],
            "batches": self._batches[-1],
            "samples": self._samples[-1],
        }
        if self._lengths:
            metrics["lengths"] = self._lengths[-1]
        seconds = self._time[-1] - self._time[0]
        counts = {"batches": self._batches, "samples": self._samples, "items": self._lengths}
        for name, window in counts.items():
            if len(window) == window.maxlen:
                self._add_rate(metrics, f"{name}_per_sec", (window[-1] - window[0]) / seconds)
        if len(self._flops) == self._flops.maxlen:
            # the first entry's operations were done before the window's first moment
            rate = (sum(self._flops) - self._flops[0]) / seconds / self.world_size
            self._add_rate(metrics, "flops_per_sec", rate)
            if self.available_flops:
                metrics[f"device{self.separator}mfu"] = rate / self.available_flops
        return metrics

    def _add_rate(self, metrics: dict[str, float], name: str, of_device: float) -> None:
        metrics[f"device{self.separator}{name}"] = of_device
        if self.world_size > 1:
            metrics[name] = of_device * self.world_size

    def reset(self) -> None:
        """Reset all windows."""
        for window in (self._time, self._batches, self._samples, self._lengths, self._flops):
            window.clear()


class ThroughputMonitor(Throughput):
    """Throughput of a :class:`~arclight.Fabric` loop, logged to the Fabric's loggers.

    It is a :class:`Throughput` that knows the devices.

    Rank 0 counts; elsewhere every method does nothing. ``options``: those of :class:`Throughput`.
    """

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        available = get_available_flops(fabric.device, compute_dtype(fabric.strategy.precision))
        super().__init__(available_flops=available, world_size=fabric.world_size, **options)
        self._fabric = fabric
        self.step = -1
        """Number of the newest row."""

    def update(self, **numbers: Any) -> None:
        if self._fabric.is_global_zero:
            super().update(**numbers)

    def compute(self) -> dict[str, float]:
        return super().compute() if self._fabric.is_global_zero else {}

    def compute_and_log(self, step: int | None = None) -> dict[str, float]:
        """Compute the throughput and log it as row ``step`` (default: one more than the last)."""
        self.step = self.step + 1 if step is None else step
        metrics = self.compute()
        if metrics:
            self._fabric.log_dict(metrics=metrics, step=self.step)
        return metrics


class _MonotonicWindow(list[Number]):
    """Newest ``maxlen`` of strictly growing numbers; a smaller one raises ValueError."""

    def __init__(self, maxlen: int) -> None:
        super().__init__()
        self.maxlen = maxlen

    @property
    def last(self) -> Number | None:
        return self[-1] if self else None

    def append(self, value: Number) -> None:
        if self and value <= self[-1]:
            raise ValueError(f"Expected the value to increase, last: {self[-1]}, current: {value}")
        super().append(value)
        if len(self) > self.maxlen:
            del self[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise NotImplementedError("a window is only appended to; __setitem__ could break its order")


def measure_flops(
    model: torch.nn.Module,
    forward_fn: Callable[[], torch.Tensor],
    loss_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> int:
    """Count the FLOPs of ``forward_fn()``, and with ``loss_fn`` of loss and backward too.

    Model and inputs may live on the meta device: nothing is then computed, only counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the type that matrix products are done in under ``precision``."""
    dtype: torch.dtype = getattr(precision, "compute_dtype", precision.dtype)
    return dtype
