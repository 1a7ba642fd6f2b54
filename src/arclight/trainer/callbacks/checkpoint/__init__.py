"""Callbacks that save checkpoints. Open ``model_checkpoint`` first: when to save; ``history`` plans what to write and what to delete, ``file_ops`` does it."""
