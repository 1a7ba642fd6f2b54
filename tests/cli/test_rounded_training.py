"""Runs that a table [qat] trains with rounding: what is exported is what was trained, and nothing else goes on from it."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import warm
from tests.exports import compare_here

from arclight.checkpoint import load as load_checkpoint
from arclight.deploy import Program, QuantizedModel, convert
from arclight.deploy.quantizing.linear import pack
from arclight.deploy.quantizing.rounded_linear import RoundedLinear
from arclight.deploy.quantizing.trained import trained_by

Typed = Callable[[str], tuple[int, str, str]]

MODEL = '''
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import arclight as al


def samples():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 4, 8, 8, generator=generator)
    return x, (x.mean((1, 2, 3)) * 20).long().clamp(-1, 1) + 1


class Images(al.DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples()), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*samples()), batch_size=8)


class Base(al.Module):
    def training_step(self, batch, batch_idx):
        if os.environ.get("KILLED_AT") == str(self.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class Convolutions(Base):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(288, 3),
        )

    def forward(self, images):
        return self.model(images)


class Softened(Convolutions):
    def forward(self, images):
        return self.model(images).softmax(1)


class Plain(Base):
    def __init__(self):
        super().__init__()
        self.net = Stack()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))


class Layers(Base):
    """Linear layers, of which one is used twice and one shares its weight with something else."""

    def __init__(self):
        super().__init__()
        self.model = Stack()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.tied, self.last = nn.Linear(256, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.table = nn.Embedding(64, 64)
        self.tied.weight = self.table.weight

    def forward(self, images):
        x = F.silu(self.first(images.flatten(1)))
        x = self.again(F.silu(self.again(x))) + self.table.weight.mean(0)
        return self.last(F.silu(self.tied(x)))


class Late(Layers):
    def __init__(self):
        super(Layers, self).__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = Stack()
'''
FEW = (
    "--trainer.accelerator cpu --trainer.enable_progress_bar false --trainer.max_epochs 2 --checkpoint.every_n_steps 1"
)
INT8 = "--qat.kind int8 --qat.freeze_observers_at 5 --qat.freeze_batch_norm_at 6 --qat.min_sqnr_db -50"
W4 = "--qat.kind weightonly --qat.bits 4 --qat.min_sqnr_db -50"


@pytest.fixture
def own(folder: Path) -> Iterator[Path]:
    """A folder with modules of one's own."""
    (folder / "rounded_own.py").write_text(textwrap.dedent(MODEL))
    yield folder
    sys.modules.pop("rounded_own", None)


def train(model: str, *flags: str) -> str:
    return f"train rounded_own:{model} --data rounded_own:Images {FEW} {' '.join(flags)}"


def last(run: str) -> Path:
    return Path(run) / "checkpoints" / "last.ckpt"


def opened(model: str, checkpoint: Path) -> Any:
    import rounded_own

    return getattr(rounded_own, model).load_from_checkpoint(checkpoint, replaced_by=trained_by(checkpoint)).eval()


def test_the_program_is_the_trained_one(own: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=2)
    assert typed(train("Convolutions", INT8))[::2] == (0, "")
    for verb in ("export", "quantize"):
        status, out, err = typed(f"{verb} runs/convolutions/1 --out {verb}.onnx")
        assert (status, "int8, trained with rounding" in out) == (0, True), out + err
    import rounded_own

    images, _ = rounded_own.samples()
    module = opened("Convolutions", last("runs/convolutions/1"))
    converted = convert(module.model, example_inputs=images)
    for verb in ("export", "quantize"):
        program = Program.load(own / f"{verb}.onnx")
        report = program.metadata["quantization"]
        assert (program.precision, report["trained"], report["calibration_batches"]) == ("int8", True, 0)
        assert sum(report["integer_kernels"].values()) == 3
        with torch.no_grad():
            equal = (program(images) - converted(images)).abs() <= 1e-5
            assert equal.double().mean() > 0.9, "all but ties, which processors' kernels round differently"
            assert (program(images) - module.model.float_model(images)).abs().max() > 1e-4  # it is rounded


