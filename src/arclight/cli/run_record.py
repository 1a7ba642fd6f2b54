"""Record a run beside its results, so that it can be repeated: recipe, environment, log.

`train`, `demo`, `tune.trial` and `federated_run` (the centralised run) pass `RunRecord` as a callback, `user_run` its subclass. The first line
of ``recipe.toml`` is the command that repeats the run, with measured settings as flags. Names of the files, and that line, which `arguments`
shows for a run of a user's class, stay.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

from arclight.fabric.atomic_replace import replace_text
from arclight.recipe import write
from arclight.trainer import Callback
from arclight.trainer.run.folder import assignments

if TYPE_CHECKING:
    from arclight.cli.schema import Recipe
    from arclight.trainer import Module, RunFolder, Trainer

_LOG = logging.getLogger("arclight")


@runtime_checkable
class FreezesAtSteps(Protocol):
    """Callback that freezes something at a step, such as ranges of quantization-aware training."""

    def check_reached(self, steps: float) -> None:
        """Raise MisconfigurationError if a run of ``steps`` steps does not reach that step."""


class Preparation(logging.StreamHandler[TextIO]):
    """Print log messages on standard output until `RunRecord` has opened the run's log."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(logging.Formatter("%(message)s"))

    def __enter__(self) -> Preparation:
        _LOG.setLevel(logging.INFO)
        _LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.removeHandler(self)


class RunRecord(Callback):
    """Write recipe.toml and environment.json when the run starts, and log.txt meanwhile."""

    def __init__(self, recipe: Recipe | str) -> None:
        self.text = (
            recipe if isinstance(recipe, str) else write(recipe)
        )  # now, so that a recipe which cannot be written stops the run before it starts
        self.handlers: list[logging.Handler] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Write the recipe and the environment to the run folder, and open its log.

        Not earlier: only now is it known which run a resumed one continues, and how many steps it has.
        """
        for callback in () if trainer.fast_dev_run else trainer.callbacks:
            if isinstance(callback, FreezesAtSteps):
                callback.check_reached(trainer.estimated_stepping_batches)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        run = trainer.run_folder
        self.keep(run)
        run.write_environment(command=sys.argv)
        for shown in [handler for handler in _LOG.handlers if isinstance(handler, Preparation)]:
            _LOG.removeHandler(shown)  # from here on the progress bar has the terminal
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(logging.Formatter("arclight: %(message)s"))
        self.handlers = [run.log_handler(), terminal]
        for handler in self.handlers:
            _LOG.addHandler(handler)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Write and print the values that "auto" settings were measured to have."""
        if trainer.is_global_zero and trainer.measured and not trainer.fast_dev_run:
            self.keep(trainer.run_folder, measured_flags(trainer.measured))
            print(f"measured: {assignments(trainer.measured)}")

    def keep(self, run: RunFolder, flags: str = "") -> None:
        """Write the settings where the run keeps them; ``flags`` fix what was measured."""
        self.write(run.recipe, f"arclight train {run.recipe}{flags}")

    def write(self, path: Path, command: str) -> None:
        replace_text(path, f"# {command} repeats this run.\n\n{self.text}", durable=False)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Close the log of a run that failed or was interrupted, for which no teardown follows."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        for handler in self.handlers:
            _LOG.removeHandler(handler)
            handler.close()
        self.handlers = []


def measured_flags(measured: Mapping[str, Any]) -> str:
    """Return the flags of the command line that fix measured settings, each after a space.

    One that was measured differently for several layers has none: the run's checkpoints keep it.
    """
    fixed = {f"{'trainer' if name == 'precision' else 'task'}.{name}": value for name, value in measured.items()}
    return "".join(f" --{name} {value}" for name, value in fixed.items() if isinstance(value, str | int))
