"""A model may call its own parts what stages call theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from arclight.parallel.pipeline import StageModule, split


class Named(nn.Module):
    """Layers, a parameter and a buffer of the whole with names that mean something of a stage, and one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        for name in ("number", "parts", "cuts"):
            self.add_module(name, nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.shared = nn.ModuleDict({"parts": nn.Linear(8, 8), "sends": nn.LayerNorm(8)})
        self.sends = nn.Parameter(torch.randn(8))
        self.register_buffer("receives", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.number, self.parts, self.cuts, self.shared["parts"], self.shared["sends"]):
            x = layer(x) + self.receives
        return x * self.sends


@pytest.mark.parametrize("frontend", ["slice", "trace"])
def test_parts_of_a_model_may_have_any_names(frontend: Literal["slice", "trace"], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Named().double(), torch.randn(4, 8, dtype=torch.float64)
    (wanted := model(x)).square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pipe = split(model, (x,), stages=3, frontend=frontend)
    found = pipe(x)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    names: set[str] = set()
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters():
            assert stage.get_parameter(name) is parameter
            assert torch.equal(parameter.grad, gradients[name])
            names.add(name)
        assert not stage.load_state_dict(stage.state_dict()).missing_keys
    assert names == set(gradients)
    last: Any = pipe.stages[-1]
    assert last.sends is last.get_parameter("sends")
    assert [stage.extra_repr().split(",")[0].split(" of ")[0] for stage in pipe.stages] == [
        "stage 0", "stage 1", "stage 2",
    ]  # fmt: skip
    pipe.save(tmp_path / "saved")
    with torch.no_grad():
        for stage in pipe.stages:
            for parameter in stage.parameters():
                parameter.zero_()
    pipe.load(tmp_path / "saved")
    assert torch.equal(pipe(x), wanted)
    pipe.stages[0].float()
    assert {p.dtype for p in pipe.stages[0].parameters()} == {torch.float32}


def test_a_name_that_nobody_has_is_unknown_as_ever() -> None:
    stage = split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.ones(1, 2),), stages=2).stages[0]
    assert isinstance(stage, StageModule)
    assert (stage.number, list(stage.parts), len(stage.receives), len(stage.sends)) == (0, ["0"], 0, 1)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = stage.other
    assert not hasattr(StageModule.__new__(StageModule), "number")
