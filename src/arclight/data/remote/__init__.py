"""Read token shards at an address in blocks, cached in a bounded local folder.

In: the address of a corpus (``https://``, ``s3://`` or any other of fsspec), from ``text.data`` or ``arclight data``; out:
`remote_shards.RemoteTokenShards`, which read like those on disk. `ranges` requests ranges of
files and retries after lost connections, `block_folder` keeps verified blocks on the local disk, `block_reader` prefetches them
on threads. Open ``remote_shards`` first.
"""
