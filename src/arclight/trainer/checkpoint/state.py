"""Save and restore a trainer: everything that a resume needs, as one dictionary.

`Trainer` saves and captures by it; `session`, `diagnosis` and ``callbacks.loss_guard`` restore. Its keys stay: they are those that
Lightning's hooks ``on_save_checkpoint`` and ``on_load_checkpoint`` know (``fabric.checkpoint_io.to_tree`` has their names in a folder):

    state_dict          weights under their own names
    ema (or another)    averaged weights, same names, if a callback keeps an average
    epoch, global_step  for people and tools that read the file; a resume goes by ``loops``
    optimizer_states, lr_schedulers, callbacks, and the data module's state under its class's name
    hyper_parameters    the module's constructor arguments
    loops               layout: number of the layout of all that follows
                        progress: how far training has come
                        logged: the running epoch's sums, so that its metrics come out the same
                        metrics: the newest value of each logged name, which plateau schedulers and callbacks go by
                        precision: its name and its state
                        rng, window: every rank's generators and accumulation window
                        data: the seed of the sample order and of each loader, the loaders' own state, and how the work was divided
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from arclight import checkpoint as checkpoints
from arclight.checkpoint.filters import find_nan, refuse_nan
from arclight.fabric.distributed.dtensor import local_tensor
from arclight.fabric.distributed.optimizer_names import name_parameters, select_optimizer_state
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.seeding import rng_state
from arclight.fabric.strategies import Strategy
from arclight.optim import restore_optimizer
from arclight.optim.schedules import FactorSchedule
from arclight.trainer.callback import NEEDED, AveragesWeights, ReplacesWeights
from arclight.trainer.checkpoint.loading import load_weights
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO
from arclight.trainer.hparams import HyperparametersMixin, checkpoint_entries
from arclight.trainer.logging import reporting
from arclight.trainer.loop.hooks import logging_as, overridden
from arclight.trainer.loop.progress import Progress
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_action, profile_data_hook

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


LAYOUT = 1
"""Version of the layout below ``loops``; a higher one is refused. 0: checkpoints without a number, 1: that of ``_loops``.

