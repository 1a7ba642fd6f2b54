"""Values kept and shown by ``log``, compared with results by hand or of another program."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.loggers import Logger


class Lines(al.Module):
    """A model whose steps log what a test gives it: functions of the module and the batch index."""

    def __init__(self, **logs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.logs = logs

    def _log(self, hook: str, *arguments: Any) -> None:
        if hook in self.logs:
            self.logs[hook](self, *arguments)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._log("training_step", batch_idx)
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log("validation_step", batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log("test_step", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log("on_train_batch_end", batch_idx)

    def on_train_epoch_end(self) -> None:
        self._log("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self._log("on_validation_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(Logger):
    """Keeps the rows that it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))


def batches(count: int = 4, size: int = 2) -> list[torch.Tensor]:
    return [torch.ones(size, 2) for _ in range(count)]


def rows(count: int) -> Any:
    return torch.utils.data.DataLoader(torch.ones(count, 2))


def trainer(**settings: Any) -> al.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return al.Trainer(**{**quiet, "max_epochs": 1, **settings})


def log(name: str, **options: Any) -> Any:
    return lambda module, index=0: module.log(name, float(index), **options)


# -- what is shown when --------------------------------------------------------------------------------------------


def test_names_in_the_three_views() -> None:
    def logs(module: al.Module, index: int) -> None:
        module.log("default", index)
        module.log("both", index, on_step=True, on_epoch=True)
        module.log("bar", index, on_step=False, on_epoch=True, prog_bar=True, logger=False)
        module.log("both_bar", index, on_step=True, on_epoch=True, prog_bar=True, logger=False)

    runner = trainer()
    runner.fit(Lines(training_step=logs, validation_step=logs), batches(3), batches(2))
    training = {"default": 2.0, "both_step": 2.0}
    assert {name: float(v) for name, v in runner.logged_metrics.items()} == {
        **training, "default": 0.5, "both_step": 1.0, "both_epoch": 1.0,
    }  # fmt: skip
    assert runner.progress_bar_metrics == {"bar": 1.0, "both_bar_step": 1.0, "both_bar_epoch": 1.0}
    assert all(isinstance(value, torch.Tensor) for value in runner.callback_metrics.values())
    runner.validate(Lines(validation_step=logs), batches(2), verbose=False)
    assert {name: float(v) for name, v in runner.callback_metrics.items()} == {
        "default": 0.5, "both": 0.5, "both_epoch": 0.5, "bar": 0.5, "both_bar": 0.5, "both_bar_epoch": 0.5,
    }, "an evaluation's step values are not for callbacks to go by"  # fmt: skip


