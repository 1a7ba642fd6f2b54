"""The configuration of a run, saved beside what the run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arclight.trainer import Callback, Module
from arclight.trainer import Trainer as NativeTrainer


class SaveConfigCallback(Callback):
    """Writes the parsed configuration to ``config_filename`` in the trainer's ``log_dir`` when a run starts.

    Raises RuntimeError where the file is there already, unless ``overwrite``. A subclass may override :meth:`save_config` to
    keep it elsewhere too, or instead with ``save_to_log_dir=False``.
    """

    def __init__(
        self, parser: Any, config: Any, config_filename: str = "config.yaml", overwrite: bool = False,
        multifile: bool = False, save_to_log_dir: bool = True,
    ) -> None:  # fmt: skip
        self.parser, self.config, self.config_filename = parser, config, config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ValueError(
                "`save_to_log_dir=False` only makes sense when subclassing SaveConfigCallback to implement `save_config` and "
                "it is desired to disable the standard behavior of saving to log_dir."
            )

    def setup(self, trainer: NativeTrainer, pl_module: Module, stage: str) -> None:
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._save(trainer, Path(str(trainer.log_dir)))  # asked on every rank: they agree on the folder
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def _save(self, trainer: NativeTrainer, folder: Path) -> None:
        path = folder / self.config_filename
        there = trainer.strategy.broadcast(trainer.is_global_zero and path.is_file())
        if there and not self.overwrite:
            raise RuntimeError(
                f"{type(self).__name__} expected {path} to NOT exist. Aborting to avoid overwriting results of a previous run. "
                "You can delete the previous config file, set `LightningCLI(save_config_callback=None)` to disable config "
                'saving, or set `LightningCLI(save_config_kwargs={"overwrite": True})` to overwrite the config file.'
            )
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(
                self.config, str(path), skip_none=False, overwrite=self.overwrite, multifile=self.multifile
            )

    def save_config(self, trainer: NativeTrainer, pl_module: Module, stage: str) -> None:
        """Override to keep the configuration in another place too; runs on rank 0 alone, so no collective may be called."""
