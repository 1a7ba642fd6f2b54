"""Validate messages of nodes before the coordinator sees them, and the tensors of updates.

`service` calls `validate_message` for each message and `validate_update` for each update. Nodes are untrusted: a field that later code computes
with, or writes down, needs a check here (evaluations are checked in `service`, secure sums in `secure_sums`). Limits may be raised; reasons
of refusals are part of the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median, median_low

import torch

from arclight.checkpoint.tensorfile import DTYPES
from arclight.federated.aggregation.fixed_point import measure
from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.manifest_io import open_manifest
from arclight.federated.codecs.encoding import LazyTensors
from arclight.federated.errors import FederatedError, ProtocolError, RefusedError
from arclight.federated.masks.experts import ExpertParts
from arclight.federated.masks.transfer_mask import TransferMask, expected_entry
from arclight.federated.protocol import Entry, Join, Manifest, Message, Update, WorkRequest
from arclight.federated.protocol.manifest import VERSION
from arclight.federated.settings import Checks, Federation

_SLACK = 1 << 20
"""Bytes beyond the computed size that a message or update may have."""
_ENTRY = 1 << 10
"""Upper bound of the bytes that a tensor takes in a manifest beside its name, or a client in a message of a secure sum."""
_VALUES, _NAME = 1000, 200
"""Metrics of a message, and characters of a metric's name."""
_LEAST_SEEN = 1e-12
"""Norms are not compared with a usual norm up to this."""
MAX_COUNTED = 1 << 53
"""Largest count of samples, tokens and steps: float64 holds it exactly, and sums over all clients and rounds stay finite."""
_LONGEST = 1e10
"""Seconds of one round's training."""
LARGEST_METRIC = 1e250
"""Sums of such values over all samples of all clients are still finite."""
_LONGEST_NAME = 200
_FASTEST = 1e9
"""Optimizer steps per second: more than any machine does."""


@dataclass(frozen=True, kw_only=True)
class ExpectedUpdate:
    """All that an update must match, as the server requested it of its client."""

    base: Manifest
    """The weights that the client began with."""
    weights: Mapping[str, torch.Tensor]
    """These, by key; read only where their values are needed."""
    transfer_mask: TransferMask
    """What the client may send of them; see `arclight.federated.masks`."""
    form: str = "delta"
    """"delta" or "weights"."""
    masked: bool = False
    """Whether values are masked integers of a secure sum, of which nothing can be checked."""
    round: int
    steps: int
    weigh_by: str
    max_weight: int | None = None
    """Largest weight in a secure sum."""

    def entry(self, key: str) -> Entry | None:
        """Return type and shape of a tensor that may be sent; None for one that may not."""
        return expected_entry(key, self.transfer_mask, self.round, self.base)


@dataclass(frozen=True, kw_only=True)
class ValidUpdate:
    """Norm and largest values of a valid update."""

    norm: float
    """L2 norm of its change of ``model/`` weights, in float64."""
    largest: dict[str, float | None]
    """Largest magnitudes by key, for `arclight.federated.aggregation.fixed_point.plan`."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Earlier accepted updates, with which a new one is compared."""

    norms: tuple[float, ...] = ()
    samples_per_step: tuple[float, ...] = ()
    tokens_per_step: tuple[float, ...] = ()


def validate_message(message: Message) -> None:
    """Raise ProtocolError, with one sentence for the node, for impossible names and numbers."""
    table = {one.name: getattr(message, one.name) for one in fields(message)}
    for what in ("node", "session", "client", "process"):
        if what in table:
            _check_name(what, table[what])
    if isinstance(message, Join):
        if not message.node:
            raise ProtocolError("a node joins under a name: got none")
        for client in message.clients:
            _check_name("client", client)
        if len(set(message.clients)) < len(message.clients):  # each may upload as much as an update takes
            raise ProtocolError(f"node {message.node!r} names a client twice: it joins once for each of its clients")
        speed = message.steps_per_second
        if speed is not None and not 0 < speed <= _FASTEST:
            raise ProtocolError(
                f"node {message.node!r} says steps_per_second = {speed:g}: a speed is positive and at most {_FASTEST:g}"
            )
    if isinstance(message, Update) and message.manifest.version != VERSION:  # nobody could read it again
        raise ProtocolError(
            f"an update's manifest is of version {message.manifest.version}, this side speaks {VERSION}: install the same arclight"
        )
    if isinstance(message, WorkRequest) and not math.isfinite(message.hold_s):
        raise ProtocolError(
            f"node {message.node!r} asks for an answer within {message.hold_s} seconds: give a finite time"
        )


