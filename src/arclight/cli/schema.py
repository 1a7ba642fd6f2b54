"""Define the settings of a training run: of a built-in task, or of the user's own module.

Verbs that take a recipe read a `Recipe` (by `arguments`), ``arclight federate`` its subclass `FederatedRecipe`; `user_module` reads a `UserRun`.
Names of fields are keys of recipes and of saved runs: they must stay. Tasks, loggers and callbacks define their own tables; a new kind joins
one of the unions here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from arclight._intervals import Checked, Interval
from arclight.deploy.quantizing.training_settings import QAT
from arclight.deploy.settings import check_plan
from arclight.parallel.plan import Plan
from arclight.recipe import Imported
from arclight.text.heads.head_settings import AnswerTask, SequenceTask, TokenTask
from arclight.text.settings import Experts, LanguageTask
from arclight.trainer.callbacks.settings import (
    EMA,
    Activations,
    Checkpointing,
    Curvature,
    Diloco,
    Guard,
    Stopping,
    Timeline,
)
from arclight.trainer.loggers.settings import CSV, ClearML, Comet, MLflow, TensorBoard, Wandb
from arclight.trainer.settings import TrainerSettings
from arclight.vision.tasks.settings import (
    ClassificationTask,
    CornersTask,
    DetectionTask,
    OrientedDetectionTask,
    PoseTask,
    SegmentationTask,
)


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Checked):
    """Settings of every run: its folder, seed, trainer, plan and callbacks."""

    name: str | None = None
    """Name of the run, whose folder is <root>/<name>/<number>/; None: the name of the module's class, in lower case."""
    root: Path = Path("runs")
    """Folder of all runs."""
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = 0
    """Seed of every random stream, from 0 to 2**32 - 1."""
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
    """Skip updates of NaN or infinite losses or gradients, and of loss spikes."""
    diloco: Diloco | None = None
    """Train replicas apart; exchange pseudo-gradients every sync_every steps."""
    qat: QAT | None = None
    """Quantization-aware training: round as the exported program will."""
    timeline: Timeline | None = None
    """Draw a training step of the pipeline, as plots/pipeline.html."""
    monitors: tuple[Activations | Curvature | Experts, ...] = ()
    """Values to measure each n-th step; or kind = "package.module:Class", with build()."""
    loggers: tuple[TensorBoard | Wandb | MLflow | Comet | ClearML | CSV, ...] = ()
    """Loggers beside the run folder's metrics.csv, each a table [[loggers]]; or kind = "package.module:Class", a Logger of your own."""
    search: dict[str, Any] | None = None
    """Ranges that arclight tune searches, by field: task.optimizer.lr = "1e-4:1e-2:log"; training leaves them alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if re.match(r"[A-Za-z][\w+.-]+:/", str(self.root)):
            raise ValueError(
                f"root = {self.root}: a run is written to a folder of this machine, not to an address; what is finished can be "
                "copied there"
            )
        if self.qat is not None and self.plan is not None:
            check_plan(self.qat.recipe, self.plan)


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingRun):
    """One training run, completely described."""

    name: str = "run"
    """Name of the run; its folder is <root>/<name>/<number>/."""
    task: (
        DetectionTask | SegmentationTask | PoseTask | CornersTask | OrientedDetectionTask | ClassificationTask
        | LanguageTask | SequenceTask | TokenTask | AnswerTask
    )  # fmt: skip
    """Model and data; or kind = "package.module:Class", a class of your own with a method build()."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(getattr(self.task, "build", None)):
            raise ValueError(f"{type(self.task).__name__} has no method build() that makes a module and its data")


@dataclass(frozen=True, kw_only=True)
class UserRun(TrainingRun):
    """One run of a module of your own, completely described."""

    model: Imported
    """The module: kind = "package.module:Class" and the arguments of its constructor."""
    data: Imported | None = None
    """The data module, likewise; none if the module has loaders of its own."""

    @property
    def runs(self) -> Path:
        """Folder of the runs of this name, by default the module's."""
        return self.root / (self.name or self.model.target.rpartition(":")[2].rpartition(".")[2].lower())
