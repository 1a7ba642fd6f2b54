"""Capture one forward of a model without data, as a `CallGraph` of its module calls.

`split`, `PipelinedSteps`, `forecast` and ``arclight plan`` call `capture_call_graph`. Its graph must be the same on every rank, since
stages are assigned by the numbers of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.parallel.pipeline.call_graph import Call, CallGraph, Value, bind_function
from arclight.parallel.pipeline.splitting import global_rng
from arclight.parallel.pipeline.splitting.output_specs import OutputSpecs, writes_of
from arclight.parallel.pipeline.splitting.placeholder_tensor import (
    DataDependentError,
    Draw,
    Origin,
    PlaceholderTensor,
    Source,
    StorageState,
    dispatch_placeholders,
    draws,
    make_placeholder,
    placeholder_like,
    placeholders_in,
)
from arclight.parallel.pipeline.splitting.proxy_modules import (
    ModuleProxy,
    copy_tree,
    first_buffers,
    make_proxy,
    parameter_names,
)
from arclight.parallel.plan import PlanError

_DEEP = 3
"""Levels of attributes of plain objects in which tensors are looked for."""
_LARGE = 1 / 8
"""Share of the parameters above which a repeated block that has repeated blocks itself is split into these."""


def capture_call_graph(
    root: nn.Module, function: str | Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any], at: Sequence[str] = (),
    open_end: bool = False,
) -> CallGraph:  # fmt: skip
    """Capture what ``function`` (None: the forward) of ``root`` does, as calls of its parts.

    Nothing is computed.

    The model may be on the meta device, in memory, or mixed; it is not changed, its parameters are not copied, and it runs as in training.
    Example tensors have their data, so code between parts may depend on it; what parts return are placeholders.
    at: names of modules of which each begins a part. Parts are otherwise repeated blocks, and the largest modules without
    repeated blocks; a module that cannot be looked into, since its code needs data, is a part as a whole.
    open_end: whether ``root``'s own code may need data after all that trains was used (a loss that looks at its targets does). It is not
    looked at from there on, and taken to need the outputs of the last part and of parts that no other reads.

    Raises PlanError if code between the parts needs data, or two values share memory that is written.
    """
    for name, module in root.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise PlanError(f"{name or 'the model'} is compiled already: compile the parts of stages after the cut")
    for name, parameter in root.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise PlanError(f"{name} has no shape yet: call the model once before it is cut")
    closed, opened = set[str](), set[str]()
    while True:
        units = choose_parts(root, at, closed, opened)
        recorder = _CallRecorder(root, units)
        try:
            graph = recorder.run(function, args, kwargs)
            bypassed = recorder.bypassed(graph) - opened - closed
            if not bypassed:
                return graph
            opened |= bypassed
        except DataDependentError as error:
            path = recorder.innermost(error)
            if not path and open_end and recorder.all_used():
                return recorder.so_far()
            if not path or any(name.startswith(path + ".") for name in at):
                raise
            closed.add(path)


def choose_parts(
    root: nn.Module, at: Collection[str] = (), closed: Collection[str] = (), opened: Collection[str] = ()
) -> set[str]:
    """Return the paths of the modules that are the parts of ``root``.

    closed: not looked into. opened: no parts. Raises PlanError for a name that is none.
    """
    total = sum(parameter.numel() for parameter in root.parameters()) or 1
    units: set[str] = set()

    def visit(path: str, module: nn.Module, member: bool) -> None:
        wanted = path in opened or any(name.startswith(path + ".") if path else True for name in at)
        weights = sum(parameter.numel() for parameter in module.parameters())
        if path and not wanted:
            looked_into = path not in closed and not path.startswith(tuple(c + "." for c in closed)) and _opens(module)
            if looked_into and member:
                looked_into = weights > total * _LARGE and _repeats(module, deep=True)
            if (weights and not looked_into) or path in at or _drops(module):
                units.add(path)
                return
        alike = _is_list(module) or (isinstance(module, nn.Sequential) and _alike(module))
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{path}.{name}" if path else name, child, alike)

    visit("", root, False)
    return units


def _opens(module: nn.Module) -> bool:
    """Return True for modules that are looked into because they have blocks."""
    lists = (part for part in module.modules() if _is_list(part))
    return any(next(part.parameters(), None) is not None for part in lists) or _repeats(module)


def _repeats(module: nn.Module, deep: bool = False) -> bool:
    """Return True for modules with a list of modules that are alike.

    deep: only such whose members consist of modules.
    """
    return any((_is_list(part) or isinstance(part, nn.Sequential)) and _alike(part, deep) for part in module.modules())


def _is_list(module: nn.Module) -> bool:
    """Return True for lists of modules that are not called themselves.

    Parametrizations are kept in such, and called by none.
    """
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is not nn.Module.forward:
        return False
    return not any(isinstance(member, ParametrizationList) for member in module.children())


def _alike(container: nn.Module, deep: bool = False) -> bool:
    kinds: list[type[nn.Module]] = []
    for child in container.children():
        if next(child.parameters(), None) is not None and (not deep or next(child.children(), None) is not None):
            kinds.append(type(child))
    return len(kinds) > len(set(kinds))


def _drops(module: nn.Module) -> bool:
    return next(module.children(), None) is None and "drop" in type(module).__name__.lower()


class _DrawMode(TorchDispatchMode):
    """Mode that intercepts operations on real tensors; random results become placeholders."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        """Tensors that were read, by ``id``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.read.update(id(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if next(placeholders_in((args, kwargs)), None) is None and not draws(func, args, kwargs):
            return func(*args, **kwargs)
        return dispatch_placeholders(func, args, kwargs)


class _CallRecorder:
    """Record the calls of parts while the function runs once."""

    def __init__(self, root: nn.Module, units: set[str]) -> None:
        self.root, self.units = root, units
        self.names = parameter_names(root)[0]
        self.buffers = first_buffers(root)
        self.loose: list[tuple[str, Tensor]] = []
        self.calls: list[Call] = []
        self.rewritten: set[Value] = set()
        self.memories: dict[int, tuple[StorageState, int]] = {}
        self.paths: dict[nn.Module, str] = {}
        self.output_specs = OutputSpecs(root, units)
        self.home: torch.device | None = None
        self.rng_state = global_rng.global_rng_state()
        self.draw_mode = _DrawMode()
        self.first_read: dict[str, int] = {}
        self.counted: dict[str, int] = {}
        self.writes: dict[str, list[int]] = {}
        """Calls before which each buffer that belongs to no part is written."""

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallGraph:
        real = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and not x.is_meta]
        self.home = real[0].device if real else None
        self.output_specs.home = self.home
        tree = copy_tree(self.root, self._visit, self._without_data)
        for module in tree.modules():
            if not isinstance(module, ModuleProxy):
                module.training = True
        args, kwargs = tree_map_only(Tensor, self._example, (args, kwargs))
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        with torch.no_grad(), self.draw_mode:
            result = bind_function(function, self.root)(tree)(*args, **kwargs)
        self._note_writes()
        self._warn_of_state()
        uncounted = [name for name, buffer in self.loose if name not in self.writes and self._written(name, buffer)]
        late = next((n for n, at in self.writes.items() if self.first_read.get(n, len(self.calls)) < at[-1]), None)
        if late is not None:
            raise DataDependentError(
                f"{late} is read before other parts than it is changed, so that earlier stages would never see the change: change it in a part"
            )
        early = frozenset(
            self.buffers[n] for n in (*self.writes, *uncounted) if self.writes.get(n, [0])[0] < len(self.calls)
        )
        written = frozenset(self.buffers[name] for name in (*self.writes, *uncounted))
        return replace(
            self._graph(result), writes_arguments=any(map(writes_of, given)), buffers=written, repeated=early
        )

    def _graph(self, result: Any) -> CallGraph:
        found = list(placeholders_in(tree_flatten(result)[0]))
        of_parts = (one for one in found if one.of in self.units)
        inside = next((o for o in of_parts if all(isinstance(source, Draw) for source in o.origin.sources)), None)
        if inside is not None:
            raise DataDependentError(
                f"the result holds what {inside.of} computes and does not return (a hook takes it?): let it be returned"
            )
        for leaf in tree_flatten(result)[0]:
            inner = next(placeholders_in(leaf, _DEEP), None) if not isinstance(leaf, Tensor) else None
            if inner is not None:
                raise PlanError(
                    f"the result holds a {type(leaf).__name__} with what several stages compute (of {inner.of}): switch it off "
                    "(use_cache=False), or return its tensors"
                )
        values, parameters, numbers = _sorted_out(found)
        aliases = {name: first for name, first in self.names.items() if name != first}
        return CallGraph(
            tuple(self.calls), values, parameters, result_draws=numbers, rewritten=frozenset(self.rewritten), aliases=aliases
        )  # fmt: skip

    def all_used(self) -> bool:
        """Return True once calls have used all that trains: what follows can be an end."""
        used = {name for call in self.calls for name in call.parameters}
        return all(name in used for name, p in self.root.named_parameters() if p.requires_grad)

    def so_far(self) -> CallGraph:
        """Return the graph of the calls until now.

        What comes after them needs what the last one returned, and what none of them reads.
        """
        read = frozenset().union(*(call.reads for call in self.calls))
        last = len(self.calls) - 1
        every = {Value(i, leaf) for i, call in enumerate(self.calls) for leaf, size in enumerate(call.outputs) if size}
        result = frozenset(value for value in every if value.call == last or value not in read)
        aliases = {name: first for name, first in self.names.items() if name != first}
        return CallGraph(tuple(self.calls), result, rewritten=frozenset(self.rewritten), aliases=aliases)

    def bypassed(self, graph: CallGraph) -> set[str]:
        """Return the parts that are never called, while code around them uses their contents."""
        loose = {name for call in graph.calls for name in call.parameters if not name.startswith(f"{call.name}.")}
        loose.update(graph.result_parameters)
        idle = self.units - {call.name for call in graph.calls}
        return {
            path
            for path in idle
            if any(self.names.get(name) in loose for name in self.names if name.startswith(f"{path}."))
            and any(True for _ in self.root.get_submodule(path).children())
        }

    def innermost(self, error: BaseException) -> str | None:
        """Return the path of the module whose code was running when ``error`` was raised."""
        path, trace = None, error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self.paths:
                path = self.paths[owner]
            trace = trace.tb_next
        return path

    # -- the copy that runs ----------------------------------------------------------------------------------------

    def _example(self, tensor: Tensor) -> Tensor:
        return placeholder_like(tensor, "an argument", home=self.home) if tensor.is_meta else tensor.detach().clone()

    def _visit(self, path: str, module: nn.Module) -> nn.Module | None:
        if path not in self.units:
            return None
        part = copy_tree(module, lambda *_: None, lambda inner, new: self._without_data(_join(path, inner), new))
        for inner in part.modules():
            inner.training = True
        self.output_specs.listen(path, part)
        return make_proxy(path, part, self, module)

    def real(self, _: ModuleProxy) -> None:
        return None

    def _without_data(self, path: str, module: nn.Module) -> None:
        self.paths[module] = path
        for name, parameter in module._parameters.items():
            if parameter is not None:
                first = self.names[_join(path, name)]
                made = placeholder_like(parameter, first, Origin(frozenset({first})), self.home)
                made._is_param = True
                module._parameters[name] = made  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                whole = _join(path, name)
                real = not buffer.is_meta and not self._in_part(path)
                module._buffers[name] = buffer.clone() if real else placeholder_like(buffer, whole, home=self.home)
                if not self._in_part(path):
                    self.loose.append((whole, cast(Tensor, module._buffers[name])))

    def _written(self, name: str, buffer: Tensor) -> bool:
        """Return True if a buffer was written by operations that do not count it (batch_norm)."""
        if isinstance(buffer, PlaceholderTensor):
            return False
        path, _, leaf = name.rpartition(".")
        before = self.root.get_submodule(path)._buffers[leaf]
        return before is not None and not torch.equal(buffer, before)

    def _warn_of_state(self) -> None:
        """Warn of numbers and the like that code between parts keeps in attributes.

        Each stage that runs the code has its own.
        """
        plain, found = (bool, int, float, complex, str), []
        for copied, path in self.paths.items():
            if not self._in_part(path):
                before = vars(self.root.get_submodule(path))
                changed = (
                    n
                    for n, x in vars(copied).items()
                    if n != "training" and isinstance(before.get(n), plain) and x != before[n]
                )
                found += [_join(path, name) for name in changed]
        if found:
            rank_zero_warn(
                f"code between the parts of the model changes {', '.join(found)}: every stage that runs it changes its own, and what is changed "
                "after a stage's last part does not reach it; let a part keep such state, or a buffer"
            )

    def _in_part(self, path: str) -> bool:
        return path in self.units or any(path.startswith(unit + ".") for unit in self.units)

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, proxy: ModuleProxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if global_rng.global_rng_state() != self.rng_state:
            raise DataDependentError(global_rng.GLOBAL_RNG_ADVICE)
        self._note_writes()
        path, number = proxy.proxy_path, len(self.calls)
        leaves_in = tree_flatten((args, kwargs))[0]
        given = [leaf for leaf in leaves_in if isinstance(leaf, PlaceholderTensor)]
        reads, parameters, numbers = _sorted_out([*given, *placeholders_in(leaves_in, _DEEP)])
        inside = [self.names[_join(path, n)] for n, _ in proxy.named_parameters(remove_duplicate=False)]
        spec = self.output_specs.find(path, True, args, kwargs)
        self.rng_state = global_rng.global_rng_state()  # a part may draw what it likes
        if spec.writes_data:
            raise DataDependentError(
                f"{path} changes in place a tensor that is computed between the parts of the model (or an argument), and that later stages "
                "may need unchanged: use the module without inplace"
            )
        modifies: set[Value] = set()
        for argument in spec.changed:
            changed = given[argument].origin.memory
            if len(changed.values) > 1:
                raise _shared_memory(path)
            modifies.update(changed.values)
        leaves: list[Any] = []
        memories: dict[int, StorageState] = {}
        for index, leaf in enumerate(spec.leaves):
            if isinstance(leaf, PlaceholderTensor):
                value, place = Value(number, index), spec.memories[index]
                memory = given[place].origin.memory if place >= 0 else memories.setdefault(place, StorageState())
                memory.values.append(value)
                self.memories.setdefault(id(memory), (memory, memory.writes))
                leaf = make_placeholder(leaf.payload, leaf.device, path, Origin(frozenset({value}), memory))
            leaves.append(leaf)
        sizes = tuple(x.numel() * x.element_size() if isinstance(x, Tensor) else 0 for x in leaves)
        weights = tuple(dict.fromkeys([*inside, *parameters]))
        written = tuple(self.buffers[_join(path, name)] for name in spec.buffers)
        self.calls.append(Call(path, weights, reads, sizes, numbers, frozenset(modifies), written))
        return tree_unflatten(leaves, spec.structure)

    def _note_writes(self) -> None:
        """Record changes in place by code between parts since the last call."""
        for name, buffer in self.loose:
            if id(buffer) in self.draw_mode.read:
                self.first_read.setdefault(name, len(self.calls))
            if writes_of(buffer) != self.counted.get(name, 0):
                self.counted[name] = writes_of(buffer)
                self.writes.setdefault(name, []).append(len(self.calls))
        self.draw_mode.read.clear()
        for key, (memory, before) in self.memories.items():
            if memory.writes != before:
                if len(memory.values) > 1:
                    raise _shared_memory(self.calls[memory.values[0].call].name)
                self.rewritten.update(memory.values)
                self.memories[key] = (memory, memory.writes)


def _shared_memory(path: str) -> DataDependentError:
    return DataDependentError(
        f"{path} and what comes after it return views of one memory, which is changed in place: stages would change copies of it. "
        "Compute a new tensor in its place"
    )


def _sorted_out(given: Sequence[PlaceholderTensor]) -> tuple[frozenset[Value], tuple[str, ...], frozenset[int]]:
    sources: list[Source] = [source for one in given for source in sorted(one.origin.sources, key=str)]
    values = frozenset(source for source in sources if isinstance(source, Value))
    parameters = tuple(dict.fromkeys(source for source in sources if isinstance(source, str)))
    return values, parameters, frozenset(source.number for source in sources if isinstance(source, Draw))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
