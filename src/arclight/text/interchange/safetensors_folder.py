"""Read the weights of a Hugging Face folder, or of a model in memory, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arclight.fabric.weight_files import WeightFiles
from arclight.text.interchange.keys import Bounds

_SCALE = "_scale_inv"


class InMemory:
    """The tensors of a state dict, read as those of files are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def part(self, name: str) -> InMemory.Part:
        return InMemory.Part(self._tensors[name])

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    class Part:
        """What safetensors calls a slice."""

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self._tensor.shape)

        def __getitem__(self, places: Any) -> Tensor:
            return self._tensor[places]


class Folder:
    """Tensors of ``<stem>.safetensors``, or of the shards that ``<stem>.safetensors.index.json`` lists; or those ``held`` in memory.

    prefix: names that lack it are found with it, because files of a family's trunk alone leave it out.
    block: height and width of the blocks of 8-bit weights that share a scale, where the folder has such.
    """

    def __init__(
        self, folder: str | Path, prefix: str = "", block: tuple[int, int] | None = None, stem: str = "model",
        held: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.block = folder, block
        self._files: Any = WeightFiles(folder, stem) if held is None else InMemory(held)
        bare = prefix and not any(name.startswith(prefix) for name in self._files)
        self._names = {prefix + name if bare else name: name for name in self._files}

    def names(self) -> set[str]:
        """All tensors but the scales of 8-bit blocks, which belong to their weights."""
        if self.block is None:
            return set(self._names)
        return {name for name in self._names if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in self)}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files.part(self._names[name]).get_shape())

    def read(self, name: str, bounds: Bounds) -> Tensor:
        """The part ``bounds`` of a tensor, in its own type; 8-bit blocks as float32."""
        part = self._part(name, bounds)
        if self.block is None or name + _SCALE not in self:
            return part
        blocks = tuple(
            (start // size, -(-stop // size)) for (start, stop), size in zip(bounds, self.block, strict=True)
        )
        scales = self._part(name + _SCALE, blocks).float()
        for dim, ((start, stop), size) in enumerate(zip(bounds, self.block, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, start % size, stop - start)
        return part.float() * scales

    def _part(self, name: str, bounds: Bounds) -> Tensor:
        where = self._files.part(self._names[name])
        if tuple(stop - start for start, stop in bounds) == tuple(where.get_shape()):
            whole: Tensor = self._files.tensor(self._names[name])  # which copies nothing
            return whole
        part: Tensor = where[tuple(slice(*bound) for bound in bounds)]
        return part


def dtype_named(name: str | None) -> torch.dtype:
    """A type by its name in config.json; float32 where there is none. Raises ValueError for a name that is no floating type."""
    found = getattr(torch, (name or "float32").removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"config.json has the dtype {name!r}, which is no floating type")
    return found
