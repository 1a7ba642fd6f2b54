"""How fast training goes: batches, samples, items and floating-point operations per second, over a moving window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.device_peaks import get_available_flops

if TYPE_CHECKING:
    from arclight.fabric.precision import Precision
    from arclight.trainer.fabric import Fabric

Number = TypeVar("Number", bound=float)


class Throughput:
    """Rates over the newest ``window_size`` updates.

    ``available_flops``: peak of one device, for the model FLOPs utilisation (``device/mfu``); ``using_sparse_model``
    says whether the model uses structured sparsity, whose peak is ``sparse_cuda_acceleration_factor`` times that.
    ``world_size``: devices; with more than one, rates of all together are reported beside ``device/...`` ones.
    ``separator`` stands between ``device`` and the rate's name.

    Operations and items may include padding; where batches are padded, samples per second is the honest number.
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
        """Note where things stand.

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
        """Totals, and rates once the window is full."""
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
        """Forget everything."""
        for window in (self._time, self._batches, self._samples, self._lengths, self._flops):
            window.clear()


class ThroughputMonitor(Throughput):
    """A :class:`Throughput` for a loop written with :class:`~arclight.Fabric`: knows its devices and logs to its loggers.

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
        """:meth:`Throughput.compute`, sent to the loggers as row ``step`` (default: one more than the last)."""
        self.step = self.step + 1 if step is None else step
        metrics = self.compute()
        if metrics:
            self._fabric.log_dict(metrics=metrics, step=self.step)
        return metrics


class _MonotonicWindow(list[Number]):
    """The newest ``maxlen`` of numbers that only grow; appending one that does not raises ValueError."""

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
    """Floating-point operations of ``forward_fn()``, and with ``loss_fn`` of the loss and its backward too.

    Model and inputs may live on the meta device: nothing is then computed, only counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


def compute_dtype(precision: Precision) -> torch.dtype:
    """The type that matrix products are done in under ``precision``."""
    dtype: torch.dtype = getattr(precision, "compute_dtype", precision.dtype)
    return dtype
