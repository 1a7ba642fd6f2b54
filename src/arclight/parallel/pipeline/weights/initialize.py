"""Initialise a stage from the meta device: a function of (seed, name), for any cut.

`Pipe.initialize`, `weights.load` (for buffers that no file has) and `parallelize_steps` call `initialize_stages`. Values must be the same
for any number of stages; a changed stream changes the weights that every seed gives.

Modules initialize in several ways: what `arclight.parallel.deterministic_init` declares, ``_init_weights(module)`` of the model around
them (as models of transformers have), ``reset_parameters()``. All but the first draw one number after the other, so a process that
has some of the modules only would draw others than one that has all. Here each draw begins a random stream of its own, chosen by the name of
the tensor that it is for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from arclight.fabric.distributed.dtensor import is_dtensor
from arclight.fabric.seeding import seed_device
from arclight.parallel.deterministic_init import declarations, draw, number_of
from arclight.parallel.pipeline.splitting.stage_tensors import (
    like,
    named_tensors,
    replace_named_tensors,
    replace_tensors,
)
from arclight.parallel.plan import PlanError


@torch.no_grad()
def initialize_stages(
    stages: nn.Module | Iterable[nn.Module], *, model: nn.Module | None = None, device: str | torch.device = "cpu",
    seed: int | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Allocate and initialise tensors of ``stages`` on the meta device; return their names.

    What has memory stays as it is, so this also gives values to buffers that no file has. ``model``: the whole, where stages
    lack modules of it, because methods of outer modules may name them; a copy of its tree whose tensors come and go. ``seed``: by
    default torch's, which must be the same on all processes; nothing is exchanged, and the global generators stay as they
    are. Raises PlanError, and leaves the stages as they were, for a tensor that no method of a module writes: it had its
    value from a constructor, which has run.
    """
    device, seed = torch.device(device), torch.initial_seed() if seed is None else seed
    if device.type == "meta":
        return ()
    stages = [stages] if isinstance(stages, nn.Module) else list(stages)
    initialized: list[str] = []
    for stage in stages:
        fresh: dict[torch.Tensor, list[str]] = {}
        for name, tensor in named_tensors(stage):
            if tensor.is_meta:
                fresh.setdefault(tensor, []).append(name)
        if spread := [names[0] for tensor, names in fresh.items() if is_dtensor(tensor)]:
            raise PlanError(
                f"{spread[0]} is sharded over processes already: give stages their first values before that"
            )
        if fresh:
            replace_tensors(stages, _initialized(stage if model is None else model, fresh, device, seed))
            initialized += [names[0] for names in fresh.values()]
    return tuple(dict.fromkeys(initialized))


def _initialized(
    model: nn.Module, fresh: dict[torch.Tensor, list[str]], device: torch.device, seed: int
) -> dict[torch.Tensor, torch.Tensor]:
    """Initialise ``fresh`` tensors; gives what takes the place of each.

    ``model`` has them while its modules initialize, and is then as before.
    """
    distributions = declarations(model)
    made: dict[torch.Tensor, torch.Tensor] = {}
    waiting: dict[torch.Tensor, str] = {}
    for old, (name, *_) in fresh.items():
        if name in distributions:
            value = draw(distributions[name][0], old.shape, distributions[name][1], seed).to(device, old.dtype)
            made[old] = like(value, old)
        else:
            blank = torch.zeros(old.shape, dtype=old.dtype, device=device)
            made[old] = like(blank.fill_(torch.nan) if old.is_floating_point() else blank, old)
            waiting[made[old]] = name
    before = {name: old for old, names in fresh.items() for name in names}
    replace_named_tensors(model, {name: made[old] for name, old in before.items()})
    try:
        _run_initializers(model, waiting, device, seed)
        now = dict(named_tensors(model))  # a module may have put others there
        return {old: like(now[names[0]].detach(), old) for old, names in fresh.items()}
    finally:
        replace_named_tensors(model, before)


def _run_initializers(model: nn.Module, waiting: dict[torch.Tensor, str], device: torch.device, seed: int) -> None:
    """Run the modules' initialisers for ``waiting`` tensors, inner ones first.

    That is the order of constructors.
    """
    first: dict[torch.Tensor, str] = {}
    for name, tensor in named_tensors(model):
        first.setdefault(tensor, name)
    here = [tensor for tensor in first if not tensor.is_meta and not is_dtensor(tensor)]
    kept = {tensor: tensor.data for tensor in here if tensor not in waiting}
    draws = _Draws(seed, first, waiting, device)
    modules = dict(model.named_modules())
    makers = {
        name: maker for name, module in modules.items() if _takes_one(maker := getattr(module, "_init_weights", None))
    }
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for name in sorted(modules, key=_depth, reverse=True):
            if any(_is_below(other, name) for other in waiting.values()):
                maker = next((makers[outer] for outer in _outwards(name) if outer in makers), None)
                with draws.of(name, modules[name]):
                    _run(modules[name], maker, draws)
    for tensor, data in kept.items():
        if tensor.data_ptr() != data.data_ptr():  # a module put other memory under what it took for uninitialized
            tensor.data = data
    now = dict(named_tensors(model))
    missing = [name for tensor, name in waiting.items() if not draws.has_value(tensor, now[name])]
    if missing:
        owner = type(model.get_submodule(missing[0].rpartition(".")[0])).__name__
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise PlanError(
            f"{missing[0]}{more} has its first value from the constructor of {owner}, which nothing repeats for a stage on the "
            f"meta device: give {owner} a reset_parameters() or an `initial`, load it from a file, or build the model in memory"
        )


