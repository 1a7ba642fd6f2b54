"""The weights of a Hugging Face folder, read part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from arclight.text.interchange.keys import Bounds

_SCALE = "_scale_inv"


class Folder:
    """Tensors of ``<stem>.safetensors``, or of the shards that ``<stem>.safetensors.index.json`` lists.

    prefix: names that lack it are found with it, because files of a family's trunk alone leave it out.
    block: height and width of the blocks of 8-bit weights that share a scale, where the folder has such.
    """

    def __init__(
        self, folder: Path, prefix: str = "", block: tuple[int, int] | None = None, stem: str = "model"
    ) -> None:  # fmt: skip
        self.folder, self.block = folder, block
        self._open: dict[str, Any] = {}
        index, alone = folder / f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif (folder / alone).is_file():
            files = dict.fromkeys(self._file(alone).keys(), alone)
        else:
            raise FileNotFoundError(
                f"{folder} has neither {alone} nor {index.name}; weights of other formats "
                "(.bin, .pt, .gguf) must be converted to safetensors first"
            )
        bare = prefix and not any(name.startswith(prefix) for name in files)
        self._names = {prefix + name if bare else name: (file, name) for name, file in files.items()}

    def names(self) -> set[str]:
        """All tensors but the scales of 8-bit blocks, which belong to their weights."""
        if self.block is None:
            return set(self._names)
        return {name for name in self._names if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in self)}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

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
        where = self._slice(name)
        if tuple(stop - start for start, stop in bounds) == tuple(where.get_shape()):
            return self._whole(name)  # which copies nothing
        part: Tensor = where[tuple(slice(*bound) for bound in bounds)]
        return part

    def _whole(self, name: str) -> Tensor:
        file, own = self._names[name]
        tensor: Tensor = self._file(file).get_tensor(own)
        return tensor

    def _slice(self, name: str) -> Any:
        file, own = self._names[name]
        return self._file(file).get_slice(own)

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise FileNotFoundError(f"{path} is listed in the index but is not there")
            self._open[file] = safe_open(path, framework="pt")
        return self._open[file]


def dtype_named(name: str | None) -> torch.dtype:
    """A type by its name in config.json; float32 where there is none. Raises ValueError for a name that is no floating type."""
    found = getattr(torch, (name or "float32").removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"config.json has the dtype {name!r}, which is no floating type")
    return found
