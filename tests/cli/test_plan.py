"""arclight plan: from a recipe to the fastest plan that fits, and back to a recipe that trains."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from arclight.cli.plan.verification import Share, line, verify
from arclight.cli.schema import Recipe
from arclight.parallel import Plan
from arclight.parallel.hardware import hardware
from arclight.parallel.plan import bytes_of
from arclight.parallel.planning import estimate
from arclight.parallel.planning.chain import Chain
from arclight.parallel.planning.estimates import Estimate
from arclight.parallel.planning.explain import distinct_durations
from arclight.recipe import read
from arclight.text.settings import LanguageTask
from arclight.text.workload import workload

Typed = Callable[[str], tuple[int, str, str]]

RECIPE = """
[task]
kind = "language"
model = "llama3-debug"
[task.data]
sequence_length = 128
batch_size = 4
[task.data.tokenizer]
kind = "bytes"
"""


@pytest.fixture
def recipe(folder: Path) -> str:
    (folder / "lm.toml").write_text(RECIPE)
    return "lm.toml"


def test_a_plan_is_shown_written_and_read_again(recipe: str, typed: Typed) -> None:
    status, out, err = typed(f"plan {recipe} --gpus 2 --gpu cpu --memory 1GB --json plan.json --write planned.toml")
    assert (status, err) == (0, "")
    for part in ("Plans", "Memory of a process", "Exchanges", "Where a step's time goes", "Why not otherwise"):
        assert part in out
    found = json.loads(Path("plan.json").read_text())
    best = found["plans"][0]
    assert ("in flight" in out.split("Exchanges")[0]) == (best["plan"]["pp"] > 1)  # rows of nothing are left out
    assert best["memory"][0]["total"] <= 1e9
    made = read(Recipe, "planned.toml")
    assert made.plan is not None
    assert made.plan.world_size == 2
    assert {name: getattr(made.plan, name) for name in ("tp", "pp", "cp")} == {
        name: best["plan"][name] for name in ("tp", "pp", "cp")
    }
    a_step = made.task.data.batch_size * made.trainer.accumulate_grad_batches * made.plan.data_parallel  # type: ignore[union-attr]
    assert a_step == 8  # as before: 4 samples on each of 2
    assert tomllib.loads(Path("planned.toml").read_text())["task"]["model"] == "llama3-debug"
    status, out, err = typed(f"plan {recipe} --gpus 2 --gpu cpu --write planned.toml")
    assert (status, out) == (2, ""), "said before plans are searched"
    assert "already exists" in err


@pytest.mark.slow
def test_the_pipeline_of_a_plan_is_drawn_as_it_is_predicted(recipe: str, typed: Typed) -> None:
    fixed = "--fix pp=2 --fix tp=2 --fix schedule=Interleaved1F1B"
    status, out, err = typed(f"plan {recipe} --gpus 4 --gpu cpu {fixed} --timeline plots/step.html --json plan.json")
    assert (status, err) == (0, "")
    assert "plots/step.html: the pipeline of plan 1, pp 2" in out
    best = json.loads(Path("plan.json").read_text())["plans"][0]
    page = Path("plots/step.html").read_text(encoding="utf-8")
    shown = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (step,) = shown["traces"]
    assert [lane["stages"] for lane in step["lanes"]] == [[0, 2], [1, 3]]
    rest = best["parts"]["the optimizer"] + best["parts"]["gathering weights and scattering gradients"]
    assert step["microseconds"] / 1e6 == pytest.approx(best["seconds"] - rest, rel=1e-3)
    assert f"{best['idle']:.1%}" in page
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    status, _, err = typed(f"plan {recipe} --gpus 2 --gpu cpu --fix pp=1 --fix tp=1 --timeline none.html")
    assert status == 2
    assert "no plan above has one: decide it (--fix pp=4)" in err
    assert not Path("none.html").exists()


@pytest.mark.slow
def test_a_plan_is_verified_at_its_real_size(recipe: str, typed: Typed) -> None:
    fixed = "--fix dp_shard=128 --fix tp=2 --fix pp=4"
    status, out, err = typed(f"plan {recipe} --gpus 1024 --samples 2048 {fixed} --verify")
    assert (status, err) == (0, "")
    (said,) = [line for line in out.splitlines() if "verified" in line]
    assert said.startswith("verified: of 1,024 processes, ranks 0, 512, 1,023 have ")


def an_estimate() -> Estimate:
    chain = Chain(workload(LanguageTask(model="llama3-debug"), samples=8, device=hardware("cpu"), vocab_size=256))
    return estimate(chain, Plan(dp_shard=2))


@pytest.mark.slow
def test_a_model_that_cannot_be_built_is_reported_by_its_rank() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 of Plan\(dp_shard=2\) could not be built:[\s\S]*depth"):
        verify(an_estimate(), "llama3-debug", {"depth": 4})


def test_another_share_than_predicted_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = an_estimate()
    shares = [Share(0, 4 * 2**20, 5 * 2**20, 1.0), Share(1, 2**20, 2**20, 1.0)]
    assert line(made, shares) == (
        "not verified: of 2 processes, ranks 0, 1 have 4.0, 1.0 MiB of weights (as much of gradients and each moment); "
        "predicted were 5.0 MiB of rank 0"
    )
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")  # a process that fails in no time
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RuntimeError, match=r"rank 0 of Plan\(dp_shard=2\) could not be built:[\s\S]*no torch here"):
        verify(made, "llama3-debug", {})


def test_times_are_shown_with_the_digits_that_distinguish_them() -> None:
    assert distinct_durations(0.03004, 0.02996) == ("30.04 ms", "29.96 ms")
    assert distinct_durations(2.0, 1.0) == ("2.00 s", "1.00 s")
    assert distinct_durations(0.5, 0.5) == ("500.0 ms", "500.0 ms")


def test_fixed_plan_fields_stay_fixed(recipe: str, typed: Typed) -> None:
    status, _, _ = typed(
        f"plan {recipe} --gpus 4 --gpu cpu --fix tp=2 --fix activation_checkpointing=full --json plan.json"
    )
    assert status == 0
    plans = json.loads(Path("plan.json").read_text())["plans"]
    assert {(one["plan"]["tp"], one["plan"]["activation_checkpointing"]) for one in plans} == {(2, "full")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 4 --gpu h1000", "did you mean h100"), ("--gpus 4 --memory 80", "write a number and a unit"),
        ("--gpus 4 --fix tq=2", "write a field of the plan"), ("--gpus 0", "must be at least 1"),
        pytest.param("--gpus 2 --gpu cpu --fix tp=1 --memory 1MB", "fits into 0.0 GiB: the smallest", marks=pytest.mark.slow),
        ("--gpus 3 --gpu cpu --fix tp=3", "sequences of 128 tokens cannot be cut into tp = 3"),
        ("--gpus 4 --gpu cpu --fix tp=0", "tp: need int >= 1, got 0"),
        ("--gpus 4 --fix float8=rowwise", "float8 = rowwise"), ("--gpus 4 --task.model llama3-9b", "there is no model 'llama3-9b'"),
    ],
)  # fmt: skip
def test_invalid_plans_are_refused_in_one_line(words: str, message: str, recipe: str, typed: Typed) -> None:
    status, _, err = typed(f"plan {recipe} {words}")
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("value", ["independent", "apart"])
def test_independent_replicas_leave_no_stages_to_choose(recipe: str, typed: Typed, value: str) -> None:
    words = f"plan {recipe} --gpus 4 --gpu cpu --fix dp_replicate=2 --fix tp=1 --fix cp=1 --fix replicas={value} --json plan.json"
    with pytest.warns(FutureWarning, match="apart") if value == "apart" else contextlib.nullcontext():
        assert typed(words)[0] == 0
    plans = json.loads(Path("plan.json").read_text())["plans"]
    assert {(one["plan"]["replicas"], one["plan"]["pp"]) for one in plans} == {("independent", 1)}
    with pytest.warns(FutureWarning, match="apart") if value == "apart" else contextlib.nullcontext():
        assert "is not done for pipelines yet" in typed(f"{words} --fix pp=2")[2]


@pytest.mark.slow
def test_independent_replicas_exchange_nothing_in_a_step(recipe: str, typed: Typed) -> None:
    words = f"plan {recipe} --gpus 4 --gpu cpu --fix dp_replicate=2 --fix tp=1 --fix cp=1 --top 9 --json plan.json"
    found = {}
    for name, more in (("alike", ""), ("independent", " --diloco.sync_every 10")):
        status, _, err = typed(words + more)
        assert (status, err) == (0, "")
        plans = json.loads(Path("plan.json").read_text())["plans"]
        assert all((one["plan"]["replicas"] == "independent") == (name == "independent") for one in plans)
        (found[name],) = [one for one in plans if one["plan"]["dp_shard"] == 2]
    assert "dp_replicate" in json.dumps(found["alike"]["traffic"])
    assert "dp_replicate" not in json.dumps(found["independent"]["traffic"])
    assert found["independent"]["plan"]["pp"] == 1
    extra = found["independent"]["memory"][0]["optimizer"] / found["alike"]["memory"][0]["optimizer"]
    assert extra == 2  # beside two moments: the anchor and its velocity
    status, _, err = typed(f"plan {recipe} --gpus 4 --gpu cpu --diloco.sync_every 10")
    assert status == 2
    assert "diloco leaves open how many independent replicas train: set plan.dp_replicate" in err


def test_bytes_as_people_write_them() -> None:
    assert bytes_of("80GB") == 80e9
    assert bytes_of("79.5 GiB") == 79.5 * 2**30
    assert bytes_of("512mib") == 2**29


OWN = """
import arclight as al
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6, vocabulary: int = 5000):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, scale: float = 1.0):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * scale


