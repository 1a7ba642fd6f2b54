"""Metrics as TensorBoard event files."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.trainer.loggers.folder_logger import FolderLogger
from arclight.trainer.loggers.logger import plain_hyperparams

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard.writer import SummaryWriter

log = logging.getLogger(__name__)


class TensorBoardLogger(FolderLogger):
    """Scalars, hyper-parameters and, with ``log_graph``, the model's graph, for ``tensorboard --logdir``.

    Without ``save_dir`` the files lie in ``tensorboard/`` of the run folder; with it, in
    ``save_dir/name/version_<version>[/sub_dir]``. ``default_hp_metric`` gives hyper-parameters the metric
    ``hp_metric`` = -1 where none is passed, as TensorBoard's HPARAMS page needs one. Needs the extra ``track``.
    """

    inside_run = "tensorboard"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "arclight_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | None = None,
        **writer_arguments: Any,
    ) -> None:
        require("tensorboard", extra="track")
        super().__init__(save_dir, name, version, prefix)
        self.inside_version = sub_dir or ""
        self._log_graph, self._default_hp_metric, self._writer_arguments = (
            log_graph,
            default_hp_metric,
            writer_arguments,
        )
        self._writer: SummaryWriter | None = None
        self.hparams: dict[str, Any] = {}

    def use_folder(self, folder: Path) -> None:
        if self._folder != Path(folder):
            self._close()
            super().use_folder(folder)

    @property
    def experiment(self) -> SummaryWriter:
        """The ``torch.utils.tensorboard.SummaryWriter``, made when first used."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.log_dir, **self._writer_arguments)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in self._prefixed(metrics).items():
            if isinstance(value, Mapping):
                self.experiment.add_scalars(name, value, step)
            else:
                self.experiment.add_scalar(name, value, step)

    def log_hyperparams(
        self,
        params: Any,
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record ``params``, with the initial values of the ``metrics`` they will be compared by."""
        from torch.utils.tensorboard.summary import hparams

        self.hparams.update(plain_hyperparams(vars(params) if isinstance(params, Namespace) else params))
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        if metrics:
            self.log_metrics(metrics, 0 if step is None else step)
        if self.hparams:
            for summary in hparams(self.hparams, dict(metrics)):
                self.experiment._get_file_writer().add_summary(summary)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        if not self._log_graph:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if example is None:
            log.warning(
                "TensorBoardLogger(log_graph=True): no graph is written, because the module has no example_input_array",
            )
            return
        self.experiment.add_graph(model, example)

    def resume(self, step: int) -> None:
        """TensorBoard will hide what was written at later steps by a run that did not live to save it."""
        if step > 0:
            self._close()
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.log_dir, purge_step=step + 1, **self._writer_arguments)

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