def test_programs_of_other_training_are_refused(own: Path, typed: Typed) -> None:
    assert typed(train("Convolutions", INT8))[0] == 0
    for words, said in {
        "quantize {} --out a.onnx --recipe weightonly": "was trained with rounding for int8, and --recipe weightonly would",
        "quantize {} --out a.onnx --observer minmax": "was trained with rounding for int8, and --recipe.observer=minmax would",
        "quantize {} --out a --format openvino": "trained with rounding for onnxruntime, which does not run format 'openvino'",
        "export {} --out a --format pt2 --sign key.pem": "trained with rounding for onnxruntime, which does not run format 'pt2'",
        "quantize {} --out a.onnx --max-drop 0.1": "max_drop bounds a metric, and the module has none",
    }.items():
        status, _, err = typed(words.format("runs/convolutions/1"))
        assert (status, said in err) == (2, True), err
    assert not Path("a.onnx").exists()
    assert not Path("a").exists()


def test_a_forward_that_computes_more_is_not_cut_off(own: Path, typed: Typed) -> None:
    assert typed(train("Softened", INT8))[0] == 0
    status, _, err = typed("export runs/softened/1 --out a.onnx")
    assert (status, "Softened.forward computes more than the part of it that was trained" in err) == (2, True), err


def test_the_part_that_was_trained_is_shipped_where_nothing_else_is_named(
    own: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    compare_here(monkeypatch, rounds=2)
    assert typed(train("Plain", W4, "--qat.attribute net"))[0] == 0
    status, out, err = typed("export runs/plain/1 --out a.onnx")
    assert (status, "trained with rounding" in out) == (0, True), out + err
    assert Program.load("a.onnx").metadata["quantization"]["quantized_layers"] == 3


@pytest.mark.parametrize(
    "flags",
    [
        "--config runs/convolutions/1/config.toml --ckpt_path runs/convolutions/1",
        "--data rounded_own:Images --ckpt_path last",
    ],
)
def test_validation_is_of_what_is_exported(own: Path, typed: Typed, flags: str) -> None:
    assert typed(train("Convolutions", INT8))[0] == 0
    assert typed(f"validate rounded_own:Convolutions {flags} --json v.json")[0] == 0
    import rounded_own

    images, labels = rounded_own.samples()
    converted = convert(opened("Convolutions", last("runs/convolutions/1")).model, example_inputs=images)
    wanted = float(torch.nn.functional.cross_entropy(converted(images), labels))
    assert json.loads(Path("v.json").read_text())[0]["val/loss"] == pytest.approx(wanted, rel=1e-5)


def state(run: str) -> dict[str, Any]:
    """Return all that a resume restores: weights, ranges, moments, random states."""
    return load_checkpoint(last(run), only=["model", "optimizers", "rng", "callbacks"])


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: value for key, part in items for name, value in flat(part, f"{path}/{key}").items()}
    return {path: tree}


