"""Score multiple-choice questions by likelihood: HellaSwag, ARC and MMLU from local files."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from arclight.data.token_samples import IGNORED
from arclight.fabric.errors import MisconfigurationError
from arclight.text.data.sources import SourceError, rows
from arclight.text.data.tokenizer import Tokenizer

Format = Literal["hellaswag", "arc", "mmlu"]
_LETTERS = "ABCDEFGHIJ"


class Question(NamedTuple):
    """A context and the texts that may follow it."""

    id: str
    """The file and row it comes from."""
    context: str
    choices: tuple[str, ...]
    """Each begins with the space that separates it from the context."""
    answer: int
    """Which of the choices is right."""


class Scores(NamedTuple):
    """Answers of a model, as counts that several processes can add."""

    questions: int
    correct: int
    """Where the right choice alone had the greatest log-likelihood: a tie is no answer."""
    correct_normalised: int
    """Where it alone had the greatest for each byte of its text."""
    log_likelihoods: list[list[float]]
    """Of each choice of each question: the sum over its tokens, natural logarithm."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions if self.questions else 0.0

    @property
    def accuracy_normalised(self) -> float:
        return self.correct_normalised / self.questions if self.questions else 0.0


def read_questions(path: str | Path, kind: Format) -> list[Question]:
    """Read the questions of a .jsonl, .csv or .parquet file, as their authors published them.

    hellaswag (Zellers et al. 2019): activity_label, ctx_a, ctx_b, endings, label. arc (Clark et al. 2018): question and
    choices, nested or as columns, answerKey. mmlu (Hendrycks et al. 2021): columns question, choices, answer, or CSV
    rows without a header: question, four choices, letter; the choices are shown, and their letters are what is scored.
    Raises SourceError for a row that is not of this kind.
    """
    path = Path(path)
    read = {"hellaswag": _hellaswag, "arc": _arc, "mmlu": _mmlu}[kind]
    questions = []
    for place, row in _csv(path) if path.suffix == ".csv" else rows(path):
        try:
            question = Question(place, *read(row))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise SourceError(f"{place} is no question of {kind}: {type(error).__name__} {error}") from error
        if not 0 <= question.answer < len(question.choices):
            raise SourceError(f"{place}: answer {question.answer} of {len(question.choices)} choices")
        questions.append(question)
    return questions


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows as tables where the first line names the columns, as lists where it does not."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    names = lines[0] if lines and "question" in lines[0] else None
    for number, line in enumerate(lines[1:] if names else lines, 2 if names else 1):
        yield f"{path}, row {number}", dict(zip(names, line, strict=True)) if names else line


def _hellaswag(row: Any) -> tuple[str, tuple[str, ...], int]:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _without_marks(context), tuple(" " + _without_marks(text) for text in row["endings"]), int(row["label"])


def _without_marks(text: str) -> str:
    """WikiHow's articles have marks such as [title] and [step], which stand for the end of a heading."""
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))).strip()


def _arc(row: Any) -> tuple[str, tuple[str, ...], int]:
    nested = isinstance(row["question"], dict)
    stem = row["question"]["stem"] if nested else row["question"]
    choices = row["question"]["choices"] if nested else row["choices"]
    if isinstance(choices, dict):
        choices = [
            {"label": label, "text": text} for label, text in zip(choices["label"], choices["text"], strict=True)
        ]
    labels = [choice["label"] for choice in choices]
    return f"Question: {stem}\nAnswer:", tuple(f" {c['text']}" for c in choices), labels.index(row["answerKey"])


def _mmlu(row: Any) -> tuple[str, tuple[str, ...], int]:
    if isinstance(row, list):
        question, *choices, answer = row
    else:
        question, answer = row["question"], row["answer"]
        choices = row["choices"] if "choices" in row else [row[letter] for letter in "ABCD"]
    if len(choices) < 2 or len(choices) > len(_LETTERS):
        raise ValueError(f"{len(choices)} choices")
    number = answer if isinstance(answer, int) else _LETTERS.index(answer) if answer in [*_LETTERS] else int(answer)
    shown = "".join(f"{letter}. {choice}\n" for letter, choice in zip(_LETTERS, choices, strict=False))
    return f"{question.strip()}\n{shown}Answer:", tuple(f" {letter}" for letter in _LETTERS[: len(choices)]), number


