"""Everything that a resume needs, as one tree: taken from a trainer, and put back.

What is where in a checkpoint (see ``arclight.checkpoint`` for the files):

    model               weights under their own names
    ema (or another)    averaged weights, same names, where a callback keeps an average
    progress            how far training has come
    optimizers, schedulers, callbacks, precision, datamodule
    logged              the running epoch's sums, so that its metrics come out the same
    metrics             the newest epoch values, which plateau schedulers and callbacks go by
    rng, data           every rank's generators; the seed of the sample order and the loader's own state
    hyper_parameters    the module's constructor arguments
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight import checkpoint as checkpoints
from arclight.fabric.seeding import rng_state
from arclight.optim import restore_optimizer
from arclight.trainer import dataloading, reporting
from arclight.trainer.datamodule import DataModule
from arclight.trainer.fabric_checkpoint import StateIO
from arclight.trainer.hooks import overridden
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def dump(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """The state tree of ``trainer``. A collective: every rank must call it."""
    module = trainer.lightning_module
    tree: dict[str, Any] = {
        "model": module.state_dict(),
        "progress": trainer.progress.state_dict(),
        "hyper_parameters": encode(dict(module.hparams)),
    }
    for callback in trainer.callbacks:
        tree.update(callback.averages() if hasattr(callback, "averages") else {})
    if not weights_only:
        tree |= {
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": {c.state_key: state for c in trainer.callbacks if (state := c.state_dict())},
            "precision": {"name": trainer.precision, "state": trainer.precision_plugin.state_dict()},
            "datamodule": trainer.datamodule.state_dict() if isinstance(trainer.datamodule, DataModule) else {},
            "logged": reporting.logged_state(trainer),
            "metrics": dict(trainer.callback_metrics),
            "rng": trainer.strategy.all_gather_object(trainer.rng_before_validation or rng_state()),
            "window": trainer.strategy.all_gather_object(trainer.window.state_dict(trainer.optimizers)),
            "data": {
                "seed": trainer.data_seed,
                "loader": dataloading.position(trainer),
            },
        }
    trainer.call_all("on_save_checkpoint", tree)
    if overridden(module, "on_save_checkpoint", Module):
        module.on_save_checkpoint(tree)
    return tree


def save(trainer: Trainer, path: str | Path, weights_only: bool = False) -> None:
    """Write a checkpoint; returns on every rank when it is complete."""
    reporting.check_finite(trainer)
    tree = dump(trainer, weights_only)
    trainer.strategy.write_checkpoint(StateIO(), tree, path)
    trainer.strategy.barrier("checkpoint saved")


def load(trainer: Trainer, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint and let callbacks and module look at it."""
    tree = checkpoints.load(path)
    trainer.call_all("on_load_checkpoint", tree)
    module = trainer.lightning_module
    if overridden(module, "on_load_checkpoint", Module):
        module.on_load_checkpoint(tree)
    return tree


def restore_model(trainer: Trainer, tree: dict[str, Any]) -> None:
    """The trained weights, into the module."""
    module = trainer.lightning_module
    load_weights(module, tree["model"], strict=module.strict_loading)


def load_weights(module: Module, weights: dict[str, Any], strict: bool = True) -> None:
    """``module.load_state_dict`` with one sentence per misfit. Raises CheckpointError."""
    try:
        module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        raise checkpoints.CheckpointError(f"the weights do not fit {type(module).__name__}: {error}") from error


def restore(trainer: Trainer, tree: dict[str, Any]) -> None:
    """Everything but the weights, so that training goes on as if it had never stopped."""
    if "optimizers" not in tree:
        raise checkpoints.CheckpointError(
            "this checkpoint holds weights only and cannot resume training; load it with load_from_checkpoint or task.weights"
        )
    if len(tree["optimizers"]) != len(trainer.optimizers):
        raise checkpoints.CheckpointError(
            f"the checkpoint has {len(tree['optimizers'])} optimizers, configure_optimizers gave {len(trainer.optimizers)}"
        )
    for optimizer, state in zip(trainer.optimizers, tree["optimizers"], strict=True):
        restore_optimizer(optimizer, state)
    for config, state in zip(trainer.lr_scheduler_configs, tree["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    for callback in trainer.callbacks:
        if callback.state_key in tree["callbacks"]:
            callback.load_state_dict(tree["callbacks"][callback.state_key])
        if hasattr(callback, "load_averages"):
            callback.load_averages(tree)
    trainer.precision_plugin.load_state_dict(tree["precision"]["state"])
    if isinstance(trainer.datamodule, DataModule) and tree["datamodule"]:
        trainer.datamodule.load_state_dict(tree["datamodule"])
    trainer.progress.load_state_dict(tree["progress"])
    if trainer.progress.batch:  # else those of an epoch that has ended
        reporting.load_logged_state(trainer, tree["logged"])
    trainer.metrics.callback = dict(tree.get("metrics", {}))
    trainer.data_seed = tree["data"]["seed"]
    trainer.loader_state = tree["data"]["loader"]
    ranks = tree["rng"]
    if len(ranks) == trainer.world_size:
        trainer.pending_rng = ranks[trainer.global_rank]
        trainer.window.load_state_dict(tree["window"][trainer.global_rank], trainer.optimizers)
    else:
        trainer.notice(
            f"the checkpoint was made by {len(ranks)} processes, this run has {trainer.world_size}: random draws will differ from an uninterrupted run"
        )


def module_from_checkpoint(
    cls: type, path: str | Path, *, map_location: Any, strict: bool, overrides: dict[str, Any]
) -> Module:
    """An instance of ``cls`` from a checkpoint's constructor arguments and weights (averaged ones where it has them)."""
    wanted = [name for name in ("model", "ema", "hyper_parameters") if name in checkpoints.inspect(path).entries]
    tree = checkpoints.load(path, only=wanted, map_location=map_location)
    arguments = decode(tree.get("hyper_parameters", {})) | overrides
    module: Module = cls(**arguments)
    load_weights(module, {**tree["model"], **tree.get("ema", {})}, strict=strict)
    return module


# -- constructor arguments that are settings objects ---------------------------------------------------------------


def encode(value: Any) -> Any:
    """Plain data for a tree of dataclasses, paths and plain values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"dataclass": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(encode(item) for item in value)
    return value


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`. A dataclass is looked up only in modules of this package and in ones already imported."""
    if isinstance(value, dict) and value.keys() == {"dataclass", "fields"}:
        name, _, qualified = value["dataclass"].partition(":")
        if name not in sys.modules and not name.startswith("arclight."):
            raise checkpoints.CheckpointError(
                f"the checkpoint was made with {value['dataclass']}; import {name} before loading it"
            )
        cls = getattr(importlib.import_module(name), qualified, None)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise checkpoints.CheckpointError(
                f"the checkpoint was made with {value['dataclass']}, which is no longer a dataclass there"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: decode(item) for key, item in value["fields"].items() if key in known})
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(decode(item) for item in value)
    return value
