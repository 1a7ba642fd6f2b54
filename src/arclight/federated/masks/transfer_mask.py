"""Compute which tensors a client uploads and downloads in a round, alike on both sides.

Keys are those of manifests: ``model/<name>`` and ``<state>/<name>`` for local moments. The server aggregates what is uploaded;
a client loads what it downloads. The two differ: frozen weights are only downloaded, personal and randomised ones neither after
the first round, and tensors with a period are downloaded in the round after they were uploaded.

`service` puts a client's mask into each order (``Fit.local_policy``), where `local_policy` reads it; `validation` checks updates by it. Fields
of `TransferMask` are part of the protocol: clients refuse those that they do not know.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from arclight.federated.coordination.settings import Streaming
from arclight.federated.errors import FederatedError, ProtocolError, SettingsError
from arclight.federated.masks.experts import (
    assign_experts,
    assign_head_experts,
    check_per_client,
    expert_key,
    expert_of,
    unassigned_experts,
)
from arclight.federated.masks.settings import Experts, Masks, check_patterns, matches
from arclight.federated.protocol import Entry, Manifest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from arclight.federated.settings import Federation


MODEL = "model/"


@dataclass(frozen=True, kw_only=True)
class TransferMask:
    """The masks of a federation, as one client has them in one round."""

    masks: Masks = field(default_factory=Masks)
    moments: tuple[str, ...] = ()
    """Local optimizer states that are averaged."""
    streaming: Streaming | None = None
    experts: tuple[int, ...] | None = None
    """This client's experts in this round; None: all."""
    head_experts: tuple[int, ...] | None = None
    """This client's (head, expert) pairs in this round; None: all."""

    names: tuple[str, ...] = ()
    """All weights of the server's model, by which fragments are dealt."""

    @classmethod
    def of(cls, federation: Federation, names: Iterable[str], experts: tuple[int, ...] | None = None) -> TransferMask:
        """Return a federation's mask for the model whose weights have these names."""
        return cls(
            masks=federation.masks,
            moments=federation.moments,
            streaming=federation.streaming,
            experts=experts,
            names=tuple(names),
        )

    def to_table(self) -> dict[str, Any]:
        """Return it as a message holds it; without names, which are those of its manifest."""
        return {name: value for name, value in asdict(self).items() if name != "names"}

    @classmethod
    def from_table(cls, table: Mapping[str, Any], names: Iterable[str]) -> TransferMask:
        """Invert `to_table`. Raises ProtocolError for an invalid table, or fields not known here."""
        from pydantic import ValidationError

        try:
            made = _adapter().validate_json(json.dumps(dict(table)), strict=True)
        except (ValidationError, ValueError, TypeError) as error:
            raise ProtocolError(f"masks that cannot be: {error}") from error
        if (unknown := _unknown(table, made)) is not None:
            raise ProtocolError(f"there are no masks {unknown!r} here; install the same arclight on both sides")
        return replace(made, names=tuple(names))

    # -- up ----------------------------------------------------------------------------------------------------------

    def up(self, keys: Iterable[str], round: int) -> list[str]:
        """Select, in their order, the keys that a client sends at the end of ``round``.

        ``keys``: what the client has trained: its parameters and saved buffers, and the local moments that it can give.
        Stacked experts become one key for each expert that the client has.
        """
        return [part for key in keys if self.sends(key) and self._due(key, round) for part in self._parts(key)]

    def sends(self, key: str) -> bool:
        """Return True if clients send this tensor in some round."""
        state, _, name = key.partition("/")
        masks = self.masks
        if state != "model" and state not in self.moments:
            return False
        kept = (*masks.leave_out, *masks.frozen, *masks.personal, *masks.randomised)
        return matches(name, masks.send) and not matches(name, kept)

    def _due(self, key: str, round: int) -> bool:
        fragment = self._fragments.get(key.partition("/")[2])
        first = 1 <= round <= max(1, len(self._fragment_names)) and not key.startswith(MODEL)
        return self._is_turn(1 if first else self.period(key), fragment, round)

    def _is_turn(self, period: int, fragment: int | None, round: int) -> bool:
        return round % period == 0 and (fragment is None or round % len(self._fragment_names) == fragment)

    def period(self, key: str) -> int:
        """Return the rounds from one exchange of a tensor to the next, fragments aside.

        See `Masks.periods`.
        """
        state, _, name = key.partition("/")
        found = [(1, 1)]
        for pattern, every in self.masks.periods.items():
            if "/" in pattern and matches(key, (pattern,)):
                found.append((4 << 16 | len(pattern), every))
            elif pattern == state:
                found.append((3 << 16, every))
            elif "/" not in pattern and matches(name, (pattern,)):
                found.append((2 << 16 | len(pattern), every))
        return max(found)[1]

    @cached_property
    def _fragment_names(self) -> list[list[str]]:
        """Return the names of each fragment, see `optim.outer.fragments_of`; none without streaming."""
        if self.streaming is None:
            return []
        from arclight.optim.outer import fragments_of

        names = sorted((name for name in self.names if self.sends(MODEL + name)), key=_by_number)
        try:
            return fragments_of(names, self.streaming.fragments)
        except ValueError as error:
            raise SettingsError(f"streaming.fragments does not fit this model: {error}") from error

    @cached_property
    def _fragments(self) -> dict[str, int]:
        return {name: number for number, dealt in enumerate(self._fragment_names) for name in dealt}

    def _parts(self, key: str) -> list[str]:
        numbers = self.numbers(key)
        return [key] if numbers is None else [expert_key(key, number) for number in numbers]

    def is_stack(self, key: str) -> bool:
        """Return True if the tensor stacks a model's experts."""
        return _stacked(key, self.masks.experts) or _stacked(key, self.masks.head_experts)

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """Return this client's experts in a stack, or None: all, or it is no stack.

        For experts of attention heads they are (head, expert) pairs.
        """
        if _stacked(key, self.masks.head_experts):
            return self.head_experts
        return self.experts if _stacked(key, self.masks.experts) else None

    # -- down --------------------------------------------------------------------------------------------------------

    def down(self, keys: Iterable[str], round: int, since: int | None) -> list[str]:
        """Select the keys (whole tensors) that a client loads when ``round`` begins, in their order.

        ``since``: the last round that this client has trained; None: it never has, and takes everything that does not begin at
        the client. Personal and randomised weights stay with the client, and so does what has not been exchanged since.
        """
        keys = list(keys)
        if since is None:
            return [key for key in keys if not self.masks.is_client_initialised(key.partition("/")[2])]
        own = (*self.masks.personal, *self.masks.randomised)
        lag = self.streaming.overlap if self.streaming is not None else 0
        folded = range(max(since - lag, 1), round - lag)
        extra = {
            *folded[-self.cycle :],
            *(n for n in folded[: len(self._fragment_names) or 1] if n <= (len(self._fragment_names) or 1)),
        }
        taken = (key for key in keys if not matches(key.partition("/")[2], own))
        return [key for key in taken if not self.sends(key) or any(self._due(key, number) for number in extra)]

    @cached_property
    def cycle(self) -> int:
        """Return the rounds after which every tensor has travelled and the order repeats."""
        fragments = self.streaming.fragments if self.streaming is not None else 1
        return math.lcm(fragments, *self.masks.periods.values())

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise SettingsError if the settings do not fit the model."""
        masks, names = self.masks, self.names
        for what in ("send", "leave_out", "frozen", "personal", "randomised"):
            check_patterns(f"masks.{what}", getattr(masks, what), names)
        keys = [f"{state}/{name}" for state in ("model", *self.moments) for name in names]
        for pattern in masks.periods:
            if pattern not in ("model", *self.moments):
                check_patterns("masks.periods", [pattern], keys if "/" in pattern else [*names, *self.moments])
        for what, experts in (("experts", masks.experts), ("head_experts", masks.head_experts)):
            if experts is not None:
                check_patterns(f"masks.{what}.tensors", experts.tensors, names)
        both = [n for n in names if _stacked(MODEL + n, masks.experts) and _stacked(MODEL + n, masks.head_experts)]
        if both:
            raise SettingsError(
                f"{both[0]} is named by masks.experts.tensors and by masks.head_experts.tensors: name it in one"
            )
        sent = [key for key in keys if self.sends(key)]
        if not sent:
            raise SettingsError(
                "nothing would ever be sent: leave_out, frozen, personal and randomised cover all of masks.send"
            )
        if unusable := [key for key in sent if "#" in key]:
            raise SettingsError(
                f"{unusable[0]} cannot travel: '#' separates the parts of an encoded tensor in files; rename that weight, or keep it from being "
                "sent (masks.frozen, leave_out, personal)"
            )
        turns = {(self.period(key), self._fragments.get(key.partition("/")[2])): key for key in sent}
        for (period, fragment), key in turns.items():
            if not any(self._is_turn(period, fragment, number) for number in range(1, self.cycle + 1)):
                raise SettingsError(
                    f"{key} would never travel: the rounds of its period ({period}) are never those of its fragment; "
                    "choose a period that has no divisor in common with streaming.fragments"
                )
        for number in range(1, self.cycle + 1):
            if not any(self._is_turn(*turn, number) for turn in turns):
                raise SettingsError(
                    f"nothing would travel in round {number}: some part of masks.periods must be due in each"
                )


def _stacked(key: str, experts: Experts | None) -> bool:
    return experts is not None and matches(key.partition("/")[2], experts.tensors)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort ``blocks.9`` before ``blocks.10``: the same order wherever the names come from."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _unknown(table: Mapping[str, Any], made: Any) -> str | None:
    """Return a name in the table that is no field of the object made from it."""
    known = {one.name for one in fields(made)}
    for name, value in table.items():
        inner = getattr(made, name) if name in known else None
        deeper = _unknown(value, inner) if isinstance(value, Mapping) and is_dataclass(inner) else None
        if name not in known or deeper is not None:
            return deeper or name
    return None


@cache
def _adapter() -> TypeAdapter[TransferMask]:
    from pydantic import TypeAdapter

    return TypeAdapter(TransferMask)


class ServerMasks:
    """Compute the masks of every client of a run.

    place: a client's position among the run's clients, None for none of them.
    """

    def __init__(self, federation: Federation, seed: int, place: Callable[[str], int | None]) -> None:
        self._federation, self._seed, self._place = federation, seed, place
        self._whole: TransferMask | None = None
        self._counts: dict[str, int] = {}
        """Experts of the model, or of each head, by the mask that splits them."""

    def whole_of(self, shapes: Mapping[str, Sequence[int]]) -> TransferMask:
        """Return `whole` of weights of these names and shapes, which need not be written yet."""
        entries = {f"{MODEL}{name}": Entry(blob="", dtype="F32", shape=tuple(shape)) for name, shape in shapes.items()}
        return self.whole(Manifest(kind="weights", tensors=entries, blobs={}))

    def whole(self, weights: Manifest) -> TransferMask:
        """Return the mask of all clients together.

        Raises SettingsError if the settings do not fit the model; see `TransferMask.check` and `expert_counts`.
        """
        names = tuple(key.removeprefix(MODEL) for key in weights.tensors if key.startswith(MODEL))
        if self._whole is None or self._whole.names != names:
            transfer_mask = TransferMask.of(self._federation, names)
            transfer_mask.check()
            self._counts = expert_counts(transfer_mask.masks, weights)
            self._whole = transfer_mask
        return self._whole

    def unassigned(self, weights: Manifest, clients: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return experts assigned to no client, and the number of all, by the mask that splits them."""
        masks = self.whole(weights).masks
        found = {
            what: (unassigned_experts(experts, self._counts[what], clients), self._counts[what])
            for what, experts in (("experts", masks.experts), ("head_experts", masks.head_experts))
            if experts is not None
        }
        return {what: both for what, both in found.items() if both[0]}

    def of(self, client: str, round: int, weights: Manifest) -> TransferMask:
        """Return the mask of a client in a round.

        Raises FederatedError for a client that is not of this run.
        """
        transfer_mask, masks = self.whole(weights), self._federation.masks
        if not masks.splits_experts:
            return transfer_mask
        place = self._place(client)
        if place is None:
            raise FederatedError(f"{client!r} is not a client of this run")
        if masks.experts is not None:
            own = assign_experts(masks.experts, self._counts["experts"], self._seed, place, round)
            transfer_mask = replace(transfer_mask, experts=own)
        if masks.head_experts is not None:
            pairs = assign_head_experts(masks.head_experts, self._counts["head_experts"], self._seed, place, round)
            transfer_mask = replace(transfer_mask, head_experts=pairs)
        return transfer_mask


