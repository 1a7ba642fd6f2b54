"""Define the settings of the recipe's language task, without importing torch.

A recipe of kind ``language`` becomes a `LanguageTask`: `LanguageSettings`, whose fields are its keys, and what makes module and data of
them (``build``), for one machine or for the sites of a federation. The planner reads the same settings (`workload`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arclight._intervals import Checked, PositiveInt
from arclight.data.sites import IID, Dirichlet, Size
from arclight.text.data.data_settings import BPE
from arclight.text.data.site_split import SiteShare, Source
from arclight.text.training_settings import LanguageSettings

if TYPE_CHECKING:
    from arclight.text.callbacks.expert_monitor import ExpertMonitor
    from arclight.trainer import DataModule, Module


@dataclass(frozen=True, kw_only=True)
class Experts(Checked):
    """Log how layers choose their experts, and how alike experts and routers are."""

    every_n_steps: PositiveInt = 50
    """Measure each n-th optimizer step."""

    def build(self) -> ExpertMonitor:
        from arclight.text.callbacks.expert_monitor import ExpertMonitor

        return ExpertMonitor(self.every_n_steps)


@dataclass(frozen=True, kw_only=True)
class LanguageTask(LanguageSettings):
    """Pre-train a language model on text."""

    recipe_kind: ClassVar[str] = "language"

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
