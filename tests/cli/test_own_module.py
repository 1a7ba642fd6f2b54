"""A person's own module and data on the command line: every argument of their constructors is a flag."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests import warm

Typed = Callable[[str], tuple[int, str, str]]

SOURCE = '''
from enum import Enum
from typing import Literal, Optional

import torch
from torch.utils.data import DataLoader, TensorDataset

import arclight as al


class Act(Enum):
    RELU = "relu"
    TANH = "tanh"


class Line(al.Module):
    """A line fitted to points.

    Args:
        hidden: units of the hidden layer
        lr (float): learning rate
    """

    def __init__(
        self, hidden: int, lr: float = 0.1, mode: Literal["fast", "slow"] = "fast", sizes: list[int] = [1, 2],
        limit: int | str | None = None, bias: bool = True, tag: Optional[str] = None, extra=(1, 2), steps: int | str = "all",
        act: Act = Act.RELU, shape: tuple[int, float] = (1, 0.5), make=torch.nn.Linear,
    ):
        super().__init__()
        if hidden < 1:
            raise ValueError("hidden must be positive")
        self.save_hyperparameters(ignore="make")
        self.layer = torch.nn.Sequential(make(1, hidden, bias), make(hidden, 1))

    def loss(self, batch):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


class Points(al.DataModule):
    def __init__(self, batch_size: int = 4, slope: float = 2.0):
        super().__init__()
        self.batch_size, self.slope = batch_size, slope

    def train_dataloader(self):
        x = torch.arange(8.0)[:, None] / 8
        return DataLoader(TensorDataset(x, self.slope * x), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Nothing(al.DataModule):
    pass


class Plain:
    pass
'''
QUICK = (
    "--trainer.max_epochs 2 --trainer.accelerator cpu --trainer.enable_progress_bar false --trainer.log_every_n_steps 1"
)
NAMED = "own_line:Line --data own_line:Points"


@pytest.fixture
def own(folder: Path) -> Iterator[Path]:
    (folder / "own_line.py").write_text(SOURCE)
    yield folder
    sys.modules.pop("own_line", None)


def printed(typed: Typed, line: str) -> dict[str, dict[str, object]]:
    status, out, err = typed(f"train {line} --print_config")
    assert (status, err) == (0, "")
    return tomllib.loads(out)


def test_a_run_and_its_checkpoint_in_processes_of_their_own(own: Path) -> None:
    def arclight(line: str) -> str:
        done = warm.run("-m", "arclight.cli", *line.split(), timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = arclight(f"train {NAMED} --model.hidden 3 --data.batch_size 2 --seed 7 {QUICK}")
    assert "The run is in runs/line/1" in out
    config = tomllib.loads(Path("runs/line/1/config.toml").read_text())
    assert (config["seed"], config["model"]["hidden"], config["data"]["batch_size"]) == (7, 3, 2)
    arclight("validate own_line:Line --config runs/line/1/config.toml --ckpt_path last --json values.json")
    (values,) = json.loads(Path("values.json").read_text())

    from arclight.checkpoint import load

    weights = load(Path("runs/line/1/checkpoints/last.ckpt"))["model"]
    x = torch.arange(8.0)[:, None] / 8
    hidden = x @ weights["layer.0.weight"].T + weights["layer.0.bias"]
    y = hidden @ weights["layer.1.weight"].T + weights["layer.1.bias"]
    assert values["val/loss"] == pytest.approx((y - 2 * x).square().mean().item(), rel=1e-5)


def test_a_run_is_repeated_and_gone_on_with(own: Path, typed: Typed) -> None:
    from arclight.checkpoint import load

    def weights(run: str) -> torch.Tensor:
        saved = load(Path(run) / "checkpoints/last.ckpt")["model"]
        return torch.cat([saved[name].flatten() for name in sorted(saved)])

    assert typed(f"train {NAMED} --model.hidden 3 --model.act tanh {QUICK}")[0] == 0
    assert typed("train own_line:Line --config runs/line/1/config.toml")[0] == 0
    assert torch.equal(weights("runs/line/1"), weights("runs/line/2"))
    longer = "own_line:Line --config runs/line/1/config.toml --trainer.max_epochs 4"
    assert typed(f"train {longer} --name whole")[0] == 0
    assert typed(f"train {longer} --ckpt_path last")[0] == 0
    assert typed(f"train {longer} --ckpt_path runs/line/1")[0] == 0
    assert sorted(path.name for path in Path("runs/line").iterdir()) == ["1", "2"]
    for run in ("runs/line/1", "runs/line/2"):
        assert torch.equal(weights(run), weights("runs/whole/1"))

    status, out, _ = typed("test own_line:Line --config runs/line/1/config.toml --ckpt_path runs/line/1")
    assert status == 0
    assert "test/loss" in out
    assert typed("predict own_line:Line --config runs/line/1/config.toml --ckpt_path last --out p.pt")[0] == 0
    batches = torch.load("p.pt", weights_only=True)
    assert [tuple(batch.shape) for batch in batches] == [(4, 1), (4, 1)]


def test_a_run_folder_is_evaluated_by_its_best_checkpoint(own: Path, typed: Typed) -> None:
    highest = (
        "--checkpoint.monitor val/loss --checkpoint.mode max --checkpoint.save_last true"  # that of the first epoch
    )
    assert typed(f"train {NAMED} --model.hidden 3 {highest} {QUICK}")[0] == 0
    again = "own_line:Line --config runs/line/1/config.toml"

    def value(place: str) -> float:
        assert typed(f"validate {again} --ckpt_path {place} --json v.json")[0] == 0
        return float(json.loads(Path("v.json").read_text())[0]["val/loss"])

    def predicted(place: str) -> torch.Tensor:
        assert typed(f"predict {again} --ckpt_path {place} --out p.pt")[0] == 0
        return torch.cat(torch.load("p.pt", weights_only=True))

    (best,) = [path for path in Path("runs/line/1/checkpoints").iterdir() if path.name != "last.ckpt"]
    assert value("last") == value("runs/line/1/checkpoints/last.ckpt") < value(str(best)) == value("runs/line/1")
    assert torch.equal(predicted("runs/line/1"), predicted(str(best)))
    assert not torch.equal(predicted("runs/line/1"), predicted("last"))
    assert typed(f"train {NAMED} --model.hidden 3 --name team/line {QUICK}")[0] == 0
    assert typed("validate own_line:Line --config runs/team/line/1/config.toml --ckpt_path last")[0] == 0
    Path("runs/line/2/checkpoints").mkdir(parents=True)
    for verb in ("train", "test"):  # never an older run in place of the newest
        status, _, err = typed(f"{verb} {again} --ckpt_path last")
        assert (status, "runs/line/2" in err) == (2, True), err


@pytest.mark.parametrize(
    "flag, name, value",
    [
        ("--model.lr 1", "lr", 1.0),
        ("--model.lr=3e-4", "lr", 3e-4),
        ("--model.mode slow", "mode", "slow"),
        ("--model.sizes 3,4", "sizes", [3, 4]),
        ("--model.sizes [5]", "sizes", [5]),
        ("--model.limit 5", "limit", 5),
        ("--model.limit five", "limit", "five"),
        ("--model.limit none", "limit", "none"),
        ("--model.limit=7", "limit", 7),
        ("--model.steps -1", "steps", -1),
        ("--model.tag 5", "tag", "5"),
        ("--model.bias false", "bias", False),
        ("--model.extra true", "extra", True),
        ("--model.extra {a=1}", "extra", {"a": 1}),
        ("--model.act tanh", "act", "tanh"),
        ("--model.shape 2,3", "shape", [2, 3.0]),
    ],
)
def test_flags_are_converted_to_the_type_of_the_argument(
    own: Path, typed: Typed, flag: str, name: str, value: object
) -> None:
    said = printed(typed, f"own_line:Line --model.hidden 2 {flag}")["model"][name]
    assert said == value
    assert type(said) is type(value)


def test_printed_config_round_trips(own: Path, typed: Typed) -> None:
    flags = "--model.hidden 2 --model.limit 5 --model.act tanh --data.slope 3 --trainer.val_check_interval 2 --seed 4"
    line = f"train {NAMED} {flags} --print_config"
    _, out, _ = typed(line)
    Path("a.toml").write_text(out)
    assert typed("train own_line:Line --config a.toml --print_config") == (0, out, "")
    config = tomllib.loads(out)
    assert config["trainer"]["val_check_interval"] == 2
    assert config["model"] == {
        "kind": "own_line:Line", "hidden": 2, "lr": 0.1, "mode": "fast", "sizes": [1, 2], "limit": 5, "bias": True,
        "tag": "none", "steps": "all", "act": "tanh", "shape": [1, 0.5],
    }  # fmt: skip
    assert not Path("runs").exists()


def test_files_are_laid_over_each_other_and_flags_over_them(own: Path, typed: Typed) -> None:
    Path("a.toml").write_text('[model]\nhidden = 1\nlr = 1.0\nsteps = 4\n[data]\nkind = "own_line:Points"\nslope = 5.0')
    Path("b.toml").write_text("seed = 9\n[model]\nlr = 2.0\nsteps = 5\n[data]\nbatch_size = 2")
    config = printed(typed, "own_line:Line --config a.toml --config b.toml --model.steps 6")
    assert config["seed"] == 9
    assert [config["model"][name] for name in ("hidden", "lr", "steps")] == [1, 2.0, 6]
    assert config["data"] == {"kind": "own_line:Points", "batch_size": 2, "slope": 5.0}
    other = printed(typed, "own_line:Line --config a.toml --data own_line:Nothing")
    assert other["data"] == {"kind": "own_line:Nothing"}


def test_help_lists_the_arguments_with_types_defaults_and_docstrings(own: Path, typed: Typed) -> None:
    status, out, err = typed(f"train {NAMED} --help")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert "[model] own_line:Line A line fitted to points." in words
    assert (
        "hidden int (required) units of the hidden layer lr number [0.1] learning rate mode fast | slow [fast]" in words
    )
    assert "[data] own_line:Points batch_size int [4] slope number [2.0]" in words
    assert re.search(r"max_epochs int .*?\| none \[none\] Epochs to train", words)
    assert "Subclass this" not in out


def test_every_mistake_is_reported_at_once(own: Path, typed: Typed) -> None:
    line = f"train {NAMED} --model.hiden 3 --model.lr x --data.batch_siz 3 --trainer.max_epoch 3 --model.mode fsat"
    assert typed(line) == (
        2,
        "",
        "arclight: own_line:Line cannot be run:\n"
        "  --model.hiden is not a field of Line; did you mean --model.hidden?\n"
        "  --model.lr: need number, got 'x'\n"
        "  --model.mode: need fast | slow, got 'fsat'; did you mean fast?\n"
        "  model.hidden is missing; Line needs it: int\n"
        "  --data.batch_siz is not a field of Points; did you mean --data.batch_size?\n"
        "  --trainer.max_epoch is not a field of TrainerSettings; did you mean --trainer.max_epochs?\n",
    )


@pytest.mark.parametrize(
    "line, said",
    [
        ("train own_line:Lin", "own_line:Lin: own_line has no Lin"),
        ("predict not_there:Line", "not_there:Line cannot be imported: No module named 'not_there'"),
        ("train own_line:Line --model.hidden 3 --data own_line:Plain", "--data: own_line:Plain is not a subclass of"),
        (
            "train own_line:Line --model.hidden 3 --data.batch_size 3",
            "the data has settings but no class: name it with",
        ),
        ("train own_line:Line --config no.toml", "--config: no.toml cannot be read: No such file"),
        (
            "train own_line:Line --config other.toml",
            "--config is for model.kind = own_line:Points, not for own_line:Line",
        ),
        (
            "train own_line:Line --model.hidden 3 --ckpt_path no",
            "--ckpt_path: no is neither a run folder nor a checkpoint",
        ),
        (f"train {NAMED} --model.hidden 0", "model: hidden must be positive"),
        ("train own_line:Line --model.hidden 3 --model.lr", "--model.lr needs a value"),
        ("train own_line:Line --config wrong.toml --model.limit 5", "--config: model must be a table of settings"),
        ("train own_line:Plain", "own_line:Plain must return a Recipe, it returned <own_line.Plain"),
        (
            f"validate {NAMED} --model.hidden 3 --ckpt_path last",
            "--ckpt_path last: there is no run in runs/line",
        ),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(own: Path, typed: Typed, line: str, said: str) -> None:
    Path("wrong.toml").write_text("model = 3")
    Path("other.toml").write_text('[model]\nkind = "own_line:Points"\n')
    status, _, err = typed(line)
    assert status == 2, err
    assert err.startswith(f"arclight: {said}"), err
    assert not Path("runs").exists()
