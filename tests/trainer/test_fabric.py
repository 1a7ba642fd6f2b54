"""A loop of one's own on Fabric."""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.trainer.fabric.wrappers import is_wrapped
from arclight.trainer.loggers import Logger


def loop(fabric: al.Fabric, model: nn.Module, loader: Any, epochs: int = 1) -> nn.Module:
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(loader)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    return model


def with_sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def test_equals_the_loop_without_it() -> None:
    al.seed_everything(1)
    model = nn.Linear(4, 1)
    hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    for x, y in DataLoader(data(), 6):
        optimizer.zero_grad()
        nn.functional.mse_loss(hand(x), y).backward()
        optimizer.step()
    fabric = al.Fabric()
    fabric.launch()
    trained = loop(fabric, model, DataLoader(data(), 6))
    assert torch.equal(trained.weight, hand.weight)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    fabric = al.Fabric(precision="bf16-mixed")
    layer, inside = nn.Linear(4, 4), list[torch.dtype]()
    layer.register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))
    model = fabric.setup(layer)
    assert model(torch.randn(2, 4)).dtype == torch.float32
    assert inside == [torch.bfloat16]
    assert model.weight.dtype == torch.float32


def test_true_precision_converts_weights() -> None:
    assert al.Fabric(precision="bf16-true").setup(nn.Linear(4, 4)).weight.dtype == torch.bfloat16
    assert al.Fabric(precision="64-true").setup(nn.Linear(4, 4)).weight.dtype == torch.float64


def test_a_loop_resumes_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    al.seed_everything(1)
    fabric = al.Fabric()
    loader = fabric.setup_dataloaders(DataLoader(data(), 4, shuffle=True))
    passes = [[x.clone() for x, _ in loader] for _ in range(2)]
    loader.set_epoch(0)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    model = nn.Linear(4, 1)
    fabric.save(tmp_path / "state", {"model": model, "loader": loader, "note": "here"})

    other = fabric.setup_dataloaders(DataLoader(data(), 4, shuffle=True))
    again = nn.Linear(4, 1)
    rest = fabric.load(tmp_path / "state", {"model": again, "loader": other})
    assert rest == {"note": "here"}
    assert torch.equal(again.weight, model.weight)
    tail = [x for x, _ in other]
    assert len(tail) == 3
    assert all(torch.equal(a, b) for a, b in zip(tail, passes[0][3:], strict=True))


def test_wrong_use_is_named(tmp_path: Path) -> None:
    fabric = al.Fabric()
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="You have to specify either `clip_val` or `max_norm`"):
        fabric.clip_gradients(model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        al.Fabric(devices=2, strategy="ddp").setup(model)


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_two_launched_processes_share_the_data(strategy: str) -> None:
    fabric = al.Fabric(devices=2, strategy=strategy)
    seen = fabric.launch(_seen)
    assert sorted(seen) == list(range(8))


def _seen(fabric: al.Fabric) -> list[int]:
    torch.manual_seed(0)
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8), 2, shuffle=True))
    own = torch.cat(list(loader))
    return [int(i) for i in fabric.all_gather(own).flatten()]


# -- what Fabric gives back ----------------------------------------------------------------------------------------


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(2, 1), 41

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).mean()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()

    def describe(self) -> str:
        return "a line"


def test_a_wrapped_module_is_the_users_module_to_look_at() -> None:
    fabric, bare = al.Fabric(devices=1, accelerator="cpu"), Stepping()
    model = fabric.setup(bare)
    assert model.module is bare
    assert model.answer == 41
    model.answer = 42
    model.fresh = nn.Linear(1, 1)
    assert bare.answer == 42
    assert bare.fresh is model.fresh
    del model.answer
    assert not hasattr(bare, "answer")
    assert dict(model.named_parameters()).keys() == dict(bare.named_parameters()).keys()
    assert model.state_dict().keys() == bare.state_dict().keys()
    model.eval()
    assert not bare.training
    assert model.describe() == "a line"
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert is_wrapped(model)
    assert not is_wrapped(bare)
    with pytest.raises(AttributeError, match="no_such"):
        _ = model.no_such


