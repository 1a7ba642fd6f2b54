"""First values of stages: a function of seed and names, as the modules themselves mean them - or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from arclight.parallel import PlanError, initialize, pipeline
from arclight.parallel.pipeline.weights.initialize import initialize_stages
from arclight.text import build_model

torch.set_num_threads(1)

TOKENS = torch.arange(12).reshape(2, 6)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "vocab_size": 100,
}


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(100, 16, padding_idx=3), nn.Linear(16, 16), nn.LayerNorm(16), nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0),
        nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.PReLU(), nn.GroupNorm(2, 6), nn.ConvTranspose1d(6, 6, 3, padding=1),
        nn.Linear(16, 5),
    )  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=100, n_positions=32, eos_token_id=0))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SMALL))


def t5() -> nn.Module:
    sizes = {"vocab_size": 100, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 37, "d_kv": 8}
    return T5ForConditionalGeneration(T5Config(**sizes, tie_word_embeddings=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "layers": (layers, (TOKENS,)),
    "gpt2": (gpt2, {"input_ids": TOKENS, "use_cache": False}),
    "llama": (llama, {"input_ids": TOKENS, "use_cache": False}),
    "bert": (bert, {"input_ids": TOKENS}),
    "t5": (t5, {"input_ids": TOKENS, "decoder_input_ids": TOKENS, "use_cache": False}),
}


def begun(build: Callable[[], nn.Module], example: Any, stages: int, seed: int = 5) -> dict[str, Tensor]:
    """All tensors of the stages, each of which begins as in a process of its own, whose global generator is at another place."""
    found: dict[str, Tensor] = {}
    for number in range(stages):
        with torch.device("meta"):
            model = build()
        pipe = pipeline.split(model, example, stages=stages, policy=even_cuts)
        torch.manual_seed(100 * stages + number)
        before = torch.get_rng_state()
        pipe.initialize([number], seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        own = dict(pipe.stages[number].named_parameters(remove_duplicate=False))
        own |= dict(pipe.stages[number].named_buffers(remove_duplicate=False))
        assert not any(tensor.is_meta for tensor in own.values())
        for name, tensor in own.items():
            assert name not in found or torch.equal(found[name], tensor), name
        found |= own
    return found


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@cache
def known(name: str, stages: int) -> dict[str, Tensor]:
    return begun(*MODELS[name], stages=stages)


EACH = [name if name in ("layers", "gpt2") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_first_values_do_not_depend_on_the_number_of_stages(name: str) -> None:
    for stages in (2, 4):
        assert is_equal(known(name, stages), known(name, 1))


def test_another_seed_gives_other_values() -> None:
    other, whole = begun(*MODELS["layers"], stages=1, seed=6), known("layers", 1)
    assert [name for name, tensor in other.items() if not torch.equal(tensor, whole[name])]
    assert not torch.equal(whole["1.weight"], whole["3.self_attn.out_proj.weight"])  # of one shape, in two places


@pytest.mark.parametrize("name", EACH)
def test_first_values_are_distributed_as_the_model_means_them(name: str) -> None:
    found, real = known(name, 4), MODELS[name][0]().requires_grad_(False)
    wanted = {**dict(real.named_parameters()), **dict(real.named_buffers())}
    draws = 0
    for key, tensor in wanted.items():
        if not tensor.is_floating_point() or tensor.std(correction=0) == 0 or "rotary" in key:
            assert torch.equal(found[key], tensor), key  # constants, counters, frequencies
        elif tensor.numel() >= 250:
            draws += 1
            assert float(found[key].detach().std() / tensor.std()) == pytest.approx(1, abs=0.2), key
    assert draws >= 4


def test_gpt2_scales_the_weights_that_end_a_branch_by_depth() -> None:
    found = known("gpt2", 4)
    assert float(found["transformer.h.0.mlp.c_proj.weight"].detach().std()) == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert float(found["transformer.h.0.mlp.c_fc.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)


def test_declared_initialisation_is_followed() -> None:
    sizes: Any = {"vocab_size": 96, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48}
    whole = build_model("llama3-debug", **sizes)
    initialize(whole, 5)
    found = begun(lambda: build_model("llama3-debug", **sizes), (TOKENS,), 4)
    assert is_equal(found, {**dict(whole.named_parameters()), **dict(whole.named_buffers())})


class Streams(nn.Module):
    """Parameters of one module that different parts use, drawn one after the other until numbers fit, some with a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.empty(50, 4)) for _ in range(3))
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.first, a=-0.6, b=0.6)
        self.second.data.copy_(torch.rand(50, 4) + 2)
        nn.init.normal_(self.third, generator=torch.Generator().manual_seed(4))
        nn.init.normal_(self.two.weight, 3.0)  # after what that did itself

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x @ self.first.T @ self.first)
        x = self.two(x @ self.second.T @ self.second)
        return self.three(x @ self.third.T @ self.third)  # type: ignore[no-any-return]


def test_parameters_of_one_module_that_are_in_different_stages() -> None:
    whole = {name: tensor.detach() for name, tensor in begun(Streams, (torch.randn(2, 4),), 1).items()}
    assert is_equal(begun(Streams, (torch.randn(2, 4),), 3), whole)
    assert float(whole["first"].abs().max()) <= 0.6
    assert float(whole["second"].min()) >= 2
    assert float(whole["two.weight"].mean()) == pytest.approx(3, abs=1)
    assert float(whole["third"].std()) == pytest.approx(1, abs=0.2)


class Constructed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.full((3,), 0.5))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def reset_parameters(self) -> None:
        self.weight.data[0] = 1


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ways", torch.tensor([2, 3]))


@pytest.mark.parametrize(("kind", "name"), [(Constructed, "gain"), (Half, "weight"), (Ways, "ways")])
def test_constructor_values_on_meta_are_refused_before_initialisation(kind: type[nn.Module], name: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(
        PlanError, match=rf"1\.{name} has its first value from the constructor of {kind.__name__}.*reset_parameters"
    ):
        initialize_stages(model)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("steps", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.line.reset_parameters()
        nn.init.ones_(self.line.weight)
        self.line.bias.data = torch.ones(3)
        self.steps = torch.arange(3.0, device=self.steps.device)


def test_initialised_tensors_keep_their_values() -> None:
    with torch.device("meta"):
        model = Frequencies()
    model.line = nn.Linear(3, 3)
    before = {name: tensor.clone() for name, tensor in model.line.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.line.parameters()]
    assert initialize_stages(model) == ("steps",)
    assert model.steps.tolist() == [0, 1, 2]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.line.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.line.parameters()] == places
    assert initialize_stages(model) == ()


def test_weights_of_recurrent_layers_are_what_they_compute_with() -> None:
    with torch.device("meta"):
        model = nn.LSTM(4, 4, 2)
    initialize_stages(model, seed=1)
    x = torch.randn(3, 1, 4)
    other = nn.LSTM(4, 4, 2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x)[0], other(x)[0])
