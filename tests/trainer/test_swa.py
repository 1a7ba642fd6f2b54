"""Stochastic weight averaging against torch's own utilities."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.trainer.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging


class Normed(al.Module):
    """Batch normalization and a schedule; notes rates and weights as it goes."""

    def __init__(self, interval: str = "epoch", norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Linear(4, 1))
        self.interval = interval
        self.rates: list[float] = []
        self.ends: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates += [self.trainer.optimizers[0].param_groups[0]["lr"]] if torch.is_grad_enabled() else []
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.ends.append({name: p.detach().clone() for name, p in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


def data() -> DataLoader[Any]:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def train(make_trainer: Any, module: al.Module, *callbacks: al.Callback, ckpt_path: Any = None, **settings: Any) -> Any:
    trainer = make_trainer(*callbacks, **{"max_epochs": 5, "limit_val_batches": 0, **settings})
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer


def test_the_average_its_statistics_and_the_rates(make_trainer: Any) -> None:
    module = Normed()
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=3, annealing_epochs=2, annealing_strategy="linear")
    trainer = train(make_trainer, module, swa)
    assert swa.swa_start == 2
    assert swa.n_averaged == 3
    for name, parameter in module.named_parameters():
        mean = torch.stack([end[name].double() for end in module.ends[2:]]).mean(0)
        torch.testing.assert_close(parameter.double(), mean, rtol=1e-6, atol=1e-6)
    reference = copy.deepcopy(module)
    update_bn(data(), reference.body)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, dict(reference.named_buffers())[name], rtol=1e-5, atol=1e-6)
    # the module's own schedule until the third epoch; then in two even steps from where it was to 0.05
    by_epoch = module.rates[::3]
    assert by_epoch == pytest.approx([0.1, 0.05, 0.025, 0.0375, 0.05])
    assert isinstance(trainer.lr_scheduler_configs[0].scheduler, SWALR)
    assert module.body[1].momentum == 0.1
    assert module.training


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_ends_with_the_same_bits(make_trainer: Any, stop: int) -> None:
    def swa() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.05, swa_epoch_start=3, annealing_epochs=3)

    whole, saver = Normed(), ModelCheckpoint(save_top_k=-1, filename="{epoch}")
    train(make_trainer, whole, swa(), saver, max_epochs=6)
    resumed, again = Normed(), swa()
    path = f"{saver.dirpath}/epoch={stop}.ckpt"
    train(make_trainer, resumed, again, ckpt_path=path, max_epochs=6)
    assert again.n_averaged == 4
    assert resumed.rates == whole.rates[3 * (stop + 1) :]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_checkpoint_has_the_trained_weights_and_the_average_with_its_statistics(make_trainer: Any) -> None:
    module, saver = Normed(), ModelCheckpoint(every_n_epochs=0, save_last=True)
    train(make_trainer, module, StochasticWeightAveraging(0.05, swa_epoch_start=2), saver)
    state = checkpoint.load(saver.last_model_path)
    for name, tensor in module.ends[-1].items():
        assert torch.equal(state["model"][name], tensor), name
    average = dict(module.state_dict())
    assert state["ema"].keys() == average.keys()
    assert all(torch.equal(tensor, average[name]) for name, tensor in state["ema"].items())
    assert not torch.equal(state["model"]["body.1.running_mean"], state["ema"]["body.1.running_mean"])


def test_an_unfinished_average_has_an_entry_beside_the_trained_weights(make_trainer: Any) -> None:
    module, saver = Normed(), ModelCheckpoint(save_top_k=-1, filename="{epoch}")
    exponential = EMAWeightAveraging(decay=0.5, entry="swa")
    train(make_trainer, module, StochasticWeightAveraging(0.05, swa_epoch_start=2), exponential, saver, max_epochs=4)
    state = checkpoint.load(f"{saver.dirpath}/epoch=2.ckpt")
    assert "ema" not in state
    for name, average in state["swa_unfinished"].items():
        mean = (module.ends[1][name].double() + module.ends[2][name].double()) / 2
        torch.testing.assert_close(average.double(), mean, rtol=1e-6, atol=1e-6)
    assert not torch.equal(state["swa"]["body.0.weight"], state["swa_unfinished"]["body.0.weight"])


def test_swa_handles_step_schedulers_and_several_parameter_groups(make_trainer: Any) -> None:
    with pytest.warns(UserWarning, match="SWA is currently only supported every epoch"):
        train(make_trainer, Normed("step"), StochasticWeightAveraging(0.05, swa_epoch_start=1), max_epochs=2)
    module = Normed(norm=False)
    module.configure_optimizers = lambda: torch.optim.SGD(
        [{"params": [module.body[0].weight], "lr": 0.1}, {"params": [module.body[2].weight], "lr": 0.2}]
    )
    swa = StochasticWeightAveraging([0.3, 0.4], swa_epoch_start=0.5, annealing_epochs=0, avg_fn=lambda a, w, n: w)
    trainer = train(make_trainer, module, swa, max_epochs=4)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.3, 0.4]
    assert [group["swa_lr"] for group in trainer.optimizers[0].param_groups] == [0.3, 0.4]
    assert all(torch.equal(parameter, module.ends[-1][name]) for name, parameter in module.named_parameters())


def test_without_limits_on_epochs(make_trainer: Any) -> None:
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=2)
    train(make_trainer, Normed(), swa, max_epochs=-1, max_steps=9)
    assert swa.n_averaged == 2
    with pytest.raises(ValueError, match="`swa_epoch_start` as a float is not supported when `max_epochs=-1`"):
        train(make_trainer, Normed(), StochasticWeightAveraging(0.05), max_epochs=-1, max_steps=9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_epoch_start": 0}, ">0 integer or a float between 0 and 1"),
        ({"swa_epoch_start": 1.5}, ">0 integer or a float between 0 and 1"),
        ({"swa_lrs": [0.2, 1]}, "positive float, or a list of positive floats"),
        ({"swa_lrs": -0.1}, "positive float, or a list of positive floats"),
        ({"avg_fn": "mean"}, "should be callable"),
        ({"device": 0}, "torch.device or a str"),
        ({"annealing_strategy": "steps"}, "'cos' or 'linear'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})


def test_one_optimizer(make_trainer: Any) -> None:
    module = Normed()
    module.automatic_optimization = False
    module.configure_optimizers = lambda: [torch.optim.SGD([p], lr=0.1) for p in module.parameters()]
    with pytest.raises(ValueError, match="1 `optimizer`, not 6"):
        train(make_trainer, module, StochasticWeightAveraging(0.05))


def test_a_checkpoint_within_the_fit_loads_as_what_was_validated(make_trainer: Any) -> None:
    class Validated(Normed):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", (self(batch[0]) - batch[1]).square().mean())

    saver = ModelCheckpoint(monitor="val/loss", save_top_k=-1)
    trainer = make_trainer(StochasticWeightAveraging(0.05, swa_epoch_start=2), saver, max_epochs=4)
    trainer.fit(Validated(), data(), data())
    assert len(saver.best_k_models) == 4
    for path, score in saver.best_k_models.items():
        assert trainer.validate(Validated(), data(), ckpt_path=path)[0]["val/loss"] == pytest.approx(float(score))
        loaded = Validated.load_from_checkpoint(path)
        assert trainer.validate(loaded, data())[0]["val/loss"] == pytest.approx(float(score))