def test_a_wrapped_optimizer_is_one_of_its_class() -> None:
    fabric, bare = al.Fabric(devices=1, accelerator="cpu"), nn.Linear(2, 1)
    adam = torch.optim.Adam(bare.parameters(), lr=0.5)
    _, optimizer = fabric.setup(bare, adam)
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups is adam.param_groups
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = bare(torch.ones(1, 2)).square().sum()
        fabric.backward(loss)
        seen.append(float(loss.detach()))
        return loss

    assert float(optimizer.step(closure).detach()) == seen[0]
    schedule.step()
    assert adam.param_groups[0]["lr"] == pytest.approx(0.05)
    other = torch.optim.Adam(nn.Linear(2, 1).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert len(other.state) == 2


def _bypass(fabric: al.Fabric) -> list[float]:
    torch.manual_seed(0)
    model, optimizer = fabric.setup(*with_sgd(Stepping()))
    x = torch.full((1, 2), 1.0 + fabric.global_rank)
    with pytest.raises(RuntimeError, match=r"calling the method `Stepping.loss\(\)` from outside the model"):
        model.loss(x)
    assert model.describe() == "a line"
    model.mark_forward_method("loss")
    for step in (model.loss, model.training_step):
        optimizer.zero_grad()
        fabric.backward(step(x))
        gradient = model.layer.weight.grad.clone()
        assert torch.equal(fabric.all_gather(gradient)[0], fabric.all_gather(gradient)[1])
    with fabric.rank_zero_first():
        order = float(fabric.global_rank)
    doubled = torch.tensor(order + 1)
    fabric.all_reduce(doubled, reduce_op="sum")
    assert fabric.all_gather({"rank": fabric.global_rank})["rank"].tolist() == [0, 1]
    return [*gradient.flatten().tolist(), float(doubled)]


def test_methods_pass_through_the_wrapper_or_are_refused() -> None:
    assert al.Fabric(devices=2, accelerator="cpu", strategy="ddp_fork").launch(_bypass) == [1.5, 1.5, 3.0]


def test_a_compiled_module_is_compiled_again() -> None:
    fabric = al.Fabric(devices=1, accelerator="cpu")
    compiled = torch.compile(nn.Linear(2, 1), backend="aot_eager")
    model = fabric.setup(compiled)
    assert model.module is compiled._orig_mod
    assert type(model._forward_module) is type(compiled)
    assert torch.equal(model(torch.ones(1, 2)), model.module(torch.ones(1, 2)))
    assert is_wrapped(torch.compile(model, backend="eager"))


class Sink:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None) -> None:
        self.rows.append((metrics, step))


def _logs(fabric: al.Fabric) -> list[Any]:
    fabric.log("loss", torch.tensor(float(fabric.global_rank)), step=3)
    return [*fabric.all_gather(len(fabric.logger.rows)).tolist(), fabric.logger.rows]


def test_only_rank_zero_logs() -> None:
    fabric = al.Fabric(devices=2, accelerator="cpu", strategy="ddp_fork", loggers=Sink())
    assert fabric.launch(_logs) == [1, 0, [({"loss": 0.0}, 3)]]
    with pytest.raises(ValueError, match="cannot be converted to a scalar"):
        al.Fabric(devices=1, accelerator="cpu", loggers=Sink()).log("x", torch.ones(2))


def test_the_scale_of_16_bit_gradients_is_saved(tmp_path: Path) -> None:
    fabric = al.Fabric(devices=1, accelerator="cpu", precision="16-mixed")
    model, optimizer = fabric.setup(*with_sgd(nn.Linear(2, 1)))
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
        model(torch.ones(1, 2)).sum().backward()
    fabric.backward(model(torch.full((1, 2), float("inf"))).sum())
    before = fabric.strategy.precision.scaler.get_scale()
    optimizer.step()
    scale = fabric.strategy.precision.state_dict()["scale"]
    assert scale == before / 2
    fabric.save(tmp_path / "state", {"model": model})
    again = al.Fabric(devices=1, accelerator="cpu", precision="16-mixed")
    assert again.load(tmp_path / "state", {"model": again.setup(nn.Linear(2, 1))}) == {}
    assert again.strategy.precision.scaler.get_scale() == scale


