"""Run a Trainer from a command line: Lightning's ``LightningCLI``, on jsonargparse.

Users' scripts import it as ``pytorch.cli``, by the table in `names`; Arclight's own command line is ``arclight``, with recipes. Arguments,
flags and the files it writes are Lightning's. Checkpoints of modules that it has built name `instantiate_module` by path: that and
``_PACKAGES`` stay.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from arclight import checkpoint as checkpoints
from arclight.compat.lightning.names import __version__
from arclight.compat.lightning.trainer import Trainer
from arclight.compat.lightning.utilities import is_overridden
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.seeding import seed_everything
from arclight.fabric.strategies import Strategy
from arclight.trainer import Callback, DataModule, Module, callbacks, loggers
from arclight.trainer import Trainer as NativeTrainer
from arclight.trainer.hparams import given_hyperparameters, register_instantiator

jsonargparse = require("jsonargparse", extra="cli")
jsonargparse.register_unresolvable_import_paths(torch)

AUTOMATIC = "AUTOMATIC"
Kinds = type | tuple[type, ...]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Plateau schedule with its monitored value as an argument, for command lines."""

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
    """Parser of command line, configuration files and environment variables.

    The variables, ``<env_prefix>_...``, only with ``default_env``.
    """

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
        """Add the constructor's arguments of a class under ``nested_key``.

        The class is a trainer, module, data module or callback.

        With ``subclass_mode`` any subclass may be named. Raises MisconfigurationError for another kind of class.
        """
        if not isinstance(lightning_class, type) and callable(lightning_class):
            lightning_class = jsonargparse.class_from_function(lightning_class)
        if not (
            isinstance(lightning_class, type)
            and issubclass(lightning_class, (NativeTrainer, Module, DataModule, Callback))
        ):
            raise MisconfigurationError(
                f"Cannot add arguments from: {lightning_class}. You should provide either a callable or a subclass of: "
                "Trainer, LightningModule, LightningDataModule, or Callback."
            )
        if issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
        made_here = not issubclass(
            lightning_class, NativeTrainer
        )  # the trainer is made last, by the command line itself
        return self.add_class_arguments(
            lightning_class, nested_key, fail_untyped=False, instantiate=made_here, sub_configs=True
        )

    def add_optimizer_args(
        self, optimizer_class: Kinds = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Add an optimizer's arguments: of one class, or of any subclass of those in a tuple.

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
        """Add the arguments of a learning-rate schedule, as `add_optimizer_args` does."""
        self._add_later(lr_scheduler_class, nested_key, "optimizer")
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_later(self, kinds: Kinds, key: str, first: str) -> None:
        """Add the arguments of a class that is built later, when its first one exists."""
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {first}}
        if isinstance(kinds, tuple):
            self.add_subclass_arguments(kinds, key, **options)
        else:
            self.add_class_arguments(kinds, key, sub_configs=True, **options)

    def link_optimizers(self) -> None:
        """Link the values of optimizers and schedules to their target arguments."""
        for key, (kinds, target) in {**self._optimizers, **self._lr_schedulers}.items():
            if target == AUTOMATIC:
                continue
            if isinstance(kinds, tuple):
                self.link_arguments(key, target)
            else:
                self.link_arguments(key, target, compute_fn=_naming(kinds))

    def automatic(self, which: str) -> list[str]:
        """List the keys of ``"optimizers"`` or ``"lr_schedulers"`` for ``configure_optimizers``."""
        return [key for key, (_, target) in getattr(self, f"_{which}").items() if target == AUTOMATIC]

    def named(self, which: str, key: str, given: Any) -> dict[str, Any] | None:
        """Return ``given`` with the class that it is for; None if nothing was given."""
        kinds = getattr(self, f"_{which}")[key][0]
        return given if isinstance(kinds, tuple) else _naming(kinds)(given)


def _naming(kind: type) -> Callable[[Any], dict[str, Any]]:
    def name(given: Any) -> dict[str, Any]:
        values = given.as_dict() if isinstance(given, jsonargparse.Namespace) else given
        return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": values or {}}

    return name


