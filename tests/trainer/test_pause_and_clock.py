"""A paused and resumed fit has the bits of an uninterrupted one; clock, weights and moments can be set by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.models import Classifier, NoisyData
from tests.trainer.same import assert_same
from torch import nn

from arclight import Callback, Trainer, seed_everything
from arclight.checkpoint import CheckpointError
from arclight.optim.schedules import cosine, lambda_schedule
from arclight.trainer.callbacks.pause import Pause
from arclight.trainer.checkpoint.loading import WeightsMisfitError
from arclight.trainer.checkpoint.named_state import (
    gather_optimizer_state,
    gather_parameters,
    load_optimizer_state,
    load_parameters,
    optimizer_state_names,
)
from arclight.trainer.loop.schedulers import StepSync

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}


def trainer_of(path: Path, *callbacks: Callback, **options: Any) -> Trainer:
    given = {**QUIET, "max_epochs": -1, "default_root_dir": path, **options}
    return Trainer(callbacks=list(callbacks), **given)


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first fit of a process imports modules that draw a number of Python's generator."""
    trainer_of(tmp_path_factory.mktemp("first"), max_steps=1).fit(Classifier(), datamodule=NoisyData())


def in_one_piece(path: Path, steps: int, **options: Any) -> dict[str, Any]:
    seed_everything(3, verbose=False)
    pause = Pause(steps)
    trainer_of(path, pause, **options).fit(Classifier(), datamodule=NoisyData())
    assert pause.state is not None
    return pause.state


# 10 batches an epoch: parts that end within epochs, at their ends, and within windows' epochs.
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 4}])
@pytest.mark.parametrize("parts", [(1, 5, 4, 7), pytest.param((10, 7), marks=pytest.mark.slow)])
def test_a_paused_fit_equals_an_uninterrupted_one(
    tmp_path: Path, parts: tuple[int, ...], options: dict[str, Any]
) -> None:
    whole = in_one_piece(tmp_path, sum(parts), **options)
    seed_everything(3, verbose=False)
    pause = Pause()
    trainer, module, data = trainer_of(tmp_path, pause, **options), Classifier(), NoisyData()
    for steps in parts:
        before = trainer.global_step
        pause.steps = steps
        trainer.fit(module, datamodule=data, ckpt_path=pause.state)
        assert trainer.global_step == before + steps
        torch.manual_seed(99)  # what others draw in between is nobody's business
        assert pause.state is not None
    assert_same(pause.state["state_dict"], whole["state_dict"])
    assert_same(pause.state["optimizer_states"], whole["optimizer_states"])
    assert_same(pause.state["lr_schedulers"], whole["lr_schedulers"])
    assert_same(pause.state["loops"], whole["loops"])


def test_a_pause_does_not_end_the_fit(tmp_path: Path) -> None:
    """Limits end a fit as ever, and then there is nothing to go on from."""
    pause = Pause(50)
    trainer = trainer_of(tmp_path, pause, max_steps=7)
    trainer.fit(Classifier(), datamodule=NoisyData())
    assert trainer.global_step == 7
    assert pause.state is None


def test_loggers_have_all_rows_of_all_parts(tmp_path: Path) -> None:
    def rows(name: str, parts: list[int]) -> str:
        seed_everything(3, verbose=False)
        pause = Pause()
        trainer = trainer_of(tmp_path / name, pause, logger=True, log_every_n_steps=1)
        module, data = Classifier(), NoisyData()
        for steps in parts:
            pause.steps = steps
            trainer.fit(module, datamodule=data, ckpt_path=pause.state)
        (file,) = (tmp_path / name).rglob("metrics.csv")
        return file.read_text()

    assert rows("parts", [4, 9, 3]) == rows("whole", [16])


def test_a_checkpoint_in_memory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="what is in memory has no state_dict"):
        trainer_of(tmp_path).fit(Classifier(), datamodule=NoisyData(), ckpt_path={"loops": {}})


class SetClock(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.clock = StepSync(trainer.run_state)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.clock.set(self.step)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)


def of_step(optimizer: torch.optim.Optimizer) -> Any:
    return lambda_schedule(optimizer, cosine, total_steps=100, warmup=10, final=0.1)