def test_part_of_a_state_is_kept_by_a_filter(tmp_path: Path) -> None:
    fabric, model = al.Fabric(devices=1, accelerator="cpu"), nn.Linear(2, 1)
    fabric.save(tmp_path / "state", {"model": model, "n": 1}, filter={"model": lambda name, _: name == "bias"})
    assert fabric.load(tmp_path / "state")["model"].keys() == {"bias"}
    with pytest.raises(KeyError, match="contains no key 'other'"):
        fabric.load(tmp_path / "state", {"other": model})
    with pytest.raises(ValueError, match=r"keys {'m'} are not present in the state keys"):
        fabric.save(tmp_path / "state", {"model": model}, filter={"m": lambda *_: True})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(model, tmp_path / "object.pt")
    other = fabric.setup(nn.Linear(2, 1))
    fabric.load_raw(tmp_path / "weights.pt", other)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(checkpoint.CheckpointError, match="only unpickling could restore"):
        fabric.load(tmp_path / "object.pt", weights_only=False)


def test_a_path_with_a_suffix_saves_a_single_file(tmp_path: Path) -> None:
    fabric = al.Fabric(devices=1, accelerator="cpu")
    model, optimizer = fabric.setup(*with_sgd(nn.Linear(2, 1)))
    path = tmp_path / "deep" / "state.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 3})
    assert torch.load(path, weights_only=True)["epoch"] == 3
    with pytest.raises(checkpoint.CheckpointError, match="only unpickling could restore"):
        fabric.save(path, {"model": model, "object": Late()})
    other, _ = fabric.setup(*with_sgd(nn.Linear(2, 1)))
    assert fabric.load(path, {"model": other, "optimizer": optimizer}) == {"epoch": 3}
    assert torch.equal(other.weight, model.weight)
    assert [entry.name for entry in path.parent.iterdir()] == ["state.ckpt"]


class Late:
    """A callback, and something that no file should hold."""

    seen: list[Any] = []

    def on_epoch(self, epoch: int) -> None:
        self.seen.append(epoch)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.seen.append(type(optimizer).__name__)


class Counting(al.Fabric):
    def run(self, start: int) -> int:
        return int(self.all_reduce(start + self.global_rank, reduce_op="sum"))


def test_a_subclass_runs_in_every_process() -> None:
    assert Counting(devices=2, accelerator="cpu", strategy="ddp_fork").run(10) == 21
    assert Counting(devices=1, accelerator="cpu").run(10) == 10


def test_objects_set_up_twice_and_launches_without_sense_are_named() -> None:
    fabric = al.Fabric(devices=1, accelerator="cpu")
    model, optimizer = fabric.setup(*with_sgd(nn.Linear(2, 1)))
    for call in (lambda: fabric.setup(model), lambda: fabric.setup_module(model)):
        with pytest.raises(ValueError, match="A model should be passed only once"):
            call()
    with pytest.raises(ValueError, match="An optimizer should be passed only once"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(ValueError, match="requires at least one optimizer"):
        fabric.setup_optimizers()
    with pytest.raises(TypeError, match="Only PyTorch DataLoader are currently supported"):
        fabric.setup_dataloaders([1, 2])
    with pytest.raises(TypeError, match="needs to be a callable"):
        fabric.launch(None)
    with pytest.raises(TypeError, match="needs to take at least one argument"):
        fabric.launch(lambda: None)
    with pytest.raises(TypeError, match=r"`fabric.launch\(\)` needs to be called with a function"):
        al.Fabric(devices=2, accelerator="cpu", strategy="ddp_spawn").launch()
    with pytest.raises(TypeError, match="You need to set up the model first"):
        fabric.no_backward_sync(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="Found invalid type for plugin"):
        al.Fabric(devices=1, accelerator="cpu", plugins=3)


def test_callbacks_get_what_they_take() -> None:
    fabric = al.Fabric(devices=1, accelerator="cpu", callbacks=Late())
    fabric.call("on_epoch", epoch=1, loss=2.0)
    _, optimizer = fabric.setup(*with_sgd(nn.Linear(2, 1)))
    optimizer.step()
    assert Late.seen == [1, "SGD"]


def test_a_step_costs_few_calls() -> None:
    def steps(fabric: al.Fabric | None, count: int) -> int:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fabric is not None:
            model, optimizer = fabric.setup(model, optimizer)
        x, calls = torch.ones(2, 4), 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        for _ in range(count):
            loss = model(x).sum()
            loss.backward() if fabric is None else fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        sys.setprofile(None)
        return calls

    fabric = al.Fabric(devices=1, accelerator="cpu")
    raw, ours = (steps(f, 30) - steps(f, 10) for f in (None, fabric))
    assert ours - raw <= 20 * 14


# -- a Module's own link -------------------------------------------------------------------------------------------


class Kept(Logger):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))


