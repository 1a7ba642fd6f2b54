"""Run a user's own loop on devices, precision and processes.

In: a model, optimizers, loaders; out: the same, wrapped.

Open ``fabric`` first: the class and its arguments. ``wrappers`` are what it returns for a module, an optimizer and a loader,
``checkpoint_io`` writes and reads checkpoints, a Trainer's too, ``strategies`` chooses among strategies.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.fabric.fabric import Fabric as Fabric

__getattr__, __dir__, __all__ = lazy(__name__, {"Fabric": "arclight.trainer.fabric.fabric"})