def recursive(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


CLOCKS = {of_step: 30, one_cycle: 6, recursive: 2}
"""Schedules, and the clock that each is quickly tried with."""


class Scheduled(Classifier):
    schedule: Any

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("schedule", "clock"),
    [
        pytest.param(schedule, clock, marks=() if clock == own else pytest.mark.slow)
        for schedule, own in CLOCKS.items()
        for clock in CLOCKS.values()
    ],
)
def test_the_clock_gives_the_rates_of_its_step(tmp_path: Path, schedule: Any, clock: int) -> None:
    """A fit of 6 steps joins others at step ``clock``: ahead, at the same step, and set back."""
    pause, module, data = Pause(6), Scheduled(), NoisyData()
    module.schedule = schedule
    trainer = trainer_of(tmp_path, pause)
    trainer.fit(module, datamodule=data)
    trainer.callbacks.insert(0, SetClock(clock))
    pause.steps = 1
    trainer.fit(module, datamodule=data, ckpt_path=pause.state)
    assert trainer.global_step == clock + 1

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=1e-2)
    scheduler = schedule(optimizer)
    for _ in range(clock + 1):
        optimizer.step()
        scheduler.step()
    (group,) = trainer.optimizers[0].param_groups
    assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert group["betas"] == optimizer.param_groups[0]["betas"]


def test_an_equal_clock_changes_nothing(tmp_path: Path) -> None:
    states = []
    for callbacks in ([], [SetClock(6)]):
        seed_everything(3, verbose=False)
        pause, module, data = Pause(6), Classifier(), NoisyData()
        trainer = trainer_of(tmp_path, pause)
        trainer.fit(module, datamodule=data)
        trainer.callbacks[:0] = callbacks
        trainer.fit(module, datamodule=data, ckpt_path=pause.state)
        assert pause.state is not None
        states.append(pause.state)
    assert_same(states[0]["optimizer_states"], states[1]["optimizer_states"])
    assert_same(states[0]["lr_schedulers"], states[1]["lr_schedulers"])


def test_weights_are_set_by_name() -> None:
    module = Classifier()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    load_parameters(module, {"net.0.weight": torch.ones(16, 8), "net.1.running_mean": torch.full((16,), 2.0)})
    assert module.net[0].weight.unique().tolist() == [1.0]
    assert module.net[1].running_mean.unique().tolist() == [2.0]
    assert torch.equal(module.net[4].weight, before["net.4.weight"])
    with pytest.raises(WeightsMisfitError, match=r"no weight net\.0\.wight"):
        load_parameters(module, {"net.4.weight": torch.ones(2, 16), "net.0.wight": torch.ones(16, 8)})
    with pytest.raises(WeightsMisfitError, match=r"has shape \(16, 8\), given was \(8, 16\)"):
        load_parameters(module, {"net.4.weight": torch.ones(2, 16), "net.0.weight": torch.ones(8, 16)})
    assert torch.equal(module.net[4].weight, before["net.4.weight"]), "a refused set of weights leaves all as it was"


class Moments(Callback):
    """Give an optimizer moments from outside before its first step."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.before = {name: value.clone() for name, value in pl_module.state_dict().items()}
        for state, value in (("exp_avg", 0.25), ("exp_avg_sq", 4.0)):
            names = {name: torch.full_like(p, value) for name, p in pl_module.named_parameters()}
            load_optimizer_state(trainer.lightning_module, trainer.optimizers, state, names, steps=1000)
        with pytest.raises(WeightsMisfitError, match="no optimizer keeps momentum_buffer"):
            load_optimizer_state(
                trainer.lightning_module,
                trainer.optimizers,
                "momentum_buffer",
                {"net.0.weight": torch.ones(16, 8)},
                steps=1,
            )
        self.after = {name: value.clone() for name, value in pl_module.state_dict().items()}


def test_moments_are_set_by_name(tmp_path: Path) -> None:
    """The first step with given moments is that of an AdamW that has done a thousand."""
    pause, moments, module = Pause(1), Moments(), Classifier(lr=0.0)
    trainer = trainer_of(tmp_path, pause, moments)
    trainer.fit(module, datamodule=NoisyData())
    assert_same(moments.before, moments.after)
    names = [name for name, _ in module.named_parameters()]
    assert optimizer_state_names(trainer.lightning_module, trainer.optimizers, "exp_avg") == names
    assert optimizer_state_names(trainer.lightning_module, trainer.optimizers, "momentum") == []
    averages = dict(
        gather_optimizer_state(trainer.lightning_module, trainer.strategy, trainer.optimizers, "exp_avg", names)
    )
    for name, parameter in module.named_parameters():
        own = trainer.optimizers[0].state[parameter]
        assert own["step"].item() == 1001
        assert torch.equal(averages[name], own["exp_avg"])
        assert averages[name] is not own["exp_avg"]
    weights = dict(gather_parameters(trainer.lightning_module, trainer.strategy, ["net.0.weight"]))
    module.net[0].weight.data.zero_()
    assert weights["net.0.weight"].any(), "what is taken is a copy"
