"""Linear layers that are trained with rounding: who may call them, in what precision, and what becomes of shared ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.deploy import (
    DynamicInt8,
    Int8,
    LowBit,
    QuantizationAwareTraining,
    QuantizeError,
    WeightOnly,
    convert,
    prepare_qat,
)
from arclight.deploy.quantizing.rounded_linear import RoundedLinear, round_linears
from arclight.deploy.quantizing.training_settings import LowBitTraining
from arclight.deploy.settings import Quantization
from arclight.fabric.errors import MisconfigurationError

FOUR_BITS = WeightOnly(bits=4, min_sqnr_db=1)


class Two(nn.Module):
    """Two layers, each of which may be the other or share its weight."""

    def __init__(self, shared: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a: Any = nn.Linear(32, 32)
        self.b: Any = nn.Linear(32, 32)
        if shared == "layer":
            self.b = self.a
        elif shared == "weight":
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu())
        return y


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", [DynamicInt8(), WeightOnly(), FOUR_BITS, LowBit()])
def test_evaluation_in_16_bits_is_finite_and_as_precise_as_training(
    recipe: Quantization, precision: torch.dtype
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(4, 256)
    rounded = prepare_qat(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)), wide, recipe=recipe).eval()
    with torch.no_grad():
        expected = rounded(wide)
        with torch.autocast("cpu", precision):
            evaluated = rounded(wide)
    with torch.autocast("cpu", precision):
        trained = rounded(wide)
    assert evaluated.dtype == trained.dtype == precision
    assert float((evaluated - expected).abs().max()) <= 0.02
    with torch.no_grad():
        assert rounded.to(precision)(wide.to(precision)).dtype == precision


def test_fused_layers_of_torch_round_in_evaluation_mode(x: Tensor) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    rounded = prepare_qat(layer, x[None], recipe=FOUR_BITS).eval()
    assert [name for name, part in rounded.named_modules() if isinstance(part, RoundedLinear)] == ["linear1", "linear2"]
    with torch.no_grad():  # where torch has a kernel for the whole layer, which reads its weights
        evaluated = rounded(x[None])
        assert float((layer.eval()(x[None]) - evaluated).abs().max()) > 1e-3
    assert torch.allclose(rounded(x[None]), evaluated, atol=1e-5)
    assert torch.allclose(convert(rounded, example_inputs=x[None])(x[None]), evaluated, atol=1e-5)


def test_a_layer_with_two_names_is_exported_as_it_was_trained(x: Tensor) -> None:
    rounded = prepare_qat(Two("layer"), x, recipe=FOUR_BITS).eval()
    with torch.no_grad():
        assert torch.equal(convert(rounded, example_inputs=x)(x), rounded(x))


def test_a_weight_that_a_skipped_layer_shares_is_refused_before_training(x: Tensor) -> None:
    assert convert(prepare_qat(Two("weight"), x, recipe=FOUR_BITS), example_inputs=x).quantized_layers == ("a", "b")
    with pytest.raises(QuantizeError, match="Two has none whose weight is its own and not in skip"):
        prepare_qat(Two("weight"), x, recipe=WeightOnly(bits=4, skip=("b",)))


def test_layers_without_values_are_refused_by_name(x: Tensor) -> None:
    model = Two()
    model.b = nn.LazyLinear(32)
    with pytest.raises(
        QuantizeError, match=r"^b of Two have no weights yet \(LazyLinear\).*call the model on a batch first"
    ):
        prepare_qat(model, x, recipe=WeightOnly())
    assert type(prepare_qat(model, x, recipe=WeightOnly(skip=("b",))).b) is nn.LazyLinear
    model(x)
    assert isinstance(prepare_qat(model, x, recipe=WeightOnly()).b, RoundedLinear)


def test_layers_that_compute_in_ways_of_their_own_are_named(x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = Two()
    weight_norm(model.b)
    prepared = prepare_qat(model, x, recipe=WeightOnly())
    assert "these layers compute in ways of their own, and are trained in float: b (ParametrizedLinear)" in caplog.text
    assert convert(prepared, example_inputs=x).float_layers == ("b",)


@pytest.mark.parametrize("recipe", [WeightOnly(skip=("",)), Int8(skip=("",))])
def test_an_empty_name_is_not_kept_in_float(x: Tensor, recipe: Quantization) -> None:
    with pytest.raises(QuantizeError, match="skip names '', which is the whole model"):
        prepare_qat(Two(), x, recipe=recipe)


def test_parts_that_were_trained_for_unlike_recipes_are_not_one_program(x: Tensor) -> None:
    model = Two()
    model.a, model.b = round_linears(model.a, WeightOnly()), round_linears(model.b, FOUR_BITS)
    with pytest.raises(QuantizeError, match=r"a was trained for WeightOnly\(bits=8.*, and b for WeightOnly\(bits=4"):
        convert(model, example_inputs=x)
    model.b = round_linears(model.b.plain(), WeightOnly(min_sqnr_db=1))
    assert convert(model, example_inputs=x).quantized_layers == ("a", "b")  # no bit differs


class Task(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module = Two()
        self.example_input_array = torch.randn(4, 32)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def fit(task: Task, recipe: Quantization, folder: Path, steps: int = 1, **options: Any) -> al.Trainer:
    trainer = al.Trainer(
        max_steps=steps, logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu",
        default_root_dir=folder, callbacks=[QuantizationAwareTraining(recipe)],
    )  # fmt: skip
    trainer.fit(task, DataLoader(TensorDataset(torch.randn(8, 32)), batch_size=4), **options)
    return trainer


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (WeightOnly(), FOUR_BITS, "bits = 8, here 4"),
        (WeightOnly(), LowBit(), "kind = weightonly, here lowbit"),
        (WeightOnly(), Int8(), "kind = weightonly, here int8"),
        (Int8(), WeightOnly(), "kind = int8, here weightonly"),
        (Int8(reduce_range=False), Int8(reduce_range=True), "reduce_range = False, here True"),
    ],
)
def test_a_model_that_rounds_is_not_trained_by_another_recipe(
    tmp_path: Path, first: Quantization, second: Quantization, told: str
) -> None:
    task = Task()
    fit(task, first, tmp_path)
    rounded = task.model
    with pytest.raises(MisconfigurationError, match=rf"Task\.model rounds already, .*: {told}"):
        fit(task, second, tmp_path)
    fit(task, first, tmp_path)
    assert task.model is rounded


@pytest.mark.parametrize("state", [{"reduce_range": False}, {}])
def test_a_checkpoint_of_ranges_does_not_go_on_with_weights_alone(tmp_path: Path, state: dict[str, Any]) -> None:
    """Earlier versions kept the bits of weights in the callback, and before that nothing."""
    fit(Task(), Int8(reduce_range=False), tmp_path).save_checkpoint(tmp_path / "now.ckpt")
    saved = checkpoint.load(tmp_path / "now.ckpt")
    saved["callbacks"]["QuantizationAwareTraining"] = state
    checkpoint.save(tmp_path / "before.ckpt", saved)
    with pytest.raises(
        MisconfigurationError,
        match=r"trained with ranges of activations, .* rounds model to weightonly: .*kind = 'int8'",
    ):
        fit(Task(), WeightOnly(), tmp_path, 2, ckpt_path=tmp_path / "before.ckpt")


class Replacing(Task):
    """Puts other layers in the place of those that round, as `Float8` precision does."""

    def on_fit_start(self) -> None:
        self.model = Two()


def test_layers_that_were_replaced_are_not_trained_as_rounded(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationError, match=r"Replacing\.model has none of the layers that round any more"):
        fit(Replacing(), WeightOnly(), tmp_path)


def test_settings_of_a_run_refuse_bits_and_groups_without_kernels() -> None:
    with pytest.raises(ValueError, match="group_size must be one of"):
        LowBitTraining(activation_bits=8, group_size=7)
    with pytest.raises(ValueError, match="activation_bits must be"):
        LowBitTraining(activation_bits=5)
    for name in ("class", "model.head", ""):
        with pytest.raises(ValueError, match="attribute must be the name of a submodule"):
            LowBitTraining(attribute=name)