A field that is added needs a default, not another number: readers leave out fields that they do not know.
"""


class CheckpointConnector:
    """Save and restore a trainer's state as one dictionary."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    # -- saving ----------------------------------------------------------------------------------------------------------

    def dump(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the state. A collective: every rank must call it."""
        trainer, run = self._trainer, self._trainer.run_state
        module, data, strategy = trainer.lightning_module, trainer.datamodule, trainer.strategy
        key, version = trainer.behavior.version
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            key: version,
            "state_dict": module.state_dict(),
            "loops": {"layout": LAYOUT, "progress": run.progress.state_dict()},
        }
        for callback in trainer.callbacks:
            checkpoint.update(callback.averages() if isinstance(callback, AveragesWeights) else {})
        for callback in trainer.callbacks:
            if isinstance(callback, ReplacesWeights):
                checkpoint["state_dict"] = callback.weights_to_save(module, checkpoint["state_dict"])
        if not weights_only:
            checkpoint["callbacks"] = {c.state_key: state for c in trainer.callbacks if (state := c.state_dict())}
            names = name_parameters([module]) if trainer.behavior.run_folders else {}
            checkpoint["optimizer_states"] = [
                strategy.named_optimizer_state(optimizer, optimizer.state_dict(), names) for optimizer in run.optimizers
            ]
            checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in run.lr_scheduler_configs]
            checkpoint["loops"] |= self._loops()
        for owner in (module, data):
            if isinstance(owner, HyperparametersMixin):
                checkpoint |= checkpoint_entries(owner)
        if hasattr(data, "state_dict") and (state := profile_data_hook(trainer.profiler, data, "state_dict")()):
            checkpoint[type(data).__qualname__] = state
        if not weights_only:  # as in Lightning, whose module hook is called in any case
            trainer.call_all("on_save_checkpoint", checkpoint)
        if overridden(module, "on_save_checkpoint", Module):
            logging_as(module, "on_save_checkpoint", module.on_save_checkpoint)(checkpoint)
        return checkpoint

    def _loops(self) -> dict[str, Any]:
        trainer, run, gather = self._trainer, self._trainer.run_state, self._trainer.strategy.all_gather_object
        own = (run.rng_before_validation or rng_state(), run.window.state_dict(run.optimizers), self._share_of_work())
        everyones = gather(own)
        loader = trainer.data.train_loader
        return {
            "logged": gather(run.training_values.state_dict()),
            "metrics": dict(trainer.callback_metrics),
            "precision": {"name": trainer.precision, "state": trainer.precision_plugin.state_dict()},
            "rng": [rng for rng, _, _ in everyones],
            "window": [window for _, window, _ in everyones],
            "data": {
                "seed": run.data_seed,
                "seeds": [] if loader is None else loader.seeds,
                "loader": trainer.data.position(),
                "shares": [share for _, _, share in everyones],
            },
        }

    def _share_of_work(self) -> str:
        trainer = self._trainer
        samples, names = trainer.strategy.distributed_sampler_kwargs, name_parameters([trainer.lightning_module])
        return _digest_of_share(samples, names, trainer.run_state.optimizers)

    def save(self, path: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint; returns on every rank when it is complete."""
        profile_action(self._trainer.profiler, "save_checkpoint", self._save)(path, weights_only, storage_options)

    def _save(self, path: str | Path, weights_only: bool, storage_options: Any) -> None:
        trainer = self._trainer
        trainer.check_finite()
        if not trainer.strategy.launcher.runs_in_this_process and not dist.is_initialized():  # the ranks have ended
            if not weights_only:
                raise RuntimeError(
                    "the optimizers and positions of the run were in processes that have ended: save whole checkpoints from a hook or by "
                    "ModelCheckpoint, and here the weights alone (weights_only=True)"
                )
            trainer.checkpoint_io.save_checkpoint(self.dump(weights_only), path, storage_options=storage_options)
            return
        trainer.strategy.write_checkpoint(trainer.checkpoint_io, self.dump(weights_only), path, storage_options)
        # all ranks have the same CheckpointIO, though rank 0 alone may be writing
        if not isinstance(trainer.checkpoint_io, AsyncCheckpointIO):
            trainer.strategy.barrier("checkpoint saved")

    # -- loading ---------------------------------------------------------------------------------------------------------

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint and call ``on_load_checkpoint`` of module and callbacks."""
        trainer = self._trainer
        return self.accept(trainer.strategy.read_checkpoint(trainer.checkpoint_io, path), str(path))

    def accept(self, content: Mapping[str, Any], called: str = "what is in memory") -> dict[str, Any]:
        """Pass a loaded checkpoint through the hooks and return it in our layout."""
        trainer, module, checkpoint = self._trainer, self._trainer.lightning_module, dict(content)
        if not isinstance(checkpoint.get("state_dict"), dict):
            raise checkpoints.CheckpointError(
                f"{called} has no state_dict and is not a checkpoint of a Trainer; it has {', '.join(map(str, checkpoint)) or 'nothing'}"
            )
        own = {callback.state_key for callback in trainer.callbacks}
        for key, state in checkpoint.get("callbacks", {}).items():
            if key not in own and isinstance(state, Mapping) and NEEDED in state:
                raise MisconfigurationError(str(state[NEEDED]))
        if written_by_lightning(checkpoint):
            position = lightning_progress(checkpoint, count_optimizer_steps=trainer.behavior.count_optimizer_steps)
            checkpoint = checkpoint | {"loops": {"progress": position.state_dict()}}
        if overridden(module, "on_load_checkpoint", Module):
            logging_as(module, "on_load_checkpoint", module.on_load_checkpoint)(checkpoint)
        trainer.call_all("on_load_checkpoint", checkpoint)
        return checkpoint

    def restore_model(self, checkpoint: dict[str, Any]) -> None:
        """Restore the module's weights, and the state of data module and callbacks."""
        trainer, module, data = self._trainer, self._trainer.lightning_module, self._trainer.datamodule
        weights = trainer.strategy.own_weights(module, checkpoint["state_dict"])
        load_weights(module, weights, strict=module.strict_loading)
        if trainer.behavior.stop_on_nonfinite and getattr(trainer.checkpoint_io, "refuse_nan", True):
            mine = find_nan({name: tensor for name, tensor in module.state_dict().items() if name in weights})
            everyones = trainer.strategy.all_gather_object(mine)
            names = list(dict.fromkeys(name for names in everyones for name in names))
            refuse_nan(trainer.ckpt_path or "the checkpoint", names)
        if (state := checkpoint.get(type(data).__qualname__)) is not None and hasattr(data, "load_state_dict"):
            profile_data_hook(trainer.profiler, data, "load_state_dict")(state)
        states = checkpoint.get("callbacks", {})
        for callback in trainer.callbacks:
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])
        if missing := [key for key in states if key not in {callback.state_key for callback in trainer.callbacks}]:
            trainer.warn(
                "The checkpoint has the state of callbacks that this trainer lacks; it is not restored. Please add the "
                f"following callbacks: {missing}"
            )

    def restore_training(self, checkpoint: dict[str, Any]) -> None:
        """Restore optimizers, schedulers, averages and position, to resume training exactly."""
        run = self._trainer.run_state
        if "optimizer_states" not in checkpoint:
            raise checkpoints.CheckpointError(
                "Trying to restore training state but checkpoint contains only the model. This is probably due to "
                "`ModelCheckpoint.save_weights_only` being set to `True`: this checkpoint holds weights only; load it with "
                "load_from_checkpoint or task.weights"
            )
        for kind, key, own in (
            ("optimizers", "optimizer_states", run.optimizers),
            ("learning-rate schedulers", "lr_schedulers", run.lr_scheduler_configs),
        ):
            if len(checkpoint[key]) != len(own):
                raise checkpoints.CheckpointError(
                    f"the checkpoint has {len(checkpoint[key])} {kind}, configure_optimizers gave {len(own)}"
                )
        self.restore_optimization(checkpoint)
        for callback in self._trainer.callbacks:
            if isinstance(callback, AveragesWeights):
                callback.load_averages(checkpoint)
        self._restore_loops(checkpoint["loops"])

    def restore_optimization(self, checkpoint: dict[str, Any]) -> None:
        """Restore optimizers and schedulers."""
        trainer, run, strategy = self._trainer, self._trainer.run_state, self._trainer.strategy
        if type(strategy).load_optimizer_state_dict is Strategy.load_optimizer_state_dict:
            if strategy.lightning_restore_optimizer:
                names = name_parameters([trainer.lightning_module])
                for optimizer, state in zip(run.optimizers, checkpoint["optimizer_states"], strict=True):
                    restore_optimizer(optimizer, select_optimizer_state(optimizer, state, names))
        elif strategy.lightning_restore_optimizer:
            strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(run.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)

    def _restore_loops(self, loops: dict[str, Any]) -> None:
        trainer, run, strategy = self._trainer, self._trainer.run_state, self._trainer.strategy
        if (layout := loops.get("layout", 0)) > LAYOUT:
            raise checkpoints.CheckpointError(
                f"the checkpoint's training state has layout {layout}, this version reads up to {LAYOUT}: update arclight to resume "
                "from it, or take its weights alone with load_from_checkpoint"
            )
        run.progress.load_state_dict(loops["progress"])
        if trainer.max_epochs not in (-1, None) and run.progress.epoch > trainer.max_epochs:
            raise MisconfigurationError(
                f"You restored a checkpoint with current_epoch={run.progress.epoch}, but you have set "
                f"Trainer(max_epochs={trainer.max_epochs}): raise it, or start afresh"
            )
        run.metrics.callback = dict(loops.get("metrics", {}))
        if "rng" not in loops:
            trainer.log_warning(
                "Lightning wrote this checkpoint, and keeps neither random states nor the order of the data nor the sums of "
                "an epoch under way: training continues from its position, on other draws than an uninterrupted run"
            )
            return
        trainer.precision_plugin.load_state_dict(loops["precision"]["state"])
        if run.progress.batch:  # else those of an epoch that has ended
            reporting.load_logged_state(run.training_values, loops["logged"], strategy, trainer.lightning_module)
        run.data_seed, run.loader_state = loops["data"]["seed"], loops["data"]["loader"]
        ranks = loops["rng"]
        same = len(ranks) == strategy.world_size
        if same and "shares" in loops["data"]:
            mine = loops["data"]["shares"][strategy.global_rank] == self._share_of_work()
            same = strategy.reduce_boolean_decision(mine)
        if same:
            run.pending_rng = ranks[strategy.global_rank]
            run.window.load_state_dict(loops["window"][strategy.global_rank], run.optimizers)
        else:
            self._restart_window(len(ranks), loops["window"][0].get("count", 0))

    def _restart_window(self, processes: int, waiting: int) -> None:
        """Restart an accumulation window that other processes had begun: its gradients are lost.

        The checkpoint is of another number of processes, or of others that shared the work in another way.

        Its ``waiting`` batches are run again.
        """
        run, world_size = self._trainer.run_state, self._trainer.strategy.world_size
        this = "shares the work out in another way" if processes == world_size else f"has {world_size}"
        self._trainer.log_warning(
            f"the checkpoint was made by {processes} processes, this run {this}: random draws will differ from an uninterrupted run"
        )
        if not waiting:
            return
        place = run.loader_state.get("place", {})
        if place.get("window") is None:
            raise checkpoints.CheckpointError(
                f"the checkpoint lies within an accumulation window, after {waiting} of its batches, whose gradients belong to "
                f"{processes} processes and their shares of the work: resume with the same, or from a checkpoint between two windows"
            )
        run.loader_state = run.loader_state | {"place": place | {"done": place["window"]}}
        run.progress.batch -= waiting
        run.progress.batches -= waiting
        for config in run.lr_scheduler_configs:
            if isinstance(config.scheduler, FactorSchedule):
                config.scheduler.drop_window()


