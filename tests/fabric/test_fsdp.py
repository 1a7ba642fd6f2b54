"""Models shared out over processes train as one process does, and their checkpoints open anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils.clip_grad import clip_grad_norm_

import arclight as al
from arclight import checkpoint
from arclight.fabric.distributed.sharding import full_tensor, gathered_copy
from arclight.fabric.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    """Units of its own, parameters between them, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x * self.scale)
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) + self.shift


def batches(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 8, 5, generator=torch.Generator().manual_seed(3))


def reference(steps: int = 6, clip: float | None = None, precision: Any = None) -> tuple[dict[str, Any], list[float]]:
    """The same by hand in one process."""
    torch.manual_seed(1)
    net, norms = Net(), []
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05)
    for x in batches(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            out = net(x)
        out.float().square().mean().backward()
        if clip is not None:
            norms.append(float(clip_grad_norm_(net.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}, norms


def fabric_for(devices: int = 2, precision: Any = None, **options: Any) -> al.Fabric:
    options.setdefault("auto_wrap_policy", {Block})
    strategy = FSDPStrategy(start_method="fork", **options)
    return al.Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)


def whole(fabric: al.Fabric, module: nn.Module) -> dict[str, Any]:
    state = fabric.strategy.portable(module.state_dict())
    return {name: tensor.tolist() for name, tensor in state.items()}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=0, atol=tolerance)


def train(
    fabric: al.Fabric,
    steps: int = 6,
    clip: float | None = None,
    window: int = 1,
    jointly: bool = True,
    meta: bool = False,
    fused: bool = True,
) -> tuple[dict[str, Any], list[float]]:
    torch.set_num_threads(1)
    torch.manual_seed(1 + fabric.global_rank)  # rank 0's weights count
    with fabric.init_module():
        net = Net()
    if jointly:
        model, optimizer = fabric.setup(
            net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05, fused=fused)
        )
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(
            torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05, fused=fused)
        )
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert type(net) is Net
    norms = []
    for batch in batches(steps):
        parts = batch.chunk(fabric.world_size * window)[fabric.global_rank :: fabric.world_size]
        for number, part in enumerate(parts, 1):
            with fabric.no_backward_sync(model, enabled=number < window):
                fabric.backward(model(part).square().mean() / window)
        if clip is not None:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=clip)))
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, model), norms


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {"fused": False}),
        ({"auto_wrap_policy": 40, "sharding_strategy": "SHARD_GRAD_OP"}, {"window": 2, "jointly": False}),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                ({"auto_wrap_policy": None}, {"jointly": False}),
                ({"activation_checkpointing_policy": {Block}, "cpu_offload": True}, {}),
                ({"sharding_strategy": "NO_SHARD"}, {"clip": 0.1}),
            )
        ),
    ],
)
def test_two_processes_equal_one(options: dict[str, Any], arguments: dict[str, Any]) -> None:
    found, _ = fabric_for(**options).launch(train, **arguments)
    assert_close(found, reference(clip=arguments.get("clip"))[0])


def test_gradients_are_clipped_by_the_norm_of_all_shares() -> None:
    found, norms = fabric_for().launch(train, clip=0.1)
    wanted, norms_wanted = reference(clip=0.1)
    assert norms == pytest.approx(norms_wanted, rel=1e-5)
    assert_close(found, wanted)


@pytest.mark.slow
def test_four_processes_in_two_copies() -> None:
    found, norms = fabric_for(4, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)).launch(train, clip=0.1)
    wanted, norms_wanted = reference(clip=0.1)
    assert norms == pytest.approx(norms_wanted, rel=1e-5)
    assert_close(found, wanted)


def test_bfloat16_mixed() -> None:
    found, _ = fabric_for(precision="bf16-mixed").launch(train)
    assert_close(found, reference(precision="bf16-mixed")[0], 0.02)  # sums of bfloat16 gradients in another order


@pytest.mark.slow
def test_mixed_precision_of_ones_own() -> None:
    own = fabric_for(mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert_close(own.launch(train)[0], reference()[0], 0.05)


def test_a_model_that_is_nowhere_yet_gets_the_values_of_one_process() -> None:
    found, _ = fabric_for().launch(_materialized)
    torch.manual_seed(1)
    assert_close(found, {name: tensor.tolist() for name, tensor in _Layers().state_dict().items()}, 0.0)


class _Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Linear(7, 3))


def _materialized(fabric: al.Fabric) -> tuple[dict[str, Any], bool]:
    with fabric.init_module(empty_init=True):
        net = _Layers()
    assert net[0].weight.is_meta
    torch.manual_seed(1)
    model = fabric.setup_module(net)
    model(torch.ones(2, 5)).sum().backward()
    return whole(fabric, model), True


def _looked_at(fabric: al.Fabric) -> tuple[dict[str, Any], float]:
    """Weights gathered for an evaluation must not be used after an update."""
    torch.manual_seed(1)
    model, optimizer = fabric.setup(*(lambda net: (net, torch.optim.SGD(net.parameters(), lr=0.5)))(Net()))
    for batch in batches(3):
        fabric.backward(model(batch).square().mean())
        with torch.no_grad():
            model(batch)
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, model), float(model(batches()[0]).detach().sum())


def test_reading_gradients_between_backward_and_step_changes_nothing() -> None:
    wanted = _looked_at(al.Fabric(accelerator="cpu", devices=1))
    found = fabric_for().launch(_looked_at)
    assert_close(found[0], wanted[0])
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)


