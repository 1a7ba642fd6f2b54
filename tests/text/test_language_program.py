"""Language programs say what their models say, and refuse what they cannot say."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.exports import compare_here
from tests.shared import made_once
from tests.test_readme import block

from arclight.cli.arguments import UsageError
from arclight.cli.command import main
from arclight.cli.comparing.candidates import Candidate, cache_of, check_comparable
from arclight.deploy import Int8, Program, ProgramError, WeightOnly, export, quantize
from arclight.deploy.formats import onnx_graph
from arclight.parallel import initialize
from arclight.text import ByteTokenizer, build_model, generate, language_program
from arclight.text.language_program import DYNAMIC, CachedDecoder, ProgramRun, export_language_model, tokenizer_of

PROMPTS = ["def main", "x", "import numpy as np\n"]
TEXT = torch.tensor([list(b"the cat sat on t"), list(b"a bird saw 7 dog"), list(b"import numpy as ")])


def model(name: str = "llama3-debug", **overrides: Any) -> Any:
    """A model that says many different tokens."""
    sizes = {"layers": 1, "vocab_size": 264, "dim": 64, "heads": 4, "max_positions": 64}
    built = build_model(name, **(sizes | overrides))
    initialize(built, seed=0)
    with torch.no_grad():
        built.tok_embeddings.weight.mul_(30)
    return built.eval()


@pytest.fixture(scope="module")
def decoder() -> Any:
    return model(kv_heads=2, hidden=96)


def decoder_program(factory: pytest.TempPathFactory) -> Path:
    """The program of `decoder`, which other tests read, too."""

    def write(path: Path) -> None:
        export_language_model(model(kv_heads=2, hidden=96), path, [TEXT], tokenizer=ByteTokenizer())

    return made_once(factory, "decoder.onnx", write)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program.load(decoder_program(tmp_path_factory))


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def same_tokens(program: Program, decoder: Any, new: int = 12) -> None:
    tokenizer = tokenizer_of(program)
    expected = [generate(decoder, tokenizer, prompt, new, temperature=0) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    assert [generate(program, tokenizer, prompt, new, temperature=0) for prompt in PROMPTS] == expected
    assert generate(program, tokenizer, PROMPTS, new, temperature=0) == expected  # padded at the left


def test_a_program_answers_as_its_model(program: Program, decoder: Any) -> None:
    same_tokens(program, decoder)
    sampled = [generate(it, ByteTokenizer(), PROMPTS[0], 12, seed=3, top_p=0.9) for it in (decoder, program)]
    assert sampled[0] == sampled[1]


def test_answers_that_end_early_leave_the_others_alone(program: Program, decoder: Any) -> None:
    tokenizer = ByteTokenizer()
    whole = generate(decoder, tokenizer, PROMPTS, 12, temperature=0)
    stop = whole[1][4:6]
    assert generate(program, tokenizer, PROMPTS, 12, temperature=0, stop=stop) == generate(
        decoder, tokenizer, PROMPTS, 12, temperature=0, stop=stop
    )
    streamed = [*generate(program, tokenizer, PROMPTS, 12, temperature=0, stream=True)]
    assert ["".join(row) for row in zip(*streamed)] == whole


def test_other_runtimes_answer_alike(program: Program, decoder: Any) -> None:
    other = Program.load(program.path, runtime="openvino", threads=1)
    assert other.choice.parity.keys() == {"logits", "present.0", "present.1"}
    assert all(one.sqnr_db > 90 for one in other.choice.parity.values())
    same_tokens(other, decoder)


def test_a_folder_of_openvino_answers_as_its_model(
    decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch)
    program = export_language_model(decoder, tmp_path / "lm", [TEXT], tokenizer=ByteTokenizer(), format="openvino")
    assert (program.format, program.runtime) == ("openvino", "openvino")
    assert program.metadata["parity"]["outputs"].keys() == {"logits", "present.0", "present.1"}
    same_tokens(program, decoder)


def test_the_runtime_is_chosen_where_a_program_writes_text(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for runtime in ("onnxruntime", "openvino"):
        words = ["predict", str(program.path), "--prompt", "def", "--tokens", "8", "--temperature", "0"]
        assert main([*words, "--runtime", runtime, "--json", str(tmp_path / "said.json")]) == 0
        said += json.loads((tmp_path / "said.json").read_text())
        assert f"{program.path}: It runs in " in capsys.readouterr().err
    assert [one["runtime"] for one in said] == ["onnxruntime", "openvino"]
    assert said[0]["text"] == said[1]["text"] == generate(program, ByteTokenizer(), "def", 8, temperature=0)
    assert main(["predict", str(program.path), "--prompt", "def", "--runtime", "torch"]) == 2
    assert "is of format onnx, which torch does not run: take onnxruntime, openvino" in capsys.readouterr().err


def test_one_program_is_compared_and_timed_in_two_runtimes(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and a bird saw it. " * 4)
    numbers = tmp_path / "numbers.json"
    words = (program.path, program.path, "--data", tmp_path / "text.txt", "--json", numbers)
    status, out = compared(capsys, *words, "--runtime", "onnxruntime,openvino", "--max-drop", 0.01)
    assert status == 0, out
    found = json.loads(numbers.read_text())
    assert [found[side]["name"] for side in "ab"] == [f"{program.path} ({one})" for one in ("onnxruntime", "openvino")]
    assert all(one["max_difference"] < 1e-4 * one["largest"] for one in found["outputs"].values())
    assert "name one for the programs" in compared(capsys, *words, "--runtime", "torch,torch,torch")[1]
    line = ["benchmark", str(program.path), "--runtime", "openvino,onnxruntime", "--rounds", "2", "--threads", "1"]
    assert main([*line, "--dim", "past=20", "--json", str(numbers)]) == 0
    table = capsys.readouterr().out
    assert "OpenVINO" in table
    assert "ONNX Runtime" in table
    assert {name.rpartition("/")[0] for name in json.loads(numbers.read_text())} == {
        f"{program.path} openvino", f"{program.path} onnxruntime",
    }  # fmt: skip
    assert main([*line[:3], "openvino,openvino"]) == 2
    assert "names one twice" in capsys.readouterr().err


def test_parity_is_of_every_output_where_prompts_are_read_and_go_on(program: Program) -> None:
    parity = program.metadata["parity"]
    assert parity["sizes"] == {
        "example": {"batch": 3, "time": 1, "past": 15},
        "prompts": {"batch": 3, "time": 15, "past": 0},
        "continued": {"batch": 3, "time": 8, "past": 8},
        "first token": {"batch": 1, "time": 1, "past": 0},
    }
    assert parity["outputs"].keys() == {"logits", "present.0", "present.1"}
    assert all(0 < one["max_difference"] < 1e-4 for one in parity["outputs"].values())


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Compare on two rounds; the status, and all that was said."""
    status = main(["compare", *map(str, words), "--rounds", "2"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_language_programs_are_judged_by_the_likelihood_of_texts(
    decoder: Any, program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and a bird saw it. " * 4)
    numbers = tmp_path / "numbers.json"
    both = (program.path, program.path)
    status, out = compared(capsys, *both, "--data", tmp_path / "text.txt", "--json", numbers, "--max-drop", 0.01)
    assert status == 0, out
    found = json.loads(numbers.read_text())
    assert list(found["scores"]) == ["log_likelihood", "accuracy"]
    assert set(found["outputs"]) == {"logits", "present.0", "present.1"}
    assert found["samples"] == 2, "two texts of 64 bytes"
    tokens = torch.tensor([list(b"the cat sat on the mat, and a bird saw it. " * 4)[:128]]).view(2, 64)
    with torch.no_grad():
        expected = -torch.nn.functional.cross_entropy(decoder(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert found["scores"]["log_likelihood"]["a"] == pytest.approx(float(expected), rel=1e-4)
    (tmp_path / "none.txt").write_text("too short")
    assert "no text" in compared(capsys, *both, "--data", tmp_path / "none.txt")[1]


def test_models_of_other_caches_are_refused_by_name() -> None:
    def candidate(decoder: Any) -> Candidate:
        deployment = language_program.language_deployment(decoder, [TEXT], None)
        shapes = [tuple(value.shape) for value in deployment.example_inputs]
        return Candidate(name="x", network=deployment.model, task="language", cache=cache_of("language", shapes))

    one, two = candidate(model(kv_heads=2)), candidate(model(kv_heads=2, layers=2))
    check_comparable(one, one)
    with pytest.raises(UsageError, match=r"A keeps a cache of 2 tensors .*\(2, 16\), and B of 4 tensors"):
        check_comparable(one, two)
    assert cache_of("detect", [(1, 3, 64, 64)]) is None


def test_any_length_and_batch_is_computed_up_to_the_positions(program: Program, decoder: Any) -> None:
    cached = CachedDecoder(decoder)
    for batch, time in ((5, 63), (1, 2), (2, 1)):
        tokens = torch.arange(batch * time).view(batch, time) % 256
        inputs = (tokens, torch.zeros(batch, dtype=torch.int64), *cached.empty(batch))
        with torch.no_grad():
            torch.testing.assert_close(program(*inputs), cached(*inputs), rtol=1e-4, atol=1e-4)
    longest = "x" * 63
    assert len(generate(program, ByteTokenizer(), longest, 1)) <= 1
    for full in ("x", "xx"):
        with pytest.raises(ValueError, match=r"tokens, which leave none of the model's 64 positions .* shorten it$"):
            generate(program, ByteTokenizer(), longest + full, 1)


@pytest.mark.slow
def test_unsupported_program_inputs_are_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch)
    with pytest.raises(TypeError, match="a program takes only tokens, got images"):
        generate(program, ByteTokenizer(), "a", 2, inputs={"images": torch.zeros(1)})
    with pytest.raises(ValueError, match="the tokenizer is another model's"):
        generate(program, ByteTokenizer(), [[300]], 2)
    other = export(torch.nn.Linear(2, 2), tmp_path / "other.onnx", example_inputs=torch.ones(2, 2))
    with pytest.raises(ProgramError, match="is not a program of the task 'language': export a language model"):
        generate(other, ByteTokenizer(), "a", 2)
    old = export(
        torch.nn.Linear(2, 2), tmp_path / "old.onnx", example_inputs=torch.ones(2, 2), metadata={"task": "language"}
    )
    with pytest.raises(ProgramError, match="older arclight, without a cache: export the model again"):
        tokenizer_of(old)


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": "259"}, {"vocab_size": True}, {"max_positions": 64.0}, {"max_positions": 0}, {"placeholders": None},
        {"placeholders": [1, "2"]}, {"placeholders": [-1]}, {"tokenizer_files": ["x"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_description_with_other_types_is_refused_by_name(program: Program, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    changed = Program(program.path, program._session, program.metadata | wrong, None)
    for reads in (ProgramRun, tokenizer_of):
        with pytest.raises(ProgramError, match=f"describes its {name} as"):
            reads(changed)


def test_a_tokenizer_is_of_the_program_or_asked_for(decoder: Any, program: Program) -> None:
    assert tokenizer_of(program).digest == ByteTokenizer().digest
    bare = Program(program.path, program._session, program.metadata | {"tokenizer_files": None}, None)
    with pytest.raises(ProgramError, match="exported without a tokenizer"):
        tokenizer_of(bare)
    outside = program.metadata["tokenizer_files"] | {"../x": ""}
    with pytest.raises(ProgramError, match="which is not a plain file name"):
        tokenizer_of(Program(program.path, program._session, program.metadata | {"tokenizer_files": outside}, None))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"..": ""}, "which is not a plain file name"),
        ({"tokenizer.json": "no base64"}, "'tokenizer.json' of its tokenizer is malformed"),
        ({"tokenizer.json": 3}, "'tokenizer.json' of its tokenizer is malformed"),
        ({"tokenizer.json": packed(b"{}" * 99)[:-8]}, "'tokenizer.json' of its tokenizer is cut short"),
        ({"tokenizer.json": packed(b"{}")}, "holds no readable tokenizer"),
        ({"other": packed(b"{}")}, "holds no readable tokenizer"),
        ({name: packed(bytes(1 << 20)) for name in "ab"}, "have more than 1048577 bytes"),
    ],
)
def test_a_malformed_tokenizer_is_refused(
    files: dict[str, Any], said: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_program, "LARGEST_TOKENIZER", (1 << 20) + 1)
    with pytest.raises(ProgramError, match=said):
        tokenizer_of(Program(program.path, program._session, program.metadata | {"tokenizer_files": files}, None))


@pytest.mark.slow
def test_weights_beside_the_file_are_sealed(decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "LARGEST_FILE", 1000)
    path = tmp_path / "lm.onnx"
    program = export_language_model(decoder, path, [TEXT])
    (weights,) = tmp_path.glob("lm-*.data")
    assert set(tmp_path.iterdir()) == {path, weights}
    assert program.nbytes == path.stat().st_size + weights.stat().st_size
    assert weights.stat().st_size >= 4 * sum(p.numel() for p in decoder.parameters() if p.numel() >= 1024)
    expected = generate(decoder, ByteTokenizer(), PROMPTS, 8, temperature=0)
    assert generate(program, ByteTokenizer(), PROMPTS, 8, temperature=0) == expected
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ProgramError, match=r"lm-\w+\.data, which holds weights of lm.onnx, is missing or was changed"):
        Program.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_few_bits_match_their_simulation_in_every_runtime(
    bits: Any, decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch, rounds=3)
    recipe = WeightOnly(bits=bits, skip=("output",), min_sqnr_db=5)
    program = export_language_model(decoder, tmp_path / "few.onnx", [TEXT], recipe, tokenizer=ByteTokenizer())
    held = program.metadata["quantization"]
    assert held["kernels"] == {"MatMulNBits": 7}
    assert held["float_layers"] == ["decoder.tok_embeddings", "decoder.output"]
    assert program.metadata["parity"]["sqnr_db"] > 60
    cached, none = CachedDecoder(decoder), torch.zeros(1, dtype=torch.int64)
    inputs = (TEXT[:1], none, *cached.empty(1))
    recipe = WeightOnly(bits=bits, skip=("decoder.output",), min_sqnr_db=5)
    simulated = quantize(cached, recipe=recipe, example=inputs, dynamic=DYNAMIC)
    said = []
    for _ in range(12):
        logits, *past = simulated(*inputs)
        said.append(int(logits[0, :259].argmax()))
        inputs = (torch.tensor([said[-1:]]), none, *past)
    expected = [ByteTokenizer().decode(said)]
    assert generate(program, ByteTokenizer(), TEXT[:1], 12, temperature=0) == expected
    other = Program.load(program.path, runtime="openvino", threads=1)
    assert other.choice.sqnr_db is not None
    assert other.choice.sqnr_db > 30
    assert other.openvino_kernels()["FullyConnected", f"u{bits}"] == 7, "it multiplies by packed weights, too"
    assert generate(other, ByteTokenizer(), TEXT[:1], 12, temperature=0) == expected
    assert generate(other, ByteTokenizer(), PROMPTS, 12, temperature=0) == generate(
        program, ByteTokenizer(), PROMPTS, 12, temperature=0
    )


@pytest.mark.slow
def test_the_guide(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/language-models.md"))
    warm.run("example.py", cwd=tmp_path, timeout=600, check=True)
    assert Program.load(tmp_path / "lm.onnx").metadata["task"] == "language"


UNLIKE_LAYERS = {  # those of the others are alike: one stands for all
    "deepseek-v3-debug": {"layers": 2},
    "llama4-debug": {"layers": 2, "chunk": 8},
    "deptoe-debug": {"layers": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2-debug",
        "qwen3-debug",
        "deepseek-v3-debug",
        "llama4-debug",
        "qwen3-moe-debug",
        "sigma-moe-debug",
        "switch-head-debug",
        "deptoe-debug",
    ],
)
def test_programs_of_every_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=3)
    decoder = model(name, **UNLIKE_LAYERS.get(name, {}))
    program = export_language_model(decoder, tmp_path / "lm.onnx", [TEXT], tokenizer=ByteTokenizer())
    same_tokens(program, decoder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpt-debug", "switch-head-debug"])
def test_programs_with_low_precision_norms_are_quantized(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch, rounds=3)
    program = export_language_model(model(name, tied=False), tmp_path / "lm.onnx", [TEXT], Int8(min_sqnr_db=10))
    assert sum(program.metadata["quantization"]["integer_kernels"].values()) == 7
    assert program.metadata["parity"]["sqnr_db"] > 30


EXPERTS: dict[str, tuple[dict[str, Any], int]] = {  # fields, and quantized layers
    "qwen3-moe-debug": ({}, 4 + 3),  # attention, all experts
    "sigma-moe-debug": ({}, 4 + 2),
    "deptoe-debug": ({"layers": 2, "group": 1, "head_dim": 16}, 2 * (4 + 2)),  # in each run
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("qwen3-moe-debug", Int8(min_sqnr_db=10)), ("sigma-moe-debug", Int8(min_sqnr_db=10)), ("deptoe-debug", WeightOnly()),
    ],
    ids=["qwen3-int8", "sigma-int8", "deptoe-weightonly"],
)  # fmt: skip
def test_programs_of_experts_are_quantized(
    name: str, recipe: WeightOnly | Int8, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch, rounds=3)
    fields, maps = EXPERTS[name]
    decoder = model(name, moe={"experts": 4, "top_k": 2, "hidden": 32}, tied=False, **fields)
    program = export_language_model(decoder, tmp_path / "lm.onnx", [TEXT], recipe, tokenizer=ByteTokenizer())
    held = program.metadata["quantization"]
    assert "decoder.layers.0.feed_forward.router" in held["float_layers"]  # a changed choice is no rounding
    kernels = held["kernels" if isinstance(recipe, WeightOnly) else "integer_kernels"]
    assert sum(kernels.values()) == maps + 1  # the output
    assert program.metadata["parity"]["sqnr_db"] > 30
