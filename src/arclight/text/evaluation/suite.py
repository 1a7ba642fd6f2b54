"""Run an evaluation suite on a language model: likelihoods and generated answers, with bootstrap errors."""

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
    """A task of a suite with its questions, read and checked."""

    task: SuiteTask
    items: list[Item]
    examples: dict[str, list[Item]]
    """The shots of each group."""
    heads: dict[str, str]
    """The text before each group's questions."""


class Outcome(NamedTuple):
    """Answer to one question."""

    number: int
    correct: bool
    normalised: bool
    """Right by likelihood per byte; as ``correct`` for generated answers."""
    answered: bool
    """Whether an answer could be extracted."""


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Scores of one task, as shares in [0, 1]."""

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
    """Share of generated answers from which nothing could be extracted, which count as wrong."""
    chance: float | None = None
    """Accuracy of guessing; None where there is nothing to choose from."""
    groups: dict[str, float] = field(default_factory=dict)
    """Accuracy of each group; empty where there is one."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def load_suite(path: Path) -> tuple[Suite, list[LoadedTask]]:
    """Read a suite with all of its files, so that what is wrong in any shows before the first answer.

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
                    f"{task.examples} has {len(found[group])} examples{of_group}; shots = {task.shots} of {task.title}"
                )
    heads = {} if task.prompt is None else {group: questions.read_head(task.prompt, group) for group in groups}
    return LoadedTask(task, items, {group: found[group][: task.shots] for group in groups}, heads)


def run_suite(
    suite: Suite, asked: Sequence[LoadedTask], model: Decoder, tokenizer: Tokenizer, *, share: tuple[int, int] = (0, 1),
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> list[TaskScore]:  # fmt: skip
    """Score ``model`` on every task of a suite that `load_suite` has read.

    share: (i, n) of n processes that each hold the whole model: this one answers every n-th question from i on, and ``gather`` collects
    objects of all. Where the model is sharded, all processes have the share (0, 1) and compute the same. Modules are in evaluation
    mode meanwhile, and random numbers are not drawn. Raises FloatingPointError for likelihoods or logits that are NaN; where a
    process fails, all end with the error of the first that did: itself as it was, the others with RuntimeError.
    """
    scores = []
    with evaluating(model), torch.no_grad():
        for one in asked:
            own = range(len(one.items))[share[0] :: share[1]]
            answer = _generated if one.task.way == "generate" else _likelihoods
            outcomes = _of_all(one, partial(answer, one, own, suite, model, tokenizer), share[0], gather)
            scores.append(_score(one, sorted(outcomes), suite))
    return scores


def _of_all(
    one: LoadedTask, answer: Callable[[], Iterator[Outcome]], rank: int, gather: Callable[[Any], list[Any]]
) -> list[Outcome]:
    """Gather what all processes answered, or raise on all of them: one that left would keep the others waiting."""
    outcomes: list[Outcome] = []
    raised: Exception | None = None
    try:
        outcomes = list(answer())
    except Exception as error:
        raised = error
    parts = gather((outcomes, None if raised is None else f"{type(raised).__name__}: {raised}"))
    for number, (_, said) in enumerate(parts):
        if said is not None:
            if raised is not None and number == rank:
                raise raised
            raise RuntimeError(f"rank {number} could not answer {one.task.title}: {said}") from raised
    return [outcome for part, _ in parts for outcome in part]


def _likelihoods(
    one: LoadedTask, own: Sequence[int], suite: Suite, model: Decoder, tokenizer: Tokenizer
) -> Iterator[Outcome]:
    def logits(tokens_BT: Tensor) -> Tensor:
        out = model(tokens_BT)
        return out.full_tensor() if isinstance(out, DTensor) else out

    task = one.task
    written = [
        questions.question(item, task.format, task.way, one.examples[item.group], one.heads.get(item.group, ""))
        for item in (one.items[number] for number in own)
    ]
    found = score_choices(
        written, logits, tokenizer, batch_size=suite.batch_size, max_length=model.config.max_positions,
        device=next(model.parameters()).device,
    )  # fmt: skip
    for number, question, values in zip(own, written, found.log_likelihoods, strict=True):
        yield Outcome(
            number, is_best(values, question.answer), is_best(question.per_byte(values), question.answer), True
        )


def _generated(
    one: LoadedTask, own: Sequence[int], suite: Suite, model: Decoder, tokenizer: Tokenizer
) -> Iterator[Outcome]:
    """Answer greedily; prompts that are too long lose examples, then their beginning."""
    task = one.task
    extract, stop = _GENERATED[task.format]
    same = answers.same_mathematics if task.format == "math" else str.__eq__
    room = model.config.max_positions - task.new_tokens
    if room < 1:
        raise MisconfigurationError(
            f"new_tokens = {task.new_tokens} of {task.title} leave no room for a prompt: the model has {model.config.max_positions} positions"
        )
    bos = tokenizer.bos is not None
    prompts = []
    for item in (one.items[number] for number in own):
        shots = one.examples[item.group]
        for left_out in range(len(shots) + 1):
            text = questions.prompt(item, task.format, task.way, shots[left_out:], one.heads.get(item.group, ""))
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
            item = one.items[own[number]]
            said = extract(text, item)
            right = said is not None and same(said, item.final)
            yield Outcome(own[number], right, right, said is not None)


def _letter(text: str, item: Item) -> str | None:
    return answers.letter(text, len(item.choices))


_LETTER = (_letter, "Question:")
_GENERATED: dict[str, tuple[Callable[[str, Item], str | None], str]] = {
    "arc": _LETTER, "commonsenseqa": _LETTER, "mmlu-pro": _LETTER, "mmlu": (_letter, "\n\n"),
    "bbh": (lambda text, _: answers.after_answer_is(text), "Q:"), "gsm8k": (lambda text, _: answers.after_hashes(text), "Question:"),
    "math": (lambda text, _: answers.boxed(text), "Problem:"),
}  # fmt: skip
"""Rule that extracts the final answer, and the beginning of a next question, which ends a text."""


def bootstrap(
    correct: int, count: int, resamples: int, confidence: float, generator: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Return the standard error of the share ``correct / count`` and its percentile interval, by resampling the questions.

    Of ``count`` answers drawn with replacement a binomial number is right, so that is drawn instead (Efron & Tibshirani 1993).
    """
    shares: npt.NDArray[np.float64] = generator.binomial(count, correct / count, resamples) / count
    low, high = np.quantile(shares, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(shares.std()), (float(low), float(high))


def _score(one: LoadedTask, outcomes: Sequence[Outcome], suite: Suite) -> TaskScore:
    count, likelihood = len(outcomes), one.task.way != "generate"
    generator = np.random.default_rng(suite.seed)
    right = sum(outcome.correct for outcome in outcomes)
    error, interval = bootstrap(right, count, suite.resamples, suite.confidence, generator)
    normalised = sum(outcome.normalised for outcome in outcomes)
    by_group: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        by_group[one.items[outcome.number].group].append(outcome.correct)
    choices = [len(item.choices) for item in one.items]
    return TaskScore(
        name=one.task.title, format=one.task.format, mode=one.task.way, shots=one.task.shots, questions=count,
        accuracy=right / count, stderr=error, interval=interval,
        accuracy_normalised=normalised / count if likelihood else None,
        stderr_normalised=bootstrap(normalised, count, suite.resamples, suite.confidence, generator)[0] if likelihood else None,
        unanswered=None if likelihood else sum(not outcome.answered for outcome in outcomes) / count,
        chance=sum(1 / number for number in choices) / count if all(choices) else None,
        groups={name: sum(found) / len(found) for name, found in sorted(by_group.items())} if len(by_group) > 1 else {},
    )  # fmt: skip