def example():
    return (torch.zeros(4, 64, dtype=torch.long),), {"scale": 0.5}


class Task(al.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.net = Net(width, 4, 100)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss


class Data(al.DataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(32, 17, dtype=torch.long), batch_size=8)
"""


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)


def test_any_model_is_planned_by_its_import_path(own: None, typed: Typed) -> None:
    words = "own_nets:Net --gpus 2 --example own_nets:example --samples 16 --fix pp=2 --gpu cpu --model.width 128"
    status, out, err = typed(f"plan {words} --json plan.json --timeline step.html")
    assert (status, err) == (0, "")
    for part in (
        "Net of 2.08M parameters on 2 x CPU",
        "Plans",
        "Stages of the first plan",
        "Where a step's time goes",
        "Why not otherwise",
    ):
        assert part in out
    found = json.loads(Path("plan.json").read_text())
    assert found["parameters"] == 5000 * 128 * 2 + 5000 + 6 * (2 * 4 * 128**2 + 5 * 128)
    best = found["plans"][0]
    assert best["processes"] == 2
    assert best["seconds"] == min(plan["seconds"] for plan in found["plans"])
    assert len(found["costs"]["units"]) == 8
    assert found["costs"]["units"][-1]["forward"] > 5 * found["costs"]["units"][1]["forward"]  # a large vocabulary
    assert "head" in out
    assert Path("step.html").stat().st_size > 10_000
    names = {one["choice"] for one in found["rejected"]} | {best["schedule"]}
    assert {"1F1B", "GPipe", "ZB-H1", "V-Min", "recomputing"} <= names


def test_a_modules_training_step_is_planned_with_its_data_and_measured(own: None, typed: Typed) -> None:
    words = "own_nets:Task --data own_nets:Data --gpus 2 --gpu cpu --measure --fix schedule=1F1B --fix activation_checkpointing=none"
    status, out, err = typed(f"plan {words} --json plan.json")
    assert (status, err) == (0, "")
    assert "measured on cpu" in out
    found = json.loads(Path("plan.json").read_text())
    assert found["costs"]["samples"] == 8
    assert {plan["schedule"] for plan in found["plans"]} == {"1F1B"}
    assert {plan["processes"] * plan["replicas"] for plan in found["plans"]} == {2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("own_nets:Net --gpus 2", "name the input of the model: --example"), ("own_nets:Nets --gpus 2 --example own_nets:example", "own_nets has no Nets"),
        pytest.param(
            "own_nets:Net --example own_nets:example --gpus 2 --memory 1MB", "no plan keeps each process within 976.6 KiB: the least",
            marks=pytest.mark.slow,
        ),
        ("own_nets:Net --example own_nets:example --gpus 16 --fix pp=16", "the model has 8 parts, too few for a pipeline of 16 processes: use 8"),
        ("own_nets:Net --example own_nets:example --gpus 2 --fix tp=2", "for a model of your own write one of pp, schedule"),
        ("own_nets:example --example own_nets:example", "own_nets:example gives a tuple"),
        ("own_nets:Net --data own_nets:Data --gpus 2", "--data is for a Module"),
        ("own_nets:Net --example own_nets:example --gpus 2 --fix schedule=2F2B --fix pp=2", "there is no pipeline schedule '2F2B'"),
    ],
)  # fmt: skip
def test_invalid_plans_of_own_modules_are_refused_in_one_line(
    words: str, message: str, own: None, typed: Typed
) -> None:
    status, _, err = typed(f"plan {words}")
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
