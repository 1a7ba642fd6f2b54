"""A quantized model as a module: names, state, validation by a Trainer, and a report in which no layer is missing."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from tests.deploy.test_quantization import small, sqnr_db
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import arclight as al
from arclight.deploy import DynamicInt8, Int8, QuantizedModel, QuantizeError, quantize
from arclight.deploy.settings import Quantization


class Net(nn.Module):
    """A little of everything that has weights, and tables that are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(10, 4), nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, eps=1e-3)
        self.second, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.shift = nn.Parameter(torch.randn(8, 1, 1))
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x = x + self.table(at)[:, :, None, None]
        x = F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.shift)
        return self.last(self.up(x))


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor]:
    return torch.rand(3, 4, 8, 8), torch.tensor([1, 2, 3])


@pytest.fixture(scope="module")
def net(inputs: tuple[Tensor, Tensor]) -> Net:
    net = Net()
    for _ in range(10):
        net(*inputs)
    return net.eval()


@pytest.fixture(scope="module")
def int8(net: Net, inputs: tuple[Tensor, Tensor]) -> QuantizedModel:
    return quantize(net, [inputs])


def test_tensors_keep_their_names(net: Net, int8: QuantizedModel) -> None:
    state = int8.state_dict()
    # what the batch norm did is in the convolution before it, which has a bias for that
    wanted = {name for name in net.state_dict() if not name.startswith("norm.")} | {"first.bias"}
    assert wanted == {name for name in state if not name.endswith(("_scale", "_zero_point"))}
    integers = {name for name, value in state.items() if value.dtype == torch.int8}
    assert integers == {f"{layer}.weight" for layer in int8.quantized_layers}
    weight, scale = net.second.weight.detach(), state["second.weight_scale"]
    assert torch.equal(state["second.weight"], (weight / scale[:, None, None, None]).round().to(torch.int8))
    assert not any(parameter.requires_grad for parameter in int8.parameters())


def test_every_layer_is_in_one_list(net: Net, int8: QuantizedModel) -> None:
    assert set(int8.quantized_layers) == {"first", "second", "last"}
    assert set(int8.float_layers) == {"table", "up"}  # the shift is added, the norm folded: neither is a layer


def test_its_state_is_what_it_computes_with(int8: QuantizedModel, inputs: tuple[Tensor, Tensor]) -> None:
    copied = copy.deepcopy(int8)
    expected = int8(*inputs)
    assert torch.equal(copied(*inputs), expected)
    state = copied.state_dict()
    copied.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert copied(*inputs).abs().max() == 0
    assert torch.equal(int8(*inputs), expected)
    copied.load_state_dict(int8.state_dict())
    moved = copied.to(torch.device("cpu")).train()  # a Trainer does both
    assert not moved.training
    assert torch.equal(moved(*inputs), expected)


class ReadTwice(nn.Module):
    """A layer whose weight is read as a table, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.read, self.last = nn.Linear(32, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)) + self.read.weight.mean(0)
        logits: Tensor = self.last(torch.relu(self.read(x)))
        return logits


def test_a_weight_that_something_else_reads_is_there_in_float_as_well() -> None:
    torch.manual_seed(0)
    model, x = ReadTwice(), torch.randn(64, 32)
    quantized = quantize(model, [x])
    state = quantized.state_dict()
    assert (quantized.quantized_layers, state["read.weight"].dtype) == (("first", "read", "last"), torch.int8)
    assert torch.equal(state["read.weight_1"], model.read.weight)
    assert quantized.sqnr_db > 30


def test_a_layer_may_be_called_like_a_field() -> None:
    names = ("reference", "example", "recipe", "batches")
    layers = nn.ModuleDict({name: nn.Conv2d(4, 4, 1) for name in names})

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, x: Tensor) -> Tensor:
            for name in names:
                x = getattr(self, name)(x)
            return x

    batch = torch.rand(2, 4, 5, 5)
    quantized = quantize(Named(), [batch])
    assert {f"{name}.weight" for name in names} <= set(quantized.state_dict())
    assert isinstance(quantized.recipe, Int8)
    assert sqnr_db(quantized.reference(batch).detach(), quantized(batch)) > 25


class Regression(al.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, at, y = batch
        self.log("error", (self.model(x, at) - y).square().mean())


def test_trainer_validate_scores_it(net: Net, int8: QuantizedModel, inputs: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        wanted = net(*inputs)
    data = DataLoader(list(zip(*inputs, wanted)), batch_size=3)
    trainer = al.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu")
    scores = [trainer.validate(Regression(m), data, verbose=False)[0]["error"] for m in (net, int8)]
    assert scores[0] == 0
    assert scores[1] == pytest.approx(float((int8(*inputs) - wanted).square().mean()), rel=1e-5) != 0


class Unstable(nn.Module):
    """The logarithm of what a layer makes, where some of it is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.log, self.last = nn.Conv2d(4, 8, 1), nn.Module(), nn.Linear(8, 4)
        self.last2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).transpose(1, 2)
        return self.last2(self.last(torch.log(x)))


