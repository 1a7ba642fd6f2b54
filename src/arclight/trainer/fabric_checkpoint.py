"""How a Fabric's state becomes a checkpoint and a checkpoint a state."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from arclight import checkpoint as checkpoints
from arclight.fabric.strategies import Strategy


class StateIO:
    """Writes our checkpoint folders. Reads them, and single files of ``torch.save`` that need no unpickling."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options belong to a checkpoint IO of your own: pass one as Fabric(plugins=...)")
        checkpoints.save(path, checkpoint)

    def save_shares(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        """The same where tensors are spread over processes, each of which writes its part."""
        checkpoints.save_shares(path, checkpoint, processes)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """The state at ``path``. Raises CheckpointError for what is damaged or would need unpickling."""
        path = Path(path)
        if not path.is_file():
            return checkpoints.load(path, map_location=map_location or "cpu")
        if path.suffix == ".safetensors":
            return checkpoints.load_weights(path)
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise checkpoints.CheckpointError(
                f"{path} holds objects that only unpickling could restore, and unpickling runs code from the file: save plain "
                "numbers, text and tensors (state dicts) in the program that wrote it"
            ) from error

    def remove_checkpoint(self, path: str | Path) -> None:
        checkpoints.remove(path)