@pytest.mark.parametrize(("model", "flags"), [("Convolutions", INT8), ("Layers", W4)])
def test_a_killed_run_resumes_with_the_same_bits(own: Path, model: str, flags: str) -> None:
    words = train(model, flags).split()
    warm.run("-m", "arclight.cli", *words, "--name", "whole", cwd=own, timeout=300, check=True)
    killed = warm.run(
        "-m", "arclight.cli", *words, "--name", "killed", cwd=own, timeout=300, env={**os.environ, "KILLED_AT": "5"}
    )
    assert killed.returncode == -signal.SIGKILL
    saved = flat(load_checkpoint(last("runs/killed/1"), only=["model"]))
    again = [*words, "--name", "killed", "--ckpt_path", "runs/killed/1"]
    warm.run("-m", "arclight.cli", *again, cwd=own, timeout=300, check=True)
    whole, resumed = flat(state("runs/whole/1")), flat(state("runs/killed/1"))
    compared = [name for name in whole if not name.startswith("/callbacks/ModelCheckpoint")]
    assert any(
        name.endswith("fake_quantize/input_input/high") or "fake_quantize.input" in name for name in compared
    ) == (flags == INT8)
    for name in compared:
        assert np.array_equal(whole[name], resumed[name]), name
    assert any(not torch.equal(value, whole[name]) for name, value in saved.items())  # it was not at its end


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            f"{INT8} --qat.freeze_observers_at 8",
            "freeze_observers_at = 8 is never reached: the run has 8 steps, from 0 to 7",
        ),
        (f"{INT8} --qat.freeze_batch_norm_at 99", "freeze_batch_norm_at = 99 is never reached"),
        (f"{INT8} --qat.attribute network", "Convolutions has no submodule 'network'"),
        (f"{INT8} --qat.skip 9", "skip names '9', but the model computes nothing in a module of that name"),
        (f"{INT8} --qat.target tensorflow", "need onnxruntime | openvino | inductor | executorch | tensorrt"),
        (f"{INT8} --plan.dp_shard 2", "a [plan] gathers blocks one by one, and [qat] kind = 'int8' trains one graph"),
        (
            f"{W4} --plan.tp 2",
            "[plan] tp = 2 cuts matrices, whose outputs and groups share a scale, and [qat] rounds whole layers",
        ),
        ("--qat.kind int4", "int4: take weightonly with bits = 4"),
        ("--qat.kind bfloat16", "bfloat16 needs no training with rounding"),
        ("--qat.kind int9", "need a kind, got 'int9'; did you mean int8?"),
        ("--qat.kind int8 --qat.observer minmax", "qat.observer is not a field of Int8Training"),
        ("--qat.kind weightonly --qat.bits 3", "bits must be 8 or 4"),
        (
            "--qat.kind weightonly --qat.group_size 64",
            "group_size=64 does not divide the inputs of 7 (288): take group_size=32",
        ),
        ("--qat.kind weightonly --qat.skip 7", "WeightOnly is for linear layers, and Sequential has none"),
        ("--qat.kind lowbit --qat.freeze_observers_at 3", "freeze_observers_at is of ranges that stay"),
    ],
)
def test_impossible_training_is_refused_before_the_first_step(own: Path, typed: Typed, flags: str, said: str) -> None:
    status, _, err = typed(train("Convolutions", flags))
    assert (status, said in err.replace('"int4"', "int4").replace("'int4'; ", "int4: ")) == (2, True), err
    assert not list(own.glob("runs/*/*/checkpoints/*"))


@pytest.mark.parametrize("flags", [INT8, W4])
def test_strategies_that_cut_layers_are_refused(own: Path, flags: str) -> None:
    words = train("Convolutions" if flags == INT8 else "Layers", flags, "--trainer.strategy model_parallel").split()
    done = warm.run("-m", "arclight.cli", *words, cwd=own, timeout=300)
    said = "QuantizationAwareTraining does not work with ModelParallelStrategy"
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("begun", "resumed", "said"),
    [
        (INT8, "", "the checkpoint was trained with model rounded to int8, and this run would compute in float"),
        (W4, "", "the checkpoint was trained with model rounded to weightonly, and this run would compute in float"),
        (W4, f"{W4} --qat.group_size 16", "the run was trained with another rounding: group_size = 32, here 16"),
        (W4, W4.replace("weightonly", "lowbit").replace("--qat.bits 4", ""), "kind = weightonly, here lowbit"),
        (INT8, f"{INT8} --qat.freeze_observers_at 4", "freeze_observers_at = 5, here 4"),
        ("", INT8, "the checkpoint was trained in float, and this run rounds model to int8"),
        ("", W4, "the checkpoint was trained in float, and this run rounds model to weightonly"),
    ],
)  # fmt: skip
def test_a_run_goes_on_as_it_was_begun(own: Path, typed: Typed, begun: str, resumed: str, said: str) -> None:
    model = "Convolutions" if INT8 in (begun, resumed) else "Layers"
    assert typed(train(model, begun))[0] == 0
    kept = last(f"runs/{model.lower()}/1").stat().st_mtime_ns
    status, _, err = typed(train(model, resumed, f"--trainer.max_epochs 3 --ckpt_path runs/{model.lower()}/1"))
    assert (status, said in err) == (2, True), err
    assert last(f"runs/{model.lower()}/1").stat().st_mtime_ns == kept


