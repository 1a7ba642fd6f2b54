"""A manifest's tensors as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.opening import open_manifest
from arclight.federated.codecs.encoding import decode
from arclight.federated.protocol import Manifest


class Decoded(Mapping[str, torch.Tensor]):
    """A manifest's tensors as values: each is read and decoded when it is asked for, and not kept.

    Those that travelled as they are come as `StoredTensor`, which is read in parts.
    """

    def __init__(self, manifest: Manifest, store: BlobStore) -> None:
        self._manifest, self._opened = manifest, open_manifest(manifest, store)

    def __getitem__(self, key: str) -> torch.Tensor:
        if self._manifest.tensors[key].codec == "raw":
            return self._opened.stored(key)
        return decode(key, self._opened.read(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.tensors)

    def __len__(self) -> int:
        return len(self._manifest.tensors)
