"""A language model from the shell: trained, resumed, let write, handed over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import warm
from tests.exports import compare_here

import arclight
from arclight.checkpoint import find_last
from arclight.checkpoint import load as load_checkpoint
from arclight.cli.runs import newest_checkpoint
from arclight.deploy import Program
from arclight.deploy.quantizing.linear import pack
from arclight.text import Tokenizer, from_hf, generate

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def recipe(folder: Path) -> str:
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"the {number} cats sat on the mat and saw {number} birds\n" * 40)
    (folder / "lm.toml").write_text("""
        name = "lm"
        [task]
        kind = "language"
        overrides = {layers = 1, dim = 32, heads = 2, kv_heads = 1, hidden = 48}
        [task.data]
        data = "texts"
        sequence_length = 32
        batch_size = 4
        held_out = 0.1
        tokenizer = {kind = "bpe", vocab_size = 300}
        [task.sampling]
        prompts = ["the 7"]
        new_tokens = 5
        [trainer]
        accelerator = "cpu"
        max_steps = 12
        val_check_interval = 6
        log_every_n_steps = 3
        enable_progress_bar = false
    """)
    return "lm.toml"


@pytest.mark.parametrize(
    ("model", "few", "many", "said"),
    [
        ("sigma-moe-debug", "moe = {experts = 6}", "moe = {experts = 8}", "w1 lacks experts 6, 7 of 8: it has 6"),
        ("sigma-moe-debug", "moe = {experts = 8}", "moe = {experts = 6}", "w1 has 8 experts, and the model 6"),
        ("switch-head-debug", "switch_head = {experts = 3}", "switch_head = {experts = 4}",
         "wv.experts lacks (head, expert) pairs 6, 7 of 8: it has 6"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_lacks_experts_is_refused_by_their_numbers(
    recipe: str, typed: Typed, folder: Path, model: str, few: str, many: str, said: str
) -> None:
    for name, experts in (("few", few), ("many", many)):
        text = (folder / recipe).read_text()
        text = re.sub(
            r"overrides = .*", f'model = "{model}"\noverrides = {{layers = 1, dim = 32, heads = 2, {experts}}}', text
        )
        (folder / f"{name}.toml").write_text(text)
    flags = "--trainer.max_steps 1 --task.sampling none"
    status, _, err = typed(f"train few.toml {flags} --root first")
    assert status == 0, err
    last = find_last(Path("first/lm/1/checkpoints"))
    status, _, err = typed(f"train many.toml {flags} --root second --task.weights {last}")
    assert status == 2
    assert f"{said}; set task.overrides to the experts that it was trained with" in err
    assert "Traceback" not in err


def weights(run: str) -> np.ndarray:
    last = find_last(Path(run) / "checkpoints")
    assert last is not None
    return np.concatenate([value.numpy().ravel() for value in load_checkpoint(last)["model"].values()])


def test_a_language_model_is_trained_queried_evaluated_and_exported(typed: Typed, recipe: str) -> None:
    status, out, err = typed(f"train {recipe}")
    assert (status, err) == (0, "")
    assert "tokenizing texts" in out
    assert "after step 12: 'the 7' continues:" in Path("runs/lm/1/log.txt").read_text()
    assert "val/bits_per_byte" in Path("runs/lm/1/metrics.csv").read_text()

    status, out, _ = typed("predict runs/lm/1 --prompt the --tokens 4 --temperature 0 --json said.json")
    assert status == 0
    (said,) = json.loads(Path("said.json").read_text())
    assert said["prompt"] + said["text"] in out

    status, _, err = typed("predict runs/lm/1 --prompt the --tokens 100000")
    assert (status, err.count("\n")) == (2, 2)  # the checkpoint that was taken, and what is wrong
    assert "lower max_new_tokens" in err

    row = {
        "activity_label": "Cats",
        "ctx_a": "The 7 cats sat on",
        "ctx_b": "they",
        "endings": ["the mat", "xq zz"],
        "label": "0",
    }
    Path("questions.jsonl").write_text(json.dumps(row) + "\n")
    status, out, _ = typed("test runs/lm/1 --questions questions.jsonl --format hellaswag --json scores.json")
    assert status == 0
    assert "guessing gives 50.0%" in out
    assert json.loads(Path("scores.json").read_text())["questions"] == 1

    assert typed("export runs/lm/1 --out hf")[0] == 0
    model, tokenizer = from_hf("hf"), Tokenizer.load("hf")
    assert generate(model, tokenizer, said["prompt"], 4, temperature=0) == said["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("out", "runtime"), [("lm.onnx", "onnxruntime"), ("lm --format openvino", "openvino")])
def test_a_program_answers_as_its_run(typed: Typed, recipe: str, out: str, runtime: str) -> None:
    assert typed(f"train {recipe}")[0] == 0
    assert typed("predict runs/lm/1 --prompt the --tokens 4 --temperature 0 --json said.json")[0] == 0
    said = json.loads(Path("said.json").read_text())
    status, told, err = typed(f"export runs/lm/1 --out {out}")
    assert status == 0, err
    assert "with cache and tokenizer, for up to 2048 tokens" in told
    program = out.partition(" ")[0]
    status, told, _ = typed(f"predict {program} --prompt the --tokens 4 --temperature 0 --json program.json")
    assert status == 0, told
    assert json.loads(Path("program.json").read_text()) == [one | {"runtime": runtime} for one in said]
    status, _, err = typed("predict runs/lm/1 --prompt the --runtime openvino")
    assert (status, "is a run, which PyTorch computes: export it first" in err) == (2, True)
    status, _, err = typed(f"predict {program} --prompt the --tokens 100000")
    assert (status, err.count("\n")) == (2, 1)
    assert "lower max_new_tokens" in err


@pytest.mark.slow
def test_a_run_of_two_ranks_with_rounding_is_exported_as_it_was_trained(
    typed: Typed, recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: the ranks of a plan start the command again."""
    onnx = pytest.importorskip("onnx")
    compare_here(monkeypatch, rounds=2)
    (folder / "planned.toml").write_text(
        (folder / recipe).read_text().replace("hidden = 48", "hidden = 64")
        + """
        [qat]
        kind = "weightonly"
        bits = 4
        min_sqnr_db = -50
        [plan]
        dp_shard = 2
        """
    )
    environment = os.environ | {"PYTHONPATH": str(Path(arclight.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = warm.run("-m", "arclight.cli", "train", "planned.toml", timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    status, out, err = typed("export runs/lm/1 --out w4.onnx")
    assert (status, "4-bit weights, trained with rounding" in out) == (0, True), out + err
    report = Program.load("w4.onnx").metadata["quantization"]
    assert (report["trained"], report["quantized_layers"]) == (True, 8)
    stored = [onnx.numpy_helper.to_array(one) for one in onnx.load("w4.onnx").graph.initializer]
    last = find_last(Path("runs/lm/1/checkpoints"))
    assert last is not None
    state = load_checkpoint(last)["model"]
    layers = [name for name, value in state.items() if value.dim() == 2 and "tok_embeddings" not in name]
    assert len(layers) == 8
    for name in layers:  # bit for bit
        integers = pack(state[name], 4, 32)[0].numpy()
        assert any(one.dtype == np.uint8 and np.array_equal(one.ravel(), integers.ravel()) for one in stored), name


@pytest.mark.slow
def test_programs_for_embeddings_and_with_few_bits(typed: Typed, recipe: str) -> None:
    assert typed(f"train {recipe}")[0] == 0
    status, out, err = typed("export runs/lm/1 --embedding --out embed.onnx")
    assert status == 0, err
    assert "with tokenizer, for texts of up to 2048 tokens" in out
    assert Program.load("embed.onnx").metadata["task"] == "embedding"
    status, out, err = typed("quantize runs/lm/1 --recipe lowbit --recipe.group_size=16 --out w4a8.onnx")
    assert status == 0, err
    assert re.search(r"wrote w4a8\.onnx: w4a8, .* \d+ dB.* x as fast as float32 .* in \d+% of its size", out)
    held = Program.load("w4a8.onnx").metadata["quantization"]
    assert (held["kind"], held["group_size"]) == ("lowbit", 16)
    assert held["kernels"] == {"MatMulNBits": held["quantized_layers"]}


@pytest.mark.slow
def test_a_run_elsewhere_is_calibrated_on_its_own_tokens(typed: Typed, recipe: str) -> None:
    assert typed(f"train {recipe}")[0] == 0
    Path("runs").rename("elsewhere")
    status, out, _ = typed("quantize elsewhere/lm/1 --out int8.onnx")
    assert re.search(r"wrote int8\.onnx: int8, .* agrees with its torch model to \d+ dB", out)
    assert status == 0, out
    assert Program.load("int8.onnx").precision == "int8"
    assert not Path("runs").exists()  # the tokens of the training were found


def test_a_development_run_writes_nothing(typed: Typed, recipe: str) -> None:
    status, out, _ = typed(f"train {recipe} --name dev --trainer.fast_dev_run 1")
    assert (status, out.splitlines()[-1]) == (0, "The development run came to its end. It wrote nothing")
    assert not Path("runs/dev").exists()


def test_a_stopped_run_goes_on_with_the_same_bits(typed: Typed, recipe: str) -> None:
    typed(f"train {recipe} --name whole")
    typed(f"train {recipe} --name parts --trainer.max_steps 6 --task.schedule.kind constant")
    typed(f"train {recipe} --name whole2 --task.schedule.kind constant")
    status, _, err = typed(f"train {recipe} --name parts --task.schedule.kind constant --resume last")
    assert (status, err) == (0, "")
    assert np.array_equal(weights("runs/parts/1"), weights("runs/whole2/1"))
    assert not np.array_equal(weights("runs/whole/1"), weights("runs/whole2/1"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--task.model llama3-9b", "llama3-8b"),
        ("--task.overrides.layer 3", "did you mean layers"),
        ("--task.data.data nowhere", "nowhere"),
        ("--plan.tp 3", "tp = 3"),
        ("--plan.dp_shard 2 --trainer.strategy ddp", "a strategy of its own"),
        ("--task.data.sequence_lenght 3", "sequence_length?"),
    ],
)
def test_invalid_language_settings_are_refused_without_a_traceback(
    typed: Typed, recipe: str, flags: str, said: str
) -> None:
    status, _, err = typed(f"train {recipe} {flags}")
    assert status == 2
    assert said in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_pipeline_is_shown_where_the_recipe_asks_for_it(recipe: str) -> None:
    words = "--plan.pp 2 --plan.micro_batches 4 --task.overrides.layers 2 --trainer.max_steps 5 --timeline.after 2 --timeline.steps 2"
    command = [sys.executable, "-m", "arclight.cli", "train", recipe, *words.split()]
    environment = os.environ | {"PYTHONPATH": str(Path(arclight.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    plots = Path("runs/lm/1/plots")
    assert {"pipeline.html", "pipeline.json", "pipeline.svg"} <= {file.name for file in plots.iterdir()}
    assert "One training step of the pipeline" in Path("runs/lm/1/report.html").read_text(encoding="utf-8")
    assert "process  stages" in Path("runs/lm/1/log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_average_goes_on_in_pipeline_stages(typed: Typed, recipe: str) -> None:
    words = "--ema.decay 0.9 --task.overrides.layers 2 --task.sampling none"
    assert typed(f"train {recipe} {words} --name whole")[0] == 0
    assert typed(f"train {recipe} {words} --trainer.max_steps 4")[0] == 0
    environment = os.environ | {"PYTHONPATH": str(Path(arclight.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    staged = f"train {recipe} {words} --plan.pp 2 --plan.micro_batches 4 --trainer.max_steps 8 --resume last"
    done = warm.run("-m", "arclight.cli", *staged.split(), timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert typed(f"train {recipe} {words} --resume last")[0] == 0
    states = [load_checkpoint(newest_checkpoint(Path("runs", name, "1"))) for name in ("whole", "lm")]
    assert states[0]["callbacks"]["EMAWeightAveraging"]["updates"] == 12
    torch.testing.assert_close(states[1]["ema"], states[0]["ema"], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_replicas_of_a_plan_train_independently(typed: Typed, recipe: str) -> None:
    """In a process of their own: those of a plan start the command again."""
    words = "--diloco.sync_every 4 --diloco.outer_lr 1 --diloco.outer_momentum 0"
    status, _, err = typed(f"train {recipe} --plan.dp_shard 2 {words}")
    assert status == 2
    assert "set plan.dp_replicate to their number" in err
    status, _, err = typed(f"train {recipe} --plan.dp_replicate 2 --plan.replicas independent")
    assert status == 2
    assert "add a table [diloco]" in err
    source = str(Path(arclight.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    words += " --plan.dp_replicate 2 --trainer.max_steps 6"
    done = warm.run("-m", "arclight.cli", "train", recipe, *words.split(), timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    last = find_last(Path("runs/lm/1/checkpoints"))
    assert last is not None
    state = load_checkpoint(last)
    own = state["callbacks"]["DiLoCo"]
    assert own["replicas"] == 2
    name, anchor = next(iter(own["anchor"].items()))
    assert torch.equal(state["model"][name], anchor)
    assert not torch.equal(own["local"][name][0], own["local"][name][1])
    assert "plan" in (Path("runs/lm/1") / "recipe.toml").read_text()


def test_a_suite_from_the_shell(typed: Typed, recipe: str) -> None:
    """The scores of a run's own evaluation and of the command are those of the same model."""
    rows = [{"goal": f"the {n} cats", "sol1": "sat on the mat", "sol2": "zq xx", "label": n % 2} for n in range(8)]
    Path("piqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("suite.toml").write_text('[[tasks]]\nformat = "piqa"\nquestions = "piqa.jsonl"\n')
    status, _, err = typed(
        f"train {recipe} --task.sampling none --task.evaluation.suite suite.toml --task.evaluation.every_n_steps 6"
    )
    assert (status, err) == (0, "")
    assert "suite/piqa/accuracy" in Path("runs/lm/1/metrics.csv").read_text()
    status, out, _ = typed("test runs/lm/1 --suite suite.toml --json scores.json")
    assert status == 0
    assert "piqa" in out
    score = json.loads(Path("scores.json").read_text())["piqa"]
    assert (score["questions"], score["mode"], score["chance"]) == (8, "cloze", 0.5)
    assert score["interval"][0] <= score["accuracy"] <= score["interval"][1]

    Path("piqa.jsonl").write_text('{"goal": "x"}\n')
    status, _, err = typed("test runs/lm/1 --suite suite.toml")
    assert (status, err.count("\n")) == (2, 1)
    assert "piqa.jsonl, line 1 is not a question of piqa: KeyError 'sol1'" in err
    assert typed("test runs/lm/1 --questions piqa.jsonl")[0] == 2
    assert typed("test runs/lm/1 --questions piqa.jsonl --suite suite.toml")[0] == 2