def expert_counts(masks: Masks, weights: Manifest) -> dict[str, int]:
    """Count the experts of a model, and those of each of its heads, for the masks.

    Raises SettingsError if ``heads`` does not divide the pairs, or a client would have more than there are.
    """
    found: dict[str, int] = {}
    if masks.experts is not None:
        found["experts"] = expert_count("experts", masks.experts, weights)
        check_per_client(masks.experts, found["experts"])
    if (experts := masks.head_experts) is not None:
        pairs = expert_count("head_experts", experts, weights)
        if pairs % experts.heads:
            raise SettingsError(
                f"masks.head_experts.heads = {experts.heads} does not divide the {pairs} pairs of {experts.tensors[0]}: set it to the "
                "heads of the model"
            )
        found["head_experts"] = pairs // experts.heads
        check_per_client(experts, found["head_experts"])
    return found


def expert_count(what: str, experts: Experts, weights: Manifest) -> int:
    """Count the experts in a model's stacks of ``masks.<what>``.

    Raises SettingsError if the stacks' first dimensions differ.
    """
    counts = {entry.shape[0] if entry.shape else 0: k for k, entry in weights.tensors.items() if _stacked(k, experts)}
    if len(counts) > 1 or 0 in counts:
        counted = ", ".join(f"{key} has {count}" for count, key in counts.items())
        raise SettingsError(f"masks.{what}.tensors must hold as many experts each: {counted}")
    return next(iter(counts))


def expected_entry(key: str, transfer_mask: TransferMask, round: int, weights: Manifest) -> Entry | None:
    """Return the entry that a tensor sent by a client must match.

    None for one that it may not send.

    Moments that the server has never had are like their weights; an expert is like a part of its stack.
    """
    found = expert_of(key)
    stack, number = found if found is not None and transfer_mask.is_stack(found[0]) else (key, None)
    if key not in transfer_mask.up([stack], round):
        return None
    like = weights.tensors.get(stack) or weights.tensors.get(MODEL + stack.partition("/")[2])
    if like is None or number is None:
        return like
    return replace(like, shape=like.shape[1:]) if like.shape and number < like.shape[0] else None
