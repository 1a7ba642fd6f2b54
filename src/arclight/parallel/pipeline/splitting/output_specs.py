"""Derive output specs of a model's parts without data: structure, shapes, dtypes, constants.

`capture` asks for the outputs of each part while it traces a forward on placeholders; `sliced_module` and `stage_interpreter` ask again
when a stage runs. A part runs once on placeholders for each signature of arguments, and its spec is kept.

Another input that decides shapes must go into `signature`, or a stale spec is returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from arclight.parallel.pipeline.splitting.placeholder_tensor import (
    DataDependentError,
    PlaceholderTensor,
    placeholder_like,
)
from arclight.parallel.pipeline.splitting.proxy_modules import HOOKS, copy_tree, walk
from arclight.parallel.plan import PlanError


@dataclass(frozen=True)
class OutputSpec:
    """Description of a call's result: leaves, of which tensors are placeholders, and nesting."""

    leaves: tuple[Any, ...]
    structure: TreeSpec
    changed: tuple[int, ...]
    """Indices of the placeholders among the arguments that the call changes in place."""
    buffers: tuple[str, ...]
    """Names, within the part, of the buffers that the call changes."""
    writes_data: bool
    """Whether it changes tensors in the arguments that are not placeholders."""
    memories: tuple[int, ...]
    """For each leaf the index of the argument tensor that it views, or a negative number shared by leaves of one memory."""


