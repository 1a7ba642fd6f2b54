"""Evaluation and prediction: what the steps and hooks get, in which order, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import arclight as al
from arclight.data import CombinedLoader

Make = Callable[..., al.Trainer]


def numbers(count: int, first: int = 0, **options: Any) -> DataLoader[Any]:
    rows = torch.arange(float(first), float(first + count)).reshape(-1, 1)
    return DataLoader(TensorDataset(rows), **({"batch_size": 2} | options))


class Mean(al.Module):
    """Logs the mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.log("mean", batch[0].mean())
        return batch[0]

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return batch[0].flatten() * 2


# -- steps and hooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_order_of_hooks_and_what_they_get(make_trainer: Make, loaders: int) -> None:
    called: list[Any] = []

    class Told(Mean):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if not name.startswith("on_test") and name != "test_dataloader":
                return found
            return lambda *arguments: (
                called.append((name, *(a for a in arguments if isinstance(a, int)))),
                found(*arguments),
            )[1]

        def test_dataloader(self) -> Any:
            return numbers(2) if loaders == 1 else [numbers(2), numbers(2)]

        def on_test_model_eval(self) -> None:
            super().on_test_model_eval()

        def on_test_model_train(self) -> None: ...
        def on_test_start(self) -> None: ...
        def on_test_epoch_start(self) -> None: ...
        def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
        def on_test_epoch_end(self) -> None: ...
        def on_test_end(self) -> None: ...

    make_trainer().test(Told(), verbose=False)
    batches: list[Any] = []
    for number in range(loaders):
        which = (number,) if loaders > 1 else ()
        batches += [("on_test_batch_start", 0, *which), ("on_test_batch_end", 0, *which)]
    begin = ["test_dataloader", "on_test_model_eval", "on_test_start", "on_test_epoch_start"]
    end = ["on_test_epoch_end", "on_test_end", "on_test_model_train"]
    assert called == [(name,) for name in begin] + batches + [(name,) for name in end]


def test_dataloader_idx_must_fit_the_number_of_loaders(make_trainer: Make) -> None:
    class Without(Mean):
        def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            ...

    class Needing(Mean):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            ...

    class HookWithout(Mean):
        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            ...

    two = [numbers(2), numbers(2)]
    make_trainer().test(Without(), numbers(2), verbose=False)
    make_trainer().test(Needing(), two, verbose=False)
    make_trainer().test(HookWithout(), numbers(2), verbose=False)
    with pytest.raises(RuntimeError, match=r"multiple `test_dataloader`, but no `dataloader_idx` argument in `Without"):
        make_trainer().test(Without(), two)
    with pytest.raises(RuntimeError, match=r"multiple `test_dataloader`.*HookWithout.on_test_batch_end"):
        make_trainer().test(HookWithout(), two)
    with pytest.raises(RuntimeError, match="only a single `test_dataloader`, but have included `dataloader_idx`"):
        make_trainer().test(Needing(), numbers(2))


def test_a_step_may_leave_out_what_it_does_not_need(make_trainer: Make) -> None:
    seen: list[Any] = []

    class Brief(Mean):
        def test_step(self, batch: Any) -> None:  # type: ignore[override]
            seen.append(len(batch[0]))

        def predict_step(self, *arguments: Any) -> None:
            seen.append(arguments[1:])

    make_trainer().test(Brief(), numbers(3), verbose=False)
    make_trainer().predict(Brief(), numbers(3))
    make_trainer().predict(Brief(), [numbers(1), numbers(1)])
    assert seen == [2, 1, (0,), (1,), (0, 0), (0, 1)]


def test_gradients_are_off_and_can_be_had(make_trainer: Make) -> None:
    class Tuning(Mean):
        def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            assert torch.is_inference_mode_enabled() == self.trainer.inference_mode
            assert not torch.is_grad_enabled()
            assert not self.training
            with torch.inference_mode(False), torch.enable_grad():
                self.layer(torch.ones(1, 1)).sum().backward()
            self.log("gradient", self.layer.bias.grad)

    for mode in (True, False):
        module = Tuning()
        module.layer.eval()
        assert make_trainer(inference_mode=mode).test(module, numbers(1), verbose=False) == [{"gradient": 1.0}]
        assert module.training
        assert not module.layer.training


# -- results -------------------------------------------------------------------------------------------------------------


