"""Train, load and apply tokenizers: byte-level BPE through HF tokenizers, or plain bytes.

`Tokenizer` and `ByteTokenizer` are public (``arclight.text``). Runs, corpora and programs store the files of one; shards, checkpoints and
programs its ``digest``, which is compared. So ids of a stored tokenizer and the digest must never change. Files are Hugging Face's
tokenizer.json and tokenizer_config.json; of bytes the latter alone.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_CONFIG, _MODEL, _TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"
FILES = (_CONFIG, _MODEL, _TEMPLATE)
"""Names of the files that `Tokenizer.load` reads in a folder."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token that is one byte, as SentencePiece names it
_ROLES = ("bos_token", "eos_token", "pad_token")


_CONTEXT = 8  # tokens before one that its text may depend on; a character has four tokens at most


class TokenizerError(ValueError):
    """A tokenizer that cannot be read or trained."""


class Tokenizer:
    """Turns text into token ids and back. Made by `train` or `load`, or a `ByteTokenizer`.

    ``bos``, ``eos`` and ``pad`` are ids, or None if the vocabulary has none. ``names`` gives the token of each id and
    ``pieces`` the bytes it stands for (empty for special tokens; None if a token's text depends on its neighbours).
    """

    names: list[str]
    pieces: list[bytes] | None = None
    specials: frozenset[int] = frozenset()
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    chat_templates: dict[str, str]

    @staticmethod
    def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train byte-level BPE on ``documents``, deterministically.

        Equal documents in equal order give equal vocabularies. Three of the ``vocab_size`` tokens are special, 256 are
        single bytes: any text can be written, whatever was learned. Raises TokenizerError if the text is too small
        for so many tokens, or the number is.
        """
        return _train(documents, vocab_size)

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Load a tokenizer from a folder or from a ``tokenizer.json`` of any kind.

        Raises FileNotFoundError if there is none, TokenizerError if it cannot be read.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        config = _read_config(folder / _CONFIG)
        if path.is_dir() and config.get("kind") == "bytes":
            return ByteTokenizer()
        model = path / _MODEL if path.is_dir() else path
        if not model.is_file():
            raise FileNotFoundError(f"{path} holds no tokenizer: neither a {_MODEL} nor a {_CONFIG} of kind bytes")
        try:
            engine = _tokenizers().Tokenizer.from_str(model.read_text(encoding="utf-8-sig"))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with a file
            raise TokenizerError(f"{model} is not a readable tokenizer: {error}") from error
        if (template := folder / _TEMPLATE).is_file():
            try:
                config = {**config, "chat_template": template.read_text(encoding="utf-8-sig")}
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{template} is not UTF-8 text: {error}") from error
        return HFTokenizer(engine, config)

    # -- what kinds differ in --------------------------------------------------------------------------------------

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Encode each text, in parallel if the kind can; special tokens are ordinary text."""
        raise NotImplementedError(type(self).__name__)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, specials: bool = False) -> list[int]:
        """Encode a text; with ``specials``, text spelt like a special token becomes that token.

        Chat templates need that.
        """
        ids = self._encode(text, specials)
        return [*self._one(self.bos, bos, "bos"), *ids, *self._one(self.eos, eos, "eos")]

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """Decode token ids to text; ``specials`` shows special tokens.

        Half a character becomes U+FFFD. Raises TokenizerError for an id that is no token.
        """
        raise NotImplementedError(type(self).__name__)

    def save(self, folder: str | Path) -> Path:
        """Write what `load` reads into ``folder``."""
        raise NotImplementedError(type(self).__name__)

    def publish(self, folder: Path) -> None:
        """Save into ``folder`` atomically, unless another process was quicker.

        The folder holds what `load` reads.
        """
        staging = folder.with_name(f".{folder.name}.{os.getpid()}.saving")
        self.save(staging)
        try:
            staging.rename(folder)
        except OSError:
            shutil.rmtree(staging)
            if not folder.is_dir():  # else it is there, and was made of the same
                raise

    def _encode(self, text: str, specials: bool) -> list[int]:
        raise NotImplementedError(type(self).__name__)

    # -- what they share -------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the vocabulary. Shards and models of other digests do not fit."""
        return hashlib.sha256(json.dumps([self.names, sorted(self.specials)]).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Digest of the vocabulary and of the rules that split text.

        Tokenizers with equal fingerprints give equal tokens.
        """
        return self.digest

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Bytes of text that each id stands for behind other text, (V,); 0 for special tokens."""
        if self.pieces is not None:
            return np.array([len(piece) for piece in self.pieces], np.int32)
        # Behind a word, for the space that begins a token is dropped where a text begins.
        word = next((t for t in range(self.vocab_size) if self.decode([t]).isalnum()), None)
        before = [] if word is None else [word]
        shown = len(self.decode(before).encode())
        lengths = [
            1 if _BYTE.fullmatch(name) else len(self.decode([*before, token]).encode()) - shown
            for token, name in enumerate(self.names)
        ]
        return np.array(lengths, np.int32)

    def bytes_per_token(self, texts: Sequence[str]) -> float:
        """Compute the mean UTF-8 bytes per token of the texts; 0 for no text."""
        tokens = sum(ids.size for ids in self.encode_batch(texts))
        return sum(len(text.encode()) for text in texts) / tokens if tokens else 0.0

    def stream(self, after: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder of tokens as they come behind ``after``, in whole characters."""
        return StreamDecoder(self, after)

    def _one(self, token: int | None, wanted: bool, role: str) -> list[int]:
        if wanted and token is None:
            raise TokenizerError(f"this tokenizer has no {role} token")
        return [token] if wanted and token is not None else []


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; then bos, eos and pad."""

    def __init__(self) -> None:
        self.names = [f"<0x{byte:02X}>" for byte in range(256)] + [BOS, EOS, PAD]
        self.pieces = [bytes([byte]) for byte in range(256)] + [b"", b"", b""]
        self.bos, self.eos, self.pad = 256, 257, 258
        self.specials, self.chat_templates = frozenset((256, 257, 258)), {}

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _encode(self, text: str, specials: bool) -> list[int]:
        if not specials:
            return list(text.encode())
        parts = re.split("(" + "|".join(map(re.escape, (BOS, EOS, PAD))) + ")", text)
        named = {BOS: 256, EOS: 257, PAD: 258}
        return [token for part in parts for token in ([named[part]] if part in named else part.encode())]

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        return _join(self, ids, specials)

    def save(self, folder: str | Path) -> Path:
        return _write_config(Path(folder), {"kind": "bytes"})


class HFTokenizer(Tokenizer):
    """Any ``tokenizer.json``, run by the HF tokenizers library."""

    def __init__(self, engine: Any, config: dict[str, Any]) -> None:
        self._config = config
        self._engine, self._described = engine, json.loads(engine.to_str())
        self._engine.no_truncation()  # either would change documents without a word
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        vocab: dict[str, int] = engine.get_vocab(with_added_tokens=True)
        self.names = [""] * (max(vocab.values(), default=-1) + 1)
        for name, number in vocab.items():
            self.names[number] = name
        added = engine.get_added_tokens_decoder()
        self.specials = frozenset(number for number, token in added.items() if token.special)
        self.pieces = self._pieces({number: token.content for number, token in added.items()})
        self.bos, self.eos, self.pad = (self._role(vocab, role) for role in _ROLES)
        self.chat_templates = _templates(config.get("chat_template") or {})

    @property
    def fingerprint(self) -> str:
        described = json.dumps([self._described, self.bos, self.eos], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    @cached_property
    def _with_specials(self) -> Any:
        engine = _tokenizers().Tokenizer.from_str(self._engine.to_str())
        engine.encode_special_tokens = False
        return engine

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        found = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def _encode(self, text: str, specials: bool) -> list[int]:
        engine = self._with_specials if specials else self._engine
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        if self.pieces is not None:
            return _join(self, ids, specials)
        text: str = self._engine.decode(_known(ids, _ENDLESS), skip_special_tokens=not specials)
        return text

    def save(self, folder: str | Path) -> Path:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._engine.save(str(folder / _MODEL))
        return _write_config(folder, self._config)

    def _role(self, vocab: dict[str, int], role: str) -> int | None:
        value = self._config.get(role)
        name = value.get("content") if isinstance(value, dict) else value
        if name is None:  # a lone tokenizer.json names no special tokens, except by the names that ours have
            name = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}[role]
            return vocab.get(name)
        if not isinstance(name, str) or name not in vocab:
            raise TokenizerError(f"{_CONFIG} names {name!r} as its {role}, which is not in the vocabulary")
        return vocab[name]

    def _pieces(self, added: dict[int, str]) -> list[bytes] | None:
        """List the bytes of each token, if the decoder does no more than join them."""
        decoder = self._described.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        table = _byte_letters()
        pieces = [b"" if i in self.specials else added.get(i, "").encode() for i in range(self.vocab_size)]
        for number, name in enumerate(self.names):
            if number not in added:
                known = all(letter in table for letter in name)  # others are text by themselves, as for the library
                pieces[number] = bytes(table[letter] for letter in name) if known else name.encode()
        return pieces


_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}" * 4
"""What bytes decode to that begin no character: one has four bytes at most."""


class StreamDecoder:
    """Streaming decoder: text from tokens one by one.

    What `push` gives is never taken back, and never half a character.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown, self._waiting = list(after[-_CONTEXT:]), list[int]()

    def push(self, *ids: int) -> str:
        """Return the characters that these tokens complete."""
        pieces = self._tokenizer.pieces
        if pieces is not None:
            return self._bytes.decode(b"".join(pieces[token] for token in ids))
        self._waiting += ids
        new = self._new()
        wrong = len(self._waiting) >= len(_NO_CHARACTER) and new.endswith(_NO_CHARACTER)
        if new.endswith("\N{REPLACEMENT CHARACTER}") and not wrong:
            return ""  # the start of a character, most likely
        self._shown, self._waiting = self._waiting or self._shown, []
        return new

    def end(self) -> str:
        """Return the rest: U+FFFD for a character that never was completed."""
        return self._bytes.decode(b"", final=True) if self._tokenizer.pieces is not None else self._new()

    def _new(self) -> str:
        """Decode the waiting tokens, which may depend on those before (a space between words)."""
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]


def _join(tokenizer: Tokenizer, ids: Iterable[int], specials: bool) -> str:
    pieces, names = tokenizer.pieces or [], tokenizer.names
    shown = tokenizer.specials if specials else frozenset[int]()
    known = _known(ids, tokenizer.vocab_size)
    return b"".join(names[t].encode() if t in shown else pieces[t] for t in known).decode("utf-8", "replace")


_ENDLESS = 2**32
"""The library leaves out ids beyond its vocabulary, as those of a model whose own is padded."""


def _known(ids: Iterable[int], size: int) -> list[int]:
    """Return token ids as a list.

    Raises TokenizerError for an id outside ``size``, as masked labels are.
    """
    known = [int(token) for token in ids]
    for token in known:
        if not 0 <= token < size:
            raise TokenizerError(
                f"{token} is not a token: they are numbered from 0 to {size - 1}: leave masked labels out, and use the tokenizer that "
                "the model was trained with"
            )
    return known


def _train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    smallest = 256 + len(_ROLES)
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size}: need at least {smallest}, for every byte and the special tokens"
        )
    library = _tokenizers()
    engine = library.Tokenizer(library.models.BPE())
    # Numbers in groups of three digits; otherwise the library's own rule for words, spaces and signs.
    digits = library.pre_tokenizers.Split(library.Regex(r"\p{N}{1,3}"), "isolated")
    letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.pre_tokenizer = library.pre_tokenizers.Sequence([digits, letters])
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(documents, trainer)
    learned = engine.get_vocab_size()
    if learned == smallest:
        raise TokenizerError("no text to learn tokens from: every document is empty, or no pair of letters repeats")
    if learned < vocab_size:
        raise TokenizerError(
            f"the text gives {learned} tokens only, not vocab_size {vocab_size}: use more text, or set a vocab_size of at most "
            f"{learned}"
        )
    return HFTokenizer(engine, dict(zip(_ROLES, (BOS, EOS, PAD), strict=True)))


def _tokenizers() -> Any:
    library = require("tokenizers", extra="text")
    if "TOKENIZERS_PARALLELISM" not in os.environ and not getattr(_tokenizers, "fork_hook", False):
        # Its threads do not survive a fork: in a forked child it must do without, and need not say so each time.
        os.register_at_fork(after_in_child=lambda: os.environ.setdefault("TOKENIZERS_PARALLELISM", "false"))
        _tokenizers.fork_hook = True  # type: ignore[attr-defined]
    return library


def _byte_letters() -> dict[str, int]:
    """Map letters to bytes as byte-level vocabularies do: printable ones to themselves.

    Other bytes have letters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} holds a {type(config).__name__}, and a tokenizer's settings are a table")
    return config


def _templates(given: Any) -> dict[str, str]:
    """Return chat templates by name.

    given: one template, a list of tables with ``name`` and ``template``, or a table. Raises TokenizerError for others.
    """
    if isinstance(given, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in given):
        given = {one["name"]: one["template"] for one in given}
    found = {"default": given} if isinstance(given, str) else given
    if not isinstance(found, dict) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise TokenizerError(
            f"{_CONFIG} has a chat_template that is neither a text nor texts by name: {str(given)[:60]}"
        )
    return found


def _write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder
