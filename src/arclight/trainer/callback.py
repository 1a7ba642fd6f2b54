"""Define Callback, whose hooks the Trainer calls, and the abilities that callbacks may have.

Users and all callbacks of this package subclass it; ``loop.hooks`` resolves only hooks that a subclass or an instance overrides. Names
and arguments of hooks are Lightning 2.x's and stay; state keys and `NEEDED` are in checkpoints. A further ability is a Protocol here:
``loop.step`` asks for `BuildsStep`, ``checkpoint.state`` for `AveragesWeights` and `ReplacesWeights`, ``checkpoint.resume`` for `KeepsLast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


NEEDED = "arclight.needed"
"""Key in a callback's state. Its text says why a trainer without this callback must refuse the checkpoint: the weights mean something
else then."""


class Callback:
    """Base class of callbacks; a hook that is not overridden costs nothing.

    Beside those below, ``on_progress(trainer, pl_module)`` is called at most ten times a second while batches run: the place
    for displays. Every hook gets the trainer and the module first. State that must survive a resume goes into
    :meth:`state_dict` as plain data and tensors.
    """

    runs_last: bool = False
    """Whether its hooks at the end of a training batch and around epochs and runs come after the module's, as it judges or saves what changed."""
    runs_after_checkpoints: bool = False
    """Whether it is ordered behind callbacks that save, because it may end the run."""
    log: Callable[..., None]
    """:meth:`Module.log` while a trainer runs: its values belong to the callback's hook."""
    log_dict: Callable[..., None]
    """:meth:`Module.log_dict` while a trainer runs."""
    unused_hooks: frozenset[str] = frozenset()
    """Overridden hooks that this instance's settings turn off; the trainer does not call them."""

    @property
    def state_key(self) -> str:
        """Key under which this callback's state is saved.

        It must differ between instances that keep different state.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **settings: Any) -> str:
        return f"{type(self).__qualname__}{settings!r}"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Run before fit, validate, test or predict begins."""

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Run after fit, validate, test or predict ended."""

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Run on any exception, before it reaches the caller."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Change a checkpoint before it is saved; not called for one of weights alone."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Inspect a loaded checkpoint before it is restored."""

    # -- fit -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None: ...

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None: ...

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: torch.Tensor) -> None: ...

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None: ...

    # -- validate, test, predict -----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...


@runtime_checkable
class BuildsStep(Protocol):
    """Protocol of callbacks that perform the training step in their own way.

    Of a trainer's callbacks the first one that has it is used.
    """

    def build_step(
        self, trainer: Trainer, module: Module, forward: Callable[[Any, int], Any]
    ) -> Callable[[Any, int], Any]:
        """Return what the loop calls for a batch and its index; ``forward`` runs ``training_step``."""


@runtime_checkable
class AveragesWeights(Protocol):
    """A callback that keeps averages of the weights, which checkpoints hold beside them."""

    def averages(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, averaged weights by name in each."""

    def load_averages(self, entries: dict[str, Any]) -> None:
        """Restore the averages from a checkpoint's entries."""


@runtime_checkable
class ReplacesWeights(Protocol):
    """A callback whose checkpoints hold other weights than the module has.

    So do those of weights alone.
    """

    def weights_to_save(self, pl_module: Module, weights: dict[str, Any]) -> dict[str, Any]:
        """Return what is saved in place of ``weights``, the module's state dict."""


@runtime_checkable
class KeepsLast(Protocol):
    """A callback that knows which checkpoints a resume may go on from."""

    def last_checkpoints(self) -> set[str]:
        """Return the paths of the newest of each kind that it keeps."""


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints.

    They are ordered behind all others but those with `runs_after_checkpoints`.
    """

    runs_last = True

    def saved_paths(self) -> set[str]:
        """List the complete checkpoints that this callback keeps."""
        named = {getattr(self, "last_model_path", ""), getattr(self, "best_model_path", "")}
        return (named | set(getattr(self, "best_k_models", {}))) - {""}

    def forget_later_steps(self, trainer: Trainer) -> None:
        """Adopt an earlier step of the same fit after a rollback. Every rank calls this."""
