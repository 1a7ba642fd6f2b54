"""Replicas of a plan that train independently: against the same schedule by hand, resumed between exchanges. Real processes over gloo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.fabric.distributed.optimizer_names import key_by_name
from arclight.parallel import Plan, PlanError, PlanStrategy, initialize
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text import build_model
from arclight.trainer.callbacks import DiLoCo

CLIP, RATE, BATCH, EVERY = 0.5, 0.02, 8, 2
EPS = 1e-4  # else float32 roundings of gradients near 0 are steps


def small(family: str = "llama3") -> Any:
    sizes = {"vocab_size": 24, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "std": 0.2}
    model = build_model(f"{family}-debug", **sizes).double()
    initialize(model, 5)
    return model


def data() -> Tensor:
    """Ten global batches, of which every process takes its part."""
    return torch.randint(0, 24, (10 * BATCH, 9), generator=torch.Generator().manual_seed(7)).cumsum(1) % 24


def labels_of(tokens: Tensor) -> Tensor:
    """Samples count differently."""
    return torch.where(tokens[:, 1:] % 3 == 0, -100, tokens[:, 1:])


class Language(al.Module):
    def __init__(self, kind: str = "adam", family: str = "llama3") -> None:
        super().__init__()
        self.kind = kind
        self.model = small(family)
        self.runner: Any = None

    def own(self, batch: Any) -> Tensor:
        share = self.trainer.strategy.distributed_sampler_kwargs
        return batch[0].chunk(share["num_replicas"])[share["rank"]]

    def split_batch(self, batch: Any) -> Split:
        tokens = self.own(batch)
        return (tokens[:, :-1],), {"positions": None}, labels_of(tokens)

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = output.full_tensor() if isinstance(output, DTensor) else output
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def batch_weight(self, batch: Any) -> Tensor:
        return (labels_of(self.own(batch)) != -100).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total, count = batch_loss(self, batch)
        self.log("loss", total / count, on_step=False, on_epoch=True, batch_size=int(count))
        return total / count

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=RATE)
        return torch.optim.AdamW(self.parameters(), lr=RATE, eps=EPS, fused=True)


class Even(Language):
    """Counts its batches alike."""

    batch_weight = al.Module.batch_weight


class Recorder(al.Callback):
    """Every process's replica at the end and what was logged, and a checkpoint on the way."""

    def __init__(self, folder: Path, save_at: int) -> None:
        self.folder, self.save_at = folder, save_at

    def on_train_batch_end(self, trainer: al.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.save_at and trainer.window.count == 0:
            trainer.save_checkpoint(self.folder / "state")

    def on_train_end(self, trainer: al.Trainer, module: Any) -> None:
        end = {name: whole(value).clone() for name, value in module.model.state_dict().items()}
        state = {"weights": end, "loss": float(trainer.callback_metrics.get("loss", 0.0))}
        checkpoint.save(self.folder / f"end-{trainer.global_rank}", state)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


POOLS = {count: Ranks(count) for count in (2, 4)}


@pytest.fixture(scope="module", autouse=True)
def _pools() -> Iterator[None]:
    yield
    for ranks in POOLS.values():
        ranks.close()


def fit(
    folder: Path, plan: Plan, *callbacks: Any, module: Any = None, save_at: int = -1, ckpt: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """Eight steps, or ``max_steps``: what each process records."""
    callbacks = (*callbacks, Recorder(folder, save_at))
    POOLS[plan.world_size](train, folder, plan, callbacks, module or Language(), ckpt, options)
    return [checkpoint.load(folder / f"end-{rank}") for rank in range(plan.world_size)]


def train(rank: int, folder: Path, plan: Plan, callbacks: Any, module: Any, ckpt: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    trainer = al.Trainer(
        accelerator="cpu", strategy=PlanStrategy(plan), precision="64-true", default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
        callbacks=list(callbacks), **{"max_steps": 8, "gradient_clip_val": CLIP, **options},
    )  # fmt: skip
    module = copy.deepcopy(module)  # tensors that come through a pipe lie in memory of all ranks
    trainer.fit(module, DataLoader(TensorDataset(data()), BATCH), ckpt_path=ckpt)


def by_hand(steps: int, window: int, family: str) -> tuple[list[dict[str, Tensor]], float]:
    """Two models of one process each, the outer step written out; and the mean loss of all tokens of the run."""
    models = [small(family), small(family)]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS) for model in models]
    anchor = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in anchor.items()}
    batches, seen, counted = data().split(BATCH), 0.0, 0
    for step in range(steps):
        for replica, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            halves = [batch.chunk(2)[replica] for batch in batches[step * window : (step + 1) * window]]
            totals = [
                cross_entropy(model(half[:, :-1]).flatten(0, 1), labels_of(half).flatten(), reduction="sum")
                for half in halves
            ]
            count = sum(int((labels_of(half) != -100).sum()) for half in halves)
            optimizer.zero_grad()
            (sum(totals) / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            seen, counted = seen + sum(float(total.detach()) for total in totals), counted + count
        if (step + 1) % EVERY == 0:
            parts = [dict(model.named_parameters()) for model in models]
            for name, old in anchor.items():
                gradient = old - (parts[0][name].detach() + parts[1][name].detach()) / 2
                speed[name] = 0.9 * speed[name] + gradient
                anchor[name] = old - 0.7 * (gradient + 0.9 * speed[name])
                for part in parts:
                    part[name].data.copy_(anchor[name])
    return [{name: value.detach() for name, value in model.named_parameters()} for model in models], seen / counted


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert wanted.keys() <= found.keys()  # of buffers too
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


def test_an_exchange_after_every_step_of_sgd_is_ddp(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_clip_val": None, "max_steps": 4}
    wanted = fit(tmp_path / "ddp", Plan(dp_replicate=2), module=Even("sgd"), **options)
    diloco = DiLoCo(1, outer_lr=1.0, outer_momentum=0.0)
    found = fit(
        tmp_path / "independent", Plan(dp_replicate=2, replicas="independent"), diloco, module=Even("sgd"), **options
    )
    assert_same(found[0]["weights"], wanted[0]["weights"], 1e-8)  # norms compute in float32
    assert_same(found[0]["weights"], found[1]["weights"])


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ({}, 2), pytest.param({"dp_shard": 2}, 2, marks=pytest.mark.slow),
        *(pytest.param(sizes, 1, marks=pytest.mark.slow) for sizes in ({"tp": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2})),
    ],
    ids=str,
)  # fmt: skip
def test_replicas_train_as_models_of_one_process_by_hand(tmp_path: Path, sizes: dict[str, int], window: int) -> None:
    """Batches that count differently and clipped gradients too; resumed between two exchanges with the same bits."""
    plan, steps = Plan(dp_replicate=2, replicas="independent", **sizes), 3 if window > 1 else 5
    options = {"max_steps": steps, "accumulate_grad_batches": window}
    family = "qwen3-moe" if plan.ep > 1 else "llama3"
    wanted, loss = by_hand(steps, window, family)
    found = fit(tmp_path / "a", plan, DiLoCo(EVERY), module=Language(family=family), save_at=steps - 2, **options)
    for rank, process in enumerate(found):
        assert_same(process["weights"], wanted[rank * 2 // plan.world_size], 2e-6)  # weights of batches are float32
        assert process["loss"] == pytest.approx(loss, abs=1e-6)
    name = "layers.0.attention.wq.weight" if "layers.0.attention.wq.weight" in wanted[0] else next(iter(wanted[0]))
    assert not torch.equal(found[0]["weights"][name], found[-1]["weights"][name])
    module, state_at = Language(family=family), tmp_path / "a" / "state"
    resumed = fit(tmp_path / "b", plan, DiLoCo(EVERY), module=module, ckpt=state_at, **options)
    for process, before in zip(resumed, found, strict=True):
        assert_same(process["weights"], before["weights"])
    state = checkpoint.load(tmp_path / "a" / "state")
    own = state["callbacks"]["DiLoCo"]
    for key, moments in key_by_name(state["optimizers"][0])["state"].items():  # all of one replica
        (number,) = [n for n, k in enumerate(state["optimizers"][0]["param_groups"][0]["param_names"]) if k == key]
        assert torch.equal(moments["exp_avg"], own["optimizers"][0][number]["exp_avg"][0])
    assert all(torch.equal(value, own["anchor"][key]) for key, value in state["model"].items() if key in own["anchor"])


@pytest.mark.slow
def test_a_replica_cut_by_fsdp_over_tensor_parallelism_is_saved(tmp_path: Path) -> None:
    """Two cuts along one dimension, behind that of the replicas; one replica shows it in four processes."""
    plan, options = Plan(dp_shard=2, tp=2, replicas="independent"), {"max_steps": 2}
    found = fit(tmp_path / "a", plan, DiLoCo(2), save_at=1, **options)
    resumed = fit(tmp_path / "b", plan, DiLoCo(2), ckpt=tmp_path / "a" / "state", **options)
    assert_same(resumed[0]["weights"], found[0]["weights"])
    state = checkpoint.load(tmp_path / "a" / "state")["callbacks"]["DiLoCo"]
    moments = state["optimizers"][0][0]["exp_avg"]
    assert moments.shape == (1, *next(iter(state["anchor"].values())).shape)


@pytest.mark.parametrize("sizes", [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_another_number_of_replicas_begins_at_the_anchor(tmp_path: Path, sizes: dict[str, int]) -> None:
    fit(tmp_path / "a", Plan(dp_replicate=2, replicas="independent", **sizes), DiLoCo(EVERY), save_at=3, max_steps=3)
    anchor = checkpoint.load(tmp_path / "a" / "state")["model"]
    plan = Plan(dp_shard=2, replicas="independent")
    found = fit(tmp_path / "b", plan, DiLoCo(EVERY), ckpt=tmp_path / "a" / "state", max_steps=3)
    assert_same({f"model.{name}": value for name, value in found[0]["weights"].items()}, anchor)


def test_unsupported_replicas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r'replicas = "independent" is not done for pipelines yet.*set pp = 1'):
        Plan(dp_replicate=2, pp=2, replicas="independent")
    with pytest.raises(PlanError, match="choose one of synchronous, independent"):
        Plan(replicas="alone")  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r'keeps them alike in every step: .*replicas="independent" in a plan'):
        fit(tmp_path, Plan(dp_replicate=2), DiLoCo(3))
