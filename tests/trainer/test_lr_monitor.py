"""LearningRateMonitor: the rates in the file are those the optimizer used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import arclight as al
from arclight.trainer.callbacks import LearningRateMonitor
from arclight.trainer.loggers.csv_logger import read_metrics


def with_optimizers(scripted: Any, make: Any) -> Any:
    module = scripted()
    module.configure_optimizers = lambda: make(module)
    return module


def test_each_logged_rate_is_the_one_of_that_step(fit: Any, scripted: Any) -> None:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = with_optimizers(scripted, make)
    monitor = LearningRateMonitor()
    trainer = fit(module, monitor, max_epochs=2, log_every_n_steps=2)
    logged = dict(read_metrics(trainer.run_folder.metrics)["lr-SGD"])
    assert logged == {step: module.seen_lrs[step - 1][0] for step in (2, 4, 6, 8)}
    assert logged[8] == pytest.approx(0.1 * 0.5**7)
    assert monitor.lrs == {"lr-SGD": list(logged.values())}
    assert trainer.callback_metrics["lr-SGD"] == logged[8]


def test_epochs_are_logged_where_the_scheduler_steps_by_epochs(fit: Any, scripted: Any) -> None:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    trainer = fit(with_optimizers(scripted, make), LearningRateMonitor(), max_epochs=3, log_every_n_steps=1)
    assert read_metrics(trainer.run_folder.metrics)["lr-SGD"] == [(0, 0.1), (4, 0.05), (8, 0.025)]
    trainer = fit(with_optimizers(scripted, make), LearningRateMonitor("step"), max_epochs=1, log_every_n_steps=1)
    assert [step for step, _ in read_metrics(trainer.run_folder.metrics)["lr-SGD"]] == [1, 2, 3, 4]


def test_groups_momentum_decay_and_prefix(fit: Any, scripted: Any) -> None:
    def make(module: Any) -> Any:
        groups = [
            {"params": [module.line.weight], "weight_decay": 0.2},
            {"params": [module.line.bias], "lr": 0.5, "name": "bias"},
        ]
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.99), weight_decay=0.0)

    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True, log_key_prefix="opt/")
    trainer = fit(with_optimizers(scripted, make), monitor, max_epochs=1, log_every_n_steps=4)
    metrics = {name: points[-1][1] for name, points in read_metrics(trainer.run_folder.metrics).items() if "lr" in name}
    assert metrics == {
        "opt/lr-AdamW/pg1": 0.1,
        "opt/lr-AdamW/bias": 0.5,
        "opt/lr-AdamW/pg1-momentum": 0.8,
        "opt/lr-AdamW/bias-momentum": 0.8,
        "opt/lr-AdamW/pg1-weight_decay": 0.2,
        "opt/lr-AdamW/bias-weight_decay": 0.0,
    }
    assert monitor.last_momentum_values == {"opt/lr-AdamW/pg1-momentum": 0.8, "opt/lr-AdamW/bias-momentum": 0.8}


def test_a_recipes_optimizer_is_called_by_its_rules(fit: Any, scripted: Any) -> None:
    from arclight.optim.settings import SGD, AdamW

    for settings in (AdamW(lr=0.1), SGD(lr=0.1)):
        monitor = LearningRateMonitor("step")
        made = with_optimizers(scripted, lambda module, settings=settings: settings.build(module.named_parameters()))
        fit(made, monitor, max_epochs=1, log_every_n_steps=4)
        assert {name.partition("/")[0] for name in monitor.lrs} == {f"lr-{type(settings).__name__.lower()}"}


def test_two_optimizers_of_a_kind_have_two_names(fit: Any, scripted: Any) -> None:
    module = with_optimizers(
        scripted, lambda m: [torch.optim.SGD([m.line.weight], lr=0.1), torch.optim.SGD([m.line.bias], lr=0.2)]
    )
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: [optimizer.step() for optimizer in module.optimizers()] and None
    monitor = LearningRateMonitor("step")
    fit(module, monitor, max_epochs=1, log_every_n_steps=1)
    assert monitor.lrs == {"lr-SGD": [0.1] * 4, "lr-SGD-1": [0.2] * 4}


def test_groups_that_come_later_are_logged_from_then_on(fit: Any, scripted: Any) -> None:
    class Thaw(al.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": [pl_module.line.bias], "lr": 0.7})

    module = with_optimizers(scripted, lambda m: torch.optim.SGD([m.line.weight], lr=0.1, momentum=0.5))
    monitor = LearningRateMonitor("epoch", log_momentum=True)
    fit(module, Thaw(), monitor, max_epochs=3)
    assert monitor.lrs == {"lr-SGD/pg1": [0.1, 0.1, 0.1], "lr-SGD/pg2": [0.7, 0.7]}
    assert monitor.last_momentum_values["lr-SGD/pg2-momentum"] == 0.5


def test_an_optimizer_without_a_scheduler_is_logged_by_steps_and_epochs(fit: Any, scripted: Any) -> None:
    groups = [{"params": [], "name": "line"}]

    def make(module: Any) -> Any:
        groups[0]["params"] = list(module.parameters())
        return torch.optim.ASGD(groups, lr=0.1)

    monitor = LearningRateMonitor(log_momentum=True)
    with pytest.warns(RuntimeWarning, match="some optimizers do not have momentum"):
        trainer = fit(with_optimizers(scripted, make), monitor, max_epochs=2, log_every_n_steps=3)
    assert [step for step, _ in read_metrics(trainer.run_folder.metrics)["lr-ASGD/line"]] == [0, 3, 4, 6]
    assert monitor.last_momentum_values == {"lr-ASGD/line-momentum": 0.0}


def test_wrong_use_is_refused(fit: Any, scripted: Any) -> None:
    def twins(module: Any) -> Any:
        return torch.optim.SGD([{"params": [part], "name": "half"} for part in module.parameters()], lr=0.1)

    with pytest.raises(ValueError, match="A single `Optimizer` cannot have multiple parameter groups with identical"):
        fit(with_optimizers(scripted, twins), LearningRateMonitor(), max_epochs=1)
    with pytest.raises(ValueError, match="should be `step` or `epoch` or `None`"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`Trainer` that has no logger"):
        fit({"val/score": [0.0]}, LearningRateMonitor(), logger=False)
