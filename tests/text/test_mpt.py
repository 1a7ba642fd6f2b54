"""MPT: linear biases against scores with a bias, options that bound activations, export with muP's factors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from arclight.parallel import initialize
from arclight.text import LanguageModel, build_model, to_hf
from arclight.text.families.mpt import Alibi, LowPrecisionLayerNorm
from arclight.text.settings import LanguageTask

SIZES: dict[str, Any] = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 4}


def small(name: str = "mpt-debug", **fields: Any) -> Any:
    model = build_model(name, **(SIZES | fields))
    initialize(model, seed=1)
    return model


@pytest.mark.parametrize("heads", [4, 6])
def test_two_more_dimensions_are_a_linear_bias(heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 600, heads, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    q_more, k_more = Alibi(heads, 8)(q, k, torch.arange(600), 0.3)
    found = (torch.einsum("bqhc,bkhc->bhqk", q_more, k_more) * 0.3).softmax(-1)
    slopes = [2 ** (-8 * (n + 1) / 4) for n in range(4)]
    if heads == 6:  # those of eight heads: every second, then the others
        slopes = [2 ** -(n + 1) for n in (1, 3, 5, 7, 0, 2)]
    distance = (torch.arange(600)[None] - torch.arange(600)[:, None]).double()
    bias = torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    wanted = (torch.einsum("bqhc,bkhc->bhqk", q, k) * 0.3 + bias).softmax(-1)
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)


def test_places_are_exact_in_bfloat16_up_to_the_longest_sequences() -> None:
    places, empty = torch.tensor([0, 255, 257, 2047, 32767, 65535]), torch.zeros(1, 6, 1, 0, dtype=torch.bfloat16)
    _, keys = Alibi(1, 8)(empty, empty, places, 1.0)
    assert torch.equal(keys.float().sum(-1).flatten().long(), places)


def test_norms_compute_in_the_precision_of_their_input_without_a_bias() -> None:
    norm = LowPrecisionLayerNorm(16, 1e-5)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        low = norm(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert norm.bias is None
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,)), rtol=0, atol=1e-6)
    torch.testing.assert_close(low.float(), norm(x), rtol=0, atol=0.05)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_gradients_of_norms_in_bfloat16_do_not_depend_on_how_a_batch_is_cut(parts: int) -> None:
    norm = LowPrecisionLayerNorm(64, 1e-5)
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(4096, 64, generator=generator).bfloat16() for _ in range(2))
    for rows, grad in zip(x.chunk(parts), upstream.chunk(parts), strict=True):
        norm(rows).backward(grad)
    wide = x.double()
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = (normed * upstream.double()).sum(0)
    assert norm.weight.grad is not None
    error = (norm.weight.grad.double() - expected).norm() / expected.norm()
    assert error < 2**-8  # that of rounding each part's sum to bfloat16


@pytest.mark.parametrize("bounded", [True, False])
def test_peri_norm_bounds_what_blocks_add(bounded: bool) -> None:
    model = small("mpt-mup-debug", mup=None, peri_norm=bounded)
    with torch.no_grad():
        for layer in model.layers.values():
            layer.feed_forward.w2.weight.mul_(1000)
        context = model.block_context(8, torch.device("cpu"), None, None, None)
        size = float(model.layers["0"](torch.randn(1, 8, 64), context).square().mean().sqrt())
    assert (size < 3) == bounded


def test_capped_logits_are_those_of_the_loss() -> None:
    model = LanguageModel(
        LanguageTask(model="mpt-debug", overrides=SIZES | {"vocab_size": 320, "logit_cap": 0.5}, sampling=None), 257
    )
    model.configure_model()
    with torch.no_grad():
        model.model.output.weight.mul_(20)
    tokens = torch.randint(0, 257, (2, 16))
    logits = model(tokens)
    assert 0.45 < float(logits.detach().abs().max()) <= 0.5
    total, count = model.loss(model.model(tokens, logits=False), tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(total / count, expected, rtol=0, atol=1e-6)


def test_transformers_opens_an_export_with_mups_factors(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small(mup={"base_dim": 32, "base_layers": 1}, clip_qkv=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    to_hf(model, tmp_path / "out")
    tokens = torch.randint(0, 96, (2, 24))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("mpt-mup-debug", {}, "has no MPT with qk_norm, peri_norm, embedding_norm, rotary embeddings"),
        ("mpt-debug", {"alibi_max": 4}, "has no MPT with alibi_max"),
        ("sigma-moe-debug", {}, "has no MPT with experts, rotary embeddings"),
        ("mpt-debug", {"logit_cap": 30.0}, "a mpt model at Hugging Face caps no logits"),
    ],
)
def test_models_transformers_cannot_compute_are_not_written(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        to_hf(small(name, **fields), tmp_path / "out")


def test_experts_have_no_factors_of_mup() -> None:
    with pytest.raises(ValueError, match="muP has no factors for routers: leave mup or moe out"):
        small("sigma-moe-debug", mup={"base_dim": 32})


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="dim = 64 does not divide among 5 heads"):
        small(heads=5)
    with pytest.raises(ValueError, match="of even width each"):
        small(dim=60, heads=4, position="rotary")
    assert small(dim=60, heads=4).config.query_scale == 1 / math.sqrt(15)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("field", ["logit_cap", "clip_qkv", "softmax_scale"])
def test_bounds_and_factors_that_are_not_positive_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: need number > 0"):
        small(**{field: value})


@pytest.mark.parametrize("value", [0, -8, 1.5])
def test_slopes_that_do_not_fall_are_refused(value: float) -> None:
    """They would favour keys that are far away, or none."""
    with pytest.raises(ValueError, match="alibi_max: need int >= 1"):
        small(alibi_max=value)
