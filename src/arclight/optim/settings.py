"""Define optimizer settings, without importing torch, and build parameter groups from them.

A recipe's table ``[task.optimizer]`` is one of these classes; ``text.language_model``, ``text.heads`` and ``vision.tasks.module`` call
``build`` on it. Field names are recipe keys and stay, their docstrings are texts of ``arclight train --help``. ``options`` become the
groups of `MixedOptimizer`, which checkpoints hold. Parameters of two or more dimensions decay; biases and normalisation do not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from arclight._intervals import Checked, Fraction, NonNegativeFloat, PositiveInt, ProperFraction, check

if TYPE_CHECKING:
    import torch

    from arclight.optim.optimizer import MixedOptimizer


Named = Iterable[tuple[str, "torch.nn.Parameter"]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Factors by which a parametrisation (muP) multiplies the options of one parameter."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0
    width: float = 1.0
    """The part of ``lr`` that is a division by the width; Muon, whose updates keep their spectral norm at any width, undoes it."""
    sgd_lr: float = 1.0
    """Replaces ``lr`` for rules whose updates are proportional to gradients (SGD); their decay is ``weight_decay / sgd_lr``."""


ScaleOf = Callable[[str, "torch.nn.Parameter"], Scale]


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} {pattern!r} is not a regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Rule(Checked):
    """Base of the optimizers' settings."""

    pattern: str = ""
    """In the groups of ``mixed``: regular expression, searched in parameter names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pattern("pattern", self.pattern)

    def build(
        self, parameters: Named, all_names: Iterable[str] = (), scale_of: ScaleOf | None = None
    ) -> MixedOptimizer:
        """Return the optimizer of the trainable ``parameters``, given as (name, parameter).

        ``all_names``: names of the whole model, if ``parameters`` are those of a pipeline stage. ``scale_of``: factors of each
        parameter's options; None for none.
        """
        if self.pattern:
            raise ValueError(f"pattern={self.pattern!r} is for the groups of kind 'mixed', not for the only optimizer")
        return build_optimizer(self, (), parameters, all_names, scale_of)

    def options(self) -> dict[str, Any]:
        """Return the options of a parameter group."""
        raise NotImplementedError

    def scaled(self, scale: Scale, weight_decay: float) -> dict[str, Any]:
        """Return the options that ``scale`` changes, for parameters with ``weight_decay``."""
        options = self.options()
        scaled = {"lr": options["lr"] * scale.lr, "weight_decay": weight_decay * scale.weight_decay}
        if options.get("decay_scale") == "lr/peak":  # the decay is not multiplied by the rate
            scaled["weight_decay"] *= scale.lr
        return scaled | ({"eps": options["eps"] * scale.eps} if "eps" in options else {})


@dataclass(frozen=True, kw_only=True)
class SGD(_Rule):
    """Stochastic gradient descent with momentum."""

    lr: NonNegativeFloat = 0.01
    """Peak learning rate."""
    momentum: ProperFraction = 0.937
    """Momentum, in [0, 1)."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: NonNegativeFloat = 5e-4
    """L2 penalty on weight matrices and kernels; biases and normalisation are never decayed."""

    def options(self) -> dict[str, Any]:
        return {
            "kind": "sgd",
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov and self.momentum > 0,
        }

    def scaled(self, scale: Scale, weight_decay: float) -> dict[str, Any]:
        return {"lr": self.lr * scale.sgd_lr, "weight_decay": weight_decay / scale.sgd_lr}


@dataclass(frozen=True, kw_only=True)
class AdamW(_Rule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: NonNegativeFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay of weight matrices and kernels; biases and normalisation are never decayed."""
    decay_scale: Literal["lr", "lr/peak"] = "lr"
    """Decay by ``lr * weight_decay`` in each step, or by ``lr / peak * weight_decay``, which follows the schedule but not its peak."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of stored moments; arithmetic is float32."""
    stochastic_rounding: bool = True
    """Round bfloat16 weights and moments stochastically: rounded to the nearest, a second moment can never shrink."""
    seed: int = 0
    """Seed of the rounding, which depends on it, the parameter's name, step and element index, and not on the mesh."""

    def options(self) -> dict[str, Any]:
        return {
            "kind": "adamw", "lr": self.lr, "betas": self.betas, "eps": self.eps, "state_dtype": self.state_dtype,
            "stochastic_rounding": self.stochastic_rounding, "seed": self.seed,
        } | ({} if self.decay_scale == "lr" else {"decay_scale": self.decay_scale})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ADOPT(AdamW):
    """Adam that converges with any beta2 (Taniguchi et al. 2024).

    Gradients are normalised by earlier steps' second moment, and clipped.
    """

    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.9999)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: NonNegativeFloat = 1e-6
    """Smallest root of the second moment by which a gradient is divided."""

    def options(self) -> dict[str, Any]:
        return super().options() | {"kind": "adopt", "v1": 1.0}


