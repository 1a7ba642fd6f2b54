"""Save and load sharded state.

In: DTensors on every rank; out: one folder, which opens on any number of ranks.

Open ``plan`` first: which rank writes which part. ``writer`` writes parts and manifest, ``reader`` opens a checkpoint so that each rank
reads what it keeps.
"""