# -- linear layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["Layers", "Late"])
@pytest.mark.parametrize(
    "flags",
    [
        W4,
        W4.replace("4", "8"),
        "--qat.kind lowbit --qat.min_sqnr_db -50",
        "--qat.kind dynamicint8",
    ],
)
def test_linear_layers_train_the_integers_of_the_program(
    own: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch, model: str, flags: str
) -> None:
    import onnx

    compare_here(monkeypatch, rounds=2)
    assert typed(train(model, flags))[::2] == (0, "")
    run = f"runs/{model.lower()}/1"
    status, out, err = typed(f"export {run} --out trained.onnx")
    assert (status, "trained with rounding" in out) == (0, True), out + err
    import rounded_own

    module, (images, _) = opened(model, last(run)), rounded_own.samples()
    layers = {name: layer for name, layer in module.model.named_modules() if isinstance(layer, RoundedLinear)}
    assert list(layers) == ["first", "again", "last"]  # that which is tied stays in float
    quantized = convert(module.model, example_inputs=images[:4])
    assert isinstance(quantized, QuantizedModel)
    assert quantized.trained
    assert quantized.float_layers == ("tied",)
    program = Program.load(own / "trained.onnx")
    report = program.metadata["quantization"]
    assert (report["trained"], report["quantized_layers"], report["float_layers"]) == (True, 3, ["tied"])
    with torch.no_grad():
        evaluated = module.model(images[:4])
        assert torch.equal(evaluated, quantized(images[:4]))  # what was validated is what is shipped
        torch.testing.assert_close(program(images[:4]), evaluated, rtol=1e-4, atol=2e-2 if "dynamic" in flags else 1e-4)
    module.train()
    trained = module.model(images[:4])  # with gradients: as float products of what was rounded
    torch.testing.assert_close(trained, evaluated, rtol=1e-4, atol=1e-4)
    trained.sum().backward()
    assert all(bool(layer.weight.grad.any()) for layer in layers.values())
    if "weightonly" in flags:  # bit for bit
        bits = 4 if flags == W4 else 8
        stored = [onnx.numpy_helper.to_array(one) for one in onnx.load(own / "trained.onnx").graph.initializer]
        for layer in layers.values():
            integers, scales = (part.numpy() for part in pack(layer.weight.detach(), bits, 32))
            assert any(one.dtype == np.uint8 and np.array_equal(one.ravel(), integers.ravel()) for one in stored)
            assert any(one.dtype == np.float32 and np.array_equal(one.ravel(), scales.ravel()) for one in stored)


# -- tasks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_detector(folder: Path) -> str:
    """A recipe of a detector, on small photos."""
    pytest.importorskip("cv2")
    from tests.vision.conftest import RECIPE, SMALL, write_dataset

    write_dataset(folder / "set", 4, "val")
    yaml = write_dataset(folder / "set", 8)
    (folder / "small.yaml").write_text(SMALL)
    (folder / "tiny.toml").write_text(RECIPE.format(data=yaml, model=folder / "small.yaml"))
    return "train tiny.toml --qat.kind int8 --qat.min_sqnr_db -50 --trainer.max_epochs 2 --checkpoint.every_n_steps 1"


