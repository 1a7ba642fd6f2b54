"""Read question sets in their authors' layouts, and write them as prompts.

``arclight test --questions`` calls `read_questions`; `suite` calls `read_items`, `prompt` and `question`. Prompts are their authors': a change
makes scores incomparable. A new kind is an entry of `FORMS` here, and of `Format` and `MODES` in `suite_settings`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from arclight.text.data.sources import SourceError, rows
from arclight.text.evaluation import answers
from arclight.text.evaluation.suite_settings import MODES, Format, Mode
from arclight.text.multiple_choice import Question

_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a set, before it is worded as a prompt."""

    place: str
    """The file and row it comes from."""
    stem: str
    choices: tuple[str, ...] = ()
    """Texts to choose from; none if the answer is free."""
    answer: int = -1
    """Which of the choices is right."""
    solution: str = ""
    """Text of the right answer as an example shows it, with the way to it if the set has one."""
    final: str = ""
    """The right answer, as it is extracted from a generated text."""
    group: str = ""
    """Subject, category or sub-task; examples come from the question's own."""


class Form(NamedTuple):
    """Wording of a kind."""

    read: Callable[[Any], dict[str, Any]]
    """Turn a row into fields of `Item`; whatever it raises means that the row is of another kind."""
    stem: str = "Question: {}"
    cue: str = "Answer:"
    options: str = ""
    """Line above lettered choices."""


def read_items(path: Path, kind: Format) -> list[Item]:
    """Read the questions of a file, or of all files of a folder in the order of their names.

    Raises SourceError, with file and row, for what is not of this ``kind``; FileNotFoundError for a folder without questions.
    """
    form, items = FORMS[kind], []
    suffixes = {"bbh": (".json",), "math": (".json", ".jsonl", ".parquet")}.get(kind, (".jsonl", ".csv", ".parquet"))
    files = sorted(found for found in path.rglob("*") if found.suffix in suffixes) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} has no questions of {kind}: need files {', '.join(suffixes)}")
    for file in files:
        for place, row in _rows(file, kind):
            try:
                found = {"group": _group(file, kind)} | form.read(row)
                item = Item(place=place, **found)
                for text in (item.stem, *item.choices, item.solution, item.final):
                    text.encode()  # of JSON, which may hold half of a surrogate pair
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise SourceError(f"{place} is not a question of {kind}: {type(error).__name__} {error}") from error
            if item.choices and not 0 <= item.answer < len(item.choices):
                raise SourceError(f"{place}: answer {item.answer} of {len(item.choices)} choices")
            items.append(item)
    return items


def read_questions(path: str | Path, kind: Format) -> list[Question]:
    """Read questions to score by likelihood, zero-shot, in their kind's usual way.

    Raises ValueError for a kind that has only generated answers; as `read_items` for files of another kind.
    """
    if (mode := next((mode for mode in MODES[kind] if mode != "generate"), None)) is None:
        raise ValueError(f"{kind} has no choices to score: its answers are generated, by a suite")
    return [question(item, kind, mode) for item in read_items(Path(path), kind)]


def prompt(item: Item, kind: Format, mode: Mode, examples: Sequence[Item] = (), head: str = "") -> str:
    """Build the prompt before an answer: ``head``, ``examples`` with answers, the question."""
    shown = [_question_text(example, kind, mode) + " " + _answer_text(example, mode) for example in examples]
    return "\n\n".join([*([head] if head else []), *shown, _question_text(item, kind, mode)])


def question(item: Item, kind: Format, mode: Mode, examples: Sequence[Item] = (), head: str = "") -> Question:
    """Write a question with all its choices as texts that may follow."""
    texts = item.choices if mode == "cloze" else tuple(_LETTERS[: len(item.choices)])
    return Question(
        item.place, prompt(item, kind, mode, examples, head), tuple(f" {text}" for text in texts), item.answer
    )


def _question_text(item: Item, kind: Format, mode: Mode) -> str:
    form = FORMS[kind]
    lines = [form.stem.format(item.stem)]
    if item.choices and mode != "cloze":
        lines += [form.options] if form.options else []
        lines += [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, item.choices, strict=False)]
    return "\n".join([*lines, *([form.cue] if form.cue else [])])


