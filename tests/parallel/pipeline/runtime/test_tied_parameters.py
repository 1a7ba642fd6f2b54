"""A language model whose embeddings are its output too, trained in stages: as in one process, and one of it in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import arclight as al
from arclight import checkpoint
from arclight.parallel import Plan, initialize
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.parallel.strategy import PlanStrategy
from arclight.text import build_model


class Language(al.Module):
    """A module as runners want it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        sizes = {"vocab_size": 64, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48}
        self.model = build_model("llama3-debug", **sizes, tied=True).double()
        initialize(self.model, 3)
        self.runner: Any = None

    def split_batch(self, batch: Tensor) -> Split:
        return (batch[:, :-1],), {"positions": None, "documents": None}, batch[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total = cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, torch.tensor(targets.numel())

    def batch_weight(self, batch: Tensor) -> Tensor:
        return torch.tensor(batch[:, 1:].numel())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total, count = batch_loss(self, batch)
        return total / count

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.folder)


def trained(folder: Path, **options: Any) -> dict[str, Tensor]:
    """The model's state after three clipped steps."""
    tokens = torch.randint(0, 64, (24, 17), generator=torch.Generator().manual_seed(0))
    trainer = al.Trainer(
        accelerator="cpu", max_steps=3, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(Language(folder), DataLoader(tokens, batch_size=8))
    state: dict[str, Tensor] = checkpoint.load(folder)["model"]
    return state


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)])
def test_a_tied_decoder_trains_in_stages_as_in_one_process(schedule: str, tmp_path: Path) -> None:
    wanted = trained(tmp_path / "one", devices=1)
    plan = PlanStrategy(Plan(pp=2, schedule=schedule, micro_batches=4), start_method="fork")
    found = trained(tmp_path / "two", devices=2, strategy=plan)
    assert found.keys() == wanted.keys()
    assert torch.equal(found["model.tok_embeddings.weight"], found["model.output.weight"])
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
