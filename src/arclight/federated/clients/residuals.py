"""What a client's last update left unsaid, on its disk: it is added to what the next one says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from arclight import checkpoint as checkpoints
from arclight.fabric import replacing
from arclight.federated.errors import FederatedError

if TYPE_CHECKING:
    import torch

_ENTRY = "residuals"


class Residuals:
    """Those of the newest update that the server has taken. An update that was never taken leaves no trace in them.

    They lie in ``<folder>/<number>``, of which the highest counts: others are about to be removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> dict[str, torch.Tensor]:
        """By key; none before there are any. Raises FederatedError where they are damaged."""
        numbers = self._numbers()
        if not numbers:
            return {}
        newest = self.folder / str(numbers[-1])
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

    def take_over(self, folder: Path) -> None:
        """Those beside an update become the ones to go on from, by one rename; a crash anywhere here changes nothing."""
        former = self._numbers()
        target = self.folder / str(former[-1] + 1 if former else 1)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        replacing.sync_folder(self.folder)
        replacing.sync_folder(folder.parent)
        for number in former:
            replacing.retire(self.folder / str(number))

    def _numbers(self) -> list[int]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in entries if path.name.isdigit())
