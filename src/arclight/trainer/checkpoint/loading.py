"""Read checkpoints of any kind under Lightning's keys, and load weights into a module.

``load_from_checkpoint`` (``trainer.hparams``), ``deploy.quantizing.trained`` and ``vision.tasks`` call `read`: Arclight's folders and
Lightning's files come in, a dictionary under Lightning's keys goes out. `session`, `state`, `Module` and ``callbacks.loss_guard`` call
`load_weights`. Nothing is ever unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import torch
from torch import nn

from arclight import checkpoint as checkpoints
from arclight.checkpoint.remote import is_remote, to_path
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.fabric.checkpoint_io import from_tree


@runtime_checkable
class ReplacesLayers(Protocol):
    """Callback that replaces layers of the module, so that names of weights may change."""

    def replace_layers(self, pl_module: Any) -> None:
        """Replace the layers, unless that is done.

        Called after ``configure_model``, in a process that only launches others, and where a checkpoint is opened.
        """


class WeightsMisfitError(checkpoints.CheckpointError, RuntimeError):
    """A checkpoint's weights are not those of the module."""


def read(source: str | Path | IO[bytes], map_location: Any = None) -> dict[str, Any]:
    """Read a checkpoint of any kind under Lightning's key names.

    Raises CheckpointError, FileNotFoundError.
    """
    if isinstance(source, (str, Path)) and not ((path := to_path(source)).is_file() and is_remote(path)):
        if not path.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if path.is_dir():
            wanted = [
                n for n in checkpoints.inspect(path).entries if n not in ("optimizers", "rng", "window", "logged")
            ]
            return from_tree(checkpoints.load(path, only=wanted, map_location=map_location or "cpu"))
        return _checked(path, checkpoints.read_pickled(path, map_location or _if_here))
    if isinstance(source, (str, Path)):
        import fsspec

        with fsspec.open(str(source), "rb") as file:
            return _checked(source, checkpoints.read_pickled(file, map_location or _if_here))
    return _checked("the file", checkpoints.read_pickled(source, map_location or _if_here))


def _checked(source: object, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        found = ", ".join(map(str, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise checkpoints.CheckpointError(
            f"{source} has no state_dict and is not a checkpoint of a Trainer; it has {found or 'nothing'}"
        )
    return content


def _if_here(storage: Any, location: str) -> Any:
    """Load a tensor to the CPU if its device is not available here."""
    kind = location.partition(":")[0]
    module = getattr(torch, kind, None)
    here = kind == "cpu" or bool(getattr(module, "is_available", lambda: False)())
    return None if here else storage.cpu()


def load_weights(module: nn.Module, weights: dict[str, Any], strict: bool = True) -> None:
    """Load weights into a module; without ``strict``, warn of keys that do not match.

    Raises WeightsMisfitError.
    """
    try:
        misfits = module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        raise WeightsMisfitError(f"the weights do not fit {type(module).__name__}: {error}") from error
    if strict or misfits is None:  # an override may return nothing
        return
    if misfits.missing_keys:
        rank_zero_warn(f"Found keys that are in the model state dict but not in the checkpoint: {misfits.missing_keys}")
    if misfits.unexpected_keys:
        rank_zero_warn(
            f"Found keys that are not in the model state dict but in the checkpoint: {misfits.unexpected_keys}"
        )