def test_step_values_are_there_at_once_and_epoch_values_from_the_epochs_end_on() -> None:
    seen: list[Any] = []

    class Look(al.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    runner = trainer(callbacks=Look())
    runner.fit(Lines(training_step=log("x", on_step=True, on_epoch=True)), batches(3))
    steps = [{"x": float(i), "x_step": float(i)} for i in range(3)]
    assert seen == [*steps, {"x": 1.0, "x_step": 2.0, "x_epoch": 1.0}]


def test_values_logged_when_an_epoch_ends_are_there_in_the_same_hook_and_afterwards() -> None:
    seen = []

    def logs(module: Any) -> None:
        module.log("end", 3.0)
        seen.append(float(module.trainer.callback_metrics["end"]))

    runner = trainer()
    runner.fit(Lines(on_train_epoch_end=logs, on_validation_epoch_end=logs), batches(1), batches(1))
    assert seen == [3.0, 3.0]
    assert float(runner.callback_metrics["end"]) == 3.0


def test_a_sanity_check_leaves_no_values() -> None:
    seen = []

    def first(module: Any, index: int) -> None:
        seen.append((dict(module.trainer.callback_metrics), dict(module.trainer.logged_metrics)))

    runner = trainer(num_sanity_val_steps=1, limit_val_batches=1)
    runner.fit(Lines(training_step=first, validation_step=log("v", prog_bar=True)), batches(1), batches(1))
    assert seen == [({}, {})]


def test_an_epochs_values_do_not_reach_into_the_next() -> None:
    seen = Rows()

    def logs(module: Any) -> None:
        module.log("start", 1.0)

    class Once(Lines):
        def on_train_start(self) -> None:
            logs(self)

    trainer(max_epochs=2, logger=seen).fit(Once(), batches(1))
    assert seen.rows == [({"epoch": 0, "start": 1.0}, 1)]


# -- rows of loggers -----------------------------------------------------------------------------------------------


def test_rows_of_a_fit() -> None:
    seen = Rows()
    logs = log("x", on_step=True, on_epoch=True)
    module = Lines(training_step=logs, validation_step=log("v", on_step=True))
    trainer(logger=seen, log_every_n_steps=2, max_epochs=2).fit(module, batches(4), batches(2))
    one_epoch = [
        ({"x_step": 1.0}, 2), ({"x_step": 3.0}, 4), ({"v_step": 0.0}, 0), ({"v_step": 1.0}, 1), ({"v_epoch": 0.5}, 4), ({"x_epoch": 1.5}, 4),
    ]  # fmt: skip
    expected = []
    for epoch in range(2):
        for values, step in one_epoch:
            evaluation_step = "v_step" in values
            row = values if evaluation_step else {"epoch": epoch, **values}
            expected.append((row, step + (2 if evaluation_step else 4) * epoch))
    assert seen.rows == expected


@pytest.mark.parametrize(("every", "steps"), [(50, [1, 2, 3]), (2, [2]), (3, [3]), (0, [])])
def test_a_fit_that_would_end_before_its_first_row_writes_more(every: int, steps: list[int]) -> None:
    from arclight.compat.lightning.pytorch import Trainer

    seen, lightnings = Rows(), Rows()
    runner = trainer(logger=seen, log_every_n_steps=every)
    runner.fit(Lines(training_step=log("x")), batches(3))
    assert [step for _, step in seen.rows] == steps
    assert runner.log_every_n_steps == every
    usual = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
    Trainer(logger=lightnings, log_every_n_steps=every, **usual).fit(Lines(training_step=log("x")), batches(3))
    assert [step + 1 for _, step in lightnings.rows] == [step for step in steps if every and step % every == 0]


def test_a_short_fit_of_many_steps_writes_ten_rows() -> None:
    seen = Rows()
    trainer(logger=seen, max_epochs=2).fit(Lines(training_step=log("x")), batches(20))
    assert [step for _, step in seen.rows] == list(range(4, 41, 4))


def test_rows_are_numbered_by_the_conventions() -> None:
    from arclight.compat.lightning.pytorch import Trainer

    seen = Rows()
    runner = Trainer(
        logger=seen, log_every_n_steps=1, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False
    )
    runner.fit(Lines(training_step=log("x", on_step=True, on_epoch=True), validation_step=log("v")), rows(2), rows(1))
    assert seen.rows == [
        ({"epoch": 0, "x_step": 0.0}, 0), ({"epoch": 0, "x_step": 1.0}, 1), ({"epoch": 0, "v": 0.0}, 1), ({"epoch": 0, "x_epoch": 0.5}, 1),
    ]  # fmt: skip


def test_a_run_without_extras_logs_nothing() -> None:
    module = Lines(training_step=log("x"))
    runner = al.Trainer(barebones=True, max_epochs=1, accelerator="cpu")
    with pytest.warns(UserWarning, match=r"barebones=True\)` is configured"):
        runner.fit(module, rows(1))
    assert not runner.callback_metrics


def test_a_logged_step_takes_the_place_of_the_trainers_and_a_logged_epoch_stays() -> None:
    seen = Rows()

    def logs(module: Any) -> None:
        module.log_dict({"step": 70.0, "x": 1.0})

    trainer(logger=seen).fit(Lines(on_train_epoch_end=logs), batches(1))
    assert seen.rows == [({"x": 1.0}, 70)]
    seen.rows.clear()
    trainer(logger=seen).fit(Lines(on_train_epoch_end=lambda module: module.log("epoch", -1.0)), batches(1))
    assert seen.rows == [({"epoch": -1.0}, 1)]


def test_results_of_several_loaders() -> None:
    def logs(module: Any, index: int) -> None:
        module.log("x", float(index), on_step=True, on_epoch=True)
        module.log("hidden", 1.0, logger=False)

    class Several(Lines):
        def on_test_epoch_end(self) -> None:
            self.log("all", 7.0)

    runner = trainer()
    results = runner.test(Several(test_step=logs), [rows(3), rows(5)], verbose=False)
    assert results == [
        {"x_epoch/dataloader_idx_0": 1.0, "all": 7.0}, {"x_epoch/dataloader_idx_1": 2.0, "all": 7.0},
    ]  # fmt: skip
    assert "hidden/dataloader_idx_1" in runner.callback_metrics
    assert "x_step/dataloader_idx_1" in runner.logged_metrics


def test_names_of_several_loaders_may_be_left_alone_if_they_differ() -> None:
    class Named(Lines):
        same = False

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            name = "x" if self.same else f"x{dataloader_idx}"
            self.log(name, float(dataloader_idx), add_dataloader_idx=False)

    assert trainer().test(Named(), [rows(1), rows(1)], verbose=False) == [{"x0": 0.0}, {"x1": 1.0}]
    module = Named()
    module.same = True
    with pytest.raises(MisconfigurationError, match="twice in `test_step`"):
        trainer().test(module, [rows(1), rows(1)], verbose=False)


# -- reductions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 4.5), ("AVG", 4.5), (torch.mean, 4.5), ("sum", 45), (sum, 45), (min, 0), (torch.min, 0), ("max", 9), (max, 9)],
)  # fmt: skip
def test_reductions(reduce_fx: Any, expected: float) -> None:
    logs = log("x", on_step=False, on_epoch=True, reduce_fx=reduce_fx)
    runner = trainer()
    runner.fit(Lines(training_step=logs), batches(10))
    assert float(runner.callback_metrics["x"]) == expected


