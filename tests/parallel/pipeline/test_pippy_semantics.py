"""Behaviour that users of PiPPy relied on: names, shared parameters, structure, accumulated gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from arclight.parallel import PlanError
from arclight.parallel.pipeline import Pipe, split

FRONTENDS = ["slice", "trace"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Crossing(nn.Module):
    """A parameter and a module that are each used twice, a buffer between them, and a value that skips over both."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.closing = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))
        self.register_buffer("offset", torch.randn(5, 16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.mixing
        skipped = x
        x = torch.relu(x) @ self.mixing + self.offset
        x = torch.relu(self.linear(x)) + skipped
        return self.linear(x @ self.closing)  # type: ignore[no-any-return]


def crossing(multi_use: Any = "replicate") -> tuple[Crossing, Pipe]:
    """Three stages of it: the parameter is in 0 and 1, the module in 1 and 2."""
    model = Crossing()
    pipe = split(
        model,
        (torch.randn(5, 16),),
        stages=3,
        policy=lambda graph, stages: (0, 1, 3),
        frontend="trace",
        multi_use=multi_use,
    )
    return model, pipe


# -- parameters that several stages use ------------------------------------------------------------------------------


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_sequence_that_ends_with_its_first_module(frontend: Any) -> None:
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, *(nn.Linear(8, 8) for _ in range(4)), first)
    x = torch.randn(3, 8)
    pipe = split(model, (x,), stages=6, frontend=frontend)
    assert pipe.shared == {"0.weight": (0, 5), "0.bias": (0, 5)}
    assert [sorted(dict(stage.named_parameters())) for stage in pipe.stages] == [
        [f"{number % 5}.bias", f"{number % 5}.weight"] for number in range(6)
    ]
    torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("multi_use", "shared"),
    [
        ("replicate", {"mixing": (0, 1), "linear.weight": (1, 2), "linear.bias": (1, 2)}),
        ({"mixing": "transmit"}, {"linear.weight": (1, 2), "linear.bias": (1, 2)}),
        ({"linear.bias": "transmit", "mixing": "replicate"}, {"mixing": (0, 1), "linear.weight": (1, 2)}),
        ("transmit", {}),
    ],
)
def test_tensors_used_by_several_stages_are_shared_or_sent(multi_use: Any, shared: dict[str, tuple[int, ...]]) -> None:
    model, pipe = crossing(multi_use)
    assert pipe.shared == shared
    whole, x = copy.deepcopy(model), torch.randn(5, 16)
    expected, result = whole(x), pipe(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    expected.pow(2).sum().backward()
    result.pow(2).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(whole))
    for name in ("mixing", "linear.weight", "linear.bias"):
        holders = [stage.number for stage in pipe.stages if name in dict(stage.named_parameters())]
        assert holders == list(shared.get(name, holders[:1]))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("multi_use", "said"),
    [
        (3, "multi_use is 3"),
        ("copy", "multi_use is 'copy'"),
        ({"0.weight": "copy"}, "0.weight is 'copy'"),
        ({"9": "transmit"}, "9"),
    ],
)
def test_other_ways_to_use_a_parameter_are_refused(frontend: Any, multi_use: Any, said: str) -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Linear(4, 4), first)
    with pytest.raises(PlanError, match=said):
        split(model, (torch.randn(2, 4),), stages=3, frontend=frontend, multi_use=multi_use)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_use", ["replicate", "transmit"])
