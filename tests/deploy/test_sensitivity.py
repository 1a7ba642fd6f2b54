"""Sensitivity by layer, and the fewest layers that must stay in float for a score."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arclight.deploy import BFloat16, DynamicInt8, Int8, LowBit, QuantizeError, WeightOnly, export, quantize
from arclight.deploy.capture import capture, frozen_copy
from arclight.deploy.quantizing import pt2e
from arclight.deploy.quantizing.batch_norm import fold_untrained
from arclight.deploy.quantizing.placement import PlacementQuantizer
from arclight.deploy.quantizing.sensitivity import (
    EVALUATIONS,
    Evaluation,
    PartialRounding,
    Search,
    fewest,
    noise_by_layer,
)
from arclight.deploy.settings import PLACEMENTS, Quantization, Target

CLASSES = 6


class Outlier(nn.Module):
    """Pass one feature of a hundred times the size beside the others: what 8 bits cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], 100 * x[:, -1:]], 1)


def network() -> nn.Sequential:
    """Return layers a to e, of which c alone reads a feature that takes nearly all of its levels."""
    torch.manual_seed(0)
    c = nn.Linear(16, 16)
    c.weight.data[:, -1] /= 100
    layers: dict[str, nn.Module] = {
        "a": nn.Linear(8, 16), "relu": nn.ReLU(), "b": nn.Linear(16, 16), "outlier": Outlier(), "c": c, "silu": nn.SiLU(),
        "d": nn.Linear(16, 16), "e": nn.Linear(16, CLASSES),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers)).eval()


INPUTS = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return network()


def closeness(model: nn.Module) -> Any:
    """Return a metric: minus the mean error of the outputs."""
    wanted = model(INPUTS).detach()
    return lambda candidate: -float((torch.as_tensor(candidate(INPUTS)) - wanted).abs().mean())


def converted(model: nn.Module, target: Target = "onnxruntime") -> tuple[torch.fx.GraphModule, list[str]]:
    quantizer = PlacementQuantizer(profile=PLACEMENTS[target], observer="minmax")
    with torch.no_grad():
        prepared = pt2e.prepare(capture(frozen_copy(model), (INPUTS,)).module(), quantizer, fold_untrained)
        prepared(INPUTS)
        return pt2e.convert(prepared), quantizer.quantized_layers


def test_the_layer_that_rounding_hurts_comes_first(model: nn.Sequential) -> None:
    graph, layers = converted(model)
    found = noise_by_layer(graph, layers, (INPUTS,))
    assert sorted(found) == ["a", "b", "c", "d", "e"]
    assert next(iter(found)) == "c"
    assert list(found.values()) == sorted(found.values())
    assert sorted(found.values())[1] > found["c"] + 6  # decibels


def test_the_numeric_debugger_of_torchao_finds_the_same_layer(model: nn.Sequential) -> None:
    """An independent judge: SQNR of every node, of which those behind the sensitive layer lose most."""
    from torchao.quantization.pt2e import (
        compare_results,
        extract_results_from_loggers,
        prepare_for_propagation_comparison,
    )

    exported = torch.export.export(model, (INPUTS,))
    plain = prepare_for_propagation_comparison(exported.module())
    with torch.no_grad():
        plain(INPUTS)
        prepared = pt2e.prepare(exported.module(), PlacementQuantizer(observer="minmax"), fold_untrained)
        prepared(INPUTS)
        rounded = prepare_for_propagation_comparison(pt2e.convert(prepared))
        rounded(INPUTS)
    compared = compare_results(extract_results_from_loggers(plain), extract_results_from_loggers(rounded))
    sqnr = {key.name: float(found.results[0].sqnr) for key, found in compared.items() if found.results}
    linears = [node.name for node in exported.graph.nodes if node.target is torch.ops.aten.linear.default]
    lost = {name: sqnr[before] - sqnr[behind] for name, before, behind in zip("bcde", linears, linears[1:])}
    graph, layers = converted(model)
    assert max(lost, key=lost.__getitem__) == next(iter(noise_by_layer(graph, layers, (INPUTS,)))) == "c"


def test_all_layers_together_are_the_quantized_model_and_none_the_float_one(model: nn.Sequential) -> None:
    for target in PLACEMENTS:
        graph, layers = converted(model, target)
        run = PartialRounding(graph, layers)
        with torch.no_grad():
            torch.testing.assert_close(run.run(INPUTS), model(INPUTS))
            run.rounding = frozenset(layers)
            assert torch.equal(run.run(INPUTS), graph(INPUTS))


@pytest.mark.parametrize("target", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.slow)])
def test_the_fewest_layers_stay_in_float(model: nn.Sequential, target: Target) -> None:
    metric = closeness(model)
    plain = quantize(model, [INPUTS], metric=metric, target=target)
    assert plain.scores is not None
    drop = plain.scores.float_model - plain.scores.quantized_model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = quantize(model, [INPUTS], metric=metric, max_drop=drop * 0.6, target=target)
    assert found.scores is not None
    search = found.scores.search
    assert search is not None
    assert search.kept == ("c",) == found.float_layers == found.recipe.skip  # type: ignore[union-attr]
    assert found.scores.float_model - found.scores.quantized_model <= drop * 0.6
    assert found.scores.quantized_model == pytest.approx(metric(found))
    assert [one.float_layers for one in search.evaluations] == [0, 2, 1]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    by_hand = quantize(model, [INPUTS], recipe=Int8(skip=("c",)), target=target)
    assert torch.equal(by_hand(INPUTS), found(INPUTS))


