"""Publish the weights of recent rounds to clients; delete blobs that no round references.

`server_run` makes one `PublishedWeights` and calls ``publish`` after each round, ``restore`` after a restart and ``collect_garbage``;
`service` looks up the weights of orders. A resumed run must find the manifest digests of its journal: ``chains/<round>.json`` stays
readable, and blobs that are written again must have the same bytes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from arclight.checkpoint.tensorfile import DTYPES
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.aggregation.strategy_step import plain
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.codecs.delta_chain import DeltaChain, extend_chain
from arclight.federated.codecs.settings import Raw
from arclight.federated.errors import BlobError, FederatedError
from arclight.federated.masks.settings import matches
from arclight.federated.masks.transfer_mask import MODEL
from arclight.federated.protocol import Manifest, digest_of
from arclight.federated.rounds.store import Rounds
from arclight.federated.settings import Federation

ORPHAN_S = 3600.0
"""Seconds for which an unreferenced blob may be part of an update that is still being uploaded."""
KEPT_SHARE = 1 / 8
"""Tensors that clients keep get blobs of their own if they are this share of the bytes or more: all weights are then written twice."""


@dataclass(frozen=True)
class Weights:
    """Weights of a round as clients decode them, lossy or not, and the server's own."""

    round: int
    chain: DeltaChain
    own: Manifest
    """The round's own weights, including tensors that each client initialises itself, which are not published."""

    @property
    def manifest(self) -> Manifest:
        return self.chain.weights

    @property
    def changes(self) -> tuple[Manifest, ...]:
        return self.chain.changes


