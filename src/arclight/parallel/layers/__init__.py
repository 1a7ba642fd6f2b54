"""Shard the layers of a model over processes: tensor, context and expert parallelism.

Modules declare how they may be sharded (a ``sharding`` table, ``context`` and ``attend``, ``dispatcher``); each file here reads one kind of
declaration, adds communication to the module, and shards its parameters: ``tensor_parallel`` of linear maps, ``context_parallel`` of
sequences, ``expert_parallel`` of experts, whose rows ``permute_rows`` moves. `parallel.model.parallelize` calls them. Open
``tensor_parallel.py`` first.
"""
