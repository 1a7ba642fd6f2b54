"""Define Lightning's public utility functions that Arclight itself does not need.

User code imports them under Lightning's paths, which `names` lists; of Arclight, only ``compat.lightning.cli`` uses one
(`is_overridden`). Names, arguments and results are Lightning's and stay; the code behind them may change.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from arclight.fabric.batches import batch_sizes, map_tensors, move_batch
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.strategies.base import Strategy
from arclight.fabric.warnings import WarningCache
from arclight.trainer import Callback, DataModule, Module
from arclight.trainer.loop.verification import COMPILED, wrapped_module

warning_cache = WarningCache()


class LightningEnum(StrEnum):
    """Base of Lightning's enums: strings of a fixed choice, compared case-insensitively."""

    @classmethod
    def from_str(cls, value: str, source: str = "key") -> Self:
        """Return the member of this name, value or either, as ``source`` says.

        ``source``: ``"key"``, ``"value"`` or ``"any"``.
        """
        found = cls.try_from_str(value, source)
        if found is None:
            choices = [text for member in cls for text in _texts(member, source)]
            raise ValueError(f"Invalid match: expected one of {choices}, but got {value}.")
        return found

    @classmethod
    def try_from_str(cls, value: str, source: str = "key") -> Self | None:
        """Return the member as `from_str`, or None."""
        wanted = value.replace("-", "_").lower()
        matches = (
            member for member in cls if any(t.replace("-", "_").lower() == wanted for t in _texts(member, source))
        )
        return next(matches, None)

    def __eq__(self, other: object) -> bool:
        text = other.value if isinstance(other, StrEnum) else other
        return isinstance(text, str) and self.value.lower() == text.lower()

    def __hash__(self) -> int:
        return hash(self.value.lower())


def _texts(member: StrEnum, source: str) -> list[str]:
    return {"key": [member.name], "value": [member.value], "any": [member.name, member.value]}[source]


class GradClipAlgorithmType(LightningEnum):
    """Algorithms of ``Trainer(gradient_clip_algorithm=...)``."""

    VALUE = "value"
    NORM = "norm"

    @classmethod
    def supported_type(cls, val: str) -> bool:
        return val in cls.supported_types()

    @classmethod
    def supported_types(cls) -> list[str]:
        return [member.value for member in cls]


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return True if ``instance`` overrides ``method_name`` of ``parent``.

    The parent is Module, DataModule or Callback by default.

    Raises ValueError if the parent cannot be determined, or has no such method.
    """
    if instance is None:
        return False
    if parent is None:
        parent = next((kind for kind in (Module, DataModule, Callback) if isinstance(instance, kind)), None)
        if parent is None:
            raise ValueError("Expected a parent")
    theirs, own = getattr(parent, method_name, None), getattr(instance, method_name, None)
    if own is None:
        return False
    if theirs is None:
        raise ValueError("The parent should define the method")
    return _code(own) is not _code(theirs)


def _code(method: Any) -> Any:
    """Return the code that runs, below decorators and partial application."""
    while True:
        inner = method.func if isinstance(method, partial) else getattr(method, "__wrapped__", method)
        if inner is method:
            return getattr(method, "__code__", method)
        method = inner


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return True if a hook takes ``param``, ``*args``, or at least ``min_args`` arguments.

    ``*args`` do not count if ``explicit``.
    """
    spec = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    names = spec.args[1:]
    return (
        param in names
        or (not explicit and spec.varargs is not None)
        or (min_args is not None and len(names) >= min_args)
    )


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of ``cls.__init__`` for itself, ``*args`` and ``**kwargs``, or None."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    of_kind = {parameter.kind: parameter.name for parameter in parameters}
    return (
        parameters[0].name,
        of_kind.get(inspect.Parameter.VAR_POSITIONAL),
        of_kind.get(inspect.Parameter.VAR_KEYWORD),
    )


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the constructor that runs in ``frame``; empty if none does."""
    values = frame.f_locals
    if "__class__" not in values or frame.f_code.co_name != "__init__":
        return {}
    own, varargs, keywords = parse_class_init_keys(values["__class__"])
    names = inspect.signature(values["__class__"].__init__).parameters
    arguments = {name: values[name] for name in names if name not in (own, varargs, keywords)}
    return arguments | (values[keywords] if keywords is not None else {})


def collect_init_args(
    frame: FrameType, path_args: list[dict[str, Any]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, Any]]:
    """Collect the arguments of every constructor on the stack above ``frame``.

    The most derived class comes last.

    Only constructors of instances of ``classes`` count, if given.
    """
    while frame.f_back is not None:
        values = frame.f_locals
        if "__class__" in values and (not classes or isinstance(values.get("self"), classes)):
            path_args.append(get_init_args(frame))
            inside = True
        elif inside:
            break
        frame = frame.f_back
    return path_args


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Detach a collection's tensors, and move them to the CPU if asked."""
    return map_tensors(in_dict, lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach())


