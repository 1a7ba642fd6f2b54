"""Describe language modelling to the planner: a model, a batch and a loss, without data.

``arclight plan`` (`recipe_plan`) calls it for recipes of language models. Settings come in; out goes a `Workload`, which
`parallel.planning.chain` traces on the meta device. Its loss stands for that of `LanguageModel`, without a cap of logits: a change of the
cost there needs one here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from arclight.optim.settings import SGD, AdamW
from arclight.parallel.hardware import Hardware
from arclight.parallel.planning.chain import Workload
from arclight.text.families.zoo import build_model
from arclight.text.language_model import VOCABULARY_MULTIPLE
from arclight.text.loss import cross_entropy
from arclight.text.settings import LanguageTask


def workload(
    settings: LanguageTask, *, samples: int, device: Hardware, vocab_size: int | None = None, compiled: bool = True,
    compute: torch.dtype = torch.bfloat16,
) -> Workload:  # fmt: skip
    """Describe what ``settings`` train with ``samples`` sequences a step on ``device``.

    vocab_size: ids of the tokenizer, if the settings do not give the model's. Raises ValueError for an unknown model.
    """
    overrides = fields(settings, vocab_size)

    def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        (weight,) = model.output.parameters(recurse=False)  # type: ignore[union-attr]
        hidden = model(given["tokens"], logits=False)
        return cross_entropy(hidden, weight, given["labels"], chunk=settings.loss_chunk) / given["labels"].numel()

    return Workload(
        lambda: build_model(settings.model, **overrides), _batch, loss, samples, settings.data.sequence_length, compute, compiled,
        moments=_moments(settings.optimizer), device=device,
    )  # fmt: skip


def fields(settings: LanguageTask, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the fields of the model's configuration that are not its usual ones.

    ``vocab_size`` is as for :func:`workload`.
    """
    overrides = dict(settings.overrides)
    if vocab_size is not None:
        overrides.setdefault("vocab_size", -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
    return overrides


def _batch(samples: int, sequence: int) -> dict[str, Tensor]:
    return {name: torch.zeros(samples, sequence, dtype=torch.int64) for name in ("tokens", "labels")}


def _moments(optimizer: Any) -> int:
    """Count what the optimizer keeps of each parameter, in float32 tensors of its size.

    Two bfloat16 moments count as one. Of mixed optimizers the most is taken.
    """
    if isinstance(optimizer, AdamW):
        return 1 if optimizer.state_dtype == "bfloat16" else 2
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    if hasattr(optimizer, "groups"):
        return max(_moments(group) for group in (*optimizer.groups, optimizer.default))
    return 2  # Muon keeps one of matrices, and AdamW's two of all else


def with_batches(settings: LanguageTask, batch_size: int) -> LanguageTask:
    """Return the settings with so many samples a step on each process that reads data."""
    data = dataclasses.replace(settings.data, batch_size=batch_size, global_batch_size=None)
    return dataclasses.replace(settings, data=data)
