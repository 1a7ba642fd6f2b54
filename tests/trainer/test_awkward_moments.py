"""Signals, errors and stops that come at awkward moments of a run."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import arclight as al
import arclight.compat.lightning as L
from arclight.fabric.errors import MisconfigurationError, SIGTERMException

ROWS = DataLoader(torch.randn(14, 2, generator=torch.Generator().manual_seed(0)), batch_size=2)  # type: ignore[arg-type]


class Line(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.line(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]


def quiet(cls: Any, folder: Path, **settings: Any) -> Any:
    return cls(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, logger=False,
        **{"max_epochs": 1, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("cls", [al.Trainer, L.Trainer])
def test_values_logged_before_a_resume_go_on_and_own_entries_keep_their_names(cls: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Own(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["model"] = checkpoint["data"] = {"mine": 1}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.extend([checkpoint["model"], checkpoint["data"]])

    class Crash(al.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                raise RuntimeError("crash")

    saver = al.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(RuntimeError, match="crash"):
        quiet(cls, tmp_path, callbacks=[saver, Crash()]).fit(Own(), ROWS)
    trainer, model = quiet(cls, tmp_path, enable_checkpointing=False), Own()
    trainer.fit(model, ROWS, ckpt_path=saver.best_model_path)
    assert trainer.global_step == 7
    assert model.rates == [0.5, 0.25, 0.25], "after steps 3 and 6, of which the first came before the resume"
    assert seen == [{"mine": 1}] * 2


@pytest.mark.parametrize(("cls", "steps"), [(al.Trainer, 5), (L.Trainer, 6)])
def test_windows_of_data_without_a_length_are_closed(cls: Any, steps: int, tmp_path: Path) -> None:
    class Five(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.randn(5, 2))

    trainer = quiet(cls, tmp_path, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.max_epochs = 2
    trainer.fit(Line(), DataLoader(Five()))
    assert trainer.global_step == steps


def test_sigterm_during_validation_is_not_lost(tmp_path: Path) -> None:
    class Asked(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = quiet(al.Trainer, tmp_path)
    with pytest.raises(SIGTERMException):
        trainer.fit(Asked(), ROWS, ROWS)
    with pytest.raises(SIGTERMException):
        trainer.validate(Asked(), ROWS)
    trainer.should_stop = False
    quiet(al.Trainer, tmp_path, enable_checkpointing=False).fit(Line(), ROWS)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_validation_that_a_hook_runs_leaves_the_workers_of_the_fit_alone(persistent: bool, tmp_path: Path) -> None:
    class Curious(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            self.trainer.validate(self, ROWS)

    module, trainer = Curious(), quiet(al.Trainer, tmp_path, enable_checkpointing=False)
    before = set(multiprocessing.active_children())
    loader = DataLoader(ROWS.dataset, 1, num_workers=2, persistent_workers=persistent)
    trainer.fit(module, loader)
    assert (trainer.global_step, len(module.rates)) == (14, 14)
    assert set(multiprocessing.active_children()) <= before


class Watched(Line):
    """Validates, and records what the fit validates on; ``looks`` adds evaluations in its hooks."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks, self.sizes, self.seen = looks, [], []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.fn == "fit":
            self.sizes.append(len(batch))
        self.log("val", batch.sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.looks:
            self.trainer.validate(self, DataLoader(ROWS.dataset, 2), verbose=False)
            self.trainer.predict(self, DataLoader(ROWS.dataset, 3))
        self.seen.append(
            (str(self.trainer.state.fn), self.trainer.stage, self.trainer.num_val_batches, self.training)
            + (self.trainer.progress.batch, sorted(self.trainer.callback_metrics))
        )

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch


class Logs(al.Callback):
    def on_train_epoch_end(self, trainer: al.Trainer, pl_module: al.Module) -> None:
        self.log("of_callback", 1.0)

    def teardown(self, trainer: al.Trainer, pl_module: al.Module, stage: str) -> None:
        self.ended = [*getattr(self, "ended", []), stage]


def test_evaluations_in_hooks_leave_the_fit_as_it_was(tmp_path: Path) -> None:
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        module, logs = Watched(looks), Logs()
        stopping = al.EarlyStopping("val", patience=1, mode="max")
        trainer = quiet(
            al.Trainer, tmp_path / str(looks), callbacks=[logs, stopping], accumulate_grad_batches=2, max_epochs=5
        )
        trainer.fit(module, ROWS, DataLoader(ROWS.dataset, 1))
        weights = [parameter.tolist() for parameter in module.parameters()]
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        saved = sorted(path.name for path in (tmp_path / str(looks)).rglob("checkpoints/*"))
        found.append((weights, module.sizes, module.seen, metrics, logs.ended, trainer.num_val_batches, saved))
    assert found[1] == found[0]
    assert set(found[0][1]) == {1}
    assert "of_callback" in found[0][3]
    assert trainer.current_epoch == 2  # the sum of the same rows is no better in the second
    assert found[0][-1]


def test_evaluations_in_hooks_run_in_ranks_that_a_fit_has_started(tmp_path: Path) -> None:
    weights, precision = [], "auto"
    for looks in (True, False):
        torch.manual_seed(0)
        module = Watched(looks)
        trainer = quiet(
            al.Trainer, tmp_path, enable_checkpointing=False, strategy="ddp_fork", devices=2, precision=precision
        )
        trainer.fit(module, ROWS)
        weights.append([parameter.tolist() for parameter in module.parameters()])
        if looks:
            assert trainer.measured == {"precision": trainer.precision}
            precision = trainer.precision  # measured again, it may be another
    assert weights[0] == weights[1]


def test_a_fit_in_a_hook_is_refused(tmp_path: Path) -> None:
    class Again(Line):
        def on_train_epoch_end(self) -> None:
            self.trainer.fit(self, ROWS)

    with pytest.raises(MisconfigurationError, match="fit was called by a hook of a run of the same trainer"):
        quiet(al.Trainer, tmp_path, enable_checkpointing=False).fit(Again(), ROWS)


def test_predict_iter_in_a_hook_is_refused(tmp_path: Path) -> None:
    """Outputs that are not taken would leave the fit in the state, and the module in the mode, of the prediction."""

    class Peeking(Line):
        def on_train_epoch_start(self) -> None:
            self.outputs = self.trainer.predict_iter(self, ROWS)
            next(self.outputs)

    trainer = quiet(al.Trainer, tmp_path, enable_checkpointing=False)
    with pytest.raises(MisconfigurationError, match="predict_iter was called by a hook of a run of the same trainer"):
        trainer.fit(Peeking(), ROWS)


def test_a_stop_that_a_hook_of_a_nested_evaluation_requests_ends_the_fit(tmp_path: Path) -> None:
    class Judge(al.Callback):
        def on_validation_end(self, trainer: al.Trainer, pl_module: al.Module) -> None:
            trainer.should_stop = trainer.global_step == 2

    trainer = quiet(al.Trainer, tmp_path, callbacks=[Judge()], enable_checkpointing=False)
    trainer.fit(Watched(True), ROWS)
    assert trainer.global_step == 2


def test_a_nested_evaluation_of_a_checkpoint_restores_the_weights_of_the_fit(tmp_path: Path) -> None:
    class Compared(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            file = tmp_path / "first.ckpt"
            if batch_idx == 0:
                self.trainer.save_checkpoint(file)
            elif self.looks:
                before = [parameter.tolist() for parameter in self.parameters()]
                self.trainer.validate(self, DataLoader(ROWS.dataset, 2), ckpt_path=file, verbose=False)
                assert self.evaluated != before
                assert [parameter.tolist() for parameter in self.parameters()] == before

        def on_validation_end(self) -> None:
            self.evaluated = [parameter.tolist() for parameter in self.parameters()]

    weights = []
    for looks in (False, True):
        torch.manual_seed(0)
        module = Compared(looks)
        quiet(al.Trainer, tmp_path, enable_checkpointing=False).fit(module, ROWS)
        weights.append([parameter.tolist() for parameter in module.parameters()])
    assert weights[0] == weights[1]


def test_sigterm_in_an_evaluation_of_a_hook_ends_the_fit_in_order(tmp_path: Path) -> None:
    class Asked(Watched):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = quiet(al.Trainer, tmp_path)
    with pytest.raises(SIGTERMException):
        trainer.fit(Asked(True), ROWS)
    assert trainer.global_step == 1
    assert list(tmp_path.rglob("checkpoints/*"))
