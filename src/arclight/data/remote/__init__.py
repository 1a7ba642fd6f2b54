"""Token shards at an address (``https://``, ``s3://``, any of fsspec), read in blocks through a bounded local folder.

In: the address of a corpus; out: `remote_shards.RemoteTokenShards`, which read as those on disk. `ranges` asks for parts of files
and repeats what a connection lost, `block_folder` keeps verified blocks on the local disk, `block_reader` fetches them ahead of
need on threads. Open ``remote_shards`` first.
"""
