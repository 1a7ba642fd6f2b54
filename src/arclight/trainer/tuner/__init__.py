"""Find a learning rate or a batch size by trial runs that leave no trace.

In: a trainer and a module; out: the setting found. Open ``tuning`` first (`Tuner`); ``lr_finder`` and ``batch_size_scaling`` search,
``trial`` runs and restores.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.tuner.lr_finder import LRFinder as LRFinder
    from arclight.trainer.tuner.tuning import Tuner as Tuner

__getattr__, __dir__, __all__ = lazy(
    __name__, {"LRFinder": "arclight.trainer.tuner.lr_finder", "Tuner": "arclight.trainer.tuner.tuning"}
)
