"""Define the base of loggers that write files: choose the folder of each version.

`CSVLogger` and `TensorBoardLogger` build on it, also in Fabric's form (``compat.lightning.fabric_loggers``). Tools look for runs in
``save_dir/name/version_<n>``: this layout is Lightning's and stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from arclight.fabric.atomic_replace import DISK_FULL
from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn
from arclight.trainer.loggers.logger import Logger
from arclight.trainer.run.folder import RunFolder


class FolderLogger(Logger):
    """Base class of loggers that write files, in the run folder or in ``save_dir``.

    There they are in ``save_dir/name/version_<version>``.

    ``save_dir`` may be any place that fsspec knows; ``~`` and ``$VARIABLES`` in it are replaced. The version counts up
    if none is given; a text is the folder's own name. ``inside_run`` and ``sub_dir`` are folders within these two.
    A logger that nobody gives a folder makes a run folder of its own, ``runs/run/<n>``, when it first writes.
    Rows that a full disk does not take are a warning, once: training goes on, and a checkpoint that does not fit raises.
    """

    inside_run = ""
    _warned_of_disk = False
    _again_at = 0.0
    """Time of this machine's monotonic clock from which a disk that was full is tried again."""

    def __init__(
        self, save_dir: str | os.PathLike[str] | None, name: str | None, version: int | str | None, prefix: str, sub_dir: str | None = None,
    ) -> None:  # fmt: skip
        self._save_dir = os.fspath(save_dir) if save_dir is not None else None
        self._name, self._version, self.prefix, self._sub_dir = name or "", version, prefix, sub_dir
        self._folder: Path | None = None

    @property
    def needs_folder(self) -> bool:
        return self._save_dir is None

    def use_folder(self, folder: Path) -> None:
        self._folder = Path(folder)

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        if self._version is None:
            self._version = next_version(self._versions())
        return self._version

    @property
    def save_dir(self) -> str:
        return self._save_dir if self._save_dir is not None else self._run_folder()

    @property
    def sub_dir(self) -> str | None:
        return self._sub_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self.save_dir, self.name) if not self.needs_folder else self.save_dir

    @property
    def log_dir(self) -> str:
        if self.needs_folder:
            return os.path.join(self.save_dir, self.inside_run) if self.inside_run else self.save_dir
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return expanded(os.path.join(self._versions(), version, *([self.sub_dir] if self.sub_dir else [])))

    @contextmanager
    def _sparing_training(self, lost: str) -> Iterator[None]:
        """Warn once if a full disk rejects what the block writes, and let training go on.

        ``lost``: what becomes of it, for the warning.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if not self._warned_of_disk:
                rank_zero_warn(
                    f"{type(self).__name__} cannot write to {self.log_dir} ({error}); training goes on, and {lost}"
                )
            self._warned_of_disk = True
            self._on_full_disk()

    def _on_full_disk(self) -> None:
        """Prepare to write again later, after a full disk."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the writer and clock times: another process goes on with it."""
        return {**self.__dict__, "_experiment": None, "_again_at": 0.0}

    def _versions(self) -> str:
        """Return the folder that versions are counted in."""
        return self.root_dir

    def _run_folder(self) -> str:
        if self._folder is None:
            if rank_zero_only.rank != 0:
                raise RuntimeError(
                    f"{type(self).__name__} has no folder on this rank: give it save_dir, or pass it to a Trainer, which brings the run folder"
                )
            self._folder = RunFolder().path
        return str(self._folder)


def expanded(path: str) -> str:
    """Return ``path`` with home folder and environment variables filled in."""
    return os.path.expanduser(os.path.expandvars(path))


def next_version(folder: str) -> int:
    """Return the number after the highest ``version_<n>`` in ``folder``, local or remote."""
    files, path = fsspec.core.url_to_fs(expanded(folder))
    try:
        entries = files.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if files.isdir(entry["name"])]
    taken = [int(name.removeprefix("version_")) for name in names if name.removeprefix("version_").isdigit()]
    return max(taken, default=-1) + 1
