"""Transfer blobs from one store to another, a few at a time.

`reporter` sends a node's updates by it, `delta_chain` fetches weights. What is there already is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from arclight.federated.blobs.blob_store import BlobStore
from arclight.federated.blobs.folder import FolderStore

_THREADS = 4


def transfer(
    digests: Iterable[str], source: BlobStore, target: BlobStore, wanted: Callable[[], None] = lambda: None
) -> None:
    """Put the blobs that ``target`` lacks, and free copies that were made on the way.

    All are tried; then the first error is raised: BlobError, LinkError, OSError (ENOSPC) as the stores raise them, and what
    ``wanted`` does, which is called before each.
    """

    def one(digest: str) -> None:
        wanted()
        if not isinstance(target, FolderStore):
            target.put(digest, source.file(digest))  # which asks first whether it is there
        elif target.size(digest) is None:
            target.adopt(digest, source.file(digest))  # verified
        source.forget(digest)
        target.forget(digest)

    if len(names := list(digests)) == 1:
        one(names[0])
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="arclight-transfer") as pool:
        done = [pool.submit(one, digest) for digest in names]
    for transferred in done:
        transferred.result()