def test_a_long_epoch_is_folded_without_losing_anything() -> None:
    values = torch.randn(600, generator=torch.Generator().manual_seed(0)).tolist()

    def logs(module: Any, index: int) -> None:
        module.log("mean", values[index], on_epoch=True, batch_size=index + 1)
        module.log("max", values[index], on_epoch=True, reduce_fx="max")

    runner = trainer()
    runner.fit(Lines(training_step=logs), batches(600))
    weighted = statistics.fmean(values, weights=range(1, 601))
    assert float(runner.callback_metrics["mean"]) == pytest.approx(weighted, abs=1e-7)
    assert float(runner.callback_metrics["max"]) == pytest.approx(max(values))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_batches_count_with_their_samples(accumulate: int) -> None:
    runner = trainer(accumulate_grad_batches=accumulate)
    runner.fit(Lines(training_step=log("x", on_epoch=True)), [torch.ones(1, 2), torch.ones(3, 2)])
    assert float(runner.callback_metrics["x"]) == 3 / 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_ambiguous_batch_size_warns_or_must_be_given(accumulate: int) -> None:
    def fit(batch: Any, **options: Any) -> al.Trainer:
        class Any_(Lines):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                self.log("x", 1.0, on_epoch=True, **options)
                return self.net(torch.ones(1, 2)).sum()

        runner = trainer(accumulate_grad_batches=accumulate)
        runner.fit(Any_(), [batch])
        return runner

    with pytest.warns(UserWarning, match="Trying to infer the `batch_size` from an ambiguous collection.*3 is taken"):
        fit({"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(MisconfigurationError, match="could not infer the batch_size of a batch of type str"):
        fit("text")
    fit("text", batch_size=1)
    fit("text", reduce_fx="sum")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_values_are_shown_in_float32_or_what_is_more(dtype: torch.dtype) -> None:
    def logs(module: Any, index: int) -> None:
        module.log("x", torch.tensor(1, dtype=dtype), on_step=True, on_epoch=True, reduce_fx="sum")

    runner = trainer()
    with pytest.warns(UserWarning, match="needs to be floating") if dtype is torch.int64 else _no_warning():
        runner.fit(Lines(training_step=logs), batches(1) * 300)  # bfloat16 counts to 256
    assert float(runner.callback_metrics["x_epoch"]) == 300
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert {value.dtype for value in runner.callback_metrics.values()} == {wide}


def _no_warning() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_logged_tensors_changed_in_place_are_copied_or_reported() -> None:
    def count(module: Any, index: int) -> None:
        module.counter += 1
        module.log("count", module.counter, on_epoch=True)

    class Counting(Lines):
        def __init__(self, **logs: Any) -> None:
            super().__init__(**logs)
            self.register_buffer("counter", torch.zeros(()))

    runner = trainer()
    runner.fit(Counting(training_step=count), batches(3))
    assert float(runner.callback_metrics["count"]) == 2

    class Adding(Lines):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.log("fit", loss)
            loss += 1.0
            return loss

    runner = trainer()
    with pytest.raises(RuntimeError, match=r"'fit' in training_step was changed in place.*fit.clone\(\)"):
        runner.fit(Adding(), batches(1))


def test_a_graph_is_kept_if_asked_for() -> None:
    class Graph(Lines):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.log("with", loss, enable_graph=True)
            self.log("without", loss)
            graphs.append([self.trainer.callback_metrics[name].requires_grad for name in ("with", "without")])
            return loss

    graphs: list[list[bool]] = []
    trainer().fit(Graph(), batches(1))
    assert graphs == [[True, False]]


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, "text", [1, 2], (1,), {"a": 1}, {"a": {"b": 1}}, object], ids=lambda value: str(value)[:12]
)
def test_values_that_are_no_numbers(value: Any) -> None:
    def logs(module: Any, index: int) -> None:
        module.log("x", value)

    with pytest.raises(ValueError, match=r"`self.log\(x, .*` was called, but"):
        trainer().fit(Lines(training_step=logs), batches(1))


