"""Write and read the checkpoints of a Fabric."""

from __future__ import annotations

import copy
import operator
import os
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from arclight import checkpoint as checkpoints
from arclight.checkpoint.remote import is_remote, to_path
from arclight.fabric.strategies import Strategy

_FILES = (".ckpt", ".pt", ".pth", ".bin")


class StateIO:
    """Writes our checkpoint folders, or one file of ``torch.save`` where the name ends in .ckpt, .pt, .pth or .bin.

    Reads both, whoever wrote the file, as long as it needs no unpickling.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``; what was at ``path`` is there until all of the new one is.

        Raises CheckpointError for what could not be written, or could not be read back without unpickling.
        """
        if storage_options is not None:
            raise TypeError("storage_options belong to a checkpoint IO of your own: pass one as Fabric(plugins=...)")
        if PurePath(str(path)).suffix in _FILES:
            save_file(checkpoint, to_path(path))
        else:
            checkpoints.save(path, checkpoint)

    def save_shares(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        """A folder where tensors are spread over processes, each of which writes its part."""
        checkpoints.save_shares(path, checkpoint, processes)

    def load_shares(self, path: str | Path, processes: Strategy) -> dict[str, Any]:
        """Load as :meth:`load_checkpoint` does, with tensors that are still in their files."""
        return checkpoints.load_shares(path, processes)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """The state at ``path``. Raises CheckpointError for what is damaged or would need unpickling."""
        path = to_path(path)
        if not path.is_file():
            return checkpoints.load(path, map_location=map_location or "cpu")
        if path.suffix == ".safetensors":
            return checkpoints.load_weights(path)
        return checkpoints.read_pickled(path, map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        checkpoints.remove(path)


def save_file(state: dict[str, Any], path: Path) -> None:
    """One file of ``torch.save`` that needs no unpickling. Raises CheckpointError, and leaves what was there, where that cannot be."""
    if is_remote(path):
        raise checkpoints.CheckpointError(
            f"{path}: one file of torch.save is written to local paths only; checkpoint folders, whose names have no ending such as "
            f"{', '.join(_FILES)} for a Fabric, can lie at an address"
        )
    if path.is_dir():
        raise checkpoints.CheckpointError(f"{path} is a folder, which one file cannot replace: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(_without_numpy_numbers(state), file)
            file.flush()
            os.fsync(file.fileno())
        checkpoints.read_pickled(temporary)  # maps the file, so that this reads no tensor
        os.replace(temporary, path)
    except OSError as error:
        raise checkpoints.CheckpointError(
            f"{path} could not be written: {error.strerror}; what was there before is intact"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _without_numpy_numbers(value: Any) -> Any:
    """Replace NumPy's scalars, which a learning rate or a metric often is, by Python's: the former need unpickling."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        changed = {key: new for key, item in value.items() if (new := _without_numpy_numbers(item)) is not item}
        if not changed:
            return value
        replaced = copy.copy(value)  # with the type and the attributes, which torch keeps a version in
        replaced.update(changed)
        return replaced
    if type(value) in (list, tuple):
        items = [_without_numpy_numbers(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    return value
