"""Hyper-parameters: the arguments a module was built with, kept so that a checkpoint can rebuild it."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.warning_kinds import WarningCache
from arclight.trainer.plain import NotPlainError, as_omegaconf, decode, encode, is_omegaconf

INSTANTIATORS = {
    f"{package}.cli.instantiate_module"
    for package in (
        "lightning.pytorch",
        "pytorch_lightning",
        "arclight.compat.lightning.pytorch",
        "arclight.compat.lightning",
    )
}
"""What a checkpoint may name as the builder of its module: the command line's, whose arguments describe objects."""

_TOLD = WarningCache()
_PRIMITIVES = (bool, int, float, str)
_GIVEN: ContextVar[dict[str, Any] | None] = ContextVar("given_hyperparameters", default=None)


class Hyperparameters(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; there are: {', '.join(map(str, self)) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(name)) for name in self), default=0) + 3
        return "\n".join(f'"{name}":'.ljust(width) + f" {self[name]}" for name in sorted(self, key=str))


if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only:  # noqa: N801 - used like classmethod
        """A class method that says so when it is called on an instance, which it would not change."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
            if instance is None:
                return MethodType(self.function, owner)

            def refuse(*_: Any, **__: Any) -> Any:
                raise TypeError(
                    f"The classmethod `{owner.__name__}.{self.function.__name__}` cannot be called on an instance."
                    " Please call it on the class type and make sure the return value is used."
                )

            return refuse


class HyperparametersMixin:
    """Gives a class ``save_hyperparameters()`` and ``hparams``."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    _log_hyperparams: bool = False
    _hparams_name: str | None = None
    """The constructor's argument that holds all of them, ``"kwargs"`` where each is one of its own."""

    def save_hyperparameters(
        self, *args: Any, ignore: Sequence[str] | str | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Keep the constructor's arguments in ``self.hparams`` and in every checkpoint; loggers get them too if ``logger``.

        Without ``args`` all of them, those of base classes included, else the named ones; or the items of one dict,
        Namespace or other mapping. ``ignore`` names some to leave out, and takes out what a base class kept.
        Raises ValueError for a plain value in place of a mapping, and for a name that is no argument.
        """
        self.__dict__["_log_hyperparams"] = logger
        if len(args) == 1 and not isinstance(args[0], str) and not args[0] and not isinstance(args[0], _PRIMITIVES):
            return  # an empty container
        ignored = [ignore] if isinstance(ignore, str) else [name for name in ignore or () if isinstance(name, str)]
        here = inspect.currentframe()
        arguments = self._constructor_arguments(frame or (here.f_back if here is not None else None))
        arguments = {name: value for name, value in arguments.items() if name not in ignored}
        name, chosen = _choose(type(self), arguments, args)
        self.__dict__["_hparams_name"] = name
        self._set_hparams(chosen)
        for key in ignored:
            self.hparams.pop(key, None)
        for key, value in self.hparams.items():
            if isinstance(value, nn.Module):
                rank_zero_warn(
                    f"Attribute {key!r} is an instance of `nn.Module` and is already saved during checkpointing."
                    f" It is recommended to ignore them using `self.save_hyperparameters(ignore=[{key!r}])`."
                )
        self.__dict__["_hparams_initial"] = copy.deepcopy(self.hparams)

    def _constructor_arguments(self, frame: FrameType | None) -> dict[str, Any]:
        given = _GIVEN.get()
        if given is not None:
            return given
        if dataclasses.is_dataclass(self):
            return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        merged: dict[str, Any] = {}
        for arguments in constructors(frame):
            merged |= arguments
        return merged

    def _set_hparams(self, given: Any) -> None:
        if isinstance(given, Namespace):
            given = vars(given)
        if isinstance(given, _PRIMITIVES):
            raise ValueError(f"Primitives {_PRIMITIVES} are not allowed: give the name of an argument, or a mapping.")
        if not isinstance(given, MutableMapping):
            raise ValueError(f"Unsupported config type of {type(given)}: give a dict, a Namespace or another mapping.")
        if isinstance(given, dict) and isinstance(self.hparams, dict):
            self.hparams.update(given)
        else:
            self.__dict__["_hparams"] = given  # a mapping with a life of its own, OmegaConf's for example

    @property
    def hparams(self) -> Any:
        """What :meth:`save_hyperparameters` kept; a script may change it, the initial values stay."""
        return self.__dict__.setdefault("_hparams", Hyperparameters())

    @property
    def hparams_initial(self) -> Any:
        """A copy of the values as they were kept."""
        return copy.deepcopy(self.__dict__.get("_hparams_initial", Hyperparameters()))

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """A new instance from a checkpoint: built with the arguments that were kept, with its weights or its state.

        ``checkpoint_path``: a checkpoint folder, a file of Lightning's or ours, its URL, or a binary file object;
        ``map_location``: where tensors go (default: where they were if that device is here, else the CPU);
        ``hparams_file``: a .yaml or .csv file whose values are taken in the place of the kept arguments;
        ``strict``: whether the weights must fit exactly (default: the module's ``strict_loading``);
        ``kwargs`` override the kept arguments. Nothing is unpickled, whatever ``weights_only`` says.
        Raises CheckpointError for a file that cannot be read so or whose weights do not fit, ValueError for a
        ``strict`` that contradicts the module's.
        """
        from arclight.trainer.loading import build

        return build(cls, checkpoint_path, map_location, hparams_file, strict, kwargs)


def constructors(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Arguments of each constructor that is running in ``frame`` and directly around it, the most derived class last.

    A module that is built by another one's constructor takes that one's arguments too.
    """
    inside = False
    while frame is not None:
        values, code = frame.f_locals, frame.f_code
        instance = values.get(code.co_varnames[0]) if code.co_argcount else None
        if "__class__" in values and code.co_name == "__init__" and isinstance(instance, HyperparametersMixin):
            yield _arguments(values["__class__"], values)
            inside = True
        elif inside:
            return
        frame = frame.f_back


def _arguments(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    own, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= values.get(parameter.name, {})
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name in values:
            arguments[parameter.name] = values[parameter.name]
    return {name: value for name, value in arguments.items() if name not in (own.name, "__class__")}


def _choose(cls: type, arguments: dict[str, Any], chosen: tuple[Any, ...]) -> tuple[str | None, Any]:
    """The name to keep them under, and what to keep."""
    if not chosen:
        return ("kwargs" if arguments else None), arguments
    containers = [item for item in chosen if not isinstance(item, str)]
    if len(containers) == 1:
        held_by = [name for name, value in arguments.items() if value is containers[0] or _equal(value, containers[0])]
        return (held_by[0] if held_by else None), containers[0]
    unknown = [name for name in chosen if name not in arguments]
    if unknown:
        raise ValueError(
            f"save_hyperparameters: {unknown[0]!r} is no argument of {cls.__name__}; it has {', '.join(arguments) or 'none'}"
        )
    return "kwargs", {name: arguments[name] for name in chosen}


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and not isinstance(left, _PRIMITIVES) and bool(left == right)


@contextmanager
def given_hyperparameters(arguments: dict[str, Any]) -> Iterator[None]:
    """While it runs, ``save_hyperparameters()`` keeps these: for a command line that knows them in a form that can be written."""
    token = _GIVEN.set(dict(arguments))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def hyperparameters_to_log(*owners: Any) -> dict[str, Any] | None:
    """What loggers get of a module and its data module, as it was when saved; None where neither asked for it.

    Raises RuntimeError where both have a name with different values.
    """
    asked = [owner for owner in owners if getattr(owner, "_log_hyperparams", False)]
    merged: dict[str, Any] = {}
    for owner in asked:
        given = {name: value for name, value in owner.hparams_initial.items() if name != "_class_path"}
        differing = [name for name in given if name in merged and not _same(merged[name], given[name])]
        if differing:
            raise RuntimeError(
                f"Error while merging hparams: the keys {differing} are present in both the module's and the data module's "
                "hparams, with different values; rename one, leave it out with save_hyperparameters(ignore=...), or pass "
                "logger=False to one of them"
            )
        merged |= given
    return merged if asked else None


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, torch.Tensor):
        return False
    return bool(np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right)


def is_picklable(obj: object) -> bool:
    """Return True if ``pickle`` can write an object."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Remove what cannot be pickled, with a warning for each."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(
            f"Attribute '{name}' removed from hparams because it cannot be pickled. You can suppress this warning by"
            f" setting `self.save_hyperparameters(ignore=['{name}'])`."
        )
        del hparams[name]


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoint_entries(owner: HyperparametersMixin) -> dict[str, Any]:
    """The entries of a checkpoint from which :func:`arguments_for` finds the constructor's arguments again.

    What only unpickling could bring back is left out, with a warning: whoever loads the checkpoint must give it.
    """
    if not owner.hparams:
        return {}
    values = {}
    for name, value in owner.hparams.items():
        try:
            values[name] = encode(value)
        except NotPlainError as error:
            _TOLD.warn(
                f"Attribute '{name}' removed from hparams because it cannot be pickled safely: {error}. You can suppress "
                f"this warning by setting `self.save_hyperparameters(ignore=['{name}'])`, and must give {name!r} to "
                "load_from_checkpoint."
            )
    return {owner.CHECKPOINT_HYPER_PARAMS_NAME: owner._hparams_name, owner.CHECKPOINT_HYPER_PARAMS_KEY: values} | (
        {owner.CHECKPOINT_HYPER_PARAMS_TYPE: "omegaconf"} if is_omegaconf(owner.hparams) else {}
    )


def arguments_for(cls: type, checkpoint: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to build a ``cls`` with: those of the checkpoint, then ``overrides``; only ones its constructor takes."""
    key: str = getattr(cls, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters")
    held_by = checkpoint.get(getattr(cls, "CHECKPOINT_HYPER_PARAMS_NAME", "hparams_name"))
    kept = _decoded(cls, {**checkpoint.get("module_arguments", {}), **checkpoint.get(key, {})}, overrides)
    kept.pop("_instantiator", None)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    if held_by and any(p.name == held_by and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        kind = checkpoint.get(getattr(cls, "CHECKPOINT_HYPER_PARAMS_TYPE", "hparams_type"))
        kept = {held_by: as_omegaconf(kept) if kind == "omegaconf" else Hyperparameters(kept)} | overrides
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return kept
    taken = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in kept.items() if name in taken}


def _decoded(cls: type, kept: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Decode each kept argument that nobody overrides; what a caller gives need not be readable in the file."""
    return {name: decode(value, cls) for name, value in kept.items() if name not in overrides} | overrides


def rebuild(cls: type, checkpoint: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Build a ``cls`` with :func:`arguments_for` it; by the command line that wrote them, where one did."""
    kept = checkpoint.get(getattr(cls, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters"), {})
    path = kept.get("_instantiator")
    if path is None:
        return cls(**arguments_for(cls, checkpoint, overrides))
    if path not in INSTANTIATORS:  # a file must not choose what is imported and called
        raise ValueError(
            f"The instantiator {path!r} from the checkpoint is not in the allowlist of trusted instantiators and was "
            "blocked to prevent arbitrary code execution"
        )
    given = _decoded(cls, {name: value for name, value in kept.items() if name != "_instantiator"}, overrides)
    arguments = given if "_class_path" in given else arguments_for(cls, checkpoint, overrides)
    return importlib.import_module("arclight.compat.lightning.cli").instantiate_module(cls, arguments)