class PublishedWeights:
    """Published weights by the digest of their manifest.

    Delta chains are kept in ``chains/<round>.json``.
    """

    def __init__(self, folder: Path, rounds: Rounds, blobs: FolderStore, federation: Federation) -> None:
        self._folder, self._rounds, self._blobs, self._federation = folder / "chains", rounds, blobs, federation
        self._weights: dict[str, Weights] = {}

    def all(self) -> list[Weights]:
        return list(self._weights.values())

    def known(self, base: str) -> Weights:
        """Return published weights. Raises BlobError for weights that are no longer kept."""
        found = self._weights.get(base)
        if found is None:
            raise BlobError(f"the weights {base[:12]} are no longer kept: request work again for newer ones")
        return found

    def publish(self, number: int, *, all_changed: bool = False) -> Weights:
        """Publish a round's weights as blobs, and append a link to the delta chain.

        Files are linked as blobs without reading them. Nodes are offered the blobs of the chain alone, so under a lossy codec
        the round's own files are not put into an object store. Tensors that each client initialises itself are left out; the others
        of the same file are then written as blobs of their own. If weights are sent whole, so are tensors that clients keep after the
        first round, if large (`KEPT_SHARE`): their blob stays the same, and nodes fetch it once.
        all_changed: every tensor differs from the round before, so that they need not be compared.
        """
        own = self._rounds.weights(number)
        had = {digest for digest in own.blobs if self._blobs.here.size(digest) is not None}
        offered = self._link_blobs(number, own)
        former = next((weights.chain for weights in self.all() if weights.round == number - 1), None)
        whole = isinstance(self._federation.down, Raw) and all_changed
        chain = (
            DeltaChain(weights=offered)
            if whole
            else extend_chain(former, offered, self._federation.down, self._federation.down_changes, self._blobs)
        )
        if chain.weights == own and (kept := self._kept_by_clients(own)):
            offered = self._split(number, own, kept)
            chain = DeltaChain(weights=offered)
        self._put(offered.blobs.keys() & chain.blobs)
        if chain.changes or chain.weights != own:
            replace_text(self._file(number), chain.to_json())
        found = self._offer(number, chain, own)
        # nodes get none of these: copies, and links, which would keep the round's files on the disk after the round is removed
        private = (own.blobs.keys() | offered.blobs.keys()) - had
        for digest in private.difference(*(weights.chain.blobs for weights in self.all())):
            self._blobs.here.remove(digest)
        return found

    def restore(self, number: int, base: str) -> Weights:
        """Publish a committed round's weights again after a restart.

        Raises FederatedError if the folder lacks them.
        """
        own, file = self._rounds.weights(number), self._file(number)
        if own.digest == base:  # with tensors that clients initialise themselves, as older versions published them
            chain = DeltaChain(weights=own)
            self._link_files(number, chain.blobs)
        elif file.exists():
            chain = DeltaChain.from_json(file.read_bytes())
            self._link_files(number, chain.blobs)
            if self._missing(chain):
                self._link_blobs(number, own)
            if self._missing(chain) and (kept := self._kept_by_clients(own)):
                self._split(number, own, kept)
        else:
            chain = DeltaChain(weights=self._link_blobs(number, own))
        self._put(chain.blobs)
        if chain.weights.digest != base:
            raise FederatedError(
                f"{self._rounds.path(number)} is not what the journal says was committed as round {number} "
                f"({chain.weights.digest[:12]}, not {base[:12]}): put the folder back, or fork a new run from an earlier round"
            )
        if lost := self._missing(chain):
            raise FederatedError(
                f"blob {lost[0][:12]} of the weights of round {number} is missing: put the folder back, or fork a new run from "
                "one of its rounds"
            )
        return self._offer(number, chain, own)

    def _missing(self, chain: DeltaChain) -> list[str]:
        return [digest for digest in chain.blobs if self._blobs.size(digest) is None]

    def collect_garbage(
        self,
        needed: Collection[str],
        done: Iterable[str],
        spooled: Iterable[str],
        uploading: Iterable[str],
        remove: Callable[[str], None],
    ) -> None:
        """Drop weights that are not ``needed``, and blobs that nothing references.

        Blobs of these weights, of ``done`` updates, and old unreferenced ones go through ``remove``.
        done, spooled: digests of updates' manifests; blobs of the latter are kept. uploading: blobs of updates that are being uploaded.
        """
        dropped = [self._weights.pop(digest) for digest in list(self._weights) if digest not in needed]
        deletable = {digest for weights in dropped for digest in weights.chain.blobs}
        referenced = {*uploading, *(digest for weights in self.all() for digest in weights.chain.blobs)}
        for manifests, blobs in ((done, deletable), (spooled, referenced)):
            for digest in manifests:
                blobs |= {digest, *self._blobs_of(digest)}
        old = time.time() - ORPHAN_S
        for digest in list(self._blobs):
            if digest not in referenced and (digest in deletable or self._written_at(digest) < old):
                remove(digest)
        self._prune_rounds()

    def _prune_rounds(self) -> None:
        """Remove old rounds, except incomplete ones, which a person may want to examine."""
        numbers, kept = self._rounds.numbers(), self._federation.keep_rounds
        offered = {weights.round for weights in self.all()}
        for number in numbers[:-kept] if kept else []:
            if number not in offered and not self._rounds.check_round(number).problems:
                self._rounds.remove(number)
                self._file(number).unlink(missing_ok=True)

    def _link_blobs(self, number: int, own: Manifest) -> Manifest:
        """Link a round's files as blobs; return the manifest without tensors clients initialise.

        The other tensors of a file with such tensors are written as blobs of their own.
        """
        left_out = self._initialised_by_clients(own)
        self._link_files(number, own.blobs.keys() - {own.tensors[key].blob for key in left_out})
        return self._write_without(number, own, left_out) if left_out else own

    def _split(self, number: int, own: Manifest, kept: Set[str]) -> Manifest:
        """Write a round's weights with ``kept`` tensors in blobs of their own; return the manifest."""
        rest, kept_once = (self._write_without(number, own, out) for out in (kept, own.tensors.keys() - kept))
        return Manifest(kind="weights", tensors=rest.tensors | kept_once.tensors, blobs=rest.blobs | kept_once.blobs)

    def _write_without(self, number: int, own: Manifest, left_out: Set[str]) -> Manifest:
        """Return the manifest of a round without tensors ``left_out``.

        The others of their files are written as blobs.
        """
        cut = {own.tensors[key].blob for key in left_out}
        stored = {MODEL + name: tensor for name, tensor in self._rounds.stored(number, "model").items()}
        stored |= self._rounds.stored(number, "moments")
        rest = [key for key, entry in own.tensors.items() if entry.blob in cut and key not in left_out]
        made = write_blobs(((key, plain(stored[key])) for key in rest), self._blobs.here, kind="weights")
        return Manifest(
            kind="weights",
            tensors={key: made.tensors.get(key, entry) for key, entry in own.tensors.items() if key not in left_out},
            blobs={**{blob: size for blob, size in own.blobs.items() if blob not in cut}, **made.blobs},
        )

    def _initialised_by_clients(self, own: Manifest) -> set[str]:
        return {key for key in own.tensors if self._federation.masks.is_client_initialised(key.partition("/")[2])}

    def _kept_by_clients(self, own: Manifest) -> set[str]:
        """Return the tensors that clients keep after the first round, if worth a separate blob.

        Lossy chains need no such blobs: a node's first weights come whole, and then changes, of which these are none.
        """
        masks = self._federation.masks
        if not isinstance(self._federation.down, Raw) or masks.personal_from != "server":
            return set()
        kept = {key for key in own.tensors if matches(key.partition("/")[2], masks.personal)}
        size = {key: math.prod(entry.shape) * DTYPES[entry.dtype].itemsize for key, entry in own.tensors.items()}
        return kept if sum(map(size.__getitem__, kept)) >= KEPT_SHARE * sum(size.values()) else set()

    def _link_files(self, number: int, blobs: Collection[str]) -> None:
        for entry, record in self._rounds.open(number).files.items():
            if record.sha256 in blobs:
                self._blobs.here.adopt(record.sha256, self._rounds.path(number) / entry)

    def _put(self, blobs: Iterable[str]) -> None:
        """Put blobs into the store of nodes, if that is not this machine's folder."""
        for digest in blobs:
            if self._blobs.here.size(digest) is not None:
                self._blobs.put(digest, self._blobs.here.file(digest))

    def _offer(self, number: int, chain: DeltaChain, own: Manifest) -> Weights:
        made = self._weights[chain.weights.digest] = Weights(number, chain, own)
        return made

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:06d}.json"

    def _blobs_of(self, digest: str) -> Iterable[str]:
        """Return the blobs of a manifest; none if it is deleted already."""
        try:
            return manifest_of(self._blobs, digest).blobs
        except FederatedError:
            return ()

    def _written_at(self, digest: str) -> float:
        """Return when a blob came here, in seconds since the epoch; 0 if it is gone."""
        try:
            status = os.stat(self._blobs.file(digest))
            return max(status.st_mtime, status.st_ctime)  # a file that was linked here counts from its linking
        except (BlobError, FileNotFoundError):
            return 0.0


def manifest_of(blobs: FolderStore, digest: str) -> Manifest:
    """Read a manifest that is kept as a blob. Raises BlobError if it is missing or damaged."""
    text = blobs.file(digest).read_bytes()
    if digest_of(text) != digest:
        raise BlobError(
            f"the manifest {digest[:12]} was changed on the server's disk: check the disk, and fork from an intact round"
        )
    return Manifest.from_json(text)