@dataclass(frozen=True, kw_only=True)
class QHADOPT(ADOPT):
    """Quasi-hyperbolic ADOPT (Ma and Yarats 2019).

    It moves along a mean of the normalised gradient and its slow average.
    """

    betas: tuple[ProperFraction, ProperFraction] = (0.995, 0.9999)
    """Decay of the first and second moment, each in [0, 1)."""
    v1: Fraction = 0.7
    """Share of the average in the update, in [0, 1]; the rest is the normalised gradient."""

    def options(self) -> dict[str, Any]:
        return super().options() | {"kind": "qhadopt", "v1": self.v1}


@dataclass(frozen=True, kw_only=True)
class Muon(_Rule):
    """Orthogonalised momentum for hidden matrices, AdamW for all other parameters.

    Jordan et al. 2024.
    """

    lr: NonNegativeFloat = 0.02
    """Peak learning rate of the matrices."""
    momentum: ProperFraction = 0.95
    """Momentum, in [0, 1)."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of the matrices."""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations."""
    scale: Literal["spectral", "rms"] = "spectral"
    """Size of an update: ``spectral`` sqrt(max(1, rows/columns)) times an orthogonal matrix, ``rms`` as large as AdamW's."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the iterations and of the matrices exchanged for them."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the stored momentum."""
    others: AdamW = field(default_factory=AdamW)
    """For all other parameters: embeddings, output layers, vectors, convolution kernels."""
    not_hidden: str = r"(^|\.)(\w*(embed|token)\w*(\.\w+)?|(tok|wte|wpe|lm_head)\.\w+)$|^(\w+\.)?(output|head|classifier)\.\w+$|^fc\.\w+$"
    """Regular expression for the names of embeddings, tokens and output layers, which use AdamW."""
    stacks: str = r"(^|\.)\w*expert\w*(\.|$)"
    """Regular expression for the names of three-dimensional parameters that are stacks of matrices; others (convolution kernels, positions) use AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("not_hidden", "stacks"):
            _check_pattern(name, getattr(self, name))

    def options(self) -> dict[str, Any]:
        return {
            "kind": "muon", "lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps,
            "scale": self.scale, "precision": self.precision, "state_dtype": self.state_dtype, "beta2": None,
        }  # fmt: skip

    def scaled(self, scale: Scale, weight_decay: float) -> dict[str, Any]:
        """Undo the rate's factor for the width.

        Orthogonal updates have the same spectral norm at any width. With ``scale="rms"`` that norm grows with the square root of the width,
        of which the factor then keeps the square root.
        """
        undo = scale.width if self.scale == "spectral" else scale.width**0.5
        return super().scaled(replace(scale, lr=scale.lr * undo, weight_decay=scale.weight_decay / undo), weight_decay)


@dataclass(frozen=True, kw_only=True)
class NorMuon(Muon):
    """Muon with rows normalised by the root of their running mean square (Li et al. 2025)."""

    beta2: ProperFraction = 0.95
    """Decay of the rows' mean square, in [0, 1)."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "kind": "normuon", "beta2": self.beta2}


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Groups of parameters by name, each with its optimizer; the first match counts."""

    groups: tuple[AdamW | ADOPT | QHADOPT | SGD | Muon | NorMuon, ...] = ()
    """Optimizers, each with a ``pattern``."""
    default: AdamW | ADOPT | QHADOPT | SGD | Muon | NorMuon = field(default_factory=AdamW)
    """For parameters that no pattern matches."""

    def __post_init__(self) -> None:
        if self.default.pattern:
            raise ValueError(
                f"the default is for parameters that no group matches, so it takes no pattern, got {self.default.pattern!r}"
            )
        for number, group in enumerate(self.groups):
            if not group.pattern:
                raise ValueError(f"groups[{number}] needs a pattern, which selects its parameters by name")

    def build(
        self, parameters: Named, all_names: Iterable[str] = (), scale_of: ScaleOf | None = None
    ) -> MixedOptimizer:
        """Build one optimizer for all; see :meth:`AdamW.build`.

        Raises ValueError for a pattern that matches no parameter.
        """

        return build_optimizer(self.default, self.groups, parameters, all_names, scale_of)


Pair = tuple[str, "torch.nn.Parameter"]


def decay_groups(parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of the trainable parameters: with and without weight decay.

    Those of two or more dimensions decay, biases and normalisation do not.
    """
    check("weight_decay", weight_decay, NonNegativeFloat)
    groups = _by_decay([(name, p) for name, p in parameters if p.requires_grad], weight_decay)
    if not groups:
        raise ValueError("no parameter requires gradients; is everything frozen?")
    return groups