def _digest_of_share(samples: dict[str, int], names: dict[Any, str], optimizers: list[Optimizer]) -> str:
    """Digest this rank's share: the samples it reads and the parameters it updates."""
    parts = [
        (names.get(p), tuple(local_tensor(p).shape), str(getattr(p, "placements", "")))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return hashlib.sha256(repr((samples["num_replicas"], samples["rank"], parts)).encode()).hexdigest()


# -- Lightning's checkpoints: four counters (ready, started, processed, completed) for each of its loops, and how far training has come is
# in their differences: an epoch that is processed and not completed was saved at its end, a batch that is processed and not completed was
# saved by a callback of that very batch. Both are done as far as training goes.

_WRITTEN_BY = ("pytorch-lightning_version", "lightning_version")
_BATCHES, _EPOCHS = "epoch_loop.batch_progress", "epoch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def written_by_lightning(checkpoint: dict[str, Any]) -> bool:
    """Return True for a checkpoint in Lightning's layout."""
    return any(key in checkpoint for key in _WRITTEN_BY) and "progress" not in checkpoint.get("loops", {})


def lightning_progress(checkpoint: dict[str, Any], *, count_optimizer_steps: bool = True) -> Progress:
    """Read the progress that a checkpoint of Lightning holds.

    ``count_optimizer_steps``: ``global_step`` counts every optimizer's steps, as Lightning's does; else the batches in
    which any of them stepped. A file of Lightning 1.x, which has no counters, continues at the start of an epoch.
    """
    steps = int(checkpoint.get("global_step", 0))
    if not count_optimizer_steps:
        steps = math.ceil(steps / max(1, len(checkpoint.get("optimizer_states", []))))
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    if _BATCHES not in fit or _EPOCHS not in fit:
        return Progress(epoch=int(checkpoint.get("epoch", 0)), global_step=steps, batches=steps)
    batches, epochs = fit[_BATCHES], fit[_EPOCHS]["current"]
    done = int(batches["current"]["processed"])
    validated = fit.get(_VALIDATION, {}).get("is_last_batch", False) and batches["current"]["completed"] == done
    at_end = bool(batches["is_last_batch"])
    return Progress(
        epoch=int(epochs["completed"]),
        batch=done,
        global_step=steps,
        batches=int(batches["total"]["processed"]),
        validated_at=done if validated else -1,
        ended=epochs["processed"] > epochs["completed"] or (at_end and validated),
    )
