"""Models that lose weights while they train."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import arclight as al
from arclight import checkpoint
from arclight.trainer.callbacks import ModelPruning


class Net(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Linear(2, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.two(torch.relu(self.one(batch[0]))) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def zeros(module: nn.Module) -> int:
    return sum(int((parameter == 0).sum()) for parameter in module.parameters())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pruning_fn": "l1_unstructured", "amount": 0.5}, 16),  # of 24 weights and 9 biases
        ({"pruning_fn": "random_unstructured", "amount": 5}, 5),
        ({"pruning_fn": prune.L1Unstructured, "amount": 3}, 3),
        ({"pruning_fn": "l1_unstructured", "amount": 0.25, "use_global_unstructured": False, "parameter_names": ["weight"]}, 6),
        (
            {"pruning_fn": "ln_structured", "amount": 2, "use_global_unstructured": False, "parameter_names": ["weight"],
             "pruning_dim": 1, "pruning_norm": 2},
            18,  # both columns of the first weight, two of eight of the second
        ),
        ({"pruning_fn": "l1_unstructured", "amount": lambda epoch: 0}, 0),
        ({"pruning_fn": "l1_unstructured", "apply_pruning": lambda epoch: False}, 0),
    ],
)  # fmt: skip
def test_pruning_zeroes_the_requested_number_of_weights(fit: Any, options: Any, expected: int) -> None:
    net = Net()
    assert zeros(net) == 0
    fit(net, ModelPruning(use_lottery_ticket_hypothesis=False, **options), max_epochs=1)
    assert zeros(net) == expected
    assert not prune.is_pruned(net), "masks are gone"


def test_each_epoch_prunes_what_is_left_and_masks_may_stay(fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    callback = ModelPruning(
        "l1_unstructured",
        parameters_to_prune=[(net.one, "weight")],
        amount=0.5,
        make_pruning_permanent=False,
        use_lottery_ticket_hypothesis=False,
        verbose=2,
    )
    with caplog.at_level(logging.INFO, logger="arclight"):
        fit(net, callback, max_epochs=2)
    assert "weight_orig" in dict(net.one.named_parameters())
    assert int((net.one.weight_mask == 0).sum()) == 12
    told = [message for message in caplog.messages if message.startswith("Applied")]
    assert told[0] == "Applied `L1Unstructured`. Pruned: 0/16 (0.00%) -> 8/16 (50.00%)"
    assert told[3].endswith("with amount=0.5. Pruned: 8 (50.00%) -> 12 (75.00%)")


@pytest.mark.parametrize("resampled", [False, True])
def test_a_lottery_ticket_starts_again(fit: Any, resampled: bool) -> None:
    net, trained = Net(), Net()
    start = net.one.weight.detach().clone()
    for one, ticket in ((net, True), (trained, False)):
        callback = ModelPruning(
            "l1_unstructured",
            parameters_to_prune=[(one.one, "weight")],
            make_pruning_permanent=False,
            use_lottery_ticket_hypothesis=ticket,
            resample_parameters=resampled,
        )
        fit(one, callback, max_epochs=1)
    assert torch.equal(net.one.weight_orig, start) != resampled
    assert not torch.equal(net.one.weight_orig, trained.one.weight_orig)


def test_after_validation_training_goes_on(fit: Any) -> None:
    net = Net()
    net.validation_step = lambda batch, batch_idx: None
    fit(net, ModelPruning("l1_unstructured", prune_on_train_epoch_end=False, amount=0.5), max_epochs=2)
    assert zeros(net) >= 16


def test_settings_that_do_not_go_together() -> None:
    net, stranger = Net(), nn.Linear(1, 1)
    cases: list[tuple[Any, str]] = [
        ({"pruning_fn": "magic"}, "magic isn't available"),
        ({"pruning_fn": 3}, "expected to be a str in"),
        ({"pruning_fn": "random_structured"}, "`pruning_dim` should be provided"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "`pruning_norm` should be provided"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "is supported with `use_global_unstructured=True`"),
        ({"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False}, "only supported with"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, "any of .0, 1, 2., got 3"),
        ({"pruning_fn": "l1_unstructured", "amount": "half"}, "`amount` should be provided"),
        ({"pruning_fn": "l1_unstructured", "parameter_names": ["gain"]}, r"gain isn't in \('weight', 'bias'\)"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            ModelPruning(**options)
    with pytest.raises(ValueError, match=r"missing modules: .Linear.*missing parameters: .'gain'"):
        ModelPruning.sanitize_parameters_to_prune(net, [(stranger, "weight"), (net.one, "gain")])
    with pytest.raises(ValueError, match="list of tuple"):
        ModelPruning.sanitize_parameters_to_prune(net, [("one", "weight")])  # type: ignore[list-item]


@pytest.mark.parametrize("permanent", [True, False])
def test_checkpoints_saved_under_pruning_masks_hold_them_unless_permanent(
    fit: Any, tmp_path: Any, permanent: bool
) -> None:
    class SaveInLastEpoch(al.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                assert prune.is_pruned(pl_module)
                trainer.save_checkpoint(tmp_path / "saved")
                trainer.save_checkpoint(tmp_path / "weights", weights_only=True)

    net = Net()
    callback = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=permanent)
    fit(net, callback, SaveInLastEpoch(), max_epochs=2)
    plain = {f"{layer}.{name}" for layer in ("one", "two") for name in ("weight", "bias")}
    for name in ("saved", "weights"):
        found = set(checkpoint.load(tmp_path / name)["model"])
        assert found == (plain if permanent else {f"{name}_{part}" for name in plain for part in ("orig", "mask")})
