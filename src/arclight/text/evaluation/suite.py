"""Evaluate a suite on a language model: likelihoods, generated answers, bootstrap errors.

``arclight test RUN --suite FILE`` and the callback `SuiteEvaluation` call `load_suite`, then `run_suite`. Scores are compared with
published ones: prompts (`evaluation.questions`), rules of extraction (`evaluation.answers`) and texts that end generation here are each
benchmark's own and stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.modules import evaluating
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.evaluation import answers, questions
from arclight.text.evaluation.questions import Item
from arclight.text.evaluation.suite_settings import Suite, SuiteTask, read_suite
from arclight.text.generation import generate
from arclight.text.model.decoder import Decoder
from arclight.text.multiple_choice import is_best, score_choices


class LoadedTask(NamedTuple):
    """A task of a suite with its questions read and checked."""

    task: SuiteTask
    items: list[Item]
    examples: dict[str, list[Item]]
    """Few-shot examples of each group."""
    heads: dict[str, str]
    """Text before the questions of each group."""


class Outcome(NamedTuple):
    """Result of one question."""

    number: int
    """Index among the task's questions."""
    correct: bool
    normalised: bool
    """Correct by likelihood per byte of the choice; for generated answers the same as ``correct``."""
    answered: bool
    """Whether an answer could be extracted."""


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Scores of one task, in [0, 1]."""

    name: str
    format: str
    mode: str
    shots: int
    questions: int
    accuracy: float
    stderr: float
    """Standard error of the accuracy, from the bootstrap."""
    interval: tuple[float, float]
    """Percentile interval of the bootstrap."""
    accuracy_normalised: float | None = None
    """By log-likelihood per byte of the choice; None for generated answers."""
    stderr_normalised: float | None = None
    unanswered: float | None = None
    """Share of generated answers without an extractable answer, which count as wrong."""
    chance: float | None = None
    """Accuracy of guessing; None without choices."""
    groups: dict[str, float] = field(default_factory=dict)
    """Accuracy of each group; empty if there is one."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def load_suite(path: Path) -> tuple[Suite, list[LoadedTask]]:
    """Read a suite with all of its files, so that errors are raised before the model answers.

    Raises RecipeError, FileNotFoundError, SourceError (with file and row), and MisconfigurationError for too few examples.
    """
    suite = read_suite(path)
    return suite, [_read(task) for task in suite.tasks]


