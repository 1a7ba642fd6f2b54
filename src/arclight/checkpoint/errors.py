"""Define the error of checkpoints.

``checkpoint`` raises it, ``federated`` catches it; `CheckpointError` is public in ``arclight.checkpoint``. A message names the file and
the remedy.
"""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, read or trusted; names the file and the remedy."""
