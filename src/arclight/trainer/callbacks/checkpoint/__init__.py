"""Save checkpoints: when, under which name, and which of them to keep.

In: the end of a step, epoch or validation; out: files, and the history of kept checkpoints.

Open ``model_checkpoint`` first: when to save. ``history`` ranks, plans what to write and what to delete, and carries it out;
``file_ops`` names, copies and links checkpoints; ``on_exception_checkpoint`` saves when a fit fails.
"""
