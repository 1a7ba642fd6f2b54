"""Modules that went through torch.compile: a trainer takes them, and they can be had as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.compat.lightning.utilities import to_uncompiled
from arclight.trainer.loop.verification import from_compiled


class Small(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)))


def test_a_compiled_module_trains_to_the_same_weights(make_trainer: Callable[..., al.Trainer]) -> None:
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    plain, compiled = Small(), torch.compile(Small(), backend=backend)
    for model in (plain, compiled):
        make_trainer(max_epochs=1).fit(model, batches())
    assert seen, "nothing was compiled"
    torch.testing.assert_close(plain.layer.weight, compiled.layer.weight)
    predictions = make_trainer().predict(compiled, batches())
    torch.testing.assert_close(torch.cat(predictions), plain(torch.cat(batches())).detach())


class Adversaries(al.Module):
    """Two optimizers that take turns, each with the other's parameters switched off."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)
        self.seen: list[list[bool]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.two(self.one(batch)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.seen.append([parameter.grad is not None for parameter in self.parameters()])
            for parameter in self.parameters():
                parameter.grad = None
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.one, self.two)]


@pytest.mark.slow
def test_optimizers_take_turns_in_a_compiled_step(make_trainer: Callable[..., al.Trainer]) -> None:
    plain, module = Adversaries(), Adversaries()
    make_trainer(max_epochs=1).fit(plain, batches())
    make_trainer(max_epochs=1).fit(torch.compile(module, backend="eager"), batches())
    assert module.seen == plain.seen == [[True, True, False, False], [False, False, True, True]] * 3
    assert all(parameter.requires_grad for parameter in module.parameters())
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_it_can_be_had_as_it_was() -> None:
    module = Small()
    module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    own = module.test_step
    compiled = torch.compile(module, backend="eager")
    assert from_compiled(compiled) is module
    assert module._compiler_ctx is not None
    assert "training_step" in vars(module)
    assert "validation_step" not in vars(module), "it has none"
    steps = module.training_step
    assert from_compiled(compiled).training_step is steps, "compiled twice"
    assert to_uncompiled(compiled) is module
    assert module._compiler_ctx is None
    assert "training_step" not in vars(module)
    assert module.test_step is own
    from_compiled(compiled)
    assert to_uncompiled(module)._compiler_ctx is None


def test_other_things_are_refused() -> None:
    with pytest.raises(ValueError, match=r"required to be a `OptimizedModule`. Found a `Small`"):
        from_compiled(Small())
    with pytest.raises(ValueError, match=r"expected to be a compiled LightningModule. Found a `Linear`"):
        from_compiled(torch.compile(nn.Linear(1, 1), backend="eager"))
    with pytest.raises(ValueError, match=r"required to be a compiled LightningModule. Found a non-compiled"):
        to_uncompiled(Small())
    with pytest.raises(ValueError, match=r"must either be an instance of OptimizedModule or LightningModule"):
        to_uncompiled(nn.Linear(1, 1))