def _takes_one(maker: Any) -> bool:
    if not callable(maker):
        return False
    needed = [p for p in inspect.signature(maker).parameters.values() if p.default is p.empty]
    return len(needed) == 1


def _run(module: nn.Module, maker: Callable[[nn.Module], Any] | None, draws: _Draws) -> None:
    """Initialise a module by the model's method; by its own for what the model leaves out."""
    if maker is not None:
        maker(module)
    own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    if maker is None or not all(draws.has_value(tensor) for tensor in own):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()


class _Draws(TorchDispatchMode):
    """Mode of one module's initialisation: draws are a function of names.

    Only what waits for values below that module is written.
    """

    def __init__(
        self, seed: int, names: dict[torch.Tensor, str], waiting: dict[torch.Tensor, str], device: torch.device
    ) -> None:
        super().__init__()
        self._device = device
        self._seed, self._names, self._waiting = seed, names, waiting
        self._written = set[torch.Tensor]()
        self._homes: dict[int, torch.Tensor] = {}
        self._memory: list[torch.Tensor] = []  # so that nothing else gets it while it is known by its address
        for tensor in names:
            self._register(tensor)
        self._module, self._last, self._counts = "", "", dict[str, int]()

    @contextmanager
    def of(self, name: str, module: nn.Module) -> Iterator[None]:
        """Record the draws of ``module``.

        What it has beside this stage's tensors has memory meanwhile, to run the same everywhere.
        """
        self._module, self._last, self._counts = name, f"{name}*", {}
        lent: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            full = f"{name}.{own}" if name else own
            if tensor is not None and tensor.is_meta and self._names[tensor] == full:
                blank = like(torch.zeros_like(tensor, device=self._device), tensor)
                lent[own] = tensor, blank
                self._names[blank] = self._waiting[blank] = full
                self._register(blank)
                setattr(module, own, blank)
        try:
            with self:
                yield
        finally:
            for own, (tensor, blank) in lent.items():
                setattr(module, own, tensor)
                del self._names[blank], self._waiting[blank]

    def _register(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta and tensor.numel() and not is_dtensor(tensor):
            self._homes[tensor.untyped_storage().data_ptr()] = tensor
            self._memory.append(tensor.detach())

    def has_value(self, tensor: torch.Tensor, now: torch.Tensor | None = None) -> bool:
        """Return True once a waiting tensor has a value.

        It is in place, or what a module put there ``now``.
        """
        if now is not None and now is not tensor:
            return not now.is_meta
        if tensor not in self._waiting or not tensor.numel():
            return True
        if tensor.is_floating_point():
            return not bool(tensor.isnan().any())
        return tensor in self._written or tensor.untyped_storage().data_ptr() not in self._homes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for given in _changed(func, args, kwargs):
            tensor = self._tensor_of(given)
            if tensor is None or tensor not in self._names:
                continue
            self._last = self._names[tensor]
            if not tensor.is_meta and (tensor not in self._waiting or not _is_below(self._last, self._module)):
                return given
            self._written.add(tensor)
        if torch.Tag.nondeterministic_seeded in func.tags:
            count = self._counts[self._last] = self._counts.get(self._last, -1) + 1
            seed = number_of(f"{self._seed}\0{self._module}\0{self._last}\0{count}")
            seed_device(seed, self._device)
            if kwargs.get("generator") is not None:
                kwargs["generator"] = torch.Generator(kwargs["generator"].device).manual_seed(seed)
        return func(*args, **kwargs)

    def _tensor_of(self, given: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor of the model that ``given`` is, or is a view of."""
        if not given.is_meta and not is_dtensor(given):
            return self._homes.get(given.untyped_storage().data_ptr()) if given.numel() else None
        return given if given in self._names else None


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of the operator changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (item for item in (given if isinstance(given, (list, tuple)) else [given]) if item is not None)


def _is_below(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _outwards(name: str) -> Iterator[str]:
    """Yield the name itself, and those of all modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
