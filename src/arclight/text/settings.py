"""Settings of language modelling (no torch here: a recipe is read without it).

A recipe of kind ``language`` becomes a `LanguageTask`, whose `build` makes module and data. Names of fields are keys of recipes and of
saved runs: they must stay. The planner reads the same settings (`workload`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from arclight._intervals import Checked, NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt
from arclight.data.sites import IID, Dirichlet, Size
from arclight.optim.schedule_settings import WSD, Constant, Cosine, InverseSqrt, Linear
from arclight.optim.settings import ADOPT, QHADOPT, SGD, AdamW, Mixed, Muon, NorMuon
from arclight.text.data.data_settings import BPE, Text
from arclight.text.data.site_split import SiteShare, Source
from arclight.text.evaluation.suite_settings import Evaluation

if TYPE_CHECKING:
    from arclight.text.callbacks.expert_monitor import ExpertMonitor
    from arclight.trainer import DataModule, Module


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
class Experts(Checked):
    """Log how layers choose their experts, and how alike experts and routers are."""

    every_n_steps: PositiveInt = 50
    """Measure each n-th optimizer step."""

    def build(self) -> ExpertMonitor:
        from arclight.text.callbacks.expert_monitor import ExpertMonitor

        return ExpertMonitor(self.every_n_steps)


@dataclass(frozen=True, kw_only=True)
class Unigram(Checked):
    """Log losses minus the unigram cross-entropy of the same labels.

    Unigrams are counted in the training text, so that losses are comparable between tokenizers.
    """

    smoothing: PositiveFloat = 1.0
    """Added to the count of each token, so that one that the text lacks costs a finite amount (Laplace)."""


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Checked):
    """Pre-train a language model on text."""

    recipe_kind: ClassVar[str] = "language"

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

    def site(self, number: int, count: int, partition: Source | IID | Dirichlet | Size | None = None) -> LanguageTask:
        """Return the task on one site's documents; ValueError for a partition that divides no text.

        Its weights come from elsewhere.
        """
        if not isinstance(partition, Source | IID | Dirichlet | Size | None):
            raise ValueError(
                f"{type(partition).__name__.lower()} does not divide text: choose source, iid, dirichlet or size"
            )
        share = SiteShare(number=number, count=count, partition=partition or IID())
        return dataclasses.replace(self, weights=None, data=dataclasses.replace(self.data, share=share))

    def check_sites(self, count: int, partition: Source | IID | Dirichlet | Size | None = None) -> None:
        """Raise MisconfigurationError if not each of ``count`` sites would get some text."""
        from arclight.text.data.data_module import TextDataModule

        TextDataModule(self.site(0, count, partition).data).selection.check()

    def check_vocabularies(
        self,
        sites: Mapping[str, LanguageTask],
        personal: Callable[[str], bool],
        *,
        personal_from_client: bool,
        complete: bool,
    ) -> None:
        """Raise MisconfigurationError for vocabularies of sites that do not fit.

        See `arclight.text.site_vocabularies`.
        """
        from arclight.text.site_vocabularies import check_site_vocabularies

        check_site_vocabularies(self, sites, personal, personal_from_client=personal_from_client, complete=complete)

    def with_vocabulary(self) -> LanguageTask:
        """Return the task with the digest of its tokenizer, to which other data must conform.

        A task whose tokenizer is still to be learned is returned itself.
        """
        from arclight.text.site_vocabularies import vocabulary_of_task

        digest = vocabulary_of_task(self).digest or None
        return dataclasses.replace(self, data=dataclasses.replace(self.data, vocabulary=self.data.vocabulary or digest))

    def with_data(self, data: str) -> LanguageTask:
        """Return the task on a site's own text, all of it.

        Raises ValueError if that would teach it a tokenizer of its own, unless sites are to have such (``by_site``).
        """
        from arclight.text.data.corpus import is_corpus

        if isinstance(self.data.tokenizer, BPE) and not self.data.tokenizer.by_site and not is_corpus(data):
            raise ValueError(
                'sites that have text of their own need one tokenizer that all of them have: set task.data.tokenizer to "bytes", or to '
                'kind = "pretrained" with its path; or let each have its own (task.data.tokenizer.by_site)'
            )
        return dataclasses.replace(
            self, weights=None, data=dataclasses.replace(self.data, data=data, mixture={}, share=None)
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained parameters by name, without allocating a model.

        No data is read.
        """
        import torch

        from arclight.text.language_model import LanguageModel
        from arclight.trainer.checkpoint.named_state import named_tensors

        with torch.device("meta"):
            module = LanguageModel(self)
            module.configure_model()
        return {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}

    def build(self) -> tuple[Module, DataModule]:
        from arclight.text.data.data_module import TextDataModule
        from arclight.text.language_model import LanguageModel

        data = TextDataModule(self.data)
        return LanguageModel(self, data.vocab_size, self.data.vocabulary), data
