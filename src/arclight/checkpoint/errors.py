"""Define the error of checkpoints.

``checkpoint`` raises it; the Trainer, ``federated`` and the commands catch it. It is public in ``arclight.checkpoint`` and stays a
ValueError.
"""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, read or trusted; names the file and the remedy."""