def _read(task: SuiteTask) -> LoadedTask:
    items = questions.read_items(task.questions, task.format)
    if not items:
        raise MisconfigurationError(f"{task.questions} of {task.title} has no questions")
    if task.limit is not None and task.limit < len(items):
        items = [items[number * len(items) // task.limit] for number in range(task.limit)]
    groups = {item.group for item in items}
    found: dict[str, list[Item]] = defaultdict(list)
    if task.examples is not None and task.shots:
        for item in questions.read_items(task.examples, task.format):
            found[item.group].append(item)
        for group in groups:
            if len(found[group]) < task.shots:
                of_group = f" of {group}" if group else ""
                raise MisconfigurationError(
                    f"{task.examples} has {len(found[group])} examples{of_group}; shots = {task.shots} of {task.title}: "
                    "add examples, or lower shots"
                )
    heads = {} if task.prompt is None else {group: questions.read_head(task.prompt, group) for group in groups}
    return LoadedTask(task, items, {group: found[group][: task.shots] for group in groups}, heads)


def run_suite(
    suite: Suite, tasks: Sequence[LoadedTask], model: Decoder, tokenizer: Tokenizer, *, share: tuple[int, int] = (0, 1),
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> list[TaskScore]:  # fmt: skip
    """Score ``model`` on every task of a suite that `load_suite` has read.

    share: (i, n) if n processes each hold the whole model: this one answers every n-th question from i on, and ``gather`` returns
    the objects of all. With a sharded model all processes have the share (0, 1) and compute the same. The model is in evaluation
    mode meanwhile, and generation is greedy. Raises FloatingPointError for likelihoods or logits that are NaN. If a process
    fails, all raise: the first that failed its own error, the others RuntimeError with its text.
    """
    scores = []
    with evaluating(model), torch.no_grad():
        for loaded in tasks:
            own = range(len(loaded.items))[share[0] :: share[1]]
            answer = _answer_by_generation if loaded.task.way == "generate" else _answer_by_likelihood
            outcomes = _gather(loaded, partial(answer, loaded, own, suite, model, tokenizer), share[0], gather)
            scores.append(_score(loaded, sorted(outcomes), suite))
    return scores


def _gather(
    loaded: LoadedTask, answer: Callable[[], Iterator[Outcome]], rank: int, gather: Callable[[Any], list[Any]]
) -> list[Outcome]:
    """Gather the outcomes of all processes, or raise on all of them.

    If only one raised, the others would wait for it.
    """
    outcomes: list[Outcome] = []
    raised: Exception | None = None
    try:
        outcomes = list(answer())
    except Exception as error:
        raised = error
    parts = gather((outcomes, None if raised is None else f"{type(raised).__name__}: {raised}"))
    for number, (_, problem) in enumerate(parts):
        if problem is not None:
            if raised is not None and number == rank:
                raise raised
            raise RuntimeError(f"rank {number} could not answer {loaded.task.title}: {problem}") from raised
    return [outcome for part, _ in parts for outcome in part]


def _answer_by_likelihood(
    loaded: LoadedTask, own: Sequence[int], suite: Suite, model: Decoder, tokenizer: Tokenizer
) -> Iterator[Outcome]:
    def logits(tokens_BT: Tensor) -> Tensor:
        out = model(tokens_BT)
        return out.full_tensor() if isinstance(out, DTensor) else out

    task = loaded.task
    written = [
        questions.question(item, task.format, task.way, loaded.examples[item.group], loaded.heads.get(item.group, ""))
        for item in (loaded.items[number] for number in own)
    ]
    found = score_choices(
        written, logits, tokenizer, batch_size=suite.batch_size, max_length=model.config.max_positions,
        device=next(model.parameters()).device,
    )  # fmt: skip
    for number, question, values in zip(own, written, found.log_likelihoods, strict=True):
        yield Outcome(
            number, is_best(values, question.answer), is_best(question.per_byte(values), question.answer), True
        )


def _answer_by_generation(
    loaded: LoadedTask, own: Sequence[int], suite: Suite, model: Decoder, tokenizer: Tokenizer
) -> Iterator[Outcome]:
    """Generate answers greedily; prompts that are too long lose examples, then their beginning."""
    task = loaded.task
    extract, stop = _GENERATED[task.format]
    same = answers.same_mathematics if task.format == "math" else str.__eq__
    room = model.config.max_positions - task.new_tokens
    if room < 1:
        raise MisconfigurationError(
            f"new_tokens = {task.new_tokens} of {task.title} leave no room for a prompt: the model has {model.config.max_positions} positions; "
            "lower new_tokens"
        )
    bos = tokenizer.bos is not None
    prompts = []
    for item in (loaded.items[number] for number in own):
        shots = loaded.examples[item.group]
        for left_out in range(len(shots) + 1):
            text = questions.prompt(item, task.format, task.way, shots[left_out:], loaded.heads.get(item.group, ""))
            ids = tokenizer.encode(text, bos=bos)
            if len(ids) <= room:
                break
        prompts.append(ids[-room:])
    by_length = sorted(range(len(own)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(own), suite.batch_size):
        batch = by_length[first : first + suite.batch_size]
        texts = generate(
            model, tokenizer, [prompts[number] for number in batch], task.new_tokens, temperature=0, stop=stop
        )
        for number, text in zip(batch, texts, strict=True):
            item = loaded.items[own[number]]
            final = extract(text, item)
            correct = final is not None and same(final, item.final)
            yield Outcome(own[number], correct, correct, final is not None)


def _letter(text: str, item: Item) -> str | None:
    return answers.letter(text, len(item.choices))


_LETTER = (_letter, "Question:")
_GENERATED: dict[str, tuple[Callable[[str, Item], str | None], str]] = {
    "arc": _LETTER, "commonsenseqa": _LETTER, "mmlu-pro": _LETTER, "mmlu": (_letter, "\n\n"),
    "bbh": (lambda text, _: answers.after_answer_is(text), "Q:"), "gsm8k": (lambda text, _: answers.after_hashes(text), "Question:"),
    "math": (lambda text, _: answers.boxed(text), "Problem:"),
}  # fmt: skip
"""By format of a task: the rule that extracts the final answer, and the text that ends generation (a next question)."""


def bootstrap(
    correct: int, count: int, resamples: int, confidence: float, generator: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Return standard error and percentile interval of ``correct / count``, by bootstrap.

    Questions are resampled. The number of correct answers among ``count`` drawn with replacement is binomial, so it is
    drawn directly (Efron & Tibshirani 1993).
    """
    shares: npt.NDArray[np.float64] = generator.binomial(count, correct / count, resamples) / count
    low, high = np.quantile(shares, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(shares.std()), (float(low), float(high))


def _score(loaded: LoadedTask, outcomes: Sequence[Outcome], suite: Suite) -> TaskScore:
    count, likelihood = len(outcomes), loaded.task.way != "generate"
    generator = np.random.default_rng(suite.seed)
    correct = sum(outcome.correct for outcome in outcomes)
    error, interval = bootstrap(correct, count, suite.resamples, suite.confidence, generator)
    normalised = sum(outcome.normalised for outcome in outcomes)
    by_group: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        by_group[loaded.items[outcome.number].group].append(outcome.correct)
    choices = [len(item.choices) for item in loaded.items]
    return TaskScore(
        name=loaded.task.title, format=loaded.task.format, mode=loaded.task.way, shots=loaded.task.shots, questions=count,
        accuracy=correct / count, stderr=error, interval=interval,
        accuracy_normalised=normalised / count if likelihood else None,
        stderr_normalised=bootstrap(normalised, count, suite.resamples, suite.confidence, generator)[0] if likelihood else None,
        unanswered=None if likelihood else sum(not outcome.answered for outcome in outcomes) / count,
        chance=sum(1 / number for number in choices) / count if all(choices) else None,
        groups={name: sum(found) / len(found) for name, found in sorted(by_group.items())} if len(by_group) > 1 else {},
    )  # fmt: skip
