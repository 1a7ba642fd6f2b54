"""Stages that run the model's own code: values that change in place, several functions of one module."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.nn import functional

import arclight as al
from arclight.parallel import PlanError
from arclight.parallel.pipeline import split
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers, pruned_view
from arclight.parallel.pipeline.splitting.sliced_module import SlicedModule
from arclight.parallel.pipeline.splitting.stage_assignment import StageAssignment


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def compare(model: nn.Module, pipe: Any, *args: Any) -> None:
    """Result and gradients of a pipe, run as processes would: each stage gets leaves, and gradients are handed back."""
    model.zero_grad()
    wanted = model(*copy.deepcopy(args))
    direction = torch.randn_like(wanted)
    (wanted * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    received: tuple[Tensor, ...] = ()
    steps = []
    for stage in pipe.stages:
        given = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in received)
        out = stage(*given, args=copy.deepcopy(args))
        received = out if isinstance(out, tuple) else (out,)
        steps.append((given, received))
    torch.testing.assert_close(received[0], wanted, rtol=0, atol=0)
    back: list[Tensor | None] = [direction]
    for given, sent in reversed(steps):
        pairs = [(x, g) for x, g in zip(sent, back, strict=True) if g is not None and x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        back = [x.grad for x in given]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, gradients, rtol=0, atol=1e-13)


class InPlace(nn.Module):
    """Code between parts, and parts, change what parts returned."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(3))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        x += 1
        for block in self.blocks:
            y = block(x)
            x = y.mul_(2)
            x[:, 0] = x[:, 0] * 0.5
        return self.last(x + first if self.late else x)


def test_values_that_change_in_place_are_received_so_that_they_can() -> None:
    model = InPlace().double()
    for stages in range(1, 6):
        pipe = split(model, (floats(2, 4),), stages=stages, policy=even_cuts)
        compare(model, pipe, floats(3, 4))


def test_in_place_changes_that_a_later_stage_needs_are_refused() -> None:
    model = InPlace(late=True).double()
    with pytest.raises(
        PlanError, match=r"blocks\.0.* changes in place what first returned, and a later stage needs it"
    ):
        split(model, (floats(2, 4),), at=["blocks.1"], frontend="slice")
    pipe = split(model, (floats(2, 4),), at=["blocks.0"], frontend="slice")
    compare(model, pipe, floats(2, 4))


