"""What a checkpoint holds, read from its manifest alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.checkpoint.manifest import EntrySummary, read_manifest

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint in short; ``rich.print`` shows it as a table."""

    path: str
    step: int | None
    epoch: int | None
    created: str
    """ISO 8601, UTC."""
    arclight: str
    torch: str
    parameters: int | None
    """Numbers in the entry `model`, tied ones counted once; None where there is no such entry."""
    bytes: int
    """Size of all files but the manifest."""
    dtypes: list[str]
    entries: dict[str, EntrySummary]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Table:
        from rich.table import Table

        place = ", ".join(
            f"{name} {value}" for name, value in (("step", self.step), ("epoch", self.epoch)) if value is not None
        )
        table = Table(
            title=f"{self.path}: {place or 'no step'}",
            caption=f"{self.bytes / 1e6:,.1f} MB, {self.created}, Arclight {self.arclight}, torch {self.torch}",
        )
        for column in ("entry", "file"):
            table.add_column(column)
        for column in ("tensors", "elements", "MB"):
            table.add_column(column, justify="right")
        table.add_column("dtypes")
        for name, entry in self.entries.items():
            counts = (f"{entry.tensors:,}", f"{entry.elements:,}", f"{entry.bytes / 1e6:,.2f}")
            table.add_row(name, entry.file, *counts, ", ".join(entry.dtypes))
        return table


def inspect(path: str | Path) -> Inspection:
    """Summary of the checkpoint at `path`; reads no tensor. Raises CheckpointError where there is none."""
    manifest = read_manifest(Path(path))
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
        entries=manifest.entries,
    )
