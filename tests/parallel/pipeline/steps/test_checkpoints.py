"""Checkpoints of a Trainer whose module is cut into stages: whole, under the module's own names, for any number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import arclight as al
from arclight import checkpoint
from arclight.parallel import Pipeline
from arclight.parallel.pipeline.weights.load import load
from arclight.parallel.pipeline.weights.save import save

torch.set_num_threads(1)


def build(tied: bool) -> Any:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 60,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))


class Language(al.Module):
    """A model whose first and last parts may share a weight, made in memory or on the meta device."""

    def __init__(self, tied: bool, deferred: bool = False) -> None:
        super().__init__()
        self.tied, self.model = tied, None
        if not deferred:
            torch.manual_seed(3)
            self.model = build(tied)

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = build(self.tied)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def texts() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(list(torch.randint(0, 60, (32, 8), generator=generator)), 8)


def trainer(folder: Path, stages: int, steps: int, *callbacks: al.Callback) -> al.Trainer:
    torch.manual_seed(11)
    strategy: Any = Pipeline(stages, micro_batches=4, start_method="fork") if stages else "auto"
    return al.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        max_steps=steps, max_epochs=-1, default_root_dir=folder, callbacks=list(callbacks),
    )  # fmt: skip


def go(folder: Path, tied: bool, stages: int, steps: int, start: Path | None = None, deferred: bool = False) -> Path:
    """Train to step ``steps``; where the checkpoint is."""
    run = trainer(folder, stages, steps, Keep(folder / "c"))
    run.fit(Language(tied, deferred), texts(), ckpt_path=start)
    return folder / "c"


class Keep(al.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: al.Trainer, module: al.Module) -> None:
        trainer.save_checkpoint(self.path)


def weights(path: Path) -> dict[str, Tensor]:
    """Of the model in a checkpoint, whatever the number of stages it was saved by."""
    return {name: tensor + 0 for name, tensor in checkpoint.load(path)["model"].items()}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("tied", "stages", "others"),
    [
        (True, 2, (0,)),
        pytest.param(True, 4, (1, 4), marks=pytest.mark.slow),
        pytest.param(False, 4, (0, 2), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_resume_on_another_number_of_stages(
    tied: bool, stages: int, others: tuple[int, ...], tmp_path: Path
) -> None:
    steps = 2 * stages - 2
    alone = go(tmp_path / "0", tied, 0, steps)
    saved = go(tmp_path / "saved", tied, stages, steps // 2)
    assert weights(saved).keys() == weights(alone).keys()
    for number in others:
        found = go(tmp_path / f"on{number}", tied, number, steps, saved)
        assert farthest(weights(found), weights(alone)) < 5e-5  # Adam enlarges rounding: 1.1e-5 on some processors
    model = Language(tied)
    model.load_state_dict(weights(saved))
    assert (model.model.lm_head.weight is model.model.model.embed_tokens.weight) == tied


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_first_weights_of_a_model_without_memory_do_not_depend_on_stages(tied: bool, tmp_path: Path) -> None:
    one = weights(go(tmp_path / "1", tied, 1, 0, deferred=True))
    assert set(one) == set(Language(tied).state_dict())
    assert (
        0.015 < float(one["model.model.layers.0.mlp.up_proj.weight"].std()) < 0.025
    )  # as the model's configuration says
    assert float(one["model.model.norm.weight"].min()) == 1
    many = weights(go(tmp_path / "many", tied, 4 if tied else 2, 0, deferred=True))
    assert farthest(many, one) == 0


class Pretrained(Language):
    """Goes on from a folder of transformers, and leaves one."""

    def __init__(self, tied: bool, source: Path, target: Path) -> None:
        super().__init__(tied, deferred=True)
        self.source, self.target = source, target

    def on_fit_start(self) -> None:
        load(self.model, self.source)

    def on_train_end(self) -> None:
        save(self.model, self.target, model=self.model, max_shard_size="4KB")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_run_in_stages_begins_with_a_folder_of_transformers_and_ends_with_one(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(8)
    build(tied).save_pretrained(tmp_path / "source", max_shard_size="4KB")
    for stages in (1, 4):
        run = trainer(tmp_path, stages, 2)
        run.fit(Pretrained(tied, tmp_path / "source", tmp_path / f"to{stages}"), texts())
    one, four = (LlamaForCausalLM.from_pretrained(tmp_path / f"to{stages}") for stages in (1, 4))
    assert farthest(four.state_dict(), one.state_dict()) < 1e-5
    moved = farthest(LlamaForCausalLM.from_pretrained(tmp_path / "source").state_dict(), one.state_dict())
    assert 1e-3 < moved < 0.1
