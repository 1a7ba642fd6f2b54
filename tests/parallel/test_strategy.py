"""The Trainer on a plan: what one process trains, and checkpoints that open on any other plan."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.fabric.distributed.optimizer_names import key_by_name
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import Plan, PlanError, PlanStrategy, initialize
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text import build_model
from arclight.trainer.callbacks import ModelCheckpoint
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO

STEPS, GLOBAL_BATCH = 8, 12
"""An error of 1e-5 shows at the second step; so many are needed for runs that are stopped twice on their way, in two epochs."""
QUICK: dict[str, Any] = {"max_steps": 5, "layers": 2, "precision": "64-true"}


class Language(al.Module):
    """An ordinary module around a small Llama."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.layers, self.tied = layers, tied
        self.model: Any = None
        self.runner: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(
                "llama3-debug", vocab_size=48, dim=32, layers=self.layers, heads=4, kv_heads=2, hidden=48, std=0.1,
                tied=self.tied,
            )  # fmt: skip
            if not next(self.model.parameters()).is_meta:
                initialize(self.model, torch.initial_seed())

    def split_batch(self, batch: Any) -> Split:
        (tokens,) = batch
        labels = torch.where(tokens[:, 1:] % 5 == 0, -100, tokens[:, 1:])  # samples count differently
        return (tokens[:, :-1],), {"positions": None}, labels

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = output.full_tensor() if isinstance(output, DTensor) else output
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def batch_weight(self, batch: Any) -> Tensor:
        return (batch[0][:, 1:] % 5 != 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total, count = batch_loss(self, batch)
        loss = total / count
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=int(count))
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        total, count = batch_loss(self, batch)
        self.log("val_loss", total / count, batch_size=int(count))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Curve(al.Callback):
    """The mean loss of every step, and a checkpoint after one of them."""

    def __init__(self, path: Path | None = None, after: int = 0) -> None:
        self.path, self.after, self.losses = path, after, []

    def on_train_batch_end(
        self, trainer: al.Trainer, module: al.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        weight = float(module.batch_weight(batch))
        shares = trainer.strategy.all_gather_object((float(trainer.last_loss.detach()) * weight, weight))
        self.losses.append(sum(total for total, _ in shares) / sum(count for _, count in shares))
        if self.path is not None and trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def loader(batch_size: int, count: int, shuffle: bool) -> DataLoader[Any]:
    tokens = torch.randint(0, 48, (count, 17), generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(tokens.cumsum(1) % 48), batch_size, shuffle=shuffle)


def fit(
    folder: Path,
    plan: Plan | None = None,
    ckpt: Path | str | None = None,
    curve: Curve | None = None,
    more: Any = (),
    layers: int = 4,
    tied: bool = False,
    **options: Any,
) -> Any:
    """``STEPS`` steps on global batches of twelve: the losses, and what logging made of them."""
    torch.manual_seed(11)
    curve = curve or Curve()
    strategy: Any = "auto" if plan is None else PlanStrategy(plan, start_method="fork", sequence_length=16)
    options = {"max_steps": STEPS, "enable_checkpointing": False, "limit_val_batches": 2} | options
    trainer = al.Trainer(
        accelerator="cpu", strategy=strategy, default_root_dir=folder, gradient_clip_val=0.5, logger=False,
        enable_progress_bar=False, callbacks=[curve, *more], **options,
    )  # fmt: skip
    share = plan.data_parallel if plan is not None else 1
    module = Language(layers, tied)
    module.configure_model()
    if plan is not None:
        module.model = None
    trainer.fit(
        module, loader(GLOBAL_BATCH // share, 60, True), loader(GLOBAL_BATCH // share, 24, False), ckpt_path=ckpt
    )
    return trainer, curve.losses, module


@pytest.mark.parametrize("batches", [1, 2])
def test_a_plan_in_double_precision_trains_what_one_process_trains(tmp_path: Path, batches: int) -> None:
    options = QUICK | {"max_steps": 3, "limit_val_batches": 0, "accumulate_grad_batches": batches}
    _, expected, _ = fit(tmp_path / "one", **options)
    _, found, _ = fit(tmp_path / "two", Plan(dp_shard=2), **options)
    assert len(found) == 3 * batches
    assert found == pytest.approx(expected, rel=1e-12)


SLOW_PLANS = [
    Plan(dp_shard=2, tp=2), Plan(dp_replicate=2), Plan(dp_shard=2), Plan(tp=2), Plan(cp=2),
    Plan(pp=2, schedule="ZBVZeroBubble", micro_batches=5), Plan(dp_shard=2, pp=2, schedule="Interleaved1F1B"),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train one process with some options, once: its trainer and losses."""
    return functools.cache(lambda **options: fit(tmp_path_factory.mktemp("alone"), **options)[:2])


@pytest.mark.parametrize(
    "plan", [Plan(pp=2), *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW_PLANS)], ids=str
)
def test_a_plan_trains_what_one_process_trains(tmp_path: Path, plan: Plan, alone: Any) -> None:
    folded = plan.schedule in ("ZBVZeroBubble", "Interleaved1F1B")  # which have two stages on each process
    options = QUICK | {"layers": 4 if folded else 2}
    one, wanted = alone(**options)
    two, found, _ = fit(tmp_path / "2", plan, **options)
    assert len(found) == options["max_steps"]
    assert found == pytest.approx(wanted, abs=1e-9)
    assert wanted[-1] < wanted[0] - 0.1
    for name in ("loss_epoch", "val_loss"):
        assert float(two.callback_metrics[name]) == pytest.approx(float(one.callback_metrics[name]), abs=1e-5)
    assert two.callback_metrics["batches"] == plan.data_parallel * one.callback_metrics["batches"]


@pytest.mark.slow
def test_windows_of_batches_that_count_differently(tmp_path: Path) -> None:
    options = {"max_steps": 2, "accumulate_grad_batches": 3, "limit_val_batches": 0}
    _, wanted, _ = fit(tmp_path / "1", **options)
    _, found, _ = fit(tmp_path / "2", Plan(dp_shard=2, pp=2, schedule="InterleavedZeroBubble"), **options)
    assert len(found) == 6
    assert found == pytest.approx(wanted, rel=1e-5)  # float32 after an update


class Plain(al.Module):
    """A module that knows nothing of runners."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model("llama3-debug", vocab_size=48, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0][:, :-1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("plan", "precision", "module", "message"),
    [
        (
            Plan(pp=2, cp=2),
            "32-true",
            Plain,
            "cannot shard over cp = 2: write them as arclight.parallel.step_protocol says",
        ),
        (Plan(cp=2), "32-true", Plain, "Plain has no runner, so nothing can cut its sequences"),
        (Plan(pp=2), "16-mixed", Language, "use precision bf16-mixed or 32, or pp = 1"),
        (Plan(cp=3, context="ulysses"), "32-true", Plain, "cannot be divided among cp = 3 processes"),
    ],
)
def test_a_module_that_cannot_be_run_is_refused(
    tmp_path: Path, plan: Plan, precision: str, module: Any, message: str
) -> None:
    strategy = PlanStrategy(plan, start_method="fork")
    trainer = al.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=1, precision=precision, default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(Exception, match="PlanError") as caught:
        trainer.fit(module(), loader(4, 8, False))
    assert message in str(caught.value)


class Normed(al.Module):
    """Its buffers are other numbers on each process while it trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(17, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0].float()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.model(batch[0].float()).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_copies_of_a_model_may_evaluate_unequal_numbers_of_batches(tmp_path: Path) -> None:
    """All of them with the buffers of the model that is saved; also where nothing of it trains."""
    trainer = al.Trainer(
        accelerator="cpu", strategy=PlanStrategy(Plan(dp_replicate=2), start_method="fork"), max_steps=3, logger=False,
        default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    module = Normed()
    trainer.fit(module, loader(4, 24, True), loader(1, 3, False))
    with torch.no_grad():
        wanted = float(torch.stack([module.model.eval()(x[0].float()) for x in loader(1, 3, False)]).mean())
    assert float(trainer.callback_metrics["value"]) == pytest.approx(wanted, rel=1e-5)
    (found,) = trainer.validate(module.requires_grad_(False), loader(1, 3, False))
    assert found["value"] == pytest.approx(wanted, rel=1e-5)


class Thaw(al.Callback):
    """Lets the first layer train from the second epoch on, and looks whether all processes agree on it."""

    def setup(self, trainer: al.Trainer, module: al.Module, stage: str) -> None:
        module.model[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: al.Trainer, module: al.Module) -> None:
        module.model[0].requires_grad_(trainer.current_epoch > 0)

    def on_train_end(self, trainer: al.Trainer, module: al.Module) -> None:
        copies = trainer.strategy.all_gather_object(module.model[0].weight.detach().tolist())
        assert all(copy == copies[0] for copy in copies)


@pytest.mark.parametrize(
    "strategy", [PlanStrategy(Plan(dp_replicate=2), start_method="fork"), DDPStrategy(start_method="fork")]
)
def test_gradients_of_what_begins_to_train_later_are_averaged(tmp_path: Path, strategy: Any) -> None:
    trainer = al.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, callbacks=[Thaw()],
        default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    module = Normed()
    before = module.model[0].weight.detach().clone()
    trainer.fit(module, loader(4, 24, True))
    assert not torch.equal(module.model[0].weight, before)


class AtStart(al.Callback):
    """Saves what was loaded, before anything is trained."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: al.Trainer, module: al.Module) -> None:
        trainer.save_checkpoint(self.path)


def tensors_of(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: found for key, item in items for name, found in tensors_of(item, f"{prefix}/{key}").items()}


def state(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint, whole and by name."""
    entries = checkpoint.load(path)
    moments = [key_by_name(optimizer)["state"] for optimizer in entries["optimizers"]]
    return tensors_of({"model": entries["model"], "moments": moments})


WAYS = [
    (Plan(dp_shard=2, tp=2), Plan(tp=2), Plan(dp_shard=3)),
    (Plan(dp_shard=2, pp=2, schedule="ZBVZeroBubble"), Plan(cp=2), Plan(pp=3)),
    (Plan(cp=2, pp=2), None, Plan(pp=2, schedule="DualPipeV")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("four", "two", "three"), WAYS, ids=str)
def test_a_run_goes_on_on_other_plans(tmp_path: Path, four: Plan, two: Plan | None, three: Plan, alone: Any) -> None:
    _, wanted = alone()
    fit(tmp_path / "4", four, curve=Curve(tmp_path / "a", 3), max_steps=3)
    after = {"curve": Curve(tmp_path / "b", 6), "more": [AtStart(tmp_path / "a2")], "max_steps": 6}
    fit(tmp_path / "2", two, ckpt=tmp_path / "a", **after)
    _, found, _ = fit(tmp_path / "3", three, ckpt=tmp_path / "b", more=[AtStart(tmp_path / "b3")])
    assert len(found) == STEPS
    assert found == pytest.approx(wanted, abs=1e-5)
    for one, other in (("a", "a2"), ("b", "b3")):
        before, after = state(tmp_path / one), state(tmp_path / other)
        assert len(before) > 40
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("plan", [Plan(dp_shard=2), Plan(tp=2)], ids=str)
def test_a_run_with_tied_weights_goes_on_on_a_plan(tmp_path: Path, plan: Plan) -> None:
    short: dict[str, Any] = {"layers": 1, "tied": True}
    fit(tmp_path / "1", curve=Curve(tmp_path / "a", 1), max_steps=1, **short)
    _, wanted, _ = fit(tmp_path / "2", ckpt=tmp_path / "a", max_steps=2, **short)
    _, found, _ = fit(tmp_path / "3", plan, ckpt=tmp_path / "a", more=[AtStart(tmp_path / "a2")], max_steps=2, **short)
    assert found == pytest.approx(wanted, abs=1e-5)
    before, after = state(tmp_path / "a"), state(tmp_path / "a2")
    assert torch.equal(before["/model/model.output.weight"], after["/model/model.tok_embeddings.weight"])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Scores(al.Callback):
    """Logs a score for each step; nothing is to be written but in the background."""

    def on_train_batch_end(self, trainer: al.Trainer, pl_module: al.Module, *_: Any) -> None:
        assert isinstance(trainer.checkpoint_io, AsyncCheckpointIO)
        pl_module.log("score", (5.0, 3.0, 4.0, 1.0, 2.0, 0.5)[trainer.global_step - 1])


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(dp_shard=2, tp=2), Plan(dp_shard=2, pp=2)], ids=str)
def test_shards_are_saved_in_the_background_and_the_best_are_kept(tmp_path: Path, plan: Plan) -> None:
    sizes: dict[str, Any] = {"layers": 2 if plan.pp > 1 else 1, "limit_val_batches": 0}

    def run(number: int, steps: int, ckpt: str | None = None) -> tuple[list[float], list[str]]:
        saver = ModelCheckpoint(tmp_path / "c", "{step}", "score", save_top_k=2, save_last=True, every_n_train_steps=1)
        more = [Scores(), saver]
        options = {"max_steps": steps, "enable_checkpointing": True} | sizes
        _, losses, _ = fit(tmp_path / str(number), plan, ckpt, more=more, **options)
        kept = sorted((tmp_path / "c").iterdir())
        assert [checkpoint.verify(path) for path in kept] == [[]] * len(kept)
        assert {checkpoint.inspect(path).ranks for path in kept} == {plan.world_size}
        return losses, [path.name for path in kept]

    _, wanted, _ = fit(tmp_path / "0", plan, max_steps=6, **sizes)
    assert run(1, 4)[1] == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    losses, kept = run(2, 6, "last")
    assert kept == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert checkpoint.inspect(tmp_path / "c/last.ckpt").step == 6
    assert losses == wanted


@pytest.mark.slow
def test_windows_and_half_precision(tmp_path: Path) -> None:
    plan = Plan(dp_shard=2, tp=2)
    options = {"accumulate_grad_batches": 2, "max_steps": 2, "layers": 2, "limit_val_batches": 0}
    _, wanted, _ = fit(tmp_path / "1", **options)
    _, found, _ = fit(tmp_path / "2", plan, **options)
    assert found == pytest.approx(wanted, abs=1e-5)
    _, half, _ = fit(tmp_path / "3", plan, **options, precision="bf16-mixed")
    assert half == pytest.approx(wanted, abs=0.05)
    assert half != pytest.approx(wanted, abs=1e-4)


def by_hand(fabric: al.Fabric) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Two steps of a loop that is the user's own: losses, norms of gradients, weights."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    with fabric.init_module(empty_init=fabric.world_size > 1):
        model: Any = build_model("llama3-debug", vocab_size=48, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
    if fabric.world_size == 1:
        initialize(model, 3)
    model, share = fabric.setup_module(model), fabric.strategy.distributed_sampler_kwargs
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    losses, norms = [], []
    for (tokens,) in loader(GLOBAL_BATCH, 24, False):
        tokens = tokens.chunk(share["num_replicas"])[share["rank"]]
        logits = model(tokens[:, :-1])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        losses.append(float(fabric.all_reduce(loss.detach())))
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = fabric.strategy.portable(fabric.strategy.get_module_state_dict(model))
    return losses, norms, {name: value.tolist() for name, value in weights.items()}


@pytest.mark.parametrize(
    "plan", [Plan(tp=2), pytest.param(Plan(dp_replicate=2, tp=2), marks=pytest.mark.slow)], ids=str
)
def test_fabric_takes_a_plan(plan: Plan) -> None:
    wanted = by_hand(al.Fabric(accelerator="cpu", devices=1))
    found = al.Fabric(accelerator="cpu", strategy=PlanStrategy(plan, start_method="fork")).launch(by_hand)
    assert found[0] == pytest.approx(wanted[0], abs=1e-5)
    assert found[1] == pytest.approx(wanted[1], abs=1e-5)
    assert found[2].keys() == wanted[2].keys()
    for name, value in wanted[2].items():
        torch.testing.assert_close(torch.tensor(found[2][name]), torch.tensor(value), rtol=0, atol=1e-4)


def uneven(fabric: al.Fabric) -> tuple[dict[str, Tensor], str]:
    """Whole first weights of a model whose shares differ in size, and what is said of a sequence that does not divide."""
    torch.set_num_threads(1)
    with fabric.init_module(empty_init=True):
        model = build_model("llama3-debug", vocab_size=94, dim=36, layers=1, heads=6, kv_heads=2, hidden=46)
    torch.manual_seed(3)
    model = fabric.setup_module(model)
    weights = fabric.strategy.portable(fabric.strategy.get_module_state_dict(model))
    with pytest.raises(PlanError) as refused:
        model(torch.zeros(2, 15, dtype=torch.long))
    return {name: value.tolist() for name, value in weights.items()}, str(refused.value)


def test_uneven_shares_begin_as_the_whole_and_uneven_sequences_are_refused() -> None:
    strategy = PlanStrategy(Plan(dp_shard=2, tp=2), start_method="fork")
    found, refused = al.Fabric(accelerator="cpu", strategy=strategy).launch(uneven)
    alone = build_model("llama3-debug", vocab_size=94, dim=36, layers=1, heads=6, kv_heads=2, hidden=46)
    initialize(alone, 3)
    assert found.keys() == alone.state_dict().keys()
    assert all(torch.equal(torch.tensor(found[name]), value) for name, value in alone.state_dict().items())
    assert refused.startswith("sequences of 15 tokens cannot be cut into tp = 2 equal parts: pad them")


@pytest.mark.slow
def test_processes_that_torchrun_has_started(tmp_path: Path) -> None:
    _, wanted, _ = fit(tmp_path / "1", max_steps=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(wanted, abs=1e-5)


if __name__ == "__main__":
    run = fit(Path(sys.argv[1]) / os.environ["RANK"], Plan(tp=2), max_steps=3)
    if run[0].is_global_zero:
        print(json.dumps(run[1]), flush=True)
