"""Train, scale, federate, quantize, export and serve PyTorch models.

The names that nearly every program uses are here, and stay; all others are in the rooms (``arclight.vision``, ...). Importing this package
does not import torch: each name is fetched when it is first used.

``trainer`` trains a ``Module`` on batches of ``data`` with ``optim``, on the devices of ``fabric``, sharded by ``parallel``, saved by
``checkpoint``. ``vision`` and ``text`` are tasks, ``federated`` trains at many sites; ``deploy`` makes programs, which ``serve`` serves.
``cli`` is the command, ``recipe`` reads its files, ``compat`` has the names of Lightning.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric import seed_everything as seed_everything
    from arclight.trainer import Callback as Callback
    from arclight.trainer import DataModule as DataModule
    from arclight.trainer import Module as Module
    from arclight.trainer import Trainer as Trainer
    from arclight.trainer.callbacks import EarlyStopping as EarlyStopping
    from arclight.trainer.callbacks import EMAWeightAveraging as EMAWeightAveraging
    from arclight.trainer.callbacks import LearningRateMonitor as LearningRateMonitor
    from arclight.trainer.callbacks import ModelCheckpoint as ModelCheckpoint
    from arclight.trainer.callbacks import RichProgressBar as RichProgressBar
    from arclight.trainer.fabric.fabric import Fabric as Fabric

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Callback": "arclight.trainer",
        "DataModule": "arclight.trainer",
        "EMAWeightAveraging": "arclight.trainer.callbacks",
        "EarlyStopping": "arclight.trainer.callbacks",
        "Fabric": "arclight.trainer.fabric.fabric",
        "LearningRateMonitor": "arclight.trainer.callbacks",
        "Module": "arclight.trainer",
        "ModelCheckpoint": "arclight.trainer.callbacks",
        "RichProgressBar": "arclight.trainer.callbacks",
        "Trainer": "arclight.trainer",
        "seed_everything": "arclight.fabric",
    },
)
