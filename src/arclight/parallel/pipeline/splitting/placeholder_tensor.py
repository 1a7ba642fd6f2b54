"""Define placeholder tensors without data: they stand for values that other stages compute.

`capture` runs a forward on these; `sliced_module` and `stage_interpreter` use them where another stage has the value. Operators may be
added to the tables; an operator that needs data must go on raising, or ranks would disagree about branches.

A placeholder has the shape, dtype and device of its tensor, and results computed from it are placeholders. So code between
the parts of a model runs in every process, whichever inputs it has. A placeholder records its sources, from which
`capture` reads the dependencies of calls. Code that needs data (a branch, a number, an index) gets a `DataDependentError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from arclight.parallel.pipeline.call_graph import Value
from arclight.parallel.plan import PlanError

aten = torch.ops.aten
_KNOWN = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full,
}  # fmt: skip
"""Operations that read nothing of a tensor but its shape and type: their result is a real tensor, also of a placeholder."""
_numbers = itertools.count()


class DataDependentError(PlanError):
    """Error of code between parts that stages cannot run.

    It needs data that another stage computes, or would do things twice.
    """


@dataclass(frozen=True)
class Draw:
    """Random numbers drawn by an operation between calls. Two processes would not draw the same."""

    number: int
    operation: str


Source = Value | str | Draw
"""What a placeholder may depend on: a value of a call, a parameter by its first name, random numbers."""


@dataclass(eq=False)
class StorageState:
    """Writes to one memory, shared by all placeholders that view it."""

    writes: int = 0
    values: list[Value] = field(default_factory=list)
    """Values whose memory it is, if it is that of a call's result."""


@dataclass(eq=False)
class Origin:
    """Sources that a placeholder, and all views of it, depend on."""

    sources: frozenset[Source] = frozenset()
    memory: StorageState = field(default_factory=StorageState)


