"""Lightning's names over our rooms: change ``import lightning`` to ``import arclight.compat.lightning``, keep the rest.

``import arclight.compat.lightning as L``, ``import arclight.compat.lightning.pytorch as pl``, ``.fabric`` and their public
submodules are all here, and hold our own classes: ``L.LightningModule is arclight.Module``. Only the ``Trainer`` differs: a
subclass of ours that keeps Lightning's habits. :mod:`arclight.compat.lightning.names` is the list of every name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight.compat.lightning.modules import install

if TYPE_CHECKING:
    from arclight import __version__ as __version__
    from arclight.compat.lightning.trainer import Trainer as Trainer
    from arclight.fabric import seed_everything as seed_everything
    from arclight.trainer import Callback as Callback
    from arclight.trainer import DataModule as LightningDataModule
    from arclight.trainer import Module as LightningModule
    from arclight.trainer.fabric import Fabric as Fabric

install(__name__)
