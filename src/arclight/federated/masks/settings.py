"""Define the settings of masks, and patterns on names (no torch).

They are the recipe's table ``[federation.masks]``: names of fields are public, and orders carry them. `transfer_mask` applies them; `matches`
decides what a pattern means, also for `local_policy` and `published_weights`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from arclight._intervals import Checked, NonNegativeInt, PositiveInt
from arclight.federated.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Experts(Checked):
    """Each client trains some of a model's experts (FoMoE, arXiv 2606.19025).

    An expert's mean is over those that have it.
    """

    tensors: tuple[str, ...] = ("*.experts.*",)
    """Patterns on names of tensors that hold all experts, first dimension the expert."""
    per_client: PositiveInt = 1
    """Experts of each client."""
    assign: Literal["fixed", "random"] = "fixed"
    """"fixed": assigned in turn, the same in every round; "random": sampled from the run's seed, client and round."""
    overlap: NonNegativeInt = 0
    """With "fixed": number of its experts that a client shares with the next one."""
    every: PositiveInt = 1
    """With "random": rounds between two samplings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= self.per_client:
            raise ValueError(f"overlap must be below per_client = {self.per_client}, got {self.overlap}")


@dataclass(frozen=True, kw_only=True)
class HeadExperts(Experts):
    """Split of the experts of each attention head (SwitchHead) among clients.

    A client has those of its numbers of every head.
    """

    tensors: tuple[str, ...] = ("*.wv.experts", "*.wo.experts")
    """Patterns on names of tensors that hold all of them, first dimension the (head, expert) pair, head by head."""
    heads: PositiveInt = 1
    """Heads in that dimension."""


@dataclass(frozen=True, kw_only=True)
class Masks(Checked):
    """The tensors that travel between the server and a client, and the rounds in which they do.

    Patterns are parameter names with ``*`` for any part; one that ends with a dot means all below it (``blocks.0.``). Each must
    match something.
    """

    send: tuple[str, ...] = ("*",)
    """Tensors that clients send; the others keep the server's values."""
    leave_out: tuple[str, ...] = ()
    """Exceptions from ``send``."""
    frozen: tuple[str, ...] = ()
    """Tensors that keep the server's values, neither trained nor sent."""
    personal: tuple[str, ...] = ()
    """Personal tensors: initialised as ``personal_from`` says, then kept by the client, in its checkpoints, and never
    sent (FedPer, Arivazhagan et al. 2019)."""
    personal_from: Literal["server", "client"] = "server"
    """Initial values of personal tensors: "server": the server's; "client": those of each client. These may have other shapes
    than the server's, as embeddings of a site's own vocabulary have (DEPT, Iacob et al. 2025)."""
    randomised: tuple[str, ...] = ()
    """Tensors that each client initialises again every ``randomise_every`` rounds and never sends (DEPT, Iacob et al. 2025)."""
    randomise_every: PositiveInt = 1
    """Rounds between two initialisations."""
    periods: dict[str, PositiveInt] = field(default_factory=dict)
    """Pattern to the rounds from one exchange to the next: in between, a client continues with its own values. A pattern
    is a whole key (``exp_avg/blocks.*``), a local state (``exp_avg``) or a name; if several match, they count in this order,
    and among several of a sort the longest. Longer periods for what changes slowly are DES-LOC (Iacob et al. 2026): exp_avg
    every 3, exp_avg_sq every 6; see `half_life`. All states go in the first round too, so that none
    that is averaged is divided by the root of one that is still zero."""
    experts: Experts | None = None
    """Experts that a client trains and sends; none for all."""
    head_experts: HeadExperts | None = None
    """Experts of attention that a client trains and sends; none for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.send:
            raise ValueError('with send = [] nothing would ever be learned: name what clients send, ["*"] for all')
        groups = {"frozen": self.frozen, "personal": self.personal, "randomised": self.randomised}
        for name, patterns in groups.items():
            for other, others in groups.items():
                if name < other and (both := sorted(set(patterns) & set(others))):
                    raise ValueError(f"{both[0]} cannot be both {name} and {other}")
        if self.personal_from == "client" and not self.personal:
            raise ValueError('personal_from = "client" is of personal tensors: name them in personal')

    def is_client_initialised(self, name: str) -> bool:
        """Return True for a tensor that each client initialises itself.

        The server's value means nothing to it.
        """
        return self.personal_from == "client" and matches(name, self.personal)

    @property
    def splits_experts(self) -> bool:
        """Return True where clients send some experts of a tensor."""
        return self.experts is not None or self.head_experts is not None


def half_life(beta: float) -> float:
    """Return the steps in which a running mean of decay ``beta`` in (0, 1) forgets half.

    It is ln 0.5 / ln beta. A state need not be exchanged more often (DES-LOC, section 3): 6.6 steps for 0.9, 69 for 0.99, 693 for 0.999.
    """
    if not 0 < beta < 1:
        raise ValueError(f"a decay lies in (0, 1), got {beta}")
    return math.log(0.5) / math.log(beta)


def period_of(beta: float, local_steps: int) -> int:
    """Count the rounds of ``local_steps`` steps within a state's `half_life`, at least one."""
    return max(1, int(half_life(beta) / local_steps))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches: ``*`` is any part, a final dot means all below.

    Brackets mean themselves.
    """
    return any(fnmatchcase(name, _glob(pattern)) for pattern in patterns)


def check_patterns(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise SettingsError for a pattern that matches no name, with the nearest one.

    ``what``: the setting.
    """
    for pattern in patterns:
        if any(matches(name, (pattern,)) for name in names):
            continue
        near = _nearest(pattern, names)
        raise SettingsError(
            f"{what} has {pattern!r}, which matches no parameter" + (f"; did you mean {near}?" if near else "")
        )


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    """Return a name like the pattern; for one that means all below a module, a module like it."""
    modules = {name[: place + 1] for name in names for place, letter in enumerate(name) if letter == "."}
    among = sorted(modules) if pattern.endswith(".") else list(names)
    found = difflib.get_close_matches(pattern.replace("*", ""), among, n=1, cutoff=0.0)
    return found[0] if found else None


def _glob(pattern: str) -> str:
    return pattern.replace("[", "[[]") + ("*" if pattern.endswith(".") else "")
