"""Where loggers that write files put them."""

from __future__ import annotations

from pathlib import Path

from arclight.trainer.loggers.logger import Logger, next_version


class FolderLogger(Logger):
    """A logger of files: in the run folder, or with ``save_dir`` in ``save_dir/name/version_<version>``.

    ``inside_run`` and ``inside_version`` are sub-folders of these two. The version counts up where none is given.
    """

    inside_run = inside_version = ""

    def __init__(self, save_dir: str | Path | None, name: str | None, version: int | str | None, prefix: str) -> None:
        self._save_dir = Path(save_dir) if save_dir is not None else None
        self._name, self._version, self.prefix = name or "", version, prefix
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
            self._version = next_version(Path(self.root_dir))
        return self._version

    @property
    def save_dir(self) -> str:
        return str(self._save_dir if self._save_dir is not None else self._run_folder())

    @property
    def root_dir(self) -> str:
        return str(self._save_dir / self._name) if self._save_dir is not None else str(self._run_folder())

    @property
    def log_dir(self) -> str:
        if self._save_dir is None:
            return str(self._run_folder() / self.inside_run)
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(Path(self.root_dir) / version / self.inside_version)

    def _run_folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError(
                f"{type(self).__name__} has no folder yet: give it save_dir, or pass it to a Trainer, which brings the run folder"
            )
        return self._folder
