"""Run a whole forward in a pipeline stage, but execute only the stage's own submodules.

`split` makes one `SlicedModule` for each stage, `PipelinedSteps` one for each step function, with all stages of this process. `run` takes and
returns tensors in the order of `StageAssignment.values_into`: it must be alike on all ranks, as tensors are matched by position.

The stage calls a copy of the module tree in which proxies (`proxy_modules`) count calls. Calls before this stage return received tensors
or placeholders; its own calls run; after its last call the forward stops.
Code between modules runs on every stage that needs it, from the arguments, which every process has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from arclight.parallel.pipeline.call_graph import Value, bind_function
from arclight.parallel.pipeline.splitting.output_specs import OutputSpecs, move_placeholder
from arclight.parallel.pipeline.splitting.placeholder_tensor import PlaceholderTensor, placeholder_like, placeholders_in
from arclight.parallel.pipeline.splitting.proxy_modules import (
    copy_tree,
    make_proxy,
    parameter_names,
    shallow_clone,
    walk,
)
from arclight.parallel.pipeline.splitting.stage_assignment import PARAMETER_CALL, StageAssignment
from arclight.parallel.pipeline.splitting.stage_interpreter import (
    StageDone,
    StageInterpreter,
    StageModuleTree,
    StageRun,
)
from arclight.parallel.plan import PlanError


class AbsentModule(nn.Module):
    """Stand-in, without parameters, for a part of the module that another process has."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise PlanError."""
        raise PlanError("this part of the model lies on another process of the pipeline: call it in a step")


