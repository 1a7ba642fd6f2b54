"""Define the data module of text: tokenize once, cache, read batches of packed documents.

`LanguageTask` makes a `TextDataModule` of its data settings; the planner and the checks of federations ask one for its vocabulary and sites.
Out go batches of `TokenSamples`. Tokens are cached in folders named by a digest of text, tokenizer and settings: a setting that changes
them must be part of the digest. Keys and digests of `state_dict` are in checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from arclight.data.computed_order import EpochOrder
from arclight.data.fetching import identity
from arclight.data.mixture import MixtureOrder
from arclight.data.packing import Layout, Packed, Windows
from arclight.data.remote.block_reader import BlockReader
from arclight.data.token_samples import TokenSamples
from arclight.data.token_shards import TokenShards
from arclight.data.unigrams import count_tokens
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.text.data import corpus
from arclight.text.data.data_settings import BPE, Bytes, Pretrained, Text
from arclight.text.data.site_split import SiteSplit
from arclight.text.data.sources import STDLIB, Document, documents, fingerprint
from arclight.text.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerError
from arclight.trainer import DataModule

_LOG = logging.getLogger("arclight")
_FORMAT = 1  # of the cache: another number rebuilds everything


class TextDataModule(DataModule):
    """Batches for language models, as `arclight.data.token_samples.TokenSamples` describes them.

    The first run tokenizes into ``<root>/data/<name>-<digest>`` (see ``Text.cache``), the digest being that of the
    sources' names, sizes and times of change, of the tokenizer and of the settings that matter; later runs find it. The
    other ranks wait meanwhile, up to their timeout: tokenize larger text beforehand, with `arclight data tokenize`.
    Works without a trainer too: ``prepare_data()``, ``setup("fit")``, then the loaders.
    """

    def __init__(self, settings: Text) -> None:
        super().__init__()
        self.settings = settings
        named = settings.data if isinstance(settings.data, dict) else {"": settings.data}
        self.parts: dict[str, tuple[str, ...]] = {
            name: (source,) if isinstance(source, str) else tuple(source) for name, source in named.items()
        }
        self.selection = SiteSplit(settings.share, self.parts, settings.field)
        self._ready = corpus.corpora_among(chain.from_iterable(self.parts.values()))
        if any(len(sources) > 1 and any(map(corpus.is_corpus, sources)) for sources in self.parts.values()):
            raise MisconfigurationError(
                "data: a folder of tokens cannot stand in a list; name the sources to mix them: data = {first = ..., second = ...}"
            )
        self.train: TokenSamples | None = None
        self.val: TokenSamples | None = None
        self._packed_remote: set[Path] = set()

    # -- what is known before anything is read -------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary, which is known before it has been learned."""
        return self.learns.vocab_size if self.learns else self.tokenizer.vocab_size

    @property
    def learns(self) -> BPE | None:
        """Return the settings of a tokenizer that has to be learned; None if there is one."""
        settings = self.settings.tokenizer
        return settings if isinstance(settings, BPE) and not self._ready else None

    @property
    def corpora(self) -> list[Path | str]:
        """List the folders and addresses of tokens that are this site's; all if no site is given."""
        names = self.selection.names if self._ready else ()
        return corpus.corpora_among(source for name in names for source in self.parts[name])

    @property
    def root(self) -> Path:
        """Return the folder that tokenizers and corpora are kept in."""
        if self.settings.cache is not None:
            return self.settings.cache
        return Path(self.trainer.default_root_dir if self.trainer is not None else "runs") / "data"

    @cached_property
    def _reader(self) -> BlockReader:
        """Return what all tokens at addresses are read through."""
        settings = self.settings
        return BlockReader(
            self.root / "remote", settings.remote_bytes, connections=settings.remote_connections,
            patience_s=settings.remote_patience_s,
        )  # fmt: skip

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises FileNotFoundError if it is to be learned and `prepare_data` has not run yet."""
        if self._ready:
            return corpus.open_tokenizer((self.corpora or self._ready)[0], self._reader)
        match self.settings.tokenizer:
            case Bytes():
                return ByteTokenizer()
            case Pretrained(path=path):
                return Tokenizer.load(path)
            case BPE():
                if not self._learned.is_dir():
                    raise FileNotFoundError(f"{self._learned} is not there: prepare_data() learns the tokenizer first")
                return Tokenizer.load(self._learned)

    # -- once, on one process of each node -----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Learn the tokenizer and write the shards that are missing or changed."""
        if self.learns and not self._learned.is_dir():
            self._learn(self.learns)
        share = self.settings.held_out if self.settings.val is None else 0.0
        for name in self.selection.names:
            self._prepare(self._corpus(name), self.parts[name], self.selection.documents(name), share)
        if (val := self.settings.val) is not None:
            self._prepare(self._corpus(None), (val,), documents(val, self.settings.field), 0.0)
        if self._packed_remote:
            self._reader.check_room(self._packed_remote)

    def _learn(self, settings: BPE) -> None:
        _LOG.info("learning %d tokens into %s", settings.vocab_size, self._learned)
        names = self.selection.names if settings.by_site else list(self.parts)
        share = settings.sample // len(names)
        split = corpus.held_out(self.settings.held_out if self.settings.val is None else 0.0)

        def texts(name: str) -> Iterator[str]:
            left = share
            found = self.selection.documents(name) if settings.by_site else self._documents(self.parts[name])
            for document in self._divided(found):
                if left <= 0:
                    return
                if split(document) == "train":
                    left -= document.bytes
                    yield document.text

        Tokenizer.train(chain.from_iterable(map(texts, names)), settings.vocab_size).publish(self._learned)

    def _prepare(self, folder: Path | str, sources: tuple[str, ...], found: Iterator[Document], share: float) -> None:
        packs = self.settings.packing == "pack"
        if isinstance(folder, str) and not packs:  # nothing is written; blocks are verified as they come
            return
        if isinstance(folder, Path) and not folder.is_dir():
            _LOG.info("tokenizing %s into %s", ", ".join(sources), folder)
            try:
                corpus.write_corpus(
                    folder,
                    self._divided(found) if share else found,
                    self.tokenizer,
                    split=corpus.held_out(share),
                    shard_bytes=self.settings.shard_bytes,
                    workers=self.settings.prepare_workers,
                    about={"sources": list(sources)},
                )
            except FileExistsError:
                _LOG.info("another process has made %s meanwhile", folder)
        for split in corpus.SPLITS:
            if (shards := corpus.find_split(folder, split, self.tokenizer, self._reader)) is None:
                continue
            if isinstance(folder, Path):
                shards.verify()
            if packs:
                packed = Packed.open(shards, self.settings.sequence_length)
                self._packed_remote |= {packed.folder} if isinstance(folder, str) else set()

    def _divided(self, found: Iterator[Document]) -> Iterator[Document]:
        """Hold out the ends of documents if there are few documents.

        A site keeps whole ones, as it would beside others.
        """
        share = self.settings.held_out if self.settings.val is None and self.settings.share is None else 0.0
        return corpus.with_tails(found, share) if share else found

    def _documents(self, sources: tuple[str, ...]) -> Iterator[Document]:
        return chain.from_iterable(documents(source, self.settings.field) for source in sources)

    # -- on every process ----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Open the shards. Raises MisconfigurationError if documents do not suffice for both splits."""
        names = self.selection.names
        found = {name: self._find(name, "train") for name in names}
        if bare := [str(self._corpus(name)) for name, shards in found.items() if shards is None]:
            raise MisconfigurationError(
                f"held_out = {self.settings.held_out} leaves no documents to train with in {', '.join(bare)}: hold out less"
            )
        self.train = self._samples([shards for shards in found.values() if shards is not None])
        windows = self.settings.shuffle_window is not None
        for layout in self.train.layouts:
            layout.shards.warn_of_shuffling(len(layout), packed=isinstance(layout, Packed), in_windows=windows)
        if self.settings.val is not None:
            self.val = self._samples([corpus.open_split(self._corpus(None), "train", self.tokenizer, self._reader)])
        elif self.settings.held_out > 0:
            held = [shards for name in names if (shards := self._find(name, "val")) is not None]
            if not held and (site := self.settings.share) is not None:
                _LOG.warning("site %d of %d has no text to validate with", site.number, site.count)
                return
            if not held:
                raise MisconfigurationError(
                    self._without_val(sum(part.shards.documents for part in self.train.layouts))
                )
            self.val = self._samples(held)

    def teardown(self, stage: str) -> None:
        """End the threads that fetch tokens at addresses; the next reading begins others."""
        if "_reader" in self.__dict__:
            self._reader.close()

    def _find(self, name: str, split: str) -> TokenShards | None:
        return corpus.find_split(self._corpus(name), split, self.tokenizer, self._reader)

    def _without_val(self, documents: int) -> str:
        if len(self._ready) == len(self.parts):
            return (
                f"{', '.join(map(str, self._ready))} has no split val: tokenize with --held-out, name other text as val, or set "
                "held_out = 0 to do without"
            )
        more = "" if documents == 1 else "hold out more, "
        return (
            f"held_out = {self.settings.held_out} of {documents} document{'s' * (documents != 1)} leaves none to validate with: {more}name "
            "other text as val, or hold out 0 to do without"
        )

    def _samples(self, parts: list[TokenShards]) -> TokenSamples:
        length, tokenizer = self.settings.sequence_length, self.tokenizer
        layouts: list[Layout] = [
            Packed(shards, length) if self.settings.packing == "pack" else Windows(shards, length) for shards in parts
        ]
        pad = tokenizer.pad if tokenizer.pad is not None else tokenizer.eos
        return TokenSamples(layouts, tokenizer.token_bytes, pad=pad or 0, mask_documents=self.settings.mask_documents)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = self._opened(self.train)
        if not isinstance(self.settings.data, dict):
            return self._loader(samples, EpochOrder(len(samples), window=self.settings.shuffle_window))
        sizes = [len(layout) for layout in samples.layouts]
        weights = [
            self.settings.mixture.get(name, size) for name, size in zip(self.selection.names, sizes, strict=True)
        ]
        at, most, window = self.settings.mixture_at, self.settings.epoch_samples, self.settings.shuffle_window
        order = MixtureOrder(sizes, weights, at=at, samples=most, window=window)
        return self._loader(samples, order)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of held-out samples, in order, padded to whole batches on all ranks.

        Without held-out samples it is an empty list.
        """
        return [] if self.val is None else self._loader(self.val, EpochOrder(len(self.val), shuffle=False))

    test_dataloader = val_dataloader  # text that nobody trained on

    @property
    def batch_size(self) -> int:
        """Return the samples per step on each device.

        Raises MisconfigurationError if the global batch does not divide among them.
        """
        total = self.settings.global_batch_size
        if total is None:
            return self.settings.batch_size
        ranks = 1 if self.trainer is None else self.trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        if total % ranks:
            raise MisconfigurationError(f"global_batch_size {total} does not divide among {ranks} ranks that read data")
        return total // ranks

    def _loader(self, samples: TokenSamples, order: EpochOrder | MixtureOrder) -> DataLoader[Any]:
        workers = self.settings.workers
        return DataLoader(
            samples, self.batch_size, sampler=order, collate_fn=identity, num_workers=workers, pin_memory=self._on_gpu,
            persistent_workers=workers > 0,
        )  # fmt: skip

    @property
    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _opened(self, samples: TokenSamples | None) -> TokenSamples:
        if samples is None:
            raise RuntimeError('the data are not open: prepare_data() and setup("fit") come first')
        return samples

    def unigram_counts(self) -> npt.NDArray[np.uint64]:
        """Count each token (V,) of the training text; see `arclight.data.unigrams.count_tokens`."""
        return count_tokens(layout.shards for layout in self._opened(self.train).layouts)

    def state_dict(self) -> dict[str, Any]:
        """Return the digests of vocabulary and tokens, and the state of the sample order."""
        return {"vocabulary": self.tokenizer.digest, "tokens": self._digests(), "order": self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the vocabulary is the checkpoint's; warn of other text or sample order.

        Raises TokenizerError for another vocabulary.
        """
        if state_dict["vocabulary"] != self.tokenizer.digest:
            raise TokenizerError(
                f"the checkpoint was trained with another tokenizer (vocabulary {state_dict['vocabulary'][:12]}, this one is "
                f"{self.tokenizer.digest[:12]}): set tokenizer to the one it was trained with"
            )
        order = {"shuffle_window": "None", **state_dict.get("order", {})}  # none before they were recorded
        if self.train is not None and state_dict["tokens"] != self._digests():
            rank_zero_warn(
                "the training text is not what the checkpoint was trained on: its order begins again with other samples"
            )
        elif changed := [name for name, value in order.items() if value != self._order()[name]]:
            rank_zero_warn(
                f"{', '.join(changed)} is not what the checkpoint was trained with: until all text has been read once more, some of it "
                "comes twice and some not at all"
            )

    def _order(self) -> dict[str, str]:
        names = ("sequence_length", "packing", "mixture", "mixture_at", "epoch_samples", "shuffle_window")
        return {name: repr(getattr(self.settings, name)) for name in names}

    def _digests(self) -> list[str]:
        return [] if self.train is None else [layout.shards.digest for layout in self.train.layouts]

    # -- where things are kept -----------------------------------------------------------------------------------------

    @property
    def _learned(self) -> Path:
        settings, found = self.settings.tokenizer, self._fingerprints
        held = self.settings.held_out if self.settings.val is None else 0.0
        assert isinstance(settings, BPE)
        divided = [repr(self.settings.share)] if settings.by_site and self.settings.share is not None else []
        digest = _digest(found, self.settings.field, settings.vocab_size, settings.sample, held, *divided)
        return self.root / f"tokenizer-{digest}"

    @cached_property
    def _fingerprints(self) -> dict[str, list[list[Any]]]:
        return {name: [entry for s in sources for entry in fingerprint(s)] for name, sources in self.parts.items()}

    def _corpus(self, name: str | None) -> Path | str:
        """Return the folder of a part of the training text; of the validation text for None."""
        settings = self.settings
        given = settings.val if name is None else self.parts[name][0]
        if given is not None and (ready := corpus.corpora_among([given])):
            return ready[0]
        if name is None:
            assert settings.val is not None
            first, found, share = settings.val, fingerprint(settings.val), 0.0
        else:
            first, found = self.parts[name][0], self._fingerprints[name]
            share = settings.held_out if settings.val is None else 0.0
        title = (name or Path(first).stem or STDLIB).replace("/", "_")  # never a folder of another place
        divided = [] if name is None or settings.share is None else [repr(settings.share)]
        digest = _digest(found, settings.field, share, settings.shard_bytes, self.tokenizer.fingerprint, *divided)
        return self.root / f"{title}-{digest}"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *parts]).encode()).hexdigest()[:12]
