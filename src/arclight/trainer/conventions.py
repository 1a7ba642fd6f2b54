"""Where two habits of running a fit differ: ours, and Lightning's for code that was written for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """One field for every difference. The defaults are ours; ``arclight.compat.lightning`` has the other set."""

    zero_grad_first: bool = False
    """Clear gradients between forward and backward, as a closure does, rather than right after the optimizer's step."""
    closures: bool = False
    """Each optimizer's step is given the closure that runs forward and backward; else only those that ask for one."""
    count_optimizer_steps: bool = False
    """``global_step`` counts each optimizer's steps rather than batches in which any of them stepped."""
    windows_span_epochs: bool = True
    """An accumulation window may begin in one epoch and end in the next; else the epoch's end closes it."""
    weigh_windows: bool = True
    """Batches of a window count by their samples; else each counts 1 / ``accumulate_grad_batches``."""
    stop_on_nonfinite: bool = True
    """A NaN or infinite loss ends the run with NonFiniteLossError."""
    sanity_val_steps: int = 0
    """Default of ``num_sanity_val_steps``."""
    checkpoint_suffix: str = ""
    """Ending of checkpoint names; empty for folders."""
    run_folders: bool = True
    """Files go to ``runs/<name>/<n>/`` with a report; else where loggers and callbacks put them."""
    version: tuple[str, str] = ("arclight_version", "0.1.0")
    """The entry of a checkpoint that names what wrote it."""
    evaluate_best: bool = False
    """``validate``, ``test`` and ``predict`` without a module, after a fit, load the best checkpoint; else they take the module as it is."""
    exit_on_interrupt: bool = False
    """After Ctrl+C has been dealt with the process ends with status 1; else KeyboardInterrupt reaches the caller."""
    metrics_by_batch: bool = False
    """A progress bar asks for its metrics after every batch (where that does not wait for a device), not ten times a second."""
    callbacks_factory: str = "arclight.callbacks_factory"
    """Group of the entry points by which installed packages bring callbacks."""
    validate_before_stop: bool = False
    """A fit that ``should_stop`` ends within an epoch validates before it leaves, where that epoch is one that validates."""
    skip_leaves_out_validation: bool = False
    """An epoch whose rest ``on_train_batch_start`` skips is not validated."""
    frequency_counts_batches: bool = False
    """A scheduler's ``frequency`` at step interval counts the batches of its epoch, not the updates of the fit."""
    drop_unpicklable_hparams: bool = False
    """A run takes what cannot be pickled out of its module's ``hparams``; else a checkpoint alone leaves out what is no plain data."""
    zero_based_rows: bool = False
    """A logger's row of step values is numbered by the step that made it, counted from 0, not by steps completed."""


OURS = Conventions()
LIGHTNING = Conventions(
    zero_grad_first=True,
    closures=True,
    count_optimizer_steps=True,
    windows_span_epochs=False,
    weigh_windows=False,
    stop_on_nonfinite=False,
    sanity_val_steps=2,
    checkpoint_suffix=".ckpt",
    run_folders=False,
    version=("pytorch-lightning_version", "2.6.6"),
    evaluate_best=True,
    exit_on_interrupt=True,
    metrics_by_batch=True,
    callbacks_factory="lightning.pytorch.callbacks_factory",
    validate_before_stop=True,
    skip_leaves_out_validation=True,
    frequency_counts_batches=True,
    drop_unpicklable_hparams=True,
    zero_based_rows=True,
)
