"""What of a model is a client's own: which weights it takes from the server, which it trains, and which it sends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.seeding import isolate_rng
from arclight.federated.errors import ProtocolError

if TYPE_CHECKING:
    from torch import nn

MODEL = "model/"


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What ``Fit.keep`` says. Patterns are names with ``*`` for any part; one that ends with a dot means all below it."""

    reset_optimizer: bool = False
    """Forget the optimizers' states before the round."""
    personal: tuple[str, ...] = ()
    """Weights that the client has of its own: the server's are its first, and none are sent."""
    frozen: tuple[str, ...] = ()
    """Weights that are taken from the server and neither trained nor sent."""
    randomised: tuple[str, ...] = ()
    """Weights that begin each round with first values drawn anew, and are not sent (DEPT, Iacob et al. 2025)."""
    every: int = 1
    """Rounds from one drawing anew to the next."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Keep:
        """From a message. Raises ProtocolError for what this version does not know."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(table) - known):
            raise ProtocolError(f"this client cannot keep {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        said: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in table.items()}
        return cls(**said)

    @property
    def own(self) -> tuple[str, ...]:
        return (*self.personal, *self.randomised)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, f"{pattern}*" if pattern.endswith(".") else pattern) for pattern in patterns)


def to_bind(weights: Mapping[str, torch.Tensor], keep: Keep, begun: bool) -> dict[str, torch.Tensor]:
    """Those of a round's weights that go into the client's module; ``begun``: it has trained before."""
    named = {key.removeprefix(MODEL): key for key in weights if key.startswith(MODEL)}
    taken = {name: key for name, key in named.items() if not (begun and matches(name, keep.own))}
    return {name: weights[key] for name, key in taken.items()}


def moments_in(weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Local moments among a round's weights, by state and parameter name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        state, _, name = key.partition("/")
        if not key.startswith(MODEL):
            found.setdefault(state, {})[name] = value
    return found


def to_send(module: nn.Module, named: Sequence[str], keep: Keep) -> list[str]:
    """Names of what training changes and the server may have: trained parameters, and the buffers that are saved."""
    still = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return [name for name in named if name not in still and not matches(name, (*keep.own, *keep.frozen))]


def drawn_anew(module: nn.Module, keep: Keep, seed: int) -> dict[str, torch.Tensor]:
    """First values for the randomised weights, from ``reset_parameters`` of the modules that hold them.

    They depend on the seed and the module's name alone. Raises ProtocolError for weights whose module cannot draw any.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        own = {f"{prefix}.{name}" if prefix else name: p for name, p in part.named_parameters(recurse=False)}
        wanted = {name: p for name, p in own.items() if matches(name, keep.randomised)}
        if not wanted:
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            raise ProtocolError(
                f"{next(iter(wanted))} cannot be drawn anew: {type(part).__name__} has no reset_parameters()"
            )
        before = {name: p.detach().clone() for name, p in own.items()}
        with isolate_rng(), torch.no_grad():
            digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            reset()
            found |= {name: p.detach().clone() for name, p in wanted.items()}
            for name, p in own.items():
                p.copy_(before[name])
    return found
