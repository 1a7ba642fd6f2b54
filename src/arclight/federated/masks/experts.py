"""Assign experts (MoE) to clients, and address single experts within stacked tensors.

`transfer_mask` assigns a round's experts with it; `executor`, `local_policy` and `round_callback` at the client, `server_step` and `validation`
at the server split stacked tensors by it. A resumed server must assign the same experts: hash and order stay, and so do keys, which
manifests carry.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from arclight.federated.errors import SettingsError
from arclight.federated.masks.settings import Experts, HeadExperts

if TYPE_CHECKING:
    import torch

_PART = re.compile(r"(?P<key>.+)\[(?P<number>0|[1-9]\d*)\]")


def expert_key(key: str, number: int) -> str:
    """Return the key of one expert of the tensor ``key``: ``model/blocks.0.w1[3]``."""
    return f"{key}[{number}]"


def expert_of(key: str) -> tuple[str, int] | None:
    """Invert `expert_key`; None for a key that is not of one expert."""
    found = _PART.fullmatch(key)
    return (found["key"], int(found["number"])) if found else None


def assign_experts(experts: Experts, count: int, seed: int, client: int, round: int) -> tuple[int, ...]:
    """Return the ascending numbers of a client's experts in ``round``, of ``count`` in all.

    Fixed: client i has ``per_client`` consecutive ones from ``i (per_client - overlap)`` on, modulo ``count``. Random: the first
    of all experts in the order of SHA-256 of (seed, client, draw, expert). Raises SettingsError if there are too few.
    """
    check_per_client(experts, count)
    if experts.assign == "fixed":
        first = client * (experts.per_client - experts.overlap)
        return tuple(sorted((first + number) % count for number in range(experts.per_client)))
    draw = round // experts.every

    def place(number: int) -> bytes:
        return hashlib.sha256(f"{seed}\0experts\0{client}\0{draw}\0{number}".encode()).digest()

    return tuple(sorted(sorted(range(count), key=place)[: experts.per_client]))


def check_per_client(experts: Experts, count: int) -> None:
    """Raise SettingsError if clients are to have more experts than there are.

    There are ``count``, of the model or of each head.
    """
    if experts.per_client > count:
        what, whole = ("head_experts", "each head") if isinstance(experts, HeadExperts) else ("experts", "the model")
        raise SettingsError(
            f"masks.{what}.per_client is {experts.per_client}, {whole} has {count} experts: set it to {count} or fewer"
        )


def unassigned_experts(experts: Experts, count: int, clients: int) -> tuple[int, ...]:
    """Return the experts, of ``count``, that a fixed assignment gives to no client.

    ``clients``: their number.
    """
    if experts.assign != "fixed":
        return ()
    assigned = {number for client in range(clients) for number in assign_experts(experts, count, 0, client, 1)}
    return tuple(number for number in range(count) if number not in assigned)


def assign_head_experts(experts: HeadExperts, count: int, seed: int, client: int, round: int) -> tuple[int, ...]:
    """Return a client's (head, expert) pairs, by rising number.

    They are those of `assign_experts`, of every head.
    """
    own = assign_experts(experts, count, seed, client, round)
    return tuple(head * count + number for head in range(experts.heads) for number in own)


class ExpertParts(Mapping[str, "torch.Tensor"]):
    """Map keys of single experts (``model/w1[3]``) to their part of a stacked tensor.

    Whole keys are found, too; iteration and length are those of the whole ones.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], numbers: Callable[[str], Sequence[int] | None] | None = None
    ) -> None:
        """Initialise the parts of ``tensors``.

        ``numbers``: which experts a stack holds, by its key, if they are those of a smaller model.
        """
        self._tensors, self._numbers = tensors, numbers
        self._newest: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        found = expert_of(key)
        if found is None or key in self._tensors:
            return self._tensors[key]
        if self._newest is None or self._newest[0] != found[0]:
            self._newest = (found[0], self._tensors[found[0]])
        stack, number = self._newest[1], found[1]
        held = self._numbers(found[0]) if self._numbers is not None else None
        if held is not None and len(stack) == len(held):
            number = held.index(number) if number in held else len(stack)
        if number >= len(stack):
            raise KeyError(key)
        return stack[number]

    def __contains__(self, key: object) -> bool:
        found = expert_of(key) if isinstance(key, str) else None
        return key in self._tensors or (found is not None and found[0] in self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def select_experts(tensor: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """Select a client's experts, in the order of ``numbers``, from the stack of all."""
    import torch

    return tensor.index_select(0, torch.tensor(numbers, device=tensor.device))