def _check_name(what: str, name: str) -> None:
    """Check that a name is short and printable, for logs, tables and digests of paths."""
    if len(name) > _LONGEST_NAME:
        raise ProtocolError(f"the name of a {what} has at most {_LONGEST_NAME} characters, got {len(name):,}")
    if not name.isprintable():
        raise ProtocolError(f"the name of a {what} is of printable characters, got {name!r}")


def validate_update(
    update: Update, expected: ExpectedUpdate, seen: Baseline, limits: Checks, store: BlobStore
) -> ValidUpdate:
    """Validate all of an update. Raises RefusedError with the reason."""
    who = f"the update of {update.client} for round {update.round}"
    if update.manifest.kind != "update" or update.manifest.base not in (None, expected.base.digest):
        raise RefusedError("stale", f"{who} is not a change of the weights that it was asked to begin from")
    _check_numbers(who, update, expected, seen, limits)
    weight = {"samples": update.samples, "tokens": update.tokens, "equal": 1}[expected.weigh_by]
    if expected.max_weight is not None and weight > expected.max_weight:
        raise RefusedError(
            "weight",
            f"{who} says {expected.weigh_by} = {weight:,}, and a secure sum weighs up to {expected.max_weight:,} (secure.max_weight)",
        )
    _check_layout(who, update, expected, limits)
    if expected.masked:
        return _check_masked(who, update, store)
    try:
        tensors = LazyTensors(update.manifest, store)
        measured = measure(update.client, tensors)
        norm = _norm_of_change(tensors, expected) if expected.form == "weights" else measured.norm()
    except RefusedError:
        raise
    except (FederatedError, FileNotFoundError) as error:
        raise RefusedError("damaged", f"{who}: {error}") from error
    _check_norm(who, norm, expected, seen, limits)
    return ValidUpdate(norm=norm, largest=measured.largest)


def _check_masked(who: str, update: Update, store: BlobStore) -> ValidUpdate:
    """Check masked values: all there is to check is that they are complete."""
    if not update.secure:
        raise RefusedError("wrong_names", f"{who} is not masked: this run takes secure sums only")
    try:
        open_manifest(update.manifest, store)
    except (FederatedError, FileNotFoundError) as error:
        raise RefusedError("damaged", f"{who}: {error}") from error
    return ValidUpdate(norm=0.0, largest=dict.fromkeys(update.manifest.tensors))


def _check_numbers(who: str, update: Update, expected: ExpectedUpdate, seen: Baseline, limits: Checks) -> None:
    numbers = {"samples": update.samples, "tokens": update.tokens, "steps": update.steps}
    if wrong := [name for name, value in numbers.items() if not 0 <= value <= MAX_COUNTED]:
        raise RefusedError(
            "weight",
            f"{who} says {wrong[0]} = {numbers[wrong[0]]}: a count is not negative and at most {MAX_COUNTED:,}",
        )
    if expected.weigh_by != "equal" and numbers[expected.weigh_by] < 1:
        raise RefusedError("weight", f"{who} says {expected.weigh_by} = 0: by these it is to be weighed")
    if update.steps > expected.steps or (update.steps < 1 and update.samples):
        raise RefusedError("weight", f"{who} says {update.steps} steps: {expected.steps} were asked for")
    if not 0 <= update.seconds <= _LONGEST:
        raise RefusedError("weight", f"{who} says that it took {update.seconds} seconds")
    if (problem := too_many_metrics(update.metrics)) is not None:
        raise RefusedError("too_large", f"{who} {problem}")
    if wrong := [name for name, value in update.metrics.items() if not abs(value) <= LARGEST_METRIC]:
        raise RefusedError(
            "not_finite", f"{who} logs {wrong[0]} = {update.metrics[wrong[0]]}: its training has gone wrong"
        )
    for name, before in (("samples", seen.samples_per_step), ("tokens", seen.tokens_per_step)):
        each = numbers[name] / max(update.steps, 1)
        usual = median_low(before) if before else 0.0
        if limits.weight_times and usual > 0 and each > limits.weight_times * usual:
            raise RefusedError(
                "weight",
                f"{who} says {each:,.0f} {name} per step, {each / usual:,.0f} times the usual {usual:,.0f} "
                f"(checks.weight_times allows {limits.weight_times:g}): it would outweigh all others",
            )


