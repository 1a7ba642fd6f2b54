"""Save a module's hyper-parameters (constructor arguments) for checkpoints to rebuild it.

`Module` and `DataModule` inherit from `HyperparametersMixin`; ``checkpoint.state`` saves `checkpoint_entries`, ``load_from_checkpoint``
rebuilds from them, and the tuner reads and sets settings by name. The encoding (`TAG`) may get kinds but lose none. A file must not
choose what runs: it may name only enums, dataclasses and registered builders, and only a module of the rooms of the class that is built
is imported for it.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import importlib
import inspect
import json
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path, PurePath
from types import FrameType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from arclight._stored_names import current
from arclight.checkpoint import CheckpointError
from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.warnings import WarningCache
from arclight.trainer.checkpoint.loading import ReplacesLayers
from arclight.trainer.checkpoint.loading import read as read_checkpoint
from arclight.trainer.loggers.params import yaml_text

if TYPE_CHECKING:
    from torch import nn


TAG = "__arclight__"
"""The one key that marks a dict as an encoded object; its value says of which kind. A user's dict with this key is escaped."""

_LEAVES = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.device, torch.dtype, torch.Size)


class UnserializableError(TypeError):
    """Raised for a value that cannot be converted to plain data."""


def is_omegaconf(value: object) -> bool:
    return type(value).__module__.startswith("omegaconf.")


