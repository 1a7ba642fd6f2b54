"""Weight averages against a float64 reference, and where they may and may not be seen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn

import arclight as al
from arclight import checkpoint
from arclight.trainer.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging

State = dict[str, torch.Tensor]


class Normed(al.Module):
    """Parameters, statistics and a counter; notes the weights after each step and those it is evaluated with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
        self.after_steps: list[State] = []
        self.evaluated: list[State] = []
        self.dtype_ = dtype

    def copy(self) -> State:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = (part.to(self.dtype_) for part in batch)
        return (self.body(x.repeat(3, 1) + torch.arange(3)[:, None].to(x)) - y).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after_steps.append(self.copy())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.evaluated.append(self.copy())
        self.log("val/loss", 1.0)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def expected(states: list[State], share: Any) -> State:
    """The average in float64: the first state, then each next with the given share; counters are the newest."""
    average = {name: tensor.double() for name, tensor in states[0].items()}
    for update, state in enumerate(states[1:], 2):
        for name, tensor in state.items():
            weight = share(update) if tensor.is_floating_point() else 1.0
            average[name] = average[name] + weight * (tensor.double() - average[name])
    return average


def assert_close(actual: State, reference: State, tolerance: float = 1e-6) -> None:
    assert actual.keys() == reference.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor.double(), reference[name].double(), rtol=tolerance, atol=tolerance, msg=name)


def test_the_average_is_the_formula(fit: Any) -> None:
    module, ema = Normed(), EMAWeightAveraging(decay=0.9, ramp_steps=3)
    fit(module, ema, max_epochs=2)
    reference = expected(module.after_steps, lambda k: 1 - 0.9 * (1 - math.exp(-k / 3)))
    assert_close(ema.averages()["ema"], reference)
    assert ema.updates == 8
    assert not torch.allclose(reference["body.2.weight"], module.after_steps[-1]["body.2.weight"].double(), atol=1e-3)
    counter = "body.1.num_batches_tracked"
    assert ema.averages()["ema"][counter].dtype == torch.int64
    assert ema.averages()["ema"][counter] == module.after_steps[-1][counter] == 8


def test_the_plain_mean(fit: Any) -> None:
    module, mean = Normed(), WeightAveraging()
    fit(module, mean, max_epochs=1)
    stacked = torch.stack([state["body.2.weight"].double() for state in module.after_steps]).mean(0)
    torch.testing.assert_close(mean.averages()["ema"]["body.2.weight"].double(), stacked, rtol=1e-6, atol=1e-6)


def test_averages_update_at_the_configured_steps_and_epochs(fit: Any) -> None:
    module = Normed()
    fit(module, ema := EMAWeightAveraging(decay=0.5, update_every_n_steps=3, update_starting_at_step=2), max_epochs=2)
    assert_close(ema.averages()["ema"], expected([module.after_steps[i] for i in (3, 6)], lambda k: 0.5))
    module = Normed()
    by_epoch = EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=1)
    fit(module, by_epoch, max_epochs=3)
    assert_close(by_epoch.averages()["ema"], expected([module.after_steps[i] for i in (7, 11)], lambda k: 0.5))
    module = Normed()
    fit(module, accumulated := EMAWeightAveraging(decay=0.5), max_epochs=1, accumulate_grad_batches=2)
    assert accumulated.updates == 2


