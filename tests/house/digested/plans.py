"""Digest language models on one process and on plans of two ranks.

`digests` runs `values`: losses, metrics, weights and optimizers of a debug Llama and of one with experts, and runs that were resumed from a
checkpoint of another plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.parallel import Plan, PlanStrategy, initialize
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text import build_model

SMALL = {"vocab_size": 48, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48}
LENGTH, GLOBAL_BATCH = 16, 8


class Language(al.Module):
    def __init__(self, name: str = "llama3-debug") -> None:
        super().__init__()
        self.name = name
        self.model: Any = None
        self.runner: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            sizes = SMALL if "moe" not in self.name else SMALL | {"layers": 2, "head_dim": 16}
            self.model = build_model(self.name, **sizes)
            if not next(self.model.parameters()).is_meta:
                initialize(self.model, torch.initial_seed())

    def split_batch(self, batch: Any) -> Split:
        (tokens,) = batch
        labels = torch.where(tokens[:, 1:] % 5 == 0, -100, tokens[:, 1:])
        return (tokens[:, :-1],), {"positions": None}, labels

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = output.full_tensor() if isinstance(output, DTensor) else output
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def batch_weight(self, batch: Any) -> Tensor:
        return (batch[0][:, 1:] % 5 != 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total, count = batch_loss(self, batch)
        self.log("loss", total / count, on_step=True, on_epoch=True, sync_dist=True, batch_size=int(count))
        return total / count

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        total, count = batch_loss(self, batch)
        self.log("val_loss", total / count, batch_size=int(count))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Recorder(al.Callback):
    """Record the losses of all ranks, and save checkpoints in the middle and at the end."""

    def __init__(self, folder: Path, save_at: int) -> None:
        self.folder, self.save_at, self.losses = folder, save_at, []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(trainer.strategy.all_gather_object(float(loss.detach())))
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.folder / "middle")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end")

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def loader(batch_size: int, count: int, shuffle: bool) -> DataLoader[Any]:
    tokens = torch.randint(0, 48, (count, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(tokens.cumsum(1) % 48), batch_size, shuffle=shuffle)


def train(
    folder: Path, plan: Plan | None = None, name: str = "llama3-debug", ckpt: Any = None, steps: int = 6, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(11)
    strategy: Any = "auto" if plan is None else PlanStrategy(plan, start_method="fork", sequence_length=LENGTH)
    recorder = Recorder(folder, 3)
    trainer = al.Trainer(
        accelerator="cpu", strategy=strategy, default_root_dir=folder, gradient_clip_val=0.5, logger=False, max_steps=steps,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[recorder], limit_val_batches=2,
        **options,
    )  # fmt: skip
    share = 1 if plan is None else plan.dp_replicate * plan.dp_shard
    module = Language(name)
    trainer.fit(
        module, loader(GLOBAL_BATCH // share, 40, True), loader(GLOBAL_BATCH // share, 16, False), ckpt_path=ckpt
    )
    state = checkpoint.load(folder / "end")
    return {
        "losses": recorder.losses,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "model": state["model"],
        "optimizers": state["optimizers"],
    }


def values(folder: Path) -> dict[str, Any]:
    plans = {
        "one": None, "dp_replicate": Plan(dp_replicate=2), "dp_shard": Plan(dp_shard=2), "tp": Plan(tp=2), "pp": Plan(pp=2), "cp": Plan(cp=2),
        "zero_bubble": Plan(pp=2, schedule="ZBVZeroBubble", micro_batches=4),
    }  # fmt: skip
    found: dict[str, Any] = {name: train(folder / name, plan) for name, plan in plans.items()}
    found["experts"] = train(folder / "experts", None, "qwen3-moe-debug")
    found["ep"] = train(folder / "ep", Plan(dp_shard=2, ep=2), "qwen3-moe-debug")
    found["bf16"] = train(folder / "bf16", Plan(dp_shard=2), precision="bf16-mixed")
    found["accumulation"] = train(folder / "acc", Plan(pp=2), accumulate_grad_batches=2, steps=3)
    for saved, plan in (("dp_shard", None), ("pp", Plan(tp=2)), ("tp", Plan(dp_shard=2))):
        found[f"{saved}-resumed-elsewhere"] = train(folder / f"{saved}-2", plan, ckpt=folder / saved / "middle")
    found["sharded-checkpoint"] = checkpoint.load(folder / "dp_shard" / "middle")["model"]
    return found
