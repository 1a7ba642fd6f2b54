"""Export and run embedding programs: texts in, unit vectors out.

A vector is the normalised mean of a text's last hidden states. ``arclight export --embedding`` writes a program
(`LanguageModel.configure_embedding`), and so does `export_embedding_model`; ``arclight serve`` runs it through
`Embedder`. Names and shapes of inputs and outputs and ``metadata["task"]`` are stored in exported files and stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.deploy.capture import frozen_copy
from arclight.deploy.errors import ProgramError
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.language_program import deployment_by, described, tokenizer_of
from arclight.text.model.decoder import Decoder

if TYPE_CHECKING:
    from arclight.deploy.deployment import Deployment
    from arclight.deploy.programs.program import Program
    from arclight.deploy.settings import Quantization

TASK = "embedding"
DYNAMIC = {"tokens": {0: "batch", 1: "time"}, "lengths": {0: "batch"}}
"""Dynamic dimensions of the program's inputs."""
BATCH = 8
"""Most texts that the server passes to `Embedder.embed` at once."""
Array = np.ndarray[Any, Any]


class PooledDecoder(nn.Module):
    """A decoder with mean pooling: the module that is exported.

    tokens: (B, T) int64, padded at the right. lengths: (B,) int64, tokens of each text, at least one. Returns (B, D): the mean over a
    text's tokens of the hidden states from which the decoder would compute logits, divided by its Euclidean norm. A decoder is
    causal, so padding at the right changes nothing before it, and the mean leaves it out.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        h_BTD = self.decoder.hidden(tokens).float()
        is_text_BT = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        sum_BD = (h_BTD * is_text_BT[..., None]).sum(1)
        return F.normalize(sum_BD / lengths[:, None], dim=-1)


def embedding_deployment(
    decoder: Decoder, batches: Sequence[Tensor], tokenizer: Tokenizer | None, metadata: Mapping[str, Any] | None = None
) -> Deployment:
    """Describe the export of ``decoder`` as an embedding program.

    ``batches``: token ids (B, T) int64 of real text, to compare and calibrate on. The program takes any number of
    texts, of any length up to the model's positions; see `PooledDecoder`. ``tokenizer`` is stored in it.
    """
    from arclight.deploy.deployment import EXAMPLES, Deployment
    from arclight.text.model.moe import BaseRouter

    pooled = frozen_copy(PooledDecoder(decoder))
    tokens_BT = batches[0][:EXAMPLES].cpu()
    batch, length = tokens_BT.shape
    if batch < 2 or length < 4:
        raise ValueError(
            f"{batch} texts of {length} tokens are too few to compare a program on: give at least 2 texts of 4 tokens"
        )
    whole = torch.full((batch,), length)
    return Deployment(
        model=pooled,
        example_inputs=(tokens_BT, whole),
        calibration=((tokens.cpu(), torch.full((len(tokens),), tokens.shape[1])) for tokens in batches),
        comparisons={
            "texts of different lengths": (tokens_BT, torch.arange(batch) % (length - 1) + 1),
            "one token": (tokens_BT[:1, :1], torch.ones(1, dtype=torch.int64)),
        },
        dynamic=DYNAMIC,
        input_names=["tokens", "lengths"],
        output_names=["embeddings"],
        float_modules=tuple(  # int8 routers would choose other experts, which is more than a rounding error
            name for name, module in pooled.named_modules() if isinstance(module, BaseRouter)
        ),
        prefix="decoder.",
        metadata={**(metadata or {}), **described(decoder, tokenizer), "task": TASK},
    )


def export_embedding_model(
    model: Any,
    path: Path | str,
    batches: Sequence[Tensor],
    recipe: Quantization | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Program:
    """Export ``model``, a `LanguageModel` or its decoder, as an embedding program.

    See `embedding_deployment`, and `ship` for options and errors.
    """
    from arclight.deploy.deployment import ship

    deployment = deployment_by(embedding_deployment, model, batches, tokenizer)
    program: Program = ship(deployment, path, recipe, **options)
    return program


class Embedder:
    """Embed texts by a program; thread-safe."""

    def __init__(self, program: Program) -> None:
        """Open ``program``.

        Raises ProgramError for a program of another task, or without a tokenizer.
        """
        self.program = program
        self.tokenizer = tokenizer_of(program, TASK)
        self.vocab_size: int = program.metadata["vocab_size"]
        self.max_positions: int = program.metadata["max_positions"]
        shape = program.outputs[0].shape if program.outputs else ()
        dimensions = shape[1] if len(shape) == 2 else None
        if not isinstance(dimensions, int) or len(program.inputs) != 2:
            raise ProgramError(
                f"{program.path} is marked as an embedding program, but has other inputs or outputs: export it again"
            )
        self.dimensions = dimensions
        """Elements of an embedding."""

    def encode(self, text: str | Sequence[int]) -> list[int]:
        """Encode a text to token ids, or check given ids.

        Raises ValueError for an empty or too long text, and for ids outside the vocabulary.
        """
        ids = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
        if not ids:
            raise ValueError("a text is empty, and so has no embedding: leave it out")
        if len(ids) > self.max_positions:
            raise ValueError(
                f"a text has {len(ids)} tokens, and the model has {self.max_positions} positions: shorten it"
            )
        if wrong := [one for one in ids if not 0 <= one < self.vocab_size]:
            raise ValueError(f"{wrong[0]} is not a token id: the vocabulary has {self.vocab_size} tokens")
        return ids

    def embed(self, texts: Sequence[Sequence[int]]) -> Array:
        """Compute the embeddings (B, D) float32 of at most `BATCH` texts.

        Texts are given as token ids by `encode`. Where a program rounds the samples of a call in one range, each text is computed apart.
        """
        if not texts:
            return np.zeros((0, self.dimensions), np.float32)
        if self.program.rounds_together and len(texts) > 1:
            return np.concatenate([self.embed([text]) for text in texts])
        lengths = np.array([len(text) for text in texts], np.int64)
        tokens = np.zeros((len(texts), int(lengths.max())), np.int64)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        found: Array = self.program(tokens, lengths)
        return found