class _Row(NamedTuple):
    question: int
    choice: int
    context: list[int]
    scored: list[int]


def choice_batches(
    questions: Sequence[Question], tokenizer: Tokenizer, *, batch_size: int = 16, max_length: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Batch every choice behind its context, rows of similar length together.

    A batch: ``tokens`` (B, T) int64, filled up on the right; ``labels`` (B, T), -100 but where a token of the choice is
    predicted; ``questions`` and ``choices`` (B,), the numbers of both. Contexts longer than ``max_length`` allows lose
    their beginning. Raises MisconfigurationError for a choice that is longer by itself.
    """
    start = [] if tokenizer.bos is None else [tokenizer.bos]
    found = []
    for number, question in enumerate(questions):
        context = start + tokenizer.encode(question.context)
        for choice, text in enumerate(question.choices):
            scored = tokenizer.encode(text)
            room = len(context) if max_length is None else max_length + 1 - len(scored)
            if room < 1 or not scored or not context:
                raise MisconfigurationError(
                    f"{question.id}: choice {choice} has {len(scored)} tokens, with at least one before them; {max_length} fit"
                )
            found.append(_Row(number, choice, context[-room:], scored))
    found.sort(key=lambda row: len(row.context) + len(row.scored), reverse=True)
    for first in range(0, len(found), batch_size):
        yield _batch(found[first : first + batch_size], tokenizer.pad or 0)


def _batch(group: list[_Row], pad: int) -> dict[str, torch.Tensor]:
    length = len(group[0].context) + len(group[0].scored) - 1
    tokens = torch.full((len(group), length), pad, dtype=torch.int64)
    labels = torch.full((len(group), length), IGNORED, dtype=torch.int64)
    for number, row in enumerate(group):
        ids = torch.tensor(row.context + row.scored)
        tokens[number, : len(ids) - 1] = ids[:-1]
        labels[number, len(row.context) - 1 : len(ids) - 1] = ids[len(row.context) :]
    return {
        "tokens": tokens,
        "labels": labels,
        "questions": torch.tensor([row.question for row in group]),
        "choices": torch.tensor([row.choice for row in group]),
    }


@torch.no_grad()
def score_choices(
    questions: Sequence[Question],
    logits: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: Tokenizer,
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    device: torch.device | str = "cpu",
) -> Scores:
    """Score every choice by a model: ``logits`` gives (B, T, V) for token ids (B, T).

    Log-likelihoods are summed in float32 or better. See `choice_batches` for the rest. Raises FloatingPointError where one is
    NaN: such a model has no answers that could be counted.
    """
    likelihoods = [[0.0] * len(question.choices) for question in questions]
    for batch in choice_batches(questions, tokenizer, batch_size=batch_size, max_length=max_length):
        labels = batch["labels"].to(device)
        found = logits(batch["tokens"].to(device))
        found = found if found.dtype == torch.float64 else found.float()
        losses = torch.nn.functional.cross_entropy(
            found.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        sums = -losses.view_as(labels).sum(1)
        for question, choice, value in zip(
            batch["questions"].tolist(), batch["choices"].tolist(), sums.tolist(), strict=True
        ):
            if math.isnan(value):
                raise FloatingPointError(
                    f"{questions[question].id}: the log-likelihood of choice {choice} is NaN: the model's weights or inputs are broken"
                )
            likelihoods[question][choice] = value
    correct = normalised = 0
    for question, values in zip(questions, likelihoods, strict=True):
        lengths = [len(choice.strip().encode()) or 1 for choice in question.choices]
        each = [value / length for value, length in zip(values, lengths, strict=True)]
        correct += _is_best(values, question.answer)
        normalised += _is_best(each, question.answer)
    return Scores(len(questions), correct, normalised, likelihoods)


def _is_best(values: list[float], answer: int) -> bool:
    return values[answer] == max(values) and values.count(values[answer]) == 1
