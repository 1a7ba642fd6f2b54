"""Define settings of common callbacks, each of which builds its callback.

They are tables of recipes (``cli.schema``), built by ``cli.run_setup.callbacks``: names of fields stay, and docstrings are texts of
``--help``. No torch is imported here: a recipe is read without it. A further callback for recipes is a class here, a field of
``cli.schema.TrainingRun`` and a place in ``cli.run_setup.callbacks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from arclight._intervals import (
    Checked,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
)

if TYPE_CHECKING:
    from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint
    from arclight.trainer.callbacks.early_stopping import EarlyStopping
    from arclight.trainer.callbacks.loss_guard import LossGuard
    from arclight.trainer.callbacks.monitoring.activation_monitor import ActivationMonitor
    from arclight.trainer.callbacks.monitoring.curvature_monitor import CurvatureMonitor
    from arclight.trainer.callbacks.monitoring.pipeline_timeline import PipelineTimeline
    from arclight.trainer.callbacks.weights.diloco import DiLoCo
    from arclight.trainer.callbacks.weights.weight_averaging import EMAWeightAveraging


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Checked):
    """Checkpoints to keep: how many, by which metric, how often."""

    folder: str | None = None
    """Folder, or address such as s3://bucket/name; none: `checkpoints` in the run folder."""
    monitor: str | None = None
    """Logged value by which checkpoints are ranked; none keeps the newest."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""
    save_top_k: NonNegativeInt | Literal[-1] = 1
    """Number of best checkpoints kept; -1 keeps all."""
    save_last: bool = True
    """Also keep the newest as `last`."""
    every_n_steps: NonNegativeInt | None = None
    """Save after every n-th step as well; of these the newest is kept, or all with save_top_k = -1. They are not ranked."""
    every_n_epochs: NonNegativeInt = 1
    """Save after every n-th epoch."""
    asynchronous: bool | None = None
    """Write in the background, from a copy in host memory; none: only if several ranks each write their shard."""

    def build(self) -> ModelCheckpoint:
        """Make the callback that saves after validation, or at the end of epochs."""
        from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint

        return ModelCheckpoint(
            dirpath=self.folder,
            monitor=self.monitor,
            mode=self.mode,
            save_top_k=self.save_top_k,
            save_last=self.save_last,
            every_n_epochs=self.every_n_epochs,
            asynchronous=self.asynchronous,
        )

    def build_stepwise(self) -> ModelCheckpoint | None:
        """Build the callback that saves every n-th step; None if `every_n_steps` is none or 0.

        Between two validations nothing has measured the model, so its checkpoints cannot be ranked beside those that were.
        """
        from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint

        if not self.every_n_steps:
            return None
        return ModelCheckpoint(
            dirpath=self.folder,
            filename="{step}",
            save_top_k=-1 if self.save_top_k == -1 else 1,
            save_last=False,
            every_n_train_steps=self.every_n_steps,
            asynchronous=self.asynchronous,
        )


@dataclass(frozen=True, kw_only=True)
class Stopping(Checked):
    """Stop when a value no longer improves."""

    monitor: str = "val/loss"
    """Logged value to monitor."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""
    patience: NonNegativeInt = 10
    """Validation runs without improvement before training stops."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""

    def build(self) -> EarlyStopping:
        from arclight.trainer.callbacks.early_stopping import EarlyStopping

        return EarlyStopping(monitor=self.monitor, mode=self.mode, patience=self.patience, min_delta=self.min_delta)


@dataclass(frozen=True, kw_only=True)
class EMA(Checked):
    """Keep an exponential moving average of the weights and evaluate with it."""

    decay: ProperFraction = 0.999
    """Decay of the average at each step, in [0, 1)."""
    ramp_steps: NonNegativeInt = 200
    """The decay grows as decay * (1 - exp(-step / ramp_steps)), so that early averages follow quickly; 0 turns the ramp off."""

    def build(self) -> EMAWeightAveraging:
        from arclight.trainer.callbacks.weights.weight_averaging import EMAWeightAveraging

        return EMAWeightAveraging(decay=self.decay, ramp_steps=self.ramp_steps)


@dataclass(frozen=True, kw_only=True)
class Guard(Checked):
    """Skip updates whose loss or gradients are NaN or infinite, or whose loss is a spike."""

    policy: Literal["skip", "rollback", "stop"] = "skip"
    """Action beside skipping: none, roll back to the newest earlier checkpoint, or stop the run."""
    sigma: PositiveFloat | None = 6.0
    """A loss this many standard deviations above the mean of the recent ones is a spike; none checks for NaN and infinity only."""
    window: Annotated[int, Interval(ge=2)] = 100
    """Number of recent good updates for mean and deviation."""
    patience: PositiveInt = 10
    """Bad updates in a row (or rollbacks) after which the run ends."""

    def build(self) -> LossGuard:
        from arclight.trainer.callbacks.loss_guard import LossGuard

        return LossGuard(
            self.policy, sigma=self.sigma, window=self.window, warmup=min(20, self.window), patience=self.patience
        )


@dataclass(frozen=True, kw_only=True)
class Timeline(Checked):
    """Draw one training step of a pipeline (plots/pipeline.html).

    It shows the actions of each rank and its idle time by cause.
    """

    after: NonNegativeInt = 3
    """Steps to skip first, which allocate and compile."""
    steps: PositiveInt = 5
    """Steps to record; the one of median length is drawn."""
    activations: bool = False
    """Count all tensors saved for backward as memory on a CPU, which slows these steps."""

    def build(self) -> PipelineTimeline:
        from arclight.trainer.callbacks.monitoring.pipeline_timeline import PipelineTimeline

        return PipelineTimeline(self.after, self.steps, activations=self.activations)


@dataclass(frozen=True, kw_only=True)
class Curvature(Checked):
    """Log Barzilai-Borwein step sizes and the gradient's Lipschitz constant."""

    every_n_steps: PositiveInt = 50
    """Measure each n-th optimizer step."""

    def build(self) -> CurvatureMonitor:
        from arclight.trainer.callbacks.monitoring.curvature_monitor import CurvatureMonitor

        return CurvatureMonitor(self.every_n_steps)


@dataclass(frozen=True, kw_only=True)
class Activations(Checked):
    """Log norms and kurtosis of modules' outputs."""

    every_n_steps: PositiveInt = 50
    """Measure each n-th optimizer step."""
    modules: str = ""
    """Regular expression of the modules' names; empty: the model's repeated blocks."""

    def build(self) -> ActivationMonitor:
        from arclight.trainer.callbacks.monitoring.activation_monitor import ActivationMonitor

        return ActivationMonitor(self.every_n_steps, self.modules)


@dataclass(frozen=True, kw_only=True)
class Diloco(Checked):
    """Train replicas independently and exchange pseudo-gradients every sync_every steps.

    Douillard et al. 2023.

    They are the processes of strategy = "replicas", or the dp_replicate groups of a plan.
    """

    sync_every: PositiveInt = 100
    """Steps between two exchanges."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of the outer optimizer."""
    outer_momentum: ProperFraction = 0.9
    """Nesterov momentum of the outer optimizer, in [0, 1)."""
    fragments: PositiveInt = 1
    """Fragments of the model, exchanged in turn."""

    def build(self) -> DiLoCo:
        from arclight.trainer.callbacks.weights.diloco import DiLoCo

        return DiLoCo(self.sync_every, self.outer_lr, self.outer_momentum, fragments=self.fragments)