def encode(value: Any) -> Any:
    """Encode trees of plain values, dataclasses, enums, paths and OmegaConf as plain data.

    A path becomes text, which other projects' readers understand; in a field of a dataclass it comes back as a path.
    Raises UnserializableError naming the class of anything else.
    """
    if isinstance(value, Enum):
        return {TAG: "enum", "class": _place(type(value)), "name": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {n: {TAG: "path", "path": str(v)} if isinstance(v, PurePath) else encode(v) for n, v in given.items()}
        return {TAG: "dataclass", "class": _place(type(value)), "fields": fields}
    if is_omegaconf(value):
        from omegaconf import OmegaConf

        return {TAG: "omegaconf", "content": encode(OmegaConf.to_container(value))}
    if isinstance(value, dict):
        items = {key: encode(item) for key, item in value.items()}
        return {TAG: "dict", "items": items} if TAG in value or _old_kind(value) else items
    if type(value) is torch.Size or isinstance(value, _LEAVES):
        return value
    if isinstance(value, (list, tuple)):
        parts = [encode(item) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Namespace):
        return encode(vars(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise UnserializableError(f"it is a {type(value).__module__}.{type(value).__qualname__}, not plain data")


def decode(value: Any, owner: type) -> Any:
    """Decode what :func:`encode` returned, for the arguments of ``owner``.

    A file does not choose what runs: a class is looked up in modules that are imported already or belong to the room of ``owner``,
    and a dataclass is built only if it is of ``owner``'s packages or visible where ``owner`` is defined.
    Raises CheckpointError for any other class.
    """
    if type(value) in (list, tuple):
        return type(value)(decode(item, owner) for item in value)
    if not isinstance(value, dict):
        return value
    match value.get(TAG):
        case None:
            kind = _old_kind(value)
            return {k: decode(v, owner) for k, v in value.items()} if kind is None else _decode_old(kind, value, owner)
        case "dict":
            return {key: decode(item, owner) for key, item in value["items"].items()}
        case "path":
            return Path(value["path"])
        case "enum":
            return _find(value["class"], owner, _is_enum)[value["name"]]
        case "dataclass":
            return _build(value["class"], {n: decode(field, owner) for n, field in value["fields"].items()}, owner)
        case "omegaconf":
            return as_omegaconf(decode(value["content"], owner))
        case other:
            raise CheckpointError(
                f"the checkpoint has a hyper-parameter of kind {other!r}, which this version cannot read"
            )


def _old_kind(value: dict[Any, Any]) -> str | None:
    """Return the kind of object that a dict without :data:`TAG` stands for, or None."""
    if value.keys() == {"dataclass", "fields"} and _is_place(value["dataclass"]) and isinstance(value["fields"], dict):
        return "dataclass"
    if value.keys() == {"enum", "name"} and _is_place(value["enum"]) and isinstance(value["name"], str):
        return "enum"
    return "omegaconf" if value.keys() == {"omegaconf"} else None


def _decode_old(kind: str, value: dict[Any, Any], owner: type) -> Any:
    if kind == "enum":
        return _find(value["enum"], owner, _is_enum)[value["name"]]
    if kind == "omegaconf":
        return as_omegaconf(decode(value["omegaconf"], owner))
    fields = {
        name: Path(field["path"])
        if isinstance(field, dict) and field.keys() == {"path"} and isinstance(field["path"], str)
        else decode(field, owner)
        for name, field in value["fields"].items()
    }
    return _build(value["dataclass"], fields, owner)


def as_omegaconf(content: Any) -> Any:
    """Make an OmegaConf container of plain data."""
    from arclight.fabric.extras import require

    return require("omegaconf", extra="cli").OmegaConf.create(content)


def _build(place: str, values: dict[str, Any], owner: type) -> Any:
    """Build the dataclass at ``place`` from saved values.

    Fields that it no longer has are left out, new ones take their defaults.
    """
    cls = _find(place, owner, dataclasses.is_dataclass)
    if not _is_visible(cls, owner):
        raise CheckpointError(
            f"the checkpoint names the dataclass {place}, which {owner.__module__} neither defines nor imports: it is not built for a "
            f"file's sake; import it there, or give that argument of {owner.__name__} yourself"
        )
    known = {field.name: field.init for field in dataclasses.fields(cls)}
    built = cls(**{name: value for name, value in values.items() if known.get(name)})
    for name, value in values.items():
        if known.get(name) is False:
            object.__setattr__(built, name, value)  # a frozen one too
    return built


def known_fields(cls: Any, saved: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the items of ``saved`` that are fields of the dataclass ``cls``.

    A warning names the rest, which a later version wrote.

    Raises CheckpointError, naming it, if a field without a default is missing.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in saved if name not in fields]:
        rank_zero_warn(
            f"the checkpoint's {what} has fields that this version does not know: {', '.join(unknown)}; they are left out"
        )
    needed = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in saved]:
        raise CheckpointError(
            f"the checkpoint's {what} lacks {', '.join(missing)}: it is damaged, resume from another one"
        )
    return {name: value for name, value in saved.items() if name in fields}


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_place(value: object) -> bool:
    return isinstance(value, str) and all(value.partition(":"))


def _is_enum(cls: type) -> bool:
    return issubclass(cls, Enum)


def _find(place: str, owner: type, fits: Callable[[type], bool]) -> Any:
    name, _, qualified = current(place).partition(":")
    if name not in sys.modules:
        if not any(name.startswith(f"{room}.") for room in _rooms(owner)) or name.endswith("__main__"):
            raise CheckpointError(f"the checkpoint was made with {place}; import {name} before loading it")
        importlib.import_module(name)
    cls: Any = sys.modules[name]
    for part in qualified.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and fits(cls)):
        raise CheckpointError(f"the checkpoint was made with {place}, which is no longer what it was there")
    return cls


def _rooms(owner: type) -> Iterator[str]:
    """List the sub-packages of this package that define ``owner`` and its bases."""
    for base in owner.__mro__:
        package, _, rest = base.__module__.partition(".")
        if package == __name__.partition(".")[0] and rest:
            yield f"{package}.{rest.partition('.')[0]}"


def _is_visible(cls: type, owner: type) -> bool:
    """Return True if ``owner``'s module can see ``cls``, so that a file may name it.

    It can see what lies in the packages of ``owner`` and its bases, and what their modules or the program (``__main__``) have a
    name for; from a dataclass so found also what its module has a name for, as its fields may be dataclasses themselves.
    """
    bases = {base.__module__ for base in owner.__mro__}
    packages = {module.partition(".")[0] for module in bases} - sys.stdlib_module_names - {"torch"}
    if cls.__module__.partition(".")[0] in packages:
        return True
    waiting = [*({*bases, "__main__"} & sys.modules.keys())]
    known = {*waiting}
    while waiting:
        for value in list(vars(sys.modules[waiting.pop()]).values()):
            if value is cls or (
                isinstance(value, ModuleType) and f"{cls.__module__}.".startswith(f"{value.__name__}.")
            ):
                return True
            module = value.__module__ if isinstance(value, type) and dataclasses.is_dataclass(value) else None
            if module in sys.modules and module not in known:
                known.add(module)
                waiting.append(module)
    return False


_instantiators: dict[str, Callable[[type, dict[str, Any]], Any]] = {}
"""The builders that a checkpoint may name: those of command lines, whose arguments describe objects."""


def register_instantiator(function: Callable[[type, dict[str, Any]], Any], names: Iterable[str]) -> None:
    """Register ``function(cls, arguments)`` as the builder for checkpoints that name it."""
    _instantiators.update(dict.fromkeys(names, function))


_WARNED = WarningCache()
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
    """Base class with ``save_hyperparameters()`` and ``hparams``."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    _log_hyperparams: bool = False
    _hparams_name: str | None = None
    """The constructor's argument that holds all of them, ``"kwargs"`` if each is one of its own."""

    def save_hyperparameters(
        self, *args: Any, ignore: Sequence[str] | str | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Save the constructor's arguments in ``self.hparams`` and in every checkpoint.

        Loggers get them too if ``logger``.

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
        """Arguments that :meth:`save_hyperparameters` saved.

        A script may change them; the initial values stay.
        """
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
        *,
        replaced_by: Sequence[ReplacesLayers] = (),
        **kwargs: Any,
    ) -> Any:
        """Build a new instance from a checkpoint, with the arguments that it keeps.

        The instance gets the checkpoint's weights (averaged ones if it has them) or state.

        ``checkpoint_path``: a checkpoint folder, a file of Lightning's or ours, its URL, or a binary file object;
        ``map_location``: where tensors go (default: the CPU for a folder; for a file where they were, if that device is here);
        ``hparams_file``: a .yaml or .csv file whose values are taken in the place of the kept arguments;
        ``strict``: whether the weights must fit exactly (default: the module's ``strict_loading``);
        ``replaced_by``: callbacks of the run that have put other layers into the module, as quantization-aware training does;
        ``kwargs`` override the kept arguments. Nothing is unpickled, whatever ``weights_only`` says.
        Raises CheckpointError for a file that cannot be read so or whose weights do not fit, ValueError for a
        ``strict`` that contradicts the module's.
        """
        checkpoint = read_checkpoint(checkpoint_path, map_location)
        if hparams_file is not None:
            checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = _read_values(hparams_file)
        owner = rebuild(cls, checkpoint, kwargs)
        if not isinstance(owner, HyperparametersMixin):
            raise _not_loadable(cls)
        return owner._load_from(checkpoint, checkpoint_path, strict, replaced_by)

    def _load_from(
        self, checkpoint: dict[str, Any], source: object, strict: bool | None, replaced_by: Sequence[ReplacesLayers]
    ) -> Any:  # fmt: skip
        """Load the checkpoint's state into this newly built object, and return the result."""
        raise _not_loadable(type(self))


def _not_loadable(cls: type) -> TypeError:
    return TypeError(f"{cls.__name__} is neither a Module nor a DataModule: a checkpoint has nothing to load into it")


def constructors(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the constructors running in and around ``frame``.

    The most derived class comes last.

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
    """Return the name and values of the hyper-parameters to save."""
    if not chosen:
        return ("kwargs" if arguments else None), arguments
    containers = [item for item in chosen if not isinstance(item, str)]
    if len(containers) == 1:
        held_by = [name for name, value in arguments.items() if value is containers[0] or _equal(value, containers[0])]
        return (held_by[0] if held_by else None), containers[0]
    unknown = [name for name in chosen if name not in arguments]
    if unknown:
        raise ValueError(
            f"save_hyperparameters: {unknown[0]!r} is not an argument of {cls.__name__}; it has {', '.join(arguments) or 'none'}"
        )
    return "kwargs", {name: arguments[name] for name in chosen}


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and not isinstance(left, _PRIMITIVES) and bool(left == right)


@contextmanager
def given_hyperparameters(arguments: dict[str, Any]) -> Iterator[None]:
    """Let ``save_hyperparameters()`` in the block save these arguments.

    For a command line that knows them in a form that can be written.
    """
    token = _GIVEN.set(dict(arguments))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def hyperparameters_to_log(*owners: Any) -> dict[str, Any] | None:
    """Collect hyper-parameters of a module and its data module for loggers.

    They are as they were when saved; None if neither logs them.

    Raises RuntimeError if both have a name with different values.
    """
    logging_owners = [owner for owner in owners if getattr(owner, "_log_hyperparams", False)]
    merged: dict[str, Any] = {}
    for owner in logging_owners:
        given = {name: value for name, value in owner.hparams_initial.items() if name != "_class_path"}
        differing = [name for name in given if name in merged and not _same(merged[name], given[name])]
        if differing:
            raise RuntimeError(
                f"Error while merging hparams: the keys {differing} are present in both the module's and the data module's "
                "hparams, with different values; rename one, leave it out with save_hyperparameters(ignore=...), or pass "
                "logger=False to one of them"
            )
        merged |= given
    return merged if logging_owners else None


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
    """Return the checkpoint entries with the constructor's arguments for :func:`arguments_for`.

    What only unpickling could bring back is left out, with a warning: whoever loads the checkpoint must give it.
    """
    if not owner.hparams:
        return {}
    values = {}
    for name, value in owner.hparams.items():
        try:
            values[name] = encode(value)
        except UnserializableError as error:
            _WARNED.warn(
                f"Attribute '{name}' removed from hparams because it cannot be pickled safely: {error}. You can suppress "
                f"this warning by setting `self.save_hyperparameters(ignore=['{name}'])`, and must give {name!r} to "
                "load_from_checkpoint."
            )
    return {owner.CHECKPOINT_HYPER_PARAMS_NAME: owner._hparams_name, owner.CHECKPOINT_HYPER_PARAMS_KEY: values} | (
        {owner.CHECKPOINT_HYPER_PARAMS_TYPE: "omegaconf"} if is_omegaconf(owner.hparams) else {}
    )


def arguments_for(cls: type, checkpoint: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to build a ``cls``: the checkpoint's, updated by ``overrides``.

    Only those that its constructor takes.
    """
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
    """Decode each saved argument that is not overridden."""
    return {name: decode(value, cls) for name, value in kept.items() if name not in overrides} | overrides


def _read_values(path: str | Path) -> dict[str, Any]:
    kind = Path(path).suffix.lower()
    if kind == ".csv":
        return load_hparams_from_tags_csv(path)
    if kind in (".yml", ".yaml"):
        values: dict[str, Any] = load_hparams_from_yaml(path, use_omegaconf=False)
        return values
    raise ValueError(f".csv, .yml or .yaml is required for `hparams_file`, got {path}")


def rebuild(cls: type, checkpoint: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Build a ``cls`` from a checkpoint with :func:`arguments_for` it.

    An instantiator that is named there (that of a command line) builds it, if it was registered.
    """
    kept = checkpoint.get(getattr(cls, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters"), {})
    path = kept.get("_instantiator")
    if path is None:
        return cls(**arguments_for(cls, checkpoint, overrides))
    if path not in _instantiators:  # a file must not choose what is imported and called
        raise ValueError(
            f"The instantiator {path!r} from the checkpoint is not in the allowlist of trusted instantiators and was "
            f"blocked to prevent arbitrary code execution; if a LightningCLI made this {cls.__name__}, import "
            "arclight.compat.lightning.cli before loading it"
        )
    given = _decoded(cls, {name: value for name, value in kept.items() if name != "_instantiator"}, overrides)
    arguments = given if "_class_path" in given else arguments_for(cls, checkpoint, overrides)
    return _instantiators[path](cls, arguments)


def find_attribute_owners(module: nn.Module, name: str) -> list[Any]:
    """List the owners of ``name``: module, its ``hparams``, data module, its ``hparams``.

    The last one counts.
    """
    trainer = getattr(module, "_trainer", None)
    data = trainer.datamodule if trainer is not None else None
    found: list[Any] = []
    for owner in (module, data):
        if owner is None:
            continue
        if hasattr(owner, name):
            found.append(owner)
        if name in (getattr(owner, "hparams", None) or ()):
            found.append(owner.hparams)
    return found


def has_setting(module: nn.Module, name: str) -> bool:
    return bool(find_attribute_owners(module, name))


def get_setting(module: nn.Module, name: str) -> Any:
    """Return the setting of its last owner. Raises AttributeError if there is none."""
    holder = _require_attribute_owners(module, name)[-1]
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def set_setting(module: nn.Module, name: str, value: Any) -> None:
    """Set the setting of every owner. Raises AttributeError if there is none."""
    for holder in _require_attribute_owners(module, name):
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)


def _require_attribute_owners(module: nn.Module, name: str) -> list[Any]:
    found = find_attribute_owners(module, name)
    if not found:
        raise AttributeError(
            f"{name} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the datamodule."
        )
    return found


_PLAIN = (str, bool, int, float, type(None), Enum)


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write a mapping or Namespace as YAML; what is no plain value is left out with a warning.

    An OmegaConf container is written with its references resolved. Raises RuntimeError if the folder is missing.
    """
    _need_folder(config_yaml)
    values = _plain_containers(vars(hparams) if isinstance(hparams, Namespace) else hparams)
    if not isinstance(values, Mapping):
        raise TypeError(f"hparams must be dictionary, got {type(hparams).__name__}")
    kept = {}
    for name, value in values.items():
        if _is_plain(value):
            kept[name] = value
        else:
            rank_zero_warn(f"Skipping '{name}' parameter because it is not possible to safely dump to YAML.")
    Path(config_yaml).write_text(yaml_text(kept), encoding="utf-8")


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """Read hyper-parameters from a YAML file, as plain values only.

    A missing file gives an empty dict and a warning.

    ``use_omegaconf`` gives an OmegaConf container if that package is installed.
    """
    if not _found(config_yaml):
        return {}
    values = require("yaml", extra="cli").safe_load(Path(config_yaml).read_text(encoding="utf-8"))
    if use_omegaconf:
        try:
            from omegaconf import OmegaConf
        except ModuleNotFoundError:
            return values
        return OmegaConf.create(values)
    return values


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: Any) -> None:
    """Write lines ``key,value`` to a CSV file. Raises RuntimeError if the folder is missing."""
    _need_folder(tags_csv)
    with Path(tags_csv).open("w", newline="", encoding="utf-8") as file:
        rows = (vars(hparams) if isinstance(hparams, Namespace) else hparams).items()
        csv.writer(file).writerows([("key", "value"), *((key, str(value)) for key, value in rows)])


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """Read hyper-parameters from a CSV file; convert numbers and truth values.

    A missing file gives an empty dict and a warning.
    """
    if not _found(tags_csv):
        return {}
    with Path(tags_csv).open(newline="", encoding="utf-8") as file:
        return {key: convert(value) for key, value in list(csv.reader(file))[1:]}


def convert(val: str) -> Any:
    """Return the number, truth value, None or list that ``val`` spells; else the text itself."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(val, val)
    try:
        return json.loads(spelled)
    except ValueError:
        return val


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Merge ``updates`` into ``hparams``; dicts are merged, all else is replaced."""
    for key, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(key), dict):
            update_hparams(hparams[key], value)
        else:
            hparams[key] = value


def _need_folder(path: str | Path) -> None:
    if not Path(path).parent.is_dir():
        raise RuntimeError(f"Missing folder: {Path(path).parent}.")


def _found(path: str | Path) -> bool:
    if not Path(path).exists():
        rank_zero_warn(f"Missing Tags: {path}.", category=RuntimeWarning)
        return False
    return True


def _plain_containers(value: Any) -> Any:
    """Convert mappings and sequences of other packages to dicts and lists."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _plain_containers(item) for key, item in value.items()}
    return [_plain_containers(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in (*value, *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
