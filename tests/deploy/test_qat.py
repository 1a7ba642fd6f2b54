"""Quantization-aware training: what is trained is what is deployed, and no number of the model is written anew."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.deploy.conftest import picture
from tests.deploy.test_quantization import sqnr_db
from tests.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader

import arclight as al
from arclight import checkpoint
from arclight.deploy import (
    ExportError,
    Int8,
    LowBit,
    QuantizationAwareTraining,
    QuantizedModel,
    QuantizeError,
    convert,
    export,
    prepare_qat,
    quantize,
)
from arclight.deploy.programs import processor
from arclight.deploy.quantizing import pt2e, qat
from arclight.deploy.quantizing.batch_norm import literals
from arclight.deploy.quantizing.observers import LeastErrorMovingRange, MovingRange
from arclight.deploy.quantizing.placement import PlacementQuantizer
from arclight.fabric.distributed.sharding import full_tensor
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from arclight.federated.clients.local_policy import trained_names
from arclight.trainer.callbacks import EMAWeightAveraging
from arclight.trainer.checkpoint.named_state import check_trained_alike, load_parameters, named_tensors

EPSILON, MOMENTUM, DROPOUT = 1e-3, 0.03, 0.2


class Normed(nn.Module):
    """Two batch norms whose variances are as small as their epsilon, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, eps=EPSILON, momentum=MOMENTUM)
        self.drop = nn.Dropout(DROPOUT)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8, eps=EPSILON, momentum=MOMENTUM)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.bn(self.conv(x))))
        return self.out(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))


EIGHT, SEVEN = Int8(reduce_range=False), Int8(reduce_range=True)
"""On any processor: nothing here runs as a program."""
OLD, NEW = frozenset({"avx2"}), frozenset({"avx2", "avx512_vnni"})
"""Instructions of processors whose sums of 8-bit products overflow, and of those whose sums do not."""
BITS = "fake_quantize.weight_bits"


def normed() -> tuple[Normed, Tensor]:
    torch.manual_seed(1)
    model, x = Normed(), torch.randn(16, 4, 8, 8) * 0.05
    with torch.no_grad():
        for module in (model.conv, model.conv2):
            module.weight.mul_(0.2)
        for _ in range(400):  # the first variances of 1 are forgotten
            model(x)
    return model.eval(), x


@pytest.fixture(scope="module")
def trained() -> tuple[Normed, Tensor]:
    return normed()


def ours(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    prepared = prepare_qat(model, x, recipe=EIGHT)
    for mode in (True, False, True, False):
        prepared.train(mode)
    return convert(prepared)


def traced(pattern: Any, inputs: tuple[Any, ...], on_cuda: bool, **options: Any) -> nn.Module:
    """One of torchao's 192 patterns, without Dynamo, by which its own function traces them in four times as long."""
    graph = torch.export.export(pattern, inputs, options, strict=False).module()
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def bare(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The same placement through torchao's own calls."""
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train, qat_utils
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

    graph = torch.export.export(copy.deepcopy(model).train(), (x,)).module()
    prepared = prepare_qat_pt2e(graph, PlacementQuantizer(qat=True))
    move_exported_model_to_eval(prepared)
    for module in prepared.modules():  # the first ranges, as prepare_qat takes them
        if isinstance(module, pt2e.ObserverBase):
            module.train()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(qat_utils, "_get_aten_graph_module_for_pattern", traced)
        prepared(x)
        move_exported_model_to_train(prepared)
        move_exported_model_to_eval(prepared)
        return convert_pt2e(prepared)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("stack", "least", "most"), [(ours, 30, 80), pytest.param(bare, -99, 15, marks=pytest.mark.slow)]
)
def test_batch_norms_keep_their_epsilon(
    trained: tuple[Normed, Tensor], stack: Callable[..., Any], least: float, most: float
) -> None:
    model, x = trained
    assert float(model.bn.running_var.max()) < EPSILON  # so that epsilon matters
    with torch.no_grad():
        wanted, given = model(x), stack(model, x)(x)
    mean = wanted.mean(0)  # biases are large beside what the images change
    assert least <= sqnr_db(wanted - mean, given - mean) <= most


def test_literals_survive_every_step(trained: tuple[Normed, Tensor]) -> None:
    model, x = trained
    prepared = prepare_qat(model, x)
    for mode in (True, False, True):
        prepared.train(mode)
        for graph in prepared.graphs.values():
            found = literals(graph)
            assert found.pop("dropout 0") == (DROPOUT,)
            assert set(found.values()) == {(MOMENTUM, EPSILON)}
            assert set(found) == {"bn.running_mean", "bn2.running_mean"}


def test_training_updates_what_the_model_would(trained: tuple[Normed, Tensor]) -> None:
    """Without rounding, a step is the model's own: outputs, gradients and running statistics."""
    model, x = copy.deepcopy(trained[0]).train(), trained[1]
    prepared = prepare_qat(model, x)
    for module in prepared.modules():
        if isinstance(module, pt2e.ObserverBase):
            module.rounding = False
    results = []
    for one in (model, prepared):
        torch.manual_seed(3)  # dropout
        one(x).square().sum().backward()
        results.append({name: parameter.grad for name, parameter in one.named_parameters()} | dict(one.named_buffers()))
    assert set(results[0]) <= set(results[1])
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-5)


