"""DEPToE: rotations beside complex numbers, repeated blocks beside a model that has each of them anew."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from arclight.parallel import Plan, PlanError, initialize
from arclight.parallel.model.parallelize import check
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers
from arclight.parallel.planning.chain import Chain, Workload
from arclight.text import build_model
from arclight.text.model.balance import loss_routers
from arclight.text.model.decoder import active_parameters, flops_per_token
from arclight.text.model.kv_cache import KVCache
from arclight.text.model.moe import Router

SIZES: dict[str, Any] = {"vocab_size": 96, "dim": 32, "heads": 4, "layers": 2}


def small(name: str = "switch-head-debug", **fields: Any) -> Any:
    model = build_model(name, **(SIZES | fields))
    initialize(model, seed=1)
    return model


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("xpos", [True, False])
def test_queries_and_keys_turn_and_decay_as_published(interleaved: bool, xpos: bool) -> None:
    """Products of pairs as complex numbers in float64: conj(q) k zeta^((n - m) / 512) e^(i (m - n) theta)."""
    positions = torch.tensor([0, 3, 500, 1100, 2047])
    rotation = small(interleaved=interleaved, xpos=xpos).rotation(positions)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 5, 1, 8, generator=generator) for _ in range(2))
    found = torch.einsum("bqhc,bkhc->qk", rotation.apply(q), rotation.of_keys.apply(k))
    split = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    qc, kc = (x[0, :, 0, split[0]].double().numpy() + 1j * x[0, :, 0, split[1]].double().numpy() for x in (q, k))
    places, pairs = positions.double().numpy(), np.arange(4)
    theta, zeta = 10_000.0 ** (-pairs / 4), (pairs / 4 + 0.4) / 1.4
    distance = places[:, None, None] - places[None, :, None]  # of queries from keys
    decay = zeta ** (distance / 512) if xpos else 1.0
    products = np.conj(qc)[:, None] * kc[None] * np.exp(-1j * distance * theta) * decay
    np.testing.assert_allclose(found.double().numpy(), products.real.sum(-1), rtol=2e-4, atol=2e-4)


def test_repeated_blocks_are_one_tensor_whose_gradient_is_the_sum_over_runs() -> None:
    """Beside a model that holds every run's block anew, with the same values."""
    quiet: dict[str, Any] = {"moe": {"entropy_loss": 0.0}, "switch_head": {"entropy_loss": 0.0}}
    shared = small("deptoe-debug", layers=6, group=2, head_dim=8, **quiet).double()
    unrolled = small("deptoe-debug", layers=6, group=6, head_dim=8, **quiet).double()
    assert list(shared.layers) == ["0", "1"]
    own = shared.state_dict()
    copies = {
        name: own[name.replace(f"layers.{name.split('.')[1]}.", f"layers.{int(name.split('.')[1]) % 2}.")]
        if name.startswith("layers.")
        else own[name]
        for name in unrolled.state_dict()
    }
    unrolled.load_state_dict(copies)
    tokens = torch.randint(0, 96, (2, 12))
    torch.testing.assert_close(shared(tokens), unrolled(tokens), rtol=1e-12, atol=1e-12)
    for model in (shared, unrolled):
        model(tokens).square().mean().backward()
    expected = {name: torch.zeros_like(parameter) for name, parameter in shared.named_parameters()}
    for name, parameter in unrolled.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % 2)
        expected[".".join(parts)] += parameter.grad
    for name, parameter in shared.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


def test_losses_of_routers_count_once_for_all_runs() -> None:
    model = small("deptoe-debug", layers=6, group=2, head_dim=8)
    weights = {r.config.entropy_loss if isinstance(r, Router) else r.choice.entropy_loss for r in loss_routers(model)}
    assert weights == {0.01 / 3, 0.001 / 3}


def test_operations_count_each_run() -> None:
    once, twice = (small("deptoe-debug", layers=layers, group=2, head_dim=8) for layers in (2, 4))
    blocks = active_parameters(once.layers)
    assert flops_per_token(twice, 64) - flops_per_token(once, 64) == 6 * blocks + 12 * 4 * 8 * 2 * 64


