"""A module that counts its batches trains on the mean over all that they count, in whatever windows and processes they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.fabric.strategies import DDPStrategy, FSDPStrategy


class Masked(al.Module):
    """A linear map whose loss is the mean over the elements that a batch marks as valid."""

    def __init__(self, tensor_weight: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.tensor_weight = nn.Linear(4, 1).double(), tensor_weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, valid = batch
        errors = (self.net(x)[..., 0] - y).square() * valid
        return errors.sum() / valid.sum().clamp(min=1)

    def batch_weight(self, batch: Any) -> float | torch.Tensor:
        valid = batch[2].sum()
        return valid if self.tensor_weight else float(valid)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, 4, generator=generator).double()
    y = x.sum(-1) + torch.randn(count, 6, generator=generator)
    valid = torch.rand(count, 6, generator=generator) < torch.linspace(0, 0.9, count)[:, None]  # the first has none
    return list(zip(x, y, valid, strict=True))


def weights_after(batch_size: int, steps: int, model: Masked, **options: Any) -> torch.Tensor:
    runner = al.Trainer(
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", **options
    )  # fmt: skip
    runner.fit(model, DataLoader(samples(16), batch_size))  # type: ignore[arg-type]
    return torch.cat([p.detach().reshape(-1).clone() for p in model.state_dict().values()])


@pytest.mark.parametrize("tensor_weight", [False, True])
def test_a_window_is_weighed_by_what_the_module_counts(tensor_weight: bool) -> None:
    whole = weights_after(8, 2, Masked())
    parts = weights_after(2, 2, Masked(tensor_weight), accumulate_grad_batches=4)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-7)
    by_samples = type("Unweighed", (Masked,), {"batch_weight": al.Module.batch_weight})
    assert not torch.allclose(weights_after(2, 2, by_samples(), accumulate_grad_batches=4), whole, atol=1e-4)


class Spectral(Masked):
    """The same with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, dtype=torch.complex128)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, valid = batch
        errors = (self.net(x.to(torch.complex128))[..., 0] - y).abs().square() * valid
        return errors.sum() / valid.sum().clamp(min=1)


def test_complex_gradients_are_weighed_by_real_numbers() -> None:
    whole = weights_after(8, 2, Spectral())
    parts = weights_after(2, 2, Spectral(), accumulate_grad_batches=4)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (DDPStrategy, 1),
        (FSDPStrategy, 2),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((DDPStrategy, 2), (FSDPStrategy, 1))),
    ],
)
def test_two_processes_equal_one(kind: Any, window: int) -> None:
    whole = weights_after(8, 2, Masked())
    strategy = kind(start_method="fork")
    parts = weights_after(4 // window, 2, Masked(), strategy=strategy, devices=2, accumulate_grad_batches=window)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-7)
