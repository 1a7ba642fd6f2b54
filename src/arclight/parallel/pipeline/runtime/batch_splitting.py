"""Split the arguments of a model's call into micro-batches, and merge their outputs.

`StepRunner` and `PipeRunner` split by `split_arguments`, `PipeRunner` merges by `merge_outputs`; `Reducer` is public. The same batch must
give the same parts on every rank. A whole batch of a user's step is cut elsewhere, by `steps.micro_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from arclight.parallel.plan import PlanError
from arclight.parallel.step_protocol import Split

REPLICATE = "replicate"
"""What goes into every micro-batch as it is."""

Spec = Any
"""How a tree of values is cut: a dimension for all tensors in it, ``"replicate"``, or the same tree (or a part of it from its root) of these."""


@dataclass(frozen=True)
class Reducer:
    """Outputs merged by ``function(so far, next)``, beginning with ``init``."""

    init: Any
    function: Callable[[Any, Any], Any]


def split_arguments(
    split: Split, number: int, chunks: Mapping[int | str, Spec] | None = None
) -> tuple[list[Split], str]:
    """Cut a call's arguments and targets into at most ``number`` micro-batches.

    Also returns why they are fewer, in words.

    chunks: how arguments are cut, by position or name (and "targets"); those that are not in it are cut along dimension 0. Tensors without
    dimensions and all that is no tensor go into every micro-batch. The first tensor says how many samples there are; others may have
    a multiple of that. Raises ValueError for tensors that have fewer, and PlanError for chunks that fit no argument.

    This cuts what a model is called with. A whole batch of a user, in whatever containers, is cut by `arclight.fabric.batches.split_batch`.
    """
    args, kwargs, _ = split
    named, specs = _named(split), chunks or {}
    known = [key for key, _ in named]
    unknown = [key for key in specs if key not in known]
    if unknown:
        raise PlanError(
            f"chunks say how {unknown[0]!r} is cut, but there is no such argument among {', '.join(map(repr, known))}"
        )
    leaves = [list(_leaves(str(key), value, specs.get(key, 0))) for key, value in named]
    count, samples, reason = _count([leaf for some in leaves for leaf in some], number)
    cut = [_cut(value, own, count, samples) for (_, value), own in zip(named, leaves, strict=True)]
    return [
        (
            tuple(parts[i] for parts in cut[: len(args)]),
            {k: cut[len(args) + n][i] for n, k in enumerate(kwargs)},
            cut[-1][i],
        )
        for i in range(count)
    ], reason


def samples_in(micro_batch: Split, chunks: Mapping[int | str, Spec] | None = None) -> int:
    """Count the samples of a micro-batch that `split_arguments` cut.

    They are counted in the first argument that is cut; 1 if none is.
    """
    specs = chunks or {}
    leaves = (leaf for key, value in _named(micro_batch) for leaf in _leaves(str(key), value, specs.get(key, 0)))
    return next((leaf.shape[dim] for _, leaf, dim in leaves if dim is not None), 1)


def _named(split: Split) -> list[tuple[int | str, Any]]:
    args, kwargs, targets = split
    return [*enumerate(args), *kwargs.items(), ("targets", targets)]


def _leaves(name: str, value: Any, spec: Spec) -> Iterator[tuple[str, Any, int | None]]:
    """Yield each leaf of ``value`` with its name and the dimension along which it is cut.

    The dimension is None for a leaf that is not cut.
    """
    if isinstance(spec, Mapping) and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner, spec.get(key, 0))
        return
    nested = isinstance(spec, (tuple, list)) and isinstance(value, (tuple, list)) and not _is_packed(value)
    if nested and len(spec) == len(value):
        for place, (inner, inner_spec) in enumerate(zip(value, spec, strict=True)):
            yield from _leaves(f"{name}.{place}", inner, inner_spec)
        return
    if not (spec == REPLICATE or (isinstance(spec, int) and not isinstance(spec, bool))):
        raise PlanError(
            f"chunks say {spec!r} of {name}, which is a {type(value).__name__}: give a dimension, {REPLICATE!r}, or the same tree of these"
        )
    if spec != REPLICATE and any(map(_is_packed, tree_leaves(value, is_leaf=_is_packed))):
        raise PlanError(
            f"{name} holds a PackedSequence, whose tensors have no dimension of samples, so it cannot be cut into micro-batches: give padded "
            "sequences with their lengths"
        )
    members: list[Any] = [value] if isinstance(value, Tensor) else tree_flatten(value)[0]
    for leaf in members:
        cut = isinstance(leaf, Tensor) and leaf.ndim > 0 and isinstance(spec, int)
        if cut and not -leaf.ndim <= spec < leaf.ndim:
            raise PlanError(f"{name} has {leaf.ndim} dimensions and cannot be cut along dimension {spec}")
        yield name, leaf, spec if cut else None


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _count(leaves: list[tuple[str, Any, int | None]], number: int) -> tuple[int, int, str]:
    """Return the numbers of micro-batches and samples that the arguments allow.

    Also why there are fewer micro-batches than ``number``, in words; empty if there are not.
    """
    count, samples, first, reason = number, 0, "", ""
    for name, leaf, dim in leaves:
        if dim is None:
            continue
        size = leaf.shape[dim]
        if not first:
            count, samples, first = min(number, size), size, name
            if size == 0:
                raise ValueError(f"{name} has no samples in dimension {dim}: leave out batches that are empty")
            if count < number:
                reason = f"{name} has {size} samples"
        elif size < count or size % samples:
            raise ValueError(
                f"{name} has {size} samples in dimension {dim} and {first} has {samples}: the number of micro-batches ({count}) cannot be "
                f"reduced for one argument alone; give both the same, or say that {name} is not cut: chunks = {{{name!r}: {REPLICATE!r}}}"
            )
    return count, samples, reason


def _cut(value: Any, leaves: list[tuple[str, Any, int | None]], count: int, samples: int) -> list[Any]:
    """Return ``value`` for each micro-batch."""
    parts = [_parts(leaf, dim, count, samples) for _, leaf, dim in leaves]
    if len(leaves) == 1 and leaves[0][1] is value:
        return parts[0]
    structure = tree_flatten(value)[1]
    return [tree_unflatten([part[index] for part in parts], structure) for index in range(count)]


def _parts(value: Any, dim: int | None, count: int, samples: int) -> list[Any]:
    if dim is None:
        return [value] * count
    rows = value.shape[dim] // samples
    if rows == 1:
        return list(value.tensor_split(count, dim))
    ends = [rows * (number * (samples // count) + min(number, samples % count)) for number in range(1, count)]
    return list(value.tensor_split(ends, dim))


def merge_outputs(outputs: list[Any], spec: Spec, weights: list[int]) -> Any:
    """Join the outputs of all micro-batches, in their own structure.

    weights: numbers of samples.

    ``spec`` says of all values, or of each in the same tree: a dimension to put tensors together along, "sum", "mean" (by samples), or a
    `Reducer`. What is no tensor must be the same in all. Raises PlanError if that does not fit. What a user's own step returned comes with
    no such spec: `steps.step_outputs.merge_step_outputs` tells by shapes what has a row for each sample.
    """
    first = outputs[0]
    if isinstance(spec, Reducer):
        return _merge_leaf(outputs, spec, weights)
    if isinstance(first, Mapping):  # of a class of its own, as transformers' outputs, too
        found = {key: merge_outputs([output[key] for output in outputs], _inner(spec, key), weights) for key in first}
        return found if type(first) is dict else type(first)(**found)
    if isinstance(first, (tuple, list)):
        members = [
            merge_outputs([output[i] for output in outputs], _inner(spec, i), weights) for i in range(len(first))
        ]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    leaves, structure = tree_flatten(first)
    if not (len(leaves) == 1 and leaves[0] is first):
        others = [tree_flatten(output)[0] for output in outputs]
        return tree_unflatten(
            [merge_outputs(list(same), spec, weights) for same in zip(*others, strict=True)], structure
        )
    return _merge_leaf(outputs, spec, weights)


def _inner(spec: Spec, key: Any) -> Spec:
    if isinstance(spec, Mapping):
        return spec.get(key, 0)
    return spec[key] if isinstance(spec, (tuple, list)) else spec


def _merge_leaf(outputs: list[Any], spec: Spec, weights: list[int]) -> Any:
    first = outputs[0]
    if isinstance(spec, Reducer):
        found = spec.init
        for output in outputs:
            found = spec.function(found, output)
        return found
    if not isinstance(first, Tensor):
        if any(output != first for output in outputs):
            raise PlanError(
                f"micro-batches gave {first!r} and others: say how to put them together, outputs = Reducer(...)"
            )
        return first
    if spec == "sum":
        return sum(outputs[1:], first)
    if spec == "mean":
        return sum(output * (weight / sum(weights)) for output, weight in zip(outputs, weights, strict=True))
    if not isinstance(spec, int):
        raise PlanError(
            f"outputs = {spec!r} is not known: give a dimension, 'sum', 'mean', or a Reducer, for all or in the same tree"
        )
    if first.ndim == 0:
        raise PlanError(
            "micro-batches gave a number each, which cannot be merged along a dimension: say outputs = 'mean' or 'sum', or leave it out"
        )
    return torch.cat(outputs, spec)


def detached(tree: Any) -> Any:
    """Return ``tree`` without the graphs of its tensors."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)
