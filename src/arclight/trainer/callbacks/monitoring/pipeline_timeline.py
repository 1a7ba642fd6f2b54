"""Write an HTML timeline of a pipeline's steps.

A recipe's ``[timeline]`` builds it (``callbacks.settings``), or users pass it. ``parallel.pipeline`` records and draws; this chooses the
step and the files, ``plots/pipeline.*`` in the run folder, whose names stay.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.parallel.pipeline.runtime.recording import Recording
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

CAPTION = "One training step of the pipeline, and above it the same simulated with mean times and free transfers. More is in plots/pipeline.html."

log = logging.getLogger(__name__)


class PipelineTimeline(Callback):
    """Record one training step of a pipeline and draw its timeline into the run folder.

    Files: ``plots/pipeline.html``, ``.json`` in Chrome's trace format, and ``.svg`` in the report.

    Of ``steps`` training steps, after the first ``after`` of this fit, it is the one of median length; above it the page has the same
    step simulated with the mean times of each stage, and transfers that take none. ``activations``: see
    `arclight.parallel.pipeline.record`. The processes measure without waiting for each other; they exchange what they have once,
    after the last of these steps. Files that cannot be written, such as on a full disk, are a warning. Raises MisconfigurationError in a
    fit without a pipeline.
    """

    def __init__(self, after: int = 3, steps: int = 5, *, activations: bool = False) -> None:
        if after < 0 or steps < 1:
            raise MisconfigurationError(
                f"PipelineTimeline needs after >= 0 and steps >= 1, not after = {after} and steps = {steps}"
            )
        self.after, self.steps, self.activations = after, steps, activations
        self._run: Recording | None = None
        self._recording = False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.strategy.in_stages:
            raise MisconfigurationError(
                'PipelineTimeline shows the processes of a pipeline, and this run has none: use strategy = "pipeline", or a plan with '
                "pp = 2 or more"
            )
        self._run = Recording(self.after, self.steps, self.activations)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._run is None:
            return
        self._run.stop()
        if self._run.complete:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._run is not None:
            self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None

    def _write(self, trainer: Trainer) -> None:
        from arclight.parallel.pipeline.view.chrome import chrome_trace
        from arclight.parallel.pipeline.view.timeline import timeline

        run, self._run = self._run, None
        assert run is not None
        run.gather()
        if not run.traces:
            rank_zero_warn(f"PipelineTimeline has nothing to show: fewer than {self.after + 1} steps were trained")
            return
        place, simulated = trainer.run_folder, run.simulated  # on each rank
        try:
            folder = place.plots
            path = timeline(
                run, simulated, folder / "pipeline.html", f"{place.name} {place.number}: {run.typical.schedule}"
            )
            timeline(run, simulated, folder / "pipeline.svg")
            chrome_trace(run, folder / "pipeline.json", simulated)
            if trainer.is_global_zero:
                place.caption_plot("pipeline.svg", CAPTION)
                log.info("timeline of the pipeline: %s\n%s", path, run)
        except OSError as error:
            warnings.warn(
                f"the timeline of the pipeline was not drawn ({error}); the run goes on without it", stacklevel=2
            )
