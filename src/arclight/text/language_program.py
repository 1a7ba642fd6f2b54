"""Run a language program: its description, its tokenizer, and the cache that goes from call to call."""

from __future__ import annotations

import base64
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.program import Program
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.model.decoder import Decoder

TASK = "language"
LARGEST_TOKENIZER = 1 << 28
"""Bytes of all files of a tokenizer that are unpacked from a program."""


def described(decoder: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Describe a language program: what `ProgramRun` needs, and the files of its tokenizer, compressed."""
    described: dict[str, Any] = {
        "task": TASK,
        "vocab_size": decoder.config.vocab_size,
        "max_positions": decoder.config.max_positions,
        "placeholders": list(decoder.placeholders),
    }
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            files = sorted(tokenizer.save(folder).iterdir())
            packed = {file.name: base64.b64encode(zlib.compress(file.read_bytes())).decode() for file in files}
        described |= {"tokenizer": tokenizer.digest, "tokenizer_files": packed}
    return described


def tokenizer_of(program: Program) -> Tokenizer:
    """Return the tokenizer stored in a language program; ProgramError where there is none, or it is another one."""
    _check(program)
    packed = program.metadata.get("tokenizer_files")
    if not packed:
        raise ProgramError(
            f"{program.path} was exported without a tokenizer: load the one that its model was trained with"
        )
    with tempfile.TemporaryDirectory() as folder:
        left = LARGEST_TOKENIZER
        for name, content in packed.items():
            if Path(name).name != name or name == "..":
                raise ProgramError(f"{program.path} names a file of its tokenizer {name!r}, which is no plain name")
            file = _unpacked(program.path, name, content, left)
            left -= len(file)
            (Path(folder) / name).write_bytes(file)
        try:
            tokenizer = Tokenizer.load(folder)
        except (ValueError, FileNotFoundError) as error:
            raise ProgramError(f"{program.path} holds no tokenizer that can be read: export it again") from error
    if tokenizer.digest != program.metadata.get("tokenizer"):
        raise ProgramError(f"{program.path} holds another tokenizer than it says: export it again")
    return tokenizer


def _unpacked(path: Path, name: str, content: Any, limit: int) -> bytes:
    """Decompress a file of a tokenizer, of at most ``limit`` bytes: a short text may stand for any number of them."""
    try:
        stream = zlib.decompressobj()
        file = stream.decompress(base64.b64decode(content), limit + 1)
    except (ValueError, TypeError, zlib.error) as error:
        raise ProgramError(f"{path}: the file {name!r} of its tokenizer is malformed: {error}") from error
    if len(file) > limit:
        raise ProgramError(f"{path}: the files of its tokenizer have more than {LARGEST_TOKENIZER} bytes")
    if not stream.eof:
        raise ProgramError(f"{path}: the file {name!r} of its tokenizer is cut short: export it again")
    return file


class ProgramRun:
    """Generation by one program: tokens of a batch in, logits out; the cache is kept from step to step."""

    def __init__(self, program: Program) -> None:
        _check(program)
        self.vocab_size: int = program.metadata["vocab_size"]
        self.max_positions: int = program.metadata["max_positions"]
        self.placeholders: tuple[int, ...] = tuple(program.metadata["placeholders"])
        self.device = torch.device("cpu")
        self._program = program
        self._padding = torch.zeros(0, dtype=torch.int64)
        self._past: list[Tensor] = []

    def start(self, padding_B: Tensor, length: int) -> None:
        """Begin with as many sequences as ``padding_B`` has; the cache grows as far as it must."""
        del length
        self._padding = padding_B
        shapes = [spec.shape for spec in self._program.inputs[2:]]
        self._past = [torch.empty(len(padding_B), int(shape[1]), 0, int(shape[3])) for shape in shapes]

    def logits(self, tokens_BT: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Compute the logits (B, V) behind ``tokens_BT``."""
        if inputs:
            raise TypeError(f"a program takes tokens alone, got {', '.join(inputs)}: generate with the model itself")
        logits, *self._past = self._program(tokens_BT, self._padding, *self._past)
        return logits  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences (indices into the batch)."""
        self._padding, self._past = self._padding[rows], [held[rows] for held in self._past]


def _check(program: Program) -> None:
    """Raise ProgramError for a program that does not generate text."""
    if program.metadata.get("task") != TASK:
        raise ProgramError(f"{program.path} is no language program: export a language model with arclight export")
    if "max_positions" not in program.metadata:
        raise ProgramError(
            f"{program.path} is a language program of an older arclight, without a cache: export the model again"
        )
