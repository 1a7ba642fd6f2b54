"""Verbs of a run that trained a language model: write text, answer questions, export weights."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.cli.arguments import Parser, UsageError, check_program_name, check_writable, write_json
from arclight.cli.quantization import parse_quantization
from arclight.cli.runs import checkpoint_of, described, run_folder
from arclight.cli.style import working
from arclight.deploy.settings import Quantization, calibration_batches

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.text import LanguageModel, Tokenizer
    from arclight.text.model.decoder import Decoder


WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def trained_language(words: list[str]) -> bool:
    """Return True if the first word names a run (or a checkpoint in one) of a language model."""
    if not words or words[0].startswith("-"):
        return False
    run = run_folder(Path(words[0]))
    return run is not None and (run / "tokenizer").is_dir()


def names_program(words: list[str]) -> bool:
    """Return True if the first word names the program of a language model."""
    if not words or not words[0].endswith(".onnx") or not Path(words[0]).is_file():
        return False
    from arclight.deploy.programs.metadata import unseal

    return unseal(Path(words[0]))[0].get("task") == "language"


def load_run(path: Path) -> LanguageModel:
    """Load a run's best checkpoint, or the checkpoint ``path``, with the run's tokenizer; standard error says which."""
    from arclight.text import LanguageModel, Tokenizer

    run = run_folder(path)
    assert run is not None
    checkpoint = checkpoint_of(path)
    model: LanguageModel = LanguageModel.load_from_checkpoint(checkpoint)
    print(described(checkpoint), file=sys.stderr)
    model.use_tokenizer(Tokenizer.load(run / "tokenizer"))
    return model.eval()


def _load(path: Path) -> tuple[Decoder | Program, Tokenizer]:
    """Load what generates text, a run or a program, and its tokenizer."""
    if path.suffix == ".onnx":
        from arclight.deploy import Program
        from arclight.text.language_program import tokenizer_of

        program = Program.load(path)
        return program, tokenizer_of(program)
    model = load_run(path)
    return model.model, model.tokenizer


def predict(arguments: list[str]) -> None:
    """Let a trained model go on with texts, shown as they are written."""
    parser = Parser(prog="arclight predict", description="Generate text with a language model.")
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run folder (its best checkpoint), a checkpoint, or a program (.onnx)"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt; may be repeated (default: standard input)",
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="maximum number of new tokens (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 for greedy decoding (default: %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the most likely tokens with this total probability (default: %(default)s)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop at this text; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the texts to this file")
    options = parser.parse_args(arguments)
    from arclight.text import generate

    model, tokenizer = _load(options.run)
    texts = []
    for prompt in options.prompt or [sys.stdin.read()]:
        try:
            written = generate(
                model, tokenizer, prompt, max_new_tokens=options.tokens, temperature=options.temperature, top_k=options.top_k,
                top_p=options.top_p, stop=options.stop, seed=options.seed, stream=True,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(prompt, end="", flush=True)
        pieces = []
        for piece in written:
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        texts.append({"prompt": prompt, "text": "".join(pieces)})
    write_json(options.json, texts, escaped=False)


def answer(arguments: list[str]) -> None:
    """Measure a trained model on multiple-choice questions."""
    parser = Parser(prog="arclight test", description="Evaluate a language model on multiple-choice questions.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder (its best checkpoint) or a checkpoint")
    parser.add_argument(
        "--questions", type=Path, required=True, metavar="FILE", help="questions, as .jsonl, .csv or .parquet"
    )
    parser.add_argument("--format", choices=("hellaswag", "arc", "mmlu"), required=True, help="format of the questions")
    parser.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="choices per batch (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)

    import torch

    from arclight.text.multiple_choice import read_questions, score_choices

    model = load_run(options.run)
    questions = read_questions(options.questions, options.format)
    with torch.inference_mode():
        scores = score_choices(
            questions,
            model,
            model.tokenizer,
            batch_size=options.batch_size,
            max_length=model.model.config.max_positions,
        )
    chance = sum(1 / len(question.choices) for question in questions) / max(1, len(questions))
    values = {
        "questions": scores.questions, "accuracy": scores.accuracy, "accuracy_normalised": scores.accuracy_normalised, "chance": chance,
    }  # fmt: skip
    print(
        f"{scores.questions} questions: {scores.accuracy:.1%} right, {scores.accuracy_normalised:.1%} where likelihoods are counted "
        f"for each byte; guessing gives {chance:.1%}"
    )
    write_json(options.json, values)


def export(arguments: list[str]) -> None:
    """Write a trained model as a Hugging Face folder or as a float32 program."""
    options = _parser("export", "Write a trained language model for other programs.").parse_args(arguments)
    kind = options.format or ("onnx" if options.out.suffix == ".onnx" else "hf")
    if kind == "onnx":
        return _program(options, None)
    if options.out.suffix in WEIGHT_FILES:
        raise UsageError(
            f"--out {options.out}: for Hugging Face a folder is written; call it {options.out.with_suffix('')}"
        )
    check_writable(options.out, "--out")
    from arclight.text import to_hf

    model = load_run(options.run)
    to_hf(model.model, options.out, tokenizer=model.tokenizer)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"wrote {options.out}: {size / 1e6:.1f} MB, opens with transformers.AutoModelForCausalLM.from_pretrained")
    return None


def quantize(arguments: list[str]) -> None:
    """Write a trained model as a quantized program, by default of int8, calibrated on its training text."""
    parser = _parser("quantize", "Quantize a language model, by default to int8, calibrated on its training text.")
    _program(*parse_quantization(parser, arguments))


def _parser(verb: str, about: str) -> Parser:
    parser = Parser(prog=f"arclight {verb}", description=about)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder (its best checkpoint) or a checkpoint")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="file to write (.onnx)" + ", or folder (hf)" * (verb == "export"),
    )
    if verb == "export":
        parser.add_argument("--format", choices=("hf", "onnx"), help="default: onnx if --out ends in .onnx, else hf")
    return parser


def _program(options: Namespace, recipe: Quantization | None) -> None:
    from itertools import islice

    check_program_name(options.out)
    from arclight.deploy.parity import parity_summary, speed_summary
    from arclight.text import TextDataModule
    from arclight.text.deployment import export_language_model

    model = load_run(options.run)
    run = run_folder(options.run)
    assert run is not None
    kept = model.settings.data.cache or run.parent.parent / "data"  # where training has left its tokens
    data = TextDataModule(dataclasses.replace(model.settings.data, cache=kept))
    data.prepare_data()
    data.setup("fit")
    batches = [batch["tokens"] for batch in islice(data.train_dataloader(), calibration_batches(recipe))]
    with working(
        f"{'exporting' if recipe is None else 'quantizing'} {model.settings.model} and comparing the program with it"
    ):
        program = export_language_model(model, options.out, batches, recipe)
    size = f"{program.nbytes / 1e6:.1f} MB with cache and tokenizer, for up to {model.config.max_positions} tokens"
    proof = parity_summary(program.metadata) + speed_summary(program.metadata)
    print(f"wrote {options.out}: {program.precision}, {size}, {proof}")
