"""Parameter groups: which parameters a rule updates, and which weights decay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from arclight._intervals import NonNegativeFloat, check
from arclight.optim.optimizer import MixedOptimizer
from arclight.optim.settings import Muon, _Rule

Pair = tuple[str, torch.nn.Parameter]


def decay_groups(parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: those of two or more dimensions decay, biases and normalisation do not."""
    check("weight_decay", weight_decay, NonNegativeFloat)
    kept = _by_decay([(name, p) for name, p in parameters if p.requires_grad], weight_decay)
    if not kept:
        raise ValueError("no parameter requires gradients; is everything frozen?")
    return kept


def _by_decay(trainable: list[Pair], weight_decay: float) -> list[dict[str, Any]]:
    matrices, vectors = [x for x in trainable if x[1].ndim >= 2], [x for x in trainable if x[1].ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build(
    default: _Rule, rules: Sequence[_Rule], parameters: Iterable[Pair], all_names: Iterable[str] = ()
) -> MixedOptimizer:
    """An optimizer of the trainable ``parameters``, each in the first of ``rules`` whose pattern is found in its name.

    Raises ValueError where nothing is trainable, and for a pattern that has no parameter among these and ``all_names``.
    """
    known = list(parameters)
    taken = assign([name for name, _ in known], [rule.pattern for rule in rules], all_names)
    groups: list[dict[str, Any]] = []
    for number, rule in enumerate((*rules, default)):
        own = [pair for pair, home in zip(known, taken, strict=True) if home == number and pair[1].requires_grad]
        groups += _groups_of(rule, own)
    if not groups:
        raise ValueError("no parameter requires gradients; is everything frozen?")
    return MixedOptimizer(groups, known)


def assign(names: Sequence[str], patterns: Sequence[str], all_names: Iterable[str] = ()) -> list[int]:
    """For each name the number of the first pattern that is found in it, ``len(patterns)`` for none."""
    everything = list(dict.fromkeys((*names, *all_names)))
    homes = {
        name: next((n for n, pattern in enumerate(patterns) if re.search(pattern, name)), len(patterns))
        for name in everything
    }
    for number, pattern in enumerate(patterns):
        if number in homes.values():
            continue
        earlier = [name for name in everything if re.search(pattern, name)]
        if earlier:
            first = patterns[homes[earlier[0]]]
            raise ValueError(f"pattern {pattern!r} gets no parameter: {earlier[0]} is taken by {first!r} before it")
        plain = re.sub(r"\\.|[^\w.]", "", pattern.replace(r"\.", "."))
        near = difflib.get_close_matches(plain, everything, 3, 0.0)
        raise ValueError(f"pattern {pattern!r} matches no parameter; the nearest names are {', '.join(near) or 'none'}")
    return [homes[name] for name in names]


def _groups_of(rule: _Rule, own: list[Pair]) -> list[dict[str, Any]]:
    """Parameter groups with the options of ``rule``, split by what decays."""
    if isinstance(rule, Muon):
        hidden = {name for name, p in own if _is_hidden(rule, name, p)}
        rest = _groups_of(rule.others, [pair for pair in own if pair[0] not in hidden])
        matrices = [pair for pair in own if pair[0] in hidden]
        return _with(rule, [{"params": matrices, "weight_decay": rule.weight_decay}] if matrices else []) + rest
    return _with(rule, _by_decay(own, rule.weight_decay))  # type: ignore[attr-defined]


def _is_hidden(rule: Muon, name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is a hidden matrix or a stack of them; its name has to tell that from other uses of its shape."""
    if re.search(rule.not_hidden, name):
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and re.search(rule.stacks, name) is not None)


def _with(rule: _Rule, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule.options() | group for group in groups]
