"""Score multiple-choice questions by the likelihood of their choices.

``arclight test --questions`` and `evaluation.suite` call `score_choices` with questions and a function from token ids (B, T) to logits
(B, T, V); `evaluation.questions` makes each `Question`. Scores are compared with ``acc`` and ``acc_norm`` of EleutherAI's evaluation harness
(Gao 2021, "Multiple Choice Normalization in LM Evaluation"): sums over tokens and the division by bytes must stay, and so must ties that
count as wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from arclight.data.token_samples import IGNORED
from arclight.fabric.errors import MisconfigurationError
from arclight.text.data.tokenizer import Tokenizer


class Question(NamedTuple):
    """A context and the texts that may follow it."""

    id: str
    """The file and row it comes from."""
    context: str
    choices: tuple[str, ...]
    """Each begins with the space that separates it from the context."""
    answer: int
    """Which of the choices is right."""

    def per_byte(self, log_likelihoods: Sequence[float]) -> list[float]:
        """Divide each choice's log-likelihood by the bytes of its text, stripped of spaces."""
        lengths = [len(choice.strip().encode()) or 1 for choice in self.choices]
        return [value / length for value, length in zip(log_likelihoods, lengths, strict=True)]


class Scores(NamedTuple):
    """Numbers of right answers, and the likelihoods behind them."""

    questions: int
    correct: int
    """Questions whose right choice alone had the greatest log-likelihood; a tie does not count."""
    correct_normalised: int
    """The same by log-likelihood per byte, see `Question.per_byte`."""
    log_likelihoods: list[list[float]]
    """Log-likelihood of each choice of each question: the sum over its tokens, natural logarithm."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions if self.questions else 0.0

    @property
    def accuracy_normalised(self) -> float:
        return self.correct_normalised / self.questions if self.questions else 0.0


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

    Log-likelihoods are summed in float32 or better. See `choice_batches` for the rest. Raises FloatingPointError if one is
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
        correct += is_best(values, question.answer)
        normalised += is_best(question.per_byte(values), question.answer)
    return Scores(len(questions), correct, normalised, likelihoods)


def is_best(values: Sequence[float], answer: int) -> bool:
    """Return True if a choice alone has the greatest value; a tie is no answer."""
    return values[answer] == max(values) and values.count(values[answer]) == 1
