"""Summaries of models, counted by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.trainer.callbacks import ModelSummary, RichModelSummary
from arclight.trainer.summary import ModelSummary as Summary
from arclight.trainer.summary import get_human_readable_count, summarize


class TwoBranches(al.Module):
    """An own parameter, a nested branch, a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.deep = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4, bias=False)))
        self.unused = nn.BatchNorm1d(2)
        self.example_input_array = (torch.zeros(5, 3), {"extra": torch.zeros(1)})

    def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        assert not self.training, "it is looked at in evaluation mode"
        return self.deep(x) * self.scale


def test_parameters_sizes_modes_and_operations() -> None:
    model = TwoBranches()
    model.deep[1].eval()
    model.unused.weight.requires_grad = False
    summary = summarize(model, max_depth=-1)
    assert summary.layer_names == ["deep", "deep.0", "deep.1", "deep.1.0", "deep.1.1", "unused"]
    assert summary.layer_types == ["Sequential", "Linear", "Sequential", "ReLU", "Linear", "BatchNorm1d"]
    assert summary.param_nums == [32, 16, 16, 0, 16, 4]
    assert summary.in_sizes == [[5, 3], [5, 3], [5, 4], [5, 4], [5, 4], "?"]
    assert summary.out_sizes[-2:] == [[5, 4], "?"]
    assert (summary.total_parameters, summary.trainable_parameters) == (40, 38)
    assert summary.model_size == pytest.approx(160e-6)
    assert summary.total_flops == 2 * 5 * 3 * 4 + 2 * 5 * 4 * 4, "two per multiply and add of the matrix products"
    assert summary.total_training_modes == {"train": 3, "eval": 3}
    assert model.training
    assert not model.deep[1][0].training
    assert not any(module._forward_hooks for module in model.modules())


def test_depth_and_what_no_layer_holds() -> None:
    table = str(summarize(TwoBranches(), max_depth=1))
    assert re.search(r"^0 +deep +Sequential +32 +train +280 +\[5, 3\] +\[5, 4\]$", table, re.M)
    assert re.search(r"^ +other params +n/a +4 ", table, re.M)
    assert re.search(r"^40 +Total params$", table, re.M)
    assert "deep.0" not in table
    assert summarize(TwoBranches(), max_depth=2).layer_names == ["deep", "deep.0", "deep.1", "unused"]
    assert Summary(TwoBranches(), max_depth=0).layer_names == []
    with pytest.raises(ValueError, match="got -2"):
        summarize(TwoBranches(), max_depth=-2)


def test_lazy_parameters_are_known_once_an_example_ran() -> None:
    class Lazy(al.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    assert summarize(Lazy()).total_parameters == 0
    model = Lazy()
    model.example_input_array = torch.zeros(1, 3)
    assert summarize(model).total_parameters == 8


def test_a_plain_module_and_half_of_the_bytes() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False)).bfloat16()
    assert summarize(model).model_size == pytest.approx(200e-6)


def test_counts_are_readable() -> None:
    counts = {0: "0  ", 999: "999  ", 1234: "1.2 K", 2_000_000: "2.0 M", 345_600_000: "345 M", 5 * 10**15: "5,000 T"}
    assert {number: get_human_readable_count(number) for number in counts} == counts


def test_training_begins_with_the_table_on_stderr(fit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fit({"val/score": [1.0]}, ModelSummary())
    shown = capsys.readouterr()
    assert re.search(r"line +Linear +3 +train", shown.err)
    assert shown.out == ""
    fit({"val/score": [1.0]}, RichModelSummary(header_style="bold"))
    shown = capsys.readouterr()
    assert re.search(r"0 +line +Linear +3 +train", shown.err)
    assert "3 parameters, 0.000 MB" in shown.err
    assert shown.out == ""
    fit({"val/score": [1.0]}, ModelSummary(max_depth=0))
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="max_depth=-2"):
        ModelSummary(-2)


def test_a_subclass_shows_it_its_own_way(fit: Any) -> None:
    seen: dict[str, Any] = {}

    class Mine(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total_parameters: int, *numbers: Any, **options: Any) -> None:
            seen.update(dict(summary_data), total=total_parameters, **options)

    fit({"val/score": [1.0]}, Mine(mark="x"))
    assert (seen["Name"], seen["total"], seen["mark"]) == (["line"], 3, "x")
