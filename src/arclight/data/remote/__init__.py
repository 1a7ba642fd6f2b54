"""Token shards at an address (``https://``, ``s3://``, any of fsspec), read in blocks through a bounded local folder.

In: the address of a corpus; out: `remote_shards.RemoteTokenShards`, which read like those on disk. `ranges` requests ranges of
files and retries after lost connections, `block_folder` keeps verified blocks on the local disk, `block_reader` prefetches them
on threads. Open ``remote_shards`` first.
"""
