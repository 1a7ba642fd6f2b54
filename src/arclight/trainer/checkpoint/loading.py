"""Modules and data modules from checkpoints: built with the arguments that were kept, with their weights or state."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import IO, Any

import torch

from arclight import checkpoint as checkpoints
from arclight.checkpoint.remote import is_remote, to_path
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.checkpoint.checkpoint_io import from_tree
from arclight.trainer.datamodule import DataModule
from arclight.trainer.hparams import rebuild
from arclight.trainer.module import Module


class WeightsMisfitError(checkpoints.CheckpointError, RuntimeError):
    """A checkpoint's weights are not those of the module."""


def build(
    cls: type,
    source: str | Path | IO[bytes],
    map_location: Any,
    hparams_file: str | Path | None,
    strict: bool | None,
    overrides: dict[str, Any],
) -> Any:
    """See :meth:`arclight.trainer.hparams.HyperparametersMixin.load_from_checkpoint`."""
    checkpoint = read(source, map_location)
    if hparams_file is not None:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = _read_values(hparams_file)  # type: ignore[attr-defined]
    owner = rebuild(cls, checkpoint, overrides)
    if isinstance(owner, DataModule):
        if (state := checkpoint.get(type(owner).__qualname__)) is not None:
            owner.load_state_dict(state)
        return owner
    if not isinstance(owner, Module):
        raise TypeError(
            f"{cls.__name__} is neither a Module nor a DataModule: a checkpoint has nothing to load into it"
        )
    strict = _strictness(owner, strict)
    owner.configure_model()
    owner.on_load_checkpoint(checkpoint)
    weights = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}
    load_weights(owner, weights, strict)
    if not weights:
        rank_zero_warn(f"The state dict in {str(source)!r} contains no parameters.")
        return owner
    device = next((value.device for value in weights.values() if isinstance(value, torch.Tensor)), None)
    return owner.to(device) if device is not None else owner


def read(source: str | Path | IO[bytes], map_location: Any = None) -> dict[str, Any]:
    """A checkpoint under Lightning's key names, whichever kind ``source`` is. Raises CheckpointError, FileNotFoundError."""
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
            f"{source} has no state_dict and is no checkpoint of a Trainer; it has {found or 'nothing'}"
        )
    return content


def _if_here(storage: Any, location: str) -> Any:
    """Tensors go where they were, to the CPU where that device is not here."""
    kind = location.partition(":")[0]
    module = getattr(torch, kind, None)
    here = kind == "cpu" or bool(getattr(module, "is_available", lambda: False)())
    return None if here else storage.cpu()


def _read_values(path: str | Path) -> dict[str, Any]:
    from arclight.trainer.hparams import load_hparams_from_tags_csv, load_hparams_from_yaml

    kind = Path(path).suffix.lower()
    if kind == ".csv":
        return load_hparams_from_tags_csv(path)
    if kind in (".yml", ".yaml"):
        values: dict[str, Any] = load_hparams_from_yaml(path, use_omegaconf=False)
        return values
    raise ValueError(f".csv, .yml or .yaml is required for `hparams_file`, got {path}")


def _strictness(module: Module, asked: bool | None) -> bool:
    overriding = inspect.getattr_static(type(module), "strict_loading") is not vars(Module)["strict_loading"]
    own = module.strict_loading if overriding else vars(module).get("_strict_loading")
    if own is not None and asked is not None and own != asked:
        raise ValueError(
            f"You set `.load_from_checkpoint(..., strict={asked!r})` which is in conflict with"
            f" `{type(module).__name__}.strict_loading={own!r}`. Please set the same value for both of them."
        )
    return module.strict_loading if asked is None else asked


def load_weights(module: Module, weights: dict[str, Any], strict: bool = True) -> None:
    """``module.load_state_dict``; without ``strict``, what does not fit is warned of. Raises WeightsMisfitError."""
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
