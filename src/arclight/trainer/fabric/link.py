"""Link a Module to the Fabric that set it up: what it logs and gathers goes there."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from arclight.trainer.logging.rules import refuse_value


class FabricLink:
    """The part of a Module that knows its Fabric."""

    _fabric: Any = None
    _fabric_optimizers: list[Any] = []

    @property
    def fabric(self) -> Any:
        """The Fabric that set this module up, None without one."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        """Of the modules inside as well. They do not keep it alive."""
        if fabric is not None and not isinstance(fabric, weakref.ProxyTypes):
            fabric = weakref.proxy(fabric)
        for part in self.modules() if isinstance(self, nn.Module) else ():
            if isinstance(part, FabricLink):
                part.__dict__["_fabric"] = fabric

    def _log_through_fabric(self, values: Mapping[str, Any], logger: bool | None) -> None:
        """Send numbers to the Fabric's loggers. Raises ValueError for what is no number."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"`self.log_dict({dict(values)})` was called, but nested dictionaries cannot be logged"
                )
            if not isinstance(value, (torch.Tensor, numbers.Number)):
                raise refuse_value(name, value)
        if logger is not False:
            self._fabric.log_dict(metrics=values)


class TrainerOfFabric:
    """Stand in for ``self.trainer`` in a Fabric's loop: the Fabric, under the names that both have."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._fabric, name)
        except AttributeError:
            raise AttributeError(
                f"Your LightningModule code tried to access `self.trainer.{name}`, which no Fabric has: in a loop of your own, "
                "keep it yourself, or ask `self.fabric`"
            ) from None
