"""Define settings of fine-tuning with a head, without importing torch.

A recipe's ``[task]`` with one of these kinds (`cli.schema`) becomes a `HeadTask`, whose `build` makes module and data of `head_module`. Field
names and kinds are recipe keys and stay; docstrings of fields are the help of ``arclight train``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from arclight._intervals import Checked, NonNegativeInt, PositiveInt
from arclight.optim.schedule_settings import WSD, Constant, Cosine, InverseSqrt, Linear
from arclight.optim.settings import ADOPT, QHADOPT, SGD, AdamW, Mixed, Muon, NorMuon

if TYPE_CHECKING:
    from arclight.trainer import DataModule, Module


@dataclass(frozen=True, kw_only=True)
class HeadTask(Checked):
    """Fine-tune a language model with a head on labelled rows."""

    head: ClassVar[Literal["sequence", "token", "answer"]]

    train: Path
    """Training rows."""
    val: Path
    """Rows to validate and test on, laid out alike."""
    weights: Path | None = None
    """Run or checkpoint of a language model, or a Hugging Face folder, to start from; none: random weights."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; none: that of the run or folder of the weights, or bytes without weights."""
    model: str = "llama3-debug"
    """Architecture and size without weights; a run and a folder have their own."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration to replace, without weights."""
    max_length: PositiveInt = 256
    """Tokens of a sequence; what is longer is cut (or, of questions, divided into windows)."""
    batch_size: PositiveInt = 16
    """Sequences per step on each device."""
    workers: NonNegativeInt = 0
    """Worker processes that load batches; 0 loads in the training process."""
    optimizer: AdamW | ADOPT | QHADOPT | Muon | NorMuon | SGD | Mixed = field(
        default_factory=lambda: AdamW(lr=1e-4, weight_decay=0.01)
    )
    """Optimizer."""
    schedule: WSD | Cosine | Linear | InverseSqrt | Constant = field(default_factory=Linear)
    """Learning-rate schedule."""

    def build(self) -> tuple[Module, DataModule]:
        from arclight.text.heads.head_module import build_head
        from arclight.text.heads.rows import HeadRows

        names = ("train", "val", "max_length", "batch_size", "workers", "stride", "max_answer")
        rows = HeadRows(kind=self.head, **{name: getattr(self, name) for name in names if hasattr(self, name)})
        return build_head(
            rows, self.optimizer, self.schedule, weights=self.weights, tokenizer=self.tokenizer, model=self.model,
            overrides=self.overrides,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SequenceTask(HeadTask):
    """Classify texts: rows with text (and text_pair) and label."""

    recipe_kind: ClassVar[str] = "sequence-classification"
    head: ClassVar[Literal["sequence", "token", "answer"]] = "sequence"


@dataclass(frozen=True, kw_only=True)
class TokenTask(HeadTask):
    """Tag words: rows with tokens and tags, lists of equal length."""

    recipe_kind: ClassVar[str] = "token-classification"
    head: ClassVar[Literal["sequence", "token", "answer"]] = "token"


@dataclass(frozen=True, kw_only=True)
class AnswerTask(HeadTask):
    """Extract answers from contexts: JSON files of SQuAD, 1.1 or 2.0."""

    recipe_kind: ClassVar[str] = "extractive-qa"
    head: ClassVar[Literal["sequence", "token", "answer"]] = "answer"

    stride: PositiveInt = 128
    """Tokens between the beginnings of two windows of a context that is longer than max_length."""
    max_answer: PositiveInt = 30
    """Tokens of an answer, at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride > self.max_length:
            raise ValueError(f"stride = {self.stride} would leave out tokens between windows of {self.max_length}")
