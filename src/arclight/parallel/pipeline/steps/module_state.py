"""Synchronise attributes of a module whose steps run in stages; show it whole to hooks.

Only `PipelinedSteps` uses it. Hooks must see the whole module, and attributes that steps set must reach all stages, as in one process.
Attributes travel pickled between the ranks of one run (decision 26).
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arclight.parallel.pipeline.splitting.sliced_module import AbsentModule

_OURS = {*vars(nn.Module()), "_trainer", "_fabric", "_entries", "_fabric_optimizers", "log", "runner"}


def _candidates(module: nn.Module) -> dict[str, Any]:
    """Return attributes that a step may change, by name.

    They are no part of the model, or submodules without parameters (metrics).
    """
    plain = {
        name: value for name, value in vars(module).items() if name not in _OURS and not isinstance(value, nn.Module)
    }
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()) and not _holds_nothing(child) and not _lacks(child):
            plain[name] = child
    return plain


def _holds_nothing(child: nn.Module) -> bool:
    """Return True for torch's modules (activations, pooling), whose attributes are settings."""
    return type(child).__module__.startswith("torch.nn.")


def _lacks(child: nn.Module) -> bool:
    """Return True for children with parts of the model whose tensors other processes have."""
    return any(
        isinstance(part, AbsentModule) or any(isinstance(x, nn.Parameter) for x in vars(part).values())
        for part in child.modules()
    )


class _Pickler(pickle.Pickler):
    """Pickler that leaves out the model itself, its trainer and process groups.

    Every process has its own of these.
    """

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        trainer = module.__dict__.get("_trainer")
        self.known = {
            id(part): ("part", name) for name, part in module.named_modules() if part is module or _weighs(part)
        }
        if trainer is not None:
            self.known[id(trainer)] = ("trainer", "")

    def persistent_id(self, obj: Any) -> Any:
        return self.known.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self.module = module

    def persistent_load(self, pid: Any) -> Any:
        kind, name = pid
        return self.module.__dict__["_trainer"] if kind == "trainer" else self.module.get_submodule(name)


def _weighs(part: nn.Module) -> bool:
    return any(True for _ in part.parameters()) or _lacks(part)


def _packed(module: nn.Module, value: Any) -> bytes | None:
    """Pickle an attribute; None for what cannot be sent.

    Locks, open files and functions made on the way cannot.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, module).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError):
        return None
    return file.getvalue()


class AttributeSync:
    """Attributes of ``module`` that steps of an epoch or an evaluation have changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: dict[str, str | None] | None = None

    def begin(self) -> None:
        """Record the attributes, before the first step since :meth:`sync`."""
        if self._before is None:
            self._before = {name: _digest(_packed(self.module, x)) for name, x in _candidates(self.module).items()}

    def sync(self, group: dist.ProcessGroup | None, source: int, device: torch.device) -> None:
        """Broadcast attributes that steps have changed since, from the process ``source``.

        All processes of ``group`` get them.
        """
        before, self._before = self._before, None
        if group is None or dist.get_world_size(group) == 1:
            return
        box: list[Any] = [None]
        if dist.get_rank() == source:
            box = [self._changed(before or {})]
        dist.broadcast_object_list(box, source, group=group, device=device if device.type == "cuda" else None)
        if dist.get_rank() != source:
            for name, data in box[0].items():
                setattr(self.module, name, _Unpickler(io.BytesIO(data), self.module).load())

    def _changed(self, before: dict[str, str | None]) -> dict[str, bytes]:
        found = {}
        for name, value in _candidates(self.module).items():
            data = _packed(self.module, value)
            if data is not None and _digest(data) != before.get(name, ""):
                found[name] = data
        return found


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


@contextmanager
def isolate_attributes(module: nn.Module) -> Iterator[None]:
    """Give steps within the block copies of the module's attributes, discarded afterwards."""
    kept: dict[str, Any] = {}
    trainer = module.__dict__.get("_trainer")
    memo = {id(part): part for part in module.modules() if part is module or _weighs(part)} | {id(trainer): trainer}
    for name, value in _candidates(module).items():
        try:
            double = copy.deepcopy(value, dict(memo))
        except (TypeError, AttributeError, RuntimeError, ValueError, pickle.PicklingError):
            continue  # what cannot be copied (locks, open files) is no result that steps gather
        kept[name] = value
        setattr(module, name, double)
    new = set(vars(module))
    try:
        yield
    finally:
        for name in set(vars(module)) - new:
            del module.__dict__[name]
        for name, value in kept.items():
            setattr(module, name, value)


_MEMBERS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class FullModuleView:
    """View of ``module`` with all parts; other stages' have shapes and no memory.

    They lose it by :meth:`release`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the view while ``module`` still has all parts."""
        self.module = module
        self._tree = dict(module.named_modules(remove_duplicate=False))
        self._whole = {name: module.__dict__[name] for name in _MEMBERS}

    def release(self) -> None:
        """Free all parameters and buffers but those that the module has now."""
        held = {id(x) for x in (*self.module.parameters(), *self.module.buffers())}
        made: dict[int, Tensor] = {}
        with self.whole():
            for part in self.module.modules():
                for members in (part._parameters, part._buffers):
                    for name, tensor in members.items():
                        if tensor is not None and id(tensor) not in held and not tensor.is_meta:
                            members[name] = made.setdefault(id(tensor), _nowhere(tensor))  # type: ignore[assignment]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Show the module with all of its parts within the block."""
        now = {name: self.module.__dict__[name] for name in _MEMBERS}
        if now["_modules"] is self._whole["_modules"]:
            yield
            return
        self._catch_up()
        self.module.__dict__.update(self._whole)
        try:
            yield
        finally:
            self.module.__dict__.update(now)

    def _catch_up(self) -> None:
        """Update the view with tensors that were loaded, sharded or allocated since."""
        for path, part in self.module.named_modules(remove_duplicate=False):
            whole = self._whole if not path else vars(self._tree[path]) if path in self._tree else None
            if whole is None or whole["_parameters"] is part._parameters:
                continue
            for name in ("_parameters", "_buffers"):
                members: dict[str, Any] = getattr(part, name)
                whole[name].update({key: value for key, value in members.items() if value is not None})


def _nowhere(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