def test_prepared_and_converted_agree(trained: tuple[Normed, Tensor]) -> None:
    model, x = trained
    prepared = prepare_qat(model, x).train()
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for _ in range(5):
        optimizer.zero_grad()
        (prepared(x) - 1).square().mean().backward()
        optimizer.step()
    converted = convert(prepared.eval())
    with torch.no_grad():
        assert sqnr_db(prepared(x), converted(x)) > 35
        assert sqnr_db(model(x), converted(x)) < 20  # it was trained
    assert set(converted.quantized_layers) == {"conv", "conv2", "out"}
    assert prepared.graphs["training"] is not None


def test_weights_are_rounded_with_the_scale_of_their_batch_norm(trained: tuple[Normed, Tensor]) -> None:
    model, x = trained
    state = convert(prepare_qat(model, x, recipe=EIGHT)).state_dict()
    scale = (model.bn.weight / (model.bn.running_var + EPSILON).sqrt()).detach()
    folded = model.conv.weight.detach() * scale[:, None, None, None]
    step = folded.abs().amax((1, 2, 3)) / 127
    torch.testing.assert_close(state["conv.weight_scale"], step)
    assert (state["conv.weight"].float() - folded / step[:, None, None, None]).abs().max() < 0.5 + 1e-3
    shift = (model.bn.bias - model.bn.running_mean * scale).detach()
    assert (state["conv.bias"] * state["conv.bias_scale"] - shift).abs().max() < 1e-4


def test_a_channel_of_scale_zero_stays_finite(trained: tuple[Normed, Tensor]) -> None:
    model, x = copy.deepcopy(trained[0]).train(), trained[1]
    nn.init.zeros_(model.bn2.weight)  # as residual branches start
    nn.init.constant_(model.bn2.bias, 0.5)
    prepared = prepare_qat(model, x)
    prepared(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in prepared.parameters())  # type: ignore[union-attr]
    with torch.no_grad():
        assert sqnr_db(model.eval()(x), convert(prepared)(x)) > 35


def test_frozen_batch_norms_and_ranges_stay(trained: tuple[Normed, Tensor]) -> None:
    model, x = trained
    prepared = prepare_qat(model, x).train()
    buffers = {name: value.clone() for name, value in prepared.named_buffers() if not name.endswith(".scale")}
    prepared.observe(False)
    prepared.freeze_batch_norm(True)
    prepared(10 * x)
    assert all(torch.equal(value, prepared.state_dict()[name]) for name, value in buffers.items())
    prepared.observe(True)
    prepared.freeze_batch_norm(False)
    prepared(10 * x)
    changed = {name for name, value in buffers.items() if not torch.equal(value, prepared.state_dict()[name])}
    assert {"bn.running_mean", "bn.num_batches_tracked", "fake_quantize.input_x.high"} <= changed


@pytest.fixture(scope="module")
def once_prepared(trained: tuple[Normed, Tensor]) -> qat.PreparedModel:
    """A prepared model for tests that leave its weights and ranges as they are."""
    return prepare_qat(*trained)


GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31364"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.OutOfMemoryError, "no luck"),
        (torch.distributed.DistBackendError, "no luck"),
        (RuntimeError, GLOO),
        (RuntimeError, "no luck"),
    ],
)
def test_errors_that_another_size_did_not_cause_are_raised_unchanged(
    once_prepared: qat.PreparedModel, trained: tuple[Normed, Tensor], kind: type[RuntimeError], said: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prepared = once_prepared.train()

    def fail(*_: Tensor) -> None:
        raise kind(said)

    monkeypatch.setitem(prepared.graphs, "training", fail)
    of_shapes = kind is RuntimeError and said != GLOO
    told, words = (QuantizeError, "the graph was captured on inputs") if of_shapes else (kind, re.escape(said))
    with pytest.raises(told, match=words):
        prepared(trained[1][..., 1:])


def test_infinite_activations_do_not_widen_ranges(trained: tuple[Normed, Tensor]) -> None:
    prepared = prepare_qat(*trained).train()
    (first, *_), image = prepared.ranges(), trained[1].clone()
    before = float(first.low), float(first.high), int(first.batches)
    image[0, 0, 0, 0] = torch.inf  # a step that gradient scaling would skip
    prepared(image)
    image[0, 0, 0, 0] = torch.nan
    prepared(image)
    assert (float(first.low), float(first.high), int(first.batches)) == before
    assert all(one.low.isfinite() and one.high.isfinite() for one in prepared.ranges())


@pytest.mark.slow
def test_a_detector_trains_on_one_output_and_deploys_another(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    prepared = prepare_qat(model, images).train()
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    for seed in range(3):
        fine, coarse = prepared(picture(8, seed))
        optimizer.zero_grad()
        (fine.square().mean() + coarse.square().mean()).backward()
        optimizer.step()
    quantized = convert(prepared)
    with torch.no_grad():
        assert sqnr_db(quantized.reference(images), quantized(images)) > 25
        assert sqnr_db(prepared.eval()(images), quantized(images)) > 35
    after_training = quantize(quantized.reference, [images])
    assert quantized.quantized_layers == after_training.quantized_layers
    assert quantized.float_layers == after_training.float_layers
    program = export(quantized, tmp_path / "q.onnx", example_inputs=images)
    assert sum(program.metadata["quantization"]["integer_kernels"].values()) == len(quantized.quantized_layers)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        F.relu(x[:, :4], inplace=True)
        return self.b(x)


class TrainedElsewhere(nn.Module):
    """A layer that evaluation alone computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.c(x if self.training else F.relu(self.b(x)))


def test_prepare_qat_names_unsupported_layers() -> None:
    with pytest.raises(ExportError, match=r"aten.relu_.default in the model itself writes into"):
        prepare_qat(Viewed(), torch.rand(2, 4, 8, 8))
    with pytest.raises(QuantizeError, match=r"b\.weight is rounded in evaluation mode and not computed in training"):
        prepare_qat(TrainedElsewhere(), torch.rand(2, 4))
    with pytest.raises(QuantizeError, match="no layer of Conv2d"):
        prepare_qat(nn.Conv2d(4, 8, 3), torch.rand(2, 4, 8, 8))
    with pytest.raises(QuantizeError, match="did you mean 'conv'"):
        prepare_qat(Normed(), torch.rand(2, 4, 8, 8), recipe=Int8(skip=("conv3",)))
    with pytest.raises(TypeError, match="convert needs what prepare_qat has returned, got Linear"):
        convert(nn.Linear(2, 2))  # type: ignore[arg-type]


class Shared(nn.Module):
    """Two convolutions of one weight, one of them normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.b.weight = self.a.weight
        self.norm, self.out = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.b(self.a(x).relu())).relu())
        return y