def _answer_text(item: Item, mode: Mode) -> str:
    if mode == "generate":
        return item.solution or f"The answer is ({item.final})."
    return item.choices[item.answer] if mode == "cloze" else _LETTERS[item.answer]


# ----------------------------------------------------------------------------------------------------- files and rows


def _rows(file: Path, kind: Format) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".csv":
        yield from _csv(file)
    elif file.suffix == ".json":
        try:
            read = json.loads(file.read_text(encoding="utf-8-sig"))
        except (ValueError, UnicodeDecodeError) as error:
            raise SourceError(f"{file} is not valid JSON: {error}") from error
        if kind != "bbh":
            yield str(file), read
            return
        if not isinstance(read, dict) or not isinstance(read.get("examples"), list):
            raise SourceError(f"{file} is not a file of bbh: it has no list of examples")
        yield from ((f"{file}, example {number}", row) for number, row in enumerate(read["examples"], 1))
    elif kind == "piqa" and (labels := file.with_name(f"{file.stem}-labels.lst")).is_file():
        right = labels.read_text(encoding="utf-8-sig").split()
        found = list(rows(file))
        if len(right) != len(found):
            raise SourceError(f"{labels} has {len(right)} labels for the {len(found)} questions of {file}")
        yield from ((place, {**row, "label": label}) for (place, row), label in zip(found, right, strict=True))
    else:
        yield from rows(file)


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows of a CSV file: mappings if the first line names the columns, else lists.

    Empty lines are no rows.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} is not a CSV file in UTF-8: {error}") from error
    names = lines[0] if lines and "question" in lines[0] else None
    for number, line in enumerate(lines[1:] if names else lines, 2 if names else 1):
        place = f"{path}, row {number}"
        if names and line and len(line) != len(names):
            raise SourceError(f"{place} has {len(line)} columns, the first row names {len(names)}")
        if line:
            yield place, dict(zip(names, line, strict=True)) if names else line


def _group(file: Path, kind: Format) -> str:
    """Return the group of questions by a file's name, or "".

    It is anatomy of MMLU's anatomy_test.csv, navigate of BBH's navigate.json.
    """
    if kind == "bbh" or (kind == "mmlu" and file.suffix == ".csv"):
        return re.sub(r"_(test|dev|val)$", "", file.stem)
    return ""


def _hellaswag(row: Any) -> dict[str, Any]:
    for name in ("activity_label", "ctx_a", "ctx_b"):
        if not isinstance(row[name], str):
            raise ValueError(f"{name} is not a text: {row[name]!r}")
    endings = tuple(map(_without_marks, _texts(row["endings"])))
    if len(endings) < 2:
        raise ValueError(f"need 2 endings or more, got {len(endings)}")
    stem = _without_marks(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return {"stem": stem, "choices": endings, "answer": _number(row["label"])}


def _without_marks(text: str) -> str:
    """Remove marks such as [title] and [step] from WikiHow's articles (HellaSwag).

    They stand for the end of a heading.
    """
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))).strip()


def _labelled(row: Any) -> dict[str, Any]:
    """Read a row of ARC or CommonsenseQA, nested as published or in columns."""
    nested = isinstance(row["question"], dict)
    stem = row["question"]["stem"] if nested else row["question"]
    choices = row["question"]["choices"] if nested else row["choices"]
    if isinstance(choices, dict):
        texts = _texts(choices["text"])
        choices = [{"label": label, "text": text} for label, text in zip(choices["label"], texts, strict=True)]
    answer = [choice["label"] for choice in choices].index(row["answerKey"])
    return _chosen(stem, [choice["text"] for choice in choices], answer)


def _mmlu(row: Any) -> dict[str, Any]:
    if isinstance(row, list):
        stem, *choices, answer = row
        subject = {}
    else:
        stem, answer = row["question"], row["answer"]
        choices = row["choices"] if "choices" in row else [row[letter] for letter in "ABCD"]
        subject = {"group": row["subject"]} if row.get("subject") else {}
    number = _LETTERS.index(answer) if answer in [*_LETTERS] else _number(answer)
    return _chosen(stem.strip(), choices, number) | subject