def test_generation_keeps_keys_of_each_run() -> None:
    model, cache = small("deptoe-debug", layers=4, group=2, head_dim=8), KVCache(1, 9)
    model(torch.randint(0, 96, (1, 9)), cache=cache)
    assert len(cache.tensors()) == 2 * 4


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(pp=2, micro_batches=2), "blocks that run 2 times with the same weights would be cut by the stages of pp = 2"),
        (Plan(dp_shard=3, ep=3), "4 experts cannot be cut into ep = 3 equal parts|has 4 experts, which ep = 3"),
        (Plan(tp=3), "attention heads cannot be cut into tp = 3"),
    ],
)  # fmt: skip
def test_plans_that_do_not_fit_are_refused(plan: Plan, said: str) -> None:
    model = small("deptoe-debug", layers=4, group=2, head_dim=8, moe={"experts": 4, "top_k": 2})
    with pytest.raises(PlanError, match=said):
        check(model, plan)


def test_stages_and_estimates_know_no_repeats() -> None:
    with pytest.raises(
        PlanError, match="blocks of DEPToE run 2 times with the same weights, and 2 stages would cut that"
    ):
        assign_layers(small("deptoe-debug", layers=4, group=2, head_dim=8), 2)
    assert len(assign_layers(small("deptoe-debug", layers=2, group=2, head_dim=8, tied=False), 2)) == 2
    make = functools.partial(build_model, "deptoe-debug")
    with pytest.raises(PlanError, match="costs are not known of blocks that run 2 times"):
        Chain(Workload(model=make, batch=lambda *_: None, loss=lambda *_: torch.ones(()), samples=1, sequence=8))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"xpos": True, "position": "alibi"}, 'xpos is of rotary embeddings, and position = "alibi"'),
        ({"interleaved": True, "position": "alibi"}, "interleaved is of rotary embeddings"),
        ({"xpos": True, "max_positions": 131072}, "xpos reaches 65536 positions, .* max_positions = 131072"),
        ({"mup": {"base_dim": 32}}, "switch-head-debug has no table of muP's factors"),
        ({"layers": 4, "group": 3}, "layers = 4 is not a multiple of group = 3"),
        ({"group": 0}, "is not a multiple of group = 0"),
        ({"moe": {"top_k": 3, "experts": 2}}, "top_k = 3 must lie between 1 and the 2 experts"),
        ({"heads": 5}, "dim = 32 does not divide among 5 heads"),
    ],
)
def test_invalid_configurations_are_refused(fields: dict[str, Any], said: str) -> None:
    name = "deptoe-debug" if "moe" in fields else "switch-head-debug"
    with pytest.raises(ValueError, match=said):
        small(name, **fields)


def test_xpos_in_float16_is_exact_or_refused() -> None:
    model = small(xpos=True, max_positions=4096)
    places = torch.arange(4096)
    rotation = model.rotation(places)
    q, k = (torch.full((1, 4096, 1, model.config.width), 300.0) for _ in range(2))
    halves = rotation.apply(q.half()), rotation.of_keys.apply(k.half())
    assert all(torch.isfinite(half).all() for half in halves)
    wide = rotation.apply(q), rotation.of_keys.apply(k)
    near = places[1:] - 1  # keys just before their queries, at every place
    products = [(a[0, 1:, 0].float() * b[0, near, 0].float()).sum(-1) for a, b in (halves, wide)]
    torch.testing.assert_close(*products, rtol=2e-3, atol=1.0)
    for interleaved in (False, True):
        longer = small(xpos=True, interleaved=interleaved, max_positions=16_384).rotation(places)
        for part in (longer, longer.of_keys):
            with pytest.raises(ValueError, match=r"max_positions = 16384 leaves float16's range, .* bfloat16"):
                part.apply(q.half())
        assert torch.isfinite(longer.apply(q.bfloat16())).all()


def test_the_furthest_positions_of_xpos_are_finite() -> None:
    rotation = small(xpos=True, max_positions=65_536).rotation(torch.tensor([0, 65_535]))
    for part in (rotation, rotation.of_keys):
        assert torch.isfinite(part.cos).all()
        assert part.cos.abs().amin() > 0