def test_a_weight_of_two_layers_is_folded_in_one() -> None:
    x = torch.randn(4, 8, 8, 8)
    prepared = prepare_qat(Shared(), x)
    prepared(x).sum().backward()
    assert convert(prepared.eval()).quantized_layers == ("a", "b", "out")


def test_layers_with_steps_of_their_own_stay_in_float(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 16)
    model = nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 8))
    prepared = prepare_qat(model, x)
    assert "training computes the weights of these layers with a state, so they stay in float: 0" in caplog.text
    prepared(x).sum().backward()
    assert convert(prepared.eval()).quantized_layers == ("2",)


@pytest.mark.parametrize("norm", [weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_weights_that_are_computed_of_others_are_trained_with_rounding(norm: Callable[..., nn.Module]) -> None:
    model, x = normed()
    norm(model.conv), norm(model.conv2), norm(model.out)
    prepared = prepare_qat(model, x, recipe=EIGHT)
    assert prepared.quantized_layers == ("conv", "conv2", "out")
    before = {name: value.clone() for name, value in prepared.named_parameters() if ".bias" not in name}
    step = torch.optim.SGD(prepared.train().parameters(), 1e-3)
    for _ in range(3):
        step.zero_grad()
        prepared(x).square().mean().backward()
        step.step()
    after = dict(prepared.named_parameters())
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]
    int8 = convert(prepared.eval())
    assert int8.quantized_layers == ("conv", "conv2", "out")
    assert not int8.float_layers
    assert not [node for node in int8.graph.graph.nodes if node.target is torch.ops.aten.batch_norm.default]
    assert int8.sqnr_db > 30
    assert sqnr_db(int8(x), prepared(x).detach()) > 30


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_weights_of_another_type_are_refused_by_it(kind: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).to(kind)
    with pytest.raises(QuantizeError, match=rf"weights of Sequential are {kind}, .* prepare model\.float\(\)"):
        prepare_qat(model, torch.randn(4, 16, dtype=kind))


def test_ranges_are_those_of_training_in_whatever_mode_a_model_is_converted(trained: tuple[Normed, Tensor]) -> None:
    prepared = prepare_qat(*trained, recipe=EIGHT).train()
    prepared(10 * trained[1])  # the example has other ranges
    converted = [convert(prepared.train(mode)).state_dict() for mode in (True, False)]
    assert converted[0].keys() == converted[1].keys()
    assert all(torch.equal(value, converted[1][name]) for name, value in converted[0].items())
    x = trained[1]
    with torch.no_grad():
        assert torch.equal(*(convert(prepared.train(mode))(x) for mode in (True, False)))


def test_the_callers_model_is_untouched(trained: tuple[Normed, Tensor]) -> None:
    model, x = trained
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    prepared = prepare_qat(model, x).train()
    prepared(x).sum().backward()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    again = copy.deepcopy(prepared)
    zeros = {name: torch.zeros_like(value) for name, value in prepared.state_dict().items()}
    again.load_state_dict(zeros | {BITS: prepared.state_dict()[BITS]})
    assert float(again.eval()(x).detach().abs().max()) == 0  # a copy computes with tensors of its own
    assert float(prepared.eval()(x).detach().abs().max()) > 0


# -- the callback --------------------------------------------------------------------------------------------------


class Task(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model: Any = Normed()
        self.example_input_array = samples()[0][:4]
        self.scored: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))
        self.scored.append(type(getattr(self.model, "_int8", self.model)).__name__)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 4, 8, 8, generator=generator)
    return x, (x.mean((1, 2, 3)) * 20).long().clamp(-1, 1) + 1