class SaveConfigCallback(Callback):
    """Save the parsed configuration in the trainer's ``log_dir`` when a run starts.

    The file is ``config_filename``.

    Raises RuntimeError if the file is there already, unless ``overwrite``. A subclass may override :meth:`save_config` to
    keep it elsewhere too, or instead with ``save_to_log_dir=False``.
    """

    def __init__(
        self, parser: Any, config: Any, config_filename: str = "config.yaml", overwrite: bool = False,
        multifile: bool = False, save_to_log_dir: bool = True,
    ) -> None:  # fmt: skip
        self.parser, self.config, self.config_filename = parser, config, config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ValueError(
                "`save_to_log_dir=False` only makes sense when subclassing SaveConfigCallback to implement `save_config` and "
                "it is desired to disable the standard behavior of saving to log_dir."
            )

    def setup(self, trainer: NativeTrainer, pl_module: Module, stage: str) -> None:
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._save(trainer.strategy, Path(str(trainer.log_dir)))  # asked on every rank: they agree on the folder
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def _save(self, strategy: Strategy, folder: Path) -> None:
        path = folder / self.config_filename
        there = strategy.broadcast(strategy.is_global_zero and path.is_file())
        if there and not self.overwrite:
            raise RuntimeError(
                f"{type(self).__name__} expected {path} to NOT exist. Aborting to avoid overwriting results of a previous run. "
                "You can delete the previous config file, set `LightningCLI(save_config_callback=None)` to disable config "
                'saving, or set `LightningCLI(save_config_kwargs={"overwrite": True})` to overwrite the config file.'
            )
        if strategy.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(
                self.config, str(path), skip_none=False, overwrite=self.overwrite, multifile=self.multifile
            )

    def save_config(self, trainer: NativeTrainer, pl_module: Module, stage: str) -> None:
        """Override to save the configuration in another place too.

        It runs on rank 0 alone, so no collective may be called.
        """


Owner = TypeVar("Owner")

for _room in (callbacks, loggers):  # so that their classes are found by their bare names
    for _name in _room.__all__:
        getattr(_room, _name)


