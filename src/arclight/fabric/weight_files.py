"""Read and write Hugging Face weights: a safetensors file, or several with an index.

``text.hf`` and ``parallel.pipeline.weights`` read by `WeightFiles` and write by `write_shard`. Names of files and the index are Hugging
Face's, so that transformers opens them. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

INDEX = ".safetensors.index.json"


class WeightFiles:
    """Tensors of a safetensors file, of an index, or of a folder with either.

    In a folder that is ``<stem>.safetensors.index.json``, else ``<stem>.safetensors``. ``name in files`` and iteration open no weights if
    there is an index. Raises FileNotFoundError if there is neither, ValueError for a malformed index; reading a tensor later raises these
    for its file.
    """

    def __init__(self, path: str | Path, stem: str = "model") -> None:
        path = Path(path)
        self.path = path
        self._open: dict[Path, Any] = {}
        index, alone = path / f"{stem}{INDEX}", path / f"{stem}.safetensors"
        if path.is_file():
            index, alone = (path, Path()) if path.name.endswith(".json") else (Path(), path)
        if index.is_file():
            self._files = {name: index.parent / file for name, file in _weight_map(index).items()}
        elif alone.is_file():
            self._files = dict.fromkeys(self._handle(alone).keys(), alone)
        elif path.is_dir():
            raise FileNotFoundError(
                f"{path} has neither {alone.name} nor {index.name}; weights of other formats "
                "(.bin, .pt, .gguf) must be converted to safetensors first"
            )
        else:
            raise FileNotFoundError(
                f"{path} is not there: name a safetensors file, its index, or the folder that has them"
            )

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    @property
    def opened(self) -> tuple[Path, ...]:
        """The files that have been opened so far."""
        return tuple(self._open)

    def file_of(self, name: str) -> Path:
        """Return the file that has, or by the index should have, the tensor ``name``."""
        return self._files[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor mapped from the file, read when used; changes stay in memory."""
        try:
            found: torch.Tensor = self._handle(self._files[name]).get_tensor(name)
        except SafetensorError as error:
            raise _lacks(name, self._files[name], error) from error
        return found

    def part(self, name: str) -> Any:
        """Return a lazy tensor that reads what is sliced; see `safetensors.safe_open.get_slice`."""
        try:
            return self._handle(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise _lacks(name, self._files[name], error) from error

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is listed in the index but is not there")
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file} is not a sound safetensors file ({error}): fetch or write it again"
                ) from error
        return self._open[file]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{index} is not sound JSON ({error}): fetch or write it again") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} has no weight_map of names to files: it is not an index of safetensors")
    for name, file in files.items():
        place = PurePosixPath(file)
        if place.is_absolute() or ".." in place.parts or place.suffix != ".safetensors":
            raise ValueError(f"{index} says that {name} is in {file!r}, which is not a safetensors file beside it")
    return files


def _lacks(name: str, file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} does not have {name}, though the index says so ({error}): fetch or write both again")


# -- writing -------------------------------------------------------------------------------------------------------


def byte_count(size: int | str, setting: str = "max_shard_size") -> int:
    """Return the bytes of a number or of a text such as "500MB".

    1 KB is 1,000 bytes, 1 KiB is 1,024. Raises ValueError, naming the ``setting``, for what is no size.
    """
    if isinstance(size, int):
        found: int | None = size
    else:
        match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?)B", size.strip(), re.IGNORECASE)
        found = match and int(match[1]) * (1024 if match[3] else 1000) ** " KMG".index(match[2].upper() or " ")
    if not found or found <= 0:
        raise ValueError(f"{setting} {size!r} is not a size; write bytes as a number, or such as '500MB' or '5GB'")
    return found


def shards(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group tensors into files of at most ``limit`` bytes; yield their positions.

    The order is kept; a larger tensor has a file of its own.
    """
    shard: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if shard and total + size > limit:
            yield shard
            shard, total = [], 0
        shard.append(place)
        total += size
    yield shard


def shard_name(number: int, count: int, stem: str = "model") -> str:
    """Return the name of file ``number`` (from 0) of ``count``."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else f"{stem}.safetensors"


def write_shard(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a new file of dense tensors on the CPU, which is on the disk on return."""
    save_file(dict(tensors), file, {"format": "pt"})
    with file.open("rb") as written:
        os.fsync(written.fileno())


def write_index(files: Mapping[str, str], total_bytes: int, folder: Path, stem: str = "model") -> None:
    """Write the index in ``folder`` of the file that each tensor is in."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    (folder / f"{stem}{INDEX}").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
