"""List and read the rounds of a run, in a folder or at any address that fsspec knows.

``server``, the Flower app, ``arclight checkpoint`` and ``arclight federate`` read runs through `Rounds`; `Rounds.write` gives the `RoundWriter`.
Folder names are numbers of at least six digits and found by runs that resume: they stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arclight import checkpoint
from arclight.checkpoint import files, remote
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.manifest import Manifest as CheckpointManifest
from arclight.checkpoint.manifest import read_manifest
from arclight.checkpoint.remote import to_path
from arclight.checkpoint.sharded.reader import open_state
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Manifest
from arclight.federated.rounds import writer
from arclight.federated.rounds.writer import CARRIED_ENTRIES, STATE_KEYS, TENSOR_ENTRIES, TREE_ENTRIES, RoundWriter

FOLDER = "rounds"
_NAME = re.compile(r"\d{6,}")


@dataclass(frozen=True, kw_only=True)
class RoundFolder:
    """Folder of one round, and its problems."""

    number: int
    path: Path
    problems: tuple[str, ...]
    """Why it is not complete; empty for a complete one."""
    manifest: CheckpointManifest | None


class Rounds:
    """Rounds below ``<run>/rounds``.

    Round 0 holds the initial weights; round n, those after n server steps.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = to_path(run)
        self.folder = self.run / FOLDER

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06d}"

    def numbers(self) -> list[int]:
        """Return the numbers of all round folders, ascending, complete or not."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if _NAME.fullmatch(entry.name))

    def check_round(self, number: int) -> RoundFolder:
        """Check one round by its manifest and file sizes; `checkpoint.verify` checks the content."""
        path = self.path(number)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            return RoundFolder(number=number, path=path, problems=(str(error),), manifest=None)
        return RoundFolder(number=number, path=path, problems=tuple(_problems(path, manifest)), manifest=manifest)

    def all(self) -> list[RoundFolder]:
        return [self.check_round(number) for number in self.numbers()]

    def newest(self, *, verify: bool = False) -> int | None:
        """Return the newest complete round, or None.

        ``verify``: also check the content of its files.
        """
        for number in reversed(self.numbers()):
            found = self.check_round(number)
            if not found.problems and not (verify and checkpoint.verify(found.path)):
                return number
        return None

    def open(self, number: int) -> CheckpointManifest:
        """Return the manifest of a complete round. Raises FederatedError for an incomplete one."""
        found = self.check_round(number)
        if found.manifest is None or found.problems:
            have = ", ".join(str(other.number) for other in self.all() if not other.problems) or "none"
            raise FederatedError(
                f"round {number} of {self.run} is not complete: {found.problems[0]}; complete are: {have}"
            )
        return found.manifest

    def weights(self, number: int) -> Manifest:
        """Return the manifest of a round's weights, as nodes fetch them."""
        manifest = self.open(number)
        return writer.weights_manifest(layout_of(manifest), manifest.files)

    def trees(self, number: int, *names: str) -> dict[str, Any]:
        """Read the entries ``names``, by default all without tensors, if the round has them."""
        there = self.open(number).entries
        wanted = names or (*TREE_ENTRIES, *CARRIED_ENTRIES)
        return checkpoint.load(self.path(number), only=[name for name in wanted if name in there])

    def stored(self, number: int, entry: str) -> dict[str, torch.Tensor]:
        """Return an entry of tensors that stay in their file: each is read when it is used."""
        if not layout_of(self.open(number)).get(entry):
            return {}
        opened: dict[str, torch.Tensor] = open_state(self.path(number), only=[entry])[entry]
        return opened

    def tensors(self, number: int, entry: str) -> dict[str, torch.Tensor]:
        """Read and verify an entry of tensors."""
        if not layout_of(self.open(number)).get(entry):
            return {}
        loaded: dict[str, torch.Tensor] = checkpoint.load(self.path(number), only=[entry])[entry]
        return loaded

    def write(self, number: int, layout: dict[str, writer.TensorLayout]) -> RoundWriter:
        """Return a writer for a round; see `RoundWriter`."""
        return RoundWriter(self.path(number), layout)

    def remove(self, number: int) -> None:
        """Remove a round, complete or not; at no time is half of it there under its name."""
        path = self.path(number)
        if isinstance(path, remote.RemotePath) and not (path / files.MANIFEST).exists():
            path.remove_tree()
        else:
            files.retire(path)


def layout_of(manifest: CheckpointManifest) -> dict[str, writer.TensorLayout]:
    """Return the layout of a round's tensors, as `RoundWriter` takes it."""
    return {
        entry: {
            name: (getattr(torch, dtype), tuple(shape))
            for name, (dtype, shape) in manifest.tensors[f"{entry}.safetensors"].items()
        }
        for entry in TENSOR_ENTRIES
        if f"{entry}.safetensors" in manifest.tensors
    }


def _problems(path: Path, manifest: CheckpointManifest) -> list[str]:
    problems = [f"{path} lacks {key!r}" for key in STATE_KEYS if key not in manifest.entries]
    for name, record in manifest.files.items():
        try:
            size = manifest.at(path, name).stat().st_size
        except OSError as error:
            problems.append(f"{path / name} cannot be read: {error.strerror or error}")
            continue
        if size != record.bytes:
            problems.append(f"{path / name} has {size:,} bytes instead of {record.bytes:,}")
    return problems
