"""Apply a plan to a model in place: float8, layers, checkpointing, compile, FSDP, init.

``parallelize.py`` is that order and comes first; ``float8``, ``activation_checkpoint``, ``compile`` and ``fsdp`` are its steps, beside those of
``parallel.layers`` and `deterministic_init`.
"""