def test_validation_sees_the_average_and_training_never_does(fit: Any) -> None:
    with_ema, without = Normed(), Normed()
    fit(with_ema, EMAWeightAveraging(decay=0.9), max_epochs=3)
    fit(without, max_epochs=3)
    for left, right in zip(with_ema.after_steps, without.after_steps, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    for epoch, seen in enumerate(with_ema.evaluated):
        assert_close(seen, expected(with_ema.after_steps[: 4 * (epoch + 1)], lambda k: 0.1))


def test_before_the_first_update_the_model_itself_is_evaluated(fit: Any) -> None:
    module = Normed()
    fit(module, EMAWeightAveraging(update_starting_at_step=4, decay=0.5), max_epochs=2, num_sanity_val_steps=1)
    first, second = module.evaluated[1:]
    assert all(torch.equal(first[name], module.after_steps[3][name]) for name in first)
    assert not torch.equal(second["body.2.weight"], module.after_steps[7]["body.2.weight"])


def test_a_checkpoint_holds_the_model_and_beside_it_the_average(fit: Any) -> None:
    module = Normed()
    inside: dict[str, Any] = {}

    class SaveWhileEvaluating(al.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            inside["weights"] = pl_module.copy()

    saver = ModelCheckpoint(save_on_train_epoch_end=False)
    ema = EMAWeightAveraging(decay=0.9)
    fit(module, ema, saver, SaveWhileEvaluating(), max_epochs=1)
    state = checkpoint.load(saver.best_model_path)
    assert all(torch.equal(state["model"][name], module.after_steps[-1][name]) for name in state["model"])
    assert all(torch.equal(inside["weights"][name], module.after_steps[-1][name]) for name in inside["weights"])
    assert_close(state["ema"], expected(module.after_steps, lambda k: 0.1))


def test_after_fit_the_model_is_the_average(fit: Any, make_rows: Any) -> None:
    module, ema = Normed(), EMAWeightAveraging(decay=0.9)
    trainer = fit(module, ema, max_epochs=1)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in ema.averages()["ema"].items())
    with torch.no_grad():
        module.body[2].weight.zero_()
    trainer.test(module, make_rows(2), verbose=False)
    assert module.evaluated[-1]["body.2.weight"].count_nonzero() == 0, "weights a person put in are tested as they are"


def test_without_buffers_only_parameters_are_averaged(fit: Any) -> None:
    module, ema = Normed(), EMAWeightAveraging(decay=0.9, use_buffers=False)
    fit(module, ema, max_epochs=1)
    assert ema.averages()["ema"].keys() == dict(module.named_parameters()).keys()
    assert torch.equal(module.evaluated[0]["body.1.running_mean"], module.after_steps[-1]["body.1.running_mean"])


def test_failing_in_validation_leaves_the_trained_weights(fit: Any) -> None:
    class Fails(Normed):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            raise RuntimeError("no")

    module = Fails()
    with pytest.raises(RuntimeError, match="no"):
        fit(module, EMAWeightAveraging(decay=0.9), max_epochs=1)
    assert not torch.equal(module.evaluated[0]["body.2.weight"], module.after_steps[-1]["body.2.weight"])
    assert all(torch.equal(tensor, module.after_steps[-1][name]) for name, tensor in module.state_dict().items())


def test_half_precision_weights_have_a_float32_average(fit: Any) -> None:
    module, ema = Normed(torch.bfloat16), EMAWeightAveraging(decay=0.999)
    fit(module, ema, max_epochs=2)
    average = ema.averages()["ema"]
    assert average["body.2.weight"].dtype == torch.float32
    assert_close(average, expected(module.after_steps, lambda k: 0.001))
    assert module.body[2].weight.dtype == torch.bfloat16


def test_each_fit_has_its_own_average(fit: Any) -> None:
    ema = EMAWeightAveraging(decay=0.9)
    fit(Normed(), ema, max_epochs=1)
    module = Normed()
    fit(module, ema, max_epochs=1)
    assert_close(ema.averages()["ema"], expected(module.after_steps, lambda k: 0.1))


def test_a_resumed_average_goes_on_to_the_same_bits(fit: Any) -> None:
    whole = EMAWeightAveraging(decay=0.9, ramp_steps=5)
    fit(Normed(), whole, max_epochs=3)
    saver = ModelCheckpoint()
    fit(Normed(), EMAWeightAveraging(decay=0.9, ramp_steps=5), saver, max_epochs=2)
    resumed = EMAWeightAveraging(decay=0.9, ramp_steps=5)
    fit(Normed(), resumed, max_epochs=3, ckpt_path=saver.best_model_path)
    assert resumed.updates == whole.updates == 12
    for name, tensor in whole.averages()["ema"].items():
        assert torch.equal(tensor, resumed.averages()["ema"][name]), name


def test_tied_weights_are_under_both_names(fit: Any) -> None:
    class Tied(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.body[2]
            self.head = nn.Linear(4, 1)
            self.head.weight = self.body[2].weight

    module, ema = Tied(), EMAWeightAveraging(decay=0.9)
    fit(module, ema, max_epochs=1)
    average = ema.averages()["ema"]
    assert average.keys() == module.state_dict().keys()
    assert torch.equal(average["body.2.weight"], average["again.weight"])
    assert torch.equal(average["body.2.weight"], average["head.weight"])


def test_averages_by_functions_of_torch(fit: Any) -> None:
    runs = []
    for mean in (
        WeightAveraging(avg_fn=get_ema_avg_fn(0.8)),
        WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.8)),
        EMAWeightAveraging(decay=0.8),
    ):
        module = Normed()
        fit(module, mean, max_epochs=2)
        assert_close(mean.averages()["ema"], expected(module.after_steps, lambda k: 1 - 0.8))
        runs.append(mean)
    plain = WeightAveraging(avg_fn=get_swa_avg_fn())
    fit(module := Normed(), plain, max_epochs=1)
    assert_close(plain.averages()["ema"], expected(module.after_steps, lambda k: 1 / k))
    assert plain.n_averaged == 4


