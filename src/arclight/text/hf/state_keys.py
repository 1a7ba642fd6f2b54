"""Map parameter names of one convention to those of another, as data.

`families` and `moe_families` list a `Key` for each parameter; `read` copies by them, shard by shard, and `write` by the `Piece` of each tensor
of theirs. A new family needs a list of keys there, and no code here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a part of a tensor, dimension by dimension."""


@dataclass(frozen=True)
class Key:
    """Our parameter ``ours`` is (a part of) the tensor ``theirs`` in a file.

    ``{layer}`` in both stands for a block's number; ``{expert}`` in ``theirs`` says that the first dimension of ours is that
    of experts, which have a tensor each.
    """

    ours: str
    theirs: str
    part: int = 0
    of: int = 1
    """Ours is number ``part`` of ``of`` equal parts along ``dim`` of ours."""
    dim: int = 0
    transposed: bool = False
    """Whether the last two dimensions are exchanged in the file (after the fields above)."""
    span: int = 1
    """How many of the equal parts ours is, from ``part`` on."""
    exact: bool = False
    """Whether it stays in its type if weights are written in another."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.ours).replace(r"\{layer\}", r"(?P<layer>\d+)"))

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.theirs

    def match(self, name: str) -> Key | None:
        """Return the key for the block of our parameter ``name``; None if it is another parameter's."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        layer = found.groupdict().get("layer", "")
        theirs = self.theirs.replace("{layer}", layer)
        return replace(self, ours=name, theirs=theirs)

    def files(self, shape: torch.Size) -> list[tuple[str, tuple[int, ...]]]:
        """List names and shapes of the tensors that hold a parameter of ``shape`` in the file."""
        sizes = list(shape)
        sizes[self.dim : self.dim + 1] = [size // self.span * self.of for size in sizes[self.dim : self.dim + 1]]
        experts, sizes = (sizes[0], sizes[1:]) if self.per_expert else (1, sizes)
        if self.transposed:
            sizes[-2:] = reversed(sizes[-2:])
        return [(self.theirs.replace("{expert}", str(expert)), tuple(sizes)) for expert in range(experts)]

    def read(self, bounds: Bounds, shape: torch.Size, read: Callable[[str, Bounds], Tensor]) -> Tensor:
        """Read the part ``bounds`` of our parameter of ``shape``.

        ``read`` gives parts of tensors in the file.
        """
        places = list(bounds)
        if self.of > 1:
            start, stop = places[self.dim]
            before = shape[self.dim] // self.span * self.part
            places[self.dim] = (before + start, before + stop)
        if self.per_expert:
            experts = range(*places[0])
            stack = [self._turned(places[1:], self.theirs.replace("{expert}", str(e)), read) for e in experts]
            return torch.stack(stack) if stack else torch.empty([stop - start for start, stop in places])
        return self._turned(places, self.theirs, read)

    def _turned(self, places: list[tuple[int, int]], theirs: str, read: Callable[[str, Bounds], Tensor]) -> Tensor:
        if not self.transposed:
            return read(theirs, tuple(places))
        return read(theirs, (*places[:-2], places[-1], places[-2])).transpose(-1, -2)


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: parts of ours, concatenated along ``dim``."""

    theirs: str
    shape: tuple[int, ...]
    keys: tuple[Key, ...]
    expert: int | None

    def make(self, whole: Callable[[str], Tensor]) -> Tensor:
        parts = [whole(key.ours) for key in self.keys]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, self.keys[0].dim)
        if self.expert is not None:
            out = out[self.expert]
        return out.transpose(-1, -2).contiguous() if self.keys[0].transposed else out.contiguous()


def pieces(keys: list[Key], shapes: dict[str, torch.Size]) -> Iterator[Piece]:
    """List what to write for our parameters ``keys``, each tensor once.

    Raises ValueError if a part of one is missing.
    """
    together: dict[str, list[Key]] = {}
    for key in keys:
        together.setdefault(key.theirs, []).append(key)
    for theirs, parts in together.items():
        parts.sort(key=lambda key: key.part)
        if [n for key in parts for n in range(key.part, key.part + key.span)] != list(range(parts[0].of)):
            raise ValueError(
                f"{theirs} is made of more parts than the model has: {', '.join(key.ours for key in parts)}"
            )
        for expert, (name, shape) in enumerate(parts[0].files(shapes[parts[0].ours])):
            yield Piece(name, shape, tuple(parts), expert if parts[0].per_expert else None)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """Strip the prefixes of compilation and recomputation from a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and lasting buffers; a tied parameter under each of its names."""
    return {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}


def same_tensors(found: dict[str, Tensor]) -> list[list[str]]:
    """Group names of one tensor, in the order of ``found``."""
    groups: dict[int, list[str]] = {}
    for name, tensor in found.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def own_part(tensor: Tensor) -> tuple[Tensor, Bounds]:
    """Return this process's part of ``tensor``, and its bounds in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple((0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    bounds = tuple((start, start + length) for start, length in zip(offsets, lengths, strict=True))
    return tensor.to_local(), bounds
