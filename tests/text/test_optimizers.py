"""Language models with optimizers of several kinds: on plans, what one process trains; checkpoints that open on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.optim import SGD, AdamW, Constant, Mixed, NorMuon
from arclight.parallel import Plan
from arclight.parallel.strategy import PlanStrategy
from arclight.text import ByteTokenizer, LanguageModel
from arclight.text.settings import LanguageTask

SIZES = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48}
MIXED = Mixed(
    groups=(
        SGD(pattern=r"layers\.0\..*norm", lr=0.1),
        NorMuon(pattern=r"layers\.", precision="float32", lr=0.01, others=AdamW(eps=1e-4)),
    ),
    default=AdamW(lr=0.001, eps=1e-4),
)


class Windows(al.DataModule):
    tokenizer = ByteTokenizer()

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 255, (32, 17), generator=torch.Generator().manual_seed(5))
        rows = TensorDataset(ids)
        return DataLoader(rows, self.batch_size, collate_fn=lambda items: _batch(torch.stack([i[0] for i in items])))


def _batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = ids[:, 1:]
    return {"tokens": ids[:, :-1], "labels": labels, "bytes": torch.full((len(ids),), labels.shape[1])}


def fit(folder: Path, plan: Plan | None = None, ckpt: Any = None) -> dict[str, Any]:
    """Four steps of eight windows; what the checkpoint of the end holds."""
    al.seed_everything(5)
    settings = LanguageTask(overrides=SIZES, sampling=None, optimizer=MIXED, schedule=Constant())
    strategy = PlanStrategy(plan, start_method="fork") if plan is not None else "auto"
    devices, shares = (plan.world_size, plan.data_parallel) if plan is not None else (1, 1)
    trainer = al.Trainer(
        max_steps=4, default_root_dir=folder, enable_progress_bar=False, accelerator="cpu", logger=False, devices=devices,
        strategy=strategy, callbacks=[al.ModelCheckpoint(dirpath=folder / "kept", every_n_train_steps=2, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(LanguageModel(settings, ByteTokenizer().vocab_size), datamodule=Windows(8 // shares), ckpt_path=ckpt)
    return checkpoint.load(kept(folder, 4))


def kept(folder: Path, step: int) -> Path:
    return next(path for path in (folder / "kept").iterdir() if checkpoint.inspect(path).step == step)


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    entries = state["optimizers"][0]["state"]
    moments = {f"{name}/{key}": value for name, own in entries.items() for key, value in own.items()}
    return state["model"] | moments


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of a run of one process, and what it ends with."""
    folder = tmp_path_factory.mktemp("one")
    return folder, flat(fit(folder))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, micro_batches=4),
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in (Plan(dp_shard=2), Plan(tp=2))),
    ],
    ids=lambda plan: f"pp{plan.pp}-shard{plan.dp_shard}-tp{plan.tp}",
)
def test_plans_train_as_one_process_does(tmp_path: Path, plan: Plan, alone: Any) -> None:
    folder, one = alone
    spread = flat(fit(tmp_path / "spread", plan))
    again = flat(fit(tmp_path / "again", None, kept(tmp_path / "spread", 2)))
    back = flat(fit(tmp_path / "back", plan, kept(folder, 2)))
    assert any(name.endswith("neuron_sq") for name in one)
    for found in (spread, again, back):
        assert found.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(
                found[name].float(), value.float(), rtol=1e-3, atol=5e-5, msg=lambda t, n=name: f"{n} {t}"
            )
