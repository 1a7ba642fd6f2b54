"""Pipelines beside each other that share weights or experts, where one of them meets another batch than the others do."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import arclight as al
from arclight.parallel import Pipeline, Plan, PlanError, PlanStrategy, initialize
from arclight.parallel.pipeline.runtime.engine import LruCache
from arclight.parallel.step_protocol import batch_loss, check_samples
from arclight.text import build_model

STEPS, TIMEOUT = 3, datetime.timedelta(seconds=60)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> int:
        return index


class OfReplica(al.Module):
    """Reads what ``batch(step, replica)`` gives the replica that this process is of."""

    def batch(self, step: int, replica: int) -> Tensor:
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader[Any]:
        replica = self.trainer.strategy.mesh.data_rank
        return DataLoader(Numbers(), 1, collate_fn=lambda steps: self.batch(steps[0], replica))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layers(OfReplica):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh()))).double()

    def batch(self, step: int, replica: int) -> Tensor:
        length = 5 if (step, replica) == (1, 1) else 4
        return torch.randn(4, length, 8, generator=torch.Generator().manual_seed(10 * step + replica)).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()


class Mixture(OfReplica):
    runner: Any = None

    def __init__(self, samples: int = 4) -> None:
        super().__init__()
        self.samples = samples
        sizes = {"vocab_size": 32, "layers": 2, "dim": 32, "hidden": 32, "heads": 4, "kv_heads": 2}
        self.model = build_model("qwen3-moe-debug", **sizes, moe={"balance_loss": 0.0}).double()
        initialize(self.model, 3)

    def batch(self, step: int, replica: int) -> Tensor:
        other = (step, replica) == (1, 1)
        shape = (self.samples, 9) if other and self.samples != 4 else (4, 11 if other else 9)
        return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(10 * step + replica))

    def split_batch(self, batch: Tensor) -> Any:
        return (batch[:, :-1],), {"positions": None}, batch[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), torch.tensor(targets.numel())

    def batch_weight(self, batch: Tensor) -> Tensor:
        return torch.tensor(batch[:, 1:].numel())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total, count = batch_loss(self, batch)
        return total / count


class Frozen(Mixture):
    """A model whose first stage has no trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.model.tok_embeddings.requires_grad_(False)
        self.model.layers["0"].requires_grad_(False)


def fit(module: OfReplica, strategy: Any) -> dict[str, Tensor]:
    trainer = al.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    return dict(module.state_dict())


def in_one_process(module: Any) -> dict[str, Tensor]:
    """The same steps over the batches of both replicas."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        batches = [module.batch(step, replica) for replica in range(2)]
        counts = [float(b[..., 1:].numel()) if isinstance(module, Mixture) else 1.0 for b in batches]
        optimizer.zero_grad()
        losses = [module.training_step(batch, 0) * count for batch, count in zip(batches, counts, strict=True)]
        (sum(losses) / sum(counts)).backward()
        optimizer.step()
    return dict(module.state_dict())


SHARDS = Pipeline(stages=2, shards=2, schedule="1F1B", micro_batches=2, start_method="fork", timeout=TIMEOUT)
EXPERTS = Plan(pp=2, dp_shard=2, ep=2, micro_batches=2)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Layers, SHARDS),
        *(
            pytest.param(kind, PlanStrategy(EXPERTS, start_method="fork", timeout=TIMEOUT), marks=pytest.mark.slow)
            for kind in (Mixture, Frozen)
        ),
    ],
)
def test_a_shape_that_one_replica_meets_holds_nobody_up(kind: type[OfReplica], strategy: Any) -> None:
    found, expected = fit(kind(), strategy), in_one_process(kind())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_fewer_micro_batches_where_experts_meet_in_each_are_refused() -> None:
    with pytest.raises(
        ProcessRaisedException,
        match=r"batches of 1 and of 2 micro-batches, which wait for one another in each \(ep > 1",
    ):
        fit(Mixture(samples=1), PlanStrategy(EXPERTS, start_method="fork", timeout=TIMEOUT))


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(PlanError, match="a batch without samples"):
        check_samples(((torch.zeros(0, 4),), {}, torch.zeros(0)))


def test_shapes_that_were_not_asked_for_the_longest_are_forgotten() -> None:
    newest, made = LruCache[int](2), []

    def make(value: int) -> int:
        made.append(value)
        return value

    for value in (1, 2, 1, 3, 1, 2):
        assert newest.get(value, lambda value=value: make(value)) == value
    assert made == [1, 2, 3, 2]
    assert len(newest) == 2
