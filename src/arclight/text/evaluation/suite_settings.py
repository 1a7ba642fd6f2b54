"""Define the settings of an evaluation suite, without torch.

`load_suite` reads a suite file by `read_suite`; `Evaluation` is a recipe's ``[task.evaluation]``, run by `SuiteEvaluation`; ``arclight test``
takes the names of formats from `MODES`. Field names and formats are in suite files and recipes: they stay.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from arclight._intervals import Checked, Interval, NonNegativeInt, PositiveInt
from arclight.recipe import read

Format = Literal["hellaswag", "arc", "mmlu", "mmlu-pro", "commonsenseqa", "piqa", "bbh", "gsm8k", "math"]
Mode = Literal["cloze", "choice", "generate"]
MODES: dict[str, tuple[Mode, ...]] = {
    "hellaswag": ("cloze",),
    "arc": ("cloze", "choice", "generate"),
    "mmlu": ("choice", "cloze", "generate"),
    "mmlu-pro": ("generate", "choice", "cloze"),
    "commonsenseqa": ("cloze", "choice", "generate"),
    "piqa": ("cloze", "choice"),
    "bbh": ("generate",),
    "gsm8k": ("generate",),
    "math": ("generate",),
}
"""Ways in which each kind of question can be answered; the first is the usual one."""


@dataclass(frozen=True, kw_only=True)
class SuiteTask(Checked):
    """One set of questions and how it is asked."""

    format: Format
    """Author of the questions, which decides the layout of the files."""
    questions: Path
    """A file (.jsonl, .json, .csv, .parquet), or a folder of them; beside the suite if relative."""
    name: str = ""
    """Name of its scores; empty: its format."""
    mode: Mode | None = None
    """Likelihood of each choice's text (cloze) or letter (choice), or a generated answer (generate); none: the kind's usual one."""
    shots: NonNegativeInt = 0
    """Answered examples before each question, the first of its group."""
    examples: Path | None = None
    """File or folder that the shots come from, laid out like the questions; none only without shots."""
    prompt: Path | None = None
    """Text before each question, as BBH's chain-of-thought prompts: a file, or a folder with one for each group."""
    limit: PositiveInt | None = None
    """Ask this many questions only, evenly spread over all; none asks all."""
    new_tokens: PositiveInt = 512
    """Tokens of a generated answer, at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is not None and self.mode not in MODES[self.format]:
            raise ValueError(f'{self.format} has no mode "{self.mode}"; it has {", ".join(MODES[self.format])}')
        if self.shots and self.examples is None:
            raise ValueError(f"shots = {self.shots} of {self.title} need examples, a file to take them from")

    @property
    def title(self) -> str:
        return self.name or self.format

    @property
    def way(self) -> Mode:
        return self.mode or MODES[self.format][0]


@dataclass(frozen=True, kw_only=True)
class Suite(Checked):
    """Question sets that are evaluated together."""

    tasks: tuple[SuiteTask, ...]
    """The sets, each a table [[tasks]]."""
    batch_size: PositiveInt = 16
    """Sequences computed together."""
    resamples: PositiveInt = 1000
    """Bootstrap samples behind each standard error and interval."""
    confidence: Annotated[float, Interval(gt=0, lt=1)] = 0.95
    """Probability of the interval, in (0, 1)."""
    seed: NonNegativeInt = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [task.title for task in self.tasks]
        if not names:
            raise ValueError("a suite needs a table [[tasks]]")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tasks are called {twice[0]}: give each a name")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Checked):
    """Evaluate a suite during training."""

    suite: Path = Path("suite.toml")
    """The suite's file (.toml or .yaml)."""
    every_n_steps: PositiveInt = 1000
    """Evaluate after each n-th optimizer step."""


def read_suite(path: Path) -> Suite:
    """Read a suite; files are relative to it.

    Raises RecipeError with all that is wrong, FileNotFoundError for files that are missing.
    """
    suite = read(Suite, path)
    tasks = []
    for task in suite.tasks:
        places = {
            name: path.parent / place
            for name in ("questions", "examples", "prompt")
            if (place := getattr(task, name)) is not None
        }
        for name, place in places.items():
            if not place.exists():
                raise FileNotFoundError(
                    f"{path}: {name} of {task.title}: {place} does not exist (nothing is downloaded)"
                )
        tasks.append(dataclasses.replace(task, **places))
    return dataclasses.replace(suite, tasks=tuple(tasks))
