"""Copy a module tree with proxies in place of some modules, sharing tensors.

`capture`, `output_specs`, `sliced_module` and `stage_tensors` copy models with these; a `CallHandler` takes the calls of the proxies. The
original tree is never changed. A copy has the same classes and dicts of its own; tensors stay shared with the original until they are
replaced, since optimizers and checkpoints hold them by identity.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arclight.parallel.pipeline.splitting.placeholder_tensor import DataDependentError


def shallow_clone(module: nn.Module) -> nn.Module:
    """Clone ``module`` alone, with dicts (children, parameters, buffers, hooks) of its own.

    KV caches of transformers' models are turned off (``use_cache``): no stage has all of one.
    """
    made: nn.Module = object.__new__(type(module))
    for name, value in module.__dict__.items():
        if name == "_compiled_call_impl":
            continue  # compiled code of the original
        if name.endswith("_hooks") and isinstance(value, dict):
            value = type(value)((key, hook) for key, hook in value.items() if not _gathers_parameters(hook))
        elif isinstance(value, dict) and (name.startswith("_") or not value):
            value = value.copy()
        elif isinstance(value, set):
            value = set(value)
        elif isinstance(value, types.MethodType) and value.__self__ is module:
            value = types.MethodType(value.__func__, made)  # a forward that was put on the instance
        made.__dict__[name] = value
    config: Any = made.__dict__.get("config")
    if getattr(config, "use_cache", None) is True:
        made.__dict__["config"] = config = copy.copy(config)
        config.use_cache = False
    return made


def _gathers_parameters(hook: Any) -> bool:
    """Return True for hooks that gather sharded parameters (FSDP, DDP).

    Clones must not run them.
    """
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed")


Visit = Callable[[str, nn.Module], "nn.Module | None"]
"""Function of path and module: its replacement in the copy, or None to copy it and visit its children."""


def copy_tree(root: nn.Module, visit: Visit, changed: Callable[[str, nn.Module], None] | None = None) -> nn.Module:
    """Return a copy of ``root``, in which ``visit`` chooses replacements of modules.

    A module at several paths stays one unless it does. ``changed(path, copy)`` is called for each copied module, whose
    ``_parameters`` and ``_buffers`` it may change.
    """
    made: dict[nn.Module, nn.Module] = {}

    def copied(path: str, module: nn.Module) -> nn.Module:
        replaced = visit(path, module)
        if replaced is not None:
            made.setdefault(module, replaced)
            return replaced
        if module in made:
            return made[module]
        new = made[module] = shallow_clone(module)
        for name, child in module._modules.items():
            new._modules[name] = None if child is None else copied(f"{path}.{name}" if path else name, child)
        if changed is not None:
            changed(path, new)
        return new

    whole = copied("", root)
    for new in list(made.values()):
        if new not in made and not isinstance(new, ModuleProxy):
            for name, value in new.__dict__.items():
                if name not in ("_modules", "_parameters", "_buffers"):
                    new.__dict__[name] = _redirected(value, made)
    return whole


def _redirected(value: Any, made: dict[nn.Module, nn.Module]) -> Any:
    """Return an attribute with modules of the tree replaced by their copies."""
    if isinstance(value, nn.Module):
        return made.get(value, value)
    if type(value) in (list, tuple) and any(isinstance(member, nn.Module) for member in value):
        return type(value)(_redirected(member, made) for member in value)
    if type(value) is dict and any(isinstance(member, nn.Module) for member in value.values()):
        return {name: _redirected(member, made) for name, member in value.items()}
    return value


class CallHandler(Protocol):
    """Handler of the calls of proxies."""

    def call(self, proxy: ModuleProxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the call of the module that ``proxy`` replaces."""
        ...

    def real(self, proxy: ModuleProxy) -> nn.Module | None:
        """Return the module that the next call will call, or None if nothing will be computed."""
        ...


class AbsentError(DataDependentError, AttributeError):
    """A part has no such attribute. That may be asked for (``hasattr``)."""


class ModuleProxy(nn.Module):
    """Proxy of a module's class with its attributes, whose calls go to a `CallHandler`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        if not (state["_forward_hooks"] or state["_forward_pre_hooks"]):
            return state["_call_handler"].call(self, args, kwargs)
        real = state["_call_handler"].real(self)
        if real is None:
            return nn.Module.__call__(self, *args, **kwargs)
        held = {name: real.__dict__[name] for name in _CALLED}
        for name, hooks in held.items():  # what they change, stages that are given the part's result change themselves
            mine = {_code(hook) for hook in state[name].values()}
            real.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if _code(hook) not in mine)
        try:
            return nn.Module.__call__(self, *args, **kwargs)
        finally:
            real.__dict__.update(held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call_handler"].call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        for members in (state["_parameters"], state["_buffers"], state["_modules"]):
            if name in members:
                return members[name]
        try:
            return getattr(state["_stands_for"], name)
        except AttributeError as error:
            raise AbsentError(
                f"code between the parts of the model reads {name} of {self.proxy_path}, which that has not before it is called, and which other "
                f"stages would not have: let {self.proxy_path} return it"
            ) from error

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_stands_for"], name, value)

    @property
    def proxy_path(self) -> str:
        """Return the proxy's path."""
        return self.__dict__["_path"]  # type: ignore[no-any-return]


@cache
def _proxy_class(kind: type[nn.Module]) -> type[ModuleProxy]:
    return type(kind.__name__, (ModuleProxy, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def _code(hook: Any) -> Any:
    return getattr(getattr(hook, "__func__", hook), "__code__", hook)


_CALLED = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
          "_forward_pre_hooks_with_kwargs")  # fmt: skip


def make_proxy(path: str, stands_for: nn.Module, call_handler: CallHandler, original: nn.Module) -> ModuleProxy:
    """Return a proxy at ``path`` of ``stands_for``, with calls handled by ``call_handler``.

    It has the hooks of ``original``, the module that is called there in the model.
    """
    made: ModuleProxy = object.__new__(_proxy_class(type(stands_for)))  # type: ignore[arg-type]
    made.__dict__.update(nn.Module().__dict__)
    del made.__dict__["training"]
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = stands_for.__dict__[name]
    for name in HOOKS:
        hooks = original.__dict__[name]
        made.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _gathers_parameters(hook))
    made.__dict__.update(_path=path, _stands_for=stands_for, _call_handler=call_handler)
    return made


def parameter_names(root: nn.Module) -> tuple[dict[str, str], dict[str, nn.Parameter]]:
    """Map each parameter's names to its first one, and first names to parameters.

    Tied ones are one object, or share memory.
    """
    first: dict[Any, str] = {}
    names: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        keys: list[Any] = [id(parameter), _memory(parameter)]
        found = next((first[key] for key in keys if key in first), None)
        if found is None:
            parameters[name] = parameter
        names[name] = found or name
        for key in keys:
            if key is not None:
                first.setdefault(key, names[name])
    return names, parameters


def first_buffers(root: nn.Module) -> dict[str, str]:
    """Map each name of a buffer to the one under which its module is met first."""
    first: dict[nn.Module, str] = {}
    names = {}
    for path, module in walk(root):
        there = first.setdefault(module, path)
        for name in module._buffers:
            names[f"{path}.{name}" if path else name] = f"{there}.{name}" if there else name
    return names


def _memory(tensor: Tensor) -> Any:
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        return None
    return (address, tensor.dtype, tuple(tensor.shape), tensor.stride()) if address else None


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all paths with their modules, those that are at several paths each time."""
    yield from root.named_modules(remove_duplicate=False)
