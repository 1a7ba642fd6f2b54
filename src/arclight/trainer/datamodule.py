"""The data of a run: loaders for every stage, prepared and set up in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight.trainer.hparams import HyperparametersMixin

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


class DataModule(HyperparametersMixin):
    """Subclass this and write the loaders that you need.

    A loader is any iterable of batches; plain ``DataLoader`` objects resume exactly (see ``arclight.data``).
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    trainer: Trainer | None = None
    prepare_data_per_node: bool = True

    def prepare_data(self) -> None:
        """Get data ready on disk; runs in one process per node."""

    def setup(self, stage: str) -> None:
        """Open data sets; runs in every process. ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no train_dataloader()")

    def val_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no val_dataloader()")

    def test_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no test_dataloader()")

    def predict_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no predict_dataloader()")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}