def test_the_average_as_a_module(fit: Any) -> None:
    module, ema = Normed(), EMAWeightAveraging(decay=0.9)
    assert ema.average_model is None
    fit(module, ema, max_epochs=1)
    model = ema.average_model
    assert isinstance(model, AveragedModel)
    assert model.n_averaged == 4
    assert_close(dict(model.module.state_dict()), ema.averages()["ema"])
    assert model.module._trainer is None, "nothing of the run is copied"


def test_checkpoints_saved_while_averages_are_swapped_in_hold_the_model(fit: Any, tmp_path: Path) -> None:
    class SaveAnywhere(al.Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "validating")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert torch.equal(pl_module.body[2].weight, ema.averages()["ema"]["body.2.weight"])
            trainer.save_checkpoint(tmp_path / "ended")

    module, ema = Normed(), EMAWeightAveraging(decay=0.9)
    fit(module, ema, SaveAnywhere(), max_epochs=1)
    for name in ("validating", "ended"):
        state = checkpoint.load(tmp_path / name)
        assert all(torch.equal(state["model"][key], module.after_steps[-1][key]) for key in state["model"])
        assert_close(state["ema"], expected(module.after_steps, lambda k: 0.1))
    resumed = EMAWeightAveraging(decay=0.9)
    whole = Normed()
    fit(whole, EMAWeightAveraging(decay=0.9), max_epochs=2)
    fit(other := Normed(), resumed, max_epochs=2, ckpt_path=tmp_path / "validating")
    assert all(torch.equal(tensor, whole.state_dict()[key]) for key, tensor in other.state_dict().items())


def test_two_averages_have_two_entries_and_the_first_is_evaluated(fit: Any) -> None:
    with pytest.raises(ValueError, match=r"would save under one name 'ema'.*entry="):
        fit(Normed(), EMAWeightAveraging(decay=0.9), WeightAveraging(), max_epochs=1)
    module, saver = Normed(), ModelCheckpoint()
    slow, quick = EMAWeightAveraging(decay=0.9), EMAWeightAveraging(decay=0.5, entry="quick")
    assert slow.state_key != quick.state_key
    fit(module, slow, quick, saver, max_epochs=2)
    assert_close(slow.averages()["ema"], expected(module.after_steps, lambda k: 0.1))
    assert_close(quick.averages()["quick"], expected(module.after_steps, lambda k: 0.5))
    assert_close(module.evaluated[0], expected(module.after_steps[:4], lambda k: 0.1))
    assert_close(dict(module.state_dict()), slow.averages()["ema"])
    assert {"ema", "quick"} <= checkpoint.load(saver.best_model_path).keys()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        WeightAveraging(avg_fn=get_swa_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())
    with pytest.raises(ValueError, match="`avg_fn` should be callable"):
        WeightAveraging(avg_fn=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decay=1\.0"):
        EMAWeightAveraging(decay=1.0)
    with pytest.raises(ValueError, match="negative"):
        EMAWeightAveraging(ramp_steps=-1)