class PlaceholderTensor(Tensor):
    """Tensor with everything but data."""

    payload: Tensor
    origin: Origin
    of: str
    """Name of the call or parameter that it came from, for messages."""

    __torch_function__: Any = (
        torch._C._disabled_torch_function_impl
    )  # operations are seen where they are dispatched, not before

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch_placeholders(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PlaceholderTensor(of={self.of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise refusal(self)

    numpy = tolist = __array__ = data_ptr = _refuse


def refusal(tensor: PlaceholderTensor) -> DataDependentError:
    """Return the error for code that asks ``tensor`` for its data."""
    return DataDependentError(
        f"data-dependent control flow on what another stage computes: {tensor.of}. Code between the parts of a model must "
        "take the same way whatever they return: move it into one of them, or use frontend='trace'"
    )


def make_placeholder(payload: Tensor, device: torch.device, of: str, origin: Origin | None = None) -> PlaceholderTensor:
    """Make a placeholder like ``payload`` (on the meta device), that claims to be on ``device``."""
    made: Any = Tensor._make_wrapper_subclass(
        PlaceholderTensor, payload.size(), strides=payload.stride(), storage_offset=payload.storage_offset(),
        dtype=payload.dtype, device=device,
    )  # fmt: skip
    made.payload, made.of, made.origin = payload, of, Origin() if origin is None else origin
    placeholder: PlaceholderTensor = made
    return placeholder


def placeholder_like(
    tensor: Tensor, of: str, origin: Origin | None = None, home: torch.device | None = None
) -> PlaceholderTensor:
    """Return a placeholder for ``tensor``.

    home: the device that it claims if ``tensor`` has no data.
    """
    device = home if home is not None and (tensor.is_meta or isinstance(tensor, PlaceholderTensor)) else tensor.device
    return make_placeholder(_on_meta(tensor), device, of, origin)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


@dataclass(frozen=True)
class _Rule:
    """Side effects of an operation: writes, aliases, needs of data, random draws."""

    writes: tuple[tuple[int, str], ...]
    """Arguments that it changes, by position and name."""
    returns: tuple[tuple[int, str] | None, ...]
    """The argument whose memory each result has."""
    needs_data: bool
    draws: bool
    known: bool


@cache
def _rule(func: Any) -> _Rule:
    schema = func._schema
    writes, owners = [], {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            owners.update(dict.fromkeys(argument.alias_info.before_set, (position, argument.name)))
            if argument.alias_info.is_write:
                writes.append((position, argument.name))
    returns = tuple(
        next((owners[name] for name in r.alias_info.before_set if name in owners), None) if r.alias_info else None
        for r in schema.returns
    )
    tags = func.tags
    needs_data = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    draws = torch.Tag.nondeterministic_seeded in tags
    return _Rule(tuple(writes), returns, needs_data, draws, func.overloadpacket in _KNOWN)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for operations that draw random numbers that matter.

    One that drops nothing does not.
    """
    if not _rule(func).draws:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout") and isinstance(argument.default_value, float | int | None):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if "drop" in str(func) or argument.name == "dropout_p":
                return bool(given != 0)
        if argument.name == "training" and "rrelu" in str(func):
            return bool(args[position] if position < len(args) else kwargs.get("training", False))
    return True


def placeholders_in(tree: Any, deep: int = 0) -> Iterator[PlaceholderTensor]:
    """Yield the placeholders in nested lists, tuples, sets and dicts.

    ``deep``: as many levels into the attributes of other objects.
    """
    if isinstance(tree, PlaceholderTensor):
        yield tree
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for member in tree:
            yield from placeholders_in(member, deep)
    elif isinstance(tree, dict):
        for member in tree.values():
            yield from placeholders_in(member, deep)
    elif deep and not isinstance(tree, (Tensor, torch.nn.Module, type)) and hasattr(tree, "__dict__"):
        yield from placeholders_in(list(vars(tree).values()), deep - 1)


def dispatch_placeholders(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on arguments with placeholders; return placeholders.

    Raises DataDependentError if it needs data, or writes what it lacks into a tensor that has data.
    """
    rule = _rule(func)
    given = list(placeholders_in((args, kwargs)))
    if rule.known:
        return func(*_each(args, _blank), **_each(kwargs, _blank))
    first = next((h for h in given if h.ndim), given[0]) if given else None
    of = first.of if first is not None else str(func)
    if rule.needs_data and first is not None:
        raise refusal(first)
    targets = [h for where in rule.writes for h in _listed(_argument(where, args, kwargs))]
    written = [h for h in targets if isinstance(h, PlaceholderTensor)]
    if len(written) < len(targets):
        raise DataDependentError(
            f"{func} writes what another stage computes ({of}) into a tensor that has data: compute a new tensor in its place, or "
            "use frontend='trace'"
        )
    on_meta = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in kwargs.items()}
    try:
        out = func(*_each(args, _payload), **_each(on_meta, _payload))
    except NotImplementedError as error:
        raise DataDependentError(
            f"{func} cannot be followed without data (what it needs comes from {of}): move it into a part of the model"
        ) from error
    sources: frozenset[Source] = frozenset().union(*(h.origin.sources for h in given))
    if draws(func, args, kwargs):
        sources |= {Draw(next(_numbers), str(func))}
    for target in written:
        target.origin.sources |= sources
        target.origin.memory.writes += 1
    device = kwargs.get("device") or (first.device if first is not None else _device_of(args))
    several = isinstance(out, (tuple, list)) and len(rule.returns) != 1
    results = []
    for where, leaf in zip(rule.returns, out if several else [out], strict=False):
        owner = None if where is None else _argument(where, args, kwargs)
        if where in rule.writes and owner is not None:
            results.append(owner)
        else:
            shared = owner.origin if isinstance(owner, PlaceholderTensor) else None
            results.append(_wrapped(leaf, device, of, shared, sources))
    return type(out)(results) if several else (results[0] if results else out)


def _wrapped(leaf: Any, device: torch.device, of: str, shared: Origin | None, sources: frozenset[Source]) -> Any:
    if isinstance(leaf, (tuple, list)):
        return type(leaf)(_wrapped(member, device, of, shared, sources) for member in leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    return make_placeholder(leaf, device, of, shared if shared is not None else Origin(sources))


def _argument(where: tuple[int, str], args: Any, kwargs: Any) -> Any:
    position, name = where
    return args[position] if position < len(args) else kwargs.get(name)


def _listed(argument: Any) -> list[Tensor]:
    members = argument if isinstance(argument, (list, tuple)) else [argument]
    return [member for member in members if isinstance(member, Tensor)]


def _each(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_each(member, change) for member in tree])
    if isinstance(tree, dict):
        return {name: _each(member, change) for name, member in tree.items()}
    return tree


def _payload(tensor: Tensor) -> Tensor:
    return tensor.payload if isinstance(tensor, PlaceholderTensor) else tensor.to("meta")


def _blank(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, PlaceholderTensor):
        return tensor
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _device_of(args: Any) -> torch.device:
    found = next((a.device for a in _listed(list(args))), None)
    return found if found is not None else torch.device("cpu")
