"""Encode weights for download: deltas for nodes with a recent round, all weights for others.

The server keeps the weights *as clients see them*. With a lossy codec they trail behind the server's own:
each change is encode(own - seen), and seen becomes seen + decode(change). The error of a change is thereby in the
next difference, which is error feedback without a stored residual (EF21, Richtarik et al. 2021). Server and nodes apply
changes by the same arithmetic and write the result into the same blobs, so that its digest proves them equal.

`server.published_weights` extends a `DeltaChain` by each round (`extend_chain`); a node (`clients.node`) fetches by a `WeightsReplica`. Chains are
stored on the server and sent in orders, so arithmetic and order of tensors stay.

In a manifest of kind "delta", tensors under a lossy codec are added, raw ones are the new values; what it lacks stays as it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace

import torch

from arclight.checkpoint.tensorfile import as_bytes
from arclight.federated.blobs.blob_store import BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import Encoded, LocalStore, ManifestReader, open_manifest, write_blobs
from arclight.federated.blobs.transfer import transfer
from arclight.federated.codecs.encoding import decode, encode, is_sent_raw
from arclight.federated.codecs.settings import Codec, Lossy, Raw
from arclight.federated.errors import BlobError, ProtocolError
from arclight.federated.protocol import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeltaChain:
    """Weights as clients see them, and the deltas that lead to them from older ones.

    Stored as JSON in the server's ``chains/<round>.json``; of use only while its blobs are kept.
    """

    weights: Manifest
    """All weights, as clients see them."""
    changes: tuple[Manifest, ...] = ()
    """Oldest first: each goes from its ``base`` to the next one's, the last to ``weights``."""

    @property
    def blobs(self) -> set[str]:
        """Return the digests of all blobs that nodes may ask for."""
        return {digest for manifest in (self.weights, *self.changes) for digest in manifest.blobs}

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> DeltaChain:
        """Invert `to_json`. Raises ProtocolError."""
        try:
            table = json.loads(text)
            weights, changes = table["weights"], table["changes"]
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"this is not a chain of changes: {error!r}") from error
        return cls(weights=Manifest.from_dict(weights), changes=tuple(Manifest.from_dict(one) for one in changes))


def extend_chain(
    chain: DeltaChain | None, weights: Manifest, codec: Codec, longest: int, store: LocalStore
) -> DeltaChain:
    """Extend the chain by one delta to the server's new ``weights`` (whole, in ``store``).

    At most ``longest`` changes are kept; 0 keeps none, so that all see the weights themselves. If nothing has changed, the chain is returned
    as it is. A chain without deltas is returned for other names, shapes or dtypes than before, and if `Raw` would send more than
    half of the bytes again (nodes then fetch the weights' own blobs). Tensor by tensor; the same again after a crash in between.
    """
    if chain is None or longest < 1 or not _alike(chain.weights, weights):
        return DeltaChain(weights=weights)
    seen, own = open_manifest(chain.weights, store), open_manifest(weights, store)
    changed = [key for key in sorted(own) if not _same(own[key].parts[""], seen[key].parts[""])]
    if not changed:
        return chain
    if isinstance(codec, Raw) and 2 * sum(own[key].bytes for key in changed) > sum(own[key].bytes for key in own):
        return DeltaChain(weights=weights)
    encoded = ((key, encode_change(key, own[key].parts[""], seen[key].parts[""], codec)) for key in changed)
    delta = write_blobs(encoded, store, kind="delta", base=chain.weights.digest)
    after = write_blobs(_changed(seen, [open_manifest(delta, store)]), store, kind="weights")
    return DeltaChain(weights=after, changes=(*chain.changes, delta)[-longest:])


def encode_change(key: str, weight: torch.Tensor, seen: torch.Tensor, codec: Codec) -> Encoded:
    """Encode the change from ``seen`` to ``weight``.

    Local moments go raw, whatever the codec, and so do tensors that `is_sent_raw` leaves unencoded.
    """
    if not isinstance(codec, Lossy) or is_sent_raw(weight, codec) or not key.startswith("model/"):
        return encode(key, weight, Raw())[0]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return encode(key, weight.to(wide) - seen.to(wide), replace(codec, feedback=0.0))[0]


