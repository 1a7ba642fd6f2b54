"""Linear layers of a language model that are trained with rounding on two ranks: DDP, FSDP and plans of shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import arclight as al
from arclight.deploy import Int8, LowBit, QuantizationAwareTraining, WeightOnly, convert
from arclight.deploy.settings import Quantization, check_plan
from arclight.fabric.distributed.sharding import full_tensor
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies.fsdp import FSDPStrategy
from arclight.parallel import Plan
from arclight.parallel.strategy import PlanStrategy
from arclight.text import build_model

RECIPE = WeightOnly(bits=4, min_sqnr_db=-50)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


def texts() -> list[Tensor]:
    return list(torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0)))


class Language(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = build_model(
            "llama3-debug", layers=2, dim=64, heads=2, kv_heads=1, hidden=96, vocab_size=64
        )  # fmt: skip

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0, momentum=0.9)


def fit(strategy: Any, steps: int, recipe: Quantization = RECIPE, precision: Any = "32-true", **options: Any) -> Any:
    module, alone = Language(), strategy == "auto"
    trainer = al.Trainer(
        max_steps=steps, devices=1 if alone else 2, strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[QuantizationAwareTraining(recipe)], precision=precision,
    )  # fmt: skip
    trainer.fit(module, DataLoader(texts(), batch_size=8 if alone else 4), **options)
    return trainer, module


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value).detach().clone() for name, value in module.state_dict().items()}


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp by layers": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "shards": lambda: PlanStrategy(Plan(dp_shard=2)),
    "shards, recomputed": lambda: PlanStrategy(Plan(dp_shard=2, activation_checkpointing="full")),
    "replicas": lambda: PlanStrategy(Plan(dp_replicate=2)),
}


def train_on_rank(
    rank: int, name: str, recipe: Quantization, precision: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    _, module = fit(STRATEGIES[name](), 3, recipe, precision)
    converted = convert(module.model, example_inputs=torch.stack(texts()[:2]))
    assert len(converted.quantized_layers) == 15  # the output, too
    return whole_state(module.model), {name: value.clone() for name, value in converted.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "recipe", "precision"),
    [
        ("shards", RECIPE, "bf16-mixed"),
        ("replicas", RECIPE, "32-true"),
        *(
            pytest.param(name, recipe, precision, marks=pytest.mark.slow)
            for name in STRATEGIES
            for recipe, precision in ((RECIPE, "32-true"), (LowBit(min_sqnr_db=-50), "32-true"))
        ),
    ],
)
def test_ranks_train_what_one_process_does(ranks: Ranks, name: str, recipe: Quantization, precision: str) -> None:
    (first, program), (second, other) = ranks(train_on_rank, name, recipe, precision)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(torch.equal(value, other[name]) for name, value in program.items())
    alone = whole_state(fit("auto", 3, recipe, precision)[1].model)
    start = Language().model.state_dict()
    moved = max(float((alone[name] - start[name]).abs().max()) for name in start)
    assert max(float((first[name] - alone[name]).abs().max()) for name in alone) < 0.02 * moved
    whole = Language().model
    callback = QuantizationAwareTraining(recipe)
    holder = Language()
    callback.replace_layers(holder)
    holder.model.load_state_dict(first)
    wanted = convert(holder.model, example_inputs=torch.stack(texts()[:2])).state_dict()
    assert set(whole.state_dict()) <= set(wanted)
    assert all(torch.equal(value, program[name]) for name, value in wanted.items())


def resume_on_rank(rank: int, name: str, folder: Path) -> list[str]:
    _, whole = fit(STRATEGIES[name](), 4)
    fit(STRATEGIES[name](), 2)[0].save_checkpoint(folder / "half.ckpt")
    _, resumed = fit(STRATEGIES[name](), 4, ckpt_path=folder / "half.ckpt")
    state = whole_state(whole.model)
    return [name for name, value in whole_state(resumed.model).items() if not torch.equal(value, state[name])]


@pytest.mark.parametrize("name", ["shards", pytest.param("replicas", marks=pytest.mark.slow)])
def test_runs_by_a_plan_resume_exactly(ranks: Ranks, tmp_path: Path, name: str) -> None:
    assert ranks(resume_on_rank, name, tmp_path) == [[], []]


@pytest.mark.parametrize(
    ("recipe", "plan", "message"),
    [
        (RECIPE, {"tp": 2}, r"\[plan\] tp = 2 cuts matrices, .* take dp_shard and dp_replicate alone"),
        (RECIPE, {"pp": 2}, r"\[plan\] pp = 2 cuts the model into stages"),
        (RECIPE, {"dp_shard": 2, "ep": 2}, r"\[plan\] ep = 2 cuts stacks of experts"),
        (RECIPE, {"cp": 2}, r"\[plan\] cp = 2 cuts sequences"),
        (RECIPE, {"dp_shard": 2, "float8": "rowwise"}, r"\[plan\] float8 = 'rowwise' replaces the layers"),
        (Int8(), {"dp_shard": 2}, r"\[qat\] kind = 'int8' trains one graph that reads the weights of all layers: .*\"ddp\" or \"fsdp\""),
        (LowBit(activation_bits=4), {"dp_replicate": 2}, r"\[qat\] kind = 'lowbit' trains one graph"),
    ],
)  # fmt: skip
def test_plans_that_cut_what_is_rounded_are_refused(recipe: Quantization, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_plan(recipe, Plan(**plan))


def refuse_on_rank(rank: int) -> str:
    with pytest.raises(MisconfigurationError) as refused:
        fit(PlanStrategy(Plan(tp=2)), 1)
    return str(refused.value)


def test_the_callback_refuses_such_plans_too(ranks: Ranks) -> None:
    for said in ranks(refuse_on_rank):
        assert "QuantizationAwareTraining: [plan] tp = 2 cuts matrices" in said