def loader() -> DataLoader[Any]:
    return DataLoader(list(zip(*samples())), batch_size=8)


def fit(
    task: Task, folder: Path, steps: int, *, before: tuple[al.Callback, ...] = (), after: tuple[al.Callback, ...] = (),
    precision: Any = None, recipe: Int8 | LowBit | None = None, **options: Any,
) -> al.Trainer:  # fmt: skip
    callback = QuantizationAwareTraining(recipe or Int8(min_sqnr_db=200), freeze_observers_at=5, freeze_batch_norm_at=6)
    trainer = al.Trainer(
        max_steps=steps, logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu",
        default_root_dir=folder, callbacks=[*before, callback, *after], precision=precision, num_sanity_val_steps=0, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, loader(), loader(), **options)
    return trainer


def test_a_run_scores_the_converted_model_and_resumes_exactly(tmp_path: Path) -> None:
    al.seed_everything(6)
    whole = Task()
    trainer = fit(whole, tmp_path, 8)
    assert set(whole.scored) == {"QuantizedModel"}
    assert type(whole.model).__name__ == "PreparedModel"
    with pytest.raises(QuantizeError, match="the recipe asks for 200"):  # of what is deployed, not of what still trains
        convert(whole.model)
    whole.model.__dict__["recipe"] = Int8(min_sqnr_db=-50)
    converted = convert(whole.model)
    x, y = samples()
    with torch.no_grad():
        wanted = float(F.cross_entropy(converted(x), y))
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(wanted, rel=1e-4)

    al.seed_everything(6)
    fit(Task(), tmp_path, 4).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Task()
    fit(resumed, tmp_path, 8, ckpt_path=tmp_path / "half.ckpt")
    state = whole.state_dict()
    assert {name for name in state if "fake_quantize" not in name} == set(Task().state_dict())
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, state[name]), name


class Smooth(Task):
    """A network whose ranges are read by SiLU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        layers = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Conv2d(8, 3, 4)
        self.model = nn.Sequential(*layers, nn.Flatten())


def test_a_run_of_four_bits_resumes_exactly_and_is_pickled_whole(tmp_path: Path) -> None:
    four = LowBit(activation_bits=4, min_sqnr_db=-50)
    whole, resumed = Smooth(), Smooth()
    fit(whole, tmp_path, 4, recipe=four)
    fit(Smooth(), tmp_path, 2, recipe=four).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, tmp_path, 4, recipe=four, ckpt_path=tmp_path / "half.ckpt")
    sent = pickle.loads(pickle.dumps(whole.model))
    for again in (resumed.model, sent):
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.model.state_dict().items())
    x = 8 * samples()[0]
    outputs = [model.train()(x) for model in (whole.model, resumed.model, sent)]  # ranges move alike, too
    assert all(torch.equal(outputs[0], other) for other in outputs)
    ranges = [model.state_dict()["fake_quantize.1_batch_norm.low"] for model in (whole.model, resumed.model, sent)]
    assert ranges[0] == ranges[1] == ranges[2]


@pytest.mark.slow
def test_a_run_of_eight_bits_does_not_go_on_in_seven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: NEW)
    begun = fit(Task(), tmp_path, 2)
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    begun.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    monkeypatch.setattr(processor, "instruction_sets", lambda: OLD)
    with pytest.raises(
        MisconfigurationError, match=r"reduce_range=False, which is True here.* give Int8\(reduce_range=False\)$"
    ):
        fit(Task(), tmp_path, 4, ckpt_path=tmp_path / "begun.ckpt")
    trainer = al.Trainer(
        callbacks=QuantizationAwareTraining(), logger=False, enable_progress_bar=False, accelerator="cpu"
    )
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        for name in ("begun", "weights"):
            with pytest.raises(MisconfigurationError, match="which is True here"):
                evaluate(Evaluated(), loader(), ckpt_path=tmp_path / f"{name}.ckpt")


class Evaluated(Task):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("seven", [False, True])
def test_runs_from_before_the_record_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seven: bool) -> None:
    """Their bits were the callback's state; before that weights had 8, or those that a recipe named."""
    average = EMAWeightAveraging(decay=0.5)
    monkeypatch.setattr(processor, "instruction_sets", lambda: OLD if seven else NEW)
    fit(Task(), tmp_path, 2, after=(average,)).save_checkpoint(tmp_path / "now.ckpt")
    state = checkpoint.load(tmp_path / "now.ckpt")
    assert int(state["model"].pop(f"model.{BITS}")) == int(state["ema"].pop(f"model.{BITS}")) == (7 if seven else 8)
    checkpoint.save(tmp_path / "first.ckpt", state)
    state["callbacks"]["QuantizationAwareTraining"] = {"reduce_range": seven}
    checkpoint.save(tmp_path / "second.ckpt", state)

    def go_on(name: str, **options: Any) -> None:
        fit(Task(), tmp_path, 3, after=(average,), ckpt_path=tmp_path / f"{name}.ckpt", **options)

    go_on("second")
    go_on("first", recipe=SEVEN if seven else EIGHT)
    monkeypatch.setattr(processor, "instruction_sets", lambda: NEW if seven else OLD)
    with pytest.raises(MisconfigurationError, match=f"reduce_range={seven}, which is {not seven} here"):
        go_on("second")
    monkeypatch.setattr(processor, "instruction_sets", lambda: OLD)
    with pytest.raises(
        MisconfigurationError,
        match=r"=False, which is True here.* or Int8\(reduce_range=True\) if these weights, which have no record",
    ):
        go_on("first")