def test_tensors_of_several_numbers() -> None:
    def logs(module: Any, index: int) -> None:
        module.log("x", torch.ones(2))

    with pytest.raises(ValueError, match="must have a single element"):
        trainer().fit(Lines(training_step=logs), batches(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_step": False, "on_epoch": False}, "is not useful"),
        ({"reduce_fx": torch.median}, "reduce_fx={min,max,mean,sum}.*are supported"),
        ({"reduce_fx": "median"}, "reduce_fx={min,max,mean,sum}.*are supported"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationError, match=message):
        trainer().fit(Lines(training_step=log("x", **options)), batches(1))


def test_a_name_that_ends_as_the_trainers_do() -> None:
    with pytest.raises(MisconfigurationError, match=r"`self\.log` with the key `x/dataloader_idx_0`"):
        trainer().fit(Lines(training_step=log("x/dataloader_idx_0")), batches(1))


def test_one_name_with_two_settings() -> None:
    def differ(module: Any, index: int) -> None:
        module.log("x", 1.0, prog_bar=False)
        module.log("x", 1.0, prog_bar=True)

    def agree(module: Any, index: int) -> None:
        module.log("x", 1.0)
        module.log("x", 1.0, on_step=True, on_epoch=False)

    with pytest.raises(MisconfigurationError, match=r"self.log\(x, ...\)` twice in `training_step` with different"):
        trainer().fit(Lines(training_step=differ), batches(1))
    trainer().fit(Lines(training_step=agree), batches(2))


def test_on_step_is_refused_in_epoch_hooks() -> None:
    with pytest.raises(MisconfigurationError, match=r"self.log\(on_step=True\).*on_train_epoch_end.*must be one of"):
        trainer().fit(Lines(on_train_epoch_end=log("x", on_step=True)), batches(1))


@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_after_batch_transfer"]
)
def test_hooks_in_which_nothing_can_be_logged(hook: str) -> None:
    module = Lines()
    setattr(module, hook, lambda *_, **__: module.log("x", 1.0))
    with pytest.raises(MisconfigurationError, match=f"You can't `self.log\\(\\)` inside `{hook}`"):
        trainer().fit(module, batches(1), batches(1))


def test_prediction_and_code_outside_of_a_run() -> None:
    module = Lines()
    with pytest.warns(UserWarning, match="`self.trainer` reference is not registered"):
        module.log("x", 1.0)
    module.on_predict_epoch_end = lambda: module.log("x", 1.0)  # type: ignore[method-assign]
    module.predict_step = lambda batch, index: module.net(batch)  # type: ignore[method-assign, assignment]
    runner = trainer()
    with pytest.raises(MisconfigurationError, match="result collection is not registered yet"):
        runner.predict(module, batches(1))
    with pytest.raises(MisconfigurationError, match="not managed by the `Trainer` control flow"):
        module.log("x", 1.0)


def test_logging_to_a_missing_logger_warns() -> None:
    with pytest.warns(UserWarning, match=r"log\('x', ..., logger=True\)` but have no logger"):
        trainer().fit(Lines(training_step=log("x", logger=True)), batches(1))


# -- callbacks -----------------------------------------------------------------------------------------------------


def test_callbacks_log_in_their_own_name() -> None:
    class Logs(al.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.log("start", 1.0)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.log_dict({"batch": 2.0})

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.log("batch", 4.0, on_step=False, on_epoch=True)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("end", 3.0)

    callback, runner = Logs(), trainer()
    runner.callbacks.append(callback)
    runner.fit(Lines(), batches(1))
    assert {name: float(v) for name, v in runner.callback_metrics.items()} == {"start": 1.0, "batch": 4.0, "end": 3.0}
    assert not vars(callback), "nothing of the run stays behind"


# -- metrics -------------------------------------------------------------------------------------------------------


class Total:
    """The least that a metric is: it adds up, and says what it has added."""

    def __init__(self) -> None:
        self.reset()
        self.resets = 0

    def __call__(self, value: float) -> None:
        self.total += value

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.total)

    def reset(self) -> None:
        self.total = 0.0
        self.resets = getattr(self, "resets", 0) + 1

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


class WithMetric(Lines):
    options: Mapping[str, Any] = {"on_step": False, "on_epoch": True}

    def __init__(self) -> None:
        super().__init__()
        self.total = Total()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.total(batch_idx)
        self.log("total", self.total, **self.options)
        return self.net(batch).square().mean()


def test_a_metric_is_computed_and_reset_once_an_epoch() -> None:
    module, runner = WithMetric(), trainer(max_epochs=2)
    runner.fit(module, batches(4))
    assert float(runner.callback_metrics["total"]) == 6
    assert module.total.resets == 2
    module = WithMetric()
    module.options = {"on_step": True, "on_epoch": False}
    runner = trainer()
    runner.fit(module, batches(4))
    assert float(runner.callback_metrics["total"]) == 6
    assert module.total.resets == 1


def test_a_metric_must_be_held_by_the_module() -> None:
    class Elsewhere(WithMetric):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("x", Total())
            return self.net(batch).sum()

    with pytest.raises(MisconfigurationError, match=r"metric_attribute=name\)` where `name` is one of \['total'\]"):
        trainer().fit(Elsewhere(), batches(1))


def test_a_metrics_value_must_be_a_number() -> None:
    module = WithMetric()
    module.total.compute = lambda: (torch.ones(()), torch.ones(()))  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ValueError, match=r"`.compute\(\)` return of the metric logged as 'total' must be a tensor"):
        trainer().fit(module, batches(1))


