"""Read labelled rows and make batches of them.

`build_head` makes a `HeadData` for the Trainer. In: JSON lines or Parquet through `data.sources`, or SQuAD's JSON; out: token ids with
labels, -100 where none is asked for. `HeadData.labels` sorts labels by name: their order is that of the head's rows in checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from arclight.data.token_samples import IGNORED
from arclight.fabric.errors import MisconfigurationError
from arclight.text.data.sources import SourceError, rows
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.heads.squad import Window, windows
from arclight.trainer import DataModule


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Files of a task, and how their rows become batches."""

    kind: Literal["sequence", "token", "answer"]
    train: Path
    val: Path
    max_length: int
    batch_size: int
    workers: int = 0
    stride: int = 128
    """Tokens from the start of one window of a context to the next."""
    max_answer: int = 30
    """Tokens of an answer, at most."""


class LabelledRow(NamedTuple):
    """A text, or the words of one, with its label or labels."""

    place: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]


class QuestionRow(NamedTuple):
    """A question about a context, with its true answers."""

    place: str
    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """Empty in SQuAD 2.0 if the context has no answer."""
    start: int
    """Place of the first answer in the context, in characters; -1 without one."""


def read_texts(path: Path) -> list[LabelledRow]:
    """Read rows with ``text``, ``label`` and, optionally, ``text_pair``.

    Raises SourceError, with the line, for other rows.
    """
    found = []
    for place, row in _checked(path, {"text": str, "label": (str, int)}):
        pair = row.get("text_pair")
        found.append(
            LabelledRow(place, (row["text"],) if pair is None else (row["text"], str(pair)), (str(row["label"]),))
        )
    return found


def read_words(path: Path) -> list[LabelledRow]:
    """Read rows with ``tokens``, words, and as many ``tags``.

    Raises SourceError, with the line, for other rows.
    """
    found = []
    for place, row in _checked(path, {"tokens": list, "tags": list}):
        words, tags = tuple(map(str, row["tokens"])), tuple(map(str, row["tags"]))
        if len(words) != len(tags) or not all(words):
            raise SourceError(f"{place}: {len(words)} tokens, of which none may be empty, and {len(tags)} tags")
        found.append(LabelledRow(place, words, tags))
    return found


