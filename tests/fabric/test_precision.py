"""Precisions: names for them, types of parameters, inputs and outputs, scaled gradients, and 8 bits."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from arclight.fabric import registry
from arclight.fabric.precision import (
    BitsandbytesPrecision,
    DoublePrecision,
    Float8Precision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    resolve_precision,
)


@pytest.mark.parametrize(
    ("choice", "kind", "name"),
    [
        (None, Precision, "32-true"),
        (32, Precision, "32-true"),
        ("32-true", Precision, "32-true"),
        (64, DoublePrecision, "64-true"),
        ("64", DoublePrecision, "64-true"),
        (16, MixedPrecision, "16-mixed"),
        ("16-mixed", MixedPrecision, "16-mixed"),
        ("bf16", MixedPrecision, "bf16-mixed"),
        ("16-true", HalfPrecision, "16-true"),
        ("bf16-true", HalfPrecision, "bf16-true"),
    ],
)
def test_names(choice: Any, kind: type[Precision], name: str) -> None:
    found = resolve_precision(choice, "cpu")
    assert type(found) is kind
    assert found.precision == found.name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Precision 'fp12' is invalid.*bf16-mixed, float8"):
        resolve_precision("fp12", "cpu")


def test_a_users_own_precision_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Precision):
        precision = "mine"

        def __init__(self, device: str) -> None:
            self.device = device

    mine = Mine("cpu")
    assert resolve_precision(mine, "cpu") is mine
    entry = mock.Mock(load=lambda: Mine)
    entry.name = "mine"
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "arclight.precisions" else [])
    registry.installed.cache_clear()
    try:
        found = resolve_precision("mine", "cuda")
    finally:
        registry.installed.cache_clear()
    assert isinstance(found, Mine)
    assert found.device == "cuda"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision(), torch.float32),
        (HalfPrecision("16-true"), torch.float16),
        (HalfPrecision("bf16-true"), torch.bfloat16),
        (DoublePrecision(), torch.float64),
    ],
)
def test_one_type_for_everything(precision: Precision, dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    module.register_buffer("count", torch.ones(2, dtype=torch.int64))
    assert precision.convert_module(module).weight.dtype == dtype
    assert (module.phase.dtype, module.count.dtype) == (torch.complex64, torch.int64)
    batch = precision.convert_input({"x": torch.ones(1, 2), "y": torch.ones(1, dtype=torch.int64)})
    assert (batch["x"].dtype, batch["y"].dtype) == (dtype, torch.int64)
    made = precision.wrap(lambda x: (module(x), torch.zeros(1)))
    output, fresh = made(batch["x"])
    assert output.dtype == fresh.dtype == dtype
    assert precision.convert_output(output).dtype == torch.float32
    with precision.module_init_context():
        assert nn.Linear(1, 1).weight.dtype == dtype
    with pytest.raises(RuntimeError, match="burnt"), precision.forward_context():
        raise RuntimeError("burnt")
    assert torch.get_default_dtype() is torch.float32


def test_full_precision_adds_no_call_to_a_step() -> None:
    def step() -> None: ...

    assert Precision().wrap(step) is step


def test_a_precision_with_its_own_forward_context_is_entered() -> None:
    class Grad(Precision):
        def forward_context(self) -> Any:
            return torch.no_grad()

    assert Grad().wrap(torch.is_grad_enabled)() is False


@pytest.mark.parametrize("name", ["16", 16, "bf16", "32-true"])
def test_mixed_precision_takes_full_names(name: Any) -> None:
    with pytest.raises(ValueError, match=r"Precision must be '16-mixed' or 'bf16-mixed'"):
        MixedPrecision(name, "cpu")


def test_bfloat16_takes_no_scaler() -> None:
    assert MixedPrecision("bf16-mixed", "cpu").scaler is None
    with pytest.raises(ValueError, match="'bf16-mixed'` does not use a scaler"):
        MixedPrecision("bf16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def test_scaled_gradients_give_the_step_of_unscaled_ones() -> None:
    """One step in float16 with a scale of 1024, against float32; an overflow leaves the step out and lowers the scale."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision.backward((weight * torch.tensor([1.0, 3.0])).sum(), None)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1024.0, 3072.0]
    precision.unscale_gradients(optimizer)
    assert weight.grad.tolist() == [1.0, 3.0]
    precision.optimizer_step(optimizer)
    assert weight.tolist() == [0.5, 0.5]
    assert list(precision.main_params(optimizer)) == [weight]
    weight.grad = torch.tensor([float("inf"), 0.0])
    precision.optimizer_step(optimizer)
    assert weight.tolist() == [0.5, 0.5]
    assert precision.state_dict()["scale"] == 512.0
    other = MixedPrecision("16-mixed", "cpu")
    other.load_state_dict(precision.state_dict())
    assert other.scaler is not None
    assert other.scaler.get_scale() == 512.0


