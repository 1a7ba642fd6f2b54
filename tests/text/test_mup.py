"""muP and CompleteP: factors by their table, activations that do not grow with width, the same model after export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from arclight.optim import ADOPT, SGD, AdamW, Mixed, Muon
from arclight.parallel import initialize
from arclight.text import build_model, from_hf, to_hf
from arclight.text.families.zoo import model_config, model_names

SIZES: dict[str, Any] = {"vocab_size": 96, "dim": 128, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 192}
MUP = {"base_dim": 64, "base_layers": 2, "alpha": 0.5}
"""Width twice and depth three times the base."""


def small(name: str = "llama3-debug", **fields: Any) -> Any:
    model = build_model(name, **(SIZES | {"mup": MUP} | fields))
    initialize(model, seed=1)
    return model


def options(optimizer: Any) -> dict[str, dict[str, Any]]:
    return {name: group for name, _, group in optimizer.named()}


@pytest.mark.parametrize("kind", [AdamW, ADOPT])
def test_rates_are_those_of_the_table(kind: Any) -> None:
    model = small()
    settings = kind(lr=0.01, weight_decay=0.1, eps=1e-8)
    found = options(settings.build(model.named_parameters(), (), model.config.rates))
    matrix, norm = found["layers.3.feed_forward.w2.weight"], found["layers.0.attention_norm.weight"]
    depth = 3**-0.5  # l^(alpha - 1), and l^-alpha, at alpha = 1/2
    assert matrix["lr"] == pytest.approx(0.01 * depth / 2)
    assert matrix["weight_decay"] == pytest.approx(0.2)
    assert matrix["eps"] == norm["eps"] == pytest.approx(1e-8 * depth / 2)
    assert norm["lr"] == pytest.approx(0.01 * depth)
    assert norm["weight_decay"] == 0
    for name in ("tok_embeddings.weight", "output.weight", "norm.weight"):
        assert (found[name]["lr"], found[name]["eps"]) == (0.01, 1e-8)
    independent = options(
        kind(weight_decay=0.1, decay_scale="lr/peak").build(model.named_parameters(), (), model.config.rates)
    )
    assert independent["layers.0.attention.wq.weight"]["weight_decay"] == pytest.approx(0.1 * depth)


def test_orthogonal_updates_and_groups_by_pattern_take_their_factors() -> None:
    model, depth = small(), 3**-0.5
    settings = Mixed(groups=(SGD(pattern=r"layers\.0\.", lr=0.4),), default=Muon(lr=0.2, others=AdamW(lr=0.1)))
    found = options(settings.build(model.named_parameters(), (), model.config.rates))
    assert found["layers.0.attention.wq.weight"]["lr"] == pytest.approx(0.4)  # l^(2 alpha - 1), at alpha = 1/2
    assert found["layers.0.attention_norm.weight"]["lr"] == pytest.approx(0.4 * 2)
    assert found["layers.1.attention.wq.weight"]["lr"] == pytest.approx(0.2 * depth)
    assert found["layers.1.attention_norm.weight"]["lr"] == pytest.approx(0.1 * depth)
    assert found["output.weight"]["lr"] == 0.1
    wide = options(Muon(lr=0.2, scale="rms").build(model.named_parameters(), (), model.config.rates))
    assert wide["layers.1.attention.wq.weight"]["lr"] == pytest.approx(0.2 * depth / 2**0.5)


def test_gradient_descent_moves_every_kind_of_parameter_by_the_table() -> None:
    """Spectral norms of updates of hidden matrices and elements of all others': the same at any width, l^(alpha - 1) in branches."""
    tokens = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(0))

    def moved(width: int, layers: int) -> dict[str, float]:
        heads, mup = width // 16, {"base_dim": 64, "base_layers": 2, "alpha": 0.5}
        model = small(dim=width, layers=layers, heads=heads, kv_heads=heads, hidden=2 * width, mup=mup).double()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        settings = SGD(lr=0.1, momentum=0.0, weight_decay=0.0)
        optimizer = settings.build(model.named_parameters(), (), model.config.rates)
        torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        return {
            name: float(torch.linalg.matrix_norm(c, 2) if "layers" in name and c.ndim > 1 else c.square().mean().sqrt())
            for name, c in changes.items()
        }

    base = moved(64, 2)
    for wide, deep in ((moved(256, 2), 1.0), (moved(64, 16), 8**-0.5)):
        for name, far in base.items():
            expected = far * deep if "layers" in name else far
            assert 0.4 < wide[name] / expected < 2.5, name


def test_decay_by_gradient_descent_is_as_fast_at_any_width() -> None:
    model = small()
    found = options(SGD(lr=0.1, weight_decay=0.01).build(model.named_parameters(), (), model.config.rates))
    assert all(
        group["lr"] * group["weight_decay"] == pytest.approx(0.001) for group in found.values() if group["weight_decay"]
    )


def test_a_pipeline_stage_has_the_rates_and_multipliers_of_the_whole() -> None:
    model = small()
    names = dict(model.named_parameters())
    whole = options(AdamW().build(names.items(), (), model.config.rates))
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.output = None
    last.tok_embeddings = None
    for number in range(6):
        del (last if number < 2 else first).layers[str(number)]
    tokens = torch.randint(0, 96, (2, 16))
    assert torch.equal(last(first(tokens)), model(tokens))
    stage = options(AdamW().build(last.named_parameters(), names, last.config.rates))
    for name, group in stage.items():
        assert [group[key] for key in ("lr", "eps", "weight_decay")] == [
            whole[name][key] for key in ("lr", "eps", "weight_decay")
        ]