def test_every_name_of_a_stage_leads_to_the_model_and_every_parameter_is_covered(multi_use: Any) -> None:
    model, pipe = crossing(multi_use)
    original = dict(model.named_parameters())
    covered = set()
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            assert original[pipe.remap_qualname(name)] is parameter
            covered.add(pipe.remap_qualname(name))
    assert covered == set(original)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_names_are_the_models_own_and_others_are_unknown(frontend: Any) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
            self.out = nn.Linear(4, 4)
            self.out.weight = self.layers[1].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.out(x)  # type: ignore[no-any-return]

    pipe = split(Named(), (torch.randn(2, 4),), stages=4, frontend=frontend)
    assert pipe.remap_qualname("layers.11.bias") == "layers.11.bias"
    assert pipe.remap_qualname("out.weight") == "layers.1.weight"
    assert pipe.remap_qualname("layers.10") == "layers.10"
    assert pipe.remap_qualname("layers.1.somewhere.below") == "layers.1.somewhere.below"
    for unknown in ("layer", "outer.weight", "out2", ""):
        with pytest.raises(KeyError):
            pipe.remap_qualname(unknown)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_parameter_may_lie_deep_and_a_buffer_stays_the_models(frontend: Any) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Module()
            self.outer.inner = nn.Module()
            self.outer.inner.weight = nn.Parameter(torch.ones(4, 4))
            self.register_buffer("level", torch.full((4,), 2.0))
            self.last = nn.Linear(4, 4, bias=False)
            self.last.weight = self.outer.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            inner = self.outer.get_submodule("inner")
            return self.last(x @ inner.get_parameter("weight") + self.level)  # type: ignore[no-any-return]

    model, x = Deep(), torch.ones(2, 4)
    stages = 2 if frontend == "trace" else 1
    pipe = split(model, (x,), stages=stages, frontend=frontend)
    torch.testing.assert_close(pipe(x), torch.full((2, 4), 24.0))
    pipe(x).sum().backward()
    weight = model.outer.inner.weight  # type: ignore[union-attr]
    assert weight is dict(pipe.stages[-1].named_parameters())["outer.inner.weight"]
    torch.testing.assert_close(
        weight.grad, torch.full((4, 4), 20.0)
    )  # 2 rows x (4 columns of the last, and 6 of what it is given)
    assert dict(pipe.stages[0].named_buffers())["level"] is model.level


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_cut_at_a_module_that_is_not_there_names_the_nearest(frontend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(PlanError, match=r"1\.2 is not a module of Sequential; did you mean 1\.[01]"):
        split(model, (torch.randn(2, 4),), at=["1.2"], frontend=frontend)
    pipe = split(model, (torch.randn(2, 4),), at=["1", "1.1"], frontend=frontend)
    assert [list(stage.state_dict()) for stage in pipe.stages] == [
        ["0.weight", "0.bias"], ["1.0.weight", "1.0.bias"], ["1.1.weight", "1.1.bias"],
    ]  # fmt: skip


# -- arguments, results and losses -----------------------------------------------------------------------------------


class Losing(nn.Module):
    """Computes its loss itself, and gives it among other things."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, *extra: Tensor, target: Tensor, scale: float = 1.0, **more: Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x + sum(extra, torch.zeros(())))) * scale)
        loss = functional.cross_entropy(logits + more.get("prior", torch.zeros(())), target)
        return {"dict": {"loss": loss, "logits": logits}, "tuple": (logits, loss), "loss": loss}[self.kind]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("kind", "key"), [("dict", "loss"), ("tuple", 1), ("loss", None)])
def test_a_loss_is_chosen_from_the_result_and_gradients_add_up_over_runs(frontend: Any, kind: str, key: Any) -> None:
    model, x, target = Losing(kind), torch.randn(4, 6), torch.randint(3, (4,))
    whole = copy.deepcopy(model)
    pipe = split(model, ((x,), {"target": target}), at=["last"], frontend=frontend)
    for run in (whole, pipe):
        for _ in range(2):
            result = run(x, target=target)
            (result if key is None else result[key]).backward()
    torch.testing.assert_close(gradients(model), gradients(whole))
    once = copy.deepcopy(whole)
    once.zero_grad()
    result = once(x, target=target)
    (result if key is None else result[key]).backward()
    torch.testing.assert_close(gradients(model), {name: 2 * g for name, g in gradients(once).items()})


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_loss_may_be_a_function_after_the_last_stage(frontend: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    whole, x, target = copy.deepcopy(model), torch.randn(4, 6), torch.randn(4, 3)
    pipe = split(model, (x,), stages=2, frontend=frontend)
    for run in (whole, pipe):
        functional.mse_loss(run(x), target).backward()
    torch.testing.assert_close(gradients(model), gradients(whole))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_arguments_come_in_all_of_pythons_ways(frontend: Any) -> None:
    model = Losing("tuple")
    tensors = {"target": torch.randint(3, (4,)), "prior": torch.randn(3)}
    x, extra = torch.randn(4, 6), (torch.randn(6), torch.randn(4, 6))
    pipe = split(model, ((x, *extra), {"scale": 0.5, **tensors}), at=["last"], frontend=frontend)
    expected = model(x, *extra, scale=0.5, **tensors)
    torch.testing.assert_close(pipe(x, *extra, scale=0.5, **tensors), expected, rtol=0, atol=0)
    torch.testing.assert_close(pipe(x, *extra, **dict(reversed(tensors.items())), scale=0.5), expected, rtol=0, atol=0)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_example_is_a_tuple_a_dict_or_both(frontend: Any) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x) + y)  # type: ignore[no-any-return]

    model, x, y = Adds(), torch.randn(2, 4), torch.randn(2, 4)
    for example, args, kwargs in (
        ((x, y), (x, y), {}),
        ({"x": x, "y": y}, (), {"x": x, "y": y}),
        (((x,), {"y": y}), (x,), {"y": y}),
    ):
        pipe = split(model, example, stages=2, frontend=frontend)
        torch.testing.assert_close(pipe(*args, **kwargs), model(x, y), rtol=0, atol=0)
    with pytest.raises(PlanError, match="example_inputs is a Tensor"):
        split(model, x, stages=2, frontend=frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_cutting_and_first_runs_draw_no_random_numbers_of_their_own(frontend: Any) -> None:
    class Drops(nn.Module):
        """Draws its numbers by itself, as layers that drop whole paths do."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.rand(x.shape[0], 1, device=x.device) > 0.5
            return x + self.inner(x) * kept

    model, x = nn.Sequential(*(Drops() for _ in range(3))), torch.randn(6, 8)
    torch.manual_seed(4)
    expected = model(x)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    pipe = split(model, (x,), stages=3, frontend=frontend)
    torch.testing.assert_close(torch.get_rng_state(), before)
    torch.testing.assert_close(pipe(x), expected, rtol=0, atol=0)


class Blocks(nn.Module):
    """Four blocks, and a forward that uses them in a way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}) if way == "modules" else self.block(way)
            for _ in range(4)
        )

    @staticmethod
    def block(way: str) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

        return Block()

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            if self.way == "members":
                x = x + block.down(torch.relu(block.up(x)))
            elif self.way == "modules":
                x = x + block["down"](torch.relu(block["up"](x)))
            elif self.way in ("checkpoint", "reentrant"):
                x = x + checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return x


@pytest.mark.parametrize("way", ["members", "modules", "checkpoint"])
def test_blocks_are_used_in_any_way(way: str) -> None:
    model = Blocks(way)
    whole, x = copy.deepcopy(model), torch.randn(3, 8)
    pipe = split(model, (x,), stages=3, frontend="slice")
    expected, result = whole(x), pipe(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    expected.sum().backward()
    result.sum().backward()
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=0, atol=0)


def test_gradients_that_would_be_lost_in_a_reentrant_checkpoint_are_refused() -> None:
    pipe = split(Blocks("reentrant"), (torch.randn(3, 8),), stages=2, frontend="slice")
    with pytest.raises(PlanError, match=r"reentrant checkpoint.*use_reentrant=False"):
        pipe(torch.randn(3, 8, requires_grad=True))


def test_results_that_hooks_take_out_of_blocks_are_never_of_some_stages_only() -> None:
    config = transformers.BertConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=48,
        attn_implementation="eager",
    )
    bert, tokens = transformers.BertModel(config), torch.randint(48, (2, 6))
    fresh = copy.deepcopy(bert)
    with pytest.raises(PlanError, match=r"what encoder\.layer\.0 computes and does not return"):
        split(bert, ((tokens,), {"output_attentions": True}), stages=2, policy=even_cuts, frontend="slice")
    late = split(bert, (tokens,), stages=2, policy=even_cuts)
    for _ in range(3):
        with pytest.raises(PlanError, match=r"the result needs what encoder\.layer\.0 returned"):
            late(tokens, output_attentions=True)
    with pytest.warns(UserWarning, match="traced graph"):
        pipe = split(fresh, ((tokens,), {"output_attentions": True}), stages=2, policy=even_cuts)
    torch.manual_seed(1)
    expected = fresh(tokens, output_attentions=True)
    torch.manual_seed(1)
    result = pipe(tokens, output_attentions=True)
    assert len(result.attentions) == 2
    torch.testing.assert_close(result.attentions, expected.attentions)
