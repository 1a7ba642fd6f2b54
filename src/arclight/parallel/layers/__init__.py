"""Cut the layers of a model over processes: tensor, context and expert parallelism.

Modules declare how they may be cut (a ``sharding`` table, ``context`` and ``attend``, ``dispatcher``); each file here reads one kind of
declaration, puts exchanges into the module, and makes its parameters shards. Open ``tensor_parallel.py`` first.
"""
