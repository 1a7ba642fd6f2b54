"""The hooks that modules and data modules share: where data come from, and how a batch reaches the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight.fabric.batches import move_batch
from arclight.fabric.errors import MisconfigurationError

if TYPE_CHECKING:
    import torch


class DataHooks:
    """Whichever of these a class does not write is not called."""

    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on each node, or once in all."""
    allow_zero_length_dataloader_with_multiple_devices: bool = False
    """Whether some of several processes may have no batches at all."""

    def prepare_data(self) -> None:
        """Get data ready on disk; runs in one process per node. State set here does not reach other processes."""

    def setup(self, stage: str) -> None:
        """Open data sets, build layers that need them; in every process. ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Undo `setup`."""

    def train_dataloader(self) -> Any:
        """A loader: a DataLoader, any iterable of batches, or a tree of them, as ``CombinedLoader`` takes it."""
        raise _missing(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """A loader, or several that are run one after another."""
        raise _missing(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """As :meth:`val_dataloader`."""
        raise _missing(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """As :meth:`val_dataloader`."""
        raise _missing(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch of a kind of its own."""
        return move_batch(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch


def _missing(owner: object, name: str) -> MisconfigurationError:
    return MisconfigurationError(
        f"`{name}` must be implemented to be used with the Lightning Trainer: {type(owner).__name__} has none"
    )
