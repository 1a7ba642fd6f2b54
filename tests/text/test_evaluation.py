"""Suites: authors' layouts, prompts, extraction, likelihoods beside transformers, bootstrap errors, runs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import Ranks
from tests.text.test_language_model import SMALL, fit

from arclight.fabric.errors import MisconfigurationError
from arclight.recipe import RecipeError
from arclight.text import ByteTokenizer, build_model, from_hf
from arclight.text.data.sources import SourceError
from arclight.text.evaluation import answers
from arclight.text.evaluation.questions import FORMS, Item, prompt, question, read_head, read_items, read_questions
from arclight.text.evaluation.suite import bootstrap, load_suite, run_suite
from arclight.text.evaluation.suite_settings import MODES, Evaluation, SuiteTask
from arclight.text.settings import LanguageTask

TOKENIZER = ByteTokenizer()
CSQA: dict[str, Any] = {
    "answerKey": "B", "id": "1", "question": {"question_concept": "cat", "stem": "Where does a cat sleep?",
    "choices": [{"label": label, "text": text} for label, text in zip("ABCDE", ("sky", "mat", "sea", "sun", "ice"), strict=True)]},
}  # fmt: skip
PRO: dict[str, Any] = {
    "question_id": 70, "question": "What is 1 + 1?", "options": ["1", "2", "3", "N/A"], "answer": "B", "answer_index": 1,
    "cot_content": "A: Let's think step by step. 1 + 1 = 2. The answer is (B).", "category": "math", "src": "x",
}  # fmt: skip
HELLA: dict[str, Any] = {
    "activity_label": "Ice", "ctx_a": "A man.", "ctx_b": "then", "endings": ["a", "b", "c", "d"], "label": 1,
}  # fmt: skip
GSM = {"question": "Two cats and 1,000 dogs?", "answer": "2 + 1000 = <<2+1000=1002>>1,002\n#### 1,002"}
MATH = {"problem": "What is $1/2$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}


def small(**options: Any) -> Any:
    return build_model("llama3-debug", vocab_size=264, **SMALL | options)


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)))
    return path


# ---------------------------------------------------------------------------------------------------- authors' layouts


def test_commonsenseqa_and_mmlu_pro(tmp_path: Path) -> None:
    (item,) = read_items(lines(tmp_path / "dev_rand_split.jsonl", CSQA), "commonsenseqa")
    assert (item.stem, item.choices[1], item.answer) == ("Where does a cat sleep?", "mat", 1)
    (pro,) = read_items(lines(tmp_path / "test.jsonl", PRO), "mmlu-pro")
    assert (pro.choices, pro.group, pro.final) == (("1", "2", "3"), "math", "B")
    assert pro.solution.startswith("Let's think")


def test_mmlu_pro_counts_the_right_answer_without_options_that_are_none(tmp_path: Path) -> None:
    """By hand: of N/A, 1, N/A, 2, 3 the answer D is the second that is left, B."""
    record = {
        **PRO,
        "options": ["N/A", "1", "N/A", "2", "3"],
        "answer": "D",
        "answer_index": 3,
        "cot_content": "A: 1 + 1 = 2. The answer is (D).",
    }
    (item,) = read_items(lines(tmp_path / "a.jsonl", record), "mmlu-pro")
    assert (item.choices, item.answer, item.final) == (("1", "2", "3"), 1, "B")
    assert item.solution == "1 + 1 = 2. The answer is (B)."


def test_labels_are_whole_numbers_or_their_digits(tmp_path: Path) -> None:
    for label in (1, "1"):
        piqa = {"goal": "a", "sol1": "b", "sol2": "c", "label": label}
        mmlu = {"question": "a", "choices": ["x", "y"], "answer": label}
        for kind, record in (("hellaswag", {**HELLA, "label": label}), ("piqa", piqa), ("mmlu", mmlu)):
            (item,) = read_items(lines(tmp_path / "a.jsonl", record), cast(Any, kind))
            assert item.answer == 1


def test_piqa_takes_labels_from_the_file_beside(tmp_path: Path) -> None:
    records = [{"goal": f"Goal {n}", "sol1": "a", "sol2": "b"} for n in range(3)]
    path = lines(tmp_path / "valid.jsonl", *records)
    (tmp_path / "valid-labels.lst").write_text("1\n0\n1\n")
    assert [item.answer for item in read_items(path, "piqa")] == [1, 0, 1]
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    with pytest.raises(SourceError, match="has 2 labels for the 3 questions"):
        read_items(path, "piqa")


def test_bbh_folder_with_its_prompts(tmp_path: Path) -> None:
    (tmp_path / "bbh").mkdir()
    for name in ("navigate", "snarks"):
        examples = [{"input": f"{name}?", "target": "(A)"}]
        (tmp_path / "bbh" / f"{name}.json").write_text(json.dumps({"canary": "x", "examples": examples}))
    items = read_items(tmp_path / "bbh", "bbh")
    assert [(item.group, item.final) for item in items] == [("navigate", "(A)"), ("snarks", "(A)")]
    (tmp_path / "navigate.txt").write_text(
        "BENCHMARK DATA\ncanary GUID\n-----\nSay where.\n\nQ: a\nA: So the answer is No.\n"
    )
    head = read_head(tmp_path, "navigate")
    assert head.startswith("Say where.")
    (tmp_path / "marked.txt").write_text("Say where.", encoding="utf-8-sig")
    assert read_head(tmp_path, "marked") == "Say where."
    assert prompt(items[0], "bbh", "generate", head=head).endswith("is No.\n\nQ: navigate?\nA:")
    with pytest.raises(FileNotFoundError, match=r"snarks\.txt does not exist"):
        read_head(tmp_path, "snarks")


def test_math_folders_and_gsm8k(tmp_path: Path) -> None:
    (tmp_path / "algebra").mkdir()
    (tmp_path / "algebra" / "1.json").write_text(json.dumps(MATH))
    (item,) = read_items(tmp_path, "math")
    assert (item.final, item.group, item.place) == (r"\frac{1}{2}", "Algebra", str(tmp_path / "algebra" / "1.json"))
    (grade,) = read_items(lines(tmp_path / "gsm" / "test.jsonl", GSM), "gsm8k")
    assert grade.final == "1002"


def test_mmlu_folder_of_subjects(tmp_path: Path) -> None:
    for name in ("anatomy_test", "virology_test"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerow(["Q?", "1", "2", "3", "4", "B"])
    assert [item.group for item in read_items(tmp_path, "mmlu")] == ["anatomy", "virology"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"question,A,B,C,D,answer\nQ?,1,2,3,4,B\nQ?,1,2\n", "row 3 has 3 columns, the first row names 6"),
        ("Q\u00e9?,1,2,3,4,B\n".encode("latin-1"), "a.csv is not a CSV file in UTF-8"),
        (b"Q?," + b"1" * 200_000 + b",2,3,4,B\n", "a.csv is not a CSV file in UTF-8: field larger"),
    ],
)
def test_broken_csv_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_items(tmp_path / "a.csv", "mmlu")


@pytest.mark.parametrize("names", ["", "question,A,B,C,D,answer\n"])
def test_csv_files_may_begin_with_a_mark_and_end_with_empty_lines(tmp_path: Path, names: str) -> None:
    (tmp_path / "a.csv").write_text(f"{names}Q?,1,2,3,4,B\n\n", encoding="utf-8-sig")
    (item,) = read_items(tmp_path / "a.csv", "mmlu")
    assert (item.stem, item.choices, item.answer) == ("Q?", ("1", "2", "3", "4"), 1)


@pytest.mark.parametrize("kind", MODES)
def test_files_of_another_kind_are_refused_by_file_and_line(tmp_path: Path, kind: Any) -> None:
    name = "a.json" if kind in ("bbh", "math") else "a.jsonl"
    other = {"examples": [{"prompt": "x"}]} if kind == "bbh" else {"text": "x"}
    where = {"bbh": "example 1", "math": "a.json"}.get(kind, "line 1")
    with pytest.raises(SourceError, match=rf"{where} is not a question of {kind}"):
        read_items(lines(tmp_path / name, other), kind)


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({**PRO, "answer": "C"}, "mmlu-pro", "answer 'C', answer_index 1"),
        ({**PRO, "options": ["1", "N/A"], "answer": "A", "answer_index": 0}, "mmlu-pro", "2 to 10 choices"),
        ({**CSQA, "answerKey": "Z"}, "commonsenseqa", "line 1 is not a question"),
        ({**GSM, "answer": "2"}, "gsm8k", "no number behind ####"),
        ({**MATH, "solution": "2"}, "math", "no .boxed"),
        ({"goal": "a", "sol1": "b", "sol2": "c"}, "piqa", "KeyError 'label'"),
        ({"goal": "a", "sol1": "b", "sol2": "c", "label": 2}, "piqa", "answer 2 of 2 choices"),
        ([1], "gsm8k", "line 1 is not a question of gsm8k"),
        ({**GSM, "question": "\ud800"}, "gsm8k", "line 1 is not a question of gsm8k: UnicodeEncodeError"),
        (
            {**CSQA, "question": {**CSQA["question"], "stem": "\ud800"}},
            "commonsenseqa",
            "line 1 is not a question of commonsenseqa: UnicodeEncodeError",
        ),
        ({**HELLA, "endings": [], "label": 0}, "hellaswag", "need 2 endings or more, got 0"),
        ({**HELLA, "endings": ["x"], "label": 0}, "hellaswag", "need 2 endings or more, got 1"),
        ({**HELLA, "activity_label": None}, "hellaswag", "activity_label is not a text: None"),
        ({**PRO, "answer": "D", "answer_index": 3}, "mmlu-pro", r"line 1 is not .*the right answer, D, is N/A"),
        ({**PRO, "answer_index": True}, "mmlu-pro", r"line 1 is not .*answer_index True"),
        ({**PRO, "answer": "", "answer_index": 0}, "mmlu-pro", r"line 1 is not .*answer ''"),
        ({**PRO, "options": "12"}, "mmlu-pro", r"line 1 is not .*need a list of texts, got '12'"),
        ({**PRO, "options": ["1", "2", None]}, "mmlu-pro", r"line 1 is not .*choice 2 is not a text: None"),
        (
            {"question": "a", "choices": "wxyz", "answer": 1},
            "mmlu",
            r"line 1 is not .*need a list of texts, got 'wxyz'",
        ),
        (
            {"question": "a", "choices": ["x", None], "answer": 0},
            "mmlu",
            r"line 1 is not .*choice 1 is not a text: None",
        ),
        ({"question": "a", "choices": ["x", "y"], "answer": True}, "mmlu", r"line 1 is not .*got True"),
        ({"question": "a", "choices": ["x", "y"], "answer": 0.0}, "mmlu", r"line 1 is not .*got 0\.0"),
        (
            {"question": "a", "choices": {"label": "AB", "text": "xy"}, "answerKey": "A"},
            "arc",
            r"line 1 is not .*got 'xy'",
        ),
        ({**HELLA, "label": 1.7}, "hellaswag", r"line 1 is not .*got 1\.7"),
        ({**HELLA, "label": "1_0"}, "hellaswag", r"line 1 is not .*got '1_0'"),
        ({**HELLA, "label": True}, "hellaswag", r"line 1 is not .*got True"),
        ({**HELLA, "endings": "abcd"}, "hellaswag", r"line 1 is not .*need a list of texts, got 'abcd'"),
        ({"goal": "a", "sol1": "b", "sol2": "c", "label": 0.5}, "piqa", r"line 1 is not .*got 0\.5"),
        ({"goal": "a", "sol1": "b", "sol2": "c", "label": True}, "piqa", r"line 1 is not .*got True"),
        ({"goal": "a", "sol1": "b", "sol2": None, "label": 0}, "piqa", r"line 1 is not .*choice 1 is not a text: None"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, record: Any, kind: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_items(lines(tmp_path / "a.jsonl", record), kind)


# ------------------------------------------------------------------------------------------------- prompts and answers


def test_prompts_of_each_mode(tmp_path: Path) -> None:
    (item,) = read_items(lines(tmp_path / "a.jsonl", CSQA), "commonsenseqa")
    shot = Item(place="", stem="One?", choices=("x", "y"), answer=1, final="B")
    assert question(item, "commonsenseqa", "cloze", [shot])[1:3] == (
        "Question: One?\nAnswer: y\n\nQuestion: Where does a cat sleep?\nAnswer:",
        (" sky", " mat", " sea", " sun", " ice"),
    )
    asked = question(item, "commonsenseqa", "choice", [shot])
    assert asked.context.startswith("Question: One?\nA. x\nB. y\nAnswer: B\n\nQuestion: Where")
    assert asked.choices == (" A", " B", " C", " D", " E")
    (pro,) = read_items(lines(tmp_path / "b.jsonl", PRO), "mmlu-pro")
    assert prompt(pro, "mmlu-pro", "generate", [pro], "Think.") == (
        "Think.\n\nQuestion: What is 1 + 1?\nOptions:\nA. 1\nB. 2\nC. 3\nAnswer: Let's think step by step. 1 + 1 = 2. The answer is (B)."
        "\n\nQuestion: What is 1 + 1?\nOptions:\nA. 1\nB. 2\nC. 3\nAnswer:"
    )


@pytest.mark.parametrize(
    ("extract", "text", "answer"),
    [
        (partial(answers.letter, choices=4), "so A or B; the answer is (C).", "C"),
        (partial(answers.letter, choices=4), "A, no. Answer: B", "B"),
        (partial(answers.letter, choices=4), "A is wrong\nB", "B"),
        (partial(answers.letter, choices=4), "none", None),
        (partial(answers.letter, choices=4), "A is wrong; the answer is (E).", None),
        (partial(answers.letter, choices=4), "A is wrong. Answer: J", None),
        (partial(answers.letter, choices=5), "the answer is (E).", "E"),
        (partial(answers.letter, choices=3), "B, as I say", None),
        (answers.after_answer_is, "x. So the answer is (B).\nQ: y", "(B)"),
        (answers.after_answer_is, " valid \nmore", "valid"),
        (answers.after_answer_is, " \n", None),
        (answers.after_hashes, "so\n#### -1,234.5 cats", "-1234.5"),
        (answers.after_hashes, "42", None),
        (answers.boxed, r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (answers.boxed, r"$\boxed 5$ is", "5"),
        (answers.boxed, r"\fbox{3}", "3"),
        (answers.boxed, r"\boxed{1", None),
        (answers.boxed, "1", None),
    ],
)
def test_extraction(extract: Callable[[str], str | None], text: str, answer: str | None) -> None:
    assert extract(text) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\frac12", r"\frac{1}{2}", True), (r"\dfrac1{72}", r"\frac{1}{72}", True), ("0.5", "1/2", True), (".5", "0.5", True),
        (r"\sqrt3+1", r"\sqrt{3} + 1", True), ("k = 3", "3", True), (r"90^\circ", "90", True), (r"12\text{ cm}", "12", True),
        (r"\left(1, 2\right)", "(1,2)", True), (r"10\%", "10", True), (r"\$5", "5", True), ("2/3", r"\frac{2}{3}", True),
        (r"\frac{1}{2}", r"\frac{1}{3}", False), ("x+y", "y+x", False), ("ab = 3", "3", False), ("ab=3", "3", True),
        ("abc=3", "3", False), ("01/2", "1/2", False),
    ],
)  # fmt: skip
def test_answers_of_math_are_equal_as_its_authors_compare(one: str, other: str, same: bool) -> None:
    assert answers.same_mathematics(one, other) is same


def test_bootstrap_is_that_of_resampled_answers() -> None:
    """Drawn by index from the answers, and beside the closed form sqrt(p (1 - p) / n)."""
    right = np.array([True] * 70 + [False] * 130)
    error, (low, high) = bootstrap(70, 200, 40_000, 0.95, np.random.default_rng(0))
    drawn = right[np.random.default_rng(1).integers(0, 200, (20_000, 200))].mean(1)
    assert error == pytest.approx(math.sqrt(0.35 * 0.65 / 200), rel=0.02)
    assert error == pytest.approx(drawn.std(), rel=0.03)
    assert (low, high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.006)
    assert bootstrap(5, 5, 100, 0.95, np.random.default_rng(0)) == (0.0, (1.0, 1.0))


# ------------------------------------------------------------------------------------------------------------- suites


SUITE = """
    batch_size = 3
    [[tasks]]
    format = "commonsenseqa"
    questions = "csqa.jsonl"
    examples = "shots.jsonl"
    shots = 2
    [[tasks]]
    name = "pro"
    format = "mmlu-pro"
    mode = "choice"
    questions = "pro.jsonl"
    [[tasks]]
    format = "gsm8k"
    questions = "gsm.jsonl"
    new_tokens = 6
    limit = 3
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    records = [
        {
            **CSQA,
            "answerKey": "ABCDE"[n % 5],
            "question": {**CSQA["question"], "stem": "cats " * int(rng.integers(1, 6))},
        }
        for n in range(7)
    ]
    lines(tmp_path / "csqa.jsonl", *records)
    lines(tmp_path / "shots.jsonl", *records[::-1])
    lines(tmp_path / "pro.jsonl", PRO, {**PRO, "category": "law"})
    lines(tmp_path / "gsm.jsonl", *({**GSM, "question": f"{n} cats?"} for n in range(9)))
    (tmp_path / "suite.toml").write_text(SUITE)
    return tmp_path / "suite.toml"