class SlicedModule:
    """Model of which this process computes some stages.

    ``holder`` is left with the modules, parameters and buffers of these stages, under their names in the model: a bare module,
    or ``root`` itself, which then stays the user's own object. What is called of them are the modules in `parts`; modules above them
    are copies that are never called themselves. ``root`` is otherwise not changed, and not kept unless it is the holder.
    """

    def __init__(
        self, root: nn.Module, function: str | Callable[..., Any] | None, assignment: StageAssignment, own: Sequence[int], holder: nn.Module,
        home: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Initialise the sliced module.

        function: as for `capture_call_graph`. own: numbers of this process's stages. home: where what is on the meta
        device will be.
        """
        self.assignment, self.own = assignment, tuple(own)
        self.holder, self.in_place = holder, holder is root
        self.units = {call.name for call in assignment.graph.calls}
        self.names, _ = parameter_names(root)
        self.output_specs = OutputSpecs(root, self.units, home)
        self._function = bind_function(function, root)
        self.borrowed: list[str] = []
        """Buffers that the first stage saves, and this process must load too."""
        view = self._view(root)
        self._trees = {number: self._tree(root, view, number) for number in self.own}
        self.output_specs.release()
        floating = ((m._parameters, n, p.device, p.dtype) for m in view.modules() for n, p in m.named_parameters(recurse=False)
                    if p.is_floating_point())  # fmt: skip
        self._sample: Any = next(floating, None)
        self._host = root if self.in_place else shallow_clone(root)
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            holder.__dict__[name] = view.__dict__[name]
            if not self.in_place:
                self._host.__dict__[name] = view.__dict__[name]

    # -- building --------------------------------------------------------------------------------------------------

    def _called(self, number: int) -> set[str]:
        begin, end = self.assignment.range(number)
        return {call.name for call in self.assignment.graph.calls[begin:end]}

    def _view(self, root: nn.Module) -> nn.Module:
        """Build this process's view of the model.

        It has whole parts that it calls, and of others what it uses.
        """
        needed = set().union(*(self.assignment.parameters(number) for number in self.own))
        called = set().union(*(self._called(number) for number in self.own))
        whole = {module for path, module in walk(root) if path in called}

        def visit(path: str, module: nn.Module, within: bool) -> nn.Module | None:
            foreign = within or (path in self.units and module not in whole)
            names = [self.names[_join(path, n)] for n, _ in module.named_parameters(remove_duplicate=False)]
            if module in whole and needed.issuperset(names):
                return module
            plain = not names and next(module.buffers(), None) is None
            if path and plain and not foreign and not any(p == path or p.startswith(path + ".") for p in self.units):
                return module
            new = shallow_clone(module)
            new._modules = {}
            for name, child in module._modules.items():
                below = None if child is None else visit(_join(path, name), child, foreign)
                if child is None or below is not None:
                    new._modules[name] = below
            for name in list(new._parameters):
                if new._parameters[name] is not None and self.names[_join(path, name)] not in needed:
                    del new._parameters[name]
            if foreign:
                new._buffers.clear()
            elif 0 not in self.own and module not in whole and not _inside(path, called):
                self._copy_buffers(path, new)
            empty = not any(x is not None for members in (new._parameters, new._modules) for x in members.values())
            if foreign and empty:
                return AbsentModule() if self.in_place and not within else None
            return new

        found = visit("", root, False)
        assert found is not None
        return shallow_clone(found) if found is root else found

    def _copy_buffers(self, path: str, module: nn.Module) -> None:
        """Copy the buffers of code between parts that it changes; the first stage saves them.

        They are every stage's, and those that a stage changes it has for itself.
        """
        persistent = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        self.borrowed += [_join(path, name) for name in persistent]
        module._non_persistent_buffers_set.update(persistent)
        for name, buffer in module._buffers.items():
            if buffer is not None and _join(path, name) in self.assignment.graph.buffers:
                module._buffers[name] = buffer.clone()

    def _tree(self, root: nn.Module, view: nn.Module, number: int) -> StageModuleTree:
        stage = StageInterpreter(self.assignment, number, self.output_specs)
        tree = StageModuleTree(stage)
        mine, sent = self.assignment.parameters(number), self.assignment.received_parameters(number)
        called = self._called(number)

        def visible(path: str) -> nn.Module | None:
            found: nn.Module | None = view
            for name in path.split(".") if path else []:
                found = None if found is None else found._modules.get(name)
            return None if isinstance(found, AbsentModule) else found

        def link(path: str, module: nn.Module) -> None:
            """Give a copied module the view's state at the start of a run, else placeholders."""
            own = visible(path)
            if own is not None:
                module._buffers = own._buffers
                tree.modes.append((module, own if path else self.holder))
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                first = self.names[_join(path, name)]
                if first in sent:
                    tree.bound.append((module, name, sent[first]))
                elif first in mine and own is not None and name in own._parameters:
                    tree.live.append((module, name, own))
                    continue
                made = placeholder_like(parameter, first, home=self.output_specs.home)
                made._is_param = True
                module._parameters[name] = made  # type: ignore[assignment]
                tree.absent.append((module, name))

        def visit(path: str, module: nn.Module) -> nn.Module | None:
            if path not in self.units:
                own = visible(path)
                beneath = any(unit.startswith(path + ".") for unit in self.units)
                return own if path and own is module and not beneath else None
            if path in called:
                above, _, name = path.rpartition(".")
                parent = visible(above)
                assert parent is not None
                stage.own[path] = (parent, name)
                for inner, part in walk(module):
                    here = visible(_join(path, inner))
                    for name, parameter in part._parameters.items():
                        first = self.names[_join(_join(path, inner), name)] if parameter is not None else ""
                        if first in sent and here is not None:
                            tree.lent.append((here, name, sent[first]))
            uses = {self.names[_join(path, n)] for n, _ in module.named_parameters(remove_duplicate=False)}
            if path in called and not uses & set(sent):
                shown = module
            elif uses & (mine | set(sent)):
                shown = copy_tree(module, lambda *_: None, lambda inner, new: link(_join(path, inner), new))
                self.output_specs.listen(path, shown)
            else:
                shown = self.output_specs.part(path)
            return make_proxy(path, shown, stage, module)

        tree.root = copy_tree(root, visit, link)
        return tree

    # -- running ---------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The modules of this process that are called, by path, as they are now."""
        found: dict[str, Any] = {}
        for number in self.own:
            for path in self._called(number):
                parent, name = self._trees[number].stage.own[path]
                found[path] = parent._modules[name]
        return found

    def run(self, stage: int, received: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute ``stage`` for the arguments of the whole function.

        Returns a tuple of what it sends, or on the last stage the result. Raises PlanError if the code takes another
        way than for the example, or needs what no stage sends.
        """
        if self.assignment.graph.writes_arguments:
            args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        tree = self._trees[stage]
        interpreter = tree.stage
        if len(received) != len(interpreter.receives):
            raise PlanError(f"stage {stage} is given {len(received)} tensors, and receives {len(interpreter.receives)}")
        values = dict(zip(interpreter.receives, received, strict=True))
        run = StageRun(interpreter.begin, interpreter.end, values)
        interpreter.training = self.holder.training
        members = {name: self.holder.__dict__[name] for name in ("_modules", "_parameters")}
        self._follow()
        tree.sync(values)
        with tree.lending(values):
            interpreter.run = run
            self._host.__dict__.update(_modules=tree.root._modules, _parameters=tree.root._parameters)
            self._host.__dict__["training"] = self.holder.training
            try:
                result = self._function(self._host)(*args, **kwargs)
                ended = False
            except StageDone:
                ended = True
            finally:
                interpreter.run = None
                self._host.__dict__.update(members)
            if ended:
                return tuple(self._sent(tree, value, run) for value in interpreter.sends)
        if run.next < len(self.assignment.graph.calls):
            raise PlanError(
                f"the model made {run.next} calls of its parts, and {len(self.assignment.graph.calls)} for the example arguments"
            )
        lacking = next(placeholders_in(tree_flatten(result)[0], 3), None)
        if lacking is not None:
            raise PlanError(f"the result needs what {lacking.of} returned, and the example arguments did not show that")
        return result

    def _follow(self) -> None:
        """Move placeholders to the device and type that this process's parameters have now."""
        if self._sample is None:
            return
        members, name, device, dtype = self._sample
        tensor = members[name]
        if tensor.device == device and tensor.dtype == dtype:
            return
        types = {dtype: tensor.dtype}
        self._sample = (members, name, tensor.device, tensor.dtype)
        self.output_specs.move(tensor.device, types)
        for tree in self._trees.values():
            for module, name in tree.absent:
                absent = module._parameters[name]
                if isinstance(absent, PlaceholderTensor):
                    module._parameters[name] = move_placeholder(absent, tensor.device, types)

    def _sent(self, tree: StageModuleTree, value: Value, run: StageRun) -> Any:
        if value.call == PARAMETER_CALL and value not in run.received:
            name = self.assignment.transmitted[value.leaf]
            tensor: Any = self.holder.get_parameter(name)
        else:
            tensor = run.kept[value] if value.call >= run.begin else run.received[value]
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{self.assignment.graph.calls[value.call].name} returned {tensor!r} where it returned a tensor for the example: "
                "return values of the same kind for every batch"
            )
        return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor


def _inside(path: str, units: set[str]) -> bool:
    return any(path == unit or path.startswith(unit + ".") for unit in units)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