def _overflow(fabric: al.Fabric) -> list[tuple[bool, float]]:
    """Gradients of which only one process's share overflows."""
    torch.manual_seed(1)
    net = nn.Linear(4, 4, bias=False)
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward((model(torch.ones(2, 4)) * torch.tensor([float("inf"), 1, 1, 1])).sum())
    before = net.weight.to_local().clone()
    optimizer.step()
    scale = fabric.strategy.precision.state_dict()["scale"]
    return fabric.strategy.all_gather_object((torch.equal(before, net.weight.to_local()), scale))


def test_an_overflow_anywhere_leaves_the_step_out_everywhere() -> None:
    found = fabric_for(precision="16-mixed").launch(_overflow)
    assert found == [(True, 32768.0), (True, 32768.0)]


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _save(fabric: al.Fabric, path: Path) -> tuple[dict[str, Any], list[float]]:
    model, optimizer = _trained(fabric, batches()[:3])
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    return whole(fabric, model), []


def _resume(fabric: al.Fabric, path: Path) -> tuple[dict[str, Any], list[float]]:
    return whole(fabric, _trained(fabric, batches()[3:], path)[0]), []


def _trained(fabric: al.Fabric, data: torch.Tensor, path: Path | None = None) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1 if path is None else 99)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, fused=True)
    )
    if path is not None:
        assert fabric.load(path, {"model": model, "optimizer": optimizer}) == {"step": 3}
    for batch in data:
        fabric.backward(model(batch.chunk(fabric.world_size)[fabric.global_rank]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "sharded"])
def test_a_checkpoint_opens_on_any_number_of_processes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
    saved, _ = fabric_for(state_dict_type=kind).launch(_save, path)
    tree = checkpoint.load(path)
    assert_close({name: tensor.tolist() for name, tensor in tree["model"].items()}, saved, 0.0)
    assert checkpoint.verify(path) == []
    assert (path / "model-00002-of-00002.safetensors").exists() is (kind == "sharded")
    assert checkpoint.inspect(path).parameters == sum(tensor.numel() for tensor in tree["model"].values())
    wanted, _ = reference()
    assert_close(_resume(al.Fabric(accelerator="cpu", devices=1), path)[0], wanted)
    assert_close(fabric_for().launch(_resume, path)[0], wanted)


@pytest.mark.slow
def test_two_ranks_resume_from_a_checkpoint_of_one(tmp_path: Path) -> None:
    _save(al.Fabric(accelerator="cpu", devices=1), tmp_path / "state")
    assert_close(fabric_for().launch(_resume, tmp_path / "state")[0], reference()[0])


# -- wrong use -----------------------------------------------------------------------------------------------------


def _copied(fabric: al.Fabric) -> str:
    torch.manual_seed(1)
    net, calls = Net(), list[int]()
    net.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    model, optimizer = fabric.setup(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5))
    x, *others = batches(3)
    for batch in others:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        wanted = model(x)
    state = {name: full_tensor(value) for name, value in net.state_dict().items()}
    assert any(isinstance(value, DTensor) for value in net.state_dict().values())
    calls.clear()
    copied = gathered_copy(net)
    assert [type(part) for part in copied.modules()] == [type(part) for part in Net().modules()]
    assert {name: p.requires_grad for name, p in copied.named_parameters()} == {
        name: p.requires_grad for name, p in net.named_parameters()
    }
    assert not any(isinstance(value, DTensor) for value in copied.state_dict().values())
    assert {name: value.tolist() for name, value in copied.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
    torch.testing.assert_close(copied(x), wanted)
    assert calls == [1], "hooks of the user's own are kept"
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(model(x), wanted)
    fabric.backward(model(x).square().mean())
    assert isinstance(net.first.weight.grad, DTensor), "it trains on in its shards"
    return "copied"


@pytest.mark.parametrize("policy", [{Block}, None])
def test_a_gathered_copy_is_the_plain_module(policy: Any) -> None:
    assert fabric_for(auto_wrap_policy=policy).launch(_copied) == "copied"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(6, 6)
        self.head.weight = self.block.linear.weight


def _tied(fabric: al.Fabric) -> str:
    with pytest.raises(ValueError, match=r"block\.linear\.weight and head\.weight are one parameter in two FSDP units"):
        fabric.setup(Tied())
    net = nn.Linear(2, 2)
    stale = torch.optim.SGD(net.parameters(), lr=0.1)
    fabric.setup_module(net)
    with pytest.raises(ValueError, match="does not seem to reference any FSDP parameters"):
        fabric.setup_optimizers(stale)
    return "refused"


def test_tied_weights_and_invalid_fsdp_options_are_refused() -> None:
    assert fabric_for().launch(_tied) == "refused"
    with pytest.raises(ValueError, match="Unknown state_dict_type"):
        FSDPStrategy(state_dict_type="half")
    with pytest.raises(TypeError, match="belongs to torch's first FSDP: give device_mesh"):
        FSDPStrategy(process_group=object())
    with pytest.raises(ValueError, match="FSDP2 always works with use_orig_params=True"):
        FSDPStrategy(use_orig_params=False)
    with pytest.raises(TypeError, match="has no argument 'autowrap'"):
        FSDPStrategy(autowrap=1)
