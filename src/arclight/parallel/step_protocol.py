"""Define the step of pipelines and context parallelism: split a batch, compute the loss.

`LanguageModel` is written on it, and users' modules may be; `PlanStrategy` checks for it (`lacking`), and the pipeline's `StepRunner` and
`ContextRunner` call such a `Runnable`. Its method names and the order of `Split` are what users' modules return: they must stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from arclight.parallel.plan import PlanError

Split = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional and keyword arguments of the model, and the targets of the loss."""


class Runnable(Protocol):
    """Offer what plans with ``pp`` or ``cp`` need to run a module's steps: plain attributes.

    The module writes its steps on :func:`batch_loss` and is otherwise as for one process; it returns ``total / count`` as its
    loss, and has a ``batch_weight`` that is this count for the whole batch.
    """

    model: nn.Module
    """What is cut into stages, and whose parameters are the module's. Its stages call it, or what is left of it."""
    runner: Any
    """None in one process. A strategy puts a callable here: ``runner(module, batch) -> (total, count)``."""

    def split_batch(self, batch: Any) -> Split:
        """Return ``(args, kwargs, targets)``.

        ``args`` go to the first stage, and from there what each stage returns goes to the next. ``kwargs`` go to every stage.
        ``targets`` go with the last stage's output into :meth:`loss`. Tensors have samples in dimension 0 and, if there are
        two dimensions or more and ``cp`` is used, the sequence in dimension 1; all else reaches every micro-batch as it is.
        Under ``cp`` the kwargs must contain ``positions`` (B, T), or None under that name for 0, 1, 2, ...: no process can count
        them from its own part.
        """
        ...

    def loss(self, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return the loss summed over all that counts in ``targets``, and their number.

        It is called once for each micro-batch.
        """
        ...

    # Optional: ``scale_losses(share, batch)``, for a module that adds losses of its own in backward. A pipeline's backward runs before the
    # module knows what its loss is multiplied by, on totals times ``share`` (a scalar tensor), which it passes here before each batch: a
    # loss that is added to the batch's mean has to be scaled by ``share`` times the batch's count.


def lacking(module: Any) -> str | None:
    """Name the first attribute of a `Runnable` that ``module`` does not have; None for one."""
    return next((name for name in ("model", "runner", "split_batch", "loss") if not hasattr(module, name)), None)


def own_batch_weight(module: Any) -> Callable[[Any], Any] | None:
    """Return the ``batch_weight`` of a module that has one of its own, else None."""
    found: Callable[[Any], Any] | None = getattr(module, "batch_weight", None)
    return None if getattr(found, "is_default", False) else found


def batch_loss(module: Runnable, batch: Any) -> tuple[Tensor, Tensor]:
    """Return ``(total, count)`` of a batch, for any step of ``module``.

    Both are scalars, and ``total`` has its gradient. In one process: one forward and the loss. On several, what the
    strategy's runner does: the gradients of a pipeline are computed in here already, and ``total.backward()`` only
    scales them and makes them known. ``count`` is that of the whole batch, and the mean of ``total`` over processes
    that share its sequences is the whole batch's.
    """
    if module.runner is not None:
        total, count = module.runner(module, batch)
        return total, count
    args, kwargs, targets = module.split_batch(batch)
    return module.loss(module.model(*args, **kwargs), targets)


def check_samples(split: Split) -> None:
    """Raise PlanError if tensors of a split differ in, or lack, samples in dimension 0."""
    sizes = {leaf.shape[0] for leaf in tree_flatten(split)[0] if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise PlanError(
            f"split_batch gave tensors with {' and '.join(map(str, sorted(sizes))) or 'no'} samples in dimension 0: "
            "micro-batches need the same number in all of them"
        )
    if 0 in sizes:
        raise PlanError("split_batch gave a batch without samples: leave out batches that are empty")


def with_positions(split: Split) -> Split:
    """Fill in 0, 1, 2, ... (B, T) for ``positions`` that are None in ``split``.

    A part of a model or sequence cannot count them.
    """
    args, kwargs, targets = split
    tokens = next((value for value in args if isinstance(value, Tensor)), None)
    if kwargs.get("positions", split) is None and tokens is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        kwargs = kwargs | {"positions": places.expand(tokens.shape[0], -1)}
    return args, kwargs, targets
