"""Log memory and load of the device.

Users pass it as a callback; name, arguments and keys are Lightning's. Which statistics there are is up to the accelerator
(`Accelerator.get_device_stats`).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from arclight._installed import pip_install
from arclight.fabric.accelerators.devices import get_cpu_stats
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import MissingExtraError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

_PSUTIL_AVAILABLE = find_spec("psutil") is not None


class DeviceStatsMonitor(Callback):
    """Log the device's statistics before and after batches of training, validation and test.

    Every ``log_every_n_steps``-th step or evaluation batch, on rank 0. Names are ``DeviceStatsMonitor.<hook>/<statistic>``; the
    accelerator decides which there are (``torch.cuda.memory_stats`` on CUDA).
    ``cpu_stats``: the machine's load (needs psutil) with any device (True), with none (False), or if the CPU is the device (None).
    ``filter_keys``: only these statistics.

    Raises MisconfigurationError in a fit without a logger.
    """

    def __init__(self, cpu_stats: bool | None = None, filter_keys: set[str] | None = None) -> None:
        self._cpu_stats, self._filter_keys = cpu_stats, filter_keys

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationError("Cannot use `DeviceStatsMonitor` callback with `Trainer(logger=False)`.")
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if not _PSUTIL_AVAILABLE and (self._cpu_stats or (self._cpu_stats is None and on_cpu)):
            raise MissingExtraError(
                f"`DeviceStatsMonitor` cannot log CPU stats as `psutil` is not installed: {pip_install('track')}"
            )
        if self._filter_keys is not None and (unknown := self._filter_keys - self._stats(trainer).keys()):
            rank_zero_warn(
                "`DeviceStatsMonitor` filter_keys contains keys not found in device stats and will be ignored: "
                f"{sorted(unknown)}"
            )

    def _stats(self, trainer: Trainer) -> dict[str, Any]:
        device = trainer.strategy.root_device
        if device.type == "cpu" and self._cpu_stats is False:
            return {}
        stats = trainer.accelerator.get_device_stats(device)
        if self._cpu_stats and device.type != "cpu":
            stats |= get_cpu_stats()
        return stats

    def _log(self, trainer: Trainer, hook: str, number: int) -> None:
        """Log one row of device statistics, if batch ``number`` (from 1) is due."""
        if not trainer.is_global_zero or number % (trainer.log_every_n_steps or sys.maxsize):
            return
        stats = self._stats(trainer)
        if self._filter_keys is not None:
            stats = {name: value for name, value in stats.items() if name in self._filter_keys}
        if not stats:
            return
        for logger in trainer.loggers:
            row = _prefix_metric_keys(stats, f"{type(self).__qualname__}.{hook}", logger.group_separator)
            logger.log_metrics(row, step=trainer.row_of_step(number) if trainer.training else trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._log(trainer, "on_train_batch_start", trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log(trainer, "on_train_batch_end", trainer.global_step)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(trainer, "on_validation_batch_start", batch_idx + 1)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(trainer, "on_validation_batch_end", batch_idx + 1)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(trainer, "on_test_batch_start", batch_idx + 1)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(trainer, "on_test_batch_end", batch_idx + 1)


def _prefix_metric_keys(metrics_dict: dict[str, float], prefix: str, separator: str) -> dict[str, float]:
    return {f"{prefix}{separator}{name}": value for name, value in metrics_dict.items()}
