"""Summarise a checkpoint from its manifest, without reading tensors.

`inspect` is public (``arclight.checkpoint``): ``arclight checkpoint inspect``, ``trainer.checkpoint.loading``, the run report and
federated rounds call it. Fields of `Inspection` are the keys of ``--json``: add, do not rename.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.checkpoint.manifest import EntrySummary, read_manifest
from arclight.checkpoint.remote import to_path

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Summary of a checkpoint, which ``rich.print`` shows as a table."""

    path: str
    step: int | None
    epoch: int | None
    created: str
    """ISO 8601, UTC."""
    arclight: str
    torch: str
    parameters: int | None
    """Elements of the entry `model`, tied ones counted once; None without that entry."""
    bytes: int
    """Size of all files except the manifest."""
    dtypes: list[str]
    ranks: int
    """Number of processes that wrote it."""
    meshes: list[dict[str, int]]
    """Meshes of processes over which its tensors were sharded: dimension -> size."""
    files: dict[str, int]
    """Size of each file."""
    entries: dict[str, EntrySummary]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Table:
        from rich.table import Table

        position = ", ".join(
            f"{name} {value}" for name, value in (("step", self.step), ("epoch", self.epoch)) if value is not None
        )
        parameters = f"{self.parameters:,} parameters, " if self.parameters is not None else ""
        caption = (
            f"{parameters}{self.bytes / 1e6:,.1f} MB, {self.created}, Arclight {self.arclight}, torch {self.torch}"
        )
        table = Table(title=f"{self.path}: {position or 'no step'}", caption=caption + self._writers())
        for column in ("entry", "file"):
            table.add_column(column)
        for column in ("tensors", "elements", "MB"):
            table.add_column(column, justify="right")
        table.add_column("dtypes")
        for name, entry in self.entries.items():
            counts = (f"{entry.tensors:,}", f"{entry.elements:,}", f"{entry.bytes / 1e6:,.2f}")
            table.add_row(name, entry.file, *counts, ", ".join(entry.dtypes))
        return table

    def _writers(self) -> str:
        """Describe the processes that wrote the checkpoint; empty for one."""
        if self.ranks == 1:
            return ""
        sizes: dict[str, int] = {}
        for name, size in self.files.items():
            if match := _OF_RANK.search(name):
                sizes[match[1]] = sizes.get(match[1], 0) + size
        meshes = "; ".join(" x ".join(f"{name} {size}" for name, size in mesh.items()) for mesh in self.meshes)
        share = f", {min(sizes.values()) / 1e6:,.1f} to {max(sizes.values()) / 1e6:,.1f} MB each" if sizes else ""
        return f"\nwritten by {self.ranks} processes{share}; tensors sharded over {meshes or 'none of them'}"


_OF_RANK = re.compile(r"-(\d{5})-of-\d{5}\.safetensors$")


def inspect(path: str | Path) -> Inspection:
    """Summarise the checkpoint at `path` without reading a tensor.

    Raises CheckpointError if there is none.
    """
    manifest = read_manifest(to_path(path))
    model = manifest.entries.get("model")
    return Inspection(
        path=str(path),
        step=manifest.step,
        epoch=manifest.epoch,
        created=manifest.created,
        arclight=manifest.arclight,
        torch=manifest.torch,
        parameters=None if model is None else model.elements,
        bytes=sum(record.bytes for record in manifest.files.values()),
        dtypes=sorted({dtype for entry in manifest.entries.values() for dtype in entry.dtypes}),
        ranks=manifest.processes,
        meshes=manifest.meshes,
        files={name: record.bytes for name, record in manifest.files.items()},
        entries=manifest.entries,
    )
