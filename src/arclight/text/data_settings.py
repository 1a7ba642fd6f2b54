"""Settings of text data (no torch here: a recipe is read without it)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from arclight._intervals import Checked, Interval, NonNegativeFloat, NonNegativeInt, PositiveInt, ProperFraction
from arclight.text.sites import Share

if TYPE_CHECKING:
    from arclight.text.data_module import TextDataModule


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Every byte of UTF-8 is a token: nothing to learn, nothing to install."""


@dataclass(frozen=True, kw_only=True)
class BPE(Checked):
    """Byte-level byte pair encoding, learned from the training text when it is first needed."""

    vocab_size: Annotated[int, Interval(ge=259)] = 4096
    """Tokens in all: 3 special ones, 256 single bytes, the rest learned."""
    sample: PositiveInt = 2**28
    """Bytes of text that it is learned from, taken from the beginning of each source in equal parts."""


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A tokenizer that exists."""

    path: Path
    """A folder with tokenizer.json, or that file."""


@dataclass(frozen=True, kw_only=True)
class Text(Checked):
    """Text to learn from: where it is, how it becomes tokens, and how tokens become batches."""

    data: str | tuple[str, ...] | dict[str, str] = "stdlib"
    """The Python standard library's sources ("stdlib"), a file or folder (text, JSON lines, Parquet, tar, a saved HF data
    set), a list of these read one after another, or a table of named ones to mix. A folder that `arclight data tokenize`
    has written is used as it is, with its own tokenizer and its own split val."""
    val: str | None = None
    """Text to validate with; none holds back a share of the data."""
    held_out: ProperFraction = 0.05
    """Share of the documents to validate with where there is no other text for it, in [0, 1); of few, the end of each."""
    field: str = "text"
    """Field of a row that holds the text."""
    tokenizer: BPE | Bytes | Pretrained = dataclasses.field(default_factory=BPE)
    """How text becomes tokens, where the data are not tokens already."""
    sequence_length: PositiveInt = 256
    """Tokens of a sample."""
    batch_size: PositiveInt = 16
    """Samples per step on each device."""
    global_batch_size: PositiveInt | None = None
    """Samples per step on all devices together, in place of batch_size."""
    packing: Literal["concat", "pack"] = "concat"
    """Samples are windows of all documents in a row (concat), or whole documents side by side with little padding (pack)."""
    mask_documents: bool = True
    """Tokens see their own document only, and its last one does not predict the next document's first."""
    mixture: dict[str, NonNegativeFloat | tuple[NonNegativeFloat, ...]] = dataclasses.field(default_factory=dict)
    """Weight of each named source, or its weights at the points of mixture_at; without any, sources count by size."""
    mixture_at: tuple[NonNegativeFloat, ...] = (0.0,)
    """Moments, in epochs since the beginning, at which the lists of weights hold; in between they change linearly."""
    epoch_samples: PositiveInt | None = None
    """Samples in an epoch of a mixture; none for as many as there are."""
    shard_bytes: PositiveInt = 2**26
    """Bytes of text in a shard of tokens."""
    prepare_workers: PositiveInt = 1
    """Processes that tokenize, the first time."""
    workers: NonNegativeInt = 0
    """Processes that load batches; 0 loads in the training process, which is enough for most."""
    cache: Path | None = None
    """Folder for tokenizers and tokens; none for the folder data beside the runs."""
    share: Share | None = None
    """One site's part of the documents, as arclight federate divides them; none for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epoch_samples is not None and not isinstance(self.data, dict):
            raise ValueError("epoch_samples is of a mixture: data = {first = ..., second = ...}")
        if self.mixture and not isinstance(self.data, dict):
            raise ValueError("a mixture needs named sources: data = {first = ..., second = ...}")
        if isinstance(self.data, dict) and (unknown := set(self.mixture) - set(self.data)):
            raise ValueError(f"mixture names {', '.join(sorted(unknown))}, data has {', '.join(self.data)}")
        if self.mixture and isinstance(self.data, dict) and (missing := set(self.data) - set(self.mixture)):
            raise ValueError(f"mixture has no weight for {', '.join(sorted(missing))}")

    def build(self) -> TextDataModule:
        from arclight.text.data_module import TextDataModule

        return TextDataModule(self)
