"""Generate text with a language model's run or program, or score its answers to questions.

`predict` (the verb) calls `names_program` and `predict`, and `evaluate` calls `answer` for ``arclight test RUN --suite`` or ``--questions``.
Generated text goes to standard output as it comes, scores as a table. Options and the keys of ``--json`` stay.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, add_runtime, add_trust, report_runtime, trusted, write_json
from arclight.cli.runs import load_language_model
from arclight.text.evaluation.suite_settings import MODES

if TYPE_CHECKING:
    from arclight.deploy import Program
    from arclight.text import Tokenizer
    from arclight.text.model.decoder import Decoder


def names_program(words: list[str]) -> bool:
    """Return True if the first word names a language model's program, by its metadata."""
    if not words or words[0].startswith("-"):
        return False
    path = Path(words[0])
    if path.suffix == ".onnx" and path.is_file():
        from arclight.deploy.programs.metadata import unseal

        return unseal(path)[0].get("task") == "language"
    from arclight.deploy.programs.folder import description

    return bool((description(path) or {}).get("task") == "language")


def _load(path: Path, trusted: list[str] | None, runtime: Any) -> tuple[Decoder | Program, Tokenizer]:
    """Load the model of a run, or a program, and its tokenizer."""
    from arclight.deploy.programs.folder import description

    if path.suffix == ".onnx" or description(path) is not None:
        from arclight.deploy import Program
        from arclight.text.language_program import tokenizer_of

        program = report_runtime(Program.load(path, trusted=trusted, runtime=runtime), runtime)
        return program, tokenizer_of(program)
    if trusted is not None:
        raise UsageError(f"--trust is about programs, and {path} is a run, which is not signed: export it first")
    if runtime is not None:
        raise UsageError(f"--runtime is about programs, and {path} is a run, which PyTorch computes: export it first")
    model = load_language_model(path)
    return model.model, model.tokenizer


def predict(arguments: list[str]) -> None:
    """Continue texts with a trained model, printing tokens as they are generated."""
    parser = Parser(prog="arclight predict", description="Generate text with a language model.")
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run folder (its best checkpoint), a checkpoint, or a program (a folder or .onnx)",
    )
    add_trust(parser)
    add_runtime(parser)
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
    from arclight.deploy import Program
    from arclight.text import generate

    model, tokenizer = _load(options.run, trusted(options), options.runtime)
    ran = {"runtime": model.runtime} if isinstance(model, Program) else {}
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
        texts.append({"prompt": prompt, "text": "".join(pieces), **ran})
    write_json(options.json, texts, escaped=False)


def answer(arguments: list[str]) -> None:
    """Measure a trained model on one file of multiple-choice questions, or on a suite."""
    parser = Parser(prog="arclight test", description="Evaluate a language model on questions.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder (its best checkpoint) or a checkpoint")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--suite", type=Path, metavar="FILE", help="a suite of question sets (.toml or .yaml)")
    group.add_argument("--questions", type=Path, metavar="FILE", help="one set: a .jsonl, .csv or .parquet file")
    formats = [kind for kind, modes in MODES.items() if modes != ("generate",)]
    parser.add_argument("--format", choices=formats, help="of --questions: their format")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="choices per batch (default: 16, or what the suite says)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)
    if options.suite is not None:
        return _suite(options)
    if options.format is None:
        raise UsageError(f"--questions needs --format: {', '.join(formats)}")
    import torch

    from arclight.text.evaluation.questions import read_questions
    from arclight.text.multiple_choice import score_choices

    model = load_language_model(options.run)
    questions = read_questions(options.questions, options.format)
    with torch.inference_mode():
        scores = score_choices(
            questions,
            model,
            model.tokenizer,
            batch_size=options.batch_size or 16,
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
    return None


def _suite(options: Namespace) -> None:
    import rich
    from rich.table import Table

    from arclight.text.evaluation.suite import load_suite, run_suite

    if options.format is not None:
        raise UsageError("--format belongs to --questions: a suite says the kind of each of its sets")
    suite, tasks = load_suite(options.suite)  # before the model: what is wrong with a file shows at once
    if options.batch_size is not None:
        suite = dataclasses.replace(suite, batch_size=options.batch_size)
    model = load_language_model(options.run)
    scores = run_suite(suite, tasks, model.model, model.tokenizer)
    table = Table("task", "mode", "shots", "questions", "right", "per byte", "no answer", "guessing")
    for score in scores:
        shares = (score.accuracy_normalised, score.unanswered, score.chance)
        table.add_row(
            score.name, score.mode, str(score.shots), f"{score.questions:,}", f"{score.accuracy:.1%} ± {score.stderr:.1%}",
            *("-" if share is None else f"{share:.1%}" for share in shares),
        )  # fmt: skip
    rich.print(table)
    write_json(options.json, {score.name: score.facts() for score in scores})