@pytest.mark.parametrize(
    "recipe",
    [
        EIGHT,
        *(
            pytest.param(recipe, marks=pytest.mark.slow)
            for recipe in (SEVEN, LowBit(activation_bits=4, min_sqnr_db=-50))
        ),
    ],
)
def test_weights_are_loaded_into_a_model_of_their_bits(
    trained: tuple[Normed, Tensor], recipe: Int8 | LowBit, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = trained
    other, own = prepare_qat(model, x, recipe=recipe), f"give {type(recipe).__name__}("
    with torch.no_grad():
        other.conv.weight.mul_(2)
    state, half = other.state_dict(), copy.deepcopy(other).bfloat16().state_dict()
    for processors in (OLD, NEW):
        monkeypatch.setattr(processor, "instruction_sets", lambda found=processors: found)
        prepared = prepare_qat(model, x)
        kept = copy.deepcopy(prepared.state_dict())
        for given in (state, half):
            if prepared.weight_bits == other.weight_bits:
                prepared.load_state_dict(given)
                nn.ModuleDict({"inside": prepared}).load_state_dict({f"inside.{name}": v for name, v in given.items()})
                assert torch.equal(prepared.conv.weight, given["conv.weight"].float())
                continue
            with pytest.raises(MisconfigurationError, match=re.escape(own)):
                prepared.load_state_dict(given)
            assert all(torch.equal(value, kept[name]) for name, value in prepared.state_dict().items()), (
                "nothing is copied"
            )
    alike = prepare_qat(model, x, recipe=recipe)
    alike.load_state_dict({name: value for name, value in half.items() if name != BITS})
    assert alike.state_dict()[BITS].dtype == torch.int64
    assert int(alike.state_dict()[BITS]) == other.weight_bits
    prepared.load_state_dict(model.state_dict(), strict=False)  # a float model, which has no bits
    with pytest.raises(MisconfigurationError, match=r"which have [78] here.*their record is damaged"):
        prepared.load_state_dict(prepared.state_dict() | {BITS: torch.tensor(3)})


@pytest.mark.slow
def test_weights_that_were_copied_in_place_are_not_converted_in_other_bits(trained: tuple[Normed, Tensor]) -> None:
    """As by DDP's first broadcast; in rounds of federated clients, who take the weights of others by name, they are refused at once."""
    model, x = trained
    seven, eight = prepare_qat(model, x, recipe=SEVEN), prepare_qat(model, x, recipe=EIGHT)
    assert BITS in trained_names(eight)
    load_parameters(eight, named_tensors(prepare_qat(model, x, recipe=EIGHT)))
    convert(eight)
    refused = pytest.raises(
        MisconfigurationError, match=r"=True, which is False here.* give Int8\(reduce_range=True\)$"
    )
    with refused:
        load_parameters(eight, named_tensors(seven))
    convert(eight)
    with torch.no_grad():
        for name, value in named_tensors(seven).items():
            named_tensors(eight)[name].copy_(value)
    with refused:
        convert(eight)


def test_weights_without_a_record_of_bits_are_refused_if_whole_and_taken_in_part(
    trained: tuple[Normed, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As federations exchange it that send a fragment in each round."""
    monkeypatch.setattr(processor, "instruction_sets", lambda: OLD)
    prepared = prepare_qat(*trained)
    assert prepared.weight_bits == 7
    ranges = {
        name: value
        for name, value in named_tensors(prepared).items()
        if name.startswith("fake_quantize.") and name != BITS
    }
    load_parameters(prepared, ranges)
    with pytest.raises(MisconfigurationError, match="no record of their bits"):
        check_trained_alike(prepared, ranges)  # whole weights, of an earlier version: they have 8


class Pair(Task):
    """Has two networks, each trained with rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.other(batch[0]).square().mean()


@pytest.mark.slow
def test_two_networks_of_a_module_are_trained_with_rounding(tmp_path: Path) -> None:
    rounding = [QuantizationAwareTraining(attribute=name, example_inputs=samples()[0]) for name in ("model", "other")]
    trainer = al.Trainer(
        max_steps=2, callbacks=rounding, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        accelerator="cpu", default_root_dir=tmp_path, limit_val_batches=0,
    )  # fmt: skip
    module = Pair()
    trainer.fit(module, loader(), loader())
    assert {type(part).__name__ for part in (module.model, module.other)} == {"PreparedModel"}
    begun = {"callbacks": {"QuantizationAwareTraining{'attribute': 'other'}": {"reduce_range": True}}, "state_dict": {}}
    rounding[1].on_load_checkpoint(trainer, module, begun)  # of before the bits were in the model
    assert begun == {"callbacks": {}, "state_dict": {f"other.{BITS}": torch.tensor(7)}}


class Saving(Task):
    """Saves where ModelCheckpoint does not: while the int8 model is scored."""

    def on_validation_epoch_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "within.ckpt")


@pytest.mark.slow
def test_a_checkpoint_of_validation_holds_what_is_trained(tmp_path: Path) -> None:
    al.seed_everything(6)
    fit(Saving(), tmp_path, 4)
    resumed = Task()
    fit(resumed, tmp_path, 5, ckpt_path=tmp_path / "within.ckpt")
    assert set(resumed.state_dict()) >= set(Task().state_dict())


@pytest.mark.slow
def test_validation_scores_the_average_in_either_order(tmp_path: Path) -> None:
    losses = []
    for place in ("before", "after"):
        al.seed_everything(6)
        trainer = fit(Task(), tmp_path, 8, **{place: (EMAWeightAveraging(decay=0.5),)})
        losses.append(float(trainer.callback_metrics["loss"]))
    assert losses[0] == losses[1]
    al.seed_everything(6)
    assert losses[0] != float(fit(Task(), tmp_path, 8).callback_metrics["loss"])


def test_evaluation_takes_a_converted_model_and_fit_refuses_it(tmp_path: Path) -> None:
    task = Task()
    callback = QuantizationAwareTraining(Int8(min_sqnr_db=-50))
    trainer = al.Trainer(
        logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu", callbacks=[callback],
        default_root_dir=tmp_path, max_steps=1,
    )  # fmt: skip
    (first,) = trainer.validate(task, loader(), verbose=False)
    (again,) = trainer.validate(task, loader(), verbose=False)
    task.model = convert(task.model)
    (converted,) = trainer.validate(task, loader(), verbose=False)
    assert first == again
    assert converted["loss"] == pytest.approx(first["loss"], rel=1e-5)
    with pytest.raises(MisconfigurationError, match="is a QuantizedModel, which has no gradients"):
        trainer.fit(task, loader())


class ByMethod(Normed):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)


def test_a_model_that_is_not_called_itself_is_reported(tmp_path: Path) -> None:
    class Methodical(Task):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.model.loss(*batch)  # type: ignore[no-any-return]

    task = Methodical()
    task.model = ByMethod()
    with pytest.warns(UserWarning, match=r"Methodical\.model was not called in training_step, so nothing is rounded"):
        fit(task, tmp_path, 1)


def test_precisions(tmp_path: Path) -> None:
    """Under autocast the int8 model computes as its program does; weights of 16 bits have nothing to round."""
    task = Task()
    fit(task, tmp_path, 2, precision="bf16-mixed")
    assert {one.low.dtype for one in task.model.ranges()} == {torch.float32}
    task.model.__dict__["recipe"] = Int8(min_sqnr_db=-50)
    converted, (x, _) = convert(task.model), samples()
    with torch.autocast("cpu", torch.bfloat16):
        inside = converted(x.bfloat16().float())
    assert torch.equal(inside, converted(x.bfloat16()))
    assert inside.dtype == torch.float32
    with pytest.raises(QuantizeError, match=r"must be float32, these are torch\.bfloat16"):
        fit(Task(), tmp_path, 1, precision="bf16-true")


class Constant(nn.Module):
    """Layers after a value that depends on the batch size: as a number, or by a branch."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.a, self.b, self.branch = nn.Linear(4, 8), nn.Linear(8, 2), branch

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if self.branch:
            return self.b(x if x.shape[0] > 3 else x + 1)
        return self.b(x - x.sum(0) / int(x.shape[0]))


@pytest.mark.parametrize("branch", [False, True])
def test_a_constant_batch_size_is_refused(branch: bool) -> None:
    with pytest.raises(ExportError, match=r"for training, the model takes the batch size of x \(4\) for a constant"):
        prepare_qat(Constant(branch), torch.rand(4, 4))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x) + torch.arange(8, device=x.device) + self.shift))


def test_graphs_move_with_their_tensors() -> None:
    quantized = quantize(Positions(), [torch.rand(4, 4)]).to("meta")
    assert quantized.graph(torch.rand(3, 4, device="meta")).shape == (3, 2)
    prepared = prepare_qat(Positions(), torch.rand(4, 4)).to("meta")
    for graph in prepared.graphs.values():
        devices = {
            value for node in graph.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)
        }
        assert devices == {torch.device("meta")}
    assert prepared.float_model.shift is prepared.shift  # a buffer of the model itself


def test_the_callback_names_missing_requirements(tmp_path: Path) -> None:
    nameless = Task()
    nameless.example_input_array = None
    with pytest.raises(MisconfigurationError, match="give example_inputs="):
        fit(nameless, tmp_path, 1)
    empty = Task()
    empty.model = None
    synced = al.Trainer(
        devices=2, strategy="ddp", accelerator="cpu", sync_batchnorm=True, logger=False, enable_checkpointing=False
    )
    with pytest.raises(MisconfigurationError, match="does not work with sync_batchnorm=True"):
        QuantizationAwareTraining().setup(synced, Task(), "fit")
    with pytest.raises(MisconfigurationError, match="has no submodule 'model' when setup is called"):
        fit(empty, tmp_path, 1)


def test_a_prepared_model_can_be_scored_without_the_callback(trained: tuple[Normed, Tensor]) -> None:
    model, x = trained
    converted = convert(prepare_qat(model, x))
    assert isinstance(converted, QuantizedModel)
    task = Task()
    task.model = converted
    trainer = al.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu")
    assert trainer.validate(task, loader(), verbose=False)[0]["loss"] > 0


# -- two ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


class Apart(Task):
    """Ranks whose samples differ in range by a factor of ten."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * (1 + 9 * self.global_rank), batch[1]], batch_idx)


def run(task: al.Module, callback: QuantizationAwareTraining, steps: int, strategy: Any, **options: Any) -> al.Trainer:
    devices = 1 if strategy == "auto" else 2
    trainer = al.Trainer(
        max_steps=steps, devices=devices, strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, callbacks=[callback], num_sanity_val_steps=0, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, **options)
    return trainer


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value).detach().clone() for name, value in model.state_dict().items()}


