"""Train any ``Module``: Trainer, training loop, checkpoints, callbacks, loggers and Fabric.

In: a Module, dataloaders or a DataModule, settings; out: trained weights and a run folder. Open ``trainer`` first (the public class),
then ``loop.session`` (one fit from launch to teardown) and ``loop.fit`` (the innermost loop). A user subclasses ``module``,
``datamodule`` and ``callback``; ``settings`` checks the Trainer's arguments. ``data`` brings batches, ``logging`` collects ``self.log``,
``checkpoint`` saves and resumes, ``run`` keeps the folder and its report; ``callbacks``, ``loggers``, ``profilers`` and ``tuner`` hold
what users choose from. ``fabric`` is for a loop of one's own, and its ``checkpoint_io`` serves both. ``hparams``, ``diagnosis``,
``summary`` and ``throughput`` are helpers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback as Callback
    from arclight.trainer.callbacks.settings import EMA as EMA
    from arclight.trainer.callbacks.settings import Checkpointing as Checkpointing
    from arclight.trainer.callbacks.settings import Stopping as Stopping
    from arclight.trainer.datamodule import DataModule as DataModule
    from arclight.trainer.logging.reporting import NonFiniteLossError as NonFiniteLossError
    from arclight.trainer.module import Module as Module
    from arclight.trainer.run.folder import RunFolder as RunFolder
    from arclight.trainer.settings import TrainerSettings as TrainerSettings
    from arclight.trainer.trainer import Trainer as Trainer

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Callback": "arclight.trainer.callback",
        "DataModule": "arclight.trainer.datamodule",
        "Module": "arclight.trainer.module",
        "NonFiniteLossError": "arclight.trainer.logging.reporting",
        "RunFolder": "arclight.trainer.run.folder",
        "Trainer": "arclight.trainer.trainer",
        "TrainerSettings": "arclight.trainer.settings",
    }
    | dict.fromkeys(("EMA", "Checkpointing", "Stopping"), "arclight.trainer.callbacks.settings"),
)