@pytest.mark.parametrize("observer", ["histogram", "minmax"])
def test_nan_activations_are_named_by_layer(observer: str) -> None:
    recipe = Int8(observer=observer, min_sqnr_db=-100)  # type: ignore[arg-type]
    with pytest.raises(QuantizeError, match=r"batch 0 makes NaN, first in the model's own aten.log.default"):
        quantize(Unstable(), [torch.rand(2, 4, 3, 3)], recipe=recipe)
    model, zero = small(), torch.zeros(2, 4, 16, 16)
    with torch.no_grad():
        model.first.weight.abs_()
        model.second.weight.abs_().mul_(1e37)  # only large inputs overflow
    with pytest.raises(QuantizeError, match=r"batch 1 makes infinite values, first in layer 'second' \(aten.conv2d"):
        quantize(model, [zero, zero + 1e5], recipe=recipe)
    with torch.no_grad():
        model.second.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(QuantizeError, match=r"first in the model.s own second\.weight"):
        quantize(model, [zero], recipe=recipe)


def test_the_callers_model_is_not_moved(inputs: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, moved = Net().eval(), []
    apply = nn.Module._apply
    monkeypatch.setattr(
        nn.Module, "_apply", lambda self, *args, **kw: (moved.append(self), apply(self, *args, **kw))[1]
    )
    quantize(model, [inputs])
    assert moved
    assert not set(map(id, moved)) & set(map(id, model.modules()))


def test_many_branches_take_no_longer_than_their_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty sums of a value with itself: a walk over all paths through them would not end."""
    from arclight.deploy.quantizing import graphs

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(30):
                x = (x + x.relu()) * 0.5
            return self.out(F.relu(self.last(x)).mean((2, 3)))

    looked = 0
    evaluate = graphs.stored_tensor

    def counted(*arguments: object) -> Tensor:
        nonlocal looked
        looked += 1
        return evaluate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "stored_tensor", counted)
    quantize(Doubling(), [torch.rand(2, 4, 3, 3)], recipe=Int8(min_sqnr_db=-50))
    assert looked < 100


@pytest.mark.parametrize("recipe", [Int8(), DynamicInt8()])
def test_a_model_that_does_not_take_its_data_is_refused_by_their_type(recipe: Quantization) -> None:
    pixels = torch.zeros(4, 8, dtype=torch.uint8)
    data = {"calibration": [pixels]} if isinstance(recipe, Int8) else {"example": pixels}
    with pytest.raises(QuantizeError, match=r"cannot be run on its own data, uint8 \(4, 8\): .* give inputs as"):
        quantize(nn.Sequential(nn.Linear(8, 8)), recipe=recipe, **data)


def test_a_metric_may_leave_the_model_in_training_mode() -> None:
    """Dropout or batch statistics would else be a part of what the quantized model is compared with."""

    def score(model: nn.Module) -> float:
        model.train()
        return 1.0

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.9), nn.Linear(32, 8)).eval()
    x = torch.rand(16, 8)
    plain, scored = quantize(network, [x]), quantize(network, [x], metric=score)
    assert scored.sqnr_db == plain.sqnr_db
    assert not scored.reference.training


def test_pickles_compute_alike(int8: QuantizedModel, inputs: tuple[Tensor, Tensor]) -> None:
    again = int8
    for _ in range(2):  # also of what came out of a pickle
        again = pickle.loads(pickle.dumps(again))
    assert list(again.state_dict()) == list(int8.state_dict())
    assert all(torch.equal(value, int8.state_dict()[name]) for name, value in again.state_dict().items())
    assert not any(parameter.requires_grad for parameter in again.parameters())
    for size in (1, 3):
        some = tuple(value[:size] for value in inputs)
        assert torch.equal(again(*some), int8(*some))
    assert torch.equal(again.reference(*inputs), int8.reference(*inputs))
    for name in ("recipe", "quantized_layers", "float_layers", "batches", "target", "sqnr_db", "seconds"):
        assert getattr(again, name) == getattr(int8, name)
    with torch.no_grad():
        again.state_dict()["first.bias"].add_(1)  # its graph reads the tensors that are registered
    assert not torch.equal(again(*inputs), int8(*inputs))


def test_pickles_do_not_lose_what_was_put_into_a_model(int8: QuantizedModel) -> None:
    changed = copy.deepcopy(int8)
    changed.extra = nn.Linear(2, 2)
    with pytest.raises(QuantizeError, match="cannot be pickled: extra was put into it"):
        pickle.dumps(changed)


def doubled(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return 2 * output


def test_pickles_keep_attributes_and_hooks(int8: QuantizedModel, inputs: tuple[Tensor, Tensor]) -> None:
    changed = copy.deepcopy(int8)
    changed.labels = ["cat", "dog"]
    changed.register_forward_hook(doubled)
    changed.compile(backend="eager")  # which, as of other modules, is no part of a pickle
    again = pickle.loads(pickle.dumps(changed))
    assert again.labels == ["cat", "dog"]
    assert torch.equal(again(*inputs), 2 * int8(*inputs))


class Scored(al.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/mean", self.model(*batch).mean(), sync_dist=True)


@pytest.mark.slow
def test_ranks_that_are_spawned_measure_a_quantized_model(
    int8: QuantizedModel, inputs: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    trainer = al.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )  # fmt: skip
    samples = [tuple(value[at] for value in inputs) for at in (0, 1)]
    (found,) = trainer.validate(Scored(int8), DataLoader(samples), verbose=False)
    assert found["val/mean"] == pytest.approx(float(int8(*(value[:2] for value in inputs)).mean()), abs=1e-6)