def test_first_weights_are_those_of_the_table() -> None:
    wide, base = small(dim=1024, layers=4, heads=64), small(dim=64, layers=2, heads=4)
    ratio = {
        name: float((wide.get_parameter(name).std() / base.get_parameter(name).std()).detach())
        for name in (
            "tok_embeddings.weight",
            "output.weight",
            "layers.0.attention.wq.weight",
            "layers.0.attention.wo.weight",
        )
    }
    assert list(ratio.values()) == pytest.approx([1, 1, 0.25, 0.25], rel=0.03)


def test_the_base_shape_is_the_standard_model_but_for_attention() -> None:
    plain = small(dim=64, layers=2, heads=4, mup=None)
    base = small(dim=64, layers=2, heads=4)
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    assert {name: group["lr"] for name, group in options(
        AdamW().build(base.named_parameters(), (), base.config.rates)).items()} == {name: 1e-3 for name, _ in base.named_parameters()}  # fmt: skip
    with torch.no_grad():
        for layer in plain.layers.values():
            layer.attention.wq.weight /= 4  # 1 / width, where heads are 16 wide, instead of 1 / sqrt(width)
    tokens = torch.randint(0, 96, (2, 16))
    torch.testing.assert_close(base(tokens), plain(tokens), rtol=0, atol=1e-6)


def grown(name: str, mup: dict[str, Any] | None, width: int) -> float:
    """Root mean square of the residual stream after ten steps on a text that repeats itself."""
    sizes: dict[str, Any] = {"vocab_size": 96, "dim": width, "layers": 2, "heads": width // 16, "mup": mup}
    if name == "llama3-debug":
        sizes |= {"kv_heads": width // 16, "hidden": 2 * width}
    model = build_model(name, **sizes)
    initialize(model, seed=1)
    optimizer = AdamW(lr=3e-3, betas=(0.9, 0.95)).build(model.named_parameters(), (), model.config.rates)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 96, (64,), generator=generator).repeat(3)
    outputs: list[torch.Tensor] = []
    model.layers["1"].register_forward_hook(lambda module, given, out: outputs.append(out.detach()))
    for _ in range(11):
        batch = torch.stack([text[start : start + 33] for start in torch.randint(0, 64, (4,), generator=generator)])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    return float(outputs[-1].square().mean().sqrt())


def test_activations_do_not_grow_with_width() -> None:
    """The coordinate check (Yang et al. 2022, appendix D.1), per doubling of the width."""
    cases = {
        "mup": ("llama3-debug", {"base_dim": 64}),
        "standard": ("llama3-debug", None),
        "mpt": ("mpt-mup-debug", {"base_dim": 64}),
    }
    growth = {key: (grown(*case, 256) / grown(*case, 64)) ** 0.5 for key, case in cases.items()}  # type: ignore[arg-type]
    assert growth["mup"] == pytest.approx(1, abs=0.1)
    assert growth["mpt"] == pytest.approx(1, abs=0.1)
    assert growth["standard"] > 1.5


@pytest.mark.parametrize("name", ["llama3-debug", "qwen3-debug"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_an_export_with_the_same_logits(name: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small(name, tied=tied, **({"head_dim": 24} if name == "qwen3-debug" else {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # logits far from zero
    to_hf(model, tmp_path / "out")
    tokens = torch.randint(0, 96, (2, 24))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(tokens).abs().max() > 1
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    again = from_hf(tmp_path / "out")
    assert again.config.mup is None
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="fill a model without mup"):
        from_hf(tmp_path / "out", model=model)


@pytest.mark.parametrize(
    ("name", "mup", "said"),
    [
        ("llama3-debug", {"base_layers": 2}, "lacks base_dim"),
        ("llama3-debug", {"base_dim": 48}, "dim = 128 is not a multiple of mup.base_dim = 48"),
        ("llama3-debug", {"base_dim": 64, "base_layers": 4}, "layers = 6 is not a multiple of mup.base_layers = 4"),
        ("llama3-debug", {"base_dim": 64, "depth": 2}, "mup has no 'depth'"),
        ("llama3-debug", {"base_dim": 64, "alpha": 2.0}, "alpha: need number in"),
        ("llama3-debug", {"base_dim": 0}, "base_dim: need"),
        ("gpt2-debug", {"base_dim": 64}, "gpt2-debug has no table of muP's factors"),
        ("qwen3-moe-debug", {"base_dim": 64}, "qwen3-moe-debug has no table of muP's factors"),
    ],
)
def test_shapes_that_scale_nothing_are_refused(name: str, mup: dict[str, Any], said: str) -> None:
    fields = {"dim": 128} if name != "llama3-debug" else SIZES
    with pytest.raises(ValueError, match=said):
        build_model(name, **fields, mup=mup)


def test_families_that_are_advised_take_mup() -> None:
    with pytest.raises(ValueError, match="no table of muP's factors") as refused:
        model_config("gpt2-debug", mup={"base_dim": 64})
    advised = str(refused.value).rpartition(" a model of ")[2].split(", ")
    assert {"llama3", "mpt"} <= set(advised)
    for family in advised:
        name = next(name for name in model_names() if name.startswith(f"{family}-"))
        dim = model_config(name).dim
        assert model_config(name, mup={"base_dim": dim // 2}).mup.base_dim == dim // 2, family
