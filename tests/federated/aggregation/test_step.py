"""A server step: what comes out of it key by key, from tensors in memory or in files, and what memory it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm

from arclight import checkpoint
from arclight.checkpoint.files import PlacedFile, open_hashed
from arclight.checkpoint.stored_tensor import Piece, StoredTensor
from arclight.checkpoint.tensorfile import read_header
from arclight.federated.aggregation.fixed_point import Contribution
from arclight.federated.aggregation.strategy_step import StrategyStep
from arclight.federated.errors import FederatedError
from arclight.federated.strategies import (
    DiLoCo,
    FedAdam,
    FedAvg,
    FedMomentum,
    FedNesterov,
    FedYogi,
    SparseLoCo,
    Strategy,
)

EVERY = [FedAvg(), FedAvg(lr=0.5), FedMomentum(), FedNesterov(), FedAdam(), FedYogi(), DiLoCo(), SparseLoCo()]


def model(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model/embedding": torch.randn(301, 257, generator=draw).to(dtype),
        "model/bias": torch.randn(257, generator=draw).to(dtype),
        "model/norm.num_batches_tracked": torch.tensor(5 + seed),
    }


def stored(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, left in it."""
    with open_hashed(path) as file:
        slots = read_header(file, path.stat().st_size)
    source = PlacedFile(path)
    return {
        key: StoredTensor(
            slot.shape, slot.dtype, [Piece(source, slot.begin, (0,) * len(slot.shape), tuple(slot.shape))]
        )
        for key, slot in slots.items()
    }


