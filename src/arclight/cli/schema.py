"""What a recipe for a training run may say."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from arclight._intervals import Checked, Interval
from arclight.parallel.plan import Plan
from arclight.text.settings import Language
from arclight.trainer.settings import EMA, Checkpointing, Diloco, Guard, Stopping, Timeline, TrainerSettings
from arclight.vision.settings import Detection


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """One training run, completely described."""

    name: str = "run"
    """What the run is called; its files lie in <root>/<name>/<number>/."""
    root: Path = Path("runs")
    """Folder of all runs."""
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = 0
    """Seed of every random stream, from 0 to 2**32 - 1."""
    task: Detection | Language
    """What is learned, from which data; or kind = "package.module:Class", a class of your own with a method build()."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """How long, how precisely and where to train."""
    plan: Plan | None = None
    """How the model is spread over processes; none leaves that to trainer.strategy."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """Which checkpoints are kept."""
    stopping: Stopping | None = None
    """Stop early when a value no longer improves."""
    ema: EMA | None = None
    """Keep an exponential moving average of the weights and evaluate with it."""
    guard: Guard | None = None
    """Leave out updates whose loss or gradients are no finite numbers, or whose loss is a spike."""
    diloco: Diloco | None = None
    """Let replicas train alone and exchange what has become of them now and then."""
    timeline: Timeline | None = None
    """Show a training step of the pipeline, as plots/pipeline.html."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if re.match(r"[A-Za-z][\w+.-]+:/", str(self.root)):
            raise ValueError(
                f"root = {self.root}: a run is written to a folder of this machine, not to an address; what is finished can be "
                "copied there"
            )
        if not callable(getattr(self.task, "build", None)):
            raise ValueError(f"{type(self.task).__name__} has no method build() that makes a module and its data")
