"""Define the settings of text data, the recipe's ``[task.data]``, without torch.

`LanguageTask` holds a `Text`, and `TextDataModule` reads it; `Text.build` makes one for use without a recipe. Field names are recipe keys
and stay; their docstrings are the help of ``arclight train``. A setting that changes tokens belongs into the digest of the cache
(`data_module`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from arclight._intervals import Checked, Interval, NonNegativeFloat, NonNegativeInt, PositiveInt, ProperFraction
from arclight.text.data.site_split import SiteShare

if TYPE_CHECKING:
    from arclight.text.data.data_module import TextDataModule


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """One token per byte of UTF-8: no training, nothing to install."""


@dataclass(frozen=True, kw_only=True)
class BPE(Checked):
    """Byte-level byte pair encoding, trained on the training text at first use."""

    vocab_size: Annotated[int, Interval(ge=259)] = 4096
    """Vocabulary size: 3 special tokens, 256 bytes, the rest merges."""
    sample: PositiveInt = 2**28
    """Bytes of text to train on, taken from the beginning of each source in equal parts."""
    by_site: bool = False
    """Let each site of a federation train one on its own text; see `arclight.text.site_vocabularies`."""


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """An existing tokenizer."""

    path: Path
    """A folder with tokenizer.json, or that file."""


@dataclass(frozen=True, kw_only=True)
class Text(Checked):
    """Text to learn from: where it is, how it becomes tokens, and how tokens become batches."""

    data: str | tuple[str, ...] | dict[str, str] = "stdlib"
    """The Python standard library's sources ("stdlib"), a file or folder (text, JSON lines, Parquet, tar, a saved HF data
    set), a list of these read one after another, or a table of named ones to mix. A folder that `arclight data tokenize`
    has written is used as it is, with its own tokenizer and its own split val; so is one at an address ("https://host/corpus",
    "s3://bucket/corpus"), which is read in parts, ahead of need."""
    val: str | None = None
    """Validation text; none holds out a fraction of the data."""
    held_out: ProperFraction = 0.05
    """Fraction of the documents to validate on without val, in [0, 1); of few documents, the end of each."""
    field: str = "text"
    """Field of a row with the text."""
    tokenizer: BPE | Bytes | Pretrained = dataclasses.field(default_factory=BPE)
    """Tokenizer, unless the data are tokens already."""
    vocabulary: str | None = None
    """SHA-256 of the vocabulary that the tokenizer must have (`Tokenizer.digest`); none: any. A federation's server sets it for its sites."""
    sequence_length: PositiveInt = 256
    """Tokens of a sample."""
    batch_size: PositiveInt = 16
    """Samples per step on each device."""
    global_batch_size: PositiveInt | None = None
    """Samples per step over all devices, instead of batch_size."""
    packing: Literal["concat", "pack"] = "concat"
    """Samples are windows of the concatenated documents (concat), or whole documents packed with little padding (pack)."""
    mask_documents: bool = True
    """Restrict attention to a token's own document; its last token does not predict the next document's first."""
    mixture: dict[str, NonNegativeFloat | tuple[NonNegativeFloat, ...]] = dataclasses.field(default_factory=dict)
    """Weight of each named source, or its weights at the points of mixture_at; without any, sources count by size."""
    mixture_at: tuple[NonNegativeFloat, ...] = (0.0,)
    """Epochs at which the lists of weights apply; linear interpolation in between."""
    epoch_samples: PositiveInt | None = None
    """Samples per epoch of a mixture; none for all."""
    shuffle_window: PositiveInt | None = None
    """Consecutive samples that are shuffled among themselves, windows of them among each other; none: all samples. A corpus at an
    address that is larger than remote_bytes is fetched about once an epoch with it, and many times without."""
    shard_bytes: PositiveInt = 2**26
    """Bytes of text per shard of tokens."""
    prepare_workers: PositiveInt = 1
    """Worker processes of tokenization."""
    workers: NonNegativeInt = 0
    """Worker processes that load batches; 0 loads in the training process, which is usually enough."""
    cache: Path | None = None
    """Folder for tokenizers and tokens; none for the folder data beside the runs."""
    remote_bytes: Annotated[int, Interval(ge=2**20)] = 2**32
    """Bytes of the folder remote in cache, through which tokens at an address are read; shared by the processes of a machine."""
    remote_connections: PositiveInt = 8
    """Connections of a process that fetch tokens at an address ahead of need."""
    remote_patience_s: NonNegativeFloat = 300.0
    """Seconds for which a lost connection to an address is tried again."""
    share: SiteShare | None = None
    """One site's share of the documents, as arclight federate partitions them; none for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.data if isinstance(self.data, dict) else {"data": self.data}
        places = [place for given in named.values() for place in ((given,) if isinstance(given, str) else given)]
        if not all(place.strip() for place in places or ("",)):  # an empty path is the current folder, all of it
            raise ValueError(f'data = {self.data!r} names no text: give "stdlib", a file or a folder')
        if self.val is not None and not self.val.strip():
            raise ValueError(f"val = {self.val!r} names no text: give a file or a folder, or leave it out")
        if self.epoch_samples is not None and not isinstance(self.data, dict):
            raise ValueError("epoch_samples needs a mixture of named sources: data = {first = ..., second = ...}")
        if self.mixture and not isinstance(self.data, dict):
            raise ValueError("a mixture needs named sources: data = {first = ..., second = ...}")
        if isinstance(self.data, dict) and (unknown := set(self.mixture) - set(self.data)):
            raise ValueError(f"mixture names {', '.join(sorted(unknown))}, data has {', '.join(self.data)}")
        if self.mixture and isinstance(self.data, dict) and (missing := set(self.data) - set(self.mixture)):
            raise ValueError(f"mixture has no weight for {', '.join(sorted(missing))}")

    def build(self) -> TextDataModule:
        from arclight.text.data.data_module import TextDataModule

        return TextDataModule(self)
