"""Multiple choice: published formats become questions, and scores are those of a model computed by hand."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arclight.fabric.errors import MisconfigurationError
from arclight.text import ByteTokenizer
from arclight.text.data.sources import SourceError
from arclight.text.evaluation.questions import read_questions
from arclight.text.multiple_choice import Question, choice_batches, score_choices

HELLASWAG = {
    "ind": 4,
    "activity_label": "Removing ice from car",
    "ctx_a": "Then, the man writes over the snow [header] on the window.",
    "ctx_b": "then",
    "ctx": "unused",
    "endings": [", he adds wax.", " [substeps] he  stops.", "he sleeps.", "he runs."],
    "label": "3",
}
ARC = {
    "id": "Mercury_1",
    "question": {
        "stem": "Which is hot?",
        "choices": [{"text": "ice", "label": "1"}, {"text": "the sun", "label": "2"}, {"text": "snow", "label": "3"}],
    },
    "answerKey": "2",
}
TOKENIZER = ByteTokenizer()


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def parquet(path: Path, *records: dict[str, Any]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(list(records)), path)
    return path


def test_hellaswag(tmp_path: Path) -> None:
    (question,) = read_questions(lines(tmp_path / "a.jsonl", HELLASWAG), "hellaswag")
    assert question == Question(
        f"{tmp_path / 'a.jsonl'}, line 1",
        "Removing ice from car: Then, the man writes over the snow on the window. Then",
        (" , he adds wax.", " he stops.", " he sleeps.", " he runs."),
        3,
    )
    assert read_questions(parquet(tmp_path / "a.parquet", HELLASWAG), "hellaswag")[0][1:] == question[1:]


def test_arc_nested_or_in_columns(tmp_path: Path) -> None:
    columns = {
        "question": "Which is hot?",
        "choices": {"text": ["ice", "the sun", "snow"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    nested = read_questions(lines(tmp_path / "a.jsonl", ARC), "arc")
    flat = read_questions(parquet(tmp_path / "a.parquet", columns), "arc")
    assert nested[0][1:] == flat[0][1:] == ("Question: Which is hot?\nAnswer:", (" ice", " the sun", " snow"), 1)


def test_mmlu_as_lines_of_csv_or_columns(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerow(["What, exactly,\nis 1 + 1?", "1", "2", "3", "4", "B"])
    with (tmp_path / "b.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["question", "A", "B", "C", "D", "answer"], ["What, exactly,\nis 1 + 1?", 1, 2, 3, 4, "B"]]
        )
    columns = {"question": "What, exactly,\nis 1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1}
    found = [
        read_questions(path, "mmlu")[0][1:]
        for path in (tmp_path / "a.csv", tmp_path / "b.csv", parquet(tmp_path / "a.parquet", columns))
    ]
    expected = ("What, exactly,\nis 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", (" A", " B", " C", " D"), 1)
    assert found == [expected] * 3


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({**HELLASWAG, "label": "4"}, "hellaswag", "line 1: answer 4 of 4 choices"),
        ({**HELLASWAG, "label": ""}, "hellaswag", "line 1 is not a question of hellaswag: ValueError"),
        ({"question": "x"}, "arc", "line 1 is not a question of arc: KeyError 'choices'"),
        ({**ARC, "answerKey": "9"}, "arc", "line 1 is not a question of arc"),
        ({"question": "x", "choices": ["a", "b"], "answer": None}, "mmlu", "line 1 is not a question of mmlu"),
    ],
)
def test_rows_of_another_kind_are_named(tmp_path: Path, record: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_questions(lines(tmp_path / "a.jsonl", record), kind)


def questions(count: int, seed: int = 0) -> list[Question]:
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> str:
        return " " + "".join(rng.choice([*"abcdé "], rng.integers(low, high)))

    return [
        Question(str(n), text(1, 30), tuple(text(2, 12) for _ in range(rng.integers(2, 5))), int(rng.integers(0, 2)))
        for n in range(count)
    ]


def by_hand(table: np.ndarray, question: Question) -> list[float]:
    """log P(choice | context) of a model that knows the token before only, one token at a time, in float64."""
    values = []
    for choice in question.choices:
        context, scored = [256, *question.context.encode()], list(choice.encode())
        total = 0.0
        for before, token in zip([context[-1], *scored], scored, strict=False):
            weights = np.exp(table[before] - table[before].max())
            total += math.log(weights[token] / weights.sum())
        values.append(total)
    return values


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_scores_are_those_computed_by_hand(batch_size: int) -> None:
    table = np.random.default_rng(1).normal(size=(259, 259)) * 2
    asked = questions(40)
    found = score_choices(asked, lambda tokens: torch.tensor(table)[tokens], TOKENIZER, batch_size=batch_size)
    expected = [by_hand(table, question) for question in asked]
    for left, right in zip(found.log_likelihoods, expected, strict=True):
        assert left == pytest.approx(right, abs=1e-9)
    best = [int(np.argmax(values)) for values in expected]
    each = [
        int(
            np.argmax(
                [value / len(choice.strip().encode()) for value, choice in zip(values, question.choices, strict=True)]
            )
        )
        for values, question in zip(expected, asked, strict=True)
    ]
    assert found.correct == sum(b == question.answer for b, question in zip(best, asked, strict=True))
    assert found.correct_normalised == sum(b == question.answer for b, question in zip(each, asked, strict=True))
    assert found.accuracy == found.correct / 40
    assert found.correct != found.correct_normalised  # else this says little


def test_longer_choices_are_not_at_a_disadvantage_once_normalised() -> None:
    """With equal probability for every token the shortest wins by its sum, and bytes make all equal."""
    asked = [Question("", "x", (" aaaa", " a"), 0)]
    found = score_choices(asked, lambda tokens: torch.zeros(*tokens.shape, 259), TOKENIZER)
    assert found.log_likelihoods[0] == pytest.approx([-5 * math.log(259), -2 * math.log(259)])
    assert (found.correct, found.correct_normalised) == (0, 1)


def test_long_contexts_lose_their_beginning() -> None:
    asked = [Question("q", "abcdefgh", (" yes", " no"), 0)]
    batches = list(choice_batches(asked, TOKENIZER, max_length=6, batch_size=1))
    texts = {
        int(batch["choices"]): (
            TOKENIZER.decode(batch["tokens"][0].tolist()),
            TOKENIZER.decode(batch["labels"][batch["labels"] >= 0].tolist()),
        )
        for batch in batches
    }
    assert texts == {0: ("fgh ye", " yes"), 1: ("efgh n", " no")}
    with pytest.raises(MisconfigurationError, match="q: choice 0 has 4 tokens"):
        list(choice_batches(asked, TOKENIZER, max_length=3))


def test_no_questions_score_nothing() -> None:
    found = score_choices([], lambda tokens: tokens, TOKENIZER)
    assert (found.accuracy, found.accuracy_normalised, found.questions) == (0.0, 0.0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_has_no_score(value: float) -> None:
    asked = [Question("file, row 1", "x", (" a", " b"), 0)]
    with pytest.raises(FloatingPointError, match="file, row 1: the log-likelihood of choice 0 is NaN"):
        score_choices(asked, lambda tokens: torch.full((*tokens.shape, 259), value), TOKENIZER)


def test_a_tie_is_no_answer() -> None:
    asked = [Question(str(n), "x", (" a", " b", " c"), n % 3) for n in range(6)]
    found = score_choices(asked, lambda tokens: torch.zeros(*tokens.shape, 259), TOKENIZER)
    assert (found.correct, found.correct_normalised) == (0, 0)