def apply_change(key: str, seen: torch.Tensor, delta: Encoded) -> torch.Tensor:
    """Apply a change to ``seen``. Raises BlobError for one of another tensor."""
    value = decode(key, delta)
    if value.shape != seen.shape or (delta.codec == "raw" and value.dtype != seen.dtype):
        raise BlobError(
            f"a change of {key} is {list(value.shape)} of {value.dtype}, it is {list(seen.shape)} of {seen.dtype}"
        )
    if delta.codec == "raw":
        return value
    wide = torch.promote_types(seen.dtype, torch.float32)
    return (seen.to(wide) + value.to(wide)).to(seen.dtype)


class WeightsReplica:
    """Keep the newest weights of a node as blobs in a store that outlives the process.

    store: for nothing else: `tidy` removes what is no longer needed. remote: where the server's blobs are.
    """

    def __init__(self, store: FolderStore, remote: BlobStore) -> None:
        self._store, self._remote = store, remote
        self._needed: Set[str] | None = None

    def fetch(
        self, weights: Manifest, changes: Sequence[Manifest] = (), wanted: Callable[[], None] = lambda: None
    ) -> ManifestReader:
        """Return the tensors of ``weights``, by the shortest chain of deltas, or downloaded whole.

        wanted: called before each blob that is fetched whole; what it raises ends that. Raises BlobError if blobs cannot be
        fetched or are not what their manifests say.
        """
        digest = weights.digest
        if self._known(digest) is None:
            route = self._route(weights, changes)
            if not route or not self._follow(route, digest):
                transfer(weights.blobs, self._remote, self._store, wanted)
            self._store.put(digest, weights.to_json().encode())
        self._needed = {digest, *weights.blobs}
        return open_manifest(weights, self._store)

    def tidy(self) -> None:
        """Remove blobs that are not of the weights fetched last.

        Apart from `fetch`, as removing a large file takes its time.
        """
        if self._needed is not None:
            for other in set(self._store) - self._needed:
                self._store.remove(other)

    def _known(self, digest: str) -> Manifest | None:
        """Return the manifest with that digest, if it and all of its blobs are here."""
        if self._store.size(digest) is None:
            return None
        manifest = Manifest.from_json(b"".join(self._store.read(digest)))
        return manifest if all(self._store.size(blob) == size for blob, size in manifest.blobs.items()) else None

    def _route(self, weights: Manifest, changes: Sequence[Manifest]) -> Sequence[Manifest]:
        """Return the deltas to apply, oldest first.

        Empty if the blobs of the weights that are missing here have fewer bytes, or if no base is here.
        """
        lacking = sum(size for blob, size in weights.blobs.items() if self._store.size(blob) is None)
        for first in reversed(range(len(changes))):
            if self._known(str(changes[first].base)) is not None:
                route = changes[first:]
                return route if sum(one.size for one in route) < lacking else ()
        return ()

    def _follow(self, route: Sequence[Manifest], digest: str) -> bool:
        """Apply deltas to reach ``digest``; False, and a warning, if other weights come of it."""
        held = self._known(str(route[0].base))
        assert held is not None  # the route begins with what is here
        manifests = [open_manifest(one, self._remote) for one in route]
        after = write_blobs(_changed(open_manifest(held, self._store), manifests), self._store, kind="weights")
        for blob in {blob for one in route for blob in one.blobs}:
            self._remote.forget(blob)
        if after.digest == digest:
            return True
        log.warning("changes led to weights %s, not to %s: they are fetched whole", after.digest[:12], digest[:12])
        return False


def _changed(
    seen: Mapping[str, Encoded], deltas: Sequence[Mapping[str, Encoded]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors after some deltas, by name.

    The same order, and so the same blobs, wherever this is done.
    """
    if strange := sorted({key for one in deltas for key in one} - set(seen)):
        raise BlobError(f"a change names {strange[0]}, which is not among the weights ({len(strange)} such tensors)")
    for key in sorted(seen):
        value = seen[key].parts[""]
        for one in deltas:
            if key in one:
                value = apply_change(key, value, one[key])
        yield key, value


def _alike(one: Manifest, other: Manifest) -> bool:
    def layout(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {key: (entry.dtype, entry.shape) for key, entry in manifest.tensors.items()}

    return layout(one) == layout(other)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bytes(one), as_bytes(other))
