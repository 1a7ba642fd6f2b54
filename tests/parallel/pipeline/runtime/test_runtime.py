"""`Pipe.on`: how batches are cut, what losses are the mean of, how outputs come back, and what a step costs in messages."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.processes import run
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from arclight.parallel import PlanError
from arclight.parallel.pipeline import Pipe, Reducer, split
from arclight.parallel.pipeline.runtime.batch_splitting import REPLICATE, merge_outputs, split_arguments

WIDTH = 6


class Several(nn.Module):
    """Takes several arguments of which some are for all samples, and returns several things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, table: Tensor, *, scales: dict[str, Tensor], flag: bool = True) -> dict[str, Any]:
        hidden = self.second(self.first(x).tanh() * table.mean(0))
        hidden = hidden * scales["rows"] + scales["columns"].transpose(0, 1)
        out = self.third(hidden.tanh()) if flag else hidden
        return {"out": out, "pair": (out.sum(1), hidden.detach()), "total": out.square().sum(), "flag": flag}


def arguments(samples: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(samples)
    x, rows, columns = (torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3))
    table = torch.randn(11, WIDTH, dtype=torch.float64, generator=generator)
    return (x, table), {"scales": {"rows": rows[:, :1], "columns": columns.T.contiguous()}, "flag": True}


SPEC = {1: "replicate", "scales": {"rows": 0, "columns": 1}}
MERGED = {"out": 0, "pair": (0, 0), "total": "sum", "flag": 0}


def summed(output: dict[str, Any], targets: Any) -> tuple[Tensor, int]:
    return output["total"], len(output["out"])


