"""Plans that cannot be carried out are refused in one sentence that says what would fit, before anything is built."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import arclight as al
from arclight import recipe
from arclight.parallel import Plan, PlanError, PlanStrategy, initialize, parallelize
from arclight.parallel.blocks import embeddings, repeated_blocks
from arclight.parallel.model.activation_checkpoint import checkpoint_blocks
from arclight.parallel.model.compile import compile_blocks
from arclight.parallel.model.parallelize import check
from arclight.parallel.plan import bytes_of
from arclight.text import build_model

SMALL: dict[str, Any] = {"vocab_size": 96, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp: need int >= 1, got 0"),
        ({"dp_shard": 2, "ep": 4}, "ep = 4 must divide dp_shard . cp = 2"),
        ({"pp": 4, "micro_batches": 2}, "micro_batches = 2 leaves some of pp = 4 stages idle"),
        ({"activation_checkpointing": "some"}, "need none . selective . full . number in .0, 1., got 'some'"),
        ({"activation_checkpointing": 1.5}, "got 1.5"),
        ({"activation_checkpointing": 0.5}, 'set compile = "inductor"'),
        ({"reshard_after_forward": "often"}, "choose one of default, always, never"),
        ({"async_tp": True, "tp": 2}, 'set compile = "inductor"'),
        ({"float8": "int4"}, "choose one of none, tensorwise"),
    ],
)
def test_a_plan_that_contradicts_itself(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**fields)


@pytest.mark.parametrize(
    ("fields", "facts", "message"),
    [
        ({"dp_shard": 2, "tp": 2}, {"world_size": 8}, "for 4 processes .* there are 8"),
        ({"tp": 4}, {"kv_heads": 2}, "2 key and value heads cannot be cut into tp = 4"),
        ({"tp": 4}, {"hidden": 50}, "50 hidden width"),
        ({"tp": 4}, {"vocab_size": 50257}, "pad it to 50260"),
        ({"dp_shard": 4, "ep": 4}, {"experts": 6}, "6 experts cannot be cut into ep = 4"),
        ({"tp": 4}, {"sequence_length": 30}, "use 28 or 32 tokens"),
        ({"cp": 2}, {"sequence_length": 30}, "2 . cp = 4 equal parts: use 28 or 32"),
        ({"cp": 2, "tp": 2}, {"sequence_length": 28}, "use 24 or 32"),
        ({"pp": 4}, {"layers": 3}, "3 layers are too few"),
    ],
)
def test_a_plan_that_does_not_fit(fields: dict[str, int], facts: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**fields).check(**facts)


def test_a_model_that_a_plan_does_not_fit() -> None:
    check(build_model("llama3-debug", **SMALL), Plan(tp=2), sequence_length=16)
    with pytest.raises(PlanError, match="2 key and value heads"):
        check(build_model("llama3-debug", **SMALL), Plan(tp=4))
    with pytest.raises(PlanError, match="pad it to 98"):
        check(build_model("llama3-debug", **SMALL | {"vocab_size": 97}), Plan(tp=2))
    with pytest.raises(PlanError, match="Linear declares no sharding"):
        check(nn.Linear(4, 4), Plan(tp=2))
    with pytest.raises(PlanError, match="the model has none: set ep = 1"):
        check(nn.Linear(4, 4), Plan(dp_shard=2, ep=2))
    check(nn.Linear(4, 4), Plan(dp_shard=2))


class Odd(nn.Module):
    def __init__(self, table: dict[str, str]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)
        self.sharding = table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"up": "column", "dwon": "row"}, "names dwon, which does not exist"),
        ({"up": "columns"}, "'columns', which is not known"),
        ({"up": "column", "down": "row"}, "no sharding table names the module of norm.weight"),
        ({"norm": "sequence", "up": "row", "down": "row"}, None),
        ({"norm": "sequence", "up": "column", "down": "column"}, None),
    ],
)
def test_tables_that_are_wrong(table: dict[str, str], message: str | None) -> None:
    if message is None:
        check(Odd(table), Plan(tp=2))
        with pytest.raises(PlanError, match=r"which tp = 5 does not divide"):
            check(Odd(table), Plan(tp=5))
    else:
        with pytest.raises(PlanError, match=message):
            check(Odd(table), Plan(tp=2))


def test_a_trainer_takes_a_plan() -> None:
    trainer = al.Trainer(accelerator="cpu", strategy=Plan(dp_shard=2, tp=2), logger=False)
    assert isinstance(trainer.strategy, PlanStrategy)
    assert trainer.world_size == 4
    with pytest.raises(PlanError, match="for 4 processes"):
        al.Trainer(accelerator="cpu", strategy=Plan(tp=4), devices=2, logger=False)
    with pytest.raises(PlanError, match="30 tokens"):
        PlanStrategy(Plan(tp=4), sequence_length=30)


def test_blocks_are_found_without_being_named() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), "head": nn.Linear(2, 2)})
    assert [name for name, _ in repeated_blocks(model)] == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in repeated_blocks(build_model("llama3-debug", **SMALL))] == ["layers.0", "layers.1"]
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
    assert repeated_blocks(mixed) == []
    assert len(embeddings(build_model("llama3-debug", **SMALL))) == 1
    assert embeddings(build_model("llama3-debug", **SMALL, tied=True)) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def test_all_blocks_are_compiled_to_one_code() -> None:
    torch._dynamo.reset()
    counters.clear()
    blocks, x = nn.ModuleList(Block() for _ in range(3)), torch.ones(2, 4)
    wanted = [block(x) for block in blocks]
    compile_blocks(nn.ModuleDict({"layers": blocks}), Plan(compile="aot_eager"))
    torch.testing.assert_close([block(x) for block in blocks], wanted)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_the_compiler_keeps_the_part_of_activations_that_was_asked_for() -> None:
    kept, norms = {}, {}
    for part in (1.0, 0.0):
        torch._dynamo.reset()
        model = build_model("llama3-debug", **SMALL)
        initialize(model, 0)
        compile_blocks(model, Plan(compile="inductor", activation_checkpointing=part))
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.arange(48).reshape(2, 24))
        out.square().mean().backward()
        kept[part] = sum(sizes)
        norms[part] = float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
    assert kept[0.0] < 0.6 * kept[1.0]
    assert norms[0.0] == pytest.approx(norms[1.0], rel=1e-5)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_activations_are_computed_again_as_asked() -> None:
    """Seven products in each of two blocks: none of them, every second one, or all but the last, whose result nothing needs."""
    counted, gradients = {}, {}
    for how in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = build_model("llama3-debug", **SMALL)
        checkpoint_blocks(model, how)
        with Products() as products:
            model(torch.arange(24).reshape(2, 12)).square().mean().backward()
        counted[how] = products.count
        gradients[how] = [parameter.grad for parameter in model.parameters()]
        assert list(model.state_dict()) == list(build_model("llama3-debug", **SMALL).state_dict())
    assert counted["full"] - counted["none"] == 12
    assert counted["selective"] - counted["none"] == 6
    for how in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(gradients["none"], gradients[how], strict=True))


class Shared(nn.Module):
    """Two blocks with one matrix; or one block twice."""

    def __init__(self, block_twice: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        if block_twice:
            self.layers[1] = self.layers[0]
        else:
            self.layers[1].weight = self.layers[0].weight


def test_a_parameter_of_two_blocks_is_refused_where_blocks_are_gathered_one_by_one() -> None:
    check(Shared(block_twice=True), Plan(dp_shard=2))
    check(Shared(block_twice=False), Plan(dp_replicate=2))
    with pytest.raises(PlanError, match=r"layers.0.weight and layers.1.weight are one parameter in two parts"):
        check(Shared(block_twice=False), Plan(dp_shard=2))


def test_a_plan_needs_processes_that_have_found_each_other() -> None:
    with pytest.raises(PlanError, match="let a Trainer or Fabric do so"):
        parallelize(nn.Linear(2, 2), Plan())


def test_sizes_are_read_in_every_unit() -> None:
    sizes = {"1kB": 1e3, "1MB": 1e6, "1GB": 1e9, "1TB": 1e12, "1KiB": 2**10, "1MiB": 2**20, "1GiB": 2**30}
    assert {text: bytes_of(text) for text in sizes} == sizes
    assert (bytes_of(" 79.5 gib "), bytes_of(".5kb")) == (79.5 * 2**30, 500)
    for wrong in ("80", "GB", "0GB", "1XB", "-1GB", "1GB/s"):
        with pytest.raises(PlanError, match="write a number and a unit"):
            bytes_of(wrong)


def test_a_pipeline_has_two_micro_batches_a_stage_or_those_asked_for() -> None:
    assert Plan(pp=4).pieces == 8
    assert Plan(pp=4, micro_batches=4).pieces == 4
    assert Plan(pp=4, micro_batches=5).pieces == 5
    assert [Plan(cp=2).passes, Plan(pp=4).passes, Plan(pp=4, micro_batches=4, cp=2, tp=2).passes] == [2, 8, 8]


@pytest.mark.parametrize(
    ("fields", "length"),
    [({}, 7), ({"cp": 3}, 6), ({"tp": 5}, 5), ({"cp": 2, "tp": 3}, 12), ({"tp": 5, "sequence_parallel": False}, 7)],
)
def test_sequences_are_cut_into_no_more_parts_than_need_be(fields: dict[str, Any], length: int) -> None:
    Plan(**fields).check(sequence_length=length)
    if length != 7:
        with pytest.raises(PlanError, match=f"use {length} or {2 * length} tokens"):
            Plan(**fields).check(sequence_length=length + 1)


def test_plan_reports_its_sizes_and_checks_layers() -> None:
    plan = Plan(dp_replicate=2, dp_shard=3, cp=5, tp=7, pp=11)
    assert (plan.world_size, plan.data_parallel) == (2310, 6)
    assert not plan.only_replicates
    assert Plan(dp_replicate=4).only_replicates
    assert not Plan(dp_replicate=4, cpu_offload=True, dp_shard=2).only_replicates
    assert str(Plan(tp=2)) == "Plan(tp=2)"
    with pytest.raises(PlanError, match="3 layers are too few"):
        Plan(pp=4).check(layers=3)
    Plan(pp=4).check(layers=4)


def test_a_former_value_is_read_with_a_warning(tmp_path: Path) -> None:
    """In Python, in a recipe, as a flag and in a pickle."""
    message = "replicas = 'apart' is called 'independent' now; the former value is read for one more release"
    with pytest.warns(FutureWarning, match=f"Plan.{message}"):
        assert Plan(replicas="apart") == Plan(replicas="independent")  # type: ignore[arg-type]
    (tmp_path / "old.toml").write_text('replicas = "apart"\n')
    (tmp_path / "none.toml").write_text("")
    with pytest.warns(FutureWarning, match=message):
        assert recipe.read(Plan, tmp_path / "old.toml") == Plan(replicas="independent")
    with pytest.warns(FutureWarning, match=f"--{message}"):
        assert recipe.read(Plan, tmp_path / "none.toml", ["--replicas", "apart"]) == Plan(replicas="independent")
    old = Plan(dp_replicate=2)
    object.__setattr__(old, "replicas", "apart")  # as versions with the former value pickled it
    pickled = pickle.dumps(old)
    with pytest.warns(FutureWarning, match=f"Plan.{message}"):
        restored = pickle.loads(pickled)
    assert restored == Plan(dp_replicate=2, replicas="independent")
    assert restored.independent_replicas