@pytest.mark.parametrize("unscaled_first", [True, False])
def test_optimizers_that_share_a_backward_unscale_by_the_same_scale(unscaled_first: bool) -> None:
    """The scale doubles after every step here; that of the first optimizer must not change the gradients of the second."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1))
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    for step in range(1, 3):
        precision.backward((weights[0] * weights[1].detach() / 8 + weights[1] / 8).sum(), None)
        for optimizer in optimizers if unscaled_first else ():
            precision.unscale_gradients(optimizer)
        for optimizer in optimizers:
            precision.optimizer_step(optimizer)
            optimizer.zero_grad()
        assert weights[1].tolist() == [1 - step / 8] * 2
    assert precision.state_dict()["scale"] == 64.0


def test_lbfgs_and_scaled_gradients_exclude_each_other() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="AMP and the LBFGS optimizer are not compatible"):
        MixedPrecision("16-mixed", "cpu").optimizer_step(optimizer, closure=lambda: torch.ones(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fits = nn.Linear(32, 64)
        self.small = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(torch.relu(self.fits(x)))


@pytest.mark.parametrize("emulate", [None, True])
def test_float8_rounds_what_linear_layers_multiply(emulate: bool | None) -> None:
    pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    net, x = Net(), torch.randn(16, 32)
    exact = {name: weight.clone() for name, weight in net.state_dict().items()}
    precision = Float8Precision("cpu", emulate=emulate)
    net = precision.convert_module(net)  # type: ignore[assignment]
    assert type(net.fits).__name__ == "Float8Linear"
    assert type(net.small) is nn.Linear
    assert list(net.state_dict()) == list(exact)
    output = precision.wrap(net.fits)(x)
    by_hand = rounded(x) @ rounded(exact["fits.weight"]).T + exact["fits.bias"]
    in_float32 = nn.functional.linear(x, exact["fits.weight"], exact["fits.bias"])
    scale = in_float32.abs().max()
    assert (output.float() - by_hand).abs().max() / scale < 0.01  # bfloat16 has 8 bits
    assert (output.float() - in_float32).abs().max() / scale > 0.012  # e4m3 has 4
    precision.wrap(net)(x).float().square().mean().backward()
    assert net.fits.weight.grad is not None
    assert net.fits.weight.grad.dtype == net.fits.weight.dtype == torch.float32


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as 8 bits show it (sign, 4 of exponent, 3 of fraction), scaled so that its largest value is the type's, 448."""
    scale = 448 / tensor.abs().max()
    fraction, exponent = torch.frexp((tensor * scale).double())
    exponent = exponent.clamp(min=-5)  # smaller numbers have fewer digits
    step = 2.0 ** (exponent - 4)
    return (torch.ldexp(fraction, torch.frexp((tensor * scale).double())[1]) / step).round().mul(step).float() / scale


def test_float8_warns_if_it_converts_no_layer() -> None:
    pytest.importorskip("torchao.float8")
    with pytest.raises(ValueError, match="multiples of 16"):
        Float8Precision("cpu").convert_module(nn.Sequential(nn.Linear(3, 3)))
    chosen = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    Float8Precision("cpu", filter=lambda layer, name: name == "1").convert_module(chosen)
    assert [type(layer).__name__ for layer in chosen] == ["Linear", "Float8Linear"]


def test_missing_precision_packages_are_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"transformer_engine\[pytorch\]"):
        resolve_precision("transformer-engine", "cuda")
    with pytest.raises(ModuleNotFoundError, match="pip install bitsandbytes"):
        BitsandbytesPrecision("nf4")


class FakeLinear(nn.Linear):
    """Stands for a vendor's layer: what matters here is which layers are replaced, and with what."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias)
        self.options = options


def test_bitsandbytes_replaces_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def params(data: torch.Tensor, requires_grad: bool, **options: Any) -> nn.Parameter:
        made = nn.Parameter(data, requires_grad=requires_grad)
        made.options = options  # type: ignore[attr-defined]
        return made

    package = mock.Mock()
    package.nn.Linear4bit = type("Linear4bit", (FakeLinear,), {})
    package.nn.Linear8bitLt = type("Linear8bitLt", (FakeLinear,), {})
    package.nn.Params4bit = package.nn.Int8Params = params
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setattr("arclight.fabric.precision.low_bit._BITSANDBYTES_AVAILABLE", True)
    net = Net()
    weight = net.fits.weight.detach().clone()
    BitsandbytesPrecision("nf4-dq", dtype=torch.bfloat16, ignore_modules={"small"}).convert_module(net)
    assert type(net.fits).__name__ == "Linear4bit"
    assert net.fits.options == {"compute_dtype": torch.bfloat16, "compress_statistics": True, "quant_type": "nf4"}
    assert net.fits.weight.options == {"compress_statistics": True, "quant_type": "nf4"}
    assert torch.equal(net.fits.weight, weight)
    assert not net.fits.weight.requires_grad
    assert type(net.small) is nn.Linear
    with pytest.raises(ValueError, match=r"only works with `dtype=torch.float16`"):
        BitsandbytesPrecision("int8", dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="no Linear layers"):
        BitsandbytesPrecision("int8").convert_module(nn.ReLU())


def test_transformer_engine_replaces_layers_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recipes = mock.Mock(), mock.Mock()
    engine.Linear, engine.LayerNorm = FakeLinear, nn.LayerNorm
    monkeypatch.setitem(sys.modules, "transformer_engine", mock.Mock(pytorch=engine))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setitem(sys.modules, "transformer_engine.common", mock.Mock(recipe=recipes))
    monkeypatch.setattr("arclight.fabric.precision.low_bit._TRANSFORMER_ENGINE_AVAILABLE", True)
    precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe={"fp8_format": "HYBRID", "margin": 1})
    recipes.DelayedScaling.assert_called_once_with(fp8_format=recipes.Format.HYBRID, margin=1)
    net = nn.Sequential(nn.Linear(16, 48, bias=False), nn.Sequential(nn.Linear(1, 3)))
    weight = net[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="divisible by 8 and 16"):
        precision.convert_module(net)
    assert type(net[0]) is FakeLinear
    assert torch.equal(net[0].weight, weight.to(torch.bfloat16))
    assert net[0].bias is None
    assert type(net[1][0]) is nn.Linear
