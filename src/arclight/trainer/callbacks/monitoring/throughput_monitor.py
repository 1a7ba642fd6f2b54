"""Log the throughput of every stage, under Lightning's name, arguments and keys.

Users pass it as a callback; ``trainer.throughput`` computes the rates. Loggers and plots of existing projects rely on the keys: they
stay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback
from arclight.trainer.throughput import Throughput, compute_dtype, get_available_flops

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


@dataclass
class _StageCount:
    """Clock and counts of one stage."""

    started: float = 0.0
    """Start of the stage's clock (``time.perf_counter``), shifted forward by every pause."""
    batches: int = 0
    samples: int = 0
    lengths: int = 0
    evaluation_batches: int = 0
    """Batches of the current evaluation."""
    total_batches: int = 0
    """Batches of all evaluations."""


class ThroughputMonitor(Callback):
    """Log ``train/device/samples_per_sec`` and related rates of every stage.

    The rates are those of :class:`~arclight.trainer.throughput.Throughput`.

    ``batch_size_fn`` counts a batch's samples, ``length_fn`` its items (tokens, say); ``options`` are Throughput's:
    window_size, separator, ... If the module has an attribute ``flops_per_batch`` (``measure_flops`` counts it), floating-point
    operations per second and, for a known GPU, the share of its peak (MFU) are logged too. Rates appear once the
    window is full. Time in validation inside a fit does not lower the training's rates.

    The callback synchronises with a CUDA device after every batch, which costs speed.
    """

    def __init__(
        self, batch_size_fn: Callable[[Any], int], length_fn: Callable[[Any], int] | None = None, **options: Any
    ) -> None:
        self.batch_size_fn, self.length_fn, self.kwargs = batch_size_fn, length_fn, options
        self.available_flops: int | None = None
        self._throughputs: dict[str, Throughput] = {}
        self._counts: dict[str, _StageCount] = {}
        self._steps = 0
        self._has_flops: bool | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        dtype = compute_dtype(trainer.precision_plugin)
        self.available_flops = get_available_flops(trainer.strategy.root_device, dtype)

    # -- counting --------------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        if trainer.stage not in self._counts:
            self._throughputs[trainer.stage] = Throughput(self.available_flops, trainer.world_size, **self.kwargs)
            self._counts[trainer.stage] = _StageCount()
        now, count = time.perf_counter(), self._counts[trainer.stage]
        if trainer.state.fn == "fit":  # its counts start again
            self._throughputs[trainer.stage].reset()
            count = _StageCount(total_batches=count.total_batches)
        elif times := self._throughputs[trainer.stage]._time:  # an evaluation continues the clock of the one before
            now -= times[-1]
        count.started, count.evaluation_batches = now, 0
        self._counts[trainer.stage] = count

    @torch.inference_mode()  # the functions may compute with tensors that require gradients
    def _update(self, trainer: Trainer, module: Module, batch: Any) -> None:
        count = self._counts[trainer.stage]
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - count.started
        if self._has_flops is None:
            self._has_flops = hasattr(module, "flops_per_batch")
            if not self._has_flops:
                rank_zero_warn(
                    "When using the `ThroughputMonitor`, you need to define a `flops_per_batch` attribute or property in "
                    f"{type(module).__name__} to compute the FLOPs."
                )
        count.batches += 1
        count.samples += self.batch_size_fn(batch)
        count.lengths += self.length_fn(batch) if self.length_fn is not None else 0
        flops: Any = module.flops_per_batch if self._has_flops else None
        self._throughputs[trainer.stage].update(
            time=elapsed,
            batches=count.batches,
            samples=count.samples,
            lengths=count.lengths if self.length_fn is not None else None,
            flops=flops,
        )

    def _log(self, trainer: Trainer, step: int, **more: Any) -> None:
        throughput = self._throughputs[trainer.stage]
        prefix = f"{trainer.stage}{throughput.separator}"
        metrics = {f"{prefix}{name}": value for name, value in throughput.compute().items()} | more
        for logger in trainer.loggers:
            logger.log_metrics(metrics=metrics, step=step)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._steps = trainer.global_step
        self._start(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        self._update(trainer, pl_module, batch)
        stepped, self._steps = self._steps != trainer.global_step, trainer.global_step
        every = trainer.log_every_n_steps or sys.maxsize  # 0: never
        if stepped and self._steps % every == 0:  # whole windows only, with the optimizer's time
            self._log(trainer, trainer.row_of_step(self._steps), epoch=trainer.current_epoch)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        train, validation = self._throughputs["train"]._time, self._throughputs["validate"]._time
        done = self._counts["validate"].started + (validation[-1] if validation else 0.0)
        # the clock of training pauses during validation
        self._counts["train"].started = done - (train[-1] if train else 0.0)

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._start(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._start(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._start(trainer)

    def _evaluated(self, trainer: Trainer, module: Module, batch: Any) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        self._update(trainer, module, batch)
        count = self._counts[trainer.stage]
        count.evaluation_batches += 1
        count.total_batches += 1
        if count.evaluation_batches % (trainer.log_every_n_steps or sys.maxsize) == 0:
            self._log(trainer, count.total_batches)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, pl_module, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, pl_module, batch)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, pl_module, batch)