class LightningCLI:
    """Parse arguments, build the classes, and run the requested method of the trainer.

    ``model_class``, ``datamodule_class``: a class or a function that makes an instance; None lets the command line name one,
    as ``subclass_mode_model`` and ``subclass_mode_data`` do for subclasses. ``trainer_defaults`` change the trainer's own defaults;
    callbacks among them are always there. ``seed_everything_default``: a seed, True for any, False for none.
    ``run=False`` only makes the objects. ``args`` stand in for ``sys.argv``: a list, or a dict of values.
    """

    def __init__(
        self, model_class: Any = None, datamodule_class: Any = None, save_config_callback: Any = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None, trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None, seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None, parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False, subclass_mode_data: bool = False, args: Any = None, run: bool = True,
        auto_configure_optimizers: bool = True, load_from_checkpoint_support: bool = True,
    ) -> None:  # fmt: skip
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.seed_everything_default, self.auto_configure_optimizers = (
            seed_everything_default,
            auto_configure_optimizers,
        )
        self.parser_kwargs, self.parser_class = parser_kwargs or {}, parser_class
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self._model_class, self._datamodule_class = model_class or Module, datamodule_class or DataModule
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data

        names = self.subcommands()
        own = {name: value for name, value in self.parser_kwargs.items() if name not in names}
        self.setup_parser(run, own, {name: value for name, value in self.parser_kwargs.items() if name in names})
        self.parse_arguments(self.parser, args)
        self._take_arguments_of_checkpoint()
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._seed()
        if load_from_checkpoint_support:
            self._keep_arguments_as_written()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run(self.subcommand)

    # -- the parser --------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser that knows ``--config``."""
        kwargs.setdefault("dump_header", [f"arclight.compat.lightning.pytorch=={__version__}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=jsonargparse.ActionConfigFile,
            help="Path to a configuration file in json or yaml format.",
        )
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make the parser, and one for each subcommand."""
        self.parser = self.init_parser(**main_kwargs)
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_arguments: dict[str, list[str]] = {}
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        trainer = self.trainer_class
        trainer = trainer if isinstance(trainer, type) else jsonargparse.class_from_function(trainer)
        group = self.parser.add_subcommands()
        for name, skipped in self.subcommands().items():
            about = (inspect.getdoc(getattr(trainer, name)) or "").partition("\n")[0]
            parser = self.init_parser(**{"description": about, **subparser_kwargs.get(name, {})})
            self._add_arguments(parser)
            self._subcommand_arguments[name] = parser.add_method_arguments(trainer, name, skip=set(skipped))
            self._subcommand_parsers[name] = parser
            group.add_subcommand(name, parser, help=about)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the trainer's runnable methods, with arguments that are no options here."""
        evaluation = {"model", "dataloaders", "datamodule"}
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}} | {
            name: set(evaluation) for name in ("validate", "test", "predict")
        }

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--seed_everything``."""
        about = "A seed to run seed_everything with before anything is made; True for any, False for none."
        parser.add_argument("--seed_everything", type=bool | int, default=self.seed_everything_default, help=about)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--trainer``, ``--model`` and ``--data``."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults(
            {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        )
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        required = self.datamodule_class is not None  # else the module may have loaders of its own
        parser.add_lightning_class_args(
            self._datamodule_class, "data", subclass_mode=self.subclass_mode_data, required=required
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override to add and link arguments of your own."""

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        parser.link_optimizers()

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Fill ``self.config``."""
        if args is not None and len(sys.argv) > 1:
            rank_zero_warn(
                "LightningCLI's args parameter is intended to run from within Python like if it were from the command line. To "
                f"prevent mistakes give one or the other, got: sys.argv[1:]={sys.argv[1:]}, args={args}."
            )
        known = isinstance(args, (dict, jsonargparse.Namespace))
        self.config = parser.parse_object(args) if known else parser.parse_args(args)

    def _take_arguments_of_checkpoint(self) -> None:
        """Use the module's arguments from the checkpoint that was given, if any."""
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        if not path or not Path(path).is_file():
            return
        kept = dict(checkpoints.read_pickled(path).get("hyper_parameters", {}))
        kept.pop("_instantiator", None)
        if not kept:
            return
        if "_class_path" in kept:
            kept = {"class_path": kept.pop("_class_path"), "dict_kwargs": kept}
        try:
            self.config = self.parser.parse_object({command: {"model": kept}}, self.config)
        except SystemExit:
            sys.stderr.write("Parsing of ckpt_path hyperparameters failed!\n")
            raise

    def _seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        chosen = seed_everything(None if seed is True else seed, workers=True)
        (self.config[self.subcommand] if self.subcommand else self.config)["seed_everything"] = chosen

    # -- the objects -------------------------------------------------------------------------------------------

    def _keep_arguments_as_written(self) -> None:
        """Let ``save_hyperparameters()`` save what was parsed, as it can be written to a file.

        The constructor may get objects that cannot.
        """
        for key, made, subclasses in (
            ("model", self._model_class, self.subclass_mode_model),
            ("data", self._datamodule_class, self.subclass_mode_data),
        ):
            kind = made if isinstance(made, type) else inspect.signature(made).return_annotation
            self.parser.add_instantiator(partial(self._make, key), kind, subclasses=subclasses)

    def _make(
        self, key: str, kind: type[Owner], *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any
    ) -> Owner:
        kept = self._written().get(key, {})
        if "class_path" in kept:
            kept = {"_class_path": kept["class_path"], **kept.get("init_args", {}), **kept.get("dict_kwargs", {})}
        for link, value in applied_instantiation_links.items():
            if link.startswith(f"{key}."):
                *path, name = link.removeprefix(f"{key}.").removeprefix("init_args.").split(".")
                place = kept
                for step in path:
                    place = place[step]
                place[name] = value
        with given_hyperparameters(
            {**kept, "_instantiator": "arclight.compat.lightning.pytorch.cli.instantiate_module"}
        ):
            return kind(*args, **kwargs)

    def _written(self) -> dict[str, Any]:
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(self.config, skip_link_targets=False, skip_none=False, format="yaml")
            whole = require("yaml", extra="cli").safe_load(text)
            self.config_dump: dict[str, Any] = whole[self.config.subcommand] if "subcommand" in self.config else whole
        return self.config_dump

    def before_instantiate_classes(self) -> None:
        """Override to run something when everything is parsed and nothing made."""

    def instantiate_classes(self) -> None:
        """Make ``self.datamodule``, ``self.model`` and ``self.trainer``."""
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule, self.model = self._get(self.config_init, "data"), self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override to run something when everything is made and nothing run."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build the trainer, with all callbacks.

        They are those that were added to the parser, the defaults', and the one that saves the configuration.
        """
        parser = self._parser(self.subcommand)
        config = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        if "callbacks" not in config:
            rank_zero_warn(
                f"The `{self.trainer_class.__qualname__}` class does not expose the `callbacks` argument so they will not be included."
            )
            return self.trainer_class(**config)
        always = self.trainer_defaults.get("callbacks", [])
        added: list[Callback] = [self._get(self.config_init, key) for key in parser.callback_keys]
        added += [_made(callback) for callback in (always if isinstance(always, list) else [always])]
        if self.save_config_callback and not config.get("fast_dev_run", False):
            own = self.config.get(str(self.subcommand), self.config)
            added.append(self.save_config_callback(parser, own, **self.save_config_kwargs))
        given = config["callbacks"] or []
        config["callbacks"] = [*(given if isinstance(given, list) else [given]), *added]
        return self.trainer_class(**config)

    @staticmethod
    def configure_optimizers(
        lightning_module: Module, optimizer: Optimizer, lr_scheduler: LRSchedulerTypeUnion | None = None
    ) -> Any:
        """Return what ``configure_optimizers`` gives if the command line names an optimizer."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor},
            }
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        if not self.auto_configure_optimizers:
            return
        parser = self._parser(subcommand)
        optimizers, schedules = parser.automatic("optimizers"), parser.automatic("lr_schedulers")
        if len(optimizers) > 1 or len(schedules) > 1:
            raise MisconfigurationError(
                f"`{type(self).__name__}.add_configure_optimizers_method_to_model` expects at most one optimizer and one "
                f"lr_scheduler to be 'AUTOMATIC', but found {optimizers + schedules}: link the others to arguments of the "
                "module, and write its configure_optimizers"
            )
        how = (
            parser.named("optimizers", optimizers[0], self._get(self.config_init, optimizers[0]))
            if optimizers
            else None
        )
        if not how:
            return
        then = (
            parser.named("lr_schedulers", schedules[0], self._get(self.config_init, schedules[0]))
            if schedules
            else None
        )
        if is_overridden("configure_optimizers", self.model):
            rank_zero_warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                f"`{type(self).__name__}.configure_optimizers`."
            )
        optimizer = instantiate_class(self.model.parameters(), how)
        schedule = instantiate_class(optimizer, then) if then else None
        chosen = partial(self.configure_optimizers, optimizer=optimizer, lr_scheduler=schedule)
        update_wrapper(chosen, self.configure_optimizers)
        self.model.configure_optimizers = MethodType(chosen, self.model)

    # -- the run -----------------------------------------------------------------------------------------------

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        return config.get(str(self.subcommand), config).get(key, default)

    def _run(self, name: str) -> None:
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        getattr(self, f"before_{name}", nothing)()
        given = self.config_init[name]
        options = {key: given[key] for key in self._subcommand_arguments[name] if key in given}
        options |= {"model": self.model} | ({"datamodule": self.datamodule} if self.datamodule is not None else {})
        getattr(self, name, getattr(self.trainer, name))(**options)
        getattr(self, f"after_{name}", nothing)()


def _made(callback: Any) -> Callback:
    """Return a callback, or what ``{"class_path": ..., "init_args": ...}`` describes."""
    made: Callback = instantiate_class((), callback) if isinstance(callback, dict) else callback
    return made


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Build an object of ``init["class_path"]`` with ``args`` and ``init["init_args"]``.

    ``args``: one, or a tuple.
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(importlib.import_module(module), name)(*positional, **init.get("init_args", {}))


def instantiate_module(class_type: type[Owner], config: dict[str, Any]) -> Owner:
    """Build a module from the command-line arguments in a checkpoint."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    if "_class_path" in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        rest = {name: value for name, value in config.items() if name != "_class_path"}
        config = {"class_path": config["_class_path"], "dict_kwargs": rest}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    made: Owner = parser.instantiate_classes(parser.parse_object({"module": config})).module
    return made


_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "arclight.compat.lightning.pytorch", "arclight.compat.lightning")
"""Packages by whose ``cli.instantiate_module`` a checkpoint may say that a command line has built its module."""

register_instantiator(instantiate_module, [f"{package}.cli.instantiate_module" for package in _PACKAGES])
