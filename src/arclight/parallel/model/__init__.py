"""Apply a plan to a model in place: float8, layers, checkpointing, compile, FSDP, init.

``parallelize.py`` is that order and comes first; each other file is one of its steps, such as ``activation_checkpoint``, ``compile`` and
``fsdp``.
"""