def round_of(
    strategy: Strategy, anchor: dict[str, torch.Tensor], locals_: list[dict[str, torch.Tensor]], form: Any, **more: Any
) -> StrategyStep:
    given = [
        Contribution(
            client=f"c{k}",
            weight=k + 1.0,
            tensors=local if form == "weights" else {key: anchor[key] - value for key, value in local.items()},
        )
        for k, local in enumerate(locals_)
    ]
    return StrategyStep(strategy, anchor, given, form=form, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_client_that_sends_weights_is_centralised_training_bit_for_bit(dtype: torch.dtype) -> None:
    anchor, local = model(0, dtype), model(1, dtype)
    local["model/bias"][:4] = torch.tensor([1e-30, -0.0, 1e30, 0.0]).to(dtype)
    after = {one.key: one.value for one in round_of(FedAvg(), anchor, [local], "weights")}
    for key, tensor in local.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
@pytest.mark.parametrize("form", ["delta", "weights"])
def test_every_key_is_stepped_by_the_strategy(strategy: Strategy, form: Any) -> None:
    anchor, locals_ = model(0), [model(1), model(2), model(3)]
    weights: dict[str, torch.Tensor] = dict(anchor)
    states: dict[str, dict[str, torch.Tensor]] = {}
    counts: dict[str, int] = {}
    expected, memory = {key: value.double() for key, value in anchor.items()}, dict[str, dict[str, torch.Tensor]]()
    for count in range(3):
        step = round_of(strategy, weights, locals_, form, states=states, counts=counts)
        described = step.states_after()
        weights = {}
        for one in step:
            weights[one.key], counts[one.key] = one.value, one.count
            states[one.key] = one.state
            assert {name: (t.dtype, tuple(t.shape)) for name, t in one.state.items()} == described.get(one.key, {})
        for key in ("model/embedding", "model/bias"):
            mean = sum((k + 1) * local[key].double() for k, local in enumerate(locals_)) / 6
            expected[key], memory[key] = strategy.step(expected[key], expected[key] - mean, memory.get(key, {}), count)
            assert torch.allclose(weights[key].double(), expected[key], rtol=1e-4, atol=1e-5)
        assert weights["model/norm.num_batches_tracked"].item() == 8
        assert set(counts.values()) == {count + 1}


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
@pytest.mark.parametrize("buffers", [(), ("model/w",)], ids=["weight", "buffer"])
def test_a_float32_change_keeps_the_precision_of_a_float64_weight(strategy: Strategy, buffers: tuple[str, ...]) -> None:
    """Changes of a secure sum, or of a codec, are narrower than such weights."""
    anchor = {"model/w": torch.tensor([1 + 2.0**-40, -3.0], dtype=torch.float64)}
    given = [Contribution(client=client, weight=1.0, tensors={"model/w": torch.zeros(2)}) for client in "ab"]
    (after,) = StrategyStep(strategy, anchor, given, buffers=buffers)
    assert torch.equal(after.value, anchor["model/w"])


@pytest.mark.parametrize("strategy", [FedAdam(), FedYogi()], ids=repr)
def test_a_state_that_would_be_infinite_is_refused(strategy: Strategy) -> None:
    """Its weight would stay finite, and never move again."""
    step = StrategyStep(
        strategy,
        {"model/w": torch.zeros(2)},
        [Contribution(client="a", weight=1.0, tensors={"model/w": torch.full((2,), 1e25)})],
    )
    with pytest.raises(FederatedError, match="model/w infinite or NaN"):
        list(step)


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
@pytest.mark.parametrize("form", ["delta", "weights"])
def test_buffers_become_the_mean_without_an_optimizer_step(strategy: Strategy, form: Any) -> None:
    """Beyond the mean, or by steps of a fixed size, a variance would soon be negative."""
    key = "model/norm.running_var"
    anchor, locals_ = {**model(0), key: torch.ones(64)}, [{key: torch.full((64,), 1e-3 * k)} for k in (1.0, 2.0)]
    before = {key: {name: torch.ones(64) for name in strategy.state_keys}}  # of a run that once stepped it
    step = round_of(strategy, anchor, locals_, form, states=before, counts={key: 3}, buffers=[key])
    assert key not in step.states_after()
    after = {one.key: one for one in step}[key]
    torch.testing.assert_close(after.value, torch.full((64,), (1e-3 + 2 * 2e-3) / 3), rtol=1e-4, atol=1e-9)
    assert after.state == {}


def test_a_key_that_nobody_sent_stays_and_its_steps_are_its_own() -> None:
    anchor, strategy = model(0), FedAdam(bias_correction=True)
    local = {"model/bias": torch.zeros(257)}
    first = {one.key: one for one in round_of(strategy, anchor, [local, local], "delta")}
    assert torch.equal(first["model/embedding"].value, anchor["model/embedding"])
    assert (first["model/embedding"].count, first["model/bias"].count) == (0, 1)
    assert not first["model/embedding"].state
    second = round_of(
        strategy,
        {key: one.value for key, one in first.items()},
        [{"model/embedding": torch.zeros(301, 257)}],
        "delta",
        states={key: one.state for key, one in first.items()},
        counts={key: one.count for key, one in first.items()},
    )
    after = {one.key: one for one in second}
    assert (after["model/embedding"].count, after["model/bias"].count) == (1, 1)
    assert torch.equal(after["model/bias"].state["exp_avg"], first["model/bias"].state["exp_avg"])
    assert list(second.states_after()) == ["model/bias", "model/embedding"]
    gone = after["model/embedding"].value - anchor["model/embedding"]
    assert torch.allclose(gone, -0.1 * anchor["model/embedding"].sign(), atol=1e-4), (
        "the first Adam step, not the second"
    )


def test_moments_are_averaged_and_not_stepped() -> None:
    anchor = {"model/w": torch.ones(3), "exp_avg/w": torch.full((3,), 4.0)}
    given = [
        Contribution(
            client=str(k),
            weight=1,
            tensors={
                "model/w": torch.zeros(3),
                "exp_avg/w": torch.full((3,), 4.0 * k),
                "exp_avg_sq/w": torch.full((3,), 10.0 * k),
            },
        )
        for k in range(2)
    ]
    after = {one.key: one for one in StrategyStep(DiLoCo(), anchor, given)}
    assert after["exp_avg/w"].value.tolist() == [2.0] * 3, "values, whatever the form of weights"
    assert after["exp_avg_sq/w"].value.tolist() == [5.0] * 3, "the server had none: the values themselves"
    assert not after["exp_avg/w"].state
    assert after["model/w"].state
    assert {one.count for one in after.values()} == {1}
    counts = {"exp_avg_sq/w": 3, "model/w": 2}
    again = {one.key: one.count for one in StrategyStep(DiLoCo(), anchor, given, counts=counts)}
    assert again == {"model/w": 3, "exp_avg/w": 1, "exp_avg_sq/w": 4}


def test_tensors_in_files_give_the_same_bits_and_come_in_the_order_asked_for(tmp_path: Path) -> None:
    anchor, locals_ = model(0), [model(1), model(2)]
    order = sorted(anchor, reverse=True)
    plainly = {one.key: one.value for one in round_of(FedNesterov(), anchor, locals_, "weights")}
    checkpoint.save(tmp_path / "anchor", {"model": anchor})
    given = []
    for k, local in enumerate(locals_):
        checkpoint.save(tmp_path / str(k), {"model": local})
        lying = stored(tmp_path / str(k) / "model.safetensors")
        given.append(Contribution(client=f"c{k}", weight=k + 1.0, tensors=lying))
    before = stored(tmp_path / "anchor" / "model.safetensors")
    stepped = list(StrategyStep(FedNesterov(), before, given, form="weights", order=order))
    assert [one.key for one in stepped] == order
    for one in stepped:
        assert type(one.value) is torch.Tensor
        assert torch.equal(one.value, plainly[one.key])


def test_unknown_weights_and_mismatched_states_are_refused() -> None:
    given = [Contribution(client="a", weight=1, tensors={"model/x": torch.ones(2)})]
    with pytest.raises(FederatedError, match="model/x was sent and is not a weight of the model"):
        StrategyStep(FedAvg(), {"model/y": torch.ones(2)}, given)
    with pytest.raises(FederatedError, match="model/x has no place in the order"):
        StrategyStep(FedAvg(), {"model/x": torch.ones(2)}, given, order=[])

    @dataclass(frozen=True, kw_only=True)
    class Forgetful(Strategy):
        state_keys = ("memory",)

        def step(self, weight: Any, gradient: Any, state: Any, count: int) -> Any:
            return weight, {}

    with pytest.raises(FederatedError, match=r"Forgetful gave the state \[\], its state_keys are \['memory'\]"):
        list(StrategyStep(Forgetful(), {"model/x": torch.ones(2)}, given))


MEASURE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from arclight.checkpoint.files import create
from arclight.checkpoint.tensorfile import as_bytes, memory_of
from arclight.federated import strategies
from arclight.federated.aggregation.fixed_point import Contribution
from arclight.federated.aggregation.strategy_step import StrategyStep
from arclight.fabric.memory import return_freed_memory
from tests.federated.aggregation.test_step import stored

folder, clients, strategy = Path(sys.argv[1]), int(sys.argv[2]), getattr(strategies, sys.argv[3])()

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

def take(anchor, contributions, path):
    step = StrategyStep(strategy, anchor, contributions)
    with create(path) as file:
        for one in step:
            file.write(memory_of(as_bytes(one.value)))
    return step.statistics

opened = lambda name: stored(folder / name / "model.safetensors")
anchor = opened("anchor")
small = {key: torch.ones(10, 10) for key in anchor}
return_freed_memory()  # as a server does
take(small, [Contribution(client="c", weight=1.0, tensors=small)], folder / f"small{clients}{sys.argv[3]}")  # code is no memory of a step
open("/proc/self/clear_refs", "w").write("5")
base = peak()
statistics = take(
    anchor, [Contribution(client=f"c{k}", weight=1.0, tensors=opened(f"c{k}")) for k in range(clients)], folder / f"after{clients}{sys.argv[3]}"
)
assert len(statistics.cosines) == clients
print(json.dumps({"base": base, "peak": peak()}))
"""


@pytest.mark.parametrize("strategy", ["FedAvg", pytest.param("FedNesterov", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_clients(tmp_path: Path, strategy: str) -> None:
    layers, elements = 20, 250_000
    whole = 4 * layers * elements

    def save(name: str, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        tensors = {f"model/layers.{k}": torch.randn(1000, elements // 1000, generator=draw) for k in range(layers)}
        checkpoint.save(tmp_path / name, {"model": tensors})

    save("anchor", 0)
    for k in range(8):
        save(f"c{k}", 1 + k)
    peaks = {}
    for clients in (2, 8):
        done = warm.run("-c", MEASURE, tmp_path, str(clients), strategy, timeout=100)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        peaks[clients] = said["peak"] - said["base"]
    assert peaks[8] < 0.7 * whole, f"a step of {whole:,} bytes took {peaks[8]:,}"
    assert (peaks[8] - peaks[2]) / 6 < 0.8 * 4 * elements, f"each client keeps a tensor: {peaks}"


def test_a_strategy_that_looks_at_whole_tensors_gets_them() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Normed(Strategy):
        elementwise = False

        def step(self, weight: Any, gradient: Any, state: Any, count: int) -> Any:
            return weight - gradient / gradient.norm(), {}

    anchor = model(0)
    after = {one.key: one.value for one in round_of(Normed(), anchor, [model(1)], "delta")}
    change = anchor["model/embedding"] - model(1)["model/embedding"]
    expected = anchor["model/embedding"] - change / change.norm()
    assert torch.equal(after["model/embedding"], expected)


def test_a_step_beyond_the_range_of_floats_is_refused() -> None:
    given = [Contribution(client="a", weight=1, tensors={"model/x": torch.full((2,), 3e38)})]
    with pytest.raises(FederatedError, match="would make model/x infinite"):
        list(StrategyStep(FedAvg(lr=10), {"model/x": torch.ones(2)}, given))


@pytest.mark.parametrize("form", ["delta", "weights"])
def test_statistics_of_a_step_are_those_of_the_changes(form: str) -> None:
    anchor, locals_ = model(0), [model(1), model(2)]
    step = round_of(FedAvg(), anchor, locals_, form)
    list(step)
    floats = [key for key in anchor if anchor[key].is_floating_point()]
    for name, local in zip(("c0", "c1"), locals_, strict=True):
        change = torch.cat([(anchor[key] - local[key]).double().reshape(-1) for key in floats])
        assert step.statistics.norms[name] == pytest.approx(change.norm().item(), rel=1e-6)