def too_many_metrics(metrics: Mapping[str, float]) -> str | None:
    """Return the problem of metrics that would fill the journal; None if there is none."""
    if len(metrics) > _VALUES:
        return f"logs {len(metrics):,} values: {_VALUES:,} are taken"
    if long := [name for name in metrics if len(name) > _NAME]:
        return f"logs a value whose name has {len(long[0]):,} characters: {_NAME} are taken"
    return None


def _check_layout(who: str, update: Update, expected: ExpectedUpdate, limits: Checks) -> None:
    given = update.manifest.tensors
    if strange := sorted(key for key in given if expected.entry(key) is None):
        raise RefusedError(
            "wrong_names", f"{who} has {strange[0]}, which was not asked for ({len(strange)} such tensors)"
        )
    if not given:
        raise RefusedError("wrong_names", f"{who} has no tensor")
    whole = 0
    for key, entry in given.items():
        base = expected.entry(key)
        assert base is not None
        if tuple(entry.shape) != tuple(base.shape):
            raise RefusedError("wrong_shape", f"{who}: {key} is of shape {list(entry.shape)}, not {list(base.shape)}")
        if expected.masked:
            fits = entry.dtype == "I64" and entry.codec == "raw" and DTYPES[base.dtype].is_floating_point
        else:
            fits = _fits(DTYPES.get(entry.dtype), DTYPES[base.dtype], expected.form)
        if not fits:
            raise RefusedError("wrong_shape", f"{who}: {key} is of type {entry.dtype}, not {base.dtype}")
        whole += _bytes_of(base)
    most = int(limits.bytes_times * whole) + _SLACK
    if update.manifest.size > most:
        raise RefusedError(
            "too_large", f"{who} has {update.manifest.size:,} bytes; {most:,} are allowed (checks.bytes_times)"
        )


def most_bytes(weights: Manifest, federation: Federation) -> int:
    """Return the bytes of the largest update that a run accepts."""
    whole = sum(_bytes_of(entry) for key, entry in weights.tensors.items() if key.startswith("model/"))
    return int(federation.checks.bytes_times * whole * (1 + len(federation.moments))) + _SLACK


def largest_message(weights: Manifest, federation: Federation, transfer_mask: TransferMask, per_round: int) -> int:
    """Return the size in bytes of a node's largest message.

    It is an update's manifest, or a client's part in a secure sum.
    """
    parts = {
        key: entry.shape[0] if entry.shape and transfer_mask.is_stack(key) else 1
        for key, entry in weights.tensors.items()
    }
    named = sum(count * (len(key) + _ENTRY) for key, count in parts.items()) * (1 + len(federation.moments))
    return named + (per_round * _ENTRY if federation.secure is not None else 0) + _SLACK


def _bytes_of(entry: Entry) -> int:
    return math.prod(entry.shape) * max(4, DTYPES[entry.dtype].itemsize)


def _fits(given: torch.dtype | None, weight: torch.dtype, form: str) -> bool:
    """Return True if a tensor of this type may be sent for a weight.

    Changes may be of any floating point type.
    """
    change = given is not None and given.is_floating_point and weight.is_floating_point and form == "delta"
    return given == weight or change


def _norm_of_change(tensors: Mapping[str, torch.Tensor], expected: ExpectedUpdate) -> float:
    """Return the norm of the change of weights that were sent whole, one tensor at a time."""
    squares, weights = [], ExpertParts(expected.weights)
    for key in tensors:
        entry = expected.entry(key)
        if key.startswith("model/") and entry is not None and DTYPES[entry.dtype].is_floating_point:
            change = tensors[key].to(torch.float64) - weights[key]
            squares.append(float(change.square_().sum()))
    return math.sqrt(math.fsum(squares))


def _check_norm(who: str, norm: float, expected: ExpectedUpdate, seen: Baseline, limits: Checks) -> None:
    if not limits.norm_times:
        return
    if seen.norms:
        usual, of = median(seen.norms), "the median of those accepted before"
    else:
        usual, of = norm_of(expected.weights), "the weights' own, as nothing has been accepted yet"
    if usual > _LEAST_SEEN and norm > limits.norm_times * usual:
        raise RefusedError(
            "too_large",
            f"{who} has a norm of {norm:.4g}, {norm / usual:.4g} times {of} ({usual:.4g}); checks.norm_times allows "
            f"{limits.norm_times:g}",
        )


def norm_of(weights: Mapping[str, torch.Tensor]) -> float:
    """Return the L2 norm of the ``model/`` weights, in float64."""
    found = (weights[key] for key in weights if key.startswith("model/"))
    return math.sqrt(math.fsum(float(t.to(torch.float64).square().sum()) for t in found if t.is_floating_point()))