def test_search_is_skipped_if_the_score_is_kept(model: nn.Sequential) -> None:
    scored: list[object] = []

    def metric(candidate: object) -> float:
        scored.append(candidate)
        return 1.0

    quantized = quantize(model, [INPUTS], metric=metric, max_drop=0.0)
    assert len(scored) == 2
    assert quantized.scores is not None
    assert quantized.scores.search is None
    assert quantized.float_layers == ()


@pytest.mark.parametrize(
    "recipe",
    [
        DynamicInt8(),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (WeightOnly(bits=4, group_size=16), LowBit(group_size=16))
        ),
    ],
)
def test_linear_recipes_are_searched_too(recipe: Quantization) -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(16, 16) for name in "abcd"}
    layers["b"].weight.data[:, 0] *= 50
    model, inputs = nn.Sequential(OrderedDict(layers)).eval(), INPUTS[:, :8].repeat(1, 2)
    wanted = model(inputs).detach()

    def metric(candidate: Any) -> float:
        return -float((candidate(inputs) - wanted).abs().mean())

    plain = quantize(model, recipe=recipe, example=inputs, metric=metric)
    assert plain.scores is not None
    allowed = -plain.scores.quantized_model * 0.9
    found = quantize(model, recipe=recipe, example=inputs, metric=metric, max_drop=allowed)
    assert found.scores is not None
    assert found.scores.search is not None
    kept = found.scores.search.kept
    assert kept == tuple(found.scores.search.sensitivity)[: len(kept)]
    assert set(kept) == set(found.float_layers)
    assert -found.scores.quantized_model <= allowed


@pytest.mark.slow
def test_unreachable_scores_recommend_training(model: nn.Sequential) -> None:
    with pytest.raises(
        QuantizeError,
        match=r"all layers but one in float .* prepare_qat\(model, example_inputs, recipe=Int8\(\), target='openvino'\)",
    ):
        quantize(model, [INPUTS], metric=closeness(model), max_drop=1e-9, target="openvino")
    with pytest.raises(QuantizeError, match=r"recipe=LowBit\(activation_bits=4\)"):
        quantize(model, [INPUTS], recipe=LowBit(activation_bits=4), metric=closeness(model), max_drop=1e-9)
    with pytest.raises(QuantizeError, match="drops by more than max_drop=1e-09; take the float32 model"):
        quantize(model, recipe=BFloat16(), example=INPUTS, metric=closeness(model), max_drop=1e-9)


@pytest.mark.slow
def test_the_noise_is_judged_after_the_search(model: nn.Sequential) -> None:
    metric, bound = closeness(model), 30.0
    whole = quantize(model, [INPUTS], recipe=Int8(min_sqnr_db=0))
    assert whole.sqnr_db < bound
    found = quantize(model, [INPUTS], recipe=Int8(min_sqnr_db=bound), metric=metric, max_drop=-metric(whole) * 0.6)
    assert found.sqnr_db > bound
    with pytest.raises(QuantizeError, match="signal-to-noise ratio"):
        quantize(model, [INPUTS], recipe=Int8(min_sqnr_db=bound), metric=metric, max_drop=-metric(whole) * 1.1)


@pytest.mark.parametrize("wrong", [float("nan"), -0.1, float("inf")])
def test_a_drop_that_bounds_nothing_is_refused(model: nn.Sequential, wrong: float) -> None:
    with pytest.raises(ValueError, match="max_drop must be a number from 0"):
        quantize(model, [INPUTS], metric=closeness(model), max_drop=wrong)


def test_scores_that_are_no_numbers_are_refused_within_the_search(model: nn.Sequential) -> None:
    scores = iter([1.0, 0.0, float("nan")])
    with pytest.raises(QuantizeError, match="metric of the model with 2 layers in float is nan"):
        quantize(model, [INPUTS], metric=lambda _: next(scores), max_drop=0.1)


@pytest.mark.parametrize("least", [1, 2, 57, 999, 1000])
def test_bisection_finds_the_least_in_few_evaluations(least: int) -> None:
    tried: list[int] = []

    def fits(kept: int) -> bool:
        tried.append(kept)
        return kept >= least

    assert fewest(1000, fits, EVALUATIONS - 2) == (least if least < 1000 else None)
    assert len(tried) <= EVALUATIONS - 2


def test_bisection_stops_at_the_last_evaluation_with_what_fits() -> None:
    assert fewest(1024, lambda kept: kept >= 3, 2) == 256


def test_the_record_is_json() -> None:
    search = Search(
        sensitivity={"c": 11.0, "a": float("inf")}, kept=("c",), evaluations=(Evaluation(float_layers=1, score=0.5),)
    )
    assert json.loads(json.dumps(search.to_json(), allow_nan=False)) == {
        "kept": ["c"], "evaluations": [[1, 0.5]], "sensitivity_db": {"c": 11.0, "a": None},
    }  # fmt: skip


@pytest.mark.slow
def test_a_program_records_the_search(model: nn.Sequential, tmp_path: Path) -> None:
    metric = closeness(model)
    whole = quantize(model, [INPUTS])
    found = quantize(model, [INPUTS], metric=metric, max_drop=-metric(whole) * 0.6)
    report = export(found, tmp_path / "p.onnx", example_inputs=INPUTS[:4]).metadata["quantization"]
    assert (report["skip"], report["float_layers"]) == (["c"], ["c"])
    search = report["metric"]["search"]
    assert search["kept"] == ["c"]
    assert next(iter(search["sensitivity_db"])) == "c"
    assert len(search["evaluations"]) <= EVALUATIONS
