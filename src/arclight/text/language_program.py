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
        for name, content in packed.items():
            if Path(name).name != name:
                raise ProgramError(f"{program.path} names a file of its tokenizer {name!r}, which is no plain name")
            (Path(folder) / name).write_bytes(zlib.decompress(base64.b64decode(content)))
        tokenizer = Tokenizer.load(folder)
    if tokenizer.digest != program.metadata["tokenizer"]:
        raise ProgramError(f"{program.path} holds another tokenizer than it says: export it again")
    return tokenizer


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