def convert_to_tensors(data: Any, device: torch.device | str) -> Any:
    """Convert numbers and arrays of a collection to tensors, and move all to ``device``.

    Booleans become uint8.
    """
    return move_batch(_map_leaves(data, _as_tensor), torch.device(device))


def _as_tensor(value: Any) -> Any:
    for kind, dtype in ((bool, torch.uint8), (int, torch.int), (float, torch.float)):
        if isinstance(value, kind):
            return torch.tensor(value, dtype=dtype)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def convert_tensors_to_scalars(data: Any) -> Any:
    """Convert one-element tensors of a collection to numbers.

    Raises ValueError for a tensor of several elements.
    """
    return _map_leaves(data, _as_number)


def _as_number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"The metric `{value}` does not contain a single element, thus it cannot be converted to a scalar."
        )
    return value.item()


def _map_leaves(data: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(data, MutableMapping):
        return type(data)((key, _map_leaves(value, function)) for key, value in data.items())  # type: ignore[call-arg]
    if isinstance(data, (list, tuple)):
        parts = [_map_leaves(value, function) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return function(data)


def extract_batch_size(batch: Any) -> int:
    """Return a batch's number of samples, its tensors' first dimension; warn if they differ.

    Raises MisconfigurationError if it holds no tensor.
    """
    sizes = list(batch_sizes(batch))
    if not sizes:
        raise MisconfigurationError(
            "We could not infer the batch_size from the batch. Either simplify its structure"
            " or provide the batch_size as `self.log(..., batch_size=batch_size)`."
        )
    if any(size != sizes[0] for size in sizes):
        warning_cache.warn(
            "Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is"
            f" {sizes[0]}. To avoid any miscalculations, use `self.log(..., batch_size=batch_size)`."
        )
    return sizes[0]


def has_len_all_ranks(
    dataloader: object, strategy: Any, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return True if the loader has a length; every rank must call this.

    Warns if there is nothing for any rank, or too little for this one.

    Raises RuntimeError if others have batches and this rank has none, unless that is allowed.
    """
    length, name = sized_len(dataloader), type(dataloader).__name__
    if length is None:
        return False
    total = int(strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum"))
    if total == 0:
        rank_zero_warn(f"Total length of `{name}` across ranks is zero. Please make sure this was your intention.")
    elif length == 0 and not allow_zero_length_dataloader_with_multiple_devices:
        raise RuntimeError(
            f"`{name}` within local rank has zero length. Please make sure that it returns at least 1 batch."
        )
    elif length == 0:
        rank_zero_warn(
            f"Total length of `{name}` across ranks is {total}, but local rank has zero length. Please be cautious of uneven batch length."
        )
    if reads_a_stream(dataloader):
        has_len(dataloader)
    return True


def is_shared_filesystem(strategy: Strategy, path: str | Path | None = None, timeout: float = 3) -> bool:
    """Return True if all processes see the same files below ``path``.

    By default below the working directory.

    Rank 0 puts a file there and the others look for it for up to ``timeout`` seconds, so the place must be writable; every rank must
    call this. With one process, and for addresses such as ``s3://...``, the answer is yes.
    Raises FileNotFoundError if the path does not exist on every rank.
    """
    if "://" in str(path or "") and not str(path).startswith(("file://", "local://")):
        return True
    place = Path(path or Path.cwd()).resolve()
    if strategy.world_size == 1:
        return True
    if not strategy.reduce_boolean_decision(strategy.broadcast(str(place)) == str(place)):
        return False
    if not strategy.reduce_boolean_decision(place.exists()):
        raise FileNotFoundError(
            f"Unable to determine if the path belongs to a shared filesystem: {place} does not exist on every rank"
        )
    mark = (place.parent if place.is_file() else place) / ".arclight-shared-filesystem"
    strategy.barrier("before a file is put")
    if strategy.is_global_zero:
        mark.touch()
    deadline = time.monotonic() + timeout
    while not (found := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    everyone = strategy.reduce_boolean_decision(found)
    if strategy.is_global_zero:
        mark.unlink(missing_ok=True)
    strategy.barrier("after it is gone")
    return everyone


def reads_a_stream(loader: object) -> bool:
    """Return True if the loader's dataset is an IterableDataset."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def sized_len(loader: object) -> int | None:
    """Return the loader's length; None if it has none, or does not know it."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_len(loader: object) -> bool:
    """Return True if the loader has a length.

    Warns if that is 0, and if a stream's length may be wrong with workers.
    """
    length = sized_len(loader)
    if length == 0:
        rank_zero_warn(f"`{type(loader).__name__}` returned 0 length. Please make sure this was your intention.")
    if length is not None and reads_a_stream(loader):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when"
            " num_workers > 1), it is right only where each worker reads its own share of the stream."
        )
    return length is not None


def available_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the most loader workers that leave a CPU for each training process; at least 1.

    ``local_world_size``: the number of these processes.
    """
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}.")
    return max(1, available_cpus() // local_world_size - 1)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Compute the norm of each parameter's gradient, and of all as one vector.

    norm_type: 2, 1, ``"inf"``, ...

    Keys are ``grad_2.0_norm/<parameter>`` and ``grad_2.0_norm_total``; nothing if no parameter has a gradient.
    Raises ValueError for a norm that is not positive.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    norms = {
        f"grad_{order}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad.detach(), order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms


def _is_there(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


_COMET_AVAILABLE = _is_there("comet_ml")
_MLFLOW_AVAILABLE = _MLFLOW_SYNCHRONOUS_AVAILABLE = _is_there("mlflow")
_TENSORBOARD_AVAILABLE = _is_there("tensorboard")
_TENSORBOARDX_AVAILABLE = _is_there("tensorboardX")
_WANDB_AVAILABLE = _is_there("wandb")


def to_uncompiled(model: Any) -> Module:
    """Return the Module as it was before it was compiled.

    ``model``: from ``torch.compile`` or :func:`arclight.trainer.loop.verification.from_compiled`.

    Raises ValueError for a module that is not compiled, and for anything else.
    """
    module = wrapped_module(model)
    module = model if module is None else module
    if not isinstance(module, Module):
        if module is not model:
            raise TypeError(f"the compiled object holds a {type(module).__name__}, not a LightningModule")
        raise ValueError("`model` must either be an instance of OptimizedModule or LightningModule")
    if module._compiler_ctx is None:
        if module is model:
            raise ValueError(
                "`model` is required to be a compiled LightningModule. Found a non-compiled LightningModule instead."
            )
        return module
    for name in COMPILED:
        original = module._compiler_ctx.get(f"original_{name}")
        if original is None:
            continue  # a step that the module does not have
        module.__dict__.pop(name, None)
        if getattr(module, name) != original:
            setattr(module, name, original)  # one that was set on the instance, before it was compiled
    module._compiler_ctx = None
    return module
