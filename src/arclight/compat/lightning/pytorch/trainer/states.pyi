# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loop.progress import RunningStage as RunningStage
from arclight.trainer.loop.progress import TrainerFn as TrainerFn
from arclight.trainer.loop.progress import TrainerState as TrainerState
from arclight.trainer.loop.progress import TrainerStatus as TrainerStatus

__all__ = [
    "RunningStage",
    "TrainerFn",
    "TrainerState",
    "TrainerStatus",
]