def test_each_loader_has_its_values_and_all_have_the_epochs(make_trainer: Make) -> None:
    class Ending(Mean):
        def on_test_epoch_end(self) -> None:
            self.log("end", 5.0)

    both = make_trainer().test(Ending(), [numbers(4), numbers(2, 10)], verbose=False)
    assert both == [
        {"mean/dataloader_idx_0": 1.5, "end": 5.0},
        {"mean/dataloader_idx_1": 10.5, "end": 5.0},
    ]
    assert make_trainer().test(Ending(), numbers(4), verbose=False) == [{"mean": 1.5, "end": 5.0}]
    assert make_trainer(limit_test_batches=0).test(Ending(), numbers(4)) == []


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 1), ("max_size", 2), ("max_size_cycle", 2)])
def test_loaders_can_be_evaluated_side_by_side(make_trainer: Make, mode: Any, batches: int) -> None:
    class Beside(al.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append([None if part is None else part[0].flatten().tolist() for part in batch.values()])
            self.log("count", 1.0, reduce_fx="sum", batch_size=1)

    module, trainer = Beside(), make_trainer()
    combined = CombinedLoader({"a": numbers(2), "b": numbers(4, 10)}, mode)
    assert trainer.validate(module, combined, verbose=False) == [{"count": batches}]
    last = {"min_size": [[0, 1], [10, 11]], "max_size": [None, [12, 13]], "max_size_cycle": [[0, 1], [12, 13]]}[mode]
    assert module.seen[-1] == last
    assert trainer.num_val_batches == [1, 2]


def test_lists_of_plain_values_are_loaders_in_a_tree(make_trainer: Make) -> None:
    class Plain(al.Module):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch, batch_idx, dataloader_idx

    expected = [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1), (3, 1, 1)]]
    assert make_trainer().predict(Plain(), {"a": [0, 1], "b": [2, 3]}) == expected
    assert make_trainer().predict(Plain(), [[0, 1], {2, 3}]) == expected
    assert make_trainer().predict(Plain(), [0, 1]) == expected[0]
    with pytest.raises(TypeError, match="a dict is read as several loaders"):
        make_trainer().predict(Plain(), {"a": torch.ones(2)})


def test_evaluation_sees_the_same_data_every_time(make_trainer: Make) -> None:
    class Random(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.rand(4, 1))

    class Sampled(al.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.weight

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Sampled()
    make_trainer(max_epochs=3).fit(module, numbers(2), DataLoader(Random()))
    assert module.seen[:4] == module.seen[4:8] == module.seen[8:]
    assert len(set(module.seen)) == 4


# -- prediction ------------------------------------------------------------------------------------------------------------


def test_predictions_of_one_and_of_several_loaders(make_trainer: Make) -> None:
    one = make_trainer().predict(Mean(), numbers(3, drop_last=True))
    assert [part.tolist() for part in one] == [[0, 2], [4]]  # no sample goes without
    two = make_trainer().predict(Mean(), [numbers(2), numbers(1, 5)])
    assert [[part.tolist() for part in parts] for parts in two] == [[[0, 2]], [[10]]]
    assert make_trainer().predict(Mean(), numbers(3), return_predictions=False) is None
    assert make_trainer(limit_predict_batches=0).predict(Mean(), numbers(3)) is None
    with pytest.raises(ValueError, match=r'only supports the `CombinedLoader.mode="sequential"'):
        make_trainer().predict(Mean(), CombinedLoader([numbers(2), numbers(2)], "min_size"))


def test_predictions_come_one_by_one_and_are_not_kept(make_trainer: Make) -> None:
    made: list[int] = []

    class Counting(Mean):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            made.append(batch_idx)
            assert torch.is_inference_mode_enabled()
            return super().predict_step(batch, batch_idx)

        def on_predict_end(self) -> None:
            made.append(-1)

    module, trainer = Counting(), make_trainer()
    outputs = trainer.predict_iter(module, numbers(6))
    assert made == []
    assert next(outputs).tolist() == [0, 2]
    assert made == [0]
    assert not torch.is_inference_mode_enabled()  # the caller's code runs as it did
    assert torch.is_grad_enabled()
    assert [part.tolist() for part in outputs] == [[4, 6], [8, 10]]
    assert made == [0, 1, 2, -1]
    assert trainer.predict_loop.predictions == []
    assert module.training


def test_a_caller_may_stop_taking_predictions(make_trainer: Make) -> None:
    class Failing(al.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            raise AssertionError("stopping is not an error")

    module = Mean()
    outputs = make_trainer(Failing()).predict_iter(module, numbers(6))
    next(outputs)
    assert not module.training
    outputs.close()
    assert module.training


def test_callbacks_see_which_samples_a_prediction_is_of(make_trainer: Make) -> None:
    seen: list[Any] = []

    class Watching(al.Callback):
        def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *arguments: Any) -> None:
            seen.append((trainer.predict_loop.current_batch_indices, outputs.tolist()))

    loader = numbers(6, shuffle=True, num_workers=1)
    make_trainer(Watching()).predict(Mean(), loader)
    assert all(prediction == [2 * index for index in indices] for indices, prediction in seen)
    assert sorted(index for indices, _ in seen for index in indices) == list(range(6))