def several(rank: int) -> None:
    whole = Several().double()
    for schedule, stages in (("1F1B", 2), ("1F1B", 3), ("ZBVZeroBubble", 3)):
        args, kwargs = arguments(7)
        pipe = split(copy.deepcopy(whole), (args, kwargs), stages=stages, policy=even_cuts)
        alone = stages == 3
        group = dist.new_group([0]), dist.new_group([1])
        runner = pipe.on(
            group[rank] if alone else None, schedule=schedule, micro_batches=3, loss=summed, chunks=SPEC, outputs=MERGED
        )
        for samples in (7, 5):
            args, kwargs = arguments(samples)
            wanted = whole(*args, **kwargs)
            whole.zero_grad()
            (wanted["total"] / samples).backward()
            for parameter in runner.parameters():
                parameter.grad = None
            result = runner.step(*args, outputs="last", **kwargs)
            assert (result.outputs is not None) == (alone or rank == 1)
            for stage in runner.stages.values():
                for name, parameter in stage.named_parameters():
                    torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
            found = runner.evaluate(*args, outputs="everywhere", **kwargs).outputs
            assert list(found) == list(wanted)
            assert found["flag"] is True
            torch.testing.assert_close(found["total"], wanted["total"].detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(found["out"], wanted["out"].detach(), rtol=1e-12, atol=1e-14)
            assert isinstance(found["pair"], tuple)
            torch.testing.assert_close(found["pair"], tuple(x.detach() for x in wanted["pair"]), rtol=1e-12, atol=1e-14)


def messages(rank: int) -> None:
    """A step in which nothing is new has one collective, of two numbers; the store is not asked."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    x = torch.ones(8, WIDTH)
    runner = split(model, (x,), stages=2, policy=even_cuts).on(micro_batches=4, loss=lambda o, t: (o.sum(), o.numel()))
    runner.step(x)
    group, board = dist.group.WORLD, runner.engine._board
    assert board is not None
    before, turns = group._get_sequence_number_for_group(), board._turn
    for _ in range(3):
        runner.step(x)
    with_messages = group._get_sequence_number_for_group() - before
    exchanged = 4 * 2  # each micro-batch goes forth on one process and back on the other
    assert with_messages in (3, 3 * (1 + exchanged))  # with or without what is sent from one to one
    assert board._turn == turns
    runner.step(x[:6])
    assert board._turn == turns + 1


@pytest.mark.parametrize("what", [several, messages])
def test_on_two_processes(what: Any, tmp_path: Path) -> None:
    run(2, tmp_path, what)


# -- cutting -------------------------------------------------------------------------------------------------------


def test_the_first_tensor_that_is_too_small_decides_and_smaller_ones_are_refused() -> None:
    x, eight = torch.arange(3), torch.zeros(8)
    cut, reason = split_arguments(((x,), {"scale": 2.0, "point": torch.tensor(1.0)}, x + 3), 4)
    assert [(args[0].tolist(), targets.tolist()) for args, _, targets in cut] == [([0], [3]), ([1], [4]), ([2], [5])]
    assert all(kwargs["scale"] == 2.0 and kwargs["point"] == 1.0 for _, kwargs, _ in cut)
    assert reason == "0 has 3 samples"
    cut, reason = split_arguments(((torch.arange(5),), {"twice": torch.arange(10)}, None), 2)
    assert [(args[0].tolist(), kwargs["twice"].tolist(), targets) for args, kwargs, targets in cut] == [
        ([0, 1, 2], [0, 1, 2, 3, 4, 5], None),
        ([3, 4], [6, 7, 8, 9], None),
    ]
    assert not reason
    with pytest.raises(
        ValueError,
        match=r"mask has 2 samples in dimension 0 and 0 has 8: the number of micro-batches \(4\) cannot be reduced",
    ):
        split_arguments(((eight,), {"mask": torch.zeros(2)}, None), 4)
    with pytest.raises(ValueError, match="targets has 9 samples in dimension 0 and 0 has 8"):
        split_arguments(((eight,), {}, torch.zeros(9)), 4)
    with pytest.raises(ValueError, match="0 has no samples"):
        split_arguments(((torch.zeros(0, 3),), {}, None), 4)
    with pytest.raises(PlanError, match="'mask' is cut, but there is no such argument among 0, 'x', 'targets'"):
        split_arguments(((eight,), {"x": 1}, None), 2, {"mask": 0})
    with pytest.raises(PlanError, match="x has 1 dimensions and cannot be cut along dimension 1"):
        split_arguments(((), {"x": eight}, None), 2, {"x": 1})
    with pytest.raises(PlanError, match="'all' of x, which is a Tensor"):
        split_arguments(((), {"x": eight}, None), 2, {"x": "all"})


@pytest.mark.parametrize("lengths", [(2, 5, 3), (4,)], ids=["several", "one"])
def test_packed_sequences_are_refused_unless_each_micro_batch_gets_all_of_it(lengths: tuple[int, ...]) -> None:
    packed = pack_sequence([torch.ones(n, 2) for n in lengths], enforce_sorted=False)
    for value, chunks in ((packed, {}), ({"inner": [packed]}, {}), (packed, {"x": 0})):
        with pytest.raises(PlanError, match="x holds a PackedSequence"):
            split_arguments(((), {"x": value}, torch.zeros(4)), 2, chunks)
    cut, _ = split_arguments(((), {"x": packed}, torch.zeros(4)), 2, {"x": REPLICATE})
    assert [kwargs["x"].batch_sizes.tolist() for _, kwargs, _ in cut] == 2 * [packed.batch_sizes.tolist()]


def test_outputs_of_micro_batches_are_merged_by_their_reducers() -> None:
    parts = [{"a": torch.ones(n, 2) * n, "n": torch.tensor(float(n)), "same": None} for n in (1, 3)]
    found = merge_outputs(parts, {"a": 0, "n": "mean"}, [1, 3])
    assert found["a"].shape == (4, 2)
    assert found["n"] == 2.5
    assert found["same"] is None
    assert merge_outputs([torch.ones(2), torch.ones(2)], "sum", [1, 3]).tolist() == [2, 2]
    assert merge_outputs([3, 4], Reducer(10, lambda one, other: one + other), [1, 1]) == 17
    with pytest.raises(PlanError, match="gave a number each, which cannot be merged along a dimension"):
        merge_outputs(parts, 0, [1, 3])
    with pytest.raises(PlanError, match="micro-batches gave 1 and others"):
        merge_outputs([1, 2], 0, [1, 1])
    with pytest.raises(PlanError, match="outputs = 'max' is not known"):
        merge_outputs([torch.ones(2)] * 2, "max", [1, 1])


class Averaged(nn.Module):
    """Gives the mean of its samples, which lie along dimension 1; the table is for all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x).tanh() * table.mean(0)).mean()
        return found