class OutputSpecs:
    """Output specifications of the parts of a model, whose parameters are not kept."""

    def __init__(self, root: nn.Module, units: Collection[str], home: torch.device | None = None) -> None:
        """Initialise the specs of the parts ``units``.

        home: device that parameters on the meta device count as.
        """
        self.home = home
        self._originals = {path: module for path, module in walk(root) if path in units}
        self._parts: dict[str, nn.Module] = {}
        self._known: dict[Any, OutputSpec] = {}
        self._inside: dict[str, list[Mapping[int, Any]]] = {}
        self._hooks: dict[str, int] = {}

    def part(self, path: str) -> nn.Module:
        """Return the module at ``path`` as a copy without data, made when it is first asked for."""
        if path not in self._parts:
            made = copy_tree(self._originals[path], lambda *_: None, lambda _, new: self._empty(path, new))
            made._forward_hooks.clear()  # those of who stands for it are called
            made._forward_pre_hooks.clear()
            self._parts[path], self._inside[path] = made, _hooks_inside(made)
            self._hooks[path] = sum(map(len, self._inside[path]))
        return self._parts[path]

    def listen(self, path: str, shown: nn.Module) -> None:
        """Attach hooks of modules inside ``shown`` to those inside of the part at ``path``."""
        for own, other in itertools.islice(zip(self.part(path).modules(), shown.modules(), strict=True), 1, None):
            for name in HOOKS:
                own.__dict__[name] = other.__dict__[name]
        self._inside[path] = _hooks_inside(self.part(path))

    def release(self) -> None:
        """Make all copies, and forget the model that they were made of."""
        for path in self._originals:
            self.part(path)
        self._originals = {}

    def _empty(self, path: str, module: nn.Module) -> None:
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    made = placeholder_like(tensor, path, home=self.home)
                    if members is module._parameters:
                        made._is_param = True
                    members[name] = made  # type: ignore[assignment]

    def move(self, device: torch.device, types: Mapping[torch.dtype, torch.dtype]) -> None:
        """Move parts to ``device`` and change tensor types by ``types``, as the model was."""
        self.home = device
        self._known.clear()
        for part in self._parts.values():
            for module in part.modules():
                for members in (module._parameters, module._buffers):
                    for name, tensor in members.items():
                        if isinstance(tensor, PlaceholderTensor):
                            members[name] = move_placeholder(tensor, device, types)  # type: ignore[assignment]

    def find(self, path: str, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSpec:
        """Return the specification of a part's result for such arguments.

        Raises PlanError if it depends on their data.
        """
        key = (path, training, *_autocast(), signature((args, kwargs)))
        part = self.part(path)
        # Code of the model may have put hooks inside since: what they take there must come, or be missed, each time.
        found = self._known.get(key) if sum(map(len, self._inside[path])) == self._hooks[path] else None
        if found is None:
            if part.training is not training:
                part.train(training)
            here = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            with torch.random.fork_rng(
                here
            ):  # a part may draw numbers itself, and what it returns is asked for only once
                found = self._known[key] = self._first(part, path, args, kwargs)
        return found

    def _first(self, part: nn.Module, path: str, args: Any, kwargs: Any) -> OutputSpec:
        try:
            return self._run(part, path, args, kwargs)
        except ChangedArgumentError:
            raise
        except DataDependentError:
            return self._run_on_zeros(part, path, args, kwargs)
        except RuntimeError:
            # A strategy that shards a part may let it compute in another type than that of its parameters.
            weights = {p.dtype for p in part.parameters() if p.is_floating_point()}
            floats = (x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.is_floating_point())
            given = {x.dtype for x in floats}
            if len(weights) != 1 or len(given) != 1 or weights == given:
                raise
            (inside,), (outside,) = weights, given
            return self._run(part, path, args, kwargs, {outside: inside})

    def _run(
        self, part: nn.Module, path: str, args: Any, kwargs: Any, types: Mapping[torch.dtype, torch.dtype] | None = None
    ) -> OutputSpec:
        """Run a part on placeholders; return the spec of its result.

        types: of floating tensors, for others as which the part is given them, and gives back what it returns of those.
        """
        into = types or {}
        back = {inside: outside for outside, inside in into.items()}

        def prepared(tensor: Tensor) -> Tensor:
            if (
                isinstance(tensor, PlaceholderTensor)
                or tensor.is_floating_point()
                or tensor.is_complex()
                or tensor.is_meta
            ):
                return move_placeholder(placeholder_like(tensor, path), self._home_of(tensor), into)
            return tensor.detach().clone()

        before = tree_flatten((args, kwargs))[0]
        device = next((self._home_of(x) for x in before if isinstance(x, Tensor)), self.home)
        args, kwargs = tree_map_only(Tensor, prepared, (args, kwargs))
        given = [
            x
            for x, was in zip(tree_flatten((args, kwargs))[0], before, strict=True)
            if isinstance(was, PlaceholderTensor)
        ]
        buffers = {name: (one, writes_of(one)) for name, one in part.named_buffers(remove_duplicate=False)}
        inside = tree_flatten((args, kwargs))
        with torch.no_grad():
            leaves, structure = tree_flatten(part(*args, **kwargs))
        _refuse_changed(path, inside, tree_flatten((args, kwargs)))
        now = dict(part.named_buffers(remove_duplicate=False))
        kept = tuple(
            name for name, (one, count) in buffers.items() if now.get(name) is not one or writes_of(one) > count
        )
        others = [x for x, was in zip(tree_flatten((args, kwargs))[0], before, strict=True)
                  if isinstance(x, Tensor) and not isinstance(was, PlaceholderTensor)]  # fmt: skip
        changed = tuple(index for index, one in enumerate(given) if one.origin.memory.writes)
        memories: list[int] = []
        made: list[Any] = []
        known = {id(one.origin.memory): index for index, one in enumerate(given)}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                one = leaf if isinstance(leaf, PlaceholderTensor) else placeholder_like(leaf, path)
                memories.append(known.setdefault(id(one.origin.memory), -1 - len(known)))
                made.append(move_placeholder(placeholder_like(one, path), device, back))
            else:
                memories.append(-1)
                made.append(leaf)
        return OutputSpec(tuple(made), structure, changed, kept, any(map(writes_of, others)), tuple(memories))

    def _home_of(self, tensor: Tensor) -> torch.device:
        return self.home if tensor.device.type == "meta" and self.home is not None else tensor.device

    def _run_on_zeros(self, part: nn.Module, path: str, args: Any, kwargs: Any) -> OutputSpec:
        """Run a part with data-dependent control flow on zeros and on ones.

        Both must give the same specs.
        """
        results = []
        for fill in (0.0, 1.0):

            def data(tensor: Tensor, fill: float = fill) -> Tensor:
                if not isinstance(tensor, PlaceholderTensor):
                    return tensor.detach().clone()
                made = torch.full((), fill, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
                return made.expand(tensor.shape).clone() if tensor.numel() < 2**20 else made.expand(tensor.shape)

            def real(_: str, new: nn.Module, data: Any = data) -> None:
                for members in (new._parameters, new._buffers):
                    for name, tensor in members.items():
                        if tensor is not None:
                            members[name] = data(tensor)

            running = copy_tree(part, lambda *_: None, real)
            here, there = tree_map_only(Tensor, data, (args, kwargs))
            inside = tree_flatten((here, there))
            with torch.no_grad():
                results.append(tree_flatten(running(*here, **there)))
            _refuse_changed(path, inside, tree_flatten((here, there)))
            kept = tuple(name for name, one in running.named_buffers(remove_duplicate=False) if one._version)
        (leaves, structure), (others, _) = results
        if _shown(leaves) != _shown(others) or any(
            isinstance(leaf, int | float) for leaf in leaves if not isinstance(leaf, bool)
        ):
            raise PlanError(
                f"what {path} returns has another shape for other data: stages before and after it cannot know it"
            )
        memories = tuple(-1 - index for index in range(len(leaves)))
        return OutputSpec(
            tuple(placeholder_like(x, path) if isinstance(x, Tensor) else x for x in leaves),
            structure,
            (),
            kept,
            False,
            memories,
        )


class ChangedArgumentError(DataDependentError):
    """Error of a part that puts its result into a list or dict argument instead of returning it."""


def _refuse_changed(path: str, before: tuple[list[Any], TreeSpec], after: tuple[list[Any], TreeSpec]) -> None:
    if before[1] != after[1] or any(now is not was for was, now in zip(before[0], after[0], strict=True)):
        raise ChangedArgumentError(
            f"{path} changes a list or dict that it is given, which other stages would not see: let it return what it computes"
        )


def move_placeholder(
    placeholder: PlaceholderTensor, device: torch.device | None, types: Mapping[torch.dtype, torch.dtype]
) -> PlaceholderTensor:
    """Return ``placeholder`` on ``device`` (None: where it is), with another dtype."""
    made = placeholder_like(
        placeholder.to(types.get(placeholder.dtype, placeholder.dtype)),
        placeholder.of,
        home=device or placeholder.device,
    )
    if isinstance(placeholder, nn.Parameter):
        made._is_param = True
    return made


def writes_of(tensor: Tensor) -> int:
    """Count how often a tensor that was made here has been changed in place."""
    return tensor.origin.memory.writes if isinstance(tensor, PlaceholderTensor) else tensor._version


def _hooks_inside(part: nn.Module) -> list[Mapping[int, Any]]:
    return [hooks for module in part.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]


def _autocast() -> tuple[torch.dtype | None, ...]:
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))


def _shown(leaves: list[Any]) -> list[Any]:
    return [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]


def signature(tree: Any) -> tuple[Any, ...]:
    """Return a key of what result shapes depend on: tensors by shape and type, all else as is."""
    found: list[Any] = []
    _sign(tree, found, 3)
    return tuple(found)


_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def _sign(tree: Any, found: list[Any], deep: int) -> None:
    kind = type(tree)
    found.append(kind)
    if isinstance(tree, Tensor):
        if tree.is_nested:
            raise PlanError(
                "a nested tensor comes between the parts of the model, which no stage can be told the size of: build it without them "
                "(nn.TransformerEncoder(..., enable_nested_tensor=False))"
            )
        found += (tree.shape, tree.dtype)
    elif kind in _PLAIN:
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        found.append(len(tree))
        for member in tree:
            _sign(member, found, deep)
    elif isinstance(tree, dict):
        found.append(len(tree))
        for name, member in tree.items():
            found.append(name)
            _sign(member, found, deep)
    elif deep and hasattr(tree, "__dict__") and not isinstance(tree, (type, nn.Module)):
        _sign(vars(tree), found, deep - 1)
