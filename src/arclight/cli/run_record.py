"""What a run folder keeps beside its results, so that the run can be repeated: recipe, environment, log."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from arclight.recipe import write
from arclight.trainer import Callback
from arclight.trainer.run import write_atomically

if TYPE_CHECKING:
    from arclight.cli.schema import Recipe
    from arclight.trainer import Module, Trainer


class RunRecord(Callback):
    """Writes recipe.toml and environment.json when the run starts, and log.txt while it goes on."""

    def __init__(self, recipe: Recipe) -> None:
        self.text = write(recipe)  # now, so that a recipe which cannot be written stops the run before it starts
        self.handler: logging.Handler | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Not earlier: only now is it known which run a resumed one goes on in."""
        if not trainer.is_global_zero:
            return
        run = trainer.run_folder
        write_atomically(run.recipe, f"# arclight train {run.recipe} repeats this run.\n\n{self.text}")
        run.write_environment(command=sys.argv)
        self.handler = run.log_handler()
        logging.getLogger("arclight").addHandler(self.handler)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if self.handler is not None:
            logging.getLogger("arclight").removeHandler(self.handler)
            self.handler.close()
