"""The parser of ``LightningCLI``: jsonargparse's, which also knows trainers, modules, data modules, callbacks, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import require
from arclight.trainer import Callback, DataModule, Module, Trainer

jsonargparse = require("jsonargparse", extra="cli")
jsonargparse.register_unresolvable_import_paths(torch)

AUTOMATIC = "AUTOMATIC"
Kinds = type | tuple[type, ...]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """The schedule of that name, which is told what to watch where it is made: a command line has no other place for it."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
ArgsType = list[str] | dict[str, Any] | jsonargparse.Namespace | None
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]


class LightningArgumentParser(jsonargparse.ArgumentParser):  # type: ignore[name-defined]
    """Reads values from the command line, configuration files and, with ``default_env``, variables ``<env_prefix>_...``."""

    def __init__(
        self, *args: Any, description: str = "Lightning Trainer command line tool", env_prefix: str = "PL",
        default_env: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self._optimizers: dict[str, tuple[Kinds, str]] = {}
        self._lr_schedulers: dict[str, tuple[Kinds, str]] = {}

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> Any:
        """Take the constructor's arguments of a trainer, module, data module or callback under ``nested_key``.

        With ``subclass_mode`` any subclass may be named. Raises MisconfigurationError for another kind of class.
        """
        if not isinstance(lightning_class, type) and callable(lightning_class):
            lightning_class = jsonargparse.class_from_function(lightning_class)
        if not (
            isinstance(lightning_class, type) and issubclass(lightning_class, (Trainer, Module, DataModule, Callback))
        ):
            raise MisconfigurationError(
                f"Cannot add arguments from: {lightning_class}. You should provide either a callable or a subclass of: "
                "Trainer, LightningModule, LightningDataModule, or Callback."
            )
        if issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
        made_here = not issubclass(lightning_class, Trainer)  # the trainer is made last, by the command line itself
        return self.add_class_arguments(
            lightning_class, nested_key, fail_untyped=False, instantiate=made_here, sub_configs=True
        )

    def add_optimizer_args(
        self, optimizer_class: Kinds = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Take an optimizer's arguments: of one class, or of any subclass of those in a tuple.

        ``link_to``: an argument of the model that gets them; by default they become its ``configure_optimizers``.
        """
        self._add_later(optimizer_class, nested_key, "params")
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Kinds = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """The same for a learning-rate schedule."""
        self._add_later(lr_scheduler_class, nested_key, "optimizer")
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_later(self, kinds: Kinds, key: str, first: str) -> None:
        """Arguments of what can be made only when ``first``, its first argument, is there."""
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {first}}
        if isinstance(kinds, tuple):
            self.add_subclass_arguments(kinds, key, **options)
        else:
            self.add_class_arguments(kinds, key, sub_configs=True, **options)

    def link_optimizers(self) -> None:
        """Hand what optimizers and schedules were given to the arguments that they are linked to."""
        for key, (kinds, target) in {**self._optimizers, **self._lr_schedulers}.items():
            if target == AUTOMATIC:
                continue
            if isinstance(kinds, tuple):
                self.link_arguments(key, target)
            else:
                self.link_arguments(key, target, compute_fn=_naming(kinds))

    def automatic(self, which: str) -> list[str]:
        """Keys of the ``"optimizers"`` or ``"lr_schedulers"`` that become ``configure_optimizers``."""
        return [key for key, (_, target) in getattr(self, f"_{which}").items() if target == AUTOMATIC]

    def named(self, which: str, key: str, given: Any) -> dict[str, Any] | None:
        """``given`` with the class that it is for; None where nothing was given."""
        kinds = getattr(self, f"_{which}")[key][0]
        return given if isinstance(kinds, tuple) else _naming(kinds)(given)


def _naming(kind: type) -> Callable[[Any], dict[str, Any]]:
    def name(given: Any) -> dict[str, Any]:
        values = given.as_dict() if isinstance(given, jsonargparse.Namespace) else given
        return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": values or {}}

    return name