def train_on_rank(rank: int, strategy: str) -> dict[str, Any]:
    task = Apart()
    run(
        task,
        QuantizationAwareTraining(Int8(min_sqnr_db=-50)),
        3,
        strategy,
        train_dataloaders=loader(),
        val_dataloaders=loader(),
    )
    assert set(task.scored) == {"QuantizedModel"}
    state = {name: value.tolist() for name, value in whole_state(task.model).items()}
    return state | {"logits": convert(task.model)(samples()[0]).tolist()}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_train_one_model(ranks: Ranks, strategy: str) -> None:
    first, second = ranks(train_on_rank, strategy)
    assert first == second
    start = prepare_qat(Apart().model, Apart().example_input_array).state_dict()["fake_quantize.input_x.high"]
    assert first["fake_quantize.input_x.high"] > 1.05 * float(
        start
    )  # three steps of 1 % toward that of rank 1, 10 times


def train_on_unlike_processors(rank: int, strategy: str, folder: Path) -> list[Any]:
    task = Task()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "instruction_sets", lambda: NEW if rank else OLD)
        begun = run(task, QuantizationAwareTraining(Int8(min_sqnr_db=-50)), 1, strategy, train_dataloaders=loader())
        begun.save_checkpoint(folder / "begun.ckpt")
        patch.setattr(processor, "instruction_sets", lambda: OLD if rank else NEW)
        with pytest.raises(MisconfigurationError) as refused:
            run(
                Task(), QuantizationAwareTraining(), 2, strategy, train_dataloaders=loader(), ckpt_path=folder / "begun.ckpt"
            )  # fmt: skip
    state = whole_state(task.model)
    return [convert(task.model).recipe.reduce_range, int(state[BITS]), str(refused.value)]  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_round_to_the_bits_of_the_first(ranks: Ranks, strategy: str, tmp_path: Path) -> None:
    for reduced, bits, refused in ranks(train_on_unlike_processors, strategy, tmp_path):
        assert (reduced, bits) == (True, 7)
        assert "reduce_range=True, which is False here" in refused


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_that_a_script_has_started_give_their_model_back(tmp_path: Path, strategy: str) -> None:
    task = Task()
    trainer = al.Trainer(
        max_steps=2, devices=2, strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_checkpointing=False, callbacks=[QuantizationAwareTraining(Int8(min_sqnr_db=-50))], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(task, loader(), loader())
    loss = float(trainer.callback_metrics["loss"])
    assert min(int(one.batches) for one in task.model.ranges()) == 3  # and the example inputs
    convert(task.model)
    (again,) = trainer.validate(task, loader(), verbose=False)  # of the prepared model, as it was sent to new ranks
    assert again["loss"] == loss


def test_pickles_compute_alike(trained: tuple[Normed, Tensor]) -> None:
    model, x = copy.deepcopy(trained[0]).train(), trained[1]
    model.bn2.eval()
    model.drop.p = 0.0
    prepared = prepare_qat(model, x, recipe=EIGHT)
    prepared(2 * x)
    prepared.observe(False)
    prepared.freeze_batch_norm(True)
    prepared.drop.eval()
    again = pickle.loads(pickle.dumps(prepared))
    assert [part.training for part in again.modules()] == [part.training for part in prepared.modules()]
    for _ in range(2):
        outputs = again(3 * x)
        assert torch.equal(outputs, prepared(3 * x))
        assert outputs.requires_grad
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in prepared.state_dict().items())
    assert torch.equal(convert(again)(x), convert(prepared)(x))
    with pytest.raises(MisconfigurationError, match="which is False here"):
        again.load_state_dict(prepare_qat(model, x, recipe=SEVEN).state_dict())


