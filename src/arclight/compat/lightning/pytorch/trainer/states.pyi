# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.states import RunningStage as RunningStage
from arclight.trainer.states import TrainerFn as TrainerFn
from arclight.trainer.states import TrainerState as TrainerState
from arclight.trainer.states import TrainerStatus as TrainerStatus

__all__ = [
    "RunningStage",
    "TrainerFn",
    "TrainerState",
    "TrainerStatus",
]
