"""Initialise weights as a function of (seed, parameter name), alike on every mesh.

`LanguageModel` and heads call `initialize`; `parallelize` and the pipeline call `materialize`, `draw` and `declarations`. A changed random
stream changes the weights that every seed gives, so streams stay.

A module declares how its parameters begin in an attribute ``initial``: a mapping from the parameter's name, seen from that
module, to a distribution. Each tensor is drawn in blocks of rows with random streams of their own, so that a rank that keeps some of the
rows draws little more than those. A new distribution is a class here and a case of `draw`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from arclight.fabric.distributed import sharding
from arclight.fabric.distributed.sharding import from_local_tensor

_BLOCK = 1 << 20
"""Elements of a block, in whole rows: for a shard of rows a rank draws less than two blocks too many, for one of columns all rows."""


@dataclass(frozen=True)
class Normal:
    """Normal distribution around 0, truncated at ``cut`` standard deviations (None: nowhere)."""

    std: float
    cut: float | None = 3.0


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


Initial = Normal | Constant


def declarations(model: nn.Module) -> dict[str, tuple[str, Initial]]:
    """Return the name to draw by, and the distribution, of each declared tensor by full name.

    The name is relative to the outermost module that declares anything. So a model draws the same weights alone and as
    a part of something else.
    """
    found: dict[str, tuple[str, Initial]] = {}
    tops: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: Mapping[str, Initial] = getattr(module, "initial", {})
        top = next((top for top in tops if not top or prefix == top or prefix.startswith(f"{top}.")), None)
        if own and top is None:
            tops.append(top := prefix)
        for name, distribution in own.items():
            full = f"{prefix}.{name}" if prefix else name
            found.setdefault(full, (full.removeprefix(f"{top}.") if top else full, distribution))
    return found


def draw(
    name: str, shape: torch.Size | tuple[int, ...], distribution: Initial, seed: int, part: tuple[slice, ...] | None = None
) -> torch.Tensor:  # fmt: skip
    """Draw the initial value of the parameter ``name``, float32 on the CPU, or its ``part``.

    The ``part`` does not change values: each block of rows is drawn by a generator seeded with SHA-256 of seed, name and number.
    """
    shape = tuple(shape)
    part = part if part is not None else tuple(slice(0, size) for size in shape)
    bounds = [where.indices(size)[:2] for where, size in zip(part, shape, strict=True)]
    out = torch.empty([stop - start for start, stop in bounds], dtype=torch.float32)
    if isinstance(distribution, Constant):
        return out.fill_(distribution.value)
    if not out.numel():
        return out
    if not shape:
        return _block(name, 0, (1,), distribution, seed)[0]
    rows = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    first, last = bounds[0]
    for number in range(first // rows, (last - 1) // rows + 1):
        begin, end = number * rows, min((number + 1) * rows, shape[0])
        block = _block(name, number, (end - begin, *shape[1:]), distribution, seed)
        low, high = max(begin, first), min(end, last)
        out[low - first : high - first] = block[(slice(low - begin, high - begin), *part[1:])]
    return out


def _block(name: str, number: int, shape: tuple[int, ...], distribution: Normal, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number_of(f"{seed}\0{name}\0{number}"))
    values = torch.empty(shape, dtype=torch.float32)  # whatever the default: other types draw other numbers
    if distribution.cut is None:
        return values.normal_(0.0, distribution.std, generator=generator)
    limit = distribution.cut * distribution.std
    return nn.init.trunc_normal_(values, 0.0, distribution.std, -limit, limit, generator=generator)


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Initialise every parameter of ``model`` in place; a DTensor gets its shard.

    So does every buffer that a module declares. Raises KeyError for a parameter that no module declares.
    """
    distributions = declarations(model)
    for name, tensor in _tensors(model):
        if name in distributions:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            own.copy_(_drawn(tensor, *distributions[name], seed))
        elif isinstance(tensor, nn.Parameter):
            raise KeyError(
                f"no module declares how {name} is initialised: add it to `initial` of the module that holds it"
            )


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, seed: int | None = None, local: bool = False) -> None:
    """Allocate and initialise the tensors of ``model`` that are on the meta device.

    They are a function of ``seed`` (by default torch's, which must be the same on all processes) and of names: as declared,
    without communication, and elsewhere by modules' own ``reset_parameters``. If ``device`` is meta too, nothing is done.
    local: whether processes have different parts of the model, so that nothing can be exchanged.
    """
    if device.type == "meta":
        return
    seed = torch.initial_seed() if seed is None else seed
    distributions = declarations(model)
    made: dict[torch.Tensor, torch.Tensor] = {}
    for name, tensor in _tensors(model, tied=True):
        if not tensor.is_meta or (name not in distributions and tensor not in made):
            continue
        if tensor not in made:
            value = _drawn(tensor, *distributions[name], seed).to(device, tensor.dtype)
            value = from_local_tensor(value, tensor) if isinstance(tensor, DTensor) else value
            made[tensor] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        owner, _, own = name.rpartition(".")
        holder = model.get_submodule(owner)
        entries: dict[str, Any] = holder._parameters if own in holder._parameters else holder._buffers
        entries[own] = made[tensor]
    sharding.materialize(model, device, lambda name: number_of(f"{seed}\0{name}"), local)


def _tensors(model: nn.Module, tied: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers.

    What has several names comes once, or with ``tied`` under each of them.
    """
    once = not tied
    return [*model.named_parameters(remove_duplicate=once), *model.named_buffers(remove_duplicate=once)]


def _drawn(tensor: torch.Tensor, name: str, distribution: Initial, seed: int) -> torch.Tensor:
    """Return the initial values of ``tensor``, or of its local shard."""
    part = None
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        part = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
    return draw(name, tensor.shape, distribution, seed, part)