@pytest.mark.parametrize("name", ["extra", "out"])
def test_pickles_do_not_lose_what_was_put_into_a_model(trained: tuple[Normed, Tensor], name: str) -> None:
    prepared = prepare_qat(*trained, recipe=EIGHT)
    setattr(prepared, name, nn.Linear(*reversed(prepared.out.weight.shape)))
    with pytest.raises(QuantizeError, match=f"cannot be pickled: {name} was put into it"):
        pickle.dumps(prepared)


def test_pickles_are_captured_where_the_weights_are(
    trained: tuple[Normed, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example inputs stay where the model was prepared when it is moved."""
    pickled, devices = pickle.dumps(prepare_qat(*trained, recipe=EIGHT).to("meta")), []

    def capture(kind: str, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        devices.extend(tensor.device.type for tensor in (*model.parameters(), *example))
        raise ExportError("far enough: meta tensors have no values")

    monkeypatch.setattr(qat, "capture_as", capture)
    with pytest.raises(ExportError, match="far enough"):
        pickle.loads(pickled)
    assert set(devices) == {"meta"}


class Offset(Normed):
    """A network with a parameter of its own, beside those of its layers, and no noise."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((8, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x))) + self.offset
        return self.out(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))


class Quiet(Task):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.model = Offset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def train_quietly(rank: int, strategy: Any, batch: int, policy: bool = False) -> dict[str, Tensor]:
    if policy:  # chooses layers, which the graph does not call
        strategy = FSDPStrategy(auto_wrap_policy={nn.Conv2d})
    task = Quiet()
    callback = QuantizationAwareTraining(Int8(min_sqnr_db=-50), freeze_batch_norm_at=0)
    data = DataLoader(list(zip(*samples())), batch_size=batch)
    run(task, callback, 4, strategy, train_dataloaders=data)
    if strategy != "auto":
        assert all(isinstance(parameter, DTensor) for parameter in task.parameters())
        assert all(parameter.to_local().numel() < parameter.numel() for parameter in task.parameters())
    converted = convert(task.model)
    return whole_state(task.model) | {"logits": converted(samples()[0])}


@pytest.mark.parametrize("policy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shards_train_what_one_process_does(ranks: Ranks, policy: bool) -> None:
    alone = train_quietly(0, "auto", 8)
    first, second = ranks(train_quietly, "fsdp", 4, policy)
    moved = {
        name: value - Quiet().model.state_dict()[name]
        for name, value in alone.items()
        if name in Quiet().model.state_dict()
    }
    assert float(moved["offset"].abs().max()) > 1e-4
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, atol=2e-5, rtol=1e-4, msg=name)


def resume_on_rank(rank: int, folder: Path) -> list[str]:
    def trained(task: Task, steps: int, **options: Any) -> al.Trainer:
        callback = QuantizationAwareTraining(Int8(min_sqnr_db=-50), freeze_observers_at=5, freeze_batch_norm_at=6)
        return run(task, callback, steps, "fsdp", train_dataloaders=loader(), val_dataloaders=loader(), **options)

    al.seed_everything(6)
    whole = Task()
    trained(whole, 8)
    al.seed_everything(6)
    trained(Task(), 4).save_checkpoint(folder / "half.ckpt")
    resumed = Task()
    trained(resumed, 8, ckpt_path=folder / "half.ckpt")
    state = whole_state(whole.model)
    return [name for name, value in whole_state(resumed.model).items() if not torch.equal(value, state[name])]


@pytest.mark.slow
def test_shards_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(resume_on_rank, tmp_path) == [[], []]
    assert (tmp_path / "half.ckpt").is_dir()


def observe_on_rank(rank: int, odd: float) -> list[Any]:
    spec = pt2e.activation_spec(MovingRange)
    made = spec.observer_or_fake_quant_ctr.with_args(
        dtype=spec.dtype, qscheme=spec.qscheme, quant_min=spec.quant_min, quant_max=spec.quant_max
    )()
    made.synchronized = True
    made.train()(torch.tensor([-1.0, 1.0]))
    made(torch.tensor([odd if rank else -2.0, 2.0]))
    return [made.low.item(), made.high.item(), made.batches.item()]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_batch_that_is_not_finite_on_one_rank_counts_on_none(ranks: Ranks, odd: float) -> None:
    assert ranks(observe_on_rank, odd) == [[-1.0, 1.0, 1]] * 2


def choose_on_rank(rank: int) -> list[float]:
    spec = pt2e.activation_spec(LeastErrorMovingRange, bits=4)
    found = []
    for values in (peaked().chunk(2)[rank], peaked()):
        made = spec.observer_or_fake_quant_ctr.with_args(
            dtype=spec.dtype, qscheme=spec.qscheme, quant_min=spec.quant_min, quant_max=spec.quant_max
        )()
        made.synchronized = True
        made.train()(values)
        found += [made.low.item(), made.high.item()]
    return found


def peaked() -> Tensor:
    return torch.randn(8192, generator=torch.Generator().manual_seed(0)) ** 3


def test_ranges_of_least_error_are_those_of_all_ranks_together(ranks: Ranks) -> None:
    one, other = ranks(choose_on_rank)
    assert one == other
    assert one[:2] == pytest.approx(one[2:])


def refuse_on_rank(rank: int) -> list[str]:
    said = []
    for strategy in (ModelParallelStrategy(), FSDPStrategy(activation_checkpointing_policy={nn.Conv2d})):
        with pytest.raises(MisconfigurationError) as refused:
            run(Task(), QuantizationAwareTraining(), 1, strategy, train_dataloaders=loader())
        said.append(str(refused.value))
    return said


def test_strategies_that_cut_layers_are_refused(ranks: Ranks) -> None:
    for cut, recomputed in ranks(refuse_on_rank):
        assert "does not work with ModelParallelStrategy" in cut
        assert "does not work with activation_checkpointing_policy" in recomputed
