"""Split a user step's arguments into micro-batches, and weight each by its samples.

`PipelinedSteps` cuts each batch of a step with `split_step`, `parallelize_steps` the one that it decides by. Weights must add up to the
loss of the whole batch; a module may bring its own ``part_of_batch`` and ``batch_weight``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from arclight.fabric.batches import batch_size_of, split_batch
from arclight.parallel.pipeline.runtime.loss_reduction import ReductionKind
from arclight.parallel.plan import PlanError
from arclight.parallel.step_protocol import own_batch_weight


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch, with what else the step is called with.

    It is distinguished by its shapes.
    """

    step: str
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    weight: float
    """Weight of its loss."""
    counts: float
    """Its part of the batch's count, by which logged values are averaged."""
    seed: int

    def __repr__(self) -> str:
        """Show all that the shapes inside a model can depend on.

        File names, numbers of batches and the like are not part of it, nor are numbers
        of rows that are no samples (boxes of some images): code between parts that lets them shape what crosses a cut is found out.
        """
        leaves, structure = tree_flatten((self.args[:1], self.kwargs))
        return f"{self.step} {[self._shown(leaf) for leaf in leaves]} {structure}"

    def _shown(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            rows = leaf.shape[:1] if leaf.shape[:1] == (self.samples,) else "rows"
            return rows, tuple(leaf.shape[1:]), str(leaf.dtype)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return type(leaf).__name__, [
                self._shown(x) for x in tree_flatten([getattr(leaf, f.name) for f in fields(leaf)])[0]
            ]
        return leaf if isinstance(leaf, bool) else type(leaf).__name__


def split_samples(module: Any, batch: Any, number: int) -> list[tuple[Any, int]]:
    """Split ``batch`` evenly into ``number`` parts, each with its number of samples.

    There are fewer parts if it has fewer samples. A module may cut its own batches: ``part_of_batch(batch, start,
    stop)``. Otherwise all tensors have samples in dimension 0, and so have lists of that length. Raises PlanError if
    they do not.
    """
    size = batch_size_of(batch)
    count = max(1, min(number, size))
    if count > 1 and not hasattr(module, "part_of_batch"):
        _check(module, batch, size)
    return list(split_batch(module, batch, size, count))


def _check(module: Any, batch: Any, size: int) -> None:
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim]
    other = next((tuple(leaf.shape) for leaf in tensors if leaf.shape[0] != size), None)
    if other is not None:
        raise PlanError(
            f"a batch of {size} samples has a tensor of shape {other}, so it is not known how to cut it into micro-batches: give "
            f"{type(module).__name__} a part_of_batch(batch, start, stop), or make samples the first dimension of all tensors"
        )


def weights(module: Any, cut: list[tuple[Any, int]]) -> tuple[list[float], bool]:
    """Return the weight of each part, and whether it is the module's own (``batch_weight``).

    Without that, weights are numbers of samples.
    """
    count = own_batch_weight(module)
    if count is None:
        return [float(size) for _, size in cut], False
    counted = [count(part) for part, _ in cut]
    if any(isinstance(x, Tensor) for x in counted):
        return torch.stack([torch.as_tensor(x).double() for x in counted]).tolist(), True  # waits for a device once
    return [float(x) for x in counted], True


def hides_targets(module: Any, batch: Any) -> bool:
    """Return True for a batch with ignored targets (-100) that the module does not count."""
    integers = (
        x for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
    )
    return not weights(module, [(batch, 1)])[1] and any(
        bool((x == -100).any()) for x in integers if x.dtype is not torch.bool
    )


def split_step(
    module: Any,
    step: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: int,
    reduction: ReductionKind,
    seed: int,
    trains: bool = True,
) -> tuple[list[MicroBatch], bool]:
    """Return the micro-batches of a step's first argument.

    Also returns whether their weights are the module's own counts. Weights are shares of 1 where the module does not
    count. A micro-batch that counts nothing is left out of training if another does: the gradient of a mean of nothing is NaN.
    """
    if not args:
        raise PlanError(f"{step} was called without a batch: a pipeline cuts its first argument into micro-batches")
    cut = split_samples(module, args[0], number)
    counts, own = weights(module, cut)
    if trains and own and reduction == "token_mean" and any(counts):
        kept = [i for i, count in enumerate(counts) if count > 0]
        cut, counts = [cut[i] for i in kept], [counts[i] for i in kept]
    return list(_micro_batches(step, args, kwargs, cut, counts, _loss_weights(counts, own, reduction), seed)), own


def _micro_batches(
    step: str, args: tuple[Any, ...], kwargs: dict[str, Any], cut: list[tuple[Any, int]], counts: list[float], shares: list[float],
    seed: int,
) -> Iterator[MicroBatch]:  # fmt: skip
    for i, (part, size) in enumerate(cut):
        yield MicroBatch(step, i, (part, *args[1:]), kwargs, size, shares[i], counts[i], seed + i)


def _loss_weights(counts: list[float], own: bool, reduction: ReductionKind) -> list[float]:
    if reduction == "sum":
        return [1.0] * len(counts)
    if reduction == "micro_mean":
        return [1.0 / len(counts)] * len(counts)
    return counts if own else [count / max(sum(counts), 1.0) for count in counts]