@pytest.mark.slow
def test_a_detector_is_trained_scored_and_shipped(
    tiny_detector: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch, rounds=2)
    assert typed(f"{tiny_detector} --ema.decay 0.5 --qat.target openvino --qat.freeze_observers_at 3")[::2] == (0, "")
    status, out, err = typed("validate runs/tiny/1 --json v.json")
    assert (status, err) == (0, ""), out
    rows = [line.split(",") for line in Path("runs/tiny/1/metrics.csv").read_text().splitlines()]
    logged = [row[rows[0].index("val/map50")] for row in rows[1:]]
    assert json.loads(Path("v.json").read_text())[0]["val/map50"] == pytest.approx(
        float([one for one in logged if one][-1])
    )
    assert typed("quantize runs/tiny/1 --out int8 --max-drop 1")[0] == 0
    program = Program.load("int8")
    report = program.metadata["quantization"]
    assert (program.format, report["target"], report["trained"]) == ("openvino", "openvino", True)
    assert (report["metric"]["max_drop"], program.metadata["names"]) == (1, ["code", "text"])
    status, _, err = typed("quantize runs/tiny/1 --out int8.onnx --format pt2")
    assert status == 2
    photo = np.zeros((80, 60, 3), np.uint8)
    assert len(program.predict([photo])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["rect", "rect_train", "multi_scale"])
def test_images_of_several_sizes_are_refused(tiny_detector: str, typed: Typed, flag: str) -> None:
    value = "0.5" if flag == "multi_scale" else "true"
    status, _, err = typed(f"{tiny_detector} --task.{flag} {value}")
    assert (status, f"task.{flag} = " in err, "gives images of several sizes" in err) == (2, True, True), err


@pytest.mark.slow
def test_a_language_model_is_trained_and_shipped(folder: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=2)
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / f"texts/{number}.txt").write_text(f"source tells story {number}. " * 40)
    (folder / "lm.toml").write_text(
        'name = "lm"\n[task]\nkind = "language"\nmodel = "llama3-debug"\n'
        "overrides = {layers = 1, dim = 64, heads = 2, kv_heads = 1, hidden = 96}\n"
        '[task.data]\ndata = "texts"\ntokenizer = "bytes"\nsequence_length = 64\nbatch_size = 4\n'
        "[task.sampling]\nnew_tokens = 4\n"
        '[trainer]\nmax_steps = 4\nlimit_val_batches = 2\naccelerator = "cpu"\nenable_progress_bar = false\n'
    )
    status, _, err = typed("train lm.toml --qat.kind int8")
    assert (status, "the program of a language model keeps a cache" in err) == (2, True), err
    assert typed(f"train lm.toml {W4}")[0] == 0
    status, out, err = typed("export runs/lm/1 --out w4.onnx")
    assert (status, "4-bit weights, trained with rounding" in out) == (0, True), out + err
    report = Program.load("w4.onnx").metadata["quantization"]
    assert (report["trained"], report["bits"], report["quantized_layers"]) == (True, 4, 8)  # the last one, too
    status, out, err = typed("export runs/lm/1 --out folder")
    assert (status, "trained with rounding" in out) == (0, True), out + err

    from arclight.cli.runs import load_language_model

    module = load_language_model(Path("runs/lm/1")).train()
    tokens = torch.arange(32).reshape(2, 16)
    hidden = module.model(tokens, logits=False)
    total, count = module.loss(hidden, tokens)
    logits = module.model(tokens)  # whose last layer is called
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    total.backward()
    assert module.model.output.weight.grad.any()
    assert int(count) == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags"), [("Convolutions", INT8.replace("6", "3").replace("5", "2")), ("Layers", W4)]
)
def test_ranks_train_one_program(own: Path, typed: Typed, model: str, flags: str) -> None:
    words = train(model, flags, "--trainer.devices 2 --trainer.strategy ddp --checkpoint.save_top_k 1").split()
    warm.run("-m", "arclight.cli", *words, cwd=own, timeout=300, check=True)
    run = f"runs/{model.lower()}/1"
    assert typed(f"export {run} --out a.onnx")[0] == 0
    assert Program.load("a.onnx").metadata["quantization"]["trained"]
    assert state(run)["callbacks"]["QuantizationAwareTraining"]["recipe"]["kind"] in flags
