"""Apply a plan to a model in place, in one order: float8, layers, activation checkpoints, compilation, FSDP, first values.

``parallelize.py`` is that order and comes first; each other file is one of its steps, such as ``activation_checkpoint``, ``compile`` and
``fsdp``.
"""
