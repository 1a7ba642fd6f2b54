"""Schema of a recipe for a training run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from arclight._intervals import Checked, Interval
from arclight.parallel.plan import Plan
from arclight.text.settings import LanguageTask
from arclight.trainer.settings import EMA, Checkpointing, Diloco, Guard, Stopping, Timeline, TrainerSettings
from arclight.vision.tasks.settings import DetectionTask


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """One training run, completely described."""

    name: str = "run"
    """Name of the run; its folder is <root>/<name>/<number>/."""
    root: Path = Path("runs")
    """Folder of all runs."""
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = 0
    """Seed of every random stream, from 0 to 2**32 - 1."""
    task: DetectionTask | LanguageTask
    """Model and data; or kind = "package.module:Class", a class of your own with a method build()."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """Length, precision and devices of training."""
    plan: Plan | None = None
    """Parallelism of the model; none leaves that to trainer.strategy."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """Checkpoints to write and to keep."""
    stopping: Stopping | None = None
    """Stop early when a value no longer improves."""
    ema: EMA | None = None
    """Keep an exponential moving average of the weights and evaluate with it."""
    guard: Guard | None = None
    """Skip updates whose loss or gradients are NaN or infinite, or whose loss is a spike."""
    diloco: Diloco | None = None
    """Train replicas independently and exchange pseudo-gradients every sync_every steps."""
    timeline: Timeline | None = None
    """Draw a training step of the pipeline, as plots/pipeline.html."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if re.match(r"[A-Za-z][\w+.-]+:/", str(self.root)):
            raise ValueError(
                f"root = {self.root}: a run is written to a folder of this machine, not to an address; what is finished can be "
                "copied there"
            )
        if not callable(getattr(self.task, "build", None)):
            raise ValueError(f"{type(self.task).__name__} has no method build() that makes a module and its data")
