"""The outer step against torch's SGD and the formulas of federated averaging."""

from __future__ import annotations

import pytest
import torch

from arclight.optim.outer import Outer, due, fragments_of, pseudo_gradient


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 4, generator=generator, dtype=dtype) for name in ("a", "b")}


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_outer_step_is_sgd_on_pseudo_gradients(momentum: float, nesterov: bool) -> None:
    outer = Outer(lr=0.7, momentum=momentum, nesterov=nesterov)
    anchor, velocity = tensors(1), dict[str, torch.Tensor]()
    wanted = {name: torch.nn.Parameter(value.clone()) for name, value in anchor.items()}
    sgd = torch.optim.SGD(wanted.values(), lr=0.7, momentum=momentum, nesterov=nesterov)
    for round_ in range(4):
        local = tensors(10 + round_)
        for name, parameter in wanted.items():
            parameter.grad = parameter.detach() - local[name]
        sgd.step()
        anchor, velocity = outer.step(anchor, pseudo_gradient(anchor, local), velocity)
        for name, parameter in wanted.items():
            torch.testing.assert_close(anchor[name], parameter.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rate_one_for_one_client_is_that_client_bit_for_bit(dtype: torch.dtype) -> None:
    anchor, local = tensors(1, dtype), {name: value * 1e-3 for name, value in tensors(2, dtype).items()}
    found, velocity = Outer(lr=1.0, momentum=0.0).step(anchor, pseudo_gradient(anchor, local), {})
    assert all(torch.equal(found[name], local[name]) for name in local)
    assert velocity == {}


def test_a_fragment_leaves_the_rest_as_it_is() -> None:
    anchor, local = tensors(1), tensors(2)
    found, velocity = Outer().step(anchor, pseudo_gradient(anchor, local, ["b"]), {})
    assert found["a"] is anchor["a"]
    assert set(velocity) == {"b"}


def test_fragments_take_turns() -> None:
    names = ["tok.weight", *(f"layers.{n}.{part}.weight" for n in range(5) for part in ("up", "down")), "norm.weight"]
    dealt = fragments_of(names, 3)
    assert sorted(name for part in dealt for name in part) == sorted(names)
    assert dealt[1] == [f"layers.{n}.{part}.weight" for n in (0, 3) for part in ("up", "down")]
    turns = [due(step, 6, 3) for step in range(13)]
    assert [step for step, turn in enumerate(turns) if 0 in turn] == [6, 12]
    assert [step for step, turn in enumerate(turns) if 2 in turn] == [4, 10]
    assert all(len(turn) <= 1 for turn in turns)


def test_mismatched_tensors_and_settings_are_refused() -> None:
    anchor = tensors(1)
    with pytest.raises(ValueError, match="b is not in both"):
        pseudo_gradient(anchor, {"a": anchor["a"]})
    with pytest.raises(ValueError, match=r"a is \(2,\), its anchor \(3, 4\)"):
        pseudo_gradient(anchor, {**anchor, "a": torch.ones(2)})
    with pytest.raises(ValueError, match="2 blocks of parameters cannot be dealt into 3"):
        fragments_of(["layers.0.w", "layers.1.w"], 3)
    with pytest.raises(ValueError, match="lr: need number > 0"):
        Outer(lr=0.0)