def test_a_module_in_a_loop_of_ones_own_logs_to_the_fabrics_loggers() -> None:
    logger = Kept()
    fabric, module = al.Fabric(accelerator="cpu", loggers=logger), al.Module()
    module.line = torch.nn.Linear(2, 1)
    assert module.fabric is None
    fabric.setup(module)
    module.log("x", torch.tensor(2.0))
    module.log_dict({"y": 1, "z": 0.5})
    module.log("hidden", 1.0, logger=False)
    assert logger.rows == [{"x": 2.0}, {"y": 1, "z": 0.5}]
    assert module.loggers == [logger]
    with pytest.raises(ValueError, match="`list` values cannot be logged"):
        module.log("wrong", [1.0])
    with pytest.raises(ValueError, match="nested dictionaries cannot be logged"):
        module.log_dict({"wrong": {"a": 1.0}})
    assert module.trainer.global_rank == 0
    with pytest.raises(
        AttributeError, match=r"tried to access `self.trainer.current_epoch`, which a Fabric does not have"
    ):
        _ = module.trainer.current_epoch


def test_modules_inside_share_their_owners_fabric() -> None:
    fabric, owner, inside = al.Fabric(accelerator="cpu"), al.Module(), al.Module()
    owner.inside = inside
    owner.fabric = fabric
    assert inside.fabric is owner.fabric
    assert inside.fabric.device == fabric.device


def test_a_module_in_a_loop_of_ones_own_has_its_optimizers_and_clips_through_fabric() -> None:
    class Line(al.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x)

    fabric, module = al.Fabric(accelerator="cpu"), Line()
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert module.optimizers() is optimizer
    fabric.backward(1e3 * wrapped(torch.ones(1, 2)).sum())
    module.clip_gradients(optimizer, gradient_clip_val=0.5)
    assert torch.cat([p.grad.flatten() for p in module.parameters()]).norm() == pytest.approx(0.5)
    module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert max(p.grad.abs().max() for p in module.parameters()) == pytest.approx(0.1)
    gathered = module.all_gather({"a": 1, "b": [torch.ones(2)]})
    assert gathered["a"] == torch.tensor(1)
    assert torch.equal(gathered["b"][0], torch.ones(2))


def test_passes_beside_each_other_count_once_and_are_epochs_of_their_own() -> None:
    fabric = al.Fabric(accelerator="cpu", devices=1)
    data = DataLoader(torch.arange(8), 2, shuffle=True)
    loader = fabric.setup_dataloaders(data)
    orders = []
    for epoch in range(6):
        loader.set_epoch(epoch)
        orders.append([batch.tolist() for batch in loader])
    loader.set_epoch(0)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=False)]
    assert [list(side) for side in zip(*pairs, strict=True)] == orders[:2]
    assert (loader.epoch, loader.batch) == (1, 4)

    loader.set_epoch(0)
    outer, inner = [], []
    for batch in loader:
        outer.append(batch.tolist())
        inner.append([nested.tolist() for nested in loader])
        assert loader.batch == 0
    assert outer == orders[0]
    assert inner == orders[1:5]
    assert (loader.epoch, loader.batch) == (5, 0)

    loader.set_epoch(2)
    left_early = iter(loader)
    next(left_early)
    state = loader.state_dict()
    again = fabric.setup_dataloaders(data)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == orders[2][1:]
    assert [batch.tolist() for batch in loader] == orders[3]


def test_a_module_in_manual_optimization_runs_backward_through_fabric() -> None:
    module = al.Module()
    module.automatic_optimization = False
    module.line = torch.nn.Linear(2, 1)
    al.Fabric(accelerator="cpu").setup(module)
    module.manual_backward(module.line(torch.tensor([[2.0, 3.0]])).sum())
    assert module.line.weight.grad is not None
    assert module.line.weight.grad.tolist() == [[2.0, 3.0]]


def test_a_closed_loader_of_fabric_has_no_workers_and_can_be_read_again() -> None:
    before = set(multiprocessing.active_children())
    data = DataLoader(torch.arange(8), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    loader = al.Fabric(accelerator="cpu").setup_dataloaders(data)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert set(multiprocessing.active_children()) > before
    loader.close()
    assert set(multiprocessing.active_children()) <= before
    assert len(list(loader)) == 4
    loader.close()
    loader.close()