def _by_decay(trainable: list[Pair], weight_decay: float) -> list[dict[str, Any]]:
    matrices, vectors = [x for x in trainable if x[1].ndim >= 2], [x for x in trainable if x[1].ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    default: _Rule, rules: Sequence[_Rule], parameters: Iterable[Pair], all_names: Iterable[str] = (),
    scale_of: ScaleOf | None = None,
) -> MixedOptimizer:  # fmt: skip
    """Build an optimizer of the trainable ``parameters``.

    Each is updated by the first of ``rules`` whose pattern is found in its name, or by ``default``. Raises ValueError if nothing is
    trainable, and for a pattern that gets no parameter among these and ``all_names``.
    """
    from arclight.optim.optimizer import MixedOptimizer

    known = list(parameters)
    taken = assign([name for name, _ in known], [rule.pattern for rule in rules], all_names)
    groups: list[dict[str, Any]] = []
    for number, rule in enumerate((*rules, default)):
        own = [pair for pair, home in zip(known, taken, strict=True) if home == number and pair[1].requires_grad]
        groups += _groups_of(rule, own, scale_of)
    if not groups:
        raise ValueError("no parameter requires gradients; is everything frozen?")
    return MixedOptimizer(groups, known)


def assign(names: Sequence[str], patterns: Sequence[str], all_names: Iterable[str] = ()) -> list[int]:
    """Return for each name the index of the first pattern in it, ``len(patterns)`` for none.

    Raises ValueError for a pattern that gets no name.
    """
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


def _groups_of(rule: _Rule, own: list[Pair], scale_of: ScaleOf | None) -> list[dict[str, Any]]:
    """Return parameter groups with the options of ``rule``, split by decay and `Scale`."""
    if isinstance(rule, Muon):
        hidden = {name for name, p in own if _is_hidden(rule, name, p)}
        rest = _groups_of(rule.others, [pair for pair in own if pair[0] not in hidden], scale_of)
        matrices = [pair for pair in own if pair[0] in hidden]
        groups = [{"params": matrices, "weight_decay": rule.weight_decay}] if matrices else []
        return [part for group in groups for part in _scaled(rule, group, scale_of)] + rest
    groups = _by_decay(own, rule.weight_decay)  # type: ignore[attr-defined]
    return [part for group in groups for part in _scaled(rule, group, scale_of)]


def _scaled(rule: _Rule, group: dict[str, Any], scale_of: ScaleOf | None) -> list[dict[str, Any]]:
    """Split a group into one for each `Scale` of its parameters."""
    if scale_of is None:
        return [rule.options() | group]
    members: dict[Scale, list[Pair]] = {}
    for name, parameter in group["params"]:
        members.setdefault(scale_of(name, parameter), []).append((name, parameter))
    return [
        rule.options() | rule.scaled(scale, group["weight_decay"]) | {"params": pairs}
        for scale, pairs in members.items()
    ]


def _is_hidden(rule: Muon, name: str, parameter: torch.nn.Parameter) -> bool:
    """Return True for a hidden matrix or a stack of them."""
    if re.search(rule.not_hidden, name):
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and re.search(rule.stacks, name) is not None)
