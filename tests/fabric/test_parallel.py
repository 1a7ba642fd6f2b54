"""Two processes: exchanges, groups of one's own, communication hooks, local steps, files that both see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import warm

from arclight.compat.lightning.collectives import SingleDeviceCollective, TorchCollective
from arclight.compat.lightning.utilities import is_shared_filesystem
from arclight.fabric.strategies import SingleDeviceStrategy
from arclight.fabric.strategies.layer_sync import TorchSyncBatchNorm

CHECKS = ("exchanges", "groups", "filesystem", "comm_hooks", "local_sgd")


def test_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("parallel_script.py")
    for done in warm.run_ranks(2, script, tmp_path, timeout=180):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"passed {check}" for check in CHECKS]


def test_alone_every_exchange_is_the_identity() -> None:
    alone, tensor = SingleDeviceCollective(), torch.ones(2)
    assert (alone.rank, alone.world_size) == (0, 1)
    assert alone.all_reduce(tensor) is alone.broadcast(tensor) is alone.reduce(tensor) is tensor
    assert alone.all_gather([], tensor) == [tensor]
    with pytest.raises(RuntimeError, match="SingleDeviceCollective` does not own a group"):
        _ = alone.group
    alone.create_group()
    with pytest.raises(RuntimeError, match="already owns a group"):
        alone.create_group()
    alone.teardown()
    with pytest.raises(RuntimeError, match="does not own a group to leave"):
        alone.teardown()
    strategy = SingleDeviceStrategy()
    assert strategy.all_gather(tensor) is strategy.reduce(tensor) is tensor
    assert is_shared_filesystem(strategy)


@pytest.mark.parametrize("operation", ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"])
def test_alone_tensors_to_be_filled_are_filled(operation: str) -> None:
    alone, sent, received = SingleDeviceCollective(), torch.arange(3.0), torch.full((3,), -1.0)
    exchange = getattr(alone, operation)
    if operation == "gather":
        result = exchange(sent, [received])
    elif operation in ("scatter", "reduce_scatter"):
        result = [exchange(received, [sent])]
    else:
        result = exchange([received], [sent] if operation == "all_to_all" else sent)
    assert result[0] is received
    assert received.tolist() == [0.0, 1.0, 2.0]
    if operation != "gather":
        with pytest.raises(ValueError, match="one process sends one tensor to itself"):
            exchange(received, [sent, sent]) if operation.endswith("scatter") else exchange([received] * 2, [sent] * 2)


def test_names_of_reductions() -> None:
    convert, ops = TorchCollective._convert_to_native_op, torch.distributed.ReduceOp
    assert convert("AvG") == ops.AVG
    assert convert(ops.MAX) == ops.MAX
    with pytest.raises(ValueError, match="op 'MEDIAN' is not a member of `ReduceOp`"):
        convert("median")
    with pytest.raises(ValueError, match="Unsupported op 1 of type int"):
        convert(1)


def test_synchronised_batch_norm_and_back() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Sequential(torch.nn.BatchNorm2d(4)))
    images = torch.randn(2, 3, 5, 5)
    model(images)
    weight, before = model[1][0].weight, {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.eval()(images)
    sync = TorchSyncBatchNorm()
    model = sync.apply(model)
    assert type(model[1][0]) is torch.nn.SyncBatchNorm
    assert model[1][0].weight is weight
    model = sync.revert(model)
    assert isinstance(model[1][0], torch.nn.modules.batchnorm._BatchNorm)
    assert not isinstance(model[1][0], torch.nn.SyncBatchNorm)
    assert torch.equal(model(images), expected)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
