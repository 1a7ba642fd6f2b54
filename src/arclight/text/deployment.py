"""Export a trained language model as a program with its cache inside: tokens and earlier keys in, logits and all keys out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arclight.deploy import Program, export, quantize
from arclight.deploy.capture import frozen_copy
from arclight.deploy.settings import BFloat16, Quantization
from arclight.text.data.tokenizer import Tokenizer
from arclight.text.language_model import LanguageModel
from arclight.text.language_program import described
from arclight.text.model.decoder import Decoder
from arclight.text.model.kv_cache import KVCache
from arclight.text.model.moe import Router

CHECKED = 3
"""Sequences on which the program is compared with the model."""
DYNAMIC = {"tokens": {0: "batch", 1: "time"}, "padding": {0: "batch"}, "past": {0: "batch", 2: "past"}}
"""Dimensions of a program that have any size, by input."""


class CachedDecoder(nn.Module):
    """A decoder as its program computes it, with the cache as inputs and outputs.

    tokens: (B, T) int64. padding: (B,) int64, tokens without meaning at the left of each sequence. past: what each layer holds of
    earlier tokens, (B, K, P, C) in the order of `KVCache.tensors`. Gives the logits (B, V) of the last tokens, and the same
    tensors of P + T tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, padding: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = _PassedCache(past, padding)
        logits = self.decoder(tokens, cache=cache, last=True)[:, 0]
        return (logits, *cache.present)

    @torch.no_grad()
    def empty(self, batch: int) -> tuple[Tensor, ...]:
        """Return a cache that holds no token of ``batch`` sequences."""
        cache = KVCache(1, 1)
        self.decoder(torch.zeros(1, 1, dtype=torch.int64), cache=cache, last=True)
        return tuple(held.new_empty(batch, held.shape[1], 0, held.shape[3]) for held in cache.tensors())


class _PassedCache(KVCache):
    """Cache of one call: earlier tokens are passed in, and joined with the new ones in ``present``."""

    def __init__(self, past: Sequence[Tensor], padding: Tensor) -> None:
        super().__init__(padding.shape[0], 0, padding)
        self.used = past[0].shape[2]
        self.present: list[Tensor] = []
        self._past = iter(past)

    def extend(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        joined = tuple(torch.cat((next(self._past), x), 2) for x in new)  # layers run in order
        self.present += joined
        return joined


def export_language_model(
    model: LanguageModel | Decoder,
    path: Path | str,
    batches: Sequence[Tensor],
    recipe: Quantization | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Program:
    """Write ``model`` as one program: float32, or quantized by ``recipe``, on ``batches`` if it is calibrated.

    batches: token ids (B, T) int64 of real text, T at least 4. The program takes any number of sequences, of any length up to the
    model's positions; see `CachedDecoder` for its inputs. It is compared with the model where it reads prompts, where it adds single
    tokens, and where sequences of different lengths go on. ``tokenizer`` (default: the model's) is stored in the program.
    Raises ExportError or QuantizeError where the program would not compute what the model does.
    """
    decoder: Decoder = model.model if isinstance(model, LanguageModel) else model
    metadata: dict[str, Any] = {}
    if isinstance(model, LanguageModel):
        tokenizer, metadata = tokenizer or model.tokenizer, {"model": model.settings.model}
    cached = frozen_copy(CachedDecoder(decoder))
    assert isinstance(cached, CachedDecoder)
    inputs = _inputs(cached, batches[0][:CHECKED].cpu())
    layers = len(inputs["prompts"]) - 2
    exported: Any = cached
    if recipe is not None:
        calibration = (
            [_inputs(cached, batch.cpu())["continued"] for batch in batches] if recipe.needs_calibration else None
        )
        exported = quantize(
            cached,
            calibration,
            recipe=_inside(recipe, cached),
            example=inputs["prompts"],
            dynamic=DYNAMIC,
            parts=lambda logits, *_: {"logits": logits},  # what is cached is judged by them
        )
    return export(
        exported,
        path,
        example_inputs=inputs.pop("steps"),
        comparisons=inputs,
        dynamic=DYNAMIC,
        input_names=["tokens", "padding", *(f"past.{place}" for place in range(layers))],
        output_names=["logits", *(f"present.{place}" for place in range(layers))],
        metadata=metadata | described(decoder, tokenizer),
    )


def _inside(recipe: Quantization, cached: CachedDecoder) -> Quantization:
    """Return ``recipe`` with the modules of ``skip`` called as in ``cached``, and routers among them.

    Another choice of experts is no rounding error.
    """
    if isinstance(recipe, BFloat16):
        return recipe
    asked = [f"decoder.{name.removeprefix('decoder.')}" for name in recipe.skip]
    routers = [name for name, module in cached.named_modules() if isinstance(module, Router)]
    return replace(recipe, skip=tuple(dict.fromkeys([*asked, *routers])))


@torch.no_grad()
def _inputs(cached: CachedDecoder, tokens_BT: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return inputs of every kind that generation makes, from texts of equal length."""
    batch, length = tokens_BT.shape
    if length < 4:
        raise ValueError(f"texts of {length} tokens are too short to compare a program on: give at least 4")
    none, ragged = torch.zeros(batch, dtype=torch.int64), torch.arange(batch) % (length // 2)
    half, last = length // 2, length - 1
    return {
        "prompts": (tokens_BT[:, :last], none, *cached.empty(batch)),
        "steps": (tokens_BT[:, last:], none, *cached(tokens_BT[:, :last], none, *cached.empty(batch))[1:]),
        "continued": (tokens_BT[:, half:], ragged, *cached(tokens_BT[:, :half], ragged, *cached.empty(batch))[1:]),
        "first token": (tokens_BT[:1, :1], none[:1], *cached.empty(1)),
    }
