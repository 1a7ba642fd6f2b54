"""Define loggers with the signatures of Lightning Fabric, ``root_dir`` first.

User code imports these as ``fabric.loggers.CSVLogger`` and ``TensorBoardLogger``, by the table in `names`. Signatures and layout of files are
Lightning's and stay; what is logged is the base classes' (``trainer.loggers``).
"""

from __future__ import annotations

import os
from typing import Any

from arclight.trainer.loggers import csv_logger, tensorboard_logger
from arclight.trainer.loggers.folder_logger import FolderLogger


class _Rooted(FolderLogger):
    @property
    def root_dir(self) -> str:
        return self.save_dir

    def _versions(self) -> str:
        return os.path.join(self.save_dir, self.name)


class FabricCSVLogger(_Rooted, csv_logger.CSVLogger):
    """Log to ``root_dir/name/version_<version>/metrics.csv``.

    Rows are written every ``flush_logs_every_n_steps`` rows.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str] | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)


class FabricTensorBoardLogger(_Rooted, tensorboard_logger.TensorBoardLogger):
    """Log to event files in ``root_dir/name/version_<version>[/sub_dir]``.

    ``log_graph`` is a method that always writes.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str] | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("log_graph", True)
        super().__init__(root_dir, name, version, default_hp_metric=default_hp_metric, prefix=prefix, sub_dir=sub_dir, **kwargs)  # fmt: skip
