"""Checkpoints of sharded state: ``plan`` decides which rank writes what, ``writer`` writes, ``reader`` opens them on any number of processes."""
