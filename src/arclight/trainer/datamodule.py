"""Define the DataModule: prepare and set up data, return the dataloaders of every stage.

Users subclass `DataModule`; a `Module` has the same `DataHooks`. ``loop.session`` calls ``prepare_data``, ``setup`` and ``teardown`` in
every run; ``trainer.data`` asks the hooks that are overridden for loaders, and moves batches by the transfer hooks if one of them is.
Names and signatures are Lightning's; the keys of hyper-parameters are in checkpoints.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset

from arclight.data.combined import flatten, length_of
from arclight.fabric.batches import move_batch
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.hparams import HyperparametersMixin

if TYPE_CHECKING:
    import torch

    from arclight.trainer.checkpoint.loading import ReplacesLayers
    from arclight.trainer.trainer import Trainer


class DataHooks:
    """Hooks of Module and DataModule for data; only overridden loader hooks are called."""

    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on each node, or once in all."""
    allow_zero_length_dataloader_with_multiple_devices: bool = False
    """Whether some of several processes may have no batches at all."""

    def prepare_data(self) -> None:
        """Download or prepare data on disk, in one process per node; set no state here."""

    def setup(self, stage: str) -> None:
        """Open data sets and build layers that need them; runs in every process."""

    def teardown(self, stage: str) -> None:
        """Close what `setup` opened."""

    def train_dataloader(self) -> Any:
        """Return a DataLoader, any iterable of batches, or a tree of them (`CombinedLoader`)."""
        raise _missing(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """Return a loader, or several that are run one after another."""
        raise _missing(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """Return one or more loaders, as :meth:`val_dataloader`."""
        raise _missing(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return one or more loaders, as :meth:`val_dataloader`."""
        raise _missing(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch of a custom type to the device."""
        return move_batch(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch


def _missing(owner: object, name: str) -> MisconfigurationError:
    return MisconfigurationError(
        f"`{name}` must be implemented to be used with the Trainer: {type(owner).__name__} has none"
    )


_STAGES = {
    "train_dataloader": "Train dataloader",
    "val_dataloader": "Validation dataloader",
    "test_dataloader": "Test dataloader",
    "predict_dataloader": "Predict dataloader",
}


class DataModule(DataHooks, HyperparametersMixin):
    """Base class of data modules; override the loaders that you need.

    A loader is any iterable of batches; plain ``DataLoader`` objects resume exactly (see ``arclight.data``).
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    name: str | None = None
    trainer: Trainer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps of the data module."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""

    def _load_from(
        self, checkpoint: dict[str, Any], source: object, strict: bool | None, replaced_by: Sequence[ReplacesLayers]
    ) -> Self:  # fmt: skip
        if (state := checkpoint.get(type(self).__qualname__)) is not None:
            self.load_state_dict(state)
        return self

    def on_exception(self, exception: BaseException) -> None:
        """Run on any exception, before it reaches the caller."""

    @classmethod
    def from_datasets(
        cls, train_dataset: Any = None, val_dataset: Any = None, test_dataset: Any = None, predict_dataset: Any = None,
        batch_size: int = 1, num_workers: int = 0, **datamodule_kwargs: Any,
    ) -> Self:  # fmt: skip
        """Build a data module over data sets (or lists or dicts of them).

        Each has a loader, shuffled for training.

        ``batch_size`` and ``num_workers`` reach the constructor as well if it takes them, like ``datamodule_kwargs``.
        """
        parameters = inspect.signature(cls.__init__).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        shared = {"batch_size": batch_size, "num_workers": num_workers}
        made = cls(**datamodule_kwargs, **{k: v for k, v in shared.items() if anything or k in parameters})
        sources = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for name, source in zip(_STAGES, sources, strict=True):
            if source is not None:
                setattr(made, name, partial(_loaders, source, name == "train_dataloader", **shared))
        return made

    def __str__(self) -> str:
        """Return the sizes of the data sets that are set up."""
        return os.linesep.join(f"{{{title}: {_sizes(getattr(self, name, None))}}}" for name, title in _STAGES.items())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}


def _loaders(source: Any, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    """Return a loader for each data set in `source`."""

    def loader(dataset: Any) -> DataLoader[Any]:
        shuffled = shuffle and not isinstance(dataset, IterableDataset)
        return DataLoader(dataset, shuffle=shuffled, batch_size=batch_size, num_workers=num_workers, pin_memory=True)

    if isinstance(source, Dataset) or not isinstance(source, (Mapping, list, tuple)):
        return loader(source)
    datasets, rebuild = flatten(source)
    return rebuild([loader(dataset) for dataset in datasets])


def _sizes(hook: Callable[[], Any] | None) -> str:
    """Describe the sizes of a hook's data sets; "None" for those not there (yet)."""
    if hook is None:
        return "None"
    try:
        loaders = hook()
    except (MisconfigurationError, AttributeError, NotImplementedError):  # no such hook, or not set up yet
        return "None"
    if isinstance(loaders, DataLoader):
        return f"size={_size(loaders)}"
    if not isinstance(loaders, Iterable):
        return "None"
    return " ; ".join(f"{number}. size={_size(loader)}" for number, loader in enumerate(loaders, 1))


def _size(loader: Any) -> str:
    size = length_of(getattr(loader, "dataset", loader))
    return "NA" if size == float("inf") else str(size)
