"""Flags, hooks and properties that scripts of Lightning's users rely on, in runs of a few batches."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import arclight as al
import arclight.compat.lightning as L
import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.fabric.accelerators.cuda import is_cuda_available
from arclight.compat.lightning.fabric.plugins.environments.lightning import find_free_network_port
from arclight.compat.lightning.fabric.utilities.seed import max_seed_value
from arclight.compat.lightning.pytorch.accelerators.cpu import get_cpu_stats
from arclight.compat.lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint
from arclight.compat.lightning.pytorch.callbacks.finetuning import multiplicative
from arclight.compat.lightning.pytorch.callbacks.prediction_writer import WriteInterval
from arclight.compat.lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf
from arclight.compat.lightning.pytorch.core.mixins import HyperparametersMixin
from arclight.compat.lightning.pytorch.core.optimizer import LightningOptimizer
from arclight.compat.lightning.pytorch.demos.boring_classes import (
    BoringModel,
    IterableBoringDataModule,
    RandomDataset,
    RandomIterableDataset,
)
from arclight.compat.lightning.pytorch.demos.transformer import Dictionary, tokenize
from arclight.compat.lightning.pytorch.loggers.logger import DummyExperiment
from arclight.compat.lightning.pytorch.plugins.io import TorchCheckpointIO
from arclight.compat.lightning.pytorch.profilers import SimpleProfiler
from arclight.compat.lightning.pytorch.strategies import ParallelStrategy
from arclight.compat.lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from arclight.compat.lightning.pytorch.utilities import move_data_to_device, rank_zero_info
from arclight.compat.lightning.pytorch.utilities.memory import (
    garbage_collection_cuda,
    is_cuda_out_of_memory,
    is_out_of_cpu_memory,
)
from arclight.compat.lightning.pytorch.utilities.model_summary import (
    LayerSummary,
    get_formatted_model_size,
    parse_batch_shape,
)
from arclight.compat.lightning.pytorch.utilities.rank_zero import rank_zero_debug


def trainer(**options: Any) -> Any:
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    few = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    few |= {"limit_test_batches": 2, "limit_predict_batches": 2}
    return L.Trainer(**quiet | few | options)


def recorded(kind: type, calls: list[str], names: str, mark: str = "") -> Any:
    """An object of ``kind`` that notes each call of the methods named, and does what they do."""

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            calls.append(mark + name)
            return getattr(kind, name)(self, *args, **options)

        return method

    return type(kind.__name__, (kind,), {name: noting(name) for name in names.split()})()


def test_hooks_of_a_prediction() -> None:
    names = (
        "setup on_predict_start on_predict_epoch_start on_predict_batch_start on_predict_batch_end "
        "on_predict_epoch_end on_predict_end teardown"
    )
    calls: list[str] = []
    model = recorded(
        BoringModel,
        calls,
        f"{names} on_predict_model_eval predict_step "
        "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
    )
    trainer(callbacks=recorded(Callback, calls, names, mark="callback."), limit_predict_batches=1).predict(model)
    assert calls == [
        "callback.setup", "setup", "on_predict_model_eval",
        "callback.on_predict_start", "on_predict_start",
        "callback.on_predict_epoch_start", "on_predict_epoch_start",
        "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
        "callback.on_predict_batch_start", "on_predict_batch_start", "predict_step",
        "callback.on_predict_batch_end", "on_predict_batch_end",
        "callback.on_predict_epoch_end", "on_predict_epoch_end",
        "callback.on_predict_end", "on_predict_end",
        "callback.teardown", "teardown",
    ]  # fmt: skip


def test_hooks_around_the_sanity_check_and_validation() -> None:
    calls: list[str] = []
    callback = recorded(Callback, calls, "on_sanity_check_start on_sanity_check_end on_train_start")
    model = recorded(
        BoringModel, calls, "validation_step on_validation_model_zero_grad training_step lr_scheduler_step"
    )
    trainer(callbacks=callback, limit_train_batches=1).fit(model)
    assert calls == [
        "on_sanity_check_start", "validation_step", "on_sanity_check_end", "on_train_start",
        "training_step", "lr_scheduler_step", "on_validation_model_zero_grad", "validation_step",
    ]  # fmt: skip


def test_a_checkpoint_passes_through_the_hooks(tmp_path: Any) -> None:
    class Keeping(BoringModel):
        found = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["kept"] = 7

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            type(self).found = checkpoint["kept"]

    first = trainer()
    first.fit(Keeping())
    first.save_checkpoint(tmp_path / "end.ckpt")
    seen: list[int] = []
    calls = LambdaCallback(on_load_checkpoint=lambda trainer, module, checkpoint: seen.append(checkpoint["kept"]))
    trainer(max_epochs=2, callbacks=calls).fit(Keeping(), ckpt_path=tmp_path / "end.ckpt")
    assert Keeping.found == 7
    assert seen == [7]


@pytest.mark.parametrize("by_fabric", [False, True])
def test_a_checkpoint_io_of_the_users_own_names_its_arguments(tmp_path: Any, by_fabric: bool) -> None:
    written: list[str] = []

    class Own(TorchCheckpointIO):
        def save_checkpoint(self, state: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:  # type: ignore[override]
            written.append(os.path.basename(filepath))
            super().save_checkpoint(state, filepath, storage_options)

    if by_fabric:
        L.Fabric(accelerator="cpu", plugins=Own()).save(tmp_path / "own.ckpt", {"a": 1})
    else:
        made = trainer(plugins=[Own()])
        made.fit(BoringModel())
        made.save_checkpoint(tmp_path / "own.ckpt")
    assert written[-1] == "own.ckpt"
    assert (tmp_path / "own.ckpt").is_file()


def test_a_module_clips_in_its_own_way() -> None:
    class Clipping(BoringModel):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            assert (gradient_clip_val, gradient_clip_algorithm) == (0.5, "value")
            for parameter in self.parameters():
                parameter.grad.fill_(3.0)
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.largest = max(parameter.grad.max().item() for parameter in self.parameters())

    model = Clipping()
    trainer(gradient_clip_val=0.5, gradient_clip_algorithm="value").fit(model)
    assert model.largest == 0.5


def test_one_optimizers_turn() -> None:
    class Two(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Linear(2, 2)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.layer.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            with self.toggled_optimizer(first):
                assert self.layer.weight.requires_grad
                assert not self.other.weight.requires_grad
            assert self.other.weight.requires_grad
            self.toggle_optimizer(first)
            assert not self.other.weight.requires_grad
            self.untoggle_optimizer(first)
            assert self.other.weight.requires_grad
            self.checked = True

    model = Two()
    trainer().fit(model)
    assert model.checked
    model.freeze()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.unfreeze()
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("options", "epochs"), [({"min_epochs": 3}, 3), ({}, 1)])
def test_min_epochs_put_off_a_stop(options: dict[str, int], epochs: int) -> None:
    class Stopping(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = True

    run = trainer(max_epochs=5, callbacks=Stopping(), **options)
    run.fit(BoringModel())
    assert run.current_epoch == epochs


def test_max_time_ends_a_run() -> None:
    run = trainer(max_epochs=-1, max_time={"seconds": 0})
    run.fit(BoringModel())
    assert run.current_epoch <= 1
    assert run.state.status == TrainerStatus.FINISHED


def test_detect_anomaly_names_the_operation() -> None:
    class Broken(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.layer(batch).sum() * 0).sqrt() * 0 + self.layer(batch).sum() * 0

    with pytest.raises(RuntimeError, match="SqrtBackward"):
        trainer(detect_anomaly=True).fit(Broken())
    assert not torch.is_anomaly_enabled()
    trainer(detect_anomaly=False).fit(Broken())


def test_benchmark_is_torchs_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen: list[bool] = []
    watch = LambdaCallback(on_train_start=lambda trainer, module: seen.append(torch.backends.cudnn.benchmark))
    for choice in (True, False):
        trainer(benchmark=choice, callbacks=watch).fit(BoringModel())
    assert seen == [True, False]


@pytest.mark.parametrize("kept", [True, False])
def test_enable_autolog_hparams(kept: bool, tmp_path: Any) -> None:
    class WithArguments(BoringModel):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = pl.loggers.CSVLogger(tmp_path)
    trainer(enable_autolog_hparams=kept, logger=logger).fit(WithArguments())
    file = tmp_path / "lightning_logs" / "version_0" / "hparams.yaml"
    assert file.exists() == kept
    assert not kept or "width: 3" in file.read_text()


@pytest.mark.parametrize("shared", [True, False])
def test_use_distributed_sampler_is_about_several_processes(shared: bool) -> None:
    run = trainer(use_distributed_sampler=shared)
    run.fit(BoringModel(), DataLoader(RandomDataset(32, 8)))
    assert isinstance(run.train_dataloader.sampler, torch.utils.data.SequentialSampler)


def test_trainer_exposes_callbacks_and_state() -> None:
    stopping, keeping = EarlyStopping("x"), [ModelCheckpoint(monitor=name) for name in "ab"]
    run = trainer(callbacks=[stopping, *keeping], enable_checkpointing=True, enable_progress_bar=True)
    assert run.early_stopping_callback is stopping
    assert run.early_stopping_callbacks == [stopping]
    assert run.checkpoint_callback is keeping[0]
    assert run.checkpoint_callbacks == keeping
    assert isinstance(run.progress_bar_callback, pl.callbacks.ProgressBar)
    assert run.is_global_zero
    assert not run.received_sigterm

    states: list[Any] = []

    class Looking(BoringModel):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            states.append(
                (self.trainer.evaluating, self.trainer.testing, self.trainer.predicting, self.trainer.state.fn)
            )
            return super().test_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            states.append(
                (self.trainer.evaluating, self.trainer.testing, self.trainer.predicting, self.trainer.state.stage)
            )
            return super().predict_step(batch, batch_idx)

    run, model = trainer(), Looking()
    assert run.state == TrainerState()
    run.test(model)
    run.predict(model)
    assert states == [(True, True, False, TrainerFn.TESTING)] * 2 + [(False, False, True, RunningStage.PREDICTING)] * 2
    assert run.num_test_batches == run.num_predict_batches == [2]
    assert isinstance(run.predict_dataloaders, DataLoader)


def test_a_sigterm_is_noticed() -> None:
    class Terminated(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    run = trainer()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        run.fit(Terminated())
    assert run.received_sigterm
    assert signal.getsignal(signal.SIGTERM) is before


def test_streams_are_trained_on() -> None:
    class Adding(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert len(batch) == 2
            return sum(self.layer.weight.sum() * part.mean() for part in batch)

    run = trainer()
    run.fit(BoringModel(), DataLoader(RandomIterableDataset(32, 8)))
    assert run.global_step == 2
    run = trainer(limit_val_batches=0)
    run.fit(Adding(), datamodule=IterableBoringDataModule())
    assert run.global_step == 2


def test_fabric_makes_and_moves_tensors() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="64-true")
    with fabric.init_tensor():
        assert torch.zeros(2).dtype is torch.float64
    assert torch.zeros(2).dtype is torch.float32
    moved = fabric.to_device({"x": [torch.ones(1)]})
    assert moved["x"][0].device == fabric.device
    assert fabric.is_global_zero
    assert fabric.barrier() is None
    assert move_data_to_device((torch.ones(1), "text"), torch.device("meta"))[0].is_meta


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("ddp_find_unused_parameters_true", True),
        ("ddp_find_unused_parameters_false", False),
        ("ddp_spawn_find_unused_parameters_true", True),
        ("ddp_spawn_find_unused_parameters_false", False),
        ("ddp_fork_find_unused_parameters_true", True),
        ("ddp_fork_find_unused_parameters_false", False),
        ("ddp_notebook_find_unused_parameters_true", True),
        ("ddp_notebook_find_unused_parameters_false", False),
    ],
)
def test_strategy_names_select_the_search_for_unused_parameters(name: str, unused: bool) -> None:
    run = trainer(strategy=name, devices=2)
    assert isinstance(run.strategy, ParallelStrategy)
    assert run.strategy._ddp_kwargs["find_unused_parameters"] is unused
    assert run.world_size == 2


def test_optimizers_of_a_module_are_wrapped() -> None:
    class Looking(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            return super().training_step(batch, batch_idx)

    model = Looking()
    trainer().fit(model)
    wrapped, bare = model.seen
    assert isinstance(wrapped, LightningOptimizer)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert wrapped.optimizer is bare
    assert type(bare) is torch.optim.SGD


def test_hyperparameters_without_a_module() -> None:
    class Holding(HyperparametersMixin):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert Holding(4).hparams == {"width": 4}


def test_messages_of_rank_zero(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="arclight"):
        rank_zero_debug("small")
        rank_zero_info("large")
    assert [(record.levelname, record.message) for record in caplog.records] == [("DEBUG", "small"), ("INFO", "large")]


def test_words_become_numbers(tmp_path: Any) -> None:
    (tmp_path / "text").write_text("the cat\nthe dog\n")
    numbers, known = tokenize(tmp_path / "text")
    assert isinstance(known, Dictionary)
    assert numbers.tolist() == [0, 1, 2, 0, 3, 2]


@pytest.mark.parametrize("name", ["configure_sharded_model", "training_epoch_end"])
def test_methods_that_nobody_calls_any_more_are_refused(name: str) -> None:
    model = type("Old", (BoringModel,), {name: lambda self, *outputs: None})()
    with pytest.raises(NotImplementedError, match=rf"{name}.*\n?.*(configure_model|on_train_epoch_end)"):
        trainer().fit(model)


def test_our_own_trainer_warns_of_hooks_that_nobody_calls_any_more() -> None:
    def fit(module_hook: str | None, callback_hook: str | None) -> list[str]:
        def never(self: Any, *arguments: Any) -> None:
            raise AssertionError("nothing calls this")

        model = type("Old", (BoringModel,), {module_hook: never} if module_hook else {})()
        callback = type("Watch", (al.Callback,), {callback_hook: never} if callback_hook else {})()
        run = {"max_steps": 1, "limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            al.Trainer(**run, accelerator="cpu", callbacks=[callback]).fit(model)
        assert model.trainer.global_step == 1
        return [str(one.message) for one in caught if "Lightning 1.x" in str(one.message)]

    assert fit(None, None) == []
    (found,) = fit("training_epoch_end", None)
    assert found.startswith(
        "`Old.training_epoch_end` is a hook of Lightning 1.x, which nothing calls: use `on_train_epoch"
    )
    (found,) = fit("training_step_end", None)
    assert "`on_train_batch_end`" in found
    assert fit(None, "on_keyboard_interrupt") == [
        "`Watch.on_keyboard_interrupt` is a hook of Lightning 1.x, which nothing calls: use `on_exception`"
    ]
    found, other = fit("configure_sharded_model", "on_epoch_end")
    assert "`configure_model`" in found
    assert "`on_train_epoch_end`" in other


def test_profilers_name_the_wait_for_a_batch_as_lightning_does() -> None:
    profiler = SimpleProfiler()
    trainer(profiler=profiler, limit_train_batches=2, limit_val_batches=1, max_epochs=1).fit(BoringModel())
    waits = {name: len(times) for name, times in profiler.recorded_durations.items() if name.endswith("_next")}
    assert waits["[_TrainingEpochLoop].train_dataloader_next"] == 2
    assert "[_EvaluationLoop].val_next" in waits


def test_small_functions() -> None:
    assert is_cuda_available() == torch.cuda.is_available()
    assert 1024 <= find_free_network_port() < 65536
    assert convert_inf(float("inf")) is None
    assert convert_inf(3) == 3
    assert multiplicative(1) == 2
    assert set(get_cpu_stats()) == {"cpu_vm_percent", "cpu_percent", "cpu_swap_percent"}
    assert max_seed_value == np.iinfo(np.uint32).max
    assert WriteInterval("batch_and_epoch") == WriteInterval.BATCH_AND_EPOCH
    assert is_cuda_out_of_memory(RuntimeError("CUDA out of memory."))
    assert is_out_of_cpu_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_cuda_out_of_memory(RuntimeError("another"))
    assert garbage_collection_cuda() is None
    assert DummyExperiment().anything("at", all=1) is None
    assert get_formatted_model_size(1.5) == "1.500"
    assert parse_batch_shape(torch.zeros(2, 3)) == [2, 3]
    assert LayerSummary(torch.nn.Linear(2, 3)).num_parameters == 9
