"""Stand in for other projects: their names over our modules.

In comes a script that imports ``lightning``, ``lightning.pytorch`` or ``lightning.fabric``, with its import changed to
``arclight.compat.lightning``; out go our own classes under the names that it knows (``L.LightningModule is arclight.Module``), and what
only those names need: defaults and habits of Lightning's Trainer, its loop objects, command line, samplers, collectives, loggers of Fabric,
utilities and demo models. Open :mod:`arclight.compat.lightning.names` first: one table maps each public name to ours, and says which are
refused and why. :mod:`~arclight.compat.lightning.modules` makes importable modules of it (the ``.pyi`` files beside are written from it for
type checkers), and :mod:`~arclight.compat.lightning.trainer` holds the behaviour in which Lightning's Trainer differs, a
:class:`arclight.trainer.settings.TrainerBehavior`. Nothing else in Arclight imports this room.
"""
