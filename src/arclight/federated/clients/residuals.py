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
    """Those of the newest update that the server has taken. An update that was never taken leaves no trace in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> dict[str, torch.Tensor]:
        """By key; none before there are any. Raises FederatedError where they are damaged."""
        if not self.folder.exists():
            return {}
        try:
            found: dict[str, torch.Tensor] = checkpoints.load(self.folder, only=_ENTRY)[_ENTRY]
        except checkpoints.CheckpointError as error:
            raise FederatedError(
                f"{error}. Without {self.folder} the client's next update leaves out what its last one could not say; remove that "
                "folder to accept it"
            ) from error
        return found

    @staticmethod
    def save(folder: Path, left: Mapping[str, torch.Tensor]) -> None:
        """Beside an update. Nothing is written where nothing was left."""
        if left:
            checkpoints.save(folder, {_ENTRY: dict(left)})

    def take_over(self, folder: Path) -> None:
        """Those beside an update become the ones to go on from; again after a crash in between."""
        if folder.exists():
            replacing.publish(folder, self.folder)
