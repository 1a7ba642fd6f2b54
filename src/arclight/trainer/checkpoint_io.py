"""How a trainer's checkpoint becomes a file and a file a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from arclight import checkpoint as checkpoints
from arclight.checkpoint.remote import is_remote, place
from arclight.checkpoint.tree import whole_of
from arclight.fabric.batches import map_tensors
from arclight.fabric.strategies import Strategy
from arclight.trainer.fabric_checkpoint import save_file

_RENAMED = {"state_dict": "model", "optimizer_states": "optimizers", "lr_schedulers": "schedulers"}
_POSITION = ("layout", "progress", "logged", "metrics", "precision", "rng", "window", "data")


class CheckpointIO(ABC):
    """Subclass this and pass an instance as ``Trainer(plugins=...)`` to keep checkpoints elsewhere or otherwise.

    Rank 0 alone saves and removes; every rank loads. A save must be complete or leave what was there before.
    """

    suffix: str = ""
    """Ending of the names of what :meth:`save_checkpoint` writes."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``, as :func:`arclight.trainer.state.dump` gives it."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What was saved at ``path``. Raises CheckpointError for what is damaged or would need unpickling."""

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete what was saved at ``path``."""

    def teardown(self) -> None:  # noqa: B027 - only those that write in the background have something to wait for
        """Wait for what is still being written."""


class FolderCheckpointIO(CheckpointIO):
    """Our format: a folder of safetensors and JSON, see ``arclight.checkpoint``. Reads Lightning's files too.

    ``refuse_nan``: a Trainer does not go on from weights that hold NaN; CheckpointError names them.
    """

    def __init__(self, refuse_nan: bool = True) -> None:
        self.refuse_nan = refuse_nan

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options belong to a CheckpointIO of your own: pass one as Trainer(plugins=...)")
        checkpoints.save(path, to_tree(checkpoint))

    def save_shares(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        """The same where tensors are spread over processes, each of which writes its part."""
        checkpoints.save_shares(path, to_tree(checkpoint), processes)

    def load_shares(self, path: str | Path, processes: Strategy) -> dict[str, Any]:
        """What :meth:`load_checkpoint` gives, with weights, their averages and optimizer states still in their files."""
        tree = checkpoints.load_shares(path, processes)
        names = set(tree.get("model", ()))
        large = {"model", "optimizers"} | {
            key for key, entry in tree.items() if isinstance(entry, dict) and entry and names >= set(entry)
        }
        return from_tree({key: value if key in large else map_tensors(value, whole_of) for key, value in tree.items()})

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if place(path).is_file():
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        return from_tree(checkpoints.load(path, map_location=map_location or "cpu"))

    def remove_checkpoint(self, path: str | Path) -> None:
        checkpoints.remove(path)


class TorchCheckpointIO(CheckpointIO):
    """One ``.ckpt`` file written by ``torch.save``, which anything that reads Lightning's checkpoints can open."""

    suffix = ".ckpt"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
                "`TorchCheckpointIO`: implement your own `CheckpointIO` and pass it as Trainer(plugins=...)"
            )
        save_file(checkpoint, place(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if place(path).is_dir():
            return FolderCheckpointIO().load_checkpoint(path, map_location, weights_only)
        if is_remote(place(path)):
            raise checkpoints.CheckpointError(
                f"{path}: files of torch.save are read from local paths only; copy it here first"
            )
        checkpoint: dict[str, Any] = checkpoints.read_pickled(place(path), map_location or "cpu")
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        checkpoints.remove(path)


_OURS = {*_RENAMED.values(), *_POSITION}


def to_tree(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint folder: what says how far training is lies beside the weights, not below ``loops``.

    What a user's hook added under one of these names gets another.
    """
    loops = checkpoint.get("loops", {})
    tree = {
        f"user_{key}" if key in _OURS else _RENAMED.get(key, key): value
        for key, value in checkpoint.items()
        if key not in ("loops", "epoch", "global_step")
    }
    return tree | {key: loops[key] for key in _POSITION if key in loops}


def from_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`to_tree`."""
    back = {new: old for old, new in _RENAMED.items()} | {f"user_{key}": key for key in _OURS}
    checkpoint = {back.get(key, key): value for key, value in tree.items() if key not in _POSITION}
    checkpoint["loops"] = {key: tree[key] for key in _POSITION if key in tree}
    progress = tree.get("progress", {})
    return checkpoint | {name: progress[name] for name in ("epoch", "global_step") if name in progress}
