"""Export a trained language model as a program: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from arclight.deploy import Program, export, quantize
from arclight.deploy.settings import Quantization
from arclight.text.language_model import LanguageModel

CHECKED = 3
"""Sequences on which the program is compared with the model."""


def export_language_model(
    model: LanguageModel, path: Path | str, batches: Sequence[Tensor], recipe: Quantization | None = None
) -> Program:  # fmt: skip
    """Write ``model`` as one program file: float32, or quantized by ``recipe``, on ``batches`` if it is calibrated.

    batches: token ids (B, T) int64 of real text; the program takes that T, and any B. Shorter texts are padded at the right, where
    nothing that counts looks. Raises ExportError or QuantizeError where the program would not compute what the model does.
    """
    decoder: Any = model.model
    if recipe is not None:
        calibration = list(batches) if recipe.needs_calibration else None
        decoder = quantize(decoder, calibration, recipe=recipe, example=batches[0])
    metadata = {"task": "language", "model": model.settings.model, "vocab_size": model.hparams["vocab_size"]}
    if model.tokenizer is not None:
        metadata["tokenizer"] = model.tokenizer.digest
    return export(
        decoder, path, example_inputs=batches[0][:CHECKED], input_names=["tokens"], output_names=["logits"], metadata=metadata
    )  # fmt: skip