def _mmlu_pro(row: Any) -> dict[str, Any]:
    """Read a row of MMLU-Pro without its options N/A, which fill up to ten.

    The right answer's letter counts those that are left.
    """
    options, letter, given = _texts(row["options"]), row["answer"], row["answer_index"]
    if letter not in [*_LETTERS] or isinstance(given, bool) or _LETTERS.index(letter) != given:
        raise ValueError(f"answer {letter!r}, answer_index {given!r}")
    if options[given] == "N/A":
        raise ValueError(f"the right answer, {letter}, is N/A")
    answer = given - options[:given].count("N/A")
    worked = (row.get("cot_content") or "").removeprefix("A: ").strip()
    worked = worked.replace(f"answer is ({letter})", f"answer is ({_LETTERS[answer]})")
    choices = [option for option in options if option != "N/A"]
    return _chosen(row["question"], choices, answer) | {"group": row["category"], "solution": worked}


def _chosen(stem: str, choices: Any, answer: int) -> dict[str, Any]:
    texts = _texts(choices)
    if not isinstance(stem, str) or not 2 <= len(texts) <= len(_LETTERS):
        raise ValueError(f"need a text and 2 to {len(_LETTERS)} choices, got {stem!r} and {len(texts)}")
    final = _LETTERS[answer] if 0 <= answer < len(texts) else ""
    return {"stem": stem, "choices": texts, "answer": answer, "final": final}


def _texts(choices: Any) -> tuple[str, ...]:
    """Return choices as they are; a text by itself would pass for a list of its letters."""
    if not isinstance(choices, list | tuple):
        raise ValueError(f"need a list of texts, got {choices!r}")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise ValueError(f"choice {number} is not a text: {choice!r}")
    return tuple(choices)


def _number(label: Any) -> int:
    """Return the number of a choice, which some of the authors' files write as digits in a text."""
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label)
    raise ValueError(f"need the number of the right choice, got {label!r}")


def _piqa(row: Any) -> dict[str, Any]:
    return {"stem": row["goal"].strip(), "choices": _texts((row["sol1"], row["sol2"])), "answer": _number(row["label"])}


def _bbh(row: Any) -> dict[str, Any]:
    return {"stem": row["input"].strip(), "final": row["target"].strip(), "solution": row["target"].strip()}


def _gsm8k(row: Any) -> dict[str, Any]:
    if (final := answers.after_hashes(row["answer"])) is None:
        raise ValueError("the answer has no number behind ####")
    return {"stem": row["question"].strip(), "solution": row["answer"].strip(), "final": final}


def _math(row: Any) -> dict[str, Any]:
    if (final := answers.boxed(row["solution"])) is None:
        raise ValueError(r"the solution has no \boxed{answer}")
    return {"stem": row["problem"].strip(), "solution": row["solution"].strip(), "final": final, "group": row["type"]}


def read_head(path: Path, group: str) -> str:
    """Read the text before a group's questions.

    Of BBH's prompts it is what follows the line of dashes. Raises FileNotFoundError if a folder has no file of the
    group.
    """
    file = path / f"{group}.txt" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: a folder of prompts has a file for each group")
    text = file.read_text(encoding="utf-8-sig")
    return re.split(r"^-{5,}\s*$", text, maxsplit=1, flags=re.MULTILINE)[-1].strip()


FORMS: dict[str, Form] = {
    "hellaswag": Form(_hellaswag, "{}", ""),
    "arc": Form(_labelled),
    "mmlu": Form(_mmlu, "{}"),
    "mmlu-pro": Form(_mmlu_pro, options="Options:"),
    "commonsenseqa": Form(_labelled),
    "piqa": Form(_piqa),
    "bbh": Form(_bbh, "Q: {}", "A:"),
    "gsm8k": Form(_gsm8k),
    "math": Form(_math, "Problem:\n{}", "Solution:"),
}
