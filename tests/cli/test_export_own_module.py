"""Any Module ships from the shell: by its hook, by its forward, or by its network and training batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arclight.cli.runs import best_checkpoint
from arclight.deploy import Program
from arclight.fabric.signing import SigningKey

Typed = Callable[[str], tuple[int, str, str]]

SOURCE = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.deploy.deployment import Deployment


class Net(al.Module):
    """A network that says nothing of its deployment."""

    def __init__(self, hidden: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Points(al.DataModule):
    def __init__(self, batch_size: int = 16, flat: bool = False):
        super().__init__()
        self.batch_size, self.flat = batch_size, flat

    def setup(self, stage):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        self.samples = TensorDataset(x * (not self.flat), (x.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.samples, self.batch_size)

    val_dataloader = train_dataloader


class Double:
    """Processing of one's own, around numbers."""

    def preprocess(self, inputs):
        return torch.tensor(inputs).float()[:, None].expand(-1, 8, 1)[..., 0].long() % 11, None

    def postprocess(self, outputs, context):
        return [row.argmax(-1).tolist() for row in outputs]


class Tagger(al.Module):
    """Reads sequences of any length, and says what it ships."""

    def __init__(self, width: int = 16, score: float = 1.0):
        super().__init__()
        self.embed, self.head, self.score = nn.Embedding(11, width), nn.Linear(width, 5), score

    def forward(self, tokens):
        return self.head(self.embed(tokens).cumsum(1))

    def configure_deployment(self, data, batches):
        tokens = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(1))
        return Deployment(
            model=self, example_inputs=tokens, dynamic={"tokens": {0: "batch", 1: "time"}}, processing=Double(), metadata={"task": "tags"},
            metric=lambda model: self.score if isinstance(model, nn.Module) and not hasattr(model, "recipe") else 0.5,
        )


class Silent(al.Module):
    """No network, no forward."""


class Unnamed(Net):
    """Batches that do not fit the network."""

    def __init__(self):
        super().__init__()
        self.model = nn.Bilinear(16, 16, 2)
