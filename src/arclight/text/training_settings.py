"""Define the settings of a language model and its training, without importing torch.

`LanguageModel` is made of `LanguageSettings`; the recipe's task (``text.settings``) adds what builds it. Names of fields are keys of
recipes and of saved runs: they must stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arclight._intervals import Checked, NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt
from arclight.optim.schedule_settings import WSD, Constant, Cosine, InverseSqrt, Linear
from arclight.optim.settings import ADOPT, QHADOPT, SGD, AdamW, Mixed, Muon, NorMuon
from arclight.text.data.data_settings import Text
from arclight.text.evaluation.suite_settings import Evaluation


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """Text written by the model after each validation, kept in the run's log."""

    prompts: tuple[str, ...] = ("import",)
    """What the texts begin with."""
    new_tokens: PositiveInt = 64
    """Tokens added to each."""
    temperature: NonNegativeFloat = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_p: PositiveFraction = 0.95
    """Draw from the likeliest tokens that hold this share of probability, in (0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Unigram(Checked):
    """Log losses minus the unigram cross-entropy of the same labels.

    Unigrams are counted in the training text, so that losses are comparable between tokenizers.
    """

    smoothing: PositiveFloat = 1.0
    """Added to the count of each token, so that one that the text lacks costs a finite amount (Laplace)."""


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Checked):
    """Settings of a language model, its data and its training."""

    model: str = "llama3-debug"
    """Architecture and size: llama3-debug, llama3-8b, qwen3-0.6b, gpt2-124m, ...; a wrong name lists them."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration to replace, as layers = 4."""
    weights: Path | None = None
    """Initial weights: a Hugging Face folder, or a checkpoint of an earlier run, of the same model and vocabulary."""
    data: Text = field(default_factory=Text)
    """Text and tokenizer."""
    optimizer: AdamW | ADOPT | QHADOPT | Muon | NorMuon | SGD | Mixed = field(
        default_factory=lambda: AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    )
    """Optimizer."""
    schedule: WSD | Cosine | Linear | InverseSqrt | Constant = field(default_factory=WSD)
    """Learning-rate schedule."""
    loss_chunk: PositiveInt | None = None
    """Rows of logits computed at a time; none: about four million numbers, or an eighth of all rows."""
    unigram: Unigram | None = None
    """Log unigram_normalized_loss beside loss; none for no such values."""
    sampling: Sampling | None = field(default_factory=Sampling)
    """Sample text after each validation; none for no samples."""
    evaluation: Evaluation | None = None
    """Evaluate a suite of questions every n steps; none for no evaluation."""
