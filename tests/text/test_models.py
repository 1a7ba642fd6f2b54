"""Models by name, their first weights, and generation's cache beside the whole pass."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from arclight.parallel import Normal, draw, initialize
from arclight.text import build_model
from arclight.text.families.zoo import model_config
from arclight.text.model import layers
from arclight.text.model.decoder import Decoder, active_parameters, flops_per_token
from arclight.text.model.kv_cache import KVCache

SMALL: dict[str, dict[str, Any]] = {
    "llama3-debug": {"layers": 2},
    "qwen3-debug": {"layers": 2},
    "gpt2-debug": {"layers": 2},
    "mpt-debug": {"layers": 2, "clip_qkv": 0.5},
    "mpt-mup-debug": {"layers": 2, "logit_cap": 2.0},
    "sigma-moe-debug": {"layers": 2},
    "switch-head-debug": {"layers": 2},
    "deptoe-debug": {"interleaved": True, "xpos": True},
    "qwen3-moe-debug": {"layers": 2},
    "deepseek-v3-debug": {"layers": 2},
    "llama4-debug": {"layers": 4, "chunk": 8, "temperature_floor": 4},
}


@functools.cache
def small(name: str) -> Decoder:
    """A model that tests leave as it is."""
    model = build_model(name, **SMALL[name])
    initialize(model, seed=0)
    return model


@functools.cache
def published(name: str) -> Decoder:
    """A model without values, of a published size."""
    with torch.device("meta"):
        return build_model(name)


def test_names_and_fields_that_do_not_exist_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="llama3-8b"):
        build_model("llama3-8B")
    with pytest.raises(ValueError, match=r"deepseek-v3-debug's moe has no 'bias_rat' to set; did you mean bias_rate"):
        build_model("deepseek-v3-debug", moe={"bias_rat": 0.1})
    with pytest.raises(ValueError, match="did you mean heads"):
        build_model("llama3-debug", head=3)


def test_heads_that_do_not_divide_are_named_before_anything_is_built() -> None:
    for overrides, said in (
        ({"heads": 6}, "6 heads do not divide among kv_heads = 4"),
        ({"heads": 12}, "dim = 256 does not divide among 12 heads"),
        ({"heads": 0}, "heads: need int >= 1, got 0"),
        ({"kv_heads": 0}, "kv_heads: need int >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            build_model("llama3-debug", **overrides)
    for name in ("gpt2-debug", "mpt-debug"):
        with pytest.raises(ValueError, match="does not divide among 7 heads"):
            build_model(name, heads=7)


def test_fields_of_experts_are_set_one_by_one() -> None:
    moe = build_model("deepseek-v3-debug", moe={"bias_rate": "0.1", "top_k": 2}).config.moe
    assert (moe.bias_rate, moe.top_k, moe.experts, moe.score) == (0.1, 2, 16, "sigmoid")


def test_first_weights_depend_on_seed_and_name_only() -> None:
    models = [build_model("llama3-debug", layers=count) for count in (1, 2)]
    for model in models:
        torch.randn(len(model.layers))  # the global generator has no say
        initialize(model, seed=3)
    small, large = (dict(model.named_parameters()) for model in models)
    assert torch.equal(small["layers.0.attention.wq.weight"], large["layers.0.attention.wq.weight"])
    assert not torch.equal(large["layers.0.attention.wq.weight"], large["layers.1.attention.wq.weight"])


@pytest.mark.parametrize("shape", [(3000, 700), (5,), (2, 300, 4000), ()])
def test_a_part_of_a_tensor_is_drawn_as_in_the_whole(shape: tuple[int, ...]) -> None:
    whole = draw("w", shape, Normal(0.5), seed=1)
    part = tuple(slice(size // 3, size - size // 4) for size in shape)
    assert torch.equal(draw("w", shape, Normal(0.5), seed=1, part=part), whole[part])
    if whole.numel() > 1000:
        assert whole.std() == pytest.approx(0.5 * 0.9866, rel=0.01)  # of a normal cut off at three deviations
        assert whole.abs().max() <= 1.5


def test_a_parameter_that_nobody_declares_is_named() -> None:
    with pytest.raises(KeyError, match="weight"):
        initialize(torch.nn.Linear(2, 2), seed=0)


@pytest.mark.parametrize("name", SMALL)
def test_a_cache_changes_nothing_but_the_work(name: str) -> None:
    model = small(name)
    tokens = torch.randint(0, 2048, (2, 48))
    whole, cache = model(tokens), KVCache(2, 48)
    steps = [model(part, cache=cache) for part in tokens.split([20, 1, 1, 26], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="room for 48"):
        model(tokens[:, :1], cache=cache)


@pytest.mark.parametrize("name", SMALL)
def test_packed_documents_do_not_see_one_another(name: str) -> None:
    model = small(name)
    tokens = torch.randint(0, 2048, (1, 30))
    documents = torch.tensor([[0] * 11 + [1] * 19])
    positions = torch.cat((torch.arange(11), torch.arange(19)))[None]
    packed = model(tokens, positions, documents)
    alone = torch.cat((model(tokens[:, :11]), model(tokens[:, 11:])), 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


PUBLISHED = {  # millions of parameters, tied ones once
    "llama3-1b": 1235.8, "llama3-3b": 3212.7, "llama3-8b": 8030.3, "llama3-70b": 70553.7, "llama3-405b": 405853.4,
    "qwen3-0.6b": 596.0, "qwen3-1.7b": 1720.6, "qwen3-4b": 4022.5, "qwen3-8b": 8190.7, "qwen3-14b": 14768.3,
    "qwen3-32b": 32762.1, "gpt2-124m": 124.4, "gpt2-350m": 354.8, "gpt2-774m": 774.0, "gpt2-1.5b": 1557.6, "mpt-7b": 6649.3,
    "qwen3-30b-a3b": 30532.1, "qwen3-235b-a22b": 235093.6, "deepseek-v3-16b": 15706.5, "deepseek-v3-236b": 235741.4,
    "deepseek-v3-671b": 671026.4, "llama4-scout-17bx16e": 107769.9, "llama4-maverick-17bx128e": 400711.9,
}  # fmt: skip


SMALLEST = {
    "llama3-1b",
    "qwen3-0.6b",
    "gpt2-124m",
    "mpt-7b",
    "qwen3-30b-a3b",
    "deepseek-v3-16b",
    "llama4-scout-17bx16e",
}
"""Of each family; the others are slow."""


@pytest.mark.parametrize(
    "name", [name if name in SMALLEST else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED]
)
def test_published_sizes_have_their_parameters(name: str) -> None:
    model = published(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PUBLISHED[name], abs=0.06)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("44m", 44),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("126m", 126), ("244m", 244), ("318m", 318), ("1b", 1040))
        ),
    ],
)
def test_deptoe_has_the_parameters_of_its_names(size: str, millions: int) -> None:
    with torch.device("meta"):
        model = build_model(f"deptoe-{size}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_sequences_padded_at_the_left_are_as_alone(name: str) -> None:
    model = small(name)
    tokens = torch.randint(0, 2048, (2, 20))
    cache = KVCache(2, 20, padding=torch.tensor([0, 7]))
    logits = torch.cat([model(part, cache=cache) for part in tokens.split([12, 1, 7], 1)], 1)
    torch.testing.assert_close(logits[0], model(tokens[:1])[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1, 7:], model(tokens[1:, 7:])[0], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="leave them out"):
        model(tokens, documents=torch.zeros_like(tokens), cache=cache)


ACTIVE = {  # billions of parameters per token, as their papers and model cards say
    "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "deepseek-v3-236b": 21, "deepseek-v3-671b": 37, "llama4-scout-17bx16e": 17,
    "llama4-maverick-17bx128e": 17,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in SMALLEST else pytest.param(name, marks=pytest.mark.slow) for name in ACTIVE]
)
def test_a_token_meets_as_many_parameters_as_published(name: str) -> None:
    model = published(name)
    assert active_parameters(model) / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)
    table = model.tok_embeddings.weight.numel()
    assert active_parameters(model) - active_parameters(model, embeddings=False) == pytest.approx(table)


def test_operations_of_attention_are_those_of_the_keys_that_are_seen() -> None:
    whole = {"layers": 4, "chunk": None, "dim": 64, "heads": 4}
    with torch.device("meta"):
        every, chunked = (build_model("llama4-debug", **whole | {"chunk": chunk}) for chunk in (None, 16))
    per_key = 12 * every.config.heads * every.config.attention_width
    assert flops_per_token(every, 128) - flops_per_token(chunked, 128) == per_key * 3 * (
        128 - 16
    )  # three of four layers
    assert flops_per_token(every, 16) == flops_per_token(chunked, 16)


def test_text_does_not_pass_through_the_encoder_of_images() -> None:
    with torch.device("meta"):
        sees = build_model("llama3-vision-debug")
    trunk = sum(
        p.numel() for name, p in sees.named_parameters() if not name.startswith(("vision.", "projector.", "tok_"))
    )
    keys = 12 * sees.config.layers * sees.config.heads * sees.config.attention_width * 32
    assert flops_per_token(sees, 32) == 6 * trunk + keys


@pytest.mark.parametrize("name", ["llama3-debug", "deepseek-v3-debug"])
def test_rotations_are_copied_to_a_device_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_TABLES", {})
    model, tokens = build_model(name, layers=2), torch.zeros(1, 8, dtype=torch.int64)
    initialize(model, seed=0)
    with torch.inference_mode():  # whose tensors no backward may use
        model(tokens)
    first = model(tokens)
    first.sum().backward()
    (made,) = layers._TABLES.values()
    monkeypatch.setattr(torch, "arange", functools.partial(_counted, torch.arange, calls := []))
    assert torch.equal(model(tokens), first)
    dtypes = {options.get("dtype", torch.int64) for options in calls}
    assert not any(dtype.is_floating_point for dtype in dtypes)  # the places of tokens only, no angles
    assert next(iter(layers._TABLES.values())) is made
    with FakeTensorMode() as fake, torch.no_grad():
        positions = fake.from_tensor(torch.arange(8))
        assert model.rotation(positions).cos.shape == (1, 8, made.numel())
    assert next(iter(layers._TABLES.values())) is made


def _counted(arange: Any, calls: list[dict[str, Any]], *args: Any, **options: Any) -> Any:
    calls.append(options)
    return arange(*args, **options)


@pytest.mark.parametrize("name", ["llama3-debug", "llama4-debug"])
def test_the_newest_token_needs_no_mask_in_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = copy.deepcopy(small(name)).eval(), torch.randint(0, 256, (2, 12))
    cache, seen = KVCache(2, 12), []
    model(tokens[:, :11], cache=cache)
    monkeypatch.setattr("arclight.text.model.attention.scaled_dot_product_attention", lambda *args, **options: (
        seen.append(options["attn_mask"]), scaled_dot_product_attention(*args, **options))[1])  # fmt: skip
    last = model(tokens[:, 11:], cache=cache)
    assert [mask is None for mask in seen].count(True) == (
        2 if name == "llama3-debug" else 1
    )  # not those within chunks
    torch.testing.assert_close(last, model(tokens)[:, 11:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("half", "residual"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
@pytest.mark.parametrize("name", SMALL)
def test_the_residual_stream_has_one_type_with_weights_in_float32_and_gathered_in_bfloat16(
    name: str, half: torch.dtype, residual: torch.dtype
) -> None:
    model, tokens = copy.deepcopy(small(name)), torch.randint(0, 256, (2, 12))
    seen: list[torch.dtype] = []
    for block in (*model.layers.values(), model.norm):
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", half, cache_enabled=False):
        model(tokens)
    assert set(seen) == {residual}
    assert len(seen) == model.config.layers + 1
    seen.clear()
    if half == torch.bfloat16:  # as FSDP gathers them
        whole = copy.deepcopy(model).bfloat16()
        with torch.no_grad(), torch.autocast("cpu", half, cache_enabled=False):
            logits, same = model(tokens), whole(tokens)
        assert torch.equal(logits, same)


@pytest.mark.parametrize("name", ["llama3-debug", "gpt2-debug"])
def test_shapes_are_known_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, layers=2)
    assert model(torch.zeros(2, 8, dtype=torch.int64, device="meta")).shape == (2, 8, model.config.vocab_size)


def test_fields_are_read_under_their_former_names() -> None:
    with pytest.warns(UserWarning, match="query_rank is called q_lora_rank now"):
        assert model_config("deepseek-v3-debug", query_rank=32).q_lora_rank == 32
    with pytest.warns(UserWarning, match="whole_every is called no_rope_layer_interval now"):
        assert model_config("llama4-debug", whole_every=2).no_rope_layer_interval == 2
    with pytest.raises(ValueError, match="has no 'query_rank' to set"):
        model_config("llama3-debug", query_rank=32)