class SaveAt(al.Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def test_a_metric_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    trainer(callbacks=SaveAt(tmp_path / "saved", 1)).fit(WithMetric(), batches(4))
    runner = trainer()
    runner.fit(WithMetric(), batches(4), ckpt_path=tmp_path / "saved")
    assert float(runner.callback_metrics["total"]) == 6


# -- several processes ---------------------------------------------------------------------------------------------


class Ranks(Lines):
    """Logs numbers that differ between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Total()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rank = float(self.global_rank)
        for how in ("mean", "sum", "min", "max"):
            self.log(f"epoch/{how}", rank + batch_idx, on_step=False, on_epoch=True, reduce_fx=how)
            self.log(f"step/{how}", rank + batch_idx, sync_dist=True, reduce_fx=how)
        self.log("own", rank, on_step=False, on_epoch=True, rank_zero_only=True)
        if rank == 1:
            self.log("only/one", 5.0, on_step=False, on_epoch=True)
        return self.net(batch).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.global_rank))


def fit_two(module: al.Module, count: int = 4, **settings: Any) -> al.Trainer:
    runner = trainer(devices=2, strategy="ddp_fork", **settings)
    runner.fit(module, rows(2 * count))
    return runner


def test_values_of_two_processes() -> None:
    metrics = fit_two(Ranks(), log_every_n_steps=2).callback_metrics
    assert {name: float(v) for name, v in metrics.items()} == {
        "epoch/mean": 2.0, "epoch/sum": 0 + 1 + 2 + 3 + 1 + 2 + 3 + 4, "epoch/min": 0.0, "epoch/max": 4.0,
        "step/mean": 3.5, "step/sum": 7.0, "step/min": 3.0, "step/max": 4.0, "own": 0.0, "end": 0.5, "only/one": 5.0,
    }  # fmt: skip


class Differing(Ranks):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("x", 1.0, on_epoch=True, reduce_fx="sum" if self.global_rank else "mean")
        return self.net(batch).square().mean()


class MetricOnOne(Ranks):
    def setup(self, stage: str) -> None:
        if self.global_rank == 0:
            del self.total

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            self.log("total", self.total, on_epoch=True)
        return self.net(batch).square().mean()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Differing, "'x' is logged in training_step with reduce_fx='mean' on process 0 and with 'sum' on process 1"),
        (
            MetricOnOne,
            "the metric 'total' is logged on other processes, .* MetricOnOne has no attribute 'total' on this one",
        ),
    ],
)
def test_ranks_that_log_differently_are_reported(module: type[al.Module], message: str) -> None:
    with pytest.raises(Exception, match=message):
        fit_two(module(), count=1)


def test_a_sum_over_an_epoch_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    class Sums(Lines):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
            return self.net(batch).square().mean()

    fit_two(Sums(), count=6, callbacks=SaveAt(tmp_path / "saved", 1))
    runner = trainer()
    runner.fit(Sums(), rows(6), ckpt_path=tmp_path / "saved")
    assert float(runner.callback_metrics["samples"]) == 4 + 2, "two samples of each of two, then the last two of six"