def test_all_cuts_of_a_model_with_everything_give_what_the_model_gives() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 6)
            self.drop = nn.Dropout(0.0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.gain = nn.Parameter(torch.randn(6))
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(self.embed(x))
            start, mean = x, x.mean(-1, keepdim=True)
            for index, block in enumerate(self.blocks):
                part = functional.gelu(block(x * self.gain))
                x = x + (part if index else part.softmax(-1))
            return self.head(torch.cat((x[:1], start[1:] * mean[1:])))

    model = Model().double()
    example = (floats(3, 4),)
    calls = len(split(model, example, stages=1).graph.calls)
    for count in (2, 3, 6):
        for rest in itertools.combinations(range(1, calls), count - 1):
            pipe = split(model, example, stages=count, policy=lambda graph, stages, rest=rest: (0, *rest))
            compare(model, pipe, floats(4, 4))


def test_our_own_decoder_sliced_is_our_own_decoder_with_parts_deleted() -> None:
    from arclight.text import build_model

    model = build_model("llama3-debug").double()
    tokens = torch.randint(0, model.config.vocab_size, (2, 8))
    expected = model(tokens)
    cuts = assign_layers(model, 2)
    parts = [pruned_view(model, cut) for cut in cuts]
    deleted = parts[1](parts[0](tokens))
    pipe = split(model, (tokens,), at=[f"layers.{cuts[1].layers[0]}"])
    torch.testing.assert_close((deleted, pipe(tokens)), (expected, expected), rtol=0, atol=0)
    for part, stage in zip(parts, pipe.stages, strict=True):
        assert dict(part.named_parameters()).keys() == dict(stage.named_parameters()).keys()


class Steps(al.Module):
    """A user's own module: its training step is what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.seen = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.seen += 1
        return functional.cross_entropy(self.head(self.body(x)) * self.scale, y)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.head(self.body(batch[0])).argmax(-1)


@pytest.mark.parametrize("own", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_a_function_of_a_module_is_cut_in_place(own: list[int]) -> None:
    module = Steps().double()
    batch = (floats(5, 4), torch.randint(0, 3, (5,)))
    whole = copy.deepcopy(module)
    graph = capture_call_graph(module, module.training_step, (batch, 0), {})
    assignment = StageAssignment.cut(graph, [0, 2, 3])
    assert [call.name for call in graph.calls] == ["body.0", "body.2", "body.4", "head"]
    others = [copy.deepcopy(module) for _ in range(3)]
    everyone = [
        SlicedModule(other, other.training_step, assignment, [number], other) for number, other in enumerate(others)
    ]
    sliced = SlicedModule(module, module.training_step, assignment, own, module)
    names = {0: ["body.0.bias", "body.0.weight", "body.2.bias", "body.2.weight"], 1: ["body.4.bias", "body.4.weight"],
             2: ["head.bias", "head.weight", "scale"]}  # fmt: skip
    assert sorted(name for name, _ in module.named_parameters()) == sorted(n for number in own for n in names[number])
    received: Any = ()
    for number in range(3):
        runs = sliced if number in own else everyone[number]
        received = runs.run(number, received, (batch, 0), {})
    torch.testing.assert_close(received, whole.training_step(batch, 0), rtol=0, atol=0)
    assert module.seen == len(own)
    assert sorted(name for name, _ in module.named_parameters()) == sorted(n for number in own for n in names[number])
    received.backward()
    assert all(p.grad is not None for _, p in module.named_parameters())


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2), add: bool = False) -> Tensor:
        first = None
        for index in order:
            x = self.layers[index](x)
            first = x if first is None else first
        return x + first if add else x


def test_another_way_than_that_of_the_example_is_an_error_and_the_next_run_is_not() -> None:
    model = Ways()
    x = torch.randn(2, 4)
    pipe = split(model, (x,), stages=3, policy=even_cuts)
    with pytest.raises(PlanError, match=r"call 1 of the model is of layers\.2, but was of layers\.1"):
        pipe(x, (0, 2, 1))
    with pytest.raises(PlanError, match="made 2 calls of its parts, and 3"):
        pipe(x, (0, 1))
    with pytest.raises(PlanError, match=r"result needs what layers\.0 returned"):
        pipe(x, add=True)
    with pytest.raises(PlanError, match="is given 0 tensors, and receives 1"):
        pipe.stages[1](args=(x,))
    torch.testing.assert_close(pipe(x), model(x))


def test_statistics_of_a_part_that_two_stages_call_are_refused() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"1\.\w+ is changed by stages 0 and 1"):
        split(model, (torch.randn(3, 4),), at=["2"], frontend="slice")
    split(model, (torch.randn(3, 4),), at=["4"])


def test_results_that_gather_state_of_several_stages_are_refused() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 20, (2, 6))
    with pytest.raises(PlanError, match=r"DynamicCache.*use_cache=False"):
        split(model, {"input_ids": tokens, "use_cache": True}, stages=2, policy=even_cuts)
    assert model.config.use_cache
    assert split(model, {"input_ids": tokens}, stages=2, policy=even_cuts)(input_ids=tokens).past_key_values is None
    assert model.config.use_cache
    pipe = split(
        model, {"input_ids": tokens, "use_cache": False, "output_hidden_states": True}, stages=2, policy=even_cuts
    )
    wanted = model(tokens, use_cache=False, output_hidden_states=True)
    got = pipe(input_ids=tokens, use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(got.hidden_states, wanted.hidden_states)
    again = split(
        model, {"input_ids": tokens, "use_cache": False, "output_hidden_states": True}, stages=2, policy=even_cuts
    )
    for one in (pipe, again):
        got = one(input_ids=tokens, use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(got.hidden_states, wanted.hidden_states)
    model.gradient_checkpointing_enable()
    model.train()
    pipe = split(model, {"input_ids": tokens, "use_cache": False}, stages=3, policy=even_cuts)
    compare(Logits(model), LogitsOf(pipe), tokens)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


class LogitsOf:
    def __init__(self, pipe: Any) -> None:
        def stage(number: int) -> Any:
            def run(*received: Tensor, args: tuple[Tensor]) -> Any:
                out = pipe.stages[number](*received, kwargs={"input_ids": args[0], "use_cache": False})
                return out if isinstance(out, tuple) else out.logits

            return run

        self.stages = [stage(number) for number in range(len(pipe.stages))]


@pytest.fixture
def alone() -> Any:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Residual(nn.Module):
    """Parameters of code between parts, at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x + self.start)
        for layer in self.layers[1:]:
            x = x + layer(x).tanh()
        return x * self.end


def test_stages_are_spread_by_fsdp_part_by_part(alone: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole, x = Residual().double(), floats(3, 4)
    result = whole(x)
    result.sum().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    pipe = split(model, (x,), stages=3, policy=even_cuts)
    for stage in pipe.stages:
        for part in stage.parts.values():
            fully_shard(part, mesh=alone)
        fully_shard(stage, mesh=alone)
    for _ in range(2):
        for stage in pipe.stages:
            stage.zero_grad()
        got = pipe(x)
        got.sum().backward()
        torch.testing.assert_close(got, result, rtol=0, atol=0)
        found = {name: p.grad.full_tensor() for stage in pipe.stages for name, p in stage.named_parameters()}
        torch.testing.assert_close(found, {name: p.grad for name, p in whole.named_parameters()}, rtol=0, atol=1e-13)
    graph = capture_call_graph(model, None, (x,), {})
    assert [call.name for call in graph.calls] == [call.name for call in pipe.graph.calls]
    again = split(Residual(), (x.float(),), stages=3, policy=even_cuts)
    for stage in again.stages:
        fully_shard(stage, mesh=alone, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert again(x.float()).dtype == torch.bfloat16
