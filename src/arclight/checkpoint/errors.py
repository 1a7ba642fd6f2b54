"""Define the error of checkpoints."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, read or trusted; names the file and the remedy."""
