"""Offer Lightning's names: replace ``import lightning`` and keep the rest.

Import ``arclight.compat.lightning`` instead.

``import arclight.compat.lightning as L``, ``import arclight.compat.lightning.pytorch as pl``, ``.fabric`` and their public
submodules are all here, and hold our own classes: ``L.LightningModule is arclight.Module``. Only the ``Trainer`` differs: a
subclass of ours that keeps Lightning's habits. :mod:`arclight.compat.lightning.names` is the list of every name.
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
