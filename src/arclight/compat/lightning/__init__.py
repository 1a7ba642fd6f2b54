"""Offer Lightning's names to scripts that import ``arclight.compat.lightning`` instead.

``import arclight.compat.lightning as L``, ``import arclight.compat.lightning.pytorch as pl``, ``.fabric`` and the public submodules that
:mod:`arclight.compat.lightning.names` lists hold our own classes: ``L.LightningModule is arclight.Module``. Where Lightning's habits or
signatures differ, they hold what this folder defines: the ``Trainer``, a subclass of ours, Fabric's loggers, the command line.
The import also shows log messages of level INFO, unless logging is configured.
"""

from __future__ import annotations

import logging

from arclight.compat.lightning.modules import install

install(__name__)


def _show_messages() -> None:
    """Show messages of level INFO, as Lightning does, unless logging is configured."""
    ours, root = logging.getLogger("arclight"), logging.getLogger()
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    if not root.hasHandlers() and not ours.handlers:
        ours.addHandler(logging.StreamHandler())
        ours.propagate = False


_show_messages()
