"""Save and restore a Trainer's state.

In: its state; out: checkpoint folders or files, and the state again.

Open ``state`` first: the dictionary that a checkpoint holds. ``resume`` resolves ``ckpt_path``, ``loading`` reads weights, ``named_state``
exchanges full tensors by name, ``launch_results`` brings spawned workers' state back.
"""