def test_likelihoods_are_those_of_transformers(suite: Path) -> None:
    """One choice at a time, unpadded, in a library of others."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, initializer_range=0.4, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    settings, asked = load_suite(suite)
    scores = run_suite(settings, asked, cast(Any, from_hf(theirs)), TOKENIZER)
    for one, score in zip(asked[:2], scores, strict=False):
        correct = per_byte = 0
        for item in one.items:
            written = question(item, one.task.format, one.task.way, one.examples[item.group])
            sums = []
            for choice in written.choices:
                context, scored = [256, *written.context.encode()], list(choice.encode())
                with torch.no_grad():
                    logits = theirs(torch.tensor([context + scored])).logits[0].double()
                rows = logits.log_softmax(-1)[len(context) - 1 : -1]
                sums.append(float(rows[torch.arange(len(scored)), scored].sum()))
            correct += int(np.argmax(sums)) == item.answer
            per_byte += (
                int(np.argmax([s / len(c.encode()[1:]) for s, c in zip(sums, written.choices, strict=True)]))
                == item.answer
            )
        assert score.accuracy == correct / len(one.items)
        assert score.accuracy_normalised == per_byte / len(one.items)
    assert scores[1].groups.keys() == {"math", "law"}
    assert scores[0].chance == pytest.approx(0.2)
    assert (scores[2].questions, scores[2].unanswered, scores[2].chance) == (3, 1.0, None)


class Parrot(torch.nn.Module):
    """Continue any text with ``text`` as if by a language model, and end it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inner = small(max_positions=256)
        self.config, self.output, self.placeholders = self.inner.config, self.inner.output, ()
        self.said = [*text.encode(), TOKENIZER.eos]
        self.step = 0

    def forward(self, tokens: torch.Tensor, cache: Any = None, last: bool = False) -> torch.Tensor:
        self.step = 0 if tokens.shape[1] > 1 else self.step + 1
        out = torch.zeros(len(tokens), 1, 264)
        out[:, :, self.said[self.step]] = 1.0
        return out


