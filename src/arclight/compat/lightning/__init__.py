"""Lightning's names over our rooms: change ``import lightning`` to ``import arclight.compat.lightning``, keep the rest.

``import arclight.compat.lightning as L``, ``import arclight.compat.lightning.pytorch as pl``, ``.fabric`` and their public
submodules are all here, and hold our own classes: ``L.LightningModule is arclight.Module``. Only the ``Trainer`` differs: a
subclass of ours that keeps Lightning's habits. :mod:`arclight.compat.lightning.names` is the list of every name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from arclight.compat.lightning.modules import install

if TYPE_CHECKING:
    from arclight.compat.lightning.trainer import Trainer as Trainer
    from arclight.compat.lightning.version import __version__ as __version__
    from arclight.fabric import seed_everything as seed_everything
    from arclight.trainer import Callback as Callback
    from arclight.trainer import DataModule as LightningDataModule
    from arclight.trainer import Module as LightningModule
    from arclight.trainer.fabric import Fabric as Fabric

install(__name__)


def _show_messages() -> None:
    """Scripts written for Lightning see its messages of level INFO without asking; one that set up logging decides itself."""
    ours, root = logging.getLogger("arclight"), logging.getLogger()
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    if not root.hasHandlers() and not ours.handlers:
        ours.addHandler(logging.StreamHandler())
        ours.propagate = False


_show_messages()