def _checked(path: Path, fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, row in rows(path):
        for name, kind in fields.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise SourceError(f"{place}: need the fields {', '.join(fields)}; {name} is missing or of another type")
        yield place, row


def read_squad(path: Path) -> list[QuestionRow]:
    """Read the questions of a SQuAD file, 1.1 or 2.0.

    Raises SourceError, naming the question, for what is none.
    """
    place = str(path)
    try:
        found = []
        for article in json.loads(path.read_text(encoding="utf-8-sig"))["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    place, context, answers = (
                        f"{path}, question {question['id']}",
                        paragraph["context"],
                        question["answers"],
                    )
                    for answer in answers:
                        begin = answer["answer_start"]
                        if context[begin : begin + len(answer["text"])] != answer["text"]:
                            raise ValueError(f"{answer['text']!r} is not at {begin} of its context")
                    if not answers and not question.get("is_impossible", False):
                        raise ValueError("it has no answers: add one, or mark it with is_impossible")
                    texts = tuple(answer["text"] for answer in answers)
                    start = answers[0]["answer_start"] if answers else -1
                    found.append(
                        QuestionRow(place, question["id"], question["question"].strip(), context, texts, start)
                    )
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{place} is not laid out as SQuAD is: {type(error).__name__} {error}") from error


class Sequences(Dataset[dict[str, Tensor]]):
    """Data set of token sequences with labels for each token.

    ``rows`` are the numbers of the rows they come from.
    """

    def __init__(self, samples: Sequence[tuple[int, list[int], list[int]]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row, tokens, labels = self.samples[number]
        return {
            "tokens": torch.tensor(tokens), "labels": torch.tensor(labels), "rows": torch.tensor(row), "items": torch.tensor(number),
        }  # fmt: skip


def collate(group: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate sequences, padded on the right: ``tokens`` (B, T), ``labels``, ``lengths`` (B,).

    ``tokens`` are padded with 0, ``labels`` (B, T) with -100.
    """
    length = max(len(one["tokens"]) for one in group)
    tokens = torch.zeros(len(group), length, dtype=torch.int64)
    labels = torch.full((len(group), length), IGNORED, dtype=torch.int64)
    for number, one in enumerate(group):
        tokens[number, : len(one["tokens"])] = one["tokens"]
        labels[number, : len(one["labels"])] = one["labels"]
    stacked = {name: torch.stack([one[name] for one in group]) for name in ("rows", "items")}
    return {
        "tokens": tokens, "labels": labels, "lengths": torch.tensor([len(one["tokens"]) for one in group]), **stacked,
    }  # fmt: skip


class HeadData(DataModule):
    """Data module of a head: rows of a task's files, tokenized.

    Raises SourceError for rows of another kind when they are first read.
    """

    def __init__(self, task: HeadRows, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.task, self.tokenizer = task, tokenizer
        if task.kind == "answer" and tokenizer.pieces is None:
            raise MisconfigurationError(
                "extracted answers need a tokenizer whose tokens are bytes of the text (byte-level BPE, or bytes); this one's are not"
            )

    @cached_property
    def train_rows(self) -> list[Any]:
        return self._read(self.task.train)

    @cached_property
    def val_rows(self) -> list[Any]:
        found = self._read(self.task.val)
        for row in found if self.task.kind != "answer" else ():
            if unknown := sorted(set(row.labels) - set(self.labels)):
                raise SourceError(
                    f"{row.place}: {self.task.train} has no label {unknown[0]!r}, but {', '.join(self.labels)}"
                )
        return found

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """All labels of the training rows, in the order of their names; start and end of an answer."""
        if self.task.kind == "answer":
            return ("start", "end")
        return tuple(sorted({label for row in self.train_rows for label in row.labels}))

    def _read(self, path: Path) -> list[Any]:
        readers: dict[str, Callable[[Path], list[Any]]] = {
            "sequence": read_texts,
            "token": read_words,
            "answer": read_squad,
        }
        found = readers[self.task.kind](path)
        if not found:
            raise SourceError(f"{path} has no rows")
        return found

    @cached_property
    def val_windows(self) -> list[Window]:
        return self._windows(self.val_rows)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows, shuffle=False)

    test_dataloader = val_dataloader

    def _loader(self, found: list[Any], shuffle: bool) -> DataLoader[Any]:
        sequences: list[tuple[int, list[int], list[int]]] = []
        if self.task.kind == "answer":
            for window in self.val_windows if found is self.val_rows else self._windows(found):
                labels = [IGNORED] * len(window.tokens)
                labels[window.start] = 0
                labels[window.end] = 1 if window.end != window.start else 2  # start and end are one token
                sequences.append((window.row, window.tokens, labels))
        else:
            encode = self._text if self.task.kind == "sequence" else self._words
            sequences = [(number, *encode(row)) for number, row in enumerate(found)]
        return DataLoader(
            Sequences(sequences),
            self.task.batch_size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=self.task.workers,
        )

    def _begin(self) -> list[int]:
        return [] if self.tokenizer.bos is None else [self.tokenizer.bos]

    def _text(self, row: LabelledRow) -> tuple[list[int], list[int]]:
        ids = [*self._begin(), *self.tokenizer.encode("\n".join(row.texts))][: self.task.max_length]
        if not ids:
            raise SourceError(f"{row.place}: the text is empty, and the tokenizer has no token that begins one")
        return ids, [*[IGNORED] * (len(ids) - 1), self.labels.index(row.labels[0])]

    def _words(self, row: LabelledRow) -> tuple[list[int], list[int]]:
        """Encode words; a word's label is at its last token.

        Before that a causal model has seen all of the word.
        """
        ids = self._begin()
        labels = [IGNORED] * len(ids)
        for word, tag in zip(row.texts, row.labels, strict=True):
            new = self.tokenizer.encode(f" {word}")
            ids, labels = ids + new, [*labels, *[IGNORED] * (len(new) - 1), self.labels.index(tag)]
        return ids[: self.task.max_length], labels[: self.task.max_length]

    def _windows(self, found: list[QuestionRow]) -> list[Window]:
        task, made = self.task, []
        for number, row in enumerate(found):
            prefix = [*self._begin(), *self.tokenizer.encode(f"{row.question}\n")]
            context = self.tokenizer.encode(row.context)
            sizes = [int(self.tokenizer.token_bytes[token]) for token in context]
            if sum(sizes) != len(row.context.encode()):
                raise SourceError(f"{row.place}: the tokenizer changes the text, so that places in it are lost")
            answer = None
            if row.answers:
                begin = len(row.context[: row.start].encode())
                answer = (begin, begin + len(row.answers[0].encode()))
            try:
                made += windows(number, prefix, context, sizes, answer, task.max_length, task.stride)
            except ValueError as error:
                raise SourceError(f"{row.place}: {error}") from error
        return made
