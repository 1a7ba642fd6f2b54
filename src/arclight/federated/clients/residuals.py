"""What a client's last update left unsaid, on its disk: it is added to what the next one says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from arclight import checkpoint as checkpoints
from arclight.fabric import replacing
from arclight.federated.errors import FederatedError

if TYPE_CHECKING:
    import torch

_ENTRY = "residuals"


class Residuals:
    """Those of one lane, in ``<folder>/<round>``: what the update of that round left, which the server has taken.

    The newest counts. The one before it is kept until it is known that the update is part of the server's weights: a server that
    has lost it, and went on without it, leaves no trace of it here either.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, round: int) -> dict[str, torch.Tensor]:
        """What the update of a round adds, by key; none before there are any. Raises FederatedError where they are damaged."""
        former = [one for one in self._rounds() if one < round]
        if not former:
            return {}
        newest = self._of(former[-1])
        try:
            found: dict[str, torch.Tensor] = checkpoints.load(newest, only=_ENTRY)[_ENTRY]
        except checkpoints.CheckpointError as error:
            raise FederatedError(
                f"{error}. Without {newest} the client's next update leaves out what its last one could not say; remove that "
                "folder to accept it"
            ) from error
        return found

    @staticmethod
    def save(folder: Path, left: Mapping[str, torch.Tensor]) -> None:
        """Beside an update. Nothing is written where nothing was left."""
        if left:
            checkpoints.save(folder, {_ENTRY: dict(left)})

    def take_over(self, folder: Path, round: int) -> None:
        """Those beside a round's update are what the next one adds, by one rename; a crash anywhere here changes nothing."""
        self.take_back(round)  # it was made again
        self.folder.mkdir(parents=True, exist_ok=True)
        folder.rename(self._of(round))
        replacing.sync_folder(self.folder)
        replacing.sync_folder(folder.parent)

    def has(self, round: int) -> bool:
        return self._of(round).exists()

    def take_back(self, round: int) -> None:
        """The round's update counts for nothing: the next one adds what it has added."""
        with suppress(FileNotFoundError):
            replacing.retire(self._of(round))

    def settle(self, round: int) -> None:
        """The round's update counts: what others left before it is said."""
        for former in self._rounds():
            if former < round and self.has(round):
                replacing.retire(self._of(former), durable=False)

    def _of(self, round: int) -> Path:
        return self.folder / str(round)

    def _rounds(self) -> list[int]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in entries if path.name.isdigit())