@pytest.mark.parametrize(
    ("kind", "record", "said", "right"),
    [
        ("gsm8k", GSM, " 2 + 1000\n#### 1002", True), ("gsm8k", GSM, " 1002", False), ("math", MATH, r" so \boxed{\frac12}", True),
        ("mmlu-pro", PRO, " Well. The answer is (B).", True), ("mmlu-pro", PRO, " The answer is (A).\nQuestion: the answer is (B)", False),
    ],
)  # fmt: skip
def test_generated_answers_are_extracted_and_compared(
    tmp_path: Path, kind: str, record: Any, said: str, right: bool
) -> None:
    lines(tmp_path / "q.jsonl", record, record)
    (tmp_path / "s.toml").write_text(f'[[tasks]]\nformat = "{kind}"\nquestions = "q.jsonl"\nnew_tokens = 64\n')
    (score,) = run_suite(*load_suite(tmp_path / "s.toml"), cast(Any, Parrot(said)), TOKENIZER)
    assert (score.accuracy, score.stderr, score.mode) == (float(right), 0.0, "generate")


def test_shares_of_processes_add_up(suite: Path) -> None:
    model = small(max_positions=512)
    settings, asked = load_suite(suite)
    whole = run_suite(settings, asked, model, TOKENIZER)
    kept: list[list[Any]] = [[], []]

    def gather(rank: int, part: Any) -> list[Any]:
        kept[rank].append(part)
        return [part]

    for rank in (0, 1):
        run_suite(settings, asked, model, TOKENIZER, share=(rank, 2), gather=partial(gather, rank))
    both = iter([*zip(*kept, strict=True)])
    found = run_suite(settings, asked, model, TOKENIZER, gather=lambda own: [*next(both)])
    assert found == whole


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def run_where_one_fails(rank: int, suite: Path, failing: int) -> tuple[str, str]:
    """Return kind and text of the error that a process ends with."""
    settings, asked = load_suite(suite)
    model = small(max_positions=512)
    if rank == failing:
        torch.nn.init.constant_(model.output.weight, math.nan)

    def gather(own: Any) -> list[Any]:
        found = [None, None]
        dist.all_gather_object(found, own)
        return found

    with pytest.raises((FloatingPointError, RuntimeError)) as caught:
        run_suite(settings, asked, model, TOKENIZER, share=(rank, 2), gather=gather)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_process_ends_all(suite: Path, ranks: Ranks, failing: int) -> None:
    """The other would wait for it in the gather until its time is up."""
    errors = ranks(run_where_one_fails, suite, failing)
    own, others = errors[failing], errors[1 - failing]
    assert own[0] == "FloatingPointError"
    assert "the log-likelihood of choice" in own[1]
    assert others == ("RuntimeError", f"rank {failing} could not answer commonsenseqa: FloatingPointError: {own[1]}")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ('format = "gsm8k"', RecipeError, "two tasks are called pro"),
        ('format = "gsm8k"\n    mode = "cloze"', RecipeError, 'gsm8k has no mode "cloze"; it has generate'),
        ('format = "gsm8k"\n    shots = 1', RecipeError, "need examples"),
        ('format = "gsm8k"\n    prompt = "missing.txt"', FileNotFoundError, r"missing\.txt does not exist"),
        ('format = "piqa"', SourceError, r"gsm\.jsonl, line 1 is not a question of piqa"),
        ('format = "gsm8k"\n    examples = "gsm.jsonl"\n    shots = 10', MisconfigurationError, "has 9 examples; shots = 10"),
    ],
)  # fmt: skip
def test_suites_that_cannot_be_run_are_refused(suite: Path, change: str, error: type[Exception], message: str) -> None:
    text = SUITE.replace('format = "gsm8k"', change)
    suite.write_text(
        text.replace('format = "gsm8k"', 'format = "gsm8k"\n    name = "pro"', 1) if "two" in message else text
    )
    with pytest.raises(error, match=message):
        load_suite(suite)


