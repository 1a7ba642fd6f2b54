"""``arclight benchmark``: programs and models of any kind of input, in one table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.test_export_own_module import SOURCE
from tests.exports import compare_here
from tests.text.test_language_program import decoder_program
from torch import nn

from arclight.cli.commands.benchmark import random_inputs
from arclight.deploy import Program, export

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs: a tagger of token ids of any length, and two of numbers."""
    folder = tmp_path_factory.mktemp("programs")
    tagger = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 5))
    tokens, free = torch.randint(0, 11, (3, 6)), {"input": {0: "batch", 1: "time"}}
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        export(tagger, folder / "tags", example_inputs=tokens, format="onnx", dynamic=free)
        export(nn.Linear(16, 4), folder / "numbers.onnx", example_inputs=torch.randn(3, 16))
        export(nn.Linear(16, 4), folder / "one.onnx", example_inputs=torch.randn(1, 16), dynamic_batch=False)
    return folder


@pytest.fixture
def own_net(folder: Path) -> Iterator[None]:
    (folder / "bench_net.py").write_text(SOURCE)
    yield
    import sys

    sys.modules.pop("bench_net", None)


def test_a_language_program_is_timed_on_a_token_behind_others(
    tmp_path_factory: pytest.TempPathFactory, typed: Typed
) -> None:
    path = decoder_program(tmp_path_factory)
    line = f"benchmark {path} --rounds 2 --batch 1,3 --threads 1 --dim past=20 --json found.json"
    status, _, err = typed(line)
    assert status == 0, err
    found = json.loads(Path("found.json").read_text())
    for batch in (1, 3):
        place = f"{path}/batch {batch}/threads 1"
        rate, wall = found[f"{place}/samples_per_s"], found[f"{place}/wall_ms"]
        assert rate == pytest.approx(1000 * batch / wall)
        assert found[f"{place}/p99_ms"] >= wall > 0
        assert found[f"{place}/load_s"] > 0
        assert found[f"{place}/peak_bytes"] > 20e6, "the runtime's libraries alone are as large"
    program = Program.load(path)
    tokens, padding, *past = random_inputs(program, 2, None, {"past": 20})
    assert tokens.shape == (2, 1)
    assert tokens.max() < program.metadata["vocab_size"]
    assert padding.tolist() == [0, 0]
    assert {held.shape[2] for held in past} == {20}
    status, _, err = typed(f"benchmark {path} --dim past=64")
    assert status == 2
    assert "takes 64 tokens, and time + past is 65" in err


def test_a_model_of_ones_own_beside_its_program(own_net: None, typed: Typed) -> None:
    assert typed("export bench_net:Tagger --out tags.onnx")[0] == 0
    status, out, err = typed("benchmark bench_net:Tagger tags.onnx --rounds 2 --threads 1,2 --json found.json")
    assert status == 0, err
    found = json.loads(Path("found.json").read_text())
    assert found["bench_net:Tagger/batch 1/threads 2/speedup"] == 1
    assert found["tags.onnx/batch 1/threads 1/speedup"] > 0
    assert "bench_net:Tagger/batch 1/threads 1/peak_bytes" not in found, "a model has no process of its own"
    assert "peak MB" in out
    status, _, err = typed("benchmark bench_net:Tagger tags.onnx --values 3")
    assert status == 2
    assert "a model that is named brings its own" in err


def test_sizes_and_integers_are_chosen(programs: Path, typed: Typed) -> None:
    tags = programs / "tags"
    status, _, err = typed(f"benchmark {tags}")
    assert status == 2
    assert "has dynamic dimensions: set time with --size or --dim" in err
    assert typed(f"benchmark {tags} --dim time=9 --values 11 --rounds 1 --threads 1")[0] == 0
    (tokens,) = random_inputs(Program.load(tags), 4, None, {"time": 9}, 11)
    assert tokens.shape == (4, 9)
    assert len(tokens.unique()) > 5
    assert tokens.max() <= 10
    (tokens,) = random_inputs(Program.load(tags), 4, 5)
    assert tokens.tolist() == [[0] * 5] * 4, "0 is an id in any table"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{0}/numbers.onnx {0}/numbers.onnx", "a program is named twice"),
        ("{0}/numbers.onnx {0}/tags", "numbers.onnx takes input: float32 (batch, 16), and {0}/tags takes input: int64 (batch, time)"),
        ("{0}/one.onnx --batch 4", "{0}/one.onnx cannot be timed on these inputs: the program expects input: float32 (1, 16), got float32 (4, 16)"),
        ("{0}/tags --dim width=3", "has no dynamic dimension width; it has time"),
        ("{0}/tags --dim time", "time is not NAME=N"),
        ("{0}/numbers.onnx --batch 2,2", "2,2 names a number twice"),
        ("{0}/numbers.onnx --batch 0", "0 is not 1 or more"),
        ("{0}/numbers.onnx --device cuda", "this ONNX Runtime has no CUDA: install onnxruntime-gpu, or take device='cpu'"),
        ("{0}/numbers.onnx --model.hidden 3", "unrecognized arguments: --model.hidden 3"),
        ("{0}/missing.onnx", "there is no program at"),
        ("{0}/numbers.onnx --json {0}/no.onnx/x.json", None),
    ],
)  # fmt: skip
def test_invalid_benchmark_arguments_are_refused(programs: Path, typed: Typed, words: str, message: str | None) -> None:
    if message is None:  # a place below a file
        (programs / "no.onnx").write_bytes(b"")
        message = "is not a folder; name another place"
    if "--device cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    status, _, err = typed("benchmark " + words.format(programs))
    assert status == 2
    assert message.format(programs) in err