def test_means_of_outputs_are_weighted_by_the_samples_that_were_cut() -> None:
    """Micro-batches of 3 and 2 samples: neither the table's rows nor the first dimension count them."""
    model, table, x = Averaged().double(), torch.randn(4, WIDTH).double(), torch.randn(3, 5, WIDTH).double()
    runner = split(copy.deepcopy(model), (table, x), stages=2).on(
        schedule="GPipe", micro_batches=2, chunks={0: "replicate", 1: 1}, outputs="mean"
    )
    torch.testing.assert_close(runner.evaluate(table, x).outputs, model(table, x).detach(), rtol=1e-12, atol=0)


# -- losses --------------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Sequential, Pipe, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    return model, split(copy.deepcopy(model), (x,), stages=2, policy=even_cuts), x


@pytest.mark.parametrize("kind", ["token_mean", "micro_mean", "sum"])
def test_reduction_selects_the_mean_of_the_loss(kind: Any) -> None:
    model, pipe, x = small()
    pieces = [model(some).square() for some in x.tensor_split(3)]
    wanted = {
        "token_mean": model(x).square().mean(),
        "micro_mean": torch.stack([piece.mean() for piece in pieces]).mean(),
        "sum": model(x).square().sum(),
    }[kind]
    wanted.backward()
    runner = pipe.on(micro_batches=3, loss=lambda out, _: (out.square().sum(), out.numel()), reduction=kind)
    for times in (1, 2):
        result = runner.step(x)
        assert float(result.loss) == pytest.approx(float(wanted.detach()), rel=1e-13)
        for stage in pipe.stages:
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(
                    parameter.grad, times * model.get_parameter(name).grad, rtol=1e-12, atol=1e-15
                )


def masked_mean(out: Tensor, counts: Tensor) -> Tensor:
    """A mean of nothing is NaN, and so is its gradient, as of losses that are written by hand."""
    return (out.square()[:, 0] * counts).sum() / counts.sum()


@pytest.mark.parametrize("outputs", ["nowhere", "last"])
def test_micro_batches_that_count_nothing_leave_the_loss_of_the_others(outputs: Any) -> None:
    model, pipe, x = small()
    counts = torch.tensor([0, 0, 0, 1, 0, 1, 1], dtype=torch.float64)
    wanted = masked_mean(model(x), counts)
    wanted.backward()
    runner = pipe.on(micro_batches=3, loss=masked_mean, weight=torch.sum)
    assert float(runner.evaluate(x, targets=counts).loss) == pytest.approx(float(wanted.detach()), rel=1e-13)
    result = runner.step(x, targets=counts, outputs=outputs)
    assert float(result.loss) == pytest.approx(float(wanted.detach()), rel=1e-13)
    assert float(result.count) == 3
    if outputs == "last":
        assert result.outputs.shape == (7, 1)
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_a_mean_of_what_is_not_known_is_refused_and_so_are_options_that_do_not_fit() -> None:
    _, pipe, x = small()
    with pytest.raises(PlanError, match="what it is the mean of is not known"):
        pipe.on(micro_batches=3, loss=lambda out, _: out.square().mean()).step(x)
    with pytest.raises(PlanError, match="the loss of a micro-batch is a Tensor"):
        pipe.on(micro_batches=3, loss=lambda out, _: out).step(x)
    with pytest.raises(PlanError, match="reduction = 'mean' is not known; choose one of token_mean"):
        pipe.on(reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a weight is for reduction = 'token_mean'"):
        pipe.on(reduction="sum", weight=len)
    with pytest.raises(PlanError, match="an input requires a gradient"):
        pipe.on(loss=lambda out, _: (out.sum(), 1)).step(x.clone().requires_grad_())
    with pytest.raises(PlanError, match="no pipeline schedule 'ring'"):
        pipe.on(schedule="ring")
    with pytest.raises(PlanError, match="micro_batches is 0"):
        pipe.on(micro_batches=0)


def test_fewer_samples_than_micro_batches_warn_once() -> None:
    _, pipe, x = small()
    runner = pipe.on(micro_batches=9, loss=lambda out, _: (out.sum(), len(out)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runner.step(x)
        runner.step(x[:2])
    told = [str(one.message) for one in said]
    assert [text for text in told if text.startswith("Reducing")] == [
        "Reducing micro-batches from 9 to 7: 0 has 7 samples"
    ]


def test_the_state_of_all_stages_is_that_of_the_model() -> None:
    model, pipe, _ = small()
    runner = pipe.on()
    state = runner.state_dict()
    assert list(state) == list(model.state_dict())
    runner.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    assert all(torch.equal(value, 2 * model.state_dict()[name]) for name, value in runner.state_dict().items())
