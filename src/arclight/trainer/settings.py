"""Settings of the trainer and its everyday callbacks (no torch here: a recipe is read without it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from arclight._intervals import (
    Checked,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
)

if TYPE_CHECKING:
    from arclight.trainer.callbacks import (
        DiLoCo,
        EarlyStopping,
        EMAWeightAveraging,
        LossGuard,
        ModelCheckpoint,
        PipelineTimeline,
    )

Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Checked):
    """Length, precision and devices of training."""

    accelerator: str = "auto"
    """Kind of device: auto, cpu, cuda or mps."""
    devices: PositiveInt | Literal["auto", -1] = "auto"
    """Number of processes on this node, one device each."""
    num_nodes: PositiveInt = 1
    """Number of machines."""
    strategy: str = "auto"
    """Distributed strategy: auto, ddp, ddp_spawn, ddp_fork, fsdp, model_parallel, replicas."""
    precision: Precision = "32-true"
    """Arithmetic of forward and backward; auto measures whether bf16-mixed is faster here than 32-true."""
    max_epochs: NonNegativeInt | Literal[-1] | None = None
    """Epochs to train; none with max_steps and max_time unset means 1000, -1 no limit."""
    min_epochs: NonNegativeInt | None = None
    """Minimum number of epochs before a stop request is obeyed."""
    max_steps: NonNegativeInt | Literal[-1] = -1
    """Optimizer steps; -1 means no limit."""
    min_steps: NonNegativeInt | None = None
    """Minimum number of optimizer steps before a stop request is obeyed."""
    max_time: str | None = None
    """Time limit of training, as "DD:HH:MM:SS" or a duration such as "2h"."""
    fast_dev_run: NonNegativeInt | bool = False
    """Run this many batches of everything and write nothing, to find mistakes."""
    limit_train_batches: NonNegativeInt | Fraction | None = None
    """Batches per epoch: a count, or a share in [0, 1]."""
    limit_val_batches: NonNegativeInt | Fraction | None = None
    """Batches per validation run: a count, or a share in [0, 1]."""
    limit_test_batches: NonNegativeInt | Fraction | None = None
    """Batches per test run: a count, or a share in [0, 1]."""
    limit_predict_batches: NonNegativeInt | Fraction | None = None
    """Batches to predict: a count, or a share in [0, 1]."""
    overfit_batches: NonNegativeInt | Fraction = 0.0
    """Train and validate on the same few batches: a count, or a share in [0, 1]; 0 for all."""
    val_check_interval: PositiveInt | PositiveFraction | str | None = None
    """Validate after this many batches (count), this share of an epoch, or this time ("DD:HH:MM:SS")."""
    check_val_every_n_epoch: PositiveInt | None = 1
    """Validate at the end of every n-th epoch; none counts val_check_interval across epochs."""
    num_sanity_val_steps: NonNegativeInt | Literal[-1] = 0
    """Validation batches run before training, to find mistakes early; -1 means all."""
    reload_dataloaders_every_n_epochs: NonNegativeInt = 0
    """Epochs between two calls of the dataloader hooks; 0 never calls them again."""
    use_distributed_sampler: bool = True
    """Shard samples over ranks with a distributed sampler."""
    accumulate_grad_batches: PositiveInt = 1
    """Batches per optimizer step; an accumulation window may continue in the next epoch."""
    gradient_clip_val: NonNegativeFloat | None = None
    """Largest gradient norm (or value); none means no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """Clip the global norm (the default) or each element."""
    log_every_n_steps: NonNegativeInt = 50
    """Steps between two rows of logged values; 0 writes rows of epochs only."""
    enable_progress_bar: bool = True
    """Show progress in the terminal."""
    profiler: str | None = None
    """Profiler: simple, advanced or pytorch."""
    detect_anomaly: bool = False
    """Find the operation whose backward gave NaN; slow."""
    deterministic: bool | Literal["warn"] = False
    """Use only deterministic kernels; warn reports others instead of refusing them."""
    benchmark: bool | None = None
    """Let cuDNN time its kernels for each shape."""
    inference_mode: bool = True
    """Evaluate under torch.inference_mode rather than no_grad."""
    sync_batchnorm: bool = False
    """Synchronise batch norms over all ranks."""
    barebones: bool = False
    """Turn off everything that costs time beside the loop itself."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Checked):
    """Which checkpoints are kept, and where."""

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
        from arclight.trainer.callbacks import ModelCheckpoint

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
        """Make the callback that saves every n-th step; None where `every_n_steps` is none or 0.

        Between two validations nothing has measured the model, so its checkpoints cannot be ranked beside those that were.
        """
        from arclight.trainer.callbacks import ModelCheckpoint

        if not self.every_n_steps or self.save_top_k == 0:
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
        from arclight.trainer.callbacks import EarlyStopping

        return EarlyStopping(monitor=self.monitor, mode=self.mode, patience=self.patience, min_delta=self.min_delta)


@dataclass(frozen=True, kw_only=True)
class EMA(Checked):
    """Keep an exponential moving average of the weights and evaluate with it."""

    decay: ProperFraction = 0.999
    """Decay of the average at each step, in [0, 1)."""
    ramp_steps: NonNegativeInt = 200
    """The decay grows as decay * (1 - exp(-step / ramp_steps)), so that early averages follow quickly; 0 turns the ramp off."""

    def build(self) -> EMAWeightAveraging:
        from arclight.trainer.callbacks import EMAWeightAveraging

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
        from arclight.trainer.callbacks import LossGuard

        return LossGuard(
            self.policy, sigma=self.sigma, window=self.window, warmup=min(20, self.window), patience=self.patience
        )


@dataclass(frozen=True, kw_only=True)
class Timeline(Checked):
    """Draw one training step of a pipeline, with the actions of each rank and its idle time by cause (plots/pipeline.html)."""

    after: NonNegativeInt = 3
    """Steps to skip first, which allocate and compile."""
    steps: PositiveInt = 5
    """Steps to record; the one of median length is drawn."""
    activations: bool = False
    """Count all tensors saved for backward as memory on a CPU, which slows these steps."""

    def build(self) -> PipelineTimeline:
        from arclight.trainer.callbacks import PipelineTimeline

        return PipelineTimeline(self.after, self.steps, activations=self.activations)


@dataclass(frozen=True, kw_only=True)
class Diloco(Checked):
    """Train replicas independently and exchange pseudo-gradients every sync_every steps (Douillard et al. 2023).

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
        from arclight.trainer.callbacks import DiLoCo

        return DiLoCo(self.sync_every, self.outer_lr, self.outer_momentum, fragments=self.fragments)
