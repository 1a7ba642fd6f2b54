"""Experts shared out among real processes (gloo): the numbers are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import warm

from arclight.parallel import Plan, PlanError
from arclight.parallel.layers.expert_parallel import check_experts, expert_layers
from arclight.parallel.model.parallelize import check
from arclight.text import build_model
from arclight.text.model.moe import MoE, MoEConfig

CHECKS = (
    "uneven",
    "all_on_one",
    "fixed_sizes",
    "too_small",
    "recomputed",
    "beside_fsdp",
    "whole_model",
    "dropped_alike",
)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_on_several_processes(size: int) -> None:
    for done in warm.run_ranks(size, Path(__file__).with_name("expert_script.py"), timeout=600):
        assert done.returncode == 0, done.stderr
        assert [line.removeprefix("passed ") for line in done.stdout.split("\n") if line] == list(CHECKS)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(dp_shard=4, ep=4), "0 has 6 experts, which ep = 4 does not divide"),
        (Plan(tp=4), "0 has 10 hidden features in each expert, which tp = 4 does not divide"),
        (Plan(dp_shard=12, ep=3), "0 has 14 features, which dp_shard \\* cp / ep = 4 does not divide"),
    ],
)
def test_experts_that_a_plan_does_not_divide_are_refused(plan: Plan, says: str) -> None:
    model = torch.nn.Sequential(MoE(MoEConfig(experts=6, top_k=1, hidden=10), 14, 0.1, 0.1))
    assert [name for name, _, _ in expert_layers(model)] == ["0"]
    check_experts(model, Plan(dp_shard=6, tp=5, ep=3))
    with pytest.raises(PlanError, match=says):
        check_experts(model, plan)


def test_a_capacity_without_exchange_is_refused() -> None:
    with pytest.raises(PlanError, match="expert_capacity bounds"):
        Plan(dp_shard=2, expert_capacity=64)


def test_a_model_without_experts_has_none_to_share_out() -> None:
    with pytest.raises(PlanError, match="the model has none: set ep = 1"):
        check(build_model("llama3-debug", layers=1), Plan(dp_shard=2, ep=2))