'''


@pytest.fixture
def own(folder: Path) -> Iterator[Path]:
    (folder / "own_net.py").write_text(SOURCE)
    yield folder
    sys.modules.pop("own_net", None)


@pytest.fixture
def trained(own: Path, typed: Typed) -> Any:
    """The network of a run of two epochs in runs/net/1."""
    quick = "--trainer.max_epochs 2 --trainer.accelerator cpu --trainer.enable_progress_bar false"
    status, _, err = typed(f"train own_net:Net --data own_net:Points --model.hidden 48 {quick}")
    assert status == 0, err
    return sys.modules["own_net"].Net.load_from_checkpoint(best_checkpoint(Path("runs/net/1")))


def test_a_trained_network_is_exported_from_its_run(trained: Any, typed: Typed) -> None:
    status, out, err = typed("export runs/net/1 --out net.onnx")
    assert status == 0, err
    assert "wrote net.onnx: fp32" in out
    x = torch.randn(5, 16)
    torch.testing.assert_close(Program.load("net.onnx")(x), trained.model(x).detach())


def test_exports_take_the_checkpoints_that_validation_takes(own: Path, typed: Typed) -> None:
    flags = "--checkpoint.monitor val/loss --checkpoint.mode max --checkpoint.save_last true"
    quick = "--trainer.max_epochs 3 --trainer.accelerator cpu --trainer.enable_progress_bar false"
    status, _, err = typed(f"train own_net:Net --data own_net:Points {flags} {quick}")
    assert status == 0, err
    named, x = "own_net:Net --config runs/net/1/config.toml --ckpt_path", torch.randn(5, 16)
    notes = {}
    for place, kept in (("last", "last.ckpt"), ("runs/net/1", best_checkpoint(Path("runs/net/1")).name)):
        status, out, err = typed(f"export {named} {place} --out net.onnx")
        assert status == 0, err
        notes[place] = out.splitlines()[0]
        assert notes[place].startswith(f"checkpoint runs/net/1/checkpoints/{kept}"), out
        wanted = sys.modules["own_net"].Net.load_from_checkpoint(f"runs/net/1/checkpoints/{kept}").model(x).detach()
        torch.testing.assert_close(Program.load("net.onnx")(x), wanted)
        assert typed(f"validate {named} {place} --json {kept}.json")[0] == 0
    assert notes["last"].endswith(", the newest")
    assert notes["runs/net/1"].endswith(", the best by val/loss")  # that of the first epoch
    assert Path("last.ckpt.json").read_text() != Path(f"{kept}.json").read_text()


@pytest.mark.slow
def test_a_trained_network_is_quantized_and_its_checkpoints_are_named(trained: Any, typed: Typed) -> None:
    x = torch.randn(5, 16)
    status, out, err = typed("quantize runs/net/1 --out int8 --format onnx --calibration-batches 2 --sign k.pem")
    assert status == 0, err
    assert "made k.pem, a private key that stays with you" in out
    key = SigningKey.read("k.pem")
    assert f"it is loaded with --trust {key.public}" in out
    program = Program.load("int8", trusted=key.public)
    assert (program.precision, program.metadata["quantization"]["calibration_batches"]) == ("int8", 2)

    for named in ("last", "runs/net/1", str(best_checkpoint(Path("runs/net/1")))):
        status, out, err = typed(
            f"export own_net:Net --config runs/net/1/config.toml --ckpt_path {named} --out again --format openvino --batch-size 2"
        )
        assert status == 0, err
        again = Program.load("again")
        assert again.inputs[0].shape == (2, 16)
        torch.testing.assert_close(again(x[:2]), trained.model(x[:2]).detach())


def test_several_formats_are_named_with_commas(own: Path, typed: Typed) -> None:
    status, out, err = typed("export own_net:Tagger --out tags --format onnx,openvino")
    assert status == 0, err
    for form in ("onnx", "openvino"):
        assert f"wrote tags/{form}: fp32" in out
        assert Program.load(f"tags/{form}").format == form


def test_a_folder_without_a_format_is_of_openvino_and_the_fastest_is_measured(own: Path, typed: Typed) -> None:
    status, out, err = typed("export own_net:Tagger --out tags")
    assert status == 0, err
    assert Program.load("tags").format == "openvino"
    status, out, err = typed("export own_net:Tagger --out fast --format fastest --candidates onnx,openvino")
    assert status == 0, err
    program = Program.load("fast")
    times = program.metadata["fastest"]["wall_ms"]
    assert set(times) == {"onnx", "openvino"}
    assert (
        f"kept {program.format}, the fastest here on one thread: {program.format} {min(times.values()):.2f} ms" in out
    )


@pytest.mark.slow
def test_int8_without_a_format_is_placed_for_openvino(trained: Any, typed: Typed) -> None:
    status, _, err = typed("quantize runs/net/1 --out int8 --calibration-batches 2")
    assert status == 0, err
    program = Program.load("int8")
    assert (program.format, program.metadata["quantization"]["target"]) == ("openvino", "openvino")
    status, _, err = typed("quantize runs/net/1 --out best --format fastest --calibration-batches 2")
    assert status == 0, err
    best = Program.load("best")
    assert set(best.metadata["fastest"]["wall_ms"]) == {"onnx", "openvino"}
    assert best.metadata["quantization"]["target"] == {"onnx": "onnxruntime", "openvino": "openvino"}[best.format]


@pytest.mark.slow
def test_a_module_declares_its_deployment(own: Path, typed: Typed) -> None:
    status, out, err = typed("export own_net:Tagger --out tags --format onnx")
    assert status == 0, err
    assert "names no weights: Tagger is taken as its constructor makes it" in out
    program = Program.load("tags")
    assert program.inputs[0].shape == ("batch", "time")
    assert program.metadata["task"] == "tags"
    assert program.metadata["parity"]["sizes"] == {
        "example": {"batch": 3, "time": 8}, "batch 1, time 1": {"batch": 1, "time": 1}, "batch 2, time 7": {"batch": 2, "time": 7},
    }  # fmt: skip
    assert program(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 5)

    words = "--recipe weightonly --recipe.group_size 16 --max-drop"
    status, out, err = typed(f"quantize own_net:Tagger --out w8.onnx {words} 0.6")
    assert status == 0, err
    assert Program.load("w8.onnx").metadata["quantization"]["metric"]["float"] == 1.0
    status, _, err = typed(f"quantize own_net:Tagger --out no.onnx {words} 0.1")
    assert (status, Path("no.onnx").exists()) == (2, False)
    assert "it drops by more than max_drop=0.1" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("export own_net:Silent --out p.onnx", "Silent has neither forward nor a network called model"),
        ("export own_net:Net --out p.onnx", "Net does not say what it takes: set example_input_array, name its data, or define"),
        ("export own_net:Unnamed --data own_net:Points --out p.onnx", "the model cannot be run on the example inputs (float32"),
        ("export own_net:Net --out p.onnx --model.hiden 3", "--model.hiden"),
        ("export own_net:Net --out p --format pt2", "pt2 programs are loaded only if somebody who is trusted signed them"),
        ("quantize own_net:Net --out p --format executorch --recipe lowbit", "there is no w4a8 program of format executorch"),
        ("export own_net:Net --out p --format tensorrt", "format 'tensorrt' is not written: nothing here runs tensorrt programs, whatever is installed"),
        ("export own_net:Net --out p --format coreml", "convert format 'pt2' with coremltools"),
        ("export own_net:Net --out p --format litert", "convert format 'pt2' with litert-torch"),
        ("export own_net:Net --out p --format hf", "--format hf is for runs of language models"),
        ("export own_net:Net --out p --format onnx,hf", "onnx,hf lists hf, which cannot be combined with other formats"),
        ("export own_net:Net --out p --format onnx,caffe", "'caffe' is not known"),
        ("export own_net:Net --out p --format onnx --candidates onnx", "candidates are of format='fastest'"),
        ("export own_net:Net --out p.onnx --format fastest", "--format writes a folder; call it p"),
        ("quantize own_net:Net --out p --format pt2 --sign k", "so there is no int8 pt2"),
        ("quantize own_net:Net --out p --format openvino --recipe lowbit", "there is no w4a8 program of format openvino"),
        ("quantize own_net:Net --data own_net:Points --out p.onnx --max-drop 1", "max_drop bounds a metric, and the module has none"),
        ("quantize own_net:Net --data own_net:Points --data.flat true --out p.onnx", "calibration"),
        ("export own_net:Net --data own_net:Points --out p.onnx --batch-size 0", "a batch has at least one sample"),
        ("export own_net:Tagger --out p.onnx --batch-size 2", "would fix what the module frees"),
        ("export own_net:Net --data own_net:Points --out p.onnx --sign k", "only a folder is signed"),
        ("export own_net:Net --out p.onnx --ckpt_path last", "--ckpt_path last: there is no run in runs/net"),
        ("export own_net:Net --out p.onnx --ckpt_path nowhere", "nowhere"),
    ],
)  # fmt: skip
def test_failed_exports_print_one_line_and_leave_no_files(own: Path, typed: Typed, words: str, told: str) -> None:
    status, _, err = typed(words)
    assert (status, err.count("\n")) == (2, 1), err
    assert told in err
    assert sorted(path.name for path in own.iterdir() if path.name.startswith(("p", "k"))) == []