def test_answers_longer_than_the_model_are_refused(suite: Path) -> None:
    settings, asked = load_suite(suite)
    with pytest.raises(MisconfigurationError, match="new_tokens = 6 of gsm8k leave no room"):
        run_suite(settings, asked[2:], small(max_positions=6), TOKENIZER)


def test_a_run_evaluates_every_n_steps_and_learns_the_same(tmp_path: Path, suite: Path) -> None:
    """The weights after 8 steps are those of a run without a suite, bit for bit."""
    runs = {}
    for name, evaluation in (("with", Evaluation(suite=suite, every_n_steps=4)), ("without", None)):
        task = LanguageTask(overrides=SMALL, sampling=None, evaluation=evaluation)
        runs[name] = fit(tmp_path / name, steps=8, settings=task, log_every_n_steps=1)
    ours, theirs = (model.state_dict() for _, model in runs.values())
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    rows = list(csv.DictReader((runs["with"][0].run_folder.path / "metrics.csv").open()))
    logged = {
        int(float(row["step"])): row["suite/commonsenseqa/accuracy"]
        for row in rows
        if row["suite/commonsenseqa/accuracy"]
    }
    scores = run_suite(*load_suite(suite), runs["with"][1].model, TOKENIZER)
    assert len(logged) == 2
    assert float([*logged.values()][-1]) == pytest.approx(scores[0].accuracy)


def test_modes_and_forms_are_of_the_same_kinds() -> None:
    assert MODES.keys() == FORMS.keys()
    assert SuiteTask(format="mmlu-pro", questions=Path("x")).way == "generate"


def test_generated_kinds_have_no_choices_to_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gsm8k has no choices to score"):
        read_questions(lines(tmp_path / "a.jsonl", GSM), "gsm8k")
