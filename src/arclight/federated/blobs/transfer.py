"""Several blobs from one store to another, a few at a time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.store import BlobStore

_AT_ONCE = 4


def transfer(digests: Iterable[str], source: BlobStore, target: BlobStore) -> None:
    """Put the blobs that ``target`` does not have yet, and give back the room that copies on the way took.

    All are tried; then the first error is raised: BlobError, LinkError, OSError (ENOSPC) as the stores raise them.
    """

    def one(digest: str) -> None:
        if target.size(digest) is None:
            file = source.file(digest)  # verified
            target.adopt(digest, file) if isinstance(target, FolderStore) else target.put(digest, file)
        source.forget(digest)
        target.forget(digest)

    if len(wanted := list(digests)) == 1:
        one(wanted[0])
        return
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="arclight-transfer") as pool:
        done = [pool.submit(one, digest) for digest in wanted]
    for transferred in done:
        transferred.result()
