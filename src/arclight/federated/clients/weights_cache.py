"""Fetch the weights that a node's orders start from, and keep them while a job needs them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Set
from pathlib import Path

from arclight.federated.blobs.blob_store import BlobStore, check_digest
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.codecs.delta_chain import WeightsReplica
from arclight.federated.protocol import Evaluate, Fit


class WeightsCache:
    """Fetch weights once for all jobs that start from them, each into a folder of its own.

    Used by one thread; executors only read what it gave them.
    """

    def __init__(self, folder: Path, remote: BlobStore) -> None:
        self._folder = folder / "bases"
        shutil.rmtree(self._folder, ignore_errors=True)  # a killed process's: its orders come again
        self._here = FolderStore(folder / "weights", durable="none")
        self._replica = WeightsReplica(self._here, remote)

    def fetch(self, order: Fit | Evaluate, needed: Set[str], wanted: Callable[[], None]) -> FolderStore:
        """Return the files of the order's weights, fetched if need be.

        needed: digests of weights that stay; others are removed before.

        wanted: raises where the order has been withdrawn meanwhile. Raises BlobError, LinkError as `WeightsReplica.take`.
        """
        self.tidy(needed)
        store = FolderStore(self._folder / check_digest(order.base), durable="none")
        if any(store.size(digest) is None for digest in order.weights.blobs):
            self._replica.fetch(order.weights, order.changes, wanted)
            for digest in order.weights.blobs:
                store.adopt(digest, self._here.file(digest))
        return store

    def tidy(self, needed: Set[str]) -> None:
        """Remove weights that are neither ``needed`` nor the newest.

        Removing large files takes a while: call it while nobody waits.
        """
        for former in self._folder.iterdir() if self._folder.is_dir() else ():
            if former.name not in needed:
                shutil.rmtree(former, ignore_errors=True)
        self._replica.tidy()
